"""The memory of a device as one process of a run sees it: what is free, what it holds itself, its peak.

A GPU is asked through torch. The host's memory is what the system, the control group of a container and
``--memory-limit`` leave, whichever is least; a process is known there by its resident pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import ConformanceError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)", re.IGNORECASE)
# A worker without a case, and the controller: torch, TileLang, compiled kernels.
_WORKER, _CONTROLLER = 450 << 20, 300 << 20


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device. ``free``: for anybody to take. ``held``: by this process, what its allocator keeps included.
    ``release``: let the allocator give back what it keeps. ``restart``: forget the peak. ``peak``: the most that this
    process held since."""

    free: Callable[[], int]
    held: Callable[[], int]
    release: Callable[[], None]
    restart: Callable[[], None]
    peak: Callable[[], int]
    reserve: int = 0  # left alone: what processes take besides tensors, and fragmentation
    stretch: float = 1.0  # a group that is alone is tried when its estimate exceeds what is free by no more than this


def parse_bytes(flag: str, text: str) -> int:
    """``"24GB"``, ``"512MiB"`` in bytes. Raises ConformanceError that names ``flag``."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConformanceError(f"{flag} {text}: give a size such as 24GB, 512MB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def spelled(size: float) -> str:
    """A number of bytes for a reader."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{max(0.0, size) / 1e6:.1f} MB"


def cuda_memory(limit: int | None) -> DeviceMemory:
    """The first visible GPU. ``limit``: of what all processes together may take."""
    import torch

    def free() -> int:
        available, total = torch.cuda.mem_get_info()
        return available if limit is None else min(available, limit - (total - available))

    return DeviceMemory(free, torch.cuda.memory_reserved, torch.cuda.empty_cache,
                        torch.cuda.reset_peak_memory_stats, torch.cuda.max_memory_allocated, 3 << 30, 1.5)


def host_memory(limit: int | None, processes: Callable[[], Iterable[int]], workers: int = 0) -> DeviceMemory:
    """The host. ``limit``: of what ``processes``, those of this run, may hold together. ``workers``: how many there
    will be; some may not have begun. Too little memory raises nothing here, it ends processes: nothing is tried."""
    base = 0
    begun = _CONTROLLER + workers * _WORKER

    def free() -> int:
        left = [_from_meminfo("MemAvailable"), *_left_in_groups()]
        if limit is not None:
            left.append(limit - max(begun, resident(processes())))
        return min(left)

    def restart() -> None:
        nonlocal base
        with contextlib.suppress(OSError):  # not everywhere allowed: the peak is then that of the whole process
            Path("/proc/self/clear_refs").write_text("5")
        base = _status("self", "VmRSS")

    return DeviceMemory(free, lambda: max(0, _status("self", "VmRSS") - base), _trim, restart,
                        lambda: max(0, _status("self", "VmHWM") - base))


def workers_within(limit: int) -> int:
    """How many workers a memory limit of the host leaves room for, one at least."""
    return max(1, (limit - _CONTROLLER) // _WORKER)


def needed_by_run(workers: int, largest: int) -> int:
    """What a run with so many workers takes of the host, each on a case of ``largest`` bytes."""
    return _CONTROLLER + workers * (_WORKER + largest)


def resident(processes: Iterable[int]) -> int:
    """What processes hold together: pages of their own, and those of files (code), which they share, once."""
    own, files = 0, 0
    for pid in processes:
        own += _status(pid, "RssAnon") + _status(pid, "RssShmem")
        files = max(files, _status(pid, "RssFile"))
    return own + files


def family(parent: int) -> list[int]:
    """A process and those that it started."""
    found = [parent]
    for place in Path(f"/proc/{parent}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # just ended
            found += map(int, place.read_text().split())
    return found


def _status(pid: int | str, name: str) -> int:
    """A figure of /proc/PID/status in bytes, 0 where there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(name.encode() + b":"):
                return int(line.split()[1]) << 10
    return 0


def _from_meminfo(name: str) -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _left_in_groups() -> list[int]:
    """What the control group of this process, and those above it, may still take; none where there is no limit."""
    left: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top, most, used = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
                               if controllers else ("/sys/fs/cgroup", "memory.max", "memory.current"))
            group = Path(top + place)
            for folder in (group, *group.parents):
                if not str(folder).startswith(top):
                    break
                with contextlib.suppress(OSError, ValueError):  # not there, "max"
                    room = int((folder / most).read_text()) - int((folder / used).read_text())
                    left.append(room + _reclaimable(folder))
    return left


def _reclaimable(group: Path) -> int:
    """Cached files, which count as used until somebody needs the room."""
    with contextlib.suppress(OSError):
        for line in (group / "memory.stat").read_text().splitlines():
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


def _trim() -> None:
    """Let glibc give freed memory back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
