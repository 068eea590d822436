"""Which configuration of a kernel is the fastest: each on each case, judged first, by the protocol of the lane.

    python benchmarks/kernel_configs.py h_tiled --tier models --config block_h:256-ahead:4 block_h:512-ahead:4 ...

Without --config the kernel's own configurations. "default" is what it chooses by itself. Prints one row per case, and
per configuration how far it is behind the best one (geometric mean). One process; nothing is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import geometric_mean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.bench.lane import Lane  # noqa: E402
from conformance.bench.measure import Measured  # noqa: E402
from conformance.case import Case  # noqa: E402
from conformance.console import print_table  # noqa: E402
from conformance.environment import archs_here  # noqa: E402
from conformance.judge import Judge  # noqa: E402
from conformance.kernel import Kernel  # noqa: E402
from conformance.registry import kernels, matrices  # noqa: E402
from conformance.result import Settings  # noqa: E402
from reports.bench import spelling  # noqa: E402


def measured(judge: Judge, lane: Lane, case: Case, kernel: Kernel, config: str | None) -> Measured | None:
    """None where the kernel's result with this configuration is wrong, or the case is not taken."""
    result = judge.run(case, kernel)
    if result.state != "pass":
        print(f"{case.id}: {result.state}: {result.message}", file=sys.stderr)
        return None
    rotation = lane.rotation(case, kernel, judge.ready(case), config)
    rotation.judge()
    return lane.measured(rotation)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel")
    parser.add_argument("--tier", default="models")
    parser.add_argument("--only", default="", help="only cases whose id contains all of these words (comma-separated)")
    parser.add_argument("--config", nargs="*", default=None)
    parser.add_argument("--sizes", choices=("official", "reduced"), default=None)
    args = parser.parse_args()
    arch, device = next(iter(archs_here().items()))
    settings = Settings(device, args.sizes or ("reduced" if device == "cpu" else "official"), arch)
    judge = Judge(settings)
    lane = Lane(settings, judge.device)
    for of in matrices().values():
        kernel = next((one for one in kernels(of.operator) if one.name == args.kernel), None)
        if kernel is None or args.tier not in of.tier_names:
            continue
        configs = [None, *(kernel.configs if args.config is None else args.config)]
        words = args.only.split(",")
        cases = [case for case in of.grouped(of.cases(args.tier)) if all(word in case.id for word in words)]
        table, behind = [], {config: [] for config in configs}
        for case in cases:
            found = {config: measured(judge, lane, case, kernel, config) for config in configs}
            times = {config: one.seconds for config, one in found.items() if one is not None}
            for config, seconds in times.items():
                behind[config].append(seconds / min(times.values()))
            cells = [f"{spelling.seconds(one.seconds)} ±{spelling.percent(one.spread)}" if one else "-"
                     for one in found.values()]
            best = min(times, key=lambda config: times[config]) if times else None
            table.append((case.name, *cells, best or "default"))
        names = [config or "default" for config in configs]
        print_table(("case", *names, "best"), table, f"{kernel.name} on {arch}, {settings.sizes} sizes, "
                    f"{lane.clock.name} {lane.clock.note}")
        print_table(("configuration", "cases", "behind the best (geometric mean)", "at most"),
                    [(config or "default", len(values), f"{geometric_mean(values):.3f}x", f"{max(values):.3f}x")
                     for config, values in behind.items() if values])


if __name__ == "__main__":
    main()
