"""Whether shards make up one plan, and whether the machines that ran them agree."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.errors import ConformanceError
from conformance.runs import timings
from conformance.runs.earlier import Earlier, key
from conformance.runs.same_run import FACTS, differences, plan_digest

_COMPARED = ("state", "level", "kind", "lane", "path", "budget_fraction", "max_error", "wrong", "elements")
_NEEDED = {"index": int, "count": int, "identity": list, "loose": list, "costs": object, "whole": dict}
_LOOSE = ("state",)  # of a kernel that does not repeat its bits


@dataclass(frozen=True)
class Disagreement:
    """An identity result that came out otherwise on another machine."""

    result: str
    first: str
    second: str

    def __str__(self) -> str:
        return f"the machines do not agree: {self.result}: {self.first}, but {self.second}"


def in_order(shards: Sequence[Earlier]) -> list[Earlier]:
    return sorted(shards, key=lambda shard: int(shard.run["shard"]["index"]))


def check(shards: Sequence[Earlier], allowed: Sequence[str]) -> dict[str, str]:
    """Facts in which the shards of one architecture differ and may.

    Raises ConformanceError that lists everything that keeps them from being one run.
    """
    arch = shards[0].arch
    for shard in shards:
        if not shard.run.get("shard"):
            raise ConformanceError(f"{shard.path}: is no shard, it was run without --shard; 'report' makes its pages")
        if absent := _NEEDED.keys() - shard.run["shard"].keys():
            raise ConformanceError(f"{shard.path}: its 'shard' lacks {', '.join(sorted(absent))}; was the file edited?")
        if "planned" not in shard.run or not _is_written_so(shard):
            raise ConformanceError(f"{shard.path}: its first line is not as a run writes it; was the file edited?")
    shards = in_order(shards)
    found = [*_numbering(shards), *(text for shard in shards if (text := _unfinished(shard)))]
    found += timings.problems(shards)
    differs: dict[str, str] = {}
    first = _whole(shards[0])
    for shard in shards[1:]:
        own = differences(first, _whole(shard), FACTS)
        differs |= {name: pair for name, pair in own.items() if name in allowed}
        wrong = {name: pair for name, pair in own.items() if name not in allowed}
        if first.get("plan") != _whole(shard).get("plan"):
            wrong["plan"] = "other cases or kernels, so other options"
        if shards[0].run["shard"]["costs"] != shard.run["shard"]["costs"]:
            wrong["costs"] = "balanced by other records: give all shards the same --shard-costs"
        if wrong:
            said = "; ".join(f"{name}: {pair}" for name, pair in wrong.items())
            permit = f" (--allow {','.join(wrong)} joins them all the same)" if set(wrong) <= set(FACTS) else ""
            found.append(f"{shards[0].path} and {shard.path} differ: {said}{permit}")
    found += [] if found else _union(shards)  # without the above it would only say the same again
    if found:
        raise ConformanceError(f"these shards on {arch} do not make up one run:\n  " + "\n  ".join(found))
    return differs


def _is_written_so(shard: Earlier) -> bool:
    """Whether what is read here of the first and the last line has the form that a run gives it."""
    run, facts = shard.run, shard.run["shard"]
    if not all(isinstance(facts[name], kind) for name, kind in _NEEDED.items()):
        return False
    whole, notes = facts["whole"], (shard.end or {}).get("notes") or ()
    planned, tables = whole.get("planned", {}), [run.get("kernels", {}), whole.get("kernels", {})]
    return (
        all(type(facts[name]) is int for name in ("index", "count")) and 1 <= facts["index"] <= facts["count"]
        and all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(word, str) for word in pair)
                for pair in (*facts["identity"], *facts["loose"]))
        and all(isinstance(table, dict) and all(isinstance(one, dict) for one in table.values()) for table in tables)
        and isinstance(planned, dict) and all(type(count) is int for count in planned.values())
        and all(isinstance(note, str) for note in notes)
    )


def _whole(shard: Earlier) -> Mapping[str, Any]:
    return {**shard.run, **shard.run["shard"]["whole"]}


def _numbering(shards: Sequence[Earlier]) -> list[str]:
    """Shards that are missing, doubled, or of another division."""
    counts = Counter(int(shard.run["shard"]["count"]) for shard in shards)
    count = counts.most_common(1)[0][0]
    found = [f"{s.path}: is shard {s.run['shard']['index']}/{s.run['shard']['count']}, others are of {count}"
             for s in shards if s.run["shard"]["count"] != count]
    by_index: dict[int, list[Earlier]] = {}
    for shard in shards:
        if shard.run["shard"]["count"] == count:
            by_index.setdefault(int(shard.run["shard"]["index"]), []).append(shard)
    found += [f"shard {index}/{count} is there twice: {' and '.join(str(s.path) for s in same)}; leave one out"
              for index, same in by_index.items() if len(same) > 1]
    found += [f"shard {index}/{count} is missing: run it with the options of the others and --shard {index}/{count}"
              for index in range(1, count + 1) if index not in by_index]
    return found


def _unfinished(shard: Earlier) -> str:
    """Why the shard is no whole run, empty when it is."""
    have = Counter(result["kernel"] for result in shard.results())
    missing = {name: count - have[name] for name, count in shard.run["planned"].items() if count > have[name]}
    if shard.end is not None and not missing:
        return ""
    why = "the run was killed" if shard.end is None else "the run ended early"
    what = ", ".join(f"{count} of {name}" for name, count in missing.items()) or "none"
    number = f"{shard.run['shard']['index']}/{shard.run['shard']['count']}"
    return (f"{shard.path}: {why}, planned results without a line: {what}; run the rest with its options, "
            f"--shard {number} and --resume={shard.path}")


def _union(shards: Sequence[Earlier]) -> list[str]:
    """What keeps the shards' results from being the plan, each once."""
    repeated = {key(case, kernel) for case, kernel in shards[0].run["shard"]["identity"]}
    owner: dict[str, Earlier] = {}
    found = []
    for shard in shards:
        twice = [name for name in shard.lines if name in owner and name not in repeated]
        if twice:
            found.append(f"{len(twice)} results are in {owner[twice[0]].path} and in {shard.path}, such as {twice[0]}")
        if lacking := [name for name in sorted(repeated) if name not in shard.lines]:
            found.append(f"{shard.path}: lacks {len(lacking)} results that every shard repeats, such as {lacking[0]}")
        owner.update(dict.fromkeys(shard.lines, shard))
    pairs = {(r["case"], r["kernel"]) for shard in shards for r in shard.results()}
    whole = _whole(shards[0])
    if not found and plan_digest(pairs) != whole.get("plan"):
        planned = sum(whole["planned"].values())
        found.append(f"together they hold {len(pairs)} results, which are not the {planned} that are planned "
                     f"(plan {whole.get('plan')}); were record files edited?")
    return found


def disagreements(shards: Sequence[Earlier]) -> list[Disagreement]:
    """Identity results that differ between the first shard and another one."""
    facts = shards[0].run["shard"]
    loose = {key(case, kernel) for case, kernel in facts["loose"]}
    found = []
    for name in (key(case, kernel) for case, kernel in facts["identity"]):
        compared = _LOOSE if name in loose else _COMPARED
        first = json.loads(shards[0].lines[name])
        for shard in shards[1:]:
            other = json.loads(shard.lines[name])
            apart = [field for field in compared if not _same(first.get(field), other.get(field))]
            if apart:
                found.append(Disagreement(name, _said(shards[0], first, apart), _said(shard, other, apart)))
    return found


def _same(one: Any, other: Any) -> bool:
    """Equal, not a number being equal to itself: the inputs are the same bits, so the numbers must be."""
    both_nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return bool(one == other) or both_nan


def _said(shard: Earlier, result: Mapping[str, Any], fields: Sequence[str]) -> str:
    values = ", ".join(f"{field} {result.get(field)}" for field in fields)
    return f"shard {shard.run['shard']['index']} ({shard.run.get('device', '')}) says {values}"
