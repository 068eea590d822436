"""What a kernel may change in torch for its whole process, put back after each of its runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

_KINDS = ("cpu", "cuda")


def _attributes(holder: Any, *names: str) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """How to get and set attributes of one of torch's objects; of a torch that lacks one there is nothing to keep."""
    return [(functools.partial(getattr, holder, name), functools.partial(setattr, holder, name))
            for name in names if hasattr(holder, name)]


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]


def _set_autocast(value: list[tuple[bool, torch.dtype]]) -> None:
    for kind, (enabled, low) in zip(_KINDS, value, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, low)


# What is compared with what it was, and set only where it differs: (get, set).
_COMPARED: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
     lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),  # the first call imports much
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_autocast, _set_autocast),
    *_attributes(torch.utils.deterministic, "fill_uninitialized_memory"),
    *_attributes(torch.backends, "fp32_precision"),
    *_attributes(torch.backends.cudnn, "enabled", "benchmark", "deterministic", "allow_tf32"),
    *_attributes(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction",
                 "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"),
]


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
    """Put back default dtype and device, TF32, determinism, grad and inference mode, autocast, modes that a kernel
    entered and did not leave, flushing of subnormals (which torch cannot be asked for: off)."""
    device, grad, precision = torch.get_default_device(), torch.is_grad_enabled(), _matmul_precision()
    before = [_asked(get) for get, _ in _COMPARED]
    try:
        with torch.no_grad(), _modes_left():
            yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device == torch.device("cpu") else device)
        torch.set_float32_matmul_precision(precision)
        for value, (get, put_back) in zip(before, _COMPARED, strict=True):
            if value is not None and _asked(get) != value:
                put_back(value)
        torch.set_grad_enabled(grad)
        torch.set_flush_denormal(False)  # loading a library built with -ffast-math turns it on


def _matmul_precision() -> str:
    """torch does not say it where its older and newer settings contradict each other, as a kernel's module may have
    left them."""
    with contextlib.suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return "highest"


def _asked(get: Callable[[], Any]) -> Any:
    """A setting, None where torch does not say."""
    with contextlib.suppress(RuntimeError):
        return get()
    return None
