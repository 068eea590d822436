"""Admission by memory: a worker starts a group of cases only when the GPU has room for it beside the others.

A ledger file, guarded by a lock that the operating system drops when its holder dies, lists what each process was
granted. An equal split per worker makes large cases fail that would fit alone; this lets small ones run beside
each other and large ones alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_RESERVE = 3 << 30  # the workers' CUDA contexts, and fragmentation
_CAPACITY = "capacity"


def _cuda_free() -> int:
    import torch

    return torch.cuda.mem_get_info()[0]


def _empty_cache() -> None:
    import torch

    torch.cuda.empty_cache()


def _cuda_reserved() -> int:
    import torch

    return torch.cuda.memory_reserved()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class Admission:
    """One process's view of the ledger at ``path``."""

    def __init__(
        self,
        path: Path,
        free: Callable[[], int] = _cuda_free,
        release_cache: Callable[[], None] = _empty_cache,
        reserved: Callable[[], int] = _cuda_reserved,
    ) -> None:
        self._path = path
        self._free = free
        self._release_cache = release_cache
        self._reserved = reserved
        self._granted = 0

    def acquire(self, need: int, patience: float = 600.0) -> None:
        """Wait until ``need`` bytes fit beside the other processes' grants. What was granted before is returned
        first, unless it is of a like size and was kept to: to give memory back and ask for it again takes longer than
        many a case. A process is always admitted when it is alone, so a case that would fit alone never starves."""
        if need <= self._granted <= 2 * need and self._reserved() <= self._granted:
            return
        self._release_cache()
        deadline = time.monotonic() + patience
        while True:
            with self._ledger() as grants:
                grants.pop(str(os.getpid()), None)
                others = {pid: size for pid, size in grants.items() if pid != _CAPACITY}
                free = self._free()
                if not others:  # nothing of ours is in use: what is free now is what we may share
                    grants[_CAPACITY] = free
                room = min(free, grants[_CAPACITY] - sum(others.values())) - _RESERVE
                if need <= room or not others or time.monotonic() > deadline:
                    grants[str(os.getpid())] = self._granted = need
                    return
            time.sleep(0.02)

    def release(self) -> None:
        """Return what was granted."""
        self._release_cache()
        self._granted = 0
        with self._ledger() as grants:
            grants.pop(str(os.getpid()), None)

    @contextmanager
    def _ledger(self) -> Iterator[dict[str, int]]:
        with open(self._path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            stored: dict[str, int] = json.loads(text) if text else {}
            grants = {pid: size for pid, size in stored.items() if pid == _CAPACITY or _alive(int(pid))}
            yield grants
            file.seek(0)
            file.truncate()
            file.write(json.dumps(grants))
            file.flush()
