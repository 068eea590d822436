"""Memory layouts of two-stage MoE operands, each in both directions, with the address of an element in closed form.

Source of the rules: FlyDSL 7e6dca08 and 11c4174d, aiter e4048607. Functions take and return tensors of any device;
all raise ValueError where an extent does not fit the layout. Nothing here knows a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS, _BYTES, _K = 16, 16, 32  # preshuffled weights: 16 rows, 16 bytes of each, K a multiple of 32 elements
_SCALE_ROWS, _SCALE_COLUMNS = 256, 8  # e8m0 scales are padded to multiples of these


def _need(extent: int, multiple: int, name: str) -> None:
    if extent % multiple:
        raise ValueError(f"{name} is {extent}: a multiple of {multiple} is required")


# ---- weights: preshuffle (16, 16) -----------------------------------------------------------------------------------


def preshuffle(weight: Tensor) -> Tensor:
    """weight [..., N, K] of 1, 2 or 4 bytes an element, in memory order [N/16, K/V, 16, V] with V = 16 bytes.

    The result has the shape of ``weight`` and is contiguous; only the order in memory means anything.
    """
    *lead, rows, columns = weight.shape
    _need(rows, _ROWS, "N")
    _need(columns, _K, "K")
    width = _BYTES // weight.element_size()
    tiles = weight.reshape(*lead, rows // _ROWS, _ROWS, columns // width, width)
    return tiles.transpose(-3, -2).contiguous().view(weight.shape)


def unpreshuffle(stored: Tensor) -> Tensor:
    """Inverse of ``preshuffle``."""
    *lead, rows, columns = stored.shape
    _need(rows, _ROWS, "N")
    _need(columns, _K, "K")
    width = _BYTES // stored.element_size()
    tiles = stored.reshape(*lead, rows // _ROWS, columns // width, _ROWS, width)
    return tiles.transpose(-3, -2).contiguous().view(stored.shape)


def preshuffled_offset(row: int, column: int, columns: int, element_size: int) -> int:
    """Elements from the start of a preshuffled [N, K = ``columns``] matrix to element (row, column)."""
    width = _BYTES // element_size
    return (row // _ROWS) * _ROWS * columns + (column // width) * _ROWS * width + (row % _ROWS) * width + column % width


# ---- 4-bit integers -------------------------------------------------------------------------------------------------


def pack_int4(value: Tensor) -> Tensor:
    """int8 [..., K] in [-8, 7], already preshuffled, as uint8 [..., K/2].

    Groups of 8 consecutive bytes v0..v7 become 4: byte j = v[j+4] << 4 | v[j] & 15, so that a shift and a mask of a
    32-bit word give four neighbours each.
    """
    _need(value.shape[-1], 8, "K")
    if value.dtype != torch.int8 or bool(((value < -8) | (value > 7)).any()):
        raise ValueError(f"{value.dtype} values must be int8 from -8 to 7")
    groups = value.reshape(*value.shape[:-1], value.shape[-1] // 8, 2, 4).view(torch.uint8) & 15
    return (groups[..., 1, :] << 4 | groups[..., 0, :]).reshape(*value.shape[:-1], value.shape[-1] // 2)


def unpack_int4(stored: Tensor) -> Tensor:
    """Inverse of ``pack_int4``: int8 [..., K], sign extended."""
    _need(stored.shape[-1], 4, "packed K")
    groups = stored.reshape(*stored.shape[:-1], stored.shape[-1] // 4, 4)
    both = torch.stack([groups & 15, groups >> 4], dim=-2)
    return _signed(both).reshape(*stored.shape[:-1], stored.shape[-1] * 2)


def packed_int4_place(offset: int) -> tuple[int, int]:
    """(byte, shift) of the element at ``offset`` in preshuffled memory order."""
    group, lane = divmod(offset, 8)
    return group * 4 + lane % 4, 4 * (lane // 4)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes [..., K] below 16 as uint8 [..., K/2]: the low nibble is the even k (fp4, and int4 of a16w4)."""
    _need(codes.shape[-1], 2, "K")
    if codes.dtype != torch.uint8 or bool((codes > 15).any()):
        raise ValueError(f"{codes.dtype} codes must be uint8 below 16")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(stored: Tensor) -> Tensor:
    """Inverse of ``pack_nibbles``."""
    return torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2)


def _signed(nibbles: Tensor) -> Tensor:
    return ((nibbles ^ 8).to(torch.int16) - 8).to(torch.int8)


# ---- e8m0 scales ----------------------------------------------------------------------------------------------------


def shuffled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Extents of the scales [rows, columns] once they are padded."""
    return -(-rows // _SCALE_ROWS) * _SCALE_ROWS, -(-columns // _SCALE_COLUMNS) * _SCALE_COLUMNS


def shuffle_scales(scales: Tensor, fill: int = 127) -> Tensor:
    """uint8 [M, N] e8m0 scales, padded with ``fill`` to multiples of 256 and 8, in memory order
    [M/32, N/8, 4, 16, 2, 2]; the result is 2-d with the padded extents."""
    rows, columns = scales.shape
    padded = scales.new_full(shuffled_shape(rows, columns), fill)
    padded[:rows, :columns] = scales
    tiles = padded.view(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).contiguous().view(padded.shape)


def unshuffle_scales(stored: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of ``shuffle_scales``: [rows, columns], the padding cut off."""
    _need(stored.shape[0], _SCALE_ROWS, "M")
    _need(stored.shape[1], _SCALE_COLUMNS, "N")
    tiles = stored.reshape(stored.shape[0] // 32, stored.shape[1] // 8, 4, 16, 2, 2)
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(stored.shape)[:rows, :columns].contiguous()


def shuffled_scale_offset(row: int, column: int, columns: int) -> int:
    """Bytes from the start to the scale of (row, column); ``columns`` are the padded ones."""
    tile = (row // 32) * (columns // 8) + column // 8
    return (((tile * 4 + column % 4) * 16 + row % 16) * 2 + column % 8 // 4) * 2 + row % 32 // 16


# ---- order of rows and groups ---------------------------------------------------------------------------------------


def interleave_gate_up(weight: Tensor) -> Tensor:
    """[..., 2I, K] from "GGUU" (all gate rows, then all up rows) to "GUGU" (g0, u0, g1, u1, ...)."""
    _need(weight.shape[-2], 2, "2I")
    halves = weight.reshape(*weight.shape[:-2], 2, weight.shape[-2] // 2, weight.shape[-1])
    return halves.transpose(-3, -2).reshape(weight.shape)


def split_gate_up(weight: Tensor) -> Tensor:
    """Inverse of ``interleave_gate_up``."""
    _need(weight.shape[-2], 2, "2I")
    pairs = weight.reshape(*weight.shape[:-2], weight.shape[-2] // 2, 2, weight.shape[-1])
    return pairs.transpose(-3, -2).reshape(weight.shape)


def slot_major(rows: Tensor) -> Tensor:
    """[T, k, ...] as [k T, ...] with row s T + t: how int8smooth stores stage 1's input and its scales."""
    return rows.transpose(0, 1).reshape(-1, *rows.shape[2:])


def token_major(rows: Tensor, topk: int) -> Tensor:
    """Inverse of ``slot_major``: [T, k, ...]."""
    _need(rows.shape[0], topk, "k T")
    return rows.reshape(topk, -1, *rows.shape[1:]).transpose(0, 1).contiguous()


def pair_group_scales(scales: Tensor) -> Tensor:
    """bf16 [E, N, K/32] group scales as [E, K/64, N, 2]: two neighbouring groups of one row in one 32-bit word."""
    experts, rows, groups = scales.shape
    _need(groups, 2, "K/32")
    return scales.reshape(experts, rows, groups // 2, 2).transpose(1, 2).contiguous()


def unpair_group_scales(stored: Tensor) -> Tensor:
    """Inverse of ``pair_group_scales``: [E, N, K/32]."""
    experts, pairs, rows, _ = stored.shape
    return stored.transpose(1, 2).reshape(experts, rows, pairs * 2)
