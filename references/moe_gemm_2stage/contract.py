"""The contract of the three operators of two-stage MoE: which arguments exist, in which form, and what comes out.

Every operator gets the routes twice: sorted, as published kernels take them, and as they were before, for plain ones.

sorted_token_ids int32 [P]: slot << 24 | token, padding of blocks k << 24 | T; sorted_expert_ids int32 [B],
    sorted_weights fp32 [P], num_valid_ids int32 [1]: as moe_sorting gives them. P = T k + E BM - k, B = ceil(P / BM).
    The rows of one expert stand in any order, its padding behind them. Nothing is promised of what stands past
    num_valid_ids[0] rows, nor of weights of padding.
topk_ids int32 [T, k], topk_weights fp32 [T, k], expert_mask int32 [E] or None: global expert ids in [0, E), distinct
    within a token; 0 in the mask: that expert is not here; any other value: it is. Weights of slots without an expert
    are unspecified, others any number.
in_dtype: fp8, bf16 and so on, as the parameter `in` of a case. block: BM. doweight, combine, rule: words, see the
    policies; rule is given for every dtype, also where it decides nothing.

Operands, with their scales None where the dtype has none (`storage`):
x [T, H], scale_x [T]; for int8smooth x [k T, H], scale_x [k T], row s T + t, already smoothed
w1 [E, 2 I, H]: gate rows, then up rows; w2 [E, H, I]: local experts first, in the order of their ids; what stands
    behind them is unspecified. scale_w1, scale_w2: [E, rows], for int4_bf16_g32 [E, K/32, rows]
of fp4 and a8w4 scale_x and scale_a2 are e8m0, by the place of each route in the sorted list; see `scales`
a2 [T, k, I], scale_a2 [T k]; rows of slots without an expert are unspecified
smooth2 fp32 [E_local, I]: of int8smooth, in moe_gemm_2stage only
"""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.operator import Arguments, Output
from references.moe_gemm_2stage import scales
from references.moe_gemm_2stage.dtypes import MODES, check
from references.moe_gemm_2stage.rounding import OUTPUTS
from references.moe_gemm_2stage.sorting import capacity
from references.moe_gemm_2stage.stages import DOWEIGHT_STAGE1
from references.moe_gemm_2stage.storage import (
    STORED,
    activation_dtypes,
    row_columns,
    weight_columns,
    weight_dtypes,
    weight_scale_shape,
)

ROUTES = ("sorted_token_ids", "sorted_expert_ids", "sorted_weights", "num_valid_ids", "topk_ids", "topk_weights",
          "expert_mask", "in_dtype", "block")
ARGUMENTS = {
    "moe_gemm1": ("x", "w1", "scale_x", "scale_w1", *ROUTES, "doweight"),
    "moe_gemm2": ("a2", "w2", "scale_a2", "scale_w2", *ROUTES, "combine"),
    "moe_gemm_2stage": ("x", "w1", "w2", "scale_x", "scale_w1", "scale_w2", "smooth2", *ROUTES, "combine", "rule"),
}
_WORDS = {"in_dtype": STORED, "combine": ("atomic", "reduce"), "doweight": DOWEIGHT_STAGE1}
Form = tuple[tuple[torch.dtype, ...], tuple[int, ...]]


def sizes_of(arguments: Arguments) -> dict[str, int]:
    """T, k, E, H and I of a call, whichever stages it has."""
    found = {"T": arguments["topk_ids"].shape[0], "k": arguments["topk_ids"].shape[1]}
    rows = arguments["x" if "x" in arguments else "a2"]
    width = rows.shape[-1] * (2 if rows.dtype == torch.uint8 else 1)  # bytes of two 4-bit numbers
    if "x" in arguments:
        return found | {"E": arguments["w1"].shape[0], "H": width, "I": arguments["w1"].shape[1] // 2}
    return found | {"E": arguments["w2"].shape[0], "H": arguments["w2"].shape[1], "I": width}


def forms(arguments: Arguments) -> dict[str, Form | None]:
    """Allowed dtypes and the shape of each tensor; None where the dtype or the call has no such argument."""
    mode, of = MODES[arguments["in_dtype"]], sizes_of(arguments)
    tokens, topk, experts, hidden, inter = (of[name] for name in ("T", "k", "E", "H", "I"))
    entries, blocks = capacity(tokens, topk, experts, arguments["block"])
    i32, f32 = (torch.int32,), (torch.float32,)
    found: dict[str, Form | None] = {
        "sorted_token_ids": (i32, (entries,)), "sorted_expert_ids": (i32, (blocks,)),
        "sorted_weights": (f32, (entries,)), "num_valid_ids": (i32, (1,)),
        "topk_ids": (i32, (tokens, topk)), "topk_weights": (f32, (tokens, topk)),
        "expert_mask": None if arguments.get("expert_mask") is None else (i32, (experts,)),
    }
    u8 = (torch.uint8,)

    def weight(name: str, rows: int, width: int) -> None:
        scale = weight_scale_shape(mode, experts, rows, width)
        found[name] = weight_dtypes(mode), (experts, rows, weight_columns(mode, width))
        found[f"scale_{name}"] = None if scale is None else (u8 if mode.weight == "mxfp4" else f32, scale)

    def of_rows(count: int, width: int) -> Form | None:
        if mode.microscaled:
            return u8, scales.shape_of(entries, width)
        return (f32, (count,)) if mode.row_quantised else None

    if "x" in arguments:
        count = tokens * topk if mode.slot_major else tokens
        found["x"] = activation_dtypes(mode), (count, row_columns(mode, hidden))
        found["scale_x"] = of_rows(count, hidden)
        weight("w1", 2 * inter, hidden)
    if "a2" in arguments:
        found["a2"] = activation_dtypes(mode), (tokens, topk, row_columns(mode, inter))
        found["scale_a2"] = of_rows(tokens * topk, inter)
    if "w2" in arguments:
        weight("w2", hidden, inter)
    if "smooth2" in arguments:
        local = experts if arguments.get("expert_mask") is None else int((arguments["expert_mask"] != 0).sum())
        found["smooth2"] = (f32, (local, inter)) if mode.slot_major else None
    return found


def validate(arguments: Arguments, out: Tensor | None, strided: bool = False) -> None:
    """Check a call. ValueError or TypeError name argument, value and rule; nothing has been launched then."""
    for name, known in _WORDS.items():
        if name in arguments and arguments[name] not in known:
            raise ValueError(f"{name} is {arguments[name]!r}: one of {', '.join(known)} is required")
    mode = MODES[arguments["in_dtype"]]
    if arguments.get("rule", mode.rules[0]) not in mode.rules:
        raise ValueError(f"rule is {arguments['rule']!r}: of {mode.name} one of {', '.join(mode.rules)} is required")
    block = arguments["block"]
    if not isinstance(block, int) or not 16 <= block <= 256 or block % 16:
        raise ValueError(f"block is {block!r}: a multiple of 16 from 16 to 256 is required")
    ranks = {"topk_ids": 2, "w1": 3, "w2": 3, "x": 2, "a2": 3}
    for name, rank in ranks.items():
        if name in arguments and (not isinstance(arguments[name], Tensor) or arguments[name].dim() != rank):
            raise TypeError(f"{name} is {_what(arguments[name])}: a tensor of {rank} dimensions is required")
    of, unit = sizes_of(arguments), mode.multiple
    if of["H"] % unit or of["I"] % unit or not of["H"] or not of["I"] or not 1 <= of["k"] <= 127:
        raise ValueError(f"H is {of['H']}, I is {of['I']} and k is {of['k']}: multiples of {unit} and 1 to 127 are "
                         "required")
    device = arguments["topk_ids"].device
    for name, form in forms(arguments).items():
        value = arguments.get(name)
        if form is None:
            if value is not None:
                raise ValueError(f"{name} is given: in_dtype {arguments['in_dtype']!r} has none")
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is {_what(value)}: a tensor is required")
        _check_tensor(name, value, form, device, strided)
    _check_out(arguments, out)


def _what(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _check_tensor(name: str, value: Tensor, form: Form, device: torch.device, strided: bool) -> None:
    dtypes, shape = form
    if value.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {value.dtype}: {' or '.join(map(str, dtypes))} is required")
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: {shape} is required")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}: all tensors must be on topk_ids' device, {device}")
    if not strided and not value.is_contiguous():
        raise ValueError(f"{name} has strides {value.stride()}: contiguous tensors are required")


def _check_out(arguments: Arguments, out: Tensor | None) -> None:
    if out is None:
        return
    if out.dtype not in OUTPUTS.values() or ("combine" not in arguments and out.dtype == torch.float32):
        raise TypeError(f"out has dtype {out.dtype}: float16, bfloat16 or, of stage 2, float32 is required")
    if arguments.get("combine") is not None:
        check(MODES[arguments["in_dtype"]], arguments["combine"],
              next(name for name, dtype in OUTPUTS.items() if dtype == out.dtype))
    if tuple(out.shape) != (shape := output(arguments, None).shape):
        raise ValueError(f"out has shape {tuple(out.shape)}: {shape} is required")


def output(arguments: Arguments, dtype: torch.dtype | None) -> Output:
    """Form of the result, f16 unless another dtype is asked for. moe_gemm1: [T k, I], the published [T, k, I] by rows.
    moe_gemm2: [T, H] in atomic mode, the partials [T k, H] in reduce mode. moe_gemm_2stage: [T, H]."""
    of, dtype = sizes_of(arguments), dtype or torch.float16
    if "w2" not in arguments:
        return Output((of["T"] * of["k"], of["I"]), dtype)
    partials = "a2" in arguments and arguments["combine"] == "reduce"
    return Output((of["T"] * of["k"] if partials else of["T"], of["H"]), dtype)
