"""``conformance fleet``: shards on a local Ray cluster of several worker processes, one of which is killed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from suite_runs import MODULE, OPERATOR, ROOT, Ran, environment, write_kernels

from conformance.cases.options import Selection
from conformance.errors import ConformanceError
from conformance.runs import ray_fleet

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None,
                               reason="ray is not installed (pip install -r constraints-ray.txt)")
CASES = tuple(
    f"{OPERATOR}/send:4001-topk:{topk}-experts:72-ranks:8-hidden:2048-weights:{weights}-in:{dtype}-out:{dtype}-xsf:no"
    for topk in (2, 6, 8) for dtype in ("fp32", "bf16") for weights in ("yes", "no")
)
SHARDS = 3
# The checkout may be edited while tests run, so the commit is pinned.
KERNELS = """
from conformance import environment
_identity = environment.identity
environment.identity = lambda arch: _identity(arch) | {"commit": "c0ffee", "dirty": False, "changes": None}
add("slow", lambda: time.sleep(0.6))
"""


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "conformance", "fleet", "--shards", str(SHARDS), "--cpus", "1", "--out",
            str(folder / "out"), "--kernels", MODULE, "--case", " ".join(CASES), *more, "--",
            "-p", "no:hypothesispytest", "-n", "1"]
    return subprocess.Popen(line, cwd=ROOT, env=environment(folder), text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def results(folder: Path, index: int) -> int:
    """How many results of a shard have been sent so far."""
    file = folder / "out" / "shards" / str(index) / "cpu.jsonl"
    return file.read_bytes().count(b'"type":"result"') if file.exists() else 0


def shard_under_way(folder: Path, fleet: subprocess.Popen[str]) -> tuple[int, psutil.Process]:
    """A shard's number and its pytest process, once some of its results have been sent."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert fleet.poll() is None, fleet.communicate()
        for process in psutil.process_iter():
            index = _shard_of(process, folder)
            if index is not None and 2 <= results(folder, index) < 6:
                return index, process
        time.sleep(0.1)
    raise AssertionError("no shard got under way")


def _shard_of(process: psutil.Process, folder: Path) -> int | None:
    """The shard that a process runs for the fleet of ``folder``; None when it is another one."""
    try:
        words = [word for word in process.cmdline() if word.startswith("--shard=")]
        if not words or str(folder) not in process.environ().get("PYTHONPATH", ""):
            return None
    except psutil.Error:  # gone, or another user's
        return None
    return int(words[0].removeprefix("--shard=").partition("/")[0])


@needs_ray
def test_a_lost_worker_costs_its_case_at_hand_and_nothing_else(tmp_path: Path) -> None:
    """The process that ran a shard is killed: another goes on with what had been sent, and all shards are joined."""
    write_kernels(tmp_path, KERNELS)
    fleet = start(tmp_path)
    try:
        index, shard = shard_under_way(tmp_path, fleet)
        worker = shard.parent()
        assert worker is not None and "ray" in " ".join(worker.cmdline())
        before = results(tmp_path, index)
        worker.kill()
        assert not psutil.wait_procs([shard], timeout=20)[1], "pytest went on without its task"
        output, errors = fleet.communicate(timeout=400)
    finally:
        if fleet.poll() is None:
            fleet.kill()
    assert fleet.returncode == 0, output + errors
    ran = Ran(fleet.returncode, output, tmp_path / "out")
    assert {(result["case"], result["kernel"]) for result in ran.results} == {
        (case, kernel) for case in CASES for kernel in ("slow", "sound")}
    assert len(ran.results) == 2 * len(CASES)
    assert {result["state"] for result in ran.results} == {"pass"}
    assert ran.end["problems"] == [] and ran.plan["merged"]["shards"] == SHARDS
    (resumed,) = ran.plan["resumed"]
    assert before <= resumed["results"] and not resumed["ended"]
    assert f"shard {index}/{SHARDS}: pytest's exit code 0, gone on from {resumed['results']} results" in output
    assert (tmp_path / "out" / "cpu.html").exists()


@needs_ray
def test_failures_are_the_exit_code_of_the_whole(tmp_path: Path) -> None:
    write_kernels(tmp_path, KERNELS.replace("time.sleep(0.6)", "1 / 0"))
    fleet = start(tmp_path)
    output, errors = fleet.communicate(timeout=400)
    assert fleet.returncode == 1, output + errors
    ran = Ran(fleet.returncode, output, tmp_path / "out")
    assert len(ran.of("slow", "error")) == len(ran.of("sound", "pass")) == len(CASES)
    assert f"{len(CASES)} of {2 * len(CASES)} results failed" in errors


@needs_ray
def test_more_than_the_cluster_has_is_said_at_once(tmp_path: Path) -> None:
    write_kernels(tmp_path, KERNELS)
    fleet = start(tmp_path, "--cpus", "4000")
    output, errors = fleet.communicate(timeout=120)
    assert fleet.returncode == 2 and "of CPU, and one shard needs 4000" in errors, output + errors


def test_without_ray_one_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    fleet = ray_fleet.Fleet(2, 1, 0, None, ROOT, tmp_path, ())
    with pytest.raises(ConformanceError, match=r"fleet needs Ray.*constraints-ray\.txt"):
        ray_fleet.run(fleet, {})


def test_what_a_task_asks_for_comes_from_the_estimates() -> None:
    one = ray_fleet.needs(Selection(operators=(OPERATOR,), tiers=("smoke",), archs=("cpu",)), 1)
    four = ray_fleet.needs(Selection(operators=(OPERATOR,), tiers=("smoke",), archs=("cpu",)), 4)
    official = ray_fleet.needs(Selection(operators=(OPERATOR,), tiers=("smoke",), archs=("cpu",), sizes="official"), 1)
    assert (one["num_cpus"], one["num_gpus"], four["num_cpus"]) == (1, 0, 4)
    assert 0.4e9 < one["memory"] < 1.5e9 and 2 * one["memory"] < four["memory"] < 4 * one["memory"]
    assert official["memory"] > 15e9


def test_records_are_sent_as_they_grow_and_anew_when_the_file_is_another(tmp_path: Path) -> None:
    keeper = ray_fleet.Keeper(str(tmp_path / "kept"))
    keeper.begin(1)
    file, here = tmp_path / "cpu.jsonl", tmp_path / "kept" / "1" / "cpu.jsonl"
    sent: list[tuple[int, bytes]] = []

    def send(name: str, offset: int, data: bytes) -> None:
        sent.append((offset, data))
        keeper.add(1, name, offset, data)

    file.write_bytes(b"one\n")
    state = ray_fleet._forward(file, None, send)
    with file.open("ab") as more:
        more.write(b"two\n")
    state = ray_fleet._forward(file, state, send)
    state = ray_fleet._forward(file, state, send)  # nothing new
    assert sent == [(0, b"one\n"), (4, b"two\n")]
    (tmp_path / "part").write_bytes(b"another\n")
    os.replace(tmp_path / "part", file)  # as --resume does
    ray_fleet._forward(file, state, send)
    assert here.read_bytes() == b"another\n"
    assert keeper.kept(1) == {"cpu.jsonl": b"another\n"}
