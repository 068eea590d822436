"""Which items of the plan a run leaves out: those of other shards, and those that an earlier run has results of.

The controller reads the files that options name, once; workers get what they need in a file of the run's own
directory, because the record file may be written anew before a later worker starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError
from conformance.runs.earlier import Earlier, earlier_runs, key
from conformance.runs.sharding import Item, Shard, parse_shard, recorded_costs, split
from conformance.runs.timings import tied, timings_beside

_GIVEN, _DIVIDED = "portion.json", "divided-{}.json"


@dataclass(frozen=True)
class Division:
    """How the plan was divided, in node ids. ``recorded``: results are there. ``elsewhere``: other shards' items.
    ``identity``: run by every shard; ``seconds``: estimated cost of each shard; ``known``: items of the whole plan
    whose cost was recorded."""

    recorded: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    identity: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    known: int = 0


@dataclass(frozen=True)
class Portion:
    """``recorded``: architecture -> keys of results that are there. ``costs``: architecture -> key -> seconds.
    ``earlier`` and ``timings``: the runs that are resumed, known to the controller only."""

    shard: Shard | None = None
    recorded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    earlier: Mapping[str, Earlier] = field(default_factory=dict)
    timings: Mapping[str, Earlier] = field(default_factory=dict)  # of the runs that are resumed, where cases are timed
    whole_cases: bool = False  # a case is done when it is on all kernels, which are compared with one another
    anyway: bool = False  # results of a run that differs are taken, too

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self.shard is None and not self.recorded

    @property
    def costs_digest(self) -> str | None:
        """What the recorded costs are known by: shards that used other ones were split otherwise."""
        if not self.costs:
            return None
        return hashlib.sha256(json.dumps(self.costs, sort_keys=True).encode()).hexdigest()[:16]

    def divide(self, items: Sequence[Item], guess: Callable[[Item], float]) -> tuple[list[int], Division]:
        """The indices of the items to run, and what became of the others. ``guess``: seconds of an item when none
        were recorded."""
        mine = range(len(items))
        elsewhere: list[str] = []
        identity: list[str] = []
        seconds: list[float] = []
        if self.shard is not None:
            found = split(items, self._costs(items, guess), self.shard.count)
            inside = {i for i in mine if found.home[i] == self.shard.index or i in found.identity}
            elsewhere = [items[i].nodeid for i in mine if i not in inside]
            identity = [items[i].nodeid for i in sorted(found.identity)]
            seconds = list(found.seconds)
            kept = [i for i in mine if i in inside]
        else:
            kept = list(mine)
        done = {i for i in kept if key(items[i].case.id, items[i].kernel) in self.recorded.get(items[i].arch, ())}
        if self.whole_cases:
            begun = {(items[i].arch, items[i].case.id) for i in kept if i not in done}
            done = {i for i in done if (items[i].arch, items[i].case.id) not in begun}
        known = sum(key(item.case.id, item.kernel) in self.costs.get(item.arch, ()) for item in items)
        division = Division([items[i].nodeid for i in kept if i in done], elsewhere, identity, seconds, known)
        return [i for i in kept if i not in done], division

    def _costs(self, items: Sequence[Item], guess: Callable[[Item], float]) -> list[float]:
        guesses = [guess(item) for item in items]
        costs = [0.0] * len(items)
        for arch in dict.fromkeys(item.arch for item in items):
            places = [i for i, item in enumerate(items) if item.arch == arch]
            found = recorded_costs(
                self.costs.get(arch, {}),
                [key(items[i].case.id, items[i].kernel) for i in places],
                [items[i].kernel for i in places],
                [guesses[i] for i in places],
            )
            for place, cost in zip(places, found, strict=True):
                costs[place] = cost
        return costs


def read_portion(
    shard: str | None, costs: str | None, resume: str | None, anyway: bool, archs: Iterable[str],
    timed: Collection[str] = (),
) -> Portion:
    """The portion that options ask for. ``timed``: architectures on which of an earlier run only results with their
    timings are taken.

    Raises ConformanceError for a malformed one or an unreadable file.
    """
    names = list(archs)
    part = parse_shard(shard)
    if costs and part is None:
        raise ConformanceError(f"--shard-costs {costs}: balances shards; give --shard I/N as well")
    if anyway and not resume:
        raise ConformanceError("--resume-anyway: says what to do about differences; give --resume=RECORDS as well")
    earlier = earlier_runs("--resume", Path(resume), names) if resume else {}
    dear = earlier_runs("--shard-costs", Path(costs), names) if costs else {}
    timings = {arch: timings_beside(run) for arch, run in earlier.items() if arch in timed}
    return Portion(
        part,
        {arch: frozenset(tied(run, timings[arch]) if arch in timings else run.lines) for arch, run in earlier.items()},
        {arch: _seconds(run) for arch, run in dear.items()},
        earlier,
        timings,
        bool(timings),
        anyway,
    )


def _seconds(run: Earlier) -> dict[str, float]:
    return {key(r["case"], r["kernel"]): float(r["seconds"]) for r in run.results() if r.get("seconds") is not None}


def hand_on(portion: Portion, directory: Path) -> None:
    """Write what workers need into the run's own directory."""
    value = {
        "shard": str(portion.shard) if portion.shard else None,
        "recorded": {arch: sorted(keys) for arch, keys in portion.recorded.items()},
        "costs": portion.costs,
        "whole_cases": portion.whole_cases,
    }
    (directory / _GIVEN).write_text(json.dumps(value), encoding="utf-8")


def handed_on(directory: Path) -> Portion:
    """In a worker: the portion that `hand_on` wrote."""
    value = json.loads((directory / _GIVEN).read_text(encoding="utf-8"))
    recorded = {arch: frozenset(keys) for arch, keys in value["recorded"].items()}
    return Portion(parse_shard(value["shard"]), recorded, value["costs"], whole_cases=value["whole_cases"])


def report_division(division: Division, directory: Path, worker: str) -> None:
    """In a worker: tell the controller what was left out, before the collection that tells what was not."""
    (directory / _DIVIDED.format(worker)).write_text(json.dumps(asdict(division)), encoding="utf-8")


def reported_division(directory: Path, worker: str) -> Division:
    """What a worker wrote with `report_division`; nothing left out when it wrote nothing."""
    file = directory / _DIVIDED.format(worker)
    if not file.exists():
        return Division()
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return Division(**value)
