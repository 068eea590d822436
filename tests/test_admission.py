"""Admission by memory: what several processes may hold together, with a made-up GPU and made-up processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.devices import admission
from conformance.devices.admission import Admission, Refused
from conformance.devices.memory import DeviceMemory
from conformance.registry import ROOT

GB = 1 << 30
RESERVE = 3 * GB


def memory_of(free: Callable[[], int], release: Callable[[], object] = lambda: None,
              held: Callable[[], int] = lambda: 0) -> DeviceMemory:
    """A GPU with a reserve of 3 GB, on which estimates may be half too high."""
    return DeviceMemory(free, held, release, lambda: None, lambda: 0, RESERVE, 1.5)  # type: ignore[arg-type]


class Machine:
    """A GPU with ``free`` bytes free, living processes, and a clock that moves only when somebody waits."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.free = path / "ledger.json", 100 * GB
        self.alive: set[int] = set()
        self.now, self.slept = 0.0, 0
        self.emptied = 0
        self.after: dict[int, object] = {}
        self._pid = 0
        monkeypatch.setattr(admission, "_alive", lambda pid: pid in self.alive)
        monkeypatch.setattr(admission.os, "getpid", lambda: self._pid)
        monkeypatch.setattr(admission.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(admission.time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1
        what = self.after.pop(self.slept, None)
        if what is not None:
            acting = self._pid
            what()  # type: ignore[operator]
            self._pid = acting
        assert self.slept < 100_000, "nobody lets this process in"

    def _admission(self, pid: int) -> Admission:
        def emptied() -> None:
            self.emptied += 1

        self._pid = pid
        return Admission(self.path, memory_of(lambda: self.free, emptied))

    def acquire(self, pid: int, need: int, patience: float = 600.0, alone: bool = False) -> int:
        """Acquire as process ``pid``; how often it had to wait."""
        before = self.slept
        self.alive.add(pid)
        assert self._admission(pid).acquire(need, "", patience, alone) is None
        return self.slept - before

    def refused(self, pid: int, need: int) -> Refused | None:
        self.alive.add(pid)
        return self._admission(pid).acquire(need)

    def release(self, pid: int) -> None:
        self._admission(pid).release()

    @property
    def grants(self) -> dict[str, int]:
        return {pid: size for pid, size in json.loads(self.path.read_text()).items() if pid.isdigit()}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_what_fits_beside_the_others_is_admitted_at_once(machine: Machine) -> None:
    assert machine.acquire(1, 40 * GB) == 0
    assert machine.acquire(2, 30 * GB) == 0
    assert machine.acquire(3, 27 * GB) == 0  # 97 GB and the reserve fill it to the byte
    assert machine.grants == {"1": 40 * GB, "2": 30 * GB, "3": 27 * GB}


def test_what_does_not_fit_waits_for_a_release(machine: Machine) -> None:
    machine.acquire(1, 40 * GB)
    machine.acquire(2, 30 * GB)
    machine.after[7] = lambda: machine.release(2)
    assert machine.acquire(3, 27 * GB + 1) == 7
    assert machine.grants == {"1": 40 * GB, "3": 27 * GB + 1}


def test_a_process_alone_is_tried_though_its_estimate_is_half_too_high(machine: Machine) -> None:
    assert machine.acquire(1, 150 * GB) == 0
    machine.after[3] = lambda: machine.release(1)
    assert machine.acquire(2, 140 * GB) == 3
    assert machine.grants == {"2": 140 * GB}


def test_what_cannot_fit_even_alone_is_refused_with_both_figures(machine: Machine) -> None:
    machine.free = 24 * 10**9
    found = machine.refused(1, 50 * 10**9)
    assert str(found) == "needs 50.00 GB, 24.00 GB free"
    assert 140 < machine.slept < 160  # what has just been freed may still be on its way
    assert machine.grants == {}
    assert machine.acquire(1, 20 * 10**9) == 0


def test_it_is_not_refused_while_others_hold_memory(machine: Machine) -> None:
    """They may be what it waits for."""
    machine.acquire(1, 90 * GB)
    machine.free = 10 * GB

    def leave() -> None:
        machine.release(1)
        machine.free = 100 * GB

    machine.after[400] = leave
    assert machine.acquire(2, 140 * GB) == 400


def test_what_was_refused_once_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(admission.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(admission.time, "sleep", slept.append)
    one = Admission(tmp_path / "ledger.json", memory_of(lambda: 10 * GB))
    assert one.acquire(20 * GB) is not None and (waited := len(slept))
    assert one.acquire(21 * GB) is not None and len(slept) == waited
    assert one.acquire(15 * GB) is None and len(slept) == waited


def test_a_case_that_ran_out_of_memory_gets_all_of_it(machine: Machine) -> None:
    machine.acquire(1, 20 * GB)
    machine.after[5] = lambda: machine.release(1)
    assert machine.acquire(2, 10 * GB, alone=True) == 5
    assert machine.grants == {"2": 97 * GB}
    assert machine.acquire(1, 1, patience=0.5) > 20  # nobody comes beside it


def test_who_has_waited_for_long_is_let_in_before_small_ones(machine: Machine) -> None:
    """Else small groups that always find room would keep a large one out for as long as there are any."""
    machine.acquire(1, 50 * GB)
    waits: list[int] = []
    machine.after[100] = lambda: waits.append(machine.acquire(3, 10 * GB))  # after 2 s: there is room
    machine.after[150] = lambda: machine.release(3)
    machine.after[300] = lambda: waits.append(machine.acquire(3, 10 * GB, patience=1.0))  # after 6 s: room, but no turn
    machine.after[400] = lambda: (machine.release(1), machine.release(3))
    machine.acquire(2, 90 * GB)
    assert waits == [0, pytest.approx(51, abs=1)]
    assert machine.grants == {"2": 90 * GB}
    assert machine.acquire(3, GB) == 0  # its turn is over


def test_estimates_are_corrected_by_what_was_measured(machine: Machine) -> None:
    """Of the same operator, for every process, and never below the estimate."""
    one = machine._admission(1)
    one.observe(10 * GB, "gemm", 15 * GB)
    one.observe(10 * GB, "reduce", 4 * GB)
    one.observe(10 * GB, "gemm", 12 * GB)
    machine.alive |= {1, 2, 3, 4}
    for pid, operator, granted in ((2, "gemm", 30 * GB), (3, "reduce", 20 * GB), (4, "other", 20 * GB)):
        machine._admission(pid).acquire(20 * GB, operator)
        assert machine.grants[str(pid)] == granted
    one.observe(GB, "gemm", 1000 * GB)  # a kernel that hoards memory: others are not kept out for it
    machine.release(2)
    machine._admission(2).acquire(GB, "gemm")
    assert machine.grants["2"] == 3 * GB


def test_a_process_of_its_own_needs_no_ledger() -> None:
    one = Admission(None, memory_of(lambda: 10 * GB))
    assert one.acquire(9 * GB) is None
    assert str(one.acquire(16 * GB)).startswith("needs 17.18 GB, 10.74 GB free")
    one.release()


def test_small_cases_wait_beside_one_that_fills_the_gpu(machine: Machine) -> None:
    machine.acquire(1, 150 * GB)
    machine.after[2] = lambda: machine.release(1)
    assert machine.acquire(2, 1) == 2


def test_grants_of_the_dead_are_forgotten(machine: Machine) -> None:
    machine.acquire(1, 90 * GB)
    machine.after[4] = lambda: machine.alive.discard(1)
    assert machine.acquire(2, 90 * GB) == 4
    assert machine.grants == {"2": 90 * GB}


def test_acquiring_again_returns_what_was_granted_before(machine: Machine) -> None:
    machine.acquire(1, 60 * GB)
    machine.acquire(2, 30 * GB)
    assert machine.acquire(1, 65 * GB) == 0
    assert machine.grants == {"2": 30 * GB, "1": 65 * GB}
    assert machine.acquire(1, GB) == 0
    assert machine.acquire(2, 90 * GB) == 0


def test_waiting_holds_nothing(machine: Machine) -> None:
    """Two that wait for each other's memory would wait for ever if they kept what they had."""
    machine.acquire(1, 50 * GB)
    machine.acquire(2, 40 * GB)
    seen: list[dict[str, int]] = []
    machine.after[1] = lambda: seen.append(machine.grants)
    machine.after[2] = lambda: machine.acquire(1, 90 * GB)
    machine.after[5] = lambda: machine.release(1)
    assert machine.acquire(2, 80 * GB) >= 5
    assert seen == [{"1": 50 * GB}]
    assert machine.grants == {"2": 80 * GB}


def test_memory_that_others_outside_took_counts(machine: Machine) -> None:
    machine.acquire(1, 10 * GB)
    machine.free = 20 * GB  # a stranger on the GPU
    def leave() -> None:
        machine.free = 60 * GB

    machine.after[6] = leave
    assert machine.acquire(2, 30 * GB) == 6


def test_capacity_is_what_was_free_when_a_process_was_alone(machine: Machine) -> None:
    """What the others hold is free no longer, and must not be subtracted twice."""
    machine.acquire(1, 40 * GB)
    machine.free = 60 * GB  # process 1 really allocated its 40
    assert machine.acquire(2, 57 * GB) == 0
    machine.release(1)
    machine.release(2)
    machine.free = 30 * GB
    machine.acquire(1, 5 * GB)
    machine.free = 100 * GB
    machine.after[9] = lambda: machine.release(1)
    assert machine.acquire(2, 25 * GB) == 9  # of 30 GB, 5 are granted and 3 are the reserve


def test_patience_ends(machine: Machine) -> None:
    machine.acquire(1, 90 * GB)
    waits = machine.acquire(2, 50 * GB, patience=1.0)
    assert waits == pytest.approx(51, abs=1)
    assert machine.grants == {"1": 90 * GB, "2": 50 * GB}


def test_release_returns_the_grant_and_the_cache(machine: Machine) -> None:
    machine.acquire(1, 40 * GB)
    machine.acquire(2, 40 * GB)
    assert machine.emptied == 2
    machine.release(1)
    assert machine.emptied == 3
    assert machine.grants == {"2": 40 * GB}
    machine.release(1)  # nothing left to return
    assert machine.grants == {"2": 40 * GB}


def test_an_empty_ledger_is_a_new_one(machine: Machine) -> None:
    """What a process leaves that was killed between emptying and writing the file."""
    machine.path.write_text("")
    assert machine.acquire(1, 40 * GB) == 0
    assert machine.grants == {"1": 40 * GB}


def test_living_and_dead_processes() -> None:
    assert admission._alive(os.getpid())
    assert admission._alive(1)  # another user's, perhaps
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert not admission._alive(child.pid)


CHILD = """
import os, sys, time
from pathlib import Path
from conformance.devices.admission import Admission
from conformance.devices.memory import DeviceMemory
gb, folder = 1 << 30, Path(sys.argv[1])
log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
nothing = lambda: 0
admission = Admission(folder / "ledger.json", DeviceMemory(lambda: 13 * gb, nothing, nothing, nothing, nothing, 3 * gb))
for turn in range(12):
    need = 1 + (turn * 5 + int(sys.argv[2]) * 3) % 6
    admission.acquire(need * gb)
    os.write(log, f"+{need}\\n".encode())
    time.sleep(0.002)
    os.write(log, f"-{need}\\n".encode())
    admission.release()
"""


def test_real_processes_never_hold_more_than_there_is(tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    children = [subprocess.Popen([sys.executable, str(tmp_path / "child.py"), str(tmp_path), str(number)],
                                 env=environment) for number in range(3)]
    assert [child.wait(timeout=60) for child in children] == [0, 0, 0]
    held, most, steps = 0, 0, [int(line) for line in (tmp_path / "log").read_text().split()]
    for step in steps:
        held += step
        most = max(most, held)
    assert len(steps) == 3 * 12 * 2
    assert held == 0
    assert most <= 10  # 13 less the reserve
    assert set(json.loads((tmp_path / "ledger.json").read_text())) == {"capacity"}


def test_a_grant_of_a_like_size_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is memory given back nor the ledger written; a process that outgrew its grant, or needs far less or
    more, starts afresh."""
    held, emptied = [0], []
    one = Admission(tmp_path / "ledger.json", memory_of(lambda: 100 * GB, lambda: emptied.append(1), lambda: held[0]))

    def granted(need: int) -> int:
        one.acquire(need)
        ledger: dict[str, int] = json.loads((tmp_path / "ledger.json").read_text())
        return ledger[str(os.getpid())]

    assert (granted(10 * GB), len(emptied)) == (10 * GB, 1)
    assert (granted(9 * GB), len(emptied)) == (10 * GB, 1)
    assert (granted(11 * GB), len(emptied)) == (11 * GB, 2)
    assert (granted(5 * GB), len(emptied)) == (5 * GB, 3)
    held[0] = 6 * GB
    assert (granted(5 * GB), len(emptied)) == (5 * GB, 4)
    one.release()
    held[0] = 0
    assert (granted(5 * GB), len(emptied)) == (5 * GB, 6)
