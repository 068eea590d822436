"""``conformance merge``: the record files of all shards become one record file, as if one machine had run the plan."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError, unknown_name
from conformance.registry import ROOT
from conformance.runs.earlier import Earlier, read_earlier
from conformance.runs.recorder import Recorder
from conformance.runs.same_run import FACTS
from conformance.runs.shard_checks import check, disagreements, in_order
from conformance.runs.timings import is_timings, join


def merge(paths: Sequence[Path], out: Path | None, allowed: Sequence[str]) -> list[Recorder]:
    """Join shards and write one record file per architecture below ``out`` (default: reports/), and one of timings
    beside it where they have some.

    ``allowed``: facts that may differ between machines. Raises ConformanceError, and writes nothing, when the shards
    do not make up one plan: one is missing, doubled, killed, or ran something else or somewhere else.
    """
    for name in allowed:
        if name not in FACTS:
            raise unknown_name("fact of --allow", name, FACTS)
    directory = out or ROOT / "reports"
    by_arch: dict[str, list[Earlier]] = {}
    for path in dict.fromkeys(path for path in paths if not is_timings(path)):  # these are found beside their records
        shard = read_earlier(path)
        by_arch.setdefault(shard.arch, []).append(shard)
    if not by_arch:
        raise ConformanceError(f"{paths[0]}: is a file of timings; give the record files, beside which these are found")
    differing = {arch: check(shards, allowed) for arch, shards in by_arch.items()}
    for arch, shards in by_arch.items():
        target = directory / f"{arch}.jsonl"
        if any(target.exists() and target.samefile(shard.path) for shard in shards):
            raise ConformanceError(f"{target} is one of the shards and would be overwritten; give --out DIR")
    return [_join(shards, directory / f"{arch}.jsonl", differing[arch]) for arch, shards in by_arch.items()]


def _join(shards: Sequence[Earlier], target: Path, differs: dict[str, str]) -> Recorder:
    """Write one architecture's whole record file, each result once, from the shard of the lowest number."""
    shards = in_order(shards)
    first = shards[0]
    apart = disagreements(shards)
    line = {**first.run, **first.run["shard"]["whole"]}
    del line["shard"]
    line |= {
        "started": min(str(shard.run.get("started", "")) for shard in shards),
        "workers": sum(int(shard.run.get("workers") or 0) for shard in shards),
        "resumed": [entry for shard in shards for entry in shard.run.get("resumed") or ()],
        "merged": {
            "shards": len(shards), "files": [str(shard.path) for shard in shards], "agree": not apart,
            "identity": len(first.run["shard"]["identity"]), "differs": differs,
        },
    }
    results: dict[str, bytes] = {}
    for shard in shards:
        for name, result in shard.lines.items():
            results.setdefault(name, result)
    recorder = Recorder(target, line)
    for result in results.values():
        recorder.add(json.loads(result))
    for note in (*_notes(shards), *map(str, apart)):
        recorder.note(note)
    if (timings := join(shards, recorder)) is not None:
        timings.close()
        for problem in timings.problems():
            recorder.note(problem)
    longest = max(float((shard.end or {}).get("seconds") or 0) for shard in shards)
    recorder.close(bool(recorder.failing), seconds=longest)
    return recorder


def _notes(shards: Sequence[Earlier]) -> Iterable[str]:
    """What made single shards unsound beside their results."""
    noted: dict[str, list[Earlier]] = {}
    for shard in shards:
        end: Any = shard.end or {}
        for note in end.get("notes") or ():
            noted.setdefault(note, []).append(shard)
        failed = any(result["state"] in ("fail", "error", "crash", "timeout") for result in shard.results())
        if end.get("exit") and not failed and not end.get("problems"):
            noted.setdefault(f"the run ended with exit code {end['exit']}", []).append(shard)
    for note, of in noted.items():
        where = "" if len(of) == len(shards) else f"shard {', '.join(str(s.run['shard']['index']) for s in of)}: "
        yield where + note
