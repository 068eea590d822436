"""The kernels of moe_sorting against the sort as a plain loop, on the CPU; the CUDA source by its text."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from engine_samples import one_thread as one_thread
from sorting_samples import by_loop, routes
from torch import Tensor

from conformance import Kernel
from conformance.errors import NotSupported
from conformance.registry import arch
from kernels import tilelang_build
from kernels.sorting import sort_block, sort_torch

MISSING = tilelang_build.missing("cpu")
needs_tilelang = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
BLOCK, TORCH = sort_block.sort_block, sort_torch.sort_torch
both = pytest.mark.parametrize("kernel", [pytest.param(BLOCK, marks=needs_tilelang), TORCH],
                               ids=["sort_block", "sort_torch"])


def run(kernel: Kernel, ids: Tensor, weights: Tensor, experts: int, block: int, mask: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16, hidden: int = 5, **policies: str) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = kernel(ids, weights, mask, experts, block, hidden, dtype, **policies)
    return found


def assert_same(found: Mapping[str, Tensor], expected: tuple[list[int], list[float], list[int], list[int]]) -> None:
    names = ("sorted_token_ids", "sorted_weights", "sorted_expert_ids", "num_valid_ids")
    assert [found[name].tolist() for name in names] == list(expected)
    assert not found["moe_buf"].contiguous().view(torch.uint8).any()


@both
@pytest.mark.parametrize(("tokens", "topk", "experts", "block"), [
    (1, 1, 1, 16), (3, 2, 4, 16), (33, 6, 32, 48), (129, 8, 16, 64), (0, 2, 4, 16), (40, 2, 256, 32), (40, 2, 257, 16),
    (3, 127, 128, 16), (50, 3, 3, 256), (7, 2, 1000, 128),
])
@pytest.mark.parametrize("masked", [False, True])
def test_a_sort_is_the_loop(kernel: Kernel, tokens: int, topk: int, experts: int, block: int, masked: bool) -> None:
    ids, weights = routes(tokens, topk, experts, seed=tokens)
    mask = torch.tensor([(e * 7 + 3) % 5 - 1 for e in range(experts)], dtype=torch.int32) if masked else None
    known = [1] * experts if mask is None else mask.tolist()
    assert_same(run(kernel, ids, weights, experts, block, mask), by_loop(ids, weights, experts, block, known))


@both
def test_invalid_ids_have_no_route_and_duplicates_two(kernel: Kernel) -> None:
    ids = torch.tensor([[0, -1], [3, 1], [-(2**31), 4], [2**31 - 1, -1], [2, 0]], dtype=torch.int32)
    weights = torch.arange(10.0).view(5, 2)
    assert_same(run(kernel, ids, weights, 4, 16, invalid="skip"), by_loop(ids, weights, 4, 16, [1] * 4))
    twice = torch.tensor([[1, 1], [0, 1], [2, 2]], dtype=torch.int32)
    assert_same(run(kernel, twice, weights[:3], 4, 16, duplicates="keep"),
                by_loop(twice, weights[:3], 4, 16, [1] * 4))


@both
@pytest.mark.parametrize(("tokens", "hidden", "dtype"), [
    (3, 7, torch.bfloat16), (1, 1, torch.float16), (5, 4099, torch.float32), (64, 1000, torch.bfloat16),
])
def test_the_buffer_is_zeroed_to_its_last_byte_and_no_further(kernel: Kernel, tokens: int, hidden: int,
                                                               dtype: torch.dtype) -> None:
    ids, weights = routes(tokens, 2, 4)
    storage = torch.full((tokens * hidden + 64,), -1.0, dtype=dtype)
    outs = {name: torch.empty_like(one) for name, one in run(kernel, ids, weights, 4, 16, None, dtype, hidden).items()}
    outs["moe_buf"] = storage[32 : 32 + tokens * hidden].view(tokens, hidden)
    kernel(ids, weights, None, 4, 16, hidden, dtype, out=outs)
    assert not storage[32:-32].view(torch.uint8).any()
    assert (storage[:32] == -1).all() and (storage[-32:] == -1).all()


def test_torch_takes_any_strides() -> None:
    ids, weights = routes(20, 3, 9)
    found = run(TORCH, ids.T.contiguous().T, weights.T.contiguous().T, 9, 16)
    assert_same(found, by_loop(ids, weights, 9, 16, [1] * 9))
    with pytest.raises(ValueError, match="topk_ids has strides"):
        run(BLOCK, ids.T.contiguous().T, weights, 9, 16)


def test_specialisations_follow_experts_and_the_size_of_the_buffer() -> None:
    chosen = sort_block.specialise
    assert [chosen("cuda", experts, 8).board for experts in (1, 256, 257, 1024, 4096)] == [256, 256, 512, 1024, 4096]
    assert [chosen("cuda", 8, size).word for size in (4, 6)] == ["int32", "uint16"]
    assert chosen("cuda", 8, 8, "threads:64").threads == 64 and chosen("c", 8, 8, "threads:64").threads == 1
    assert BLOCK.supports is not None
    assert BLOCK.supports({"experts": "4096"}) is None and "4097 experts" in str(BLOCK.supports({"experts": "4097"}))


@needs_tilelang
def test_a_buffer_too_large_for_32_bits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sort_block, "MOST_WORDS", 10)
    ids, weights = routes(3, 2, 4)
    with pytest.raises(NotSupported, match="moe_buf has 12 words"):
        run(BLOCK, ids, weights, 4, 16, hidden=8)


@needs_tilelang
@pytest.mark.parametrize("name", ["sm_90", "gfx942"])
def test_gpus_count_in_shared_memory_by_atomics(name: str) -> None:
    params = {"experts": "300", "tokens": "1", "topk": "8"}
    code = sort_block.lower(params, arch(name))
    assert code.threads == 1024
    assert 3 * 4 * 513 <= code.dynamic_shared + code.static_shared <= 48 << 10
    assert "AtomicAddRet" in code.source and "__syncthreads" in code.source
