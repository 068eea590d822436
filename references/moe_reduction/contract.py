"""The contract of moe_reduction: variants, what a call must look like, what it returns, what it costs."""

from __future__ import annotations

import torch
from torch import Tensor

from conformance.case import Case
from conformance.formats import FORMATS
from conformance.operator import Arguments, Call, Cost, Output

VARIANTS = ("base", "valid_mask", "expert_mask")
MASKS = {"none": "base", "valid": "valid_mask", "expert": "expert_mask"}  # parameter "mask" of a case
SOURCES = {name: FORMATS[name].dtype for name in ("fp16", "bf16", "fp32")}
MOST_SLOTS = 127  # the slot field of a packed id is decoded with an arithmetic shift of an int32


def variant(case: Case) -> str:
    return MASKS.get(case.get("mask", "none"), "base")


def valid_slots(arguments: Arguments) -> Tensor | None:
    """Which slots count, bool [T, k]; None where all do. Ids outside [0, E) are never used as an index."""
    if arguments.get("valid_mask") is not None:
        masked: Tensor = arguments["valid_mask"]
        return masked != 0
    if arguments.get("expert_mask") is None:
        return None
    ids: Tensor = arguments["topk_ids"]
    known: Tensor = arguments["expert_mask"]
    inside = (ids >= 0) & (ids < len(known))
    return inside & (known[torch.where(inside, ids, 0).long()] != 0)


def validate(arguments: Arguments, out: Tensor | None, strided: bool = False) -> None:
    """Check a call. ValueError or TypeError name argument, value and rule; nothing has been launched then.

    ``strided``: the kernel takes row-strided and unaligned tensors.
    """
    part = arguments["part"]
    given = {name: arguments.get(name) for name in ("valid_mask", "topk_ids", "expert_mask")}
    given = {"part": part, **given, "out": out}
    if part is None:
        raise TypeError("part is None: a tensor is required")
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}: a tensor or None is required")
        if value is not None and value.device != part.device:
            raise ValueError(f"{name} is on {value.device}: all tensors must be on part's device, {part.device}")
    if part.dtype not in SOURCES.values():
        raise TypeError(f"part has dtype {part.dtype}: float16, bfloat16 or float32 is required")
    if part.dim() != 3 or not 1 <= part.shape[1] <= MOST_SLOTS or part.shape[2] == 0:
        raise ValueError(f"part has shape {tuple(part.shape)}: [T, k, H] with 1 <= k <= {MOST_SLOTS} and H >= 1 is "
                         "required")
    _check_masks(given, tuple(part.shape[:2]))
    if out is not None and tuple(out.shape) != (part.shape[0], part.shape[2]):
        raise ValueError(f"out has shape {tuple(out.shape)}: {(part.shape[0], part.shape[2])} is required")
    if out is not None and out.dtype != part.dtype:
        raise TypeError(f"out has dtype {out.dtype}: part's dtype {part.dtype} is required")
    if not strided:
        for name, value in given.items():
            if value is not None and not value.is_contiguous():
                raise ValueError(f"{name} has strides {value.stride()}: this kernel requires contiguous tensors")
            if value is not None and name in ("part", "out") and value.data_ptr() % 16:
                raise ValueError(f"{name} starts at {value.data_ptr():#x}: this kernel requires 16-byte alignment")


def _check_masks(given: Arguments, slots: tuple[int, ...]) -> None:
    valid, ids, known = given["valid_mask"], given["topk_ids"], given["expert_mask"]
    if (ids is None) != (known is None):
        present, absent = ("topk_ids", "expert_mask") if known is None else ("expert_mask", "topk_ids")
        raise ValueError(f"{present} is given and {absent} is None: give both or none")
    if valid is not None and ids is not None:
        raise ValueError("valid_mask and expert_mask are both given: give one of them")
    for name, value, dtype, shape in (
        ("valid_mask", valid, torch.uint8, slots), ("topk_ids", ids, torch.int32, slots),
        ("expert_mask", known, torch.int32, None),
    ):
        if value is not None and value.dtype != dtype:
            raise TypeError(f"{name} has dtype {value.dtype}: {dtype} is required")
        if value is not None and shape is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: {shape} is required")
    if known is not None and (known.dim() != 1 or len(known) == 0):
        raise ValueError(f"expert_mask has shape {tuple(known.shape)}: [E] with E >= 1 is required")


def output(arguments: Arguments, dtype: torch.dtype | None) -> Output:
    """Form of the result: part's dtype, which is the only one that ``validate`` lets pass."""
    part = arguments["part"]
    return Output((part.shape[0], part.shape[2]), dtype or part.dtype)


def cost(call: Call) -> Cost:
    """Roofline: one addition per element of a valid slot; its bytes, the output's, and those of the masks."""
    part, valid = call.arguments["part"], valid_slots(call.arguments)
    tokens, topk, hidden = part.shape
    slots = tokens * topk if valid is None else int(valid.sum())
    masks = [call.arguments[name] for name in ("valid_mask", "topk_ids", "expert_mask")]
    moved = slots * hidden * part.element_size() + call.output.nbytes
    return Cost(slots * hidden, moved + sum(mask.nbytes for mask in masks if mask is not None))
