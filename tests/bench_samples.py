"""Made-up files of timings with known figures, for the tests of their pages and of their comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]
ROLES = {"fast": "candidate", "plain": "baseline", "eager": "pytorch"}


def bench_run(**changes: Any) -> Line:
    return {
        "type": "bench-run", "schema": 1, "started": "2026-01-02T03:04:05+00:00", "arch": "sm_90", "device": "One GPU",
        "driver": "1.2", "python": "3.12.1", "platform": "Linux", "torch": "2.11.0", "tilelang": "0.1.15",
        "commit": "abc1234", "dirty": False, "command": "pytest --conformance-bench", "sizes": "official",
        "workers": 4, "roles": ROLES,
        "protocol": {"warmup": 10, "repeats": 50, "trials": 3, "runs": 2, "figure": "median",
                     "flush": "write+read", "flushing": "written, then read"},
        **changes,
    }


def timing(kernel: str, seconds: float, spread: float = 0.01, workload: str = "decode", **changes: Any) -> Line:
    """A timing whose call moves 100 MB and makes 100 million operations, by ceilings of 4 TB/s and 50 TFLOP/s."""
    params = {"model": workload, "tokens": "512", "in": "bf16"} | changes.pop("params", {})
    bandwidth, rate = 1e8 / seconds, 1e8 / seconds
    name = "-".join(f"{key}:{value}" for key, value in params.items())
    return {
        "type": "timing", "case": f"op/{name}", "operator": "op", "variant": "base", "kernel": kernel,
        "tiers": ["models"], "params": params, "path": kernel, "level": "bit-exact", "worker": "gw0",
        "verdict": "0123456789abcdef", "state": "timed", "reason": "", "kind": "device", "clock": "cupti",
        "clock_note": "", "watched": "nvml", "watch_note": "", "exchanged": True, "seconds": seconds, "spread": spread,
        "repeats": 50, "runs": [[seconds] * 3] * 2, "marks": [[[]] * 3] * 2, "remarks": [], "bytes": 100_000_000,
        "flops": 100_000_000, "arithmetic": "fp32",
        "ceilings": {"copy": 4e12, "copy_at_size": 3.9e12, "product": 5e13, "copy_way": "copy", "product_note": ""},
        "figures": {"bandwidth": bandwidth, "rate": rate, "intensity": 1.0, "bound": "memory",
                    "of_copy": bandwidth / 4e12, "of_copy_at_size": bandwidth / 3.9e12, "of_product": rate / 5e13,
                    "of_roof": bandwidth / 4e12},
        **changes,
    }


def not_timed(kernel: str, reason: str, workload: str = "decode") -> Line:
    line = timing(kernel, 1.0, workload=workload)
    kept = ("type", "case", "operator", "variant", "kernel", "tiers", "params", "path", "verdict")
    return {name: line[name] for name in kept} | {"state": "not-timed", "reason": reason}


def end(**changes: Any) -> Line:
    return {"type": "end", "finished": "2026-01-02T03:05:05+00:00", "counts": {}, "problems": [], **changes}


def three_way() -> list[Line]:
    """Two workloads, all three kernels: 40, 50 and 400 us; and 50, 50.2 and 45 us."""
    return [
        bench_run(),
        timing("fast", 40e-6), timing("plain", 50e-6), timing("eager", 400e-6),
        timing("fast", 50e-6, workload="tiny"), timing("plain", 50.2e-6, workload="tiny"),
        timing("eager", 45e-6, workload="tiny"),
        end(),
    ]


def write(path: Path, lines: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
