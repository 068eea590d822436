"""What a kernel may change for its whole process, put back after it, so that the next case does not see it.

Threads cannot be put back: those that a kernel leaves behind are noted, so that the process can end in spite of them.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

_left: list[threading.Thread] = []  # by kernels; Python waits for these before the process ends


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
    """Put back working directory, environment, standard streams and torch's threads.

    Settings of torch's arithmetic are put back by `torch_settings_kept`. The environment stays as it is when modules
    were imported meanwhile: libraries set variables for themselves then, once (tilelang says where its headers are).
    """
    directory, environment, modules = os.getcwd(), dict(os.environ), len(sys.modules)
    known, threads = set(threading.enumerate()), torch.get_num_threads()
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Unclosable(sys.stdout), _Unclosable(sys.stderr)
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams
        _left.extend(thread for thread in threading.enumerate() if thread not in known and not thread.daemon)
        os.chdir(directory)
        if len(sys.modules) == modules and dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


@dataclass(frozen=True)
class Modes:
    """The modes that each call of torch passes through now."""

    functions: tuple[Any, ...]
    dispatch: int

    @classmethod
    def now(cls) -> Modes:
        return cls(tuple(overrides._get_current_function_mode_stack()),
                   len(_python_dispatch._get_current_dispatch_mode_stack()))

    def put_back(self) -> None:
        """Leave the modes that were entered since, and enter again those that were left."""
        if self == Modes.now():
            return
        while overrides._get_current_function_mode_stack():  # all: a default device is one, and stands at the bottom
            overrides._pop_mode()
        for mode in self.functions:
            overrides._push_mode(mode)
        while len(_python_dispatch._get_current_dispatch_mode_stack()) > self.dispatch:
            _python_dispatch._pop_mode()


@contextlib.contextmanager
def _modes_left() -> Iterator[None]:
    """Leave the modes that a kernel entered, before anything else: each call of torch would pass through them."""
    modes = Modes.now()
    try:
        yield
    finally:
        modes.put_back()


@contextlib.contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Put back what a kernel may change for the whole process: default dtype and device, TF32, determinism, grad mode,
    autocast, modes that it entered and did not leave, flushing of subnormals (which torch cannot be asked for: off)."""
    device = torch.get_default_device()
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    precision, grad = torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")}
    try:
        with torch.no_grad(), _modes_left():
            yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device == torch.device("cpu") else device)
        torch.set_default_dtype(dtype)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)  # the first call imports the compiler stack: a second
        torch.set_float32_matmul_precision(precision)
        torch.set_grad_enabled(grad)
        for kind, (enabled, low) in autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, low)
        torch.set_flush_denormal(False)  # loading a library built with -ffast-math turns it on


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
        os._exit(status)

    timer = threading.Timer(patience, end)
    timer.daemon = True
    timer.start()
