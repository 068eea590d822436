"""Layouts of two-stage MoE: round trips, and the address of every element by its closed form."""

from __future__ import annotations

import itertools

import pytest
import torch
from engine_samples import one_thread as one_thread

from references.moe_gemm_2stage import layouts

DTYPES = (torch.uint8, torch.int16, torch.float32)


def distinct(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    count = 1
    for extent in shape:
        count *= extent
    return torch.arange(count).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(16, 32), (32, 64), (48, 160)])
def test_preshuffled_addresses(dtype: torch.dtype, rows: int, columns: int) -> None:
    weight = (distinct(rows, columns) * 37 % 251).to(dtype)
    stored = layouts.preshuffle(weight).flatten()
    offsets = [layouts.preshuffled_offset(n, k, columns, dtype.itemsize)
               for n, k in itertools.product(range(rows), range(columns))]
    assert sorted(offsets) == list(range(rows * columns))
    assert torch.equal(stored[offsets], weight.flatten())


def test_preshuffled_bytes_by_hand() -> None:
    """1-byte elements: (n div 16) 16 K + (k div 16) 256 + (n mod 16) 16 + k mod 16."""
    for n, k, offset in ((0, 0, 0), (1, 0, 16), (0, 16, 256), (15, 15, 255), (16, 0, 1024), (17, 33, 1024 + 512 + 17)):
        assert layouts.preshuffled_offset(n, k, 64, 1) == offset
    assert layouts.preshuffled_offset(1, 8, 64, 2) == 136


@pytest.mark.parametrize("dtype", DTYPES)
def test_preshuffle_round_trip_of_many_experts_and_strided_input(dtype: torch.dtype) -> None:
    weight = distinct(3, 2, 32, 64).to(dtype)
    assert torch.equal(layouts.unpreshuffle(layouts.preshuffle(weight)), weight)
    strided = weight.transpose(0, 1)
    assert torch.equal(layouts.unpreshuffle(layouts.preshuffle(strided)), strided)
    assert not torch.equal(layouts.preshuffle(weight), weight)


def test_int4_addresses_after_the_shuffle() -> None:
    weight = (distinct(32, 64) * 11 % 16 - 8).to(torch.int8)
    packed = layouts.pack_int4(layouts.preshuffle(weight)).flatten().tolist()
    for n, k in itertools.product(range(32), range(64)):
        byte, shift = layouts.packed_int4_place(layouts.preshuffled_offset(n, k, 64, 1))
        assert packed[byte] >> shift & 15 == int(weight[n, k]) & 15


def test_int4_packing_by_hand_and_back() -> None:
    value = torch.tensor([-8, -1, 0, 1, 7, 2, -3, 5], dtype=torch.int8)
    assert layouts.pack_int4(value).tolist() == [0x78, 0x2F, 0xD0, 0x51]
    every = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)
    assert torch.equal(layouts.unpack_int4(layouts.pack_int4(every)), every)


def test_swapped_nibble_halves_change_the_values() -> None:
    value = torch.arange(-8, 8, dtype=torch.int8)
    packed = layouts.pack_int4(value)
    swapped = packed << 4 | packed >> 4
    assert not torch.equal(layouts.unpack_int4(swapped), value)


def test_nibbles_low_is_even() -> None:
    codes = torch.tensor([1, 2, 15, 0], dtype=torch.uint8)
    assert layouts.pack_nibbles(codes).tolist() == [0x21, 0x0F]
    assert torch.equal(layouts.unpack_nibbles(layouts.pack_nibbles(codes)), codes)


@pytest.mark.parametrize(("rows", "columns"), [(256, 8), (300, 9), (1, 24)])
def test_scale_addresses_and_padding(rows: int, columns: int) -> None:
    scales = (distinct(rows, columns) % 250).to(torch.uint8)
    stored = layouts.shuffle_scales(scales, fill=254)
    assert stored.shape[0] % 256 == 0 and stored.shape[1] % 8 == 0
    flat = stored.flatten()
    offsets = [layouts.shuffled_scale_offset(m, n, stored.shape[1])
               for m, n in itertools.product(range(stored.shape[0]), range(stored.shape[1]))]
    assert sorted(offsets) == list(range(flat.numel()))
    padded = flat[offsets].view(stored.shape)
    assert torch.equal(padded[:rows, :columns], scales)
    padded[:rows, :columns] = 254
    assert bool((padded == 254).all())
    assert torch.equal(layouts.unshuffle_scales(stored, rows, columns), scales)


def test_gate_and_up_rows() -> None:
    weight = distinct(2, 6, 4)
    mixed = layouts.interleave_gate_up(weight)
    assert mixed[0, :, 0].tolist() == [0, 12, 4, 16, 8, 20]
    assert torch.equal(layouts.split_gate_up(mixed), weight)


def test_slot_major_rows() -> None:
    rows = distinct(5, 3, 2)
    stored = layouts.slot_major(rows)
    for t, s in itertools.product(range(5), range(3)):
        assert torch.equal(stored[s * 5 + t], rows[t, s])
    assert torch.equal(layouts.token_major(stored, 3), rows)


def test_paired_group_scales() -> None:
    scales = distinct(2, 3, 4)
    stored = layouts.pair_group_scales(scales)
    assert stored.shape == (2, 2, 3, 2)
    for e, n, g in itertools.product(range(2), range(3), range(4)):
        assert stored[e, g // 2, n, g % 2] == scales[e, n, g]
    assert torch.equal(layouts.unpair_group_scales(stored), scales)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: layouts.preshuffle(torch.zeros(8, 32)), "N is 8: a multiple of 16"),
    (lambda: layouts.unpreshuffle(torch.zeros(16, 16)), "K is 16: a multiple of 32"),
    (lambda: layouts.pack_int4(torch.zeros(12, dtype=torch.int8)), "K is 12: a multiple of 8"),
    (lambda: layouts.pack_int4(torch.full((8,), 8, dtype=torch.int8)), "from -8 to 7"),
    (lambda: layouts.unpack_int4(torch.zeros(6, dtype=torch.uint8)), "packed K is 6"),
    (lambda: layouts.pack_nibbles(torch.full((2,), 16, dtype=torch.uint8)), "below 16"),
    (lambda: layouts.unshuffle_scales(torch.zeros(32, 8), 1, 1), "M is 32"),
    (lambda: layouts.interleave_gate_up(torch.zeros(3, 4)), "2I is 3"),
    (lambda: layouts.token_major(torch.zeros(7, 2), 3), "k T is 7"),
    (lambda: layouts.pair_group_scales(torch.zeros(1, 2, 3)), "K/32 is 3"),
])
def test_extents_that_do_not_fit(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
