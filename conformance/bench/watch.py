"""What happens to the card during a trial: throttling, and other processes on it. It is asked, and never set.

NVIDIA's management library is called directly: its command takes longer than a trial. Only queries are made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

# NVML's reasons for lowered clocks that make a figure no figure of the kernel's (nvml.h, clocks event reasons)
THROTTLED = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_LIBRARY = "libnvidia-ml.so.1"
_TOO_SMALL = 7  # NVML_ERROR_INSUFFICIENT_SIZE: the number of processes is told all the same


class Watch:
    """Watches nothing, and says why."""

    name = ""

    def __init__(self, note: str) -> None:
        self.note = note

    def marks(self) -> frozenset[str]:
        """What makes this moment unfit for a measurement; empty where nothing is known."""
        return frozenset()


class NvmlWatch(Watch):
    """Watches one card. ``ours``: processes of this run that may be on it."""

    name = "nvml"

    def __init__(self, reasons: Callable[[], int], processes: Callable[[], int], ours: int,
                 note: str = "") -> None:
        super().__init__(note)
        self._reasons, self._processes, self._ours = reasons, processes, ours

    def marks(self) -> frozenset[str]:
        active = self._reasons()
        found = {f"throttled: {words}" for bit, words in THROTTLED.items() if active & bit}
        if (there := self._processes()) > self._ours:
            found.add(f"shared: {there} processes are on the card, this run has {self._ours}")
        return frozenset(found)


def watch_of(uuid: str, ours: int) -> Watch:
    """A watch on the card with this UUID ("GPU-..."), or one that says why nothing is watched."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        _checked(library.nvmlInit_v2())
        handle = ctypes.c_void_p()
        _checked(library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)))
        _reasons(library, handle)
    except (OSError, AttributeError, RuntimeError) as error:
        return Watch(f"{_LIBRARY}: {error}")
    try:
        _processes(library, handle)
    except (AttributeError, RuntimeError) as error:
        return NvmlWatch(lambda: _reasons(library, handle), lambda: 0, ours, f"other processes cannot be seen: {error}")
    return NvmlWatch(lambda: _reasons(library, handle), lambda: _processes(library, handle), ours)


def _reasons(library: Any, handle: ctypes.c_void_p) -> int:
    found = ctypes.c_ulonglong()
    # the newer name where the library has it
    ask = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
    ask = ask or library.nvmlDeviceGetCurrentClocksThrottleReasons
    _checked(ask(handle, ctypes.byref(found)))
    return found.value


def _processes(library: Any, handle: ctypes.c_void_p) -> int:
    """How many processes have a context on the card; no room is given for what each of them is."""
    count = ctypes.c_uint(0)
    code = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), None)
    if code != _TOO_SMALL:
        _checked(code)
    return count.value


def _checked(code: int) -> None:
    if code:
        raise RuntimeError(f"answered with error {code}")
