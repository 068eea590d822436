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
    if not (directory.is_dir() and os.access(directory, os.W_OK)):
        directory = Path(tempfile.gettempdir()) / f"moe-kernel-conformance-{os.getuid()}"
        directory.mkdir(parents=True, exist_ok=True)
    return directory


def keep(path: Path, text: str) -> None:
    """Write an entry whole or not at all, with its digest; with a full disk it is not kept."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(f"{_digest(text)}\n{text}", encoding="utf-8")
        os.replace(part, path)


def kept(path: Path) -> str | None:
    """What `keep` wrote; None when it is not there, or when a single byte of it has changed."""
    try:
        digest, _, text = path.read_bytes().decode("utf-8").partition("\n")
    except (OSError, ValueError):
        return None
    return text if digest == _digest(text) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@contextlib.contextmanager
def hold(directory: Path, name: str, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Hold the lock ``name`` across threads and processes; yields False if it is taken and ``wait`` is false.
    ``shared``: together with others that hold it so.

    The operating system releases it when its holder dies. Where no lock can be had (some network file systems, a full
    disk, another user's folder) the answer is True: two processes may then do the same work, which costs time only.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:32]
        file = open(directory / f"{digest}.lock", "w")  # noqa: SIM115 - closed below
    except OSError:
        yield True
        return
    with file:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(file, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
