"""The contract of moe_reduce_fused: variants, what a call must look like, what it returns, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.case import Case
from conformance.formats import FORMATS
from conformance.operator import Arguments, Call, Cost, Output

VARIANTS = ("base", "with_x_sf", "fp8", "quantized")
SOURCES = {name: FORMATS[name].dtype for name in ("fp32", "bf16", "fp16")}


def variant(case: Case) -> str:
    return VARIANTS[(case.get("xsf") == "yes") + 2 * (case.get("out") == "e4m3")]


def validate(arguments: Arguments, out: Tensor | None, strided: bool = False) -> None:
    """Check a call. ValueError or TypeError name argument, value and rule; nothing has been launched then.

    ``strided``: the kernel takes row-strided and unaligned tensors.
    """
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    weights, x_sf, sf = (arguments.get(name) for name in ("topk_weights", "x_sf", "sf"))
    given = {"x": x, "token_topk_to_pos": positions, "topk_weights": weights, "x_sf": x_sf, "sf": sf, "out": out}
    for name, value in given.items():
        if value is None and name in ("x", "token_topk_to_pos"):
            raise TypeError(f"{name} is None: a tensor is required")
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}: a tensor or None is required")
        if value is not None and value.device != x.device:
            raise ValueError(f"{name} is on {value.device}: all tensors must be on x's device, {x.device}")
    if x.dtype not in SOURCES.values():
        raise TypeError(f"x has dtype {x.dtype}: float32, bfloat16 or float16 is required")
    for name, value, dtype in (
        ("token_topk_to_pos", positions, torch.int32),
        ("topk_weights", weights, torch.float32),
        ("x_sf", x_sf, torch.float32),
        ("sf", sf, torch.float32),
    ):
        if value is not None and value.dtype != dtype:
            raise TypeError(f"{name} has dtype {value.dtype}: {dtype} is required")
    if x.dim() != 2 or x.shape[1] == 0 or x.shape[1] % 256:
        raise ValueError(f"x has shape {tuple(x.shape)}: [E, H] with H a positive multiple of 256 is required")
    if positions.dim() != 2 or positions.shape[1] == 0:
        raise ValueError(f"token_topk_to_pos has shape {tuple(positions.shape)}: [T, K] with K >= 1 is required")
    for name, value, shape in (
        ("topk_weights", weights, tuple(positions.shape)),
        ("x_sf", x_sf, (x.shape[0],)),
        ("sf", sf, (1,)),
        ("out", out, (positions.shape[0], x.shape[1])),
    ):
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: {shape} is required")
    if out is not None and out.dtype not in (x.dtype, torch.float8_e4m3fn):
        raise TypeError(f"out has dtype {out.dtype}: x's dtype {x.dtype} or float8_e4m3fn is required")
    if sf is not None and out is not None and out.dtype != torch.float8_e4m3fn:
        raise ValueError(f"sf is given but out has dtype {out.dtype}: sf requires a float8_e4m3fn output")
    if not strided:
        for name, value in given.items():
            if value is not None and not value.is_contiguous():
                raise ValueError(f"{name} has strides {value.stride()}: this kernel requires contiguous tensors")
            if value is not None and name in ("x", "out") and value.data_ptr() % 16:
                raise ValueError(f"{name} starts at {value.data_ptr():#x}: this kernel requires 16-byte alignment")


def output(arguments: Arguments, dtype: torch.dtype | None) -> Output:
    """Form of the result: ``dtype``, or x's own."""
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    return Output((positions.shape[0], x.shape[1]), dtype or x.dtype)


def cost(call: Call) -> Cost:
    """Roofline: FLOPs 2TKH, + TK with x_sf, + TH with sf; bytes (TKH + TH) x element + 8TK, 12TK with x_sf, with
    the valid slots in place of TK."""
    positions = call.arguments["token_topk_to_pos"]
    (tokens, hidden), x_sf = call.output.shape, call.arguments["x_sf"] is not None
    slots = int((positions >= 0).sum())
    flops = 2 * slots * hidden + slots * x_sf + tokens * hidden * (call.arguments["sf"] is not None)
    moved = slots * hidden * call.arguments["x"].element_size() + call.output.nbytes + slots * (12 if x_sf else 8)
    return Cost(flops, moved)
