"""Made-up record files for the tests of the reports: any size, any share of failures, killed at any point."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KERNELS = ("h_tiled", "per_token", "torch_gather")
Line = dict[str, Any]
Change = Callable[[Line, int], None]

ROUTING = [
    (topk, experts, ranks)
    for topk, (experts, ranks) in itertools.product(
        (1, 2, 6, 7, 8, 9),
        [
            (72, 8),
            (72, 72),
            (72, 1),
            (256, 8),
            (256, 64),
            (256, 1),
            (256, 256),
            (288, 8),
            (288, 72),
            (288, 1),
            (384, 8),
            (384, 64),
            (384, 1),
        ],
    )
]


def full_params() -> Iterator[Line]:
    """7489 points: 78 routing rows x 96, and one without tokens."""
    yield _point(0, 1, 1, 1, 2048, "yes", "bf16", "bf16", "no")
    for (topk, experts, ranks), hidden, weights, (into, out), xsf in itertools.product(
        ROUTING,
        (2048, 2560, 3072, 4096, 6144, 7168),
        ("yes", "no"),
        (("fp32", "fp32"), ("fp32", "e4m3"), ("bf16", "bf16"), ("bf16", "e4m3")),
        ("yes", "no"),
    ):
        yield _point(4001, topk, experts, ranks, hidden, weights, into, out, xsf)


def official_params() -> Iterator[Line]:
    """1152 points: the 12 routing rows of the official tier."""
    rows = {(k, e, r) for k in (2, 6, 8, 9) for e, r in ((72, 8), (256, 8), (256, 64))}
    for p in full_params():
        if p["send"] == "4001" and (int(p["topk"]), int(p["experts"]), int(p["ranks"])) in rows:
            yield p


def _point(
    send: int, topk: int, experts: int, ranks: int, hidden: int, weights: str, into: str, out: str, xsf: str
) -> Line:
    values = (send, topk, experts, ranks, hidden, weights, into, out, xsf)
    names = ("send", "topk", "experts", "ranks", "hidden", "weights", "in", "out", "xsf")
    return {name: str(value) for name, value in zip(names, values, strict=True)}


def run_line(**changes: Any) -> Line:
    return {
        "type": "run",
        "schema": 1,
        "started": "2026-01-02T03:04:05+00:00",
        "command": "pytest -n auto",
        "arch": "cpu",
        "device": "Intel(R) Xeon(R) Platinum 8481C, 2 cores",
        "driver": None,
        "python": "3.11.7",
        "platform": "Linux-6.1.0-x86_64-with-glibc2.36",
        "torch": "2.13.0+cpu",
        "tilelang": "0.1.15",
        "compiler": "gcc 12.2.0",
        "commit": "3f9c1d27ab04",
        "dirty": False,
        "operators": ["moe_reduce_fused"],
        "kernels": {
            "h_tiled": _kernel("h_tiled", "bit-exact", "one block per (token, hidden tile)"),
            "per_token": _kernel("per_token", "bit-exact", "one block per token, the baseline"),
            "torch_gather": _kernel("torch_gather", "within-budget", "gather [T,K,H] and reduce"),
        },
        "tiers": ["official"],
        "sizes": "reduced",
        "data": "real",
        "workers": 2,
        "planned": {},
        "tier_counts": {},
        "policies": {
            "moe_reduce_fused": {
                "e4m3-overflow": "saturate to 448 (0x7e); upstream's own reference gives NaN (0x7f)",
                "nan": "a NaN input gives NaN in every output it reaches, and stays NaN in the cast",
                "negative-zero": "a token with only padding slots is +0",
                "atomics": "none: slots are added in ascending order",
            }
        },
        "tolerances": {"moe_reduce_fused": {"fp32": 1e-3, "fp16": 1e-3, "bf16": 1.6e-2, "e4m3": 0.1}},
        "budget": {
            "moe_reduce_fused": "(2K + 2) x 2^-24 x S + half an ULP of the output, S = sum |w x sf| in fp64"
        },
        **changes,
    }


def _kernel(name: str, promise: str, about: str) -> Line:
    return {
        "operator": "moe_reduce_fused",
        "promise": promise,
        "module": f"kernels.reduce_fused.{name}",
        "about": about,
    }


def result_line(params: Line, kernel: str, number: int = 0, **changes: Any) -> Line:
    name = "-".join(f"{key}:{value}" for key, value in params.items())
    family = changes.get("family", "")
    case = f"moe_reduce_fused/{family}/{name}" if family else f"moe_reduce_fused/{name}"
    variant = {("e4m3", "yes"): "quantized", ("e4m3", "no"): "fp8"}.get((params["out"], params["xsf"]))
    promise = "within-budget" if kernel == "torch_gather" else "bit-exact"
    return {
        "type": "result",
        "case": case,
        "operator": "moe_reduce_fused",
        "variant": variant or ("with_x_sf" if params["xsf"] == "yes" else "base"),
        "kernel": kernel,
        "family": "",
        "tiers": ["full", "official"] if int(params["topk"]) in (2, 6, 8, 9) else ["full"],
        "params": params,
        "group": "g",
        "state": "pass",
        "promised": promise,
        "level": promise,
        "kind": None,
        "message": "",
        "budget_fraction": 0.2 + (number * 7919 % 7957) / 10_000,
        "max_error": 1e-3 * (1 + number * 31 % 97) / 97,
        "wrong": 0,
        "elements": 37 * int(params["hidden"]),
        "first": None,
        "path": kernel,
        "lane": "execute",
        "seconds": 0.004 + (number * 13 % 101) / 1000,
        "worker": f"gw{number % 2}",
        "rerun": f"pytest --case '{case}' --kernels {kernel} --sizes reduced",
        "details": None,
        "trace": None,
        **changes,
    }


def fail(line: Line, number: int, **changes: Any) -> None:
    """Make a result line a failure whose message and numbers differ from all others."""
    where = [number % 37, number % int(line["params"]["hidden"])]
    line.update(
        state="fail",
        kind="budget",
        level="published",
        budget_fraction=1.5 + number / 1000,
        wrong=number % 900 + 1,
        first={"index": where, "expected": 0.123 + number, "actual": 0.125 + number},
        message=f"{line['case']} on {line['kernel']}: {number % 900 + 1} of {line['elements']} elements "
        f"exceed the budget; first at {where}: expected {0.123 + number:.9g}, got {0.125 + number:.9g}",
        details={
            "p99 error": 0.001 * number,
            "explained by": "rows >= 32 of each tile, 98 % of the mismatches",
        },
        trace=f"conformance/verdicts/verdict.py:120: in judge\n    raise Mismatch\nnumber {number}",
    )
    line.update(changes)


def end_line(**changes: Any) -> Line:
    return {
        "type": "end",
        "finished": "2026-01-02T03:05:28+00:00",
        "seconds": 83.1,
        "counts": {},
        "problems": [],
        "exit": 0,
        **changes,
    }


def lines(
    params: Iterator[Line], change: Change | None = None, kernels: tuple[str, ...] = KERNELS, **run: Any
) -> list[Line]:
    """A whole run. ``change`` may edit each result line; the end line's exit code follows from the states."""
    points = list(params)
    results = [
        _result(dict(point), kernel, i * 3 + k)
        for i, point in enumerate(points)
        for k, kernel in enumerate(kernels)
    ]
    for number, line in enumerate(results):
        if change:
            change(line, number)
    first = run_line(
        planned={kernel: len(points) for kernel in kernels}, tier_counts={"official": len(points)}, **run
    )
    bad = any(line["state"] not in ("pass", "not-run") for line in results)
    return [first, *results, end_line(exit=int(bad))]


def _result(params: Line, kernel: str, number: int) -> Line:
    """A point may name the edge family that it belongs to."""
    family = params.pop("family", "")
    return result_line(params, kernel, number, **({"family": family, "tiers": ["edge"]} if family else {}))


def edge_params() -> Iterator[Line]:
    """120 points of three edge families, with parameters that the plain matrix does not have."""
    for family, routing, data in itertools.product(
        ("F01-nan", "F06-tokens", "F12-rows"), ("padding", "duplicates", "random"), ("real", "exact")
    ):
        for tokens in (1, 31, 33) if family == "F06-tokens" else (33,):
            for out, xsf in itertools.product(("bf16", "e4m3"), ("yes", "no")):
                yield {
                    "family": family,
                    "tokens": str(tokens),
                    "topk": "8",
                    "hidden": "2560",
                    "weights": "yes",
                    "in": "bf16",
                    "out": out,
                    "xsf": xsf,
                    "routing": routing,
                    "data": data,
                }


def write(path: Path, content: list[Line]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
    return path
