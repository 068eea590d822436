"""Guards: the output's bands and poison, and checksums that see what moved."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from engine_samples import CPU

from conformance.data.layouts import BAND, LAYOUTS, place
from conformance.launching.guards import POISON_BYTES, GuardedOutput, unwritten
from conformance.launching.snapshot import Snapshot, Watched, changed, checksum
from conformance.operator import Output

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def allocated(shape: tuple[int, ...] = (5, 256), dtype: torch.dtype = torch.float32) -> GuardedOutput:
    output = GuardedOutput.allocate(Output(shape, dtype), CPU)
    output.poison(0)
    return output


# ---- the output's buffer ------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("shape", [(5, 256), (1, 7), (0, 256)])
def test_the_buffer_lies_aligned_between_two_bands(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    output = allocated(shape, dtype)
    tensor = output.tensor
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert output.storage.numel() == tensor.numel() * dtype.itemsize + 2 * 4096
    if tensor.numel():
        assert tensor.data_ptr() == output.storage.data_ptr() + BAND
        assert tensor.data_ptr() % 16 == 0


@every_dtype
def test_poison_0_is_nan_everywhere_and_poison_1_is_finite(dtype: torch.dtype) -> None:
    output = allocated((3, 256), dtype)
    assert bool(output.tensor.float().isnan().all())
    output.poison(1)
    assert bool(output.tensor.float().isfinite().all())
    assert POISON_BYTES[0] != POISON_BYTES[1]


@every_dtype
def test_writing_the_whole_output_is_no_overrun(dtype: torch.dtype) -> None:
    output = allocated((3, 256), dtype)
    assert output.overrun(0) is None
    output.tensor.zero_()
    assert output.overrun(0) is None
    output.tensor.view(torch.uint8).fill_(0xFF)
    assert output.overrun(0) is None


@pytest.mark.parametrize(("place", "side", "offset"), [
    (BAND - 1, "before", -1), (BAND - 16, "before", -16), (0, "before", -BAND),
    (BAND + 5 * 1024, "after", 0), (BAND + 5 * 1024 + 100, "after", 100), (2 * BAND + 5 * 1024 - 1, "after", BAND - 1),
])
def test_one_byte_beside_the_output_is_found(place: int, side: str, offset: int) -> None:
    output = allocated()
    output.storage[place] = 0
    assert output.overrun(0) == f"1 bytes changed {side} the output (nearest at byte offset {offset})"


def test_gaps_between_the_rows_of_a_strided_output() -> None:
    output = GuardedOutput.allocate(Output((5, 256), torch.float16, gap=64), CPU)
    for which in (0, 1):
        output.poison(which)
        assert output.tensor.shape == (5, 256)
        assert output.tensor.stride() == (320, 1)
        assert output.overrun(which) is None
        assert bool(unwritten(output.tensor, which).all())
        output.tensor.zero_()
        assert output.overrun(which) is None
        output.tensor.as_strided((1,), (1,), output.tensor.storage_offset() + 3 * 320 + 256).zero_()
        assert output.overrun(which) == "2 bytes changed between the output's rows"
    output.poison(0)
    output.storage[-1] ^= 1
    assert output.overrun(0) == f"1 bytes changed after the output (nearest at byte offset {BAND - 1})"


def test_the_gap_behind_the_only_row_counts_too() -> None:
    """One row is contiguous whatever its stride; the bytes up to the next row's place are none of its own."""
    output = GuardedOutput.allocate(Output((1, 256), torch.bfloat16, gap=64), CPU)
    output.poison(1)
    output.tensor.zero_()
    assert output.overrun(1) is None
    output.storage[BAND + 512] = 0
    assert output.overrun(1) == "1 bytes changed between the output's rows"


@pytest.mark.parametrize("byte", [0, 0x5A, 0xA5, 0xFF])
def test_a_constant_written_beside_the_output_is_seen(byte: int) -> None:
    output = allocated()
    output.storage[BAND - 8 : BAND] = byte
    assert output.overrun(0) is not None


def test_the_nearest_byte_is_named() -> None:
    output = allocated()
    output.storage[BAND - 40 : BAND - 20] ^= 1
    assert output.overrun(0) == "20 bytes changed before the output (nearest at byte offset -21)"
    output.poison(1)
    assert output.overrun(1) is None  # poison renews the bands
    output.storage[-30:] ^= 1
    assert output.overrun(1) == f"30 bytes changed after the output (nearest at byte offset {BAND - 30})"


@every_dtype
@pytest.mark.parametrize("which", [0, 1])
def test_unwritten_elements(dtype: torch.dtype, which: int) -> None:
    output = allocated((3, 256), dtype)
    output.poison(which)
    assert bool(unwritten(output.tensor, which).all())
    assert not bool(unwritten(output.tensor, 1 - which).any())
    output.tensor[1].zero_()
    output.tensor[2, 5] = 1.0
    expected = torch.ones(3, 256, dtype=torch.bool)
    expected[1] = expected[2, 5] = False
    assert torch.equal(unwritten(output.tensor, which), expected)


def test_unwritten_needs_every_byte() -> None:
    output = allocated((1, 4))
    output.tensor.view(torch.uint8)[0, 3] = 0x7F  # one byte of element 0
    assert unwritten(output.tensor, 0).tolist() == [[False, True, True, True]]
    assert unwritten(torch.empty(0, 4), 0).shape == (0, 4)


# ---- checksums ----------------------------------------------------------------------------------------------------


def sample(dtype: torch.dtype, columns: int = 256) -> torch.Tensor:
    codes = torch.arange(7 * columns * dtype.itemsize, dtype=torch.int64) * 2654435761 >> 7
    return codes.to(torch.uint8).view(dtype).view(7, columns)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("columns", [256, 3])
def test_a_change_of_any_single_byte_is_seen(dtype: torch.dtype, columns: int) -> None:
    tensor = sample(dtype, columns)
    raw = tensor.view(torch.uint8).flatten()
    before = checksum(tensor)
    for number in [*range(0, len(raw), 37), len(raw) - 1]:
        for flip in (1, 0x40, 0x80, 0xFF):
            raw[number] ^= flip
            assert checksum(tensor) != before, f"byte {number}"
            raw[number] ^= flip
    assert checksum(tensor) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moved_rows_are_seen(dtype: torch.dtype) -> None:
    tensor = sample(dtype)
    for order in ([1, 0, 2, 3, 4, 5, 6], [0, 1, 2, 6, 4, 5, 3], [6, 5, 4, 3, 2, 1, 0], [1, 2, 3, 4, 5, 6, 0]):
        assert checksum(tensor[order]) != checksum(tensor)


def test_what_moves_in_a_large_tensor_is_seen() -> None:
    """Many rows of the checksum's grid: whole rows, columns, and single elements change places."""
    tensor = torch.arange(64 * 4096, dtype=torch.int64).mul(0x5851F42D4C957F2D).view(torch.float32).view(64, 8192)
    before = checksum(tensor)
    for moved in (tensor.roll(1, 0), tensor.flip(0), tensor.roll(2, 1), tensor.flip(1), tensor.roll(2048, 1)):
        assert checksum(moved.contiguous()) != before
    swapped = tensor.clone()
    swapped[3, 10], swapped[3, 1010] = tensor[3, 1010], tensor[3, 10]
    assert checksum(swapped) != before
    swapped = tensor.clone()
    swapped[3, 10], swapped[50, 10] = tensor[50, 10], tensor[3, 10]
    assert checksum(swapped) != before
    assert checksum(tensor.clone()) == before


def test_moved_elements_of_a_small_tensor_are_seen() -> None:
    """A kernel that sorts each token's positions, or its weights, in place."""
    positions = torch.tensor([[5, 1, -1, 7], [2, 9, 4, 3]], dtype=torch.int32)
    assert checksum(positions.sort(dim=1).values) != checksum(positions)
    weights = torch.linspace(0, 1, 64).reshape(8, 8)
    assert checksum(weights.flip(1)) != checksum(weights)
    assert checksum(torch.arange(50.0).flip(0)) != checksum(torch.arange(50.0))


def test_swapped_bits_of_nan_and_of_zeros_are_seen() -> None:
    assert checksum(torch.tensor([[0.0, 1.0]])) != checksum(torch.tensor([[-0.0, 1.0]]))
    quiet = torch.tensor([[0x7FC00000, 5]], dtype=torch.int32)
    other = torch.tensor([[0x7FC00001, 5]], dtype=torch.int32)
    assert checksum(quiet.view(torch.float32)) != checksum(other.view(torch.float32))


def test_the_highest_bits_of_any_word() -> None:
    """Where sums wrap around: a change of 2**62 must not cancel between the sums of rows and of columns."""
    words = (torch.arange(3000) * 0x5851F42D4C957F2D).view(1, -1).clone()
    before = checksum(words)
    for number in range(0, 3000, 7):
        for bit in (1 << 61, 1 << 62, -(1 << 63)):
            words[0, number] ^= bit
            assert checksum(words) != before, f"{bit:#x} of word {number}"
            words[0, number] ^= bit


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_write_beside_an_input_is_seen(layout: str) -> None:
    tensor = place((7, 256), torch.float32, CPU, layout).zero_()
    before = checksum(tensor)
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0)
    start = tensor.storage_offset()
    for index in (0, start - 1, start, start + 6 * tensor.stride(0) + 255 * tensor.stride(1) + 1, len(whole) - 1):
        kept = whole[index].clone()
        whole[index] = 5.0
        assert checksum(tensor) != before, f"element {index}"
        whole[index] = kept
    assert checksum(tensor) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_what_stands_around_them(layout: str, dtype: torch.dtype) -> None:
    tensor = place((7, 256), dtype, CPU, layout).fill_(1)
    assert tensor.shape == (7, 256)
    assert tensor.stride() == {"strided": (320, 1), "column_major": (1, 7)}.get(layout, (256, 1))
    assert (tensor.data_ptr() % 16 == 0) == (layout != "unaligned")
    storage = tensor.as_strided((tensor.untyped_storage().nbytes() // dtype.itemsize,), (1,), 0).clone()
    band = BAND // dtype.itemsize
    for outside in (storage[:band], storage[-band:]):
        assert bool(outside.isnan().all() if dtype.is_floating_point else (outside == 0).all())
    assert int((storage == 1).sum()) == 7 * 256


def test_nothing_has_a_checksum_too() -> None:
    assert checksum(torch.empty(0, 4)) == checksum(torch.empty(4, 0)) == 0
    assert checksum(torch.zeros(1)) == checksum(torch.zeros(1))


@pytest.mark.parametrize("change", [
    lambda words: words[:, 1].neg_(), lambda words: words.view(torch.int16)[:, 1::2].bitwise_xor_(-0x8000),
], ids=["one of two columns negated", "a bit of every fourth word"])
def test_highest_bits_of_many_words_do_not_cancel(change: Callable[[torch.Tensor], object]) -> None:
    words = torch.linspace(0.5, 1.0, 64).reshape(32, 2).contiguous()
    before = checksum(words)
    change(words)
    assert checksum(words) != before


@pytest.mark.parametrize("value", [math.nan, 1.0, 2.0, -1.0, 30000.0, -0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
def test_rows_that_all_change_alike_are_seen(dtype, value):
    """As when a kernel clears rows that hold poison, or writes NaN or -1 over rows of zeros."""
    if dtype == torch.int32:
        value = -1 if math.isnan(value) else int(value * 3) or 7
    for hidden in (64, 96, 512, 4096):
        zeros = torch.zeros(80, hidden, dtype=dtype)
        before = checksum(zeros)
        for rows in (1, 2, 8, 64):
            for start in (0, 1, 8):
                other = zeros.clone()
                other[start : start + rows] = value
                assert checksum(other) != before, (hidden, rows, start)


# ---- snapshots ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 4096, (1 << 22) + 3])  # of bytes: copied, and the last one summed
def test_a_snapshot_sees_every_byte_of_the_storage(count: int) -> None:
    storage = torch.arange(count + 16, dtype=torch.int64).to(torch.uint8)
    inner, other = storage[8 : 8 + count], torch.ones(3)
    watched = [Watched("x", Snapshot.of(inner), inner), Watched("y", Snapshot.of(other), other),
               Watched("y", Snapshot.of(other), other)]
    assert changed(watched, watched[:1]) == [[], []]
    for number in {0, 7, 8 + count // 2, count + 15}:
        storage[number] ^= 0x80
        assert changed(watched, watched[1:], watched[:1]) == [["x"], [], ["x"]], number
        storage[number] ^= 0x80
    other[2] = 2.0
    assert changed(watched) == [["y"]]
    assert changed([], [Watched("y", Snapshot.of(other), torch.ones(4))]) == [[], ["y"]]
    assert changed([]) == [[]]


def test_a_snapshot_knows_nan_by_its_bits() -> None:
    values = torch.tensor([math.nan, 0.0])
    watched = [Watched("x", Snapshot.of(values), values)]
    assert changed(watched) == [[]]
    values[1] = -0.0
    assert changed(watched) == [["x"]]
