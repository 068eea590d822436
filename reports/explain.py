"""Which parameter values separate failing results from the others, said as one rule with its counts.

The rule is a box: per parameter, the set of values that failing results have. Every failure lies in it by
construction, so the one question is how many passing results do too. Parameters are added as long as each one
leaves out more of those, three at most; the rule is told only if chance would hardly give one as tight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from reports.records import Result

FEWEST = 3  # with fewer failures nearly any parameter "explains" them
MOST_VALUES = 3  # a longer list of values is no explanation
MOST_CONDITIONS = 3
CHANCE = 0.01  # a rule is told when random failures would fit one this well less often
ABSENT = "none"
_NUMBER = re.compile(r"-?\d+(\.\d+)?")

Condition = tuple[str, tuple[str, ...]]
_Values = tuple[set[str], set[str]]  # of the failures, of all


@dataclass(frozen=True)
class Rule:
    """``failing`` of the ``inside`` executed results in the box fail, and none of the ``outside`` others."""

    conditions: tuple[Condition, ...]
    failing: int
    inside: int
    outside: int

    @property
    def text(self) -> str:
        where = ", ".join(f"{key}:{'|'.join(values)}" for key, values in self.conditions)
        share = f"all {self.inside}" if self.failing == self.inside else f"{self.failing} of {self.inside}"
        return f"{share} results with {where} fail like this, none of the {self.outside} others"


def explain(failing: Sequence[Result], executed: Sequence[Result]) -> Rule | None:
    """The best box for ``failing`` among ``executed`` (which holds them), None when no parameter tells."""
    if len(failing) < FEWEST:
        return None
    candidates = _candidates(failing, executed)
    tried = len(candidates)
    inside, chosen, alternatives = list(executed), list[Condition](), 1
    found: Rule | None = None
    while candidates and len(inside) > len(failing) and len(chosen) < MOST_CONDITIONS:
        kept = {key: [r for r in inside if value_of(r, key) in some] for key, (some, _) in candidates.items()}
        best = min(kept, key=lambda key: (len(kept[key]), len(candidates[key][0])))
        if len(kept[best]) == len(inside):
            break
        some, every = candidates.pop(best)
        inside = kept[best]
        chosen.append((best, tuple(sorted(some, key=natural))))
        alternatives *= tried * math.comb(len(every), len(some))
        # The chance that failures strewn at random all lie in one of the boxes that could have been chosen.
        if alternatives * (len(inside) / len(executed)) ** len(failing) < CHANCE:
            found = Rule(tuple(chosen), len(failing), len(inside), len(executed) - len(inside))
    return found


def value_of(result: Result, key: str) -> str:
    """A parameter of the result, or one of the other names that can explain a failure."""
    if key == "variant":
        return result.variant or ABSENT
    if key == "family":
        return result.family or ABSENT
    return result.params.get(key, ABSENT)


def natural(value: str) -> tuple[int, float, str]:
    """Sort key: numbers by size, then words."""
    return (0, float(value), value) if _NUMBER.fullmatch(value) else (1, 0.0, value)


def _candidates(failing: Sequence[Result], executed: Sequence[Result]) -> dict[str, _Values]:
    """Parameter -> (values of the failures, all values), where the first are few and not all."""
    keys = dict.fromkeys(key for result in executed for key in result.params)
    found: dict[str, _Values] = {}
    for key in (*keys, "family", "variant"):
        some, every = ({value_of(result, key) for result in results} for results in (failing, executed))
        if len(some) <= MOST_VALUES and some != every:
            found[key] = some, every
    return found
