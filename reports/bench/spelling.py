"""How figures of timings are written, the same on every page."""

from __future__ import annotations

from collections.abc import Iterator

from reports.bench.ratios import Ratio
from reports.bench.records import KINDS, BenchRun, Timing
from reports.origin import but
from reports.text import DASH, number

NOISE = "noise"


def seconds(value: float) -> str:
    """Three digits with a unit: "15.9 us", "1.20 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor:
            return f"{_three(value / factor)} {unit}"
    return f"{_three(value * 1e9)} ns"


def _three(value: float) -> str:
    """Three digits, trailing zeros included."""
    return f"{value:#.3g}".rstrip(".")


def time(timing: Timing | None) -> str:
    """A timing with its spread: "15.9 us +-1.2 %"; a star where something happened meanwhile."""
    if timing is None:
        return DASH
    return f"{seconds(timing.seconds)} ±{percent(timing.spread)}{' *' if timing.remarks else ''}"


def times(ratio: Ratio | None) -> str:
    """"1.27x", or "noise" with the figure: a difference within the spread says nothing."""
    if ratio is None:
        return DASH
    return f"{NOISE} ({ratio.value:.2f}x)" if ratio.noise else f"{ratio.value:.2f}x"


def span(found: tuple[float, float, float] | None) -> str:
    """"1.27x [0.99, 1.50]"."""
    return DASH if found is None else f"{found[1]:.2f}x [{found[0]:.2f}, {found[2]:.2f}]"


def percent(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.3g} %"


def per_second(value: float | None, unit: str) -> str:
    """"4.31 TB/s"."""
    if value is None:
        return DASH
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{number(value / factor)} {prefix}{unit}/s"
    return f"{number(value)} {unit}/s"


def size(value: int) -> str:
    """"66.1 MB"."""
    for prefix, factor in (("G", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}B"
    return f"{value / 1e3:.3g} kB"


def kind(run: BenchRun) -> str:
    """"device time" or "CPU time", by which clocks."""
    clocks = ", ".join(dict.fromkeys(timing.clock for timing in run.timed))
    return f"{KINDS[run.kind]} by {clocks}" if run.kind else "nothing was timed"


def protocol(run: BenchRun) -> str:
    """The protocol in a line."""
    get = run.protocol.get
    return (f"warm-up {get('warmup')}, {get('repeats')} repeats x {get('trials')} trials, {get('runs')} runs; "
            f"{get('figure')}; flush {get('flush')}: {get('flushing')}; inputs: {get('inputs')}; "
            f"outputs: {get('outputs')}; compilation: {get('compilation')}")


def ceilings(run: BenchRun) -> list[tuple[str, str]]:
    """(ceiling, value) as measured by the processes of the run: one value, or lowest to highest."""
    found: dict[str, list[float]] = {}
    for timing in run.timed:
        found.setdefault("device copy" if run.kind == "device" else "memory copy", []).append(timing.copy)
        if timing.product is not None:
            found.setdefault(f"{timing.arithmetic} matrix product", []).append(timing.product)
    return [(name, _range(values, "B" if "copy" in name else "FLOP")) for name, values in found.items()]


def _range(values: list[float], unit: str) -> str:
    low, high = per_second(min(values), unit), per_second(max(values), unit)
    return low if low == high else f"{low} to {high}"


def remarks(run: BenchRun) -> list[str]:
    """What a reader must know before any figure: doubtful trials, clocks that are fallbacks, a run that was killed."""
    found = [*run.problems]
    if not run.ended:
        found.append("the run did not finish: there are fewer timings than were planned")
    found += _origin(run)
    if run.sizes != "official":
        found.append(f"{run.sizes or 'unknown'} sizes: not the official workloads")
    for note in dict.fromkeys(timing.clock_note for timing in run.timed if timing.clock_note):
        count = sum(timing.clock_note == note for timing in run.timed)
        found.append(f"{count} of {len(run.timed)} timings: {note}")
    doubtful: dict[str, int] = {}
    for timing in run.timed:
        for remark in timing.remarks:
            doubtful[remark] = doubtful.get(remark, 0) + 1
    found += [f"{count} of {len(run.timed)} timings (*): {remark}" for remark, count in doubtful.items()]
    if run.kind == "device" and not all(timing.watched for timing in run.timed):
        found.append("the card was not watched: whether it was throttled or shared is not known")
    return found


def _origin(run: BenchRun) -> Iterator[str]:
    """Where timings come from that this run did not make by itself."""
    for earlier in run.resumed:
        yield (f"resumed: {earlier.get('results')} cases on their kernels are as the run timed them that started "
               f"{earlier.get('started')}" + but(earlier, "which differs in"))
    if run.merged:
        yield f"joined from {run.merged.get('shards')} shards, each with the times of its own machine" + but(
            run.merged, "taken although they differ in")
        for place in run.merged.get("times") or ():
            yield f"two machines' times of {place[1]} are {place[0]} times apart, beyond their spreads"


def reasons(run: BenchRun) -> dict[tuple[str, str], int]:
    """(kernel, why it was not timed) -> cases."""
    found: dict[tuple[str, str], int] = {}
    for timing in run.timings:
        if not timing.timed:
            found[timing.kernel, timing.reason] = found.get((timing.kernel, timing.reason), 0) + 1
    return found
