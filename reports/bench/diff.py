"""Two runs with timings side by side: what became slower beyond threshold and spread, and what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reports.bench import spelling
from reports.bench.records import BenchRun, Timing
from reports.text import aligned, plural

THRESHOLD = 0.05
MOST = 30
_FACTS = ("driver", "torch", "tilelang", "python", "commit", "workers")


@dataclass(frozen=True)
class Change:
    """One kernel on one case that was timed in both runs."""

    first: Timing
    second: Timing

    @property
    def slower(self) -> float:
        """0.1 = a tenth slower; negative = faster."""
        return self.second.seconds / self.first.seconds - 1

    @property
    def spread(self) -> float:
        return max(self.first.spread, self.second.spread)


@dataclass(frozen=True)
class BenchDiff:
    """regressions and improvements: beyond threshold and spread, the largest first. noise: beyond the threshold and
    within the spread. lost: timed in the first run, not in the second, with the reason. apart: timed by other clocks,
    or with another cost, which no ratio can be made of. common: timed in both and comparable."""

    first: BenchRun
    second: BenchRun
    threshold: float
    regressions: tuple[Change, ...]
    improvements: tuple[Change, ...]
    noise: tuple[Change, ...]
    lost: tuple[tuple[Timing, str], ...]
    apart: tuple[Change, ...]
    common: int
    remarks: tuple[str, ...]

    @property
    def worse(self) -> bool:
        return bool(self.regressions or self.lost or self.vain)

    @property
    def vain(self) -> bool:
        """Whether no timing of the first run could be compared, although both have some."""
        return bool(self.apart) and not self.common


def bench_diff(first: BenchRun, second: BenchRun, threshold: float = THRESHOLD) -> BenchDiff:
    """Hold the second run against the first."""
    after = {(t.case, t.kernel): t for t in second.timings}
    pairs = [Change(old, after[old.case, old.kernel]) for old in first.timed
             if (old.case, old.kernel) in after and after[old.case, old.kernel].timed]
    common = [change for change in pairs if _comparable(change)]
    beyond = [change for change in common if _size(change) > threshold]
    clear = sorted((change for change in beyond if _size(change) > change.spread), key=_size, reverse=True)
    lost = tuple((old, after[old.case, old.kernel].reason if (old.case, old.kernel) in after else "no line")
                 for old in first.timed
                 if (old.case, old.kernel) not in after or not after[old.case, old.kernel].timed)
    return BenchDiff(
        first, second, threshold,
        regressions=tuple(change for change in clear if change.slower > 0),
        improvements=tuple(change for change in clear if change.slower < 0),
        noise=tuple(change for change in beyond if _size(change) <= change.spread),
        lost=lost,
        apart=tuple(change for change in pairs if not _comparable(change)),
        common=len(common),
        remarks=_remarks(first, second),
    )


def _size(change: Change) -> float:
    """How far the slower of both is behind: a halved and a doubled time are equally large changes."""
    times = change.first.seconds, change.second.seconds
    return max(times) / min(times) - 1


def _comparable(change: Change) -> bool:
    one, other = change.first, change.second
    return (one.kind, one.clock, one.bytes, one.flops) == (other.kind, other.clock, other.bytes, other.flops)


def _remarks(first: BenchRun, second: BenchRun) -> tuple[str, ...]:
    found = [f"{name}: {one or 'unknown'} and {other or 'unknown'}" for name, one, other in (
        *((name, getattr(first, name), getattr(second, name)) for name in ("arch", "device", "sizes")),
        *((name, first.facts.get(name, ""), second.facts.get(name, "")) for name in _FACTS),
    ) if one != other]
    changed = [name for name in {**first.protocol, **second.protocol}
               if first.protocol.get(name) != second.protocol.get(name)]
    found += [f"the protocols differ in {', '.join(changed)}"] if changed else []
    found += [f"{name}: {remark}" for name, run in (("first", first), ("second", second))
              for remark in spelling.remarks(run)]
    return tuple(found)


def tables(found: BenchDiff) -> str:
    """The comparison as plain tables, ending in a newline."""
    word = "NOTHING COMPARED" if found.vain else "SLOWER" if found.worse else "NOT SLOWER"
    head = (f"{word}: {plural(len(found.regressions), 'regression')} beyond {spelling.percent(found.threshold)} and "
            f"spread, {plural(len(found.lost), 'lost timing')}, {plural(len(found.improvements), 'improvement')}, "
            f"{len(found.noise)} within the spread; {plural(found.common, 'timing')} in both")
    parts = [
        head,
        f"first:  {found.first.path}\nsecond: {found.second.path}",
        "\n".join(f"  ! {remark}" for remark in found.remarks),
        _changes("slower", found.regressions),
        _section("lost", len(found.lost), ("kernel", "why", "case"),
                 [(old.kernel, why, old.case) for old, why in found.lost[:MOST]]),
        _changes("faster", found.improvements),
        _changes("noise: beyond the threshold, within the spread of the trials", found.noise),
        _section("not compared: other clock or other cost", len(found.apart), ("kernel", "first", "second", "case"),
                 [(c.first.kernel, _how(c.first), _how(c.second), c.first.case) for c in found.apart[:MOST]]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _how(timing: Timing) -> str:
    return f"{timing.clock}, {timing.bytes} B, {timing.flops} FLOP"


def _changes(title: str, changes: Sequence[Change]) -> str:
    rows = [(c.first.kernel, spelling.time(c.first), spelling.time(c.second), f"{100 * c.slower:+.1f} %", c.first.case)
            for c in changes[:MOST]]
    return _section(title, len(changes), ("kernel", "first", "second", "by", "case"), rows)


def _section(title: str, count: int, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not count:
        return ""
    more = [f"  ... and {count - len(rows)} more"] if count > len(rows) else []
    return "\n".join([f"{title}: {count}", *aligned(head, rows), *more])
