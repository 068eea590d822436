"""How fast the kernels are: the benchmark lane in a pytest process of its own, then what README states of it.

    python benchmarks/kernel_speed.py [--out DIR] [pytest arguments ...]

Prints the three-way table (without the single cases: they are in DIR/<arch>.bench.txt), the ratio to the copy bandwidth
measured beside each timing, and the figures that a candidate is to reach. The default are the tiers that each matrix
declares for timing, of moe_reduce_fused; `--tier benchmark-smoke,models` is a third of them, `-n 4` judges in parallel.
Exit code: that of pytest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reports.bench import spelling, text  # noqa: E402
from reports.bench.ratios import Row, rows  # noqa: E402
from reports.bench.records import BenchRun, Timing, read_bench  # noqa: E402
from reports.text import aligned  # noqa: E402

MB = 1_000_000
Figure = tuple[str, str, str, str]  # candidate, what, wanted, found


def of_copy(timings: Sequence[Timing], least: int) -> str:
    """Lowest and highest fraction of the copy bandwidth, and where the lowest is."""
    large = [timing for timing in timings if timing.bytes >= least]
    if not large:
        return "no such workload was timed"
    low = min(large, key=lambda timing: timing.of_copy)
    high = max(timing.of_copy for timing in large)
    alike = min(timing.of_copy_at_size for timing in large)
    return (f"{spelling.percent(low.of_copy)} to {spelling.percent(high)} of {len(large)}; of a copy of the same size "
            f"{spelling.percent(alike)} at least; lowest: {low.case.partition('/')[2]}")


def narrow_outputs(timings: Sequence[Timing]) -> str:
    """The worst bandwidth of a variant with a narrow output, relative to that of the base variant on the same point."""
    def point(timing: Timing) -> tuple[str, ...]:
        return tuple(v for k, v in sorted(timing.params.items()) if k not in ("out", "xsf"))

    base = {point(timing): timing.bandwidth for timing in timings if timing.variant == "base"}
    shares = {timing.case: timing.bandwidth / base[point(timing)] for timing in timings
              if timing.variant in ("fp8", "quantized") and point(timing) in base and timing.bytes >= 32 * MB}
    if not shares:
        return "no pair of variants was timed"
    worst = min(shares, key=lambda case: shares[case])
    return f"{spelling.percent(shares[worst])} of base at least; lowest: {worst.partition('/')[2]}"


def slower(found: Sequence[Row]) -> str:
    """Cases in which the baseline is faster beyond noise."""
    cases = [(row.case, row.over_baseline.value) for row in found
             if row.over_baseline and row.over_baseline.value < 1 and not row.over_baseline.noise]
    if not cases:
        return f"never, of {sum(row.over_baseline is not None for row in found)}"
    worst = min(cases, key=lambda case: case[1])
    return f"{len(cases)} of {len(found)}; worst {worst[1]:.2f}x: {worst[0].partition('/')[2]}"


def over_pytorch(found: Sequence[Row]) -> str:
    ratios = {row.case: row.over_pytorch.value for row in found
              if row.over_pytorch and row.candidate and int(row.candidate.params.get("hidden", "0")) >= 3072}
    if not ratios:
        return "no such workload was timed"
    worst = min(ratios, key=lambda case: ratios[case])
    return f"{ratios[worst]:.2f}x to {max(ratios.values()):.2f}x; lowest: {worst.partition('/')[2]}"


def figures(run: BenchRun) -> Iterator[Figure]:
    """What issue and README ask of each candidate."""
    found = rows(run)
    for name in dict.fromkeys(row.candidate.kernel for row in found if row.candidate):
        mine = [row for row in found if row.candidate and row.candidate.kernel == name]
        timings = [row.candidate for row in mine if row.candidate]
        yield name, "of copy bandwidth, more than 256 MB moved", "95 %", of_copy(timings, 256 * MB)
        yield name, "of copy bandwidth, from 32 MB", "85 %", of_copy(timings, 32 * MB)
        yield name, "fp8, quantized: bandwidth of base on the same point", "95 %", narrow_outputs(timings)
        yield name, "slower than the baseline beyond noise", "never", slower(mine)
        yield name, "over PyTorch, hidden >= 3072", "7x", over_pytorch(mine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "reports", help="where records and pages go")
    known, rest = parser.parse_known_args()
    chosen = [] if any(word.startswith("--operator") for word in rest) else ["--operator", "moe_reduce_fused"]
    command = [sys.executable, "-m", "pytest", "-q", "--conformance-bench", f"--report-dir={known.out}", *chosen, *rest]
    print(" ".join(command), flush=True)
    started = time.perf_counter()
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    wall = time.perf_counter() - started
    for path in sorted(known.out.glob("*.bench.jsonl")):
        run = read_bench(path)
        print(f"\n{text.tables(run, cases=False)}")
        print("\n".join(["figures:", *aligned(("candidate", "figure", "wanted", "found"), figures(run))]))
    print(f"\nwhole process {wall:.1f} s, exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
