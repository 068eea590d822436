"""``conformance fleet``: the shards of one plan as tasks of a Ray cluster, their records joined into one run.

A task runs pytest with ``--shard I/N`` in a process of its own and sends what that adds to its record files to an actor
on the machine of whoever started the fleet. A task that is lost, with its worker or its machine, is begun again
elsewhere: it fetches those records and goes on from them with ``--resume``. This module is imported by that command
only, Ray by its functions only: it is an optional extra.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.cases.options import Selection
from conformance.devices.memory import needed_by_run
from conformance.environment import chosen_archs
from conformance.errors import ConformanceError
from conformance.registry import ROOT, operator

_POLL = 0.5  # seconds between looks at a record file
_USAGE = 4  # pytest's exit code for options that it does not take


@dataclass(frozen=True)
class Fleet:
    """What is asked for. ``shards``: number of tasks. ``cpus``: cores of each, and its pytest workers on a CPU.
    ``retries``: how often a lost task is begun again. ``address``: of a cluster, None = one on this machine for this
    run. ``checkout``: where this repository lies on every machine. ``out``: where records and pages go. ``arguments``:
    for pytest."""

    shards: int
    cpus: int
    retries: int
    address: str | None
    checkout: Path
    out: Path
    arguments: tuple[str, ...]


def needs(selection: Selection, cpus: int) -> dict[str, float]:
    """What Ray sets aside for one task: GPUs, and the host's memory in bytes, from the estimates of the largest case.

    Raises ConformanceError for an architecture that is unknown.
    """
    devices = chosen_archs(selection.archs)
    if "cuda" in devices.values():
        return {"num_cpus": cpus, "num_gpus": 1, "memory": needed_by_run(cpus, 0)}
    cases = ((operator(of.operator), case) for of in selection.matrices() for case in selection.cases_of(of)
             if not of.devices(case))
    largest = max((contract.memory(case, selection.sizes or "reduced") for contract, case in cases), default=0)
    return {"num_cpus": cpus, "num_gpus": 0, "memory": needed_by_run(cpus, largest)}


def run(fleet: Fleet, need: Mapping[str, float]) -> list[Path]:
    """Run all shards; the record files of each below ``out/shards/I``. Raises ConformanceError when Ray is not here,
    the cluster cannot hold a task, or a shard is lost more often than ``retries`` allows."""
    ray = _ray()
    paths = os.pathsep.join(filter(None, (str(fleet.checkout), os.environ.get("PYTHONPATH"))))
    try:
        ray.init(address=fleet.address, include_dashboard=False, log_to_driver=False, logging_level="error",
                 runtime_env={"env_vars": {"PYTHONPATH": paths}})
    except Exception as error:  # of many kinds: no cluster there, versions that differ, a path too long for a socket
        where = f"the cluster at {fleet.address} cannot be used" if fleet.address else "Ray cannot be started here"
        raise ConformanceError(f"{where}: {type(error).__name__}: {_first_line(error)}") from None
    try:
        _check_room(ray.cluster_resources(), need)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False)
        keeper = ray.remote(Keeper).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote(
            str(fleet.out / "shards"))
        ray.get(keeper.begin.remote(fleet.shards))
        task = ray.remote(run_shard).options(max_retries=fleet.retries, scheduling_strategy="SPREAD", **need)
        waiting = {task.remote(fleet, index, keeper): index for index in range(1, fleet.shards + 1)}
        lost: list[str] = []
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            index = waiting.pop(done)
            try:
                print(f"shard {index}/{fleet.shards}: {ray.get(done)}", flush=True)
            except ray.exceptions.RayError as error:
                lost.append(f"shard {index}/{fleet.shards} was not finished: {_first_line(error)}")
    finally:
        ray.shutdown()
    if lost:
        raise ConformanceError("; ".join(lost) + f"; what there is of its records is below {fleet.out / 'shards'}")
    return sorted((fleet.out / "shards").glob("*/*.jsonl"))


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConformanceError(f"fleet needs Ray, which is no part of the usual environment: {error} "
                               "(pip install -r constraints-ray.txt)") from None
    return ray


def _check_room(there: Mapping[str, float], need: Mapping[str, float]) -> None:
    """Ray would wait for ever for what no machine has."""
    for name, key in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory")):
        if need[name] > there.get(key, 0):
            raise ConformanceError(f"the cluster has {there.get(key, 0):g} of {key}, and one shard needs "
                                   f"{need[name]:g}; give --cpus N, or another cluster with --address")


class Keeper:
    """Keeps the shards' records in a folder, on the machine where the fleet was started. All of its state is there, so
    that it may be started anew."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def begin(self, shards: int) -> None:
        """Remove what an earlier fleet left."""
        for path in self._folder.glob("*/*.jsonl"):
            path.unlink()
        for index in range(1, shards + 1):
            (self._folder / str(index)).mkdir(parents=True, exist_ok=True)

    def add(self, index: int, name: str, offset: int, data: bytes) -> None:
        """Bytes of a shard's record file from ``offset`` on; what was behind them is gone."""
        with open(self._folder / str(index) / name, "ab") as file:
            file.truncate(offset)
            file.write(data)

    def kept(self, index: int) -> dict[str, bytes]:
        """What there is of a shard's record files."""
        return {path.name: path.read_bytes() for path in (self._folder / str(index)).glob("*.jsonl")}


def run_shard(fleet: Fleet, index: int, keeper: Any) -> str:
    """The task: run one shard, or the rest of it, and send its records. How it ended, in words."""
    import ray

    def send(name: str, offset: int, data: bytes) -> None:
        ray.get(keeper.add.remote(index, name, offset, data))

    kept: dict[str, bytes] = ray.get(keeper.kept.remote(index))
    code = _shard_process(fleet, index, kept, send)
    if code == _USAGE and kept:  # this machine is another one: begin afresh
        kept = {}
        code = _shard_process(fleet, index, kept, send)
    carried = sum(data.count(b'"type":"result"') for data in kept.values())
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with exit code {code}")
    return f"pytest's exit code {code}" + (f", gone on from {carried} results" if carried else "")


def _shard_process(fleet: Fleet, index: int, kept: Mapping[str, bytes], send: Any) -> int:
    """pytest's exit code. Everything that it writes to record files is sent while it runs."""
    with tempfile.TemporaryDirectory(prefix="conformance-shard-") as name:
        out = Path(name)
        for file, data in kept.items():
            (out / file).write_bytes(data)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--shard={index}/{fleet.shards}",
                   f"--report-dir={out}", *_workers(fleet), *([f"--resume={out}"] if kept else []), *fleet.arguments]
        with open(out / "log", "wb") as log:
            running = subprocess.Popen(command, cwd=fleet.checkout, stdin=subprocess.DEVNULL, stdout=log,
                                       stderr=subprocess.STDOUT, preexec_fn=_end_with_parent)
        sent: dict[str, tuple[int, int]] = {}  # inode, bytes
        while True:
            ended = running.poll() is not None
            for path in out.glob("*.jsonl"):
                sent[path.name] = _forward(path, sent.get(path.name), send)
            if ended:
                break
            time.sleep(_POLL)
        if running.returncode not in (0, 1):
            print((out / "log").read_text(errors="replace")[-2000:], file=sys.stderr)
        return int(running.returncode)


def _workers(fleet: Fleet) -> list[str]:
    return [] if any(word.startswith("-n") for word in fleet.arguments) else ["-n", str(fleet.cpus)]


def _forward(path: Path, before: tuple[int, int] | None, send: Any) -> tuple[int, int]:
    """Send what is new in a file; all of it when the file is another one, as ``--resume`` makes it."""
    with open(path, "rb") as file:
        state = os.fstat(file.fileno())
        offset = before[1] if before and before[0] == state.st_ino and before[1] <= state.st_size else 0
        file.seek(offset)
        data = file.read()
    if data or before is None:
        send(path.name, offset, data)
    return state.st_ino, offset + len(data)


def _end_with_parent() -> None:
    """In the child: end when the task's process does, however that ends (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if "Traceback" in str(error) else lines[0])[:300] if lines else type(error).__name__


def command(given: Any, selection: Selection, arguments: Sequence[str]) -> list[Path]:
    """From the command line's options to the record files of all shards. Raises ConformanceError."""
    for name, value, least in (("--shards", given.shards, 1), ("--cpus", given.cpus, 1),
                               ("--retries", given.retries, 0)):
        if value < least:
            raise ConformanceError(f"{name} {value}: give a number from {least}")
    fleet = Fleet(given.shards, given.cpus, given.retries, given.address, (given.checkout or ROOT).absolute(),
                  (given.out or ROOT / "reports" / "fleet").absolute(), tuple(arguments))
    return run(fleet, needs(selection, given.cpus))
