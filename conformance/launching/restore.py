"""What a kernel may change for its whole process, put back after it, so that the next case does not see it.

Threads cannot be put back: those that a kernel leaves behind are noted, so that the process can end in spite of them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from conformance.launching.exit_guard import end_process

_left: list[threading.Thread] = []  # by kernels; Python waits for these before the process ends
_importing: list[threading.Thread] = []


class _Unclosable(io.TextIOBase):
    """Another text stream that a kernel cannot close: pytest goes on reading what was captured in it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def close(self) -> None:
        self.flush()

    def write(self, text: str) -> int:
        return int(self._stream.write(text))

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    @property
    def errors(self) -> str:  # type: ignore[override]
        return str(self._stream.errors)

    @property
    def buffer(self) -> Any:
        return self._stream.buffer


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Put back working directory, environment, standard streams, random generators and torch's threads.

    Settings of torch's arithmetic are put back by `torch_settings_kept`. The environment stays as it is when modules
    were imported meanwhile: libraries set variables for themselves then, once (tilelang says where its headers are).
    """
    directory, environment, modules = os.getcwd(), dict(os.environ), len(sys.modules)
    importing = imports_meanwhile()
    known, threads = set(threading.enumerate()), torch.get_num_threads()
    streams, generators = (sys.stdin, sys.stdout, sys.stderr), _generators()
    sys.stdout, sys.stderr = _Unclosable(sys.stdout), _Unclosable(sys.stderr)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        _left.extend(thread for thread in threading.enumerate() if thread not in known and not thread.daemon)
        os.chdir(directory)
        imported = importing or imports_meanwhile() or len(sys.modules) != modules
        if dict(os.environ) != environment and not imported:
            os.environ.clear()
            os.environ.update(environment)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for put_back in generators:
            with contextlib.suppress(RuntimeError):  # of a GPU that is lost
                put_back()


def import_meanwhile(act: Callable[[], object]) -> None:
    """Import in a thread what a case will need, in seconds, while the suite does something else. What goes wrong goes
    wrong again where it is needed."""

    def imports() -> None:
        with contextlib.suppress(Exception):
            act()

    _importing.append(threading.Thread(target=imports, name="import of what kernels need", daemon=True))
    _importing[-1].start()


def imports_meanwhile() -> bool:
    """Whether such a thread is at work."""
    return any(thread.is_alive() for thread in _importing)


def _generators() -> list[Callable[[], object]]:
    """What puts every random generator back to where it is now: else what a kernel draws would depend on the cases
    before it."""
    found: list[Callable[[], object]] = [
        functools.partial(random.setstate, random.getstate()),
        functools.partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        found.append(functools.partial(numpy.random.set_state, numpy.random.get_state()))
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            found.append(functools.partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state()))
    return found


def end_in_spite_of_threads(status: int, patience: float) -> None:
    """The run is over: end the process with ``status`` if threads that kernels left keep it alive for ``patience``
    seconds more. Those of a pool end by themselves."""
    if not any(thread.is_alive() for thread in _left):
        return

    def end() -> None:
        alive = [thread.name for thread in _left if thread.is_alive()]
        with contextlib.suppress(Exception):  # whatever state the streams are in
            print(f"kernels left {len(alive)} threads that do not end ({', '.join(alive[:3])}, ...); "
                  "the process is ended without them", file=sys.__stderr__, flush=True)
            print(end="", file=sys.__stdout__, flush=True)
        end_process(status)

    timer = threading.Timer(patience, end)
    timer.daemon = True
    timer.start()
