"""The official matrix in little memory, and estimates of memory beside what was measured.

    python benchmarks/memory_limit.py [--free 24GB] [pytest arguments ...]             # on a GPU
    python benchmarks/memory_limit.py --device cpu [--limit 2GB] [pytest arguments ...]

On a GPU another process first takes all memory but ``--free`` and holds it; the run knows nothing of that. On the CPU
the run is given ``--memory-limit``, and this script measures what its processes hold together: pages of their own, and
those of files once. Prints the outcome, the least that was free (or the most that was held), and a table of groups of
cases: estimate, measured peak, their ratio. The default is the official tier of moe_reduce_fused, on h_tiled (on the
CPU on all its kernels). Exit code 1 when a case did not pass, or a limit was exceeded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.console import print_table  # noqa: E402
from conformance.devices.memory import parse_bytes, resident, spelled  # noqa: E402

SHOWN = 12
OFFICIAL = ["--operator", "moe_reduce_fused", "--tier", "official"]
# Takes memory until so much is left, says so, and writes the least that it ever saw free until its input ends.
HOLDER = """
import sys, threading, torch
wanted = int(sys.argv[1])
torch.zeros(1, device="cuda")
held, step = [], 1 << 33
while True:
    free, total = torch.cuda.mem_get_info()
    size = min(step, free - wanted)
    if size < 1 << 22:
        break
    try:
        held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        if step < 1 << 24:
            break
        step //= 2
free, total = torch.cuda.mem_get_info()
print(free, total, flush=True)
least, done = free, threading.Event()
def watch():
    global least
    while not done.wait(0.01):
        least = min(least, torch.cuda.mem_get_info()[0])
watcher = threading.Thread(target=watch)
watcher.start()
sys.stdin.read()
done.set()
watcher.join()
print(least, flush=True)
"""


class Cut:
    """What is left of a device while a run goes on."""

    said = ""
    exceeded = False


@contextlib.contextmanager
def gpu_cut(wanted: int) -> Iterator[Cut]:
    """Another process holds all GPU memory but ``wanted`` bytes."""
    cut = Cut()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(wanted)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as holder:
        assert holder.stdin and holder.stdout
        line = holder.stdout.readline().split()
        if len(line) != 2:
            raise SystemExit("the process that was to hold the GPU's memory ended: is there a GPU?")
        free, total = map(int, line)
        print(f"{spelled(free)} of {spelled(total)} are left free", flush=True)
        if free > wanted * 1.02:
            holder.stdin.close()
            raise SystemExit(f"only {spelled(free)} could be left, not {spelled(wanted)}")
        try:
            yield cut
        finally:
            holder.stdin.close()
            least = holder.stdout.readline().strip()
            cut.said = f"least free meanwhile: {spelled(int(least))}" if least else "the holding process was killed"
            cut.exceeded = not least


@contextlib.contextmanager
def watched(limit: int) -> Iterator[Cut]:
    """Nobody holds memory; what this process's children hold is measured from a thread."""
    import threading

    cut, most, done = Cut(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.05):
            members = [child.pid for child in psutil.Process().children(recursive=True)]
            most = max(most, resident(members))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield cut
    finally:
        done.set()
        watcher.join()
        cut.said = f"most held together: {spelled(most)} of {spelled(limit)}"
        cut.exceeded = most > limit


def run(arguments: Sequence[str], out: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and results of a pytest run with these arguments."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:hypothesispytest", f"--report-dir={out}", *arguments]
    print(" ".join(["pytest", *arguments]), flush=True)
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    lines = [json.loads(line) for file in out.glob("*.jsonl") if not file.name.endswith(".bench.jsonl")
             for line in file.read_text(encoding="utf-8").splitlines()]
    return code, [line for line in lines if line["type"] == "result"]


def tell(results: Sequence[dict[str, Any]]) -> None:
    """States, reasons, and estimate and peak of each group."""
    print("\nresults:", ", ".join(f"{count} {state}" for state, count in
                                  Counter(result["state"] for result in results).most_common()))
    for reason, count in Counter(r["message"] for r in results if r["state"] != "pass").most_common(10):
        print(f"  {count} x {reason[:200]}")
    groups: dict[str, tuple[int, int, int]] = {}
    for result in results:
        if result.get("memory"):
            estimate, peak, cases = groups.get(result["group"], (0, 0, 0))
            groups[result["group"]] = (max(estimate, result["memory"]["estimate"]), max(peak, result["memory"]["peak"]),
                                       cases + 1)
    if not groups:
        print("no group has a measured peak")
        return
    ratio = {name: peak / estimate for name, (estimate, peak, _) in groups.items()}
    order = sorted(ratio.values())
    print(f"peak / estimate of {len(groups)} groups: least {order[0]:.2f}, median {order[len(order) // 2]:.2f}, "
          f"most {order[-1]:.2f}; above 1: {sum(value > 1 for value in order)}")
    largest = sorted(groups, key=lambda name: -groups[name][1])[:SHOWN]
    worst = sorted((name for name in groups if name not in largest), key=lambda name: -ratio[name])[:SHOWN // 2]
    print_table(("group", "results", "estimate", "peak", "ratio"),
                [(name, cases, spelled(estimate), spelled(peak), f"{ratio[name]:.2f}")
                 for name in (*largest, *worst) for estimate, peak, cases in (groups[name],)],
                "the largest peaks, then the highest ratios of the others")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--free", default="24GB", help="what is left of the GPU (default: 24GB)")
    parser.add_argument("--limit", default="2GB", help="on the CPU: --memory-limit of the run (default: 2GB)")
    parser.add_argument("--workers", default="auto")
    given, rest = parser.parse_known_args()
    if given.device == "cuda":
        cutting = gpu_cut(parse_bytes("--free", given.free))
        arguments = ["-n", given.workers, *(rest or [*OFFICIAL, "--kernels", "h_tiled"])]
    else:
        limit = parse_bytes("--limit", given.limit)
        cutting = watched(limit)
        arguments = ["-n", given.workers, "--arch", "cpu", "--memory-limit", given.limit, *(rest or OFFICIAL)]
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        with cutting as cut:
            code, results = run(arguments, Path(out))
        seconds = time.perf_counter() - start
    tell(results)
    print(f"{cut.said}; {seconds:.1f} s; pytest's exit code {code}")
    passed = code == 0 and bool(results) and all(result["state"] == "pass" for result in results)
    print("PASS" if passed and not cut.exceeded else "FAIL")
    return 0 if passed and not cut.exceeded else 1


if __name__ == "__main__":
    sys.exit(main())
