"""Speed of the two-stage MoE kernels on a GPU, beside a dense torch product of as many operations.

    python benchmarks/gemm_speed.py [--shapes M,L,decode1,decode8] [--dtypes fp8,bf16,...] [--kernels pipelined,legacy]

Each stage is captured in a CUDA graph and replayed, so that launches from Python do not count. One row per shape,
dtype, stage and kernel: microseconds, TFLOP/s, the same of the dense product ([T k, K] x [K, N] once, fp8 and int8 in
their own type, all else in bf16), and how many times as long the kernel takes. Dense products read one weight, MoE
those of every expert that has a token: what that costs at least is in the column of bytes. A result that differs from
the first kernel's by more than rounding ends the run with exit code 1. Data are random bytes; no value is judged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conformance.console import print_table  # noqa: E402
from conformance.registry import kernels  # noqa: E402
from references.moe_gemm_2stage.cases import Extents  # noqa: E402
from references.moe_gemm_2stage.sorting import sort  # noqa: E402

SHAPES = {
    "S": Extents(64, 256, 128, 4, 2, 16),
    "M": Extents(129, 1024, 256, 8, 2, 32),
    "L": Extents(333, 4096, 2048, 17, 9, 64),
    "prefill": Extents(8192, 7168, 256, 128, 8, 64),
    "decode1": Extents(1, 7168, 256, 128, 8, 16),
    "decode8": Extents(8, 7168, 256, 256, 8, 16),
}
DTYPES = ("fp8", "bf16", "fp16", "int8", "int4", "int4_bf16", "int4_bf16_g32")
_FLOATS = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp16": torch.float16}


def rows_of(dtype: str, rows: int, width: int) -> tuple[Tensor, Tensor | None]:
    """Activations [rows, width] near 1, and their scales."""
    if dtype in ("int8", "int4"):
        return (torch.randint(-127, 128, (rows, width), dtype=torch.int8, device="cuda"),
                torch.full((rows,), 1 / 64, device="cuda"))
    scale = torch.ones(rows, device="cuda") if dtype == "fp8" else None
    form = _FLOATS.get(dtype, torch.bfloat16)
    return torch.randn((rows, width), dtype=torch.bfloat16, device="cuda").to(form), scale


def weight_of(dtype: str, experts: int, rows: int, width: int) -> tuple[Tensor, Tensor | None]:
    """Weights of all experts, whose sums over ``width`` are near 1, and their scales; expert by expert."""
    columns = width // 2 if dtype.startswith("int4") else width
    form = _FLOATS.get(dtype, torch.uint8 if dtype.startswith("int4") else torch.int8)
    stored = torch.empty((experts, rows, columns), dtype=form, device="cuda")
    for expert in range(experts):
        if form in (torch.uint8, torch.int8):
            stored[expert] = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device="cuda").view(form)
        else:
            one = torch.randn((rows, columns), dtype=torch.float32, device="cuda")
            stored[expert] = (one if dtype == "fp8" else one / width**0.5).to(form)
    if dtype in ("bf16", "fp16"):
        return stored, None
    size = {"fp8": 1.0, "int8": 73.0}.get(dtype, 4.6) * width**0.5
    shape = (experts, width // 32, rows) if dtype == "int4_bf16_g32" else (experts, rows)
    return stored, torch.full(shape, 1 / size, device="cuda")


def stages(dtype: str, of: Extents) -> dict[str, tuple[str, dict[str, Any], Tensor]]:
    """(operator, arguments, output) by name of what is measured."""
    score = torch.rand((of.tokens, of.experts), device="cuda")
    ids = score.argsort(dim=1)[:, : of.topk].to(torch.int32).contiguous()
    weights = torch.softmax(torch.randn((of.tokens, of.topk), device="cuda"), dim=1)
    found = sort(ids, weights, of.experts, of.block)
    slots = of.tokens * of.topk
    shared = {
        "sorted_token_ids": found.token_ids, "sorted_expert_ids": found.expert_ids, "sorted_weights": found.weights,
        "num_valid_ids": found.num_valid[:1].clone(), "topk_ids": ids, "topk_weights": weights, "in_dtype": dtype,
        "block": of.block,
    }
    x, scale_x = rows_of(dtype, of.tokens, of.hidden)
    w1, scale_w1 = weight_of(dtype, of.experts, 2 * of.inter, of.hidden)
    a2, scale_a2 = rows_of(dtype, slots, of.inter)
    w2, scale_w2 = weight_of(dtype, of.experts, of.hidden, of.inter)
    first = shared | {"x": x, "scale_x": scale_x, "w1": w1, "scale_w1": scale_w1, "doweight": "none"}
    second = shared | {"a2": a2.view(of.tokens, of.topk, of.inter), "scale_a2": scale_a2, "w2": w2,
                       "scale_w2": scale_w2}

    def empty(rows: int, columns: int) -> Tensor:
        return torch.empty((rows, columns), dtype=torch.float16, device="cuda")

    return {
        "stage 1": ("moe_gemm1", first, empty(slots, of.inter)),
        "stage 2 atomic": ("moe_gemm2", second | {"combine": "atomic"}, empty(of.tokens, of.hidden)),
        "stage 2 reduce": ("moe_gemm2", second | {"combine": "reduce"}, empty(slots, of.hidden)),
    }


def dense(dtype: str, rows: int, width: int, columns: int) -> Callable[[], Any]:
    """One product [rows, width] x [width, columns] in torch; rows padded where its kernels ask for that."""
    if dtype == "fp8":
        rows = (rows + 15) // 16 * 16
        left = torch.randn((rows, width), device="cuda").to(torch.float8_e4m3fn)
        right = torch.randn((columns, width), device="cuda").to(torch.float8_e4m3fn).T
        one = torch.ones((), device="cuda")
        return lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if dtype == "int8":
        rows = max(32, (rows + 7) // 8 * 8)
        left = torch.randint(-127, 128, (rows, width), dtype=torch.int8, device="cuda")
        right = torch.randint(-127, 128, (columns, width), dtype=torch.int8, device="cuda").T
        return lambda: torch._int_mm(left, right)
    form = torch.float16 if dtype == "fp16" else torch.bfloat16
    left = torch.randn((rows, width), device="cuda").to(form)
    right = torch.randn((columns, width), device="cuda").to(form).T
    return lambda: left @ right


def seconds(call: Callable[[], Any]) -> float:
    """Median time of one call in a replayed CUDA graph; a tenth of a second of replays, three at least."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.1 and len(times) < 100):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return sorted(times)[len(times) // 2]


def compare(name: str, found: Tensor, expected: Tensor) -> str | None:
    """What is wrong when two results differ by more than a few roundings of f16 sums."""
    error = (found.float() - expected.float()).abs().max().item()
    size = expected.float().abs().max().item()
    return None if error <= 0.02 * size else f"{name}: differs by {error:.3g}, the largest element is {size:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="M,L,decode1,decode8", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kernels", default="legacy,pipelined")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU is visible: nothing to measure", file=sys.stderr)
        return 2
    rows: list[tuple[object, ...]] = []
    wrong: list[str] = []
    for shape in chosen.shapes.split(","):
        of = SHAPES[shape]
        for dtype in chosen.dtypes.split(","):
            torch.manual_seed(1)
            products = {"stage 1": (of.hidden, 2 * of.inter), "stage 2": (of.inter, of.hidden)}
            known = {name: seconds(dense(dtype, of.tokens * of.topk, *extents)) for name, extents in products.items()}
            for name, (operator, arguments, out) in stages(dtype, of).items():
                width, columns = products[name[:7]]
                work = 2 * of.tokens * of.topk * width * columns
                used = min(of.experts, len(arguments["topk_ids"].unique()))
                weight = arguments["w1" if operator == "moe_gemm1" else "w2"]
                size = weight[0].numel() * weight.element_size() * used
                expected: Tensor | None = None
                for kernel in kernels(operator, chosen.kernels.split(",")):
                    taken = seconds(lambda k=kernel, a=arguments, o=out: k.function(**a, out=o))  # type: ignore[misc]
                    if expected is None:
                        expected = out.clone()
                    elif reason := compare(f"{shape} {dtype} {name} {kernel.name}", out, expected):
                        wrong.append(reason)
                    rows.append((shape, dtype, name, kernel.name, f"{taken * 1e6:.1f}", f"{work / taken / 1e12:.2f}",
                                 f"{size / taken / 1e9:.0f}", f"{known[name[:7]] * 1e6:.1f}",
                                 f"{known[name[:7]] / taken:.3f}", f"{taken / known[name[:7]]:.2f}"))
            torch.cuda.empty_cache()
    print_table(("shape", "in", "stage", "kernel", "us", "TFLOP/s", "GB/s of weights", "dense us", "fraction of dense",
                 "times dense"), rows, torch.cuda.get_device_name())
    for reason in wrong:
        print(reason, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
