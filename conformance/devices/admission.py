"""Admission by memory: a worker starts a group of cases only when its device has room for it beside the others.

A ledger file, guarded by a lock that the operating system drops when its holder dies, lists what each process was
granted. An equal split per worker makes large cases fail that would fit alone; this lets small ones run beside
each other and large ones alone. The ledger also keeps by how much each operator's estimates were exceeded.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.devices.memory import DeviceMemory, spelled

_CAPACITY, _FACTORS, _FIRST = "capacity", "factors", "first"
_FAIR = 5.0  # seconds that one process waits before the others are no longer let in ahead of it
_SETTLE = 3.0  # seconds: what has just died, or been freed elsewhere, gives its memory back late
_PAUSE = 0.02
_MOST = 3.0  # times an estimate: a kernel that hoards memory must not keep others from running


@dataclass(frozen=True)
class Refused:
    """There is too little memory for a group even when nobody else of the run holds any."""

    need: int
    free: int

    def __str__(self) -> str:
        return f"needs {spelled(self.need)}, {spelled(self.free)} free"


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

    def __init__(self, path: Path | None, memory: DeviceMemory) -> None:
        """``path``: None for a process that shares its device with no other of the run."""
        self._path = path
        self._own: dict[str, Any] = {}
        self._memory = memory
        self._granted = 0
        self._hopeless: int | None = None  # the least that was refused

    def acquire(self, estimate: int, operator: str = "", patience: float = 600.0, alone: bool = False
                ) -> Refused | None:
        """Wait until the bytes of an ``estimate``, corrected by what was seen of ``operator``, fit beside the other
        processes' grants. What was granted before is returned first, unless it is of a like size and was kept to: to
        give memory back and ask for it again takes longer than many a case.

        With ``alone`` it waits until no other process has a grant, and takes all that there is. Refused: the case does
        not fit even so, by more than estimates may be wrong (``stretch``). A case that fits alone never starves: after
        a while nobody is let in before the one who has waited longest.
        """
        with self._ledger() as ledger:
            need = _corrected(ledger, estimate, operator)
            behind = _behind(ledger)
        kept = need <= self._granted <= 2 * need and self._memory.held() <= self._granted
        if kept and not alone and not behind:
            return None
        self._memory.release()
        begun = time.monotonic()
        known = self._hopeless is not None and need >= self._hopeless
        while True:
            waited = time.monotonic() - begun
            with self._ledger() as ledger:
                ledger.pop(str(os.getpid()), None)
                self._granted = 0
                others = sum(size for name, size in ledger.items() if name.isdigit())
                free = self._memory.free()
                if not others:  # nothing of ours is in use: what is free now is what we may share
                    ledger[_CAPACITY] = free
                # what others were granted and have not taken yet is free only by appearance
                room = min(free, ledger.get(_CAPACITY, free) - others) - self._memory.reserve
                fits = (need <= room and not alone) if others else need <= free * self._memory.stretch
                granted = (fits and not _behind(ledger)) or (others > 0 and waited > patience)
                if fits or others:
                    ledger.setdefault(_FIRST, [os.getpid(), begun])
                if (granted or not (fits or others)) and ledger.get(_FIRST, [None])[0] == os.getpid():
                    del ledger[_FIRST]
                if granted:
                    self._granted = ledger[str(os.getpid())] = max(need, room) if alone else need
                    return None
                if not others and not fits and (known or waited > _SETTLE):
                    self._hopeless = min(need, self._hopeless or need)
                    return Refused(need, max(0, free))
            time.sleep(_PAUSE)

    def observe(self, estimate: int, operator: str, peak: int) -> None:
        """A group of ``operator`` really took ``peak`` bytes. Estimates that are too low are raised from now on, in all
        processes; those that are too high stay, because another shape may need what this one did not."""
        if peak <= estimate:
            return
        with self._ledger() as ledger:
            factors = ledger.setdefault(_FACTORS, {})
            factors[operator] = min(_MOST, max(factors.get(operator, 1.0), peak / estimate))

    def release(self) -> None:
        """Return what was granted."""
        self._memory.release()
        self._granted = 0
        with self._ledger() as ledger:
            ledger.pop(str(os.getpid()), None)

    @contextmanager
    def _ledger(self) -> Iterator[dict[str, Any]]:
        if self._path is None:
            yield self._own
            return
        with open(self._path, "a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            stored: dict[str, Any] = json.loads(text) if text else {}
            ledger = {name: value for name, value in stored.items() if not name.isdigit() or _alive(int(name))}
            if _FIRST in ledger and not _alive(ledger[_FIRST][0]):
                del ledger[_FIRST]
            yield ledger
            file.seek(0)
            file.truncate()
            file.write(json.dumps(ledger))
            file.flush()


def _corrected(ledger: Mapping[str, Any], estimate: int, operator: str) -> int:
    return int(estimate * ledger.get(_FACTORS, {}).get(operator, 1.0))


def _behind(ledger: Mapping[str, Any]) -> bool:
    """Whether another process has waited so long that it must be let in first."""
    pid, since = ledger.get(_FIRST, (os.getpid(), 0.0))
    return bool(pid != os.getpid() and time.monotonic() - since > _FAIR)
