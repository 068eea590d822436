"""Two runs side by side: what failed anew, what was lost, what changed, for two commits or two architectures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from reports.records import Records, Result, Run
from reports.text import sentence
from reports.timing import Timing, timings

DRIFT = 0.05  # change of a budget fraction that is worth a line
LANES = ("", "route", "lower", "assemble", "execute")  # lowest first
_FACTS = ("arch", "device", "commit", "dirty", "torch", "tilelang", "python", "compiler", "driver", "platform", "sizes",
          "data", "tiers", "operators", "workers")


@dataclass(frozen=True)
class Change:
    """One (case, kernel) that went otherwise: how in the first run and in the second. ``text``: the second's message,
    where it says why."""

    case: str
    kernel: str
    first: str
    second: str
    text: str = ""
    rerun: str = ""


@dataclass(frozen=True)
class Drift:
    """A budget fraction that moved by more than the threshold."""

    case: str
    kernel: str
    first: float
    second: float

    @property
    def by(self) -> float:
        return self.second - self.first


@dataclass(frozen=True)
class Comparison:
    """``lost``: results that the first run has and the second lacks, did not run, or took to a lower lane on the same
    architecture. ``changed``: level, path, lane or kind of failure. ``drift``: the largest first; ``common``: results
    that both have."""

    first: Records
    second: Records
    threshold: float
    common: int
    failures: tuple[Change, ...]
    lost: tuple[Change, ...]
    fixed: tuple[Change, ...]
    changed: tuple[Change, ...]
    added: tuple[Change, ...]
    drift: tuple[Drift, ...]
    timing: tuple[Timing, ...]
    environment: Mapping[str, tuple[str, str]]

    @property
    def worse(self) -> bool:
        return bool(self.failures or self.lost)


def compare(first: Records, second: Records, threshold: float = DRIFT) -> Comparison:
    """Hold the second run against the first; ``threshold`` is in budget fractions."""
    before = {(r.case, r.kernel): r for r in first.results}
    after = {(r.case, r.kernel): r for r in second.results}
    pairs = [(old, after[name]) for name, old in before.items() if name in after]
    new = [r for name, r in after.items() if name not in before]
    same_arch = first.run.arch == second.run.arch
    failures = [_change(a, b) for a, b in pairs if b.failing and not a.failing]
    failures += [_change(None, r) for r in new if r.failing]
    lost = [_change(r, None) for name, r in before.items() if name not in after]
    lost += [_change(a, b) for a, b in pairs if _is_lost(a, b, same_arch)]
    drift = [Drift(b.case, b.kernel, a.budget_fraction, b.budget_fraction) for a, b in pairs
             if a.budget_fraction is not None and b.budget_fraction is not None
             and abs(b.budget_fraction - a.budget_fraction) > threshold]
    return Comparison(
        first, second, threshold, len(pairs),
        failures=tuple(failures),
        lost=tuple(lost),
        fixed=tuple(_change(a, b) for a, b in pairs if a.failing and b.state in ("pass", "expected")),
        changed=tuple(_change(a, b) for a, b in pairs if _is_changed(a, b, same_arch)),
        added=tuple(_change(None, r) for r in new if not r.failing),
        drift=tuple(sorted(drift, key=lambda d: -abs(d.by))),
        timing=timings(pairs),
        environment=dict(_environment(first.run, second.run)),
    )


def _is_lost(old: Result, new: Result, same_arch: bool) -> bool:
    """Whether a case that ran does not any more; on an architecture that is not here a lower lane is no loss."""
    if old.state == "not-run":
        return False
    return new.state == "not-run" or (same_arch and not new.failing and _lane(new) < _lane(old))


def _is_changed(old: Result, new: Result, same_arch: bool) -> bool:
    """Another level, path, lane or kind, where that is not already a failure, a fix or a loss."""
    if (new.failing != old.failing) or _is_lost(old, new, same_arch):
        return False
    compared = bool(old.level and new.level)
    return (compared and old.level != new.level) or any(
        getattr(old, name) != getattr(new, name) for name in ("state", "path", "lane", "kind"))


def _lane(result: Result) -> int:
    # Records without a lane are of executed cases
    return LANES.index(result.lane) if result.lane in LANES[1:] else len(LANES) - 1


def _change(old: Result | None, new: Result | None) -> Change:
    one = new or old
    assert one is not None
    ways = _way(old), _way(new)
    return Change(one.case, one.kernel, *ways, text=sentence(new.message, new) if new else "", rerun=one.rerun)


def _way(result: Result | None) -> str:
    """How a case went: "fail (budget), published, path slow"."""
    if result is None:
        return "no result"
    kind = f" ({result.kind})" if result.kind else ""
    rest = [result.level, f"path {result.path}" if result.path else "",
            f"lane {result.lane}" if result.lane not in ("", "execute") else ""]
    return ", ".join(filter(None, (result.state + kind, *rest)))


def levels(changes: Sequence[Change]) -> dict[tuple[str, str, str], int]:
    """Changes counted by kernel and by how the case went, the most frequent first."""
    found: dict[tuple[str, str, str], int] = {}
    for change in changes:
        name = change.kernel, change.first, change.second
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda entry: -entry[1]))


def _environment(first: Run, second: Run) -> Iterator[tuple[str, tuple[str, str]]]:
    for name in _FACTS:
        old, new = getattr(first, name), getattr(second, name)
        if old != new:
            yield name, (_spelled(old), _spelled(new))
    for name in dict.fromkeys((*first.kernels, *second.kernels)):
        one, other = first.kernels.get(name), second.kernels.get(name)
        if one is None or other is None:
            yield f"kernel {name}", (_presence(one is not None), _presence(other is not None))
        elif one.promise != other.promise:
            yield f"promise of {name}", (one.promise, other.promise)
    for what in ("policies", "tolerances", "budget"):
        for operator in dict.fromkeys((*getattr(first, what), *getattr(second, what))):
            rules = getattr(first, what).get(operator), getattr(second, what).get(operator)
            if rules[0] != rules[1] and None not in rules:
                yield f"{what} of {operator}", (str(rules[0]), str(rules[1]))


def _presence(there: bool) -> str:
    return "ran" if there else "absent"


def _spelled(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
