"""reduction_tiled: one block per token and tile of the hidden axis, slots in ascending order, rows loaded ahead."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from conformance import kernel, report_path
from conformance.arch import Arch
from conformance.route import Lowered, Route
from kernels import tilelang_build, tilelang_lower
from kernels.dialect import BYTES, form_of, options, target_of
from kernels.moe_reduction.template import EXPERT_MASK, NO_MASK, VALID_MASK, Spec, build

if TYPE_CHECKING:
    from torch import Tensor

OPTIONS = {"threads": ("64", "128", "256"), "ahead": ("1", "4")}
CONFIGS = tuple(f"{name}:{value}" for name, values in OPTIONS.items() for value in values)
_C_SPAN = 256  # on the C target a block is a loop iteration that holds this many elements


def specialise(target: str, form: str, topk: int, hidden: int, config: str | None = None) -> Spec:
    """The specialisation that runs: 16-byte vectors where every row starts on one, else single elements.

    128 threads with 8 fp16 elements each divide the published rows of 7168 and 5120 without a rest. ``config`` forces
    options ("threads:64-ahead:1"); the C target has no threads, so there a forced number of them changes nothing.
    """
    forced = options(config, OPTIONS)
    ahead = int(forced.get("ahead", 4 if topk >= 4 else 1))
    wide = _C_SPAN if target == "c" else 16 // BYTES[form]
    span = wide if hidden % wide == 0 else 1
    threads = 1 if target == "c" else int(forced.get("threads", 128))
    return Spec(target, form, span, threads, ahead)


def for_case(params: Mapping[str, str], target: str) -> Spec:
    """The specialisation that a case with these parameters runs."""
    return specialise(target, params["in"], int(params["topk"]), int(params["hidden"]))


def prepare(params: Mapping[str, str], device_type: str) -> None:
    """Compile what a case with these parameters will run, unless another process is at it."""
    spec = for_case(params, target_of(device_type))
    tilelang_build.load(str(spec), spec.target, partial(build, spec), wait=False)


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """Path and configuration on an architecture that need not be here."""
    spec = for_case(params, arch.language)
    return Route(spec.path, str(spec))


def lower(params: Mapping[str, str], arch: Arch) -> Lowered:
    """The code of that configuration."""
    return tilelang_lower.lower(partial(build, for_case(params, arch.language)), arch)


@functools.lru_cache(maxsize=8)
def _absent(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Stand-ins for masks that are not given: (valid_mask, topk_ids, expert_mask), which the kernel does not read."""
    import torch

    slots = torch.zeros((1, 1), dtype=torch.int32, device=device)
    return slots.to(torch.uint8), slots, slots[0]


@kernel(
    "moe_reduction", promise="bit-exact", about="TileLang, one block per token and hidden tile, loads ahead",
    requires=tilelang_build.missing, prepare=prepare, configs=CONFIGS, native=("vector", "element"), route=route,
    lower=lower,
)
def reduction_tiled(part: Tensor, *, valid_mask: Tensor | None = None, topk_ids: Tensor | None = None,
                    expert_mask: Tensor | None = None, out: Tensor, config: str | None = None) -> None:
    """Fill ``out`` [T, H]; arguments follow the operator's contract, contiguous. No tokens: nothing is launched."""
    import torch

    tokens, topk, hidden = part.shape
    spec = specialise(target_of(part.device.type), form_of(part), topk, hidden, config)
    report_path(spec.path)
    if tokens == 0:
        return
    given = (valid_mask, topk_ids, expert_mask)
    kind = VALID_MASK if valid_mask is not None else EXPERT_MASK if expert_mask is not None else NO_MASK
    absent = _absent(str(part.device))
    masks = [stand_in if mask is None else mask for mask, stand_in in zip(given, absent, strict=True)]
    with torch.cuda.device(part.device) if part.is_cuda else nullcontext():
        compiled = tilelang_build.load(str(spec), spec.target, partial(build, spec))
        assert compiled is not None
        compiled(_stored(part, spec), *masks, _stored(out, spec), kind)


def _stored(tensor: Tensor, spec: Spec) -> Tensor:
    """The tensor as the dialect's kernel takes it: [..., chunks, span], bit patterns on the C target."""
    import torch

    if spec.target == "c" and spec.form != "fp32":
        tensor = tensor.view(torch.uint16)
    return tensor.view(*tensor.shape[:-1], tensor.shape[-1] // spec.span, spec.span)
