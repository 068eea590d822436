"""``conformance repro CASE --minimise``: the smallest case of the same operator on which a kernel fails alike.

One parameter after another is made simpler, as far as the failure stays the same, until no step is left. Numbers go
down, to values that the operator's matrix has and between them; words are replaced by more usual ones, or left out
where other cases do without. No random search: it starts from a case that fails, and most steps from there fail too.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from conformance.case import Case
from conformance.errors import ConformanceError
from conformance.expectations.held import hold
from conformance.judge import Judge
from conformance.kernel import Kernel
from conformance.lookup import every_case
from conformance.registry import arch as table
from conformance.result import Result, Settings
from conformance.zoo.kill_matrix import FAILING, cause_of

COMPILED = ("hidden", "in", "out")  # what a new value of may compile another kernel: these come last


@dataclass(frozen=True)
class Minimised:
    """The smallest case found, its result, how many cases were run, and whether time ended the search."""

    case: Case
    result: Result
    tried: int
    cut_short: bool


def minimise(case: Case, kernel: Kernel, settings: Settings, seconds: float,
             clock: Callable[[], float] = time.monotonic) -> Minimised:
    """Shrink a failing case for at most ``seconds``; the first run always takes place.

    The failure stays the same: state, kind, and the cause that the diagnosis names, where it names one. Raises
    ConformanceError when the case does not fail, or its failure is declared by a rule of expectation.
    """
    end = clock() + seconds
    first = _run(case, kernel, settings)
    if first.state == "expected":
        raise ConformanceError(f"{case.id} fails on {kernel.name} as a rule of expectation declares: {first.message}")
    if first.state not in FAILING:
        raise ConformanceError(f"{case.id} does not fail on {kernel.name} ({first.state}): there is nothing to shrink"
                               f"{f'; {first.message}' if first.message else ''}")
    search = _Search(case, first, kernel, settings, lambda: clock() >= end)
    while not search.over() and search.once():
        pass
    return Minimised(search.case, search.result, len(search.seen), search.over())


class _Search:
    """``case`` is the smallest known to fail as the first one did, ``result`` its result."""

    def __init__(self, case: Case, first: Result, kernel: Kernel, settings: Settings, over: Callable[[], bool]) -> None:
        self.case, self.result, self.over = case, first, over
        self.wanted = _alike(first)
        self._judge = functools.partial(_run, kernel=kernel, settings=settings)
        self.seen: dict[str, Result | None] = {case.id: first}

    def once(self) -> bool:
        """Try to simplify each parameter; whether one was."""
        before = self.case
        for name in _in_order(self.case):
            if name in self.case.params and not self.over():
                self._simplify(name)
        return self.case != before

    def _simplify(self, name: str) -> None:
        for value in _simpler(self.case, name):
            if self.over():
                return
            if self._fails(_with(self.case, name, value)):
                break
        if _number(self.case.params.get(name)) is not None:
            self._between(name)

    def _between(self, name: str) -> None:
        """Halve the distance to the largest smaller value that is known not to fail."""
        now = self.case.number(name)
        low = max((known for known in map(_number, _values(self.case, name)) if known is not None and known < now),
                  default=0)
        while self.case.number(name) - low > 1 and not self.over():
            middle = (self.case.number(name) + low) // 2
            if not self._fails(_with(self.case, name, str(middle))):
                low = middle

    def _fails(self, candidate: Case) -> bool:
        """Whether a case fails alike; then it is the smallest one known. One that is no case at all does not."""
        if candidate.id not in self.seen:
            try:
                self.seen[candidate.id] = self._judge(candidate)
            except Exception:  # not a legal point: some part of the suite that builds its inputs says so
                self.seen[candidate.id] = None
            found = self.seen[candidate.id]
            if found is not None and _alike(found) == self.wanted:
                self.case, self.result = candidate, found
                return True
        return False


def _run(case: Case, kernel: Kernel, settings: Settings) -> Result:
    """The judge's result, held to the architecture's rules; a judge of its own diagnoses every failure."""
    facts = table(settings.arch)
    return hold(Judge(settings).run(case, kernel), kernel, facts, facts.rules)


def _alike(result: Result) -> tuple[str, str | None, str | None]:
    return result.state, result.kind, cause_of(result.record())


def _in_order(case: Case) -> list[str]:
    """Numbers, then words, then what may need another compilation."""
    return sorted(case.params, key=lambda name: (name in COMPILED, _number(case.params[name]) is None))


def _simpler(case: Case, name: str) -> Iterator[str | None]:
    """Values to try, the simplest first; None leaves the parameter out."""
    now = case.params[name]
    known = _values(case, name)
    number = _number(now)
    if number is not None:
        smaller = {other for other in map(_number, known) if other is not None and other < number}
        yield from map(str, sorted(smaller))
        return
    usual = [value for value, _ in known.most_common()]
    yield from usual[: usual.index(now)] if now in usual else usual


def _values(case: Case, name: str) -> Counter[str | None]:
    """How often each value of a parameter stands in the operator's matrix, None where a case has none."""
    return Counter(other.params.get(name) for other in every_case(case.operator).values())


def _with(case: Case, name: str, value: str | None) -> Case:
    params = {key: known for key, known in case.params.items() if key != name or value is not None}
    return replace(case, params=params if value is None else params | {name: value}, tiers=frozenset())


def _number(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdecimal() else None
