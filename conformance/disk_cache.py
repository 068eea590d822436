"""What is kept on disk between runs, and locks that keep processes from doing the same work twice."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "CONFORMANCE_CACHE_DIR"


@functools.cache
def cache_dir() -> Path:
    """``CONFORMANCE_CACHE_DIR``, else a folder of the user's cache directory, else one of the temporary directory
    where that is not writable. Everything in it can be deleted at any time."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = Path(os.environ.get(VARIABLE) or home / "moe-kernel-conformance")
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        directory = Path(tempfile.gettempdir()) / f"moe-kernel-conformance-{os.getuid()}"
        directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def hold(directory: Path, name: str, wait: bool = True) -> Iterator[bool]:
    """Hold the lock ``name`` across threads and processes; yields False if it is taken and ``wait`` is false.

    The operating system releases it when its holder dies. Without working file locks (some network file systems) the
    answer is True: two processes may then do the same work, which costs time only.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
