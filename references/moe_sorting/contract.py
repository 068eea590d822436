"""The contract of moe_sorting: what a call must look like, what it returns, what it costs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from conformance.case import Case
from conformance.formats import FORMATS
from conformance.operator import Arguments, Call, Cost, Output
from references.moe_gemm_2stage.sorting import (
    DUPLICATES,
    INVALID,
    MOST_SLOTS,
    MOST_TOKENS,
    capacity,
    check_ids,
    routed,
)

VARIANTS = ("base", "expert_parallel")
ARGUMENTS = ("topk_ids", "topk_weights", "expert_mask", "experts", "block", "hidden", "buffer_dtype", "invalid",
             "duplicates")
OUTPUTS = ("sorted_token_ids", "sorted_weights", "sorted_expert_ids", "num_valid_ids", "moe_buf")
BUFFERS = {name: FORMATS[name].dtype for name in ("fp16", "bf16", "fp32")}
_MOST_ENTRIES = (1 << 31) - 1


def variant(case: Case) -> str:
    return "base" if case.get("mask", "none") == "none" else "expert_parallel"


def policies_of(arguments: Arguments) -> tuple[str, str]:
    """(invalid, duplicates); None means to reject."""
    return arguments.get("invalid") or "reject", arguments.get("duplicates") or "reject"


def validate(arguments: Arguments, out: Mapping[str, Tensor] | None, strided: bool = False) -> None:
    """Check a call. ValueError or TypeError name argument, value and rule; nothing has been launched then.

    ``strided``: the kernel takes row-strided and unaligned tensors. The values of topk_ids cannot be looked at while a
    CUDA graph is captured; everywhere else they are.
    """
    ids = arguments.get("topk_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise TypeError(f"topk_ids is {_what(ids)}: a tensor [T, k] is required")
    _check_numbers(arguments)
    (tokens, topk), experts, block = ids.shape, arguments["experts"], arguments["block"]
    if not 1 <= topk <= MOST_SLOTS or tokens > MOST_TOKENS:
        raise ValueError(f"topk_ids has shape {tuple(ids.shape)}: [T, k] with T < 2^24 and 1 <= k <= {MOST_SLOTS} is "
                         "required, or token and slot do not fit in a packed id")
    if topk > experts:
        raise ValueError(f"topk_ids has {topk} slots and experts is {experts}: no more slots than experts are "
                         "required, or the padded routes may not fit")
    if capacity(tokens, topk, experts, block)[0] > _MOST_ENTRIES:
        raise ValueError(f"topk_ids has shape {tuple(ids.shape)}, experts is {experts} and block is {block}: "
                         "T k + experts block - k < 2^31 is required")
    forms = {"topk_ids": Output((tokens, topk), torch.int32), "topk_weights": Output((tokens, topk), torch.float32)}
    if arguments.get("expert_mask") is not None:
        forms["expert_mask"] = Output((experts,), torch.int32)
    if out is not None:
        forms |= output(arguments, None)
    for name, form in forms.items():
        _check_tensor(name, out[name] if out is not None and name in OUTPUTS else arguments.get(name), form, ids.device,
                      strided)
    check_ids(ids, experts, *policies_of(arguments))


def _what(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _check_numbers(arguments: Arguments) -> None:
    for name, rule in (("experts", "E >= 1"), ("hidden", "H >= 1"), ("block", "a multiple of 16 from 16 to 256")):
        value = arguments.get(name)
        if not isinstance(value, int) or value < 1 or (name == "block" and (value % 16 or value > 256)):
            raise ValueError(f"{name} is {value!r}: {rule} is required")
    if arguments.get("buffer_dtype") not in BUFFERS.values():
        raise TypeError(f"buffer_dtype is {arguments.get('buffer_dtype')}: float16, bfloat16 or float32 is required")
    invalid, duplicates = policies_of(arguments)
    for name, value, known in (("invalid", invalid, INVALID), ("duplicates", duplicates, DUPLICATES)):
        if value not in known:
            raise ValueError(f"{name} is {value!r}: None or one of {', '.join(known)} is required")


def _check_tensor(name: str, value: object, form: Output, device: torch.device, strided: bool) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {_what(value)}: a tensor is required")
    if value.dtype != form.dtype:
        raise TypeError(f"{name} has dtype {value.dtype}: {form.dtype} is required")
    if tuple(value.shape) != form.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: {form.shape} is required")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}: all tensors must be on topk_ids' device, {device}")
    if not strided and not value.is_contiguous():
        raise ValueError(f"{name} has strides {value.stride()}: this kernel requires contiguous tensors")
    if not strided and value.data_ptr() % 16:
        raise ValueError(f"{name} starts at {value.data_ptr():#x}: this kernel requires 16-byte alignment")


def output(arguments: Arguments, dtype: torch.dtype | None) -> dict[str, Output]:
    """Forms of the outputs; ``dtype`` is not asked for, buffer_dtype says that of the one output that has a choice."""
    tokens, topk = arguments["topk_ids"].shape
    entries, blocks = capacity(tokens, topk, arguments["experts"], arguments["block"])
    forms = (Output((entries,), torch.int32), Output((entries,), torch.float32), Output((blocks,), torch.int32),
             Output((2,), torch.int32), Output((tokens, arguments["hidden"]), arguments["buffer_dtype"]))
    return dict(zip(OUTPUTS, forms, strict=True))


def cost(call: Call) -> Cost:
    """Roofline: nothing is computed. Ids and mask are read, weights of routed slots read and written, experts of blocks
    in use written, and the whole of the id list, which ends in sentinels, and of the buffer."""
    given, forms = call.arguments, call.outputs
    mask = given["expert_mask"]
    counts = given["topk_ids"][routed(given["topk_ids"], given["experts"], mask)].unique(return_counts=True)[1]
    routes, blocks = int(counts.sum()), int((-(-counts // given["block"])).sum())
    read = given["topk_ids"].nbytes + (0 if mask is None else mask.nbytes)
    whole = sum(forms[name].nbytes for name in ("sorted_token_ids", "num_valid_ids", "moe_buf"))
    return Cost(0, read + 8 * routes + 4 * blocks + whole)
