"""Files of timings of earlier runs, beside their record files: which of them hold, and those of shards as one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.bench.record import TIMED, verdict_of
from conformance.errors import ConformanceError
from conformance.runs.bench_recorder import BenchRecorder, path_beside
from conformance.runs.earlier import TIMINGS, Earlier, read_earlier
from conformance.runs.recorder import Recorder

_SHOWN = 5  # results whose times differ from machine to machine


def is_timings(path: Path) -> bool:
    """Whether a file is one of timings, by its name."""
    return path.name.endswith(".bench.jsonl")


def has_timings(records: Earlier) -> bool:
    """Whether the run timed what it found right."""
    return bool(records.run.get("bench")) and bool(records.run.get("here", True))


def timings_beside(records: Earlier) -> Earlier:
    """The timings of the same run. Raises ConformanceError where it timed nothing, or the file is not there."""
    if not has_timings(records):
        raise ConformanceError(f"{records.path}: that run was without --conformance-bench and timed nothing; run all "
                               "of it with timings, without --resume, or go on from it without --conformance-bench")
    path = path_beside(records.path)
    if not path.exists():
        raise ConformanceError(f"{path}: the timings of {records.path} are not there; put both files side by side")
    found = read_earlier(path, TIMINGS)
    if found.arch != records.arch:
        raise ConformanceError(f"{path}: holds timings on {found.arch}, and {records.path} is on {records.arch}")
    return found


def tied(records: Earlier, timings: Earlier) -> Iterator[str]:
    """The keys of the results that have a timing, or a reason for none, of their own: its verdict is their line's."""
    for name, line in timings.lines.items():
        result = records.lines.get(name)
        if result is not None and json.loads(line).get("verdict") == verdict_of(result):
            yield name


def check_protocol(timings: Earlier, protocol: Mapping[str, Any]) -> None:
    """Raises ConformanceError when timings cannot be gone on from by this protocol."""
    if timings.run.get("protocol") != protocol:
        raise ConformanceError(f"--resume: {timings.path} was timed by another protocol than this run's; run all of it "
                               "again without --resume")


def problems(shards: Sequence[Earlier]) -> list[str]:
    """Why the timings of shards cannot be joined."""
    if len({has_timings(shard) for shard in shards}) > 1:
        without = next(shard for shard in shards if not has_timings(shard))
        return [f"{without.path}: was run without --conformance-bench, others were not; give all the same options"]
    if not has_timings(shards[0]):
        return []
    found, protocols = [], {}
    for shard in shards:
        try:
            timings = timings_beside(shard)
        except ConformanceError as error:
            found.append(str(error))
            continue
        protocols[json.dumps(timings.run.get("protocol"), sort_keys=True)] = timings.path
        if apart := sorted(shard.lines.keys() - set(tied(shard, timings))):
            number = f"{shard.run['shard']['index']}/{shard.run['shard']['count']}"
            found.append(f"{timings.path}: {len(apart)} results have no timing of theirs, such as {apart[0]}; run the "
                         f"rest with its options, --shard {number} and --resume={shard.path}")
    if len(protocols) > 1:
        found.append(f"{' and '.join(map(str, protocols.values()))} were timed by different protocols")
    return found


def join(shards: Sequence[Earlier], recorder: Recorder) -> BenchRecorder | None:
    """Write the timings of shards that have no `problems` beside the joined records, each from the shard whose result
    was taken; None where nothing was timed."""
    if not has_timings(shards[0]):
        return None
    found = [timings_beside(shard) for shard in shards]
    roles: dict[str, str] = {}
    lines: dict[str, bytes] = {}
    for one in found:
        roles |= one.run.get("roles", {})
        for name, line in one.lines.items():
            lines.setdefault(name, line)
    merged = {**recorder.run["merged"], "times": sorted(_apart(found), reverse=True)[:_SHOWN]}
    return BenchRecorder(path_beside(recorder.path), {**recorder.run, "merged": merged}, found[0].run["protocol"],
                         roles, lines.values())


def _apart(found: Sequence[Earlier]) -> Iterator[tuple[float, str]]:
    """(slowest over fastest, which result) where machines that timed the same lie apart by more than the spreads."""
    for name in found[0].lines:
        timings: list[dict[str, Any]] = [json.loads(one.lines[name]) for one in found if name in one.lines]
        same = [(timing["seconds"], timing["spread"]) for timing in timings if timing.get("state") == TIMED]
        if len(same) > 1:
            times, spreads = zip(*same, strict=True)
            ratio = max(times) / min(times)
            if ratio - 1 > max(spreads):
                yield round(ratio, 3), name
