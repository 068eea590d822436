"""The kernels of moe_reduction against slot-by-slot sums in numpy, on the CPU; the CUDA source by its text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_samples import one_thread as one_thread
from torch import Tensor

from conformance import Kernel
from conformance.registry import arch
from kernels import tilelang_build
from kernels.moe_reduction import reduction_tiled, reduction_torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS = {"fp32": torch.int32, "bf16": torch.int16, "fp16": torch.int16}
MISSING = tilelang_build.missing("cpu")
needs_tilelang = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
TILED, TORCH = reduction_tiled.reduction_tiled, reduction_torch.reduction_torch
both = pytest.mark.parametrize(
    "kernel", [pytest.param(TILED, marks=needs_tilelang), TORCH], ids=["reduction_tiled", "reduction_torch"])
every_form = pytest.mark.parametrize("form", DTYPES)


def draw(seed: int, tokens: int, topk: int, hidden: int, form: str) -> tuple[Tensor, np.ndarray]:
    """part with a wide range of magnitudes and NaN in every masked row, and which slots are valid."""
    generator = np.random.default_rng(seed)
    value = generator.standard_normal((tokens, topk, hidden)) * np.exp2(generator.integers(-8, 6, (tokens, topk, 1)))
    valid = generator.random((tokens, topk)) < 0.7
    part = torch.from_numpy(value).to(DTYPES[form])
    part[~torch.from_numpy(valid)] = float("nan")
    return part, valid


def expected(part: Tensor, valid: np.ndarray) -> Tensor:
    """fp32 additions one after another from +0, then torch's cast."""
    rows = part.float().numpy()
    acc = np.zeros((rows.shape[0], rows.shape[2]), np.float32)
    for t, s in np.argwhere(valid):
        acc[t] += rows[t, s]
    return torch.from_numpy(acc).to(part.dtype)


def masks(valid: np.ndarray) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The two ways to say it; experts 1 and 3 of 5 are local, ids of masked slots are foreign or no index at all."""
    there = torch.from_numpy(valid)
    slot = torch.arange(valid.size).view(valid.shape)
    foreign = torch.tensor([0, 2, 4, -1, 5, -(2**31), 2**31 - 1])[slot % 7]
    ids = torch.where(there, 1 + 2 * (slot % 2), foreign).to(torch.int32)
    known = torch.tensor([0, 256, 0, -1, 0], dtype=torch.int32)
    return {"valid_mask": there * torch.tensor(128, dtype=torch.uint8)}, {"topk_ids": ids, "expert_mask": known}


def run(kernel: Kernel, part: Tensor, config: str | None = None, **given: Tensor) -> Tensor:
    out = torch.full((part.shape[0], part.shape[2]), float("nan"), dtype=part.dtype)
    kernel.run({"part": part, "valid_mask": None, "topk_ids": None, "expert_mask": None} | given, out, config)
    return out


def assert_same(actual: Tensor, wanted: Tensor, form: str) -> None:
    assert torch.equal(actual.view(BITS[form]), wanted.view(BITS[form]))


@both
@every_form
def test_bitwise_for_every_number_of_slots(kernel: Kernel, form: str) -> None:
    for topk in (1, 2, 3, 4, 5, 6, 8, 9, 16, 127):
        part, valid = draw(topk, 3, topk, 512, form)
        for given in masks(valid):
            assert_same(run(kernel, part, **given), expected(part, valid), form)
        full = torch.nan_to_num(part, nan=1.0)
        assert_same(run(kernel, full), expected(full, np.ones_like(valid)), form)


@both
@every_form
def test_bitwise_for_hidden_sizes_off_every_vector(kernel: Kernel, form: str) -> None:
    for hidden in (1, 2, 3, 7, 8, 9, 127, 255, 257, 300):
        part, valid = draw(hidden, 4, 5, hidden, form)
        for given in masks(valid):
            assert_same(run(kernel, part, **given), expected(part, valid), form)


@both
def test_no_tokens_is_no_launch(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilelang_build, "load", lambda *_, **__: pytest.fail("a kernel was loaded"))
    assert run(kernel, torch.zeros(0, 2, 256)).shape == (0, 256)


@both
@every_form
def test_special_values(kernel: Kernel, form: str) -> None:
    inf, nan = float("inf"), float("nan")
    largest = torch.finfo(DTYPES[form]).max
    columns = [(inf, 1.0), (-inf, 1.0), (inf, -inf), (nan, 1.0), (largest, largest), (-0.0, -0.0), (1.0, -1.0)]
    part = torch.tensor(columns).T.contiguous()[None].to(DTYPES[form])
    found = run(kernel, part)[0]
    assert found[:2].tolist() == [inf, -inf] and bool(found[2:4].isnan().all()) and float(found[4]) == inf
    assert found[5:].view(BITS[form]).tolist() == [0, 0]  # +0


@needs_tilelang
def test_offsets_beyond_two_to_the_31_elements() -> None:
    """Only the last slot is valid, so that the memory behind the others is never used."""
    hidden = 66400 * 256
    try:
        part = torch.empty(1, 127, hidden, dtype=torch.float16)
    except RuntimeError as error:
        pytest.skip(f"no address space for {127 * hidden * 2 >> 20} MiB: {error}")
    assert part.numel() > 1 << 31
    part[0, -1] = torch.arange(hidden) % 2048
    valid = torch.zeros(1, 127, dtype=torch.uint8)
    valid[0, -1] = 1
    assert torch.equal(run(TILED, part, valid_mask=valid)[0], part[0, -1])


@needs_tilelang
@pytest.mark.parametrize("config", TILED.configs)
def test_every_config_is_bitwise(config: str) -> None:
    part, valid = draw(1, 4, 6, 512, "bf16")
    for given in masks(valid):
        assert_same(run(TILED, part, config, **given), expected(part, valid), "bf16")


@pytest.mark.parametrize("config", ["threads:32", "span:8", "ahead"])
def test_an_unknown_config_lists_the_known_ones(config: str) -> None:
    with pytest.raises(ValueError, match="known: "):
        run(TILED, torch.zeros(1, 1, 256), config)


def test_the_pytorch_kernel_takes_any_strides_and_chunks_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reduction_torch.TEMPORARY_BYTES, "cpu", 8 * 16 * 3)
    part, valid = draw(2, 10, 4, 16, "fp32")
    strided = part.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not strided.is_contiguous()
    for given in masks(valid):
        assert_same(run(TORCH, strided, **given), expected(part, valid), "fp32")


def test_specialisations() -> None:
    chosen = reduction_tiled.specialise
    assert (chosen("cuda", "fp16", 8, 7168).span, chosen("cuda", "fp32", 8, 7168).span) == (8, 4)
    assert (chosen("cuda", "fp16", 8, 7164).span, chosen("c", "fp16", 8, 300).span) == (1, 1)
    assert (chosen("cuda", "bf16", 2, 64).ahead, chosen("cuda", "bf16", 4, 64).ahead) == (1, 4)
    assert chosen("cuda", "bf16", 4, 64, "threads:64-ahead:1").threads == 64
    assert len({str(chosen("c", form, k, h)) for form in DTYPES for k in (2, 6, 8) for h in (5120, 7168)}) == 6


@needs_tilelang
@pytest.mark.parametrize("hidden", ["7168", "7164"])
def test_generated_source_has_vectors_64_bit_offsets_and_no_atomics(hidden: str) -> None:
    params = {"in": "fp16", "topk": "8", "hidden": hidden}
    assert TILED.lower is not None and TILED.route is not None
    for name in ("sm_90", "gfx942"):
        lowered = TILED.lower(params, arch(name))
        assert "int64_t" in lowered.source and "atomic" not in lowered.source
        assert lowered.threads == 128
        assert ("uint4" in lowered.source) == (hidden == "7168")
    assert TILED.route(params, arch("sm_90")).path == ("vector" if hidden == "7168" else "element")
