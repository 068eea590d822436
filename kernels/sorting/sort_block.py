"""sort_block: the whole sort in one thread block of a TileLang kernel, whose other blocks zero the buffer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from conformance import kernel, report_path
from conformance.arch import Arch
from conformance.errors import NotSupported
from conformance.route import Lowered, Route
from kernels import tilelang_build, tilelang_lower
from kernels.dialect import options, target_of
from kernels.sorting.template import Spec, build

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NAME = "sort_block"
OPTIONS = {"threads": ("64", "256", "1024")}
CONFIGS = tuple(f"{name}:{value}" for name, values in OPTIONS.items() for value in values)
MOST_EXPERTS = 4096  # three counters of 4 bytes each: 48 KiB of shared memory, which every architecture has
MOST_WORDS = (1 << 31) - (1 << 14)  # of the buffer; the last block of threads counts beyond it
_SMALLEST_BOARD = 256


def specialise(target: str, experts: int, buffer_bytes: int, config: str | None = None) -> Spec:
    """The specialisation that runs: a board of the next power of two, words of 4 bytes where the buffer has them."""
    board = max(_SMALLEST_BOARD, 1 << (experts - 1).bit_length())
    threads = 1 if target == "c" else int(options(config, OPTIONS).get("threads", 1024))
    return Spec(target, board, "int32" if buffer_bytes % 4 == 0 else "uint16", threads)


def for_case(params: Mapping[str, str], target: str) -> Spec:
    """The specialisation that a case with these parameters runs, where the buffer's size in words is even."""
    return specialise(target, int(params["experts"]), 4)


def supports(params: Mapping[str, str]) -> str | None:
    experts = int(params["experts"])
    return f"{experts} experts, at most {MOST_EXPERTS} fit in shared memory" if experts > MOST_EXPERTS else None


def prepare(params: Mapping[str, str], device_type: str) -> None:
    """Compile what a case with these parameters will run, unless another process is at it."""
    spec = for_case(params, target_of(device_type))
    tilelang_build.load(str(spec), spec.target, partial(build, spec), wait=False)


def route(params: Mapping[str, str], arch: Arch) -> Route:
    """Path and configuration on an architecture that need not be here."""
    return Route(NAME, str(for_case(params, arch.language)))


def lower(params: Mapping[str, str], arch: Arch) -> Lowered:
    """The code of that configuration."""
    return tilelang_lower.lower(partial(build, for_case(params, arch.language)), arch)


@functools.lru_cache(maxsize=8)
def _absent(device: str) -> Tensor:
    """Stands for a mask that is not given, which the kernel does not read."""
    import torch

    return torch.zeros(1, dtype=torch.int32, device=device)


@kernel(
    "moe_sorting", about="TileLang, one block sorts by shared counters, the others zero the buffer", repeatable=False,
    requires=tilelang_build.missing, supports=supports, prepare=prepare, configs=CONFIGS, route=route, lower=lower,
)
def sort_block(
    topk_ids: Tensor, topk_weights: Tensor, *, expert_mask: Tensor | None = None, experts: int, block: int, hidden: int,
    buffer_dtype: torch.dtype, invalid: str | None = None, duplicates: str | None = None,
    sorted_token_ids: Tensor, sorted_weights: Tensor, sorted_expert_ids: Tensor, num_valid_ids: Tensor, moe_buf: Tensor,
    config: str | None = None,
) -> None:
    """Fill the five outputs; arguments follow the operator's contract, contiguous. Promises no order in a run."""
    import torch

    report_path(NAME)
    spec = specialise(target_of(topk_ids.device.type), experts, moe_buf.nbytes, config)
    words = moe_buf.view(-1).view(getattr(torch, spec.word))
    if len(words) > MOST_WORDS:
        raise NotSupported(f"moe_buf has {len(words)} words: at most {MOST_WORDS} are counted in 32 bits")
    with torch.cuda.device(topk_ids.device) if topk_ids.is_cuda else nullcontext():
        compiled = tilelang_build.load(str(spec), spec.target, partial(build, spec))
        assert compiled is not None
        compiled(
            topk_ids.view(-1), topk_weights.view(-1),
            _absent(str(topk_ids.device)) if expert_mask is None else expert_mask,
            sorted_token_ids, sorted_weights, sorted_expert_ids, num_valid_ids, words,
            *topk_ids.shape, experts, block, int(expert_mask is not None),
        )
