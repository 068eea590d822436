"""How long the suite itself takes: whole pytest processes, with cold and with warm kernel caches.

    python benchmarks/suite_speed.py [--workers auto] [--cold-only | --warm-only] [pytest arguments ...]

Prints one row per run: wall seconds, peak resident memory of all processes together, results by state. The default
is the official tier on every kernel that can run here. Ratios within one run are what counts; machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def peak_memory(process: psutil.Process, peak: int) -> int:
    """The larger of ``peak`` and the resident bytes of a process tree now (shared pages counted once per process)."""
    total = 0
    try:
        for member in [process, *process.children(recursive=True)]:
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
    except psutil.NoSuchProcess:
        pass
    return max(peak, total)


def measure(label: str, arguments: list[str], cache: str) -> None:
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "pytest", "-q", f"--report-dir={out}", *arguments]
        environment = os.environ | {"TILELANG_CACHE_DIR": cache}
        start, peak = time.perf_counter(), 0
        with open(Path(out) / "log", "w") as log:
            running = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            watched = psutil.Process(running.pid)
            while running.poll() is None:
                peak = peak_memory(watched, peak)
                time.sleep(0.1)
        wall = time.perf_counter() - start
        states: Counter[str] = Counter()
        for path in Path(out).glob("*.jsonl"):
            lines = map(json.loads, path.read_text().splitlines())
            states.update(line["state"] for line in lines if line["type"] == "result")
        row = f"{label:6} {wall:7.1f} s  {peak / 2**30:6.2f} GiB  exit {running.returncode}  {dict(states)}"
        print(row, flush=True)
        if running.returncode:
            print((Path(out) / "log").read_text()[-3000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--cold-only", action="store_true")
    parser.add_argument("--warm-only", action="store_true", help="use the machine's own kernel cache as it is")
    known, rest = parser.parse_known_args()
    arguments = ["-n", known.workers, *(rest or ["--tier", "official"])]
    print("pytest", " ".join(arguments))
    if known.warm_only:
        measure("warm", arguments, os.environ.get("TILELANG_CACHE_DIR", str(Path.home() / ".tilelang" / "cache")))
        return
    with tempfile.TemporaryDirectory() as cache:
        measure("cold", arguments, cache)
        if not known.cold_only:
            measure("warm", arguments, cache)


if __name__ == "__main__":
    main()
