"""Memory: what is free and held, limits, and runs that have too little."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_samples import sample, subject
from suite_runs import run_kernels

from conformance.devices import gpus
from conformance.devices.admitted import Gate, out_of_memory
from conformance.devices.gpus import workers_for
from conformance.devices.memory import DeviceMemory, family, host_memory, parse_bytes, resident, spelled, workers_within
from conformance.errors import ConformanceError
from conformance.result import Result, Settings, blank_result

MB, GB = 10**6, 10**9


@pytest.mark.parametrize(("text", "size"), [
    ("24GB", 24 * GB), ("512 mb", 512 * MB), ("1.5GiB", 3 << 29), ("64KiB", 1 << 16), ("1kb", 1000),
])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("--memory-limit", text) == size


@pytest.mark.parametrize("text", ["", "24", "GB", "-1GB", "0GB", "1TB", "1e3MB", "nanGB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConformanceError, match=r"--memory-limit .*: give a size such as 24GB"):
        parse_bytes("--memory-limit", text)


def test_spelling() -> None:
    assert (spelled(24 * GB), spelled(67_300_000), spelled(-5)) == ("24.00 GB", "67.3 MB", "0.0 MB")


def mapped(size: int) -> mmap.mmap:
    """Memory that no allocator had before: what a process keeps of freed memory would be taken for nothing."""
    block, page = mmap.mmap(-1, size), b"\1" * (1 << 20)
    for _ in range(size >> 20):
        block.write(page)
    return block


def test_the_peak_of_this_process_is_what_it_took_since() -> None:
    memory = host_memory(None, lambda: [os.getpid()])
    memory.restart()
    kept = mapped(40 << 20)
    mapped(80 << 20).close()
    assert 110 << 20 < memory.peak() < 200 << 20
    assert 35 << 20 < memory.held() < 80 << 20
    memory.restart()
    assert memory.peak() < 20 << 20 and len(kept)


def test_a_limit_is_for_all_processes_of_the_run() -> None:
    text = "import sys; block = bytearray(60 << 20); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        child.stdout.readline()
        members = family(os.getpid())
        assert child.pid in members and os.getpid() in members
        alone, both = resident([os.getpid()]), resident([os.getpid(), child.pid])
        assert 55 << 20 < both - alone < 90 << 20
        left = host_memory(2 * both, lambda: [os.getpid(), child.pid]).free()
        assert left == pytest.approx(min(both, 2 * both - (300 << 20)), abs=20 << 20)
        child.stdin.close()
    assert host_memory(10**18, lambda: members).free() < 10**15  # no more than the machine has


def test_workers_are_as_many_as_the_limit_has_room_for() -> None:
    assert [workers_within(size * GB) for size in (0, 1, 2, 4)] == [1, 1, 3, 7]
    assert workers_for(["cpu"], GB) == 1
    assert workers_for(["cpu"]) >= workers_for(["cpu"], 64 * GB) >= 1


def test_where_kernels_are_timed_each_gpu_has_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "cores", lambda: 64)
    for names, plain, timing in (("0", 4, 1), ("0,2", 8, 2), ("GPU-a,GPU-b,GPU-c", 12, 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert (workers_for(["cuda"]), workers_for(["cuda"], timing=True)) == (plain, timing)


# ---- runs -----------------------------------------------------------------------------------------------------------

# A plugin: the groups of fp32 cases need more than any machine has.
ENORMOUS = """
from dataclasses import replace
from conformance import registry
_operators = registry.operators()
_reduce = _operators["moe_reduce_fused"]
_operators["moe_reduce_fused"] = replace(
    _reduce, memory=lambda case, sizes: 10**16 if case.get("in") == "fp32" else _reduce.memory(case, sizes))
"""


@pytest.mark.parametrize("workers", [("-n", "2"), ()], ids=["workers", "no worker"])
def test_too_little_for_one_group_is_said_and_the_others_run(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "enormous.py").write_text(ENORMOUS, encoding="utf-8")
    ran = run_kernels(tmp_path, "", "-p", "enormous", *workers)
    assert (ran.code, ran.end["counts"]) == (0, {"not-run": 2, "pass": 2}), ran.output
    for result in ran.results:
        if result["state"] == "not-run":
            assert result["kind"] == "memory"
            assert result["message"].startswith("needs 10000000.00 GB, ") and result["message"].endswith(" GB free")
        else:
            assert "-in:bf16-" in result["case"]
    measured = [result["memory"] for result in ran.results if result["memory"]]
    assert all(0 <= found["peak"] < found["estimate"] < 200 * MB for found in measured)


def test_too_little_for_any_case_fails_the_run(tmp_path: Path) -> None:
    ran = run_kernels(tmp_path, "", "-n", "1", "--memory-limit", "500MB")
    assert (ran.code, ran.end["counts"]) == (1, {"not-run": 4}), ran.output
    assert all(" MB, 0.0 MB free" in result["message"] for result in ran.results)
    assert any("sound executed nothing: needs " in problem for problem in ran.end["problems"])


# ---- one process's gate ---------------------------------------------------------------------------------------------


def gate(free: int, peak: int) -> Gate:
    made = Gate(Settings(), None, None, 1)
    memory = DeviceMemory(lambda: free, lambda: 0, lambda: None, lambda: None, lambda: peak)
    made._memory = made._admission._memory = memory
    return made


def failed(case: Any) -> Result:
    kernel = subject(lambda x, out: None)
    return replace(blank_result(case, kernel, Settings(), "error"), kind="memory", message="CUDA out of memory")


def test_a_case_that_ran_out_of_memory_with_less_than_its_estimate_was_not_run() -> None:
    case = sample()
    poor, rich = gate(50 * MB, 0), gate(GB, 0)
    assert out_of_memory(failed(case))
    for one in (poor, rich):
        one.enter(case, alone=True)
    found = poor.explained(failed(case))
    assert (found.state, found.kind) == ("not-run", "memory")
    assert found.message.startswith("needs 67.") and "50.0 MB free" in found.message
    assert rich.explained(failed(case)) == failed(case)  # it had what it should need: an error


def test_the_peak_of_a_group_corrects_the_estimates_that_follow() -> None:
    case = sample()
    one, passed = gate(10 * GB, 150 * MB), replace(failed(case), state="pass")  # imports are no case's memory: before
    assert one.enter(case) is None
    told = one.told(passed, case)
    assert told.memory is not None and told.memory["peak"] == 150 * MB
    with one._admission._ledger() as ledger:
        assert ledger["factors"] == {"moe_reduce_fused": pytest.approx(150 * MB / told.memory["estimate"])}
    other = sample(tokens=7)
    assert one.told(failed(other), other).memory is None  # its group was not begun here
