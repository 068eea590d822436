"""Which configuration of a kernel is the fastest: each on each case, judged first, by the protocol of the lane.

    python benchmarks/kernel_configs.py h_tiled --tier models --config block_h:256-ahead:4 block_h:512-ahead:4 ...

Without --config the kernel's own configurations. "default" is what it chooses by itself. Prints for each case its
configurations, the fastest first: time, how far it is behind the fastest, and the fraction of the copy bandwidth
measured beside it, of the best copy and of one that moves as many bytes; then for each configuration how often it is
the fastest and how far behind. `--flush write write+read` measures all of it by both protocols. One process; nothing is
written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.bench.clock import ClockFailed, WrongWhenTimed  # noqa: E402
from conformance.bench.lane import Lane  # noqa: E402
from conformance.bench.measure import TooSlow  # noqa: E402
from conformance.bench.protocol import FLUSHES, WRITE_READ  # noqa: E402
from conformance.bench.roofline import Figures, figures  # noqa: E402
from conformance.case import Case  # noqa: E402
from conformance.cases.matrix import Matrix  # noqa: E402
from conformance.console import print_table  # noqa: E402
from conformance.environment import archs_here  # noqa: E402
from conformance.errors import NotSupported  # noqa: E402
from conformance.judging.judge import Judge  # noqa: E402
from conformance.kernel import Kernel  # noqa: E402
from conformance.launching.torch_settings import torch_settings_kept  # noqa: E402
from conformance.registry import kernels, matrices, operator  # noqa: E402
from conformance.result import Settings  # noqa: E402
from reports.bench import spelling  # noqa: E402


@dataclass(frozen=True)
class Found:
    """One configuration ("default": the kernel's own choice) on one case. behind: its time over the fastest one's."""

    config: str
    seconds: float
    spread: float
    figures: Figures
    behind: float = 1.0


def measured(judge: Judge, lane: Lane, case: Case, kernel: Kernel, configs: Sequence[str | None]) -> list[Found]:
    """The fastest first. What is wrong, refused or not to be timed is told on stderr and left out."""
    result = judge.run(case, kernel)
    if result.state != "pass":
        print(f"{case.id}: {result.state}: {result.message}", file=sys.stderr)
        return []
    found = []
    for config in configs:
        subject = judge.ready(case)
        try:
            with torch.no_grad(), torch_settings_kept():
                rotation = lane.rotation(case, kernel, subject, config)
                rotation.judge()
                one, _ = lane.measured(rotation)
        except (WrongWhenTimed, TooSlow, ClockFailed, NotSupported, ValueError, TypeError) as error:
            print(f"{case.id}: {config or 'default'}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        cost = operator(case.operator).cost(subject.call)
        found.append(Found(config or "default", one.seconds, one.spread, figures(one.seconds, cost, lane.roof(cost))))
    fastest = min((one.seconds for one in found), default=0.0)
    return [replace(one, behind=one.seconds / fastest) for one in sorted(found, key=lambda one: one.seconds)]


def compare(judge: Judge, lane: Lane, kernel: Kernel, cases: Sequence[Case], configs: Sequence[str | None]) -> None:
    """Print the tables of one kernel."""
    rows, by_config = [], dict[str, list[Found]]()
    for case in cases:
        for one in measured(judge, lane, case, kernel, configs):
            by_config.setdefault(one.config, []).append(one)
            of = one.figures
            rows.append((case.name, one.config,
                         f"{spelling.seconds(one.seconds)} ±{spelling.percent(one.spread)}", f"{one.behind:.3f}x",
                         spelling.percent(of.of_copy), spelling.percent(of.of_copy_at_size)))
    protocol = lane.protocol
    print_table(("case", "configuration", "time", "behind", "of copy", "of copy alike"), rows,
                f"{kernel.name} on {lane.settings.arch}, {lane.settings.sizes} sizes, {lane.clock.name} "
                f"{lane.clock.note}, flush {protocol.flush}, "
                f"copies at {spelling.per_second(lane.ceilings.copy().best, 'B')}")
    print_table(("configuration", "cases", "fastest in", "behind (geometric mean)", "at most", "of copy, at least"),
                [(config, len(found), sum(one.behind == 1 for one in found),
                  f"{geometric_mean(one.behind for one in found):.3f}x", f"{max(one.behind for one in found):.3f}x",
                  spelling.percent(min(one.figures.of_copy for one in found)))
                 for config, found in sorted(by_config.items(), key=lambda entry: geometric_mean(
                     one.behind for one in entry[1]))])


def chosen(of: Matrix, tiers: Sequence[str], words: Sequence[str]) -> list[Case]:
    cases = of.plan(tier for tier in tiers if tier in of.tier_names)
    return [case for case in of.grouped(cases) if all(word in case.id for word in words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel")
    parser.add_argument("--tier", default="models", help="one or several (comma-separated)")
    parser.add_argument("--only", default="", help="only cases whose id contains all of these words (comma-separated)")
    parser.add_argument("--config", nargs="*", default=None)
    parser.add_argument("--sizes", choices=("official", "reduced"), default=None)
    parser.add_argument("--flush", nargs="+", choices=FLUSHES, default=[WRITE_READ],
                        help="what is done to the last cache before each call; the lane's own is write+read")
    args = parser.parse_args()
    arch, device = next(iter(archs_here().items()))
    settings = Settings(device, args.sizes or ("reduced" if device == "cpu" else "official"), arch)
    judge = Judge(settings)
    lanes = [Lane(settings, judge.device) for _ in args.flush]
    for lane, flush in zip(lanes, args.flush, strict=True):
        lane.protocol = replace(lane.protocol, flush=flush)
    found = 0
    for of in matrices().values():
        kernel = next((one for one in kernels(of.operator) if one.name == args.kernel), None)
        cases = chosen(of, args.tier.split(","), args.only.split(","))
        if kernel is not None and cases:
            found += len(cases)
            configs = [None, *(kernel.configs if args.config is None else args.config)]
            for lane in lanes:
                compare(judge, lane, kernel, cases, configs)
    if not found:
        parser.error(f"{args.kernel}: no kernel of that name has cases in {args.tier} with {args.only or 'any name'}")


if __name__ == "__main__":
    main()
