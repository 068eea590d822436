"""Two-stage MoE at the ends of its extents: tokens, experts and blocks that narrow numbers do not hold, blocks that are
full, every number of slots, and the experts of any rank. A kernel with a limit fails the family that is for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_samples import one_thread as one_thread
from gemm_calls import OPERATORS, per_expert, prepared, result, verdict
from torch import Tensor

from conformance.operator import Call
from conformance.registry import matrix
from kernels.gemm_2stage import per_expert as plain

pytestmark = pytest.mark.usefixtures("one_thread")
every_operator = pytest.mark.parametrize("name", OPERATORS)
Limit = Callable[[Tensor, int], Tensor]  # of local experts [T, k], -1 for none, and BM
BLOCKS = 304  # processors of the largest GPUs, and so the blocks of a grid that does not go on to the next one
_RIGHT = plain.local_experts


def places(local: Tensor) -> Tensor:
    """int64 [T, k]: how many routes of the same expert come before each."""
    flat = local.flatten()
    order = flat.argsort(stable=True)
    ordered = flat[order]
    found = torch.empty_like(flat)
    found[order] = torch.arange(len(flat)) - torch.searchsorted(ordered, ordered)
    return found.view(local.shape)


def block_numbers(local: Tensor, block: int) -> Tensor:
    """int64 [T, k]: the number of each route's block."""
    blocks = (torch.bincount(local[local >= 0], minlength=1) + block - 1) // block
    return (blocks.cumsum(0) - blocks)[local.clamp(min=0)] + places(local) // block


def without(dropped: Callable[[Tensor, int], Tensor]) -> Limit:
    return lambda local, block: local.masked_fill(dropped(local, block), -1)


LIMITS: dict[str, tuple[str, Limit]] = {
    "blocks that are half full": (
        "F10-full-blocks", without(lambda local, block: places(local) % block >= (32 if block == 48 else block // 2))),
    "one block of an expert": ("F10-full-blocks", without(lambda local, block: places(local) >= block)),
    "tokens in 8 bits": (
        "F10-full-blocks", without(lambda local, block: (torch.arange(len(local)) > 255)[:, None])),
    "experts in 8 bits": ("F27-experts", lambda local, block: torch.where(local < 0, local, local & 255)),
    "tokens in 16 bits": (
        "F27-tokens", without(lambda local, block: (torch.arange(len(local)) > 65535)[:, None])),
    "a block for each processor": ("F27-tokens", without(lambda local, block: block_numbers(local, block) >= BLOCKS)),
    "whole pairs of slots": (
        "F11-more-slots", without(lambda local, block: torch.arange(local.shape[1]) >= local.shape[1] // 2 * 2)),
}


def kind(name: str, case_id: str, limit: Limit, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What is said of the plain kernel with this limit; None where it meets none and passes."""
    call, reference = prepared(case_id)
    right = _RIGHT(call.arguments["topk_ids"], call.arguments["expert_mask"])
    limited = limit(right, call.arguments["block"])
    monkeypatch.setattr(plain, "local_experts", lambda ids, mask: limited)
    found = verdict(result(per_expert(name), call), call, reference)
    assert found.passed == torch.equal(limited, right), case_id
    return found.kind


@every_operator
@pytest.mark.parametrize("which", LIMITS)
def test_a_kernel_with_a_limit_fails(name: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, limit = LIMITS[which]
    cases = [case for case in matrix(name).cases("edge") if case.family == family]
    kinds = [kind(name, case.id, limit, monkeypatch) for case in cases]
    assert sum(found is not None for found in kinds) >= min(4, len(cases)) > 0, kinds


def masked(name: str, which: str) -> Call:
    return prepared(f"{name}/F/tokens:5-hidden:32-inter:32-experts:8-topk:2-bm:16-in:int8smooth-mode:reduce-out:f16-"
                    f"mask:{which}")[0]


@every_operator
def test_masks_of_ranks(name: str) -> None:
    found = {which: masked(name, which).arguments["expert_mask"].nonzero().flatten().tolist()
             for which in ("lower", "upper", "one", "none", "all")}
    assert found == {"lower": [0, 1, 2, 3], "upper": [4, 5, 6, 7], "one": [6], "none": [], "all": list(range(8))}


@every_operator
def test_experts_of_the_upper_rank_that_are_numbered_wrongly_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulo how many there are, which is right of global ids, but counted from another expert than the first one."""
    seen = 0
    for case in matrix(name).cases("edge"):
        if case.family == "F02-ranks":
            given = prepared(case.id)[0].arguments
            count, ids = max(1, int((given["expert_mask"] != 0).sum())), given["topk_ids"].long()
            shift = int(case.params["mask"] == "upper")
            numbers = (ids + shift) % count
            kind(name, case.id, lambda local, block, n=numbers: torch.where(local < 0, local, n), monkeypatch)
            seen += shift
    assert seen > 1


@every_operator
def test_a_rank_without_an_expert_gives_zeros(name: str) -> None:
    cases = [case for case in matrix(name).cases("edge")
             if case.family == "F02-ranks" and case.params["mask"] == "none"]
    assert cases
    for case in cases:
        call, reference = prepared(case.id)
        found = result(per_expert(name), call)
        assert verdict(found, call, reference).passed and not bool(found.any()), case.id
        found[-1, -1] = 1e-3
        assert not verdict(found, call, reference).passed, case.id
