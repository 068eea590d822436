"""Faulty readings of the payloads of two-stage MoE: what a byte or a nibble means, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage import fp8, layouts
from references.moe_gemm_2stage.faulty import Change, fault, weights_read
from references.moe_gemm_2stage.operands import Operand
from references.moe_gemm_2stage.reading import Reading, encoding, quantised, smoothed


def _other_encoding(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
    if r.mode.weight != "fp8":
        return None
    other = fp8.FNUZ if encoding(r.call) == "ocp" else fp8.OCP
    return replace(w, payload=fp8.decode(layouts.unpreshuffle(stored.view(torch.uint8)), other))


def _rows_other_encoding(r: Reading) -> Reading | None:
    if r.mode.activation != "fp8":
        return None
    name = "x" if "x" in r.call.arguments else "a2"
    other = fp8.FNUZ if encoding(r.call) == "ocp" else fp8.OCP
    codes = r.call.arguments[name].view(torch.uint8)

    def between(of: Reading, out1: Tensor) -> Operand:
        right = quantised(of, smoothed(of, out1))
        own = fp8.FORMS[encoding(of.call)]
        return replace(right, payload=fp8.decode(fp8.encode(right.payload, own), other))

    payload = fp8.decode(codes.reshape(-1, codes.shape[-1]), other)
    return replace(r, rows=replace(r.rows, payload=payload), between=between)


def _flushed(size: Tensor, least: float) -> Tensor:
    return torch.zeros_like(size)


def _as_normal(size: Tensor, least: float) -> Tensor:
    """With the leading one that numbers from ``least`` on have."""
    return (least + size) / 2


def _subnormal(read_as: Callable[[Tensor, float], Tensor], rows: bool = True, weights: bool = True) -> Change:
    """Magnitudes of fp8 numbers below the least normal one, but for 0, are ``read_as(size, least)`` in both stages."""

    def number(r: Reading, payload: Tensor) -> Tensor:
        size, least = payload.abs(), 2.0 ** (1 - fp8.FORMS[encoding(r.call)].bias)
        return torch.where((size > 0) & (size < least), read_as(size, least).copysign(payload), payload)

    def of_rows(r: Reading) -> Reading | None:
        if r.mode.activation not in ("fp8", "mxfp8"):
            return None

        def between(of: Reading, out1: Tensor) -> Operand:
            right = quantised(of, smoothed(of, out1))
            return replace(right, payload=number(of, right.payload))

        return replace(r, rows=replace(r.rows, payload=number(r, r.rows.payload)), between=between)

    def of_weights(r: Reading) -> Reading | None:
        if r.mode.weight != "fp8":
            return None
        return weights_read(lambda of, w, stored: replace(w, payload=number(of, w.payload)))(r)

    def change(r: Reading) -> Reading | None:
        found = of_weights(r) if weights else r
        return found and of_rows(found) if rows else found

    return change


def _raw_order(r: Reading, w: Operand, stored: Tensor) -> Operand:
    """As if the weights had not been preshuffled."""
    return replace(w, payload=_shuffled(r, w.payload, True))


def _wrong_width(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
    """16 elements of 16 bits are taken to lie together, where 8 do."""
    return replace(w, payload=_shuffled(r, w.payload, False)) if stored.element_size() == 2 else None


def _shuffled(r: Reading, payload: Tensor, ignored: bool) -> Tensor:
    """The numbers [E, N, K] in memory order, read row by row, or with 16 elements side by side."""
    experts, rows, columns = payload.shape
    width = {"f16": 8, "bf16": 8, "mxfp4": 32}.get(r.mode.weight, 16)
    memory = payload.view(experts, rows // 16, 16, columns // width, width).transpose(2, 3).reshape(payload.shape)
    if ignored:
        return memory
    return memory.view(experts, rows // 16, columns // 16, 16, 16).transpose(2, 3).reshape(payload.shape)


def _nibbles(function: Callable[[Tensor], Tensor]) -> Change:
    """4-bit weights: ``function`` gives int8 [..., K] of the packed bytes [..., K/2]."""

    def change(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
        if not r.mode.weight.startswith("int4"):
            return None
        return replace(w, payload=layouts.unpreshuffle(function(stored)).float())

    return weights_read(change)


def _paired(stored: Tensor) -> Tensor:
    nibbles = torch.stack([stored & 15, stored >> 4], dim=-1).flatten(-2).to(torch.int16)
    return ((nibbles ^ 8) - 8).to(torch.int8)


def _unsigned(stored: Tensor) -> Tensor:
    return layouts.unpack_int4(stored) & 15


def _lowest(read_as: Callable[[float], float]) -> Change:
    """Integer weights whose lowest code is taken for another number."""

    def change(r: Reading, w: Operand, stored: Tensor) -> Operand | None:
        lowest = {"int8": -128.0, "int4": -8.0, "int4_g32": -8.0}.get(r.mode.weight)
        if lowest is None:
            return None
        return replace(w, payload=w.payload.masked_fill(w.payload == lowest, read_as(lowest)))

    return weights_read(change)


STORAGE = (
    fault("fp8-encoding", "fp8 weights are read in the other e4m3 encoding", weights_read(_other_encoding)),
    fault("fp8-encoding-rows", "fp8 rows are read in the other e4m3 encoding", _rows_other_encoding),
    fault("preshuffle-ignored", "preshuffled weights are read row by row", weights_read(_raw_order)),
    fault("preshuffle-width", "16 elements of a weight are taken to lie together, where 8 do",
          weights_read(_wrong_width)),
    fault("nibbles-swapped", "low and high nibbles of the weights have changed places",
          _nibbles(lambda stored: layouts.unpack_int4(stored << 4 | stored >> 4))),
    fault("nibbles-paired", "the two nibbles of a byte are taken for neighbours", _nibbles(_paired)),
    fault("nibbles-unsigned", "4-bit weights are not sign-extended", _nibbles(_unsigned)),
    fault("lowest-code-positive", "the lowest code of integer weights, -128 or -8, is read without its sign",
          _lowest(lambda lowest: -lowest)),
    fault("lowest-code-clamped", "the lowest code of integer weights, -128 or -8, is read as -127 or -7",
          _lowest(lambda lowest: lowest + 1)),
)
# Where few elements are wrong they fit as well as others do, which are then named.
SUBNORMAL = tuple(
    fault("fp8-subnormal", f"fp8 numbers of {what} below the normal range {how}",
          _subnormal(read_as, rows="rows" in what, weights="weights" in what))
    for how, read_as in (("count as 0", _flushed), ("are read with a leading one", _as_normal))
    for what in ("rows and weights", "weights", "rows")
)
