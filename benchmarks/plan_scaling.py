"""How the suite itself grows with the number of cases: planning, scheduling, records, pages; no case is computed.

    python benchmarks/plan_scaling.py [--workers N] [SIZES ...]

Plans 1152, 7489 and 100 000 cases of an operator in a copy of this checkout and lets every case pass at once, so that
only the suite's own work is left. Prints a row per size: seconds to the first result and to the end, CPU seconds,
peak resident memory of the controller and of its largest worker, sizes of records and page, seconds to make the page
again. Exit code 1 when the controller grows beyond 500 MB, a page beyond 10 MB, or time more than linearly.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
OPERATOR, KERNEL = "moe_reduce_fused", "vectorised"
SIZES = (1152, 7489, 100_000)
MOST_MEMORY, LARGEST_PAGE, GROWTH = 500e6, 10e6, 1.3
# A plugin that lets every case pass, with as many and as varied figures as real ones have.
PASSES = '''
from conformance.result import blank_result
from conformance.session.run import Run

def passes(self, case, kernel, arch):
    shade = case.seed % 1000 / 1000
    return blank_result(case, kernel, self.settings(arch or next(iter(self.archs))), "pass", level="within-budget",
                        budget_fraction=shade, max_error=shade * 1e-6, elements=256, path=kernel.name,
                        seconds=round(shade / 100, 5))

Run.judge_case = passes
'''


@dataclass(frozen=True)
class Measured:
    """One run: seconds, bytes and the number of results."""

    cases: int
    first: float
    wall: float
    cpu: float
    controller: int
    worker: int
    records: int
    page: int
    again: float


def checkout(folder: Path, cases: int) -> Path:
    """A copy of what a run needs, whose matrix has one tier of so many cases, 48 to a group as in the official one."""
    root = folder / "checkout"
    for name in ("conformance", "references", "kernels", "matrices", "reports"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl", "*.html"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    groups, left = divmod(cases, 48)

    def block(first: int, count: int, draws: int) -> str:
        tokens = list(range(first, first + count))
        return (f'  {{ tokens = {tokens}, topk = [2], hidden = [256], routing = ["padding"], weights = ["yes"], '
                f'in = ["fp32"], out = ["fp32"], xsf = ["no"], draw = {list(range(1, draws + 1))} }},\n')

    blocks = (block(1, groups, 48) if groups else "") + (block(groups + 1, 1, left) if left else "")
    text = (f'operator = "{OPERATOR}"\ngroup = ["tokens"]\ndefault_tiers = ["synthetic"]\nslots = "topk"\n\n'
            f'[tier.synthetic]\nabout = "as many cases as asked for"\nexpand = [\n{blocks}]\n')
    (root / "matrices" / f"{OPERATOR}.toml").write_text(text, encoding="utf-8")
    (folder / "every_case_passes.py").write_text(PASSES, encoding="utf-8")
    return root


def measure(cases: int, workers: str) -> Measured:
    """Run the plan once and make its page a second time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root, out = checkout(folder, cases), folder / "out"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", "-p", "no:cacheprovider",
                   "-p", "every_case_passes", "-n", workers, "--operator", OPERATOR, "--kernels", KERNEL,
                   f"--report-dir={out}"]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        log = open(folder / "log", "w")  # noqa: SIM115 - closed with the run
        running = subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=subprocess.STDOUT)
        first, controller, worker = _watch(psutil.Process(running.pid), running, out / "cpu.jsonl", start)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        log.close()
        if running.returncode:
            raise SystemExit((folder / "log").read_text()[-4000:])
        records, page = out / "cpu.jsonl", out / "cpu.html"
        found = records.read_bytes().count(b'"type":"result"')
        if found != cases:
            raise SystemExit(f"{found} results of {cases} cases")
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "conformance", "report", str(records), "--out", str(folder / "again")],
                       cwd=root, check=True, stdout=subprocess.DEVNULL)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Measured(cases, first, wall, cpu, controller, worker, records.stat().st_size, page.stat().st_size,
                        time.perf_counter() - start)


def _watch(process: psutil.Process, running: subprocess.Popen[bytes], records: Path, start: float
           ) -> tuple[float, int, int]:
    """Seconds until the first result is written; peak resident bytes of the controller and of its largest worker."""
    first, peaks = 0.0, [0, 0]
    while running.poll() is None:
        members = [process]
        try:
            members += process.children(recursive=True)
            for place, member in enumerate(members):
                peaks[place > 0] = max(peaks[place > 0], member.memory_info().rss)
        except psutil.NoSuchProcess:
            pass
        if not first and records.exists() and b'"type":"result"' in records.open("rb").read(1 << 20):
            first = time.perf_counter() - start
        time.sleep(0.05)
    return first, peaks[0], peaks[1]


def complaints(rows: list[Measured]) -> list[str]:
    """What grows beyond its limit."""
    found = []
    for row in rows:
        if row.controller > MOST_MEMORY:
            found.append(f"{row.cases} cases: the controller takes {row.controller / 1e6:.0f} MB")
        if row.page > LARGEST_PAGE:
            found.append(f"{row.cases} cases: the page takes {row.page / 1e6:.1f} MB")
    for small, large in itertools.pairwise(rows):
        rate, before = large.cpu / large.cases, small.cpu / small.cases
        if rate > GROWTH * before:
            found.append(f"CPU time per case grows from {before * 1e3:.2f} to {rate * 1e3:.2f} ms between "
                         f"{small.cases} and {large.cases} cases")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2")
    parser.add_argument("sizes", metavar="SIZES", nargs="*", type=int, default=SIZES)
    given = parser.parse_args()
    print(f"{'cases':>8} {'first':>8} {'wall':>8} {'CPU':>8} {'a case':>9} {'controller':>11} {'worker':>8} "
          f"{'records':>9} {'page':>8} {'again':>8}")
    rows = []
    for cases in given.sizes:
        row = measure(cases, given.workers)
        rows.append(row)
        print(f"{row.cases:8} {row.first:6.1f} s {row.wall:6.1f} s {row.cpu:6.1f} s {row.cpu / cases * 1e3:6.2f} ms "
              f"{row.controller / 1e6:8.0f} MB {row.worker / 1e6:5.0f} MB {row.records / 1e6:6.1f} MB "
              f"{row.page / 1e6:5.2f} MB {row.again:6.1f} s", flush=True)
    for complaint in (found := complaints(rows)):
        print(complaint)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
