"""Golden and oracle of moe_reduce_fused."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.data.arithmetic import fma
from conformance.formats import cast
from conformance.operator import NOT_A_NUMBER, Arguments, Call, OracleRows, Reference, Shared
from references.moe_reduce_fused.contract import validate

_U, _SMALLEST = 2.0**-24, 2.0**-149  # unit roundoff and smallest subnormal of fp32



@dataclass(frozen=True)
class _Terms:
    """Terms of some tokens of [start, stop), no token twice: token index from ``start`` [n] (None: all of them, in
    order), row of x [n], slot [n, 1]."""

    token: Tensor | None
    row: Tensor
    slot: Tensor


@dataclass(frozen=True)
class _Chunk:
    """Tokens [start, stop) and the terms of their sums, each token's in the order of its valid slots: the first of
    every token, then what they have of a second, and so on. Nothing of a padding slot is ever read."""

    start: int
    stop: int
    valid: Tensor
    terms: tuple[_Terms, ...]

    @property
    def full(self) -> bool:
        """Whether no token consists of padding slots only."""
        return bool(self.terms) and self.terms[0].token is None


def _chunks(arguments: Arguments) -> list[_Chunk]:
    """Token ranges whose fp64 temporaries stay in cache on a CPU, and fill a GPU with few launches."""
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    tokens = positions.shape[0]
    step = max(1, (1 << 27 if x.is_cuda else 1 << 17) // x.shape[1])
    valid = positions >= 0
    counts = valid.sum(dim=1)
    order = torch.sort(~valid, dim=1, stable=True).indices  # valid slots first, ascending
    return [_chunk(arguments, counts, order, start, min(tokens, start + step)) for start in range(0, tokens, step)]


def _chunk(arguments: Arguments, counts: Tensor, order: Tensor, start: int, stop: int) -> _Chunk:
    positions, slots, valid = arguments["token_topk_to_pos"][start:stop].long(), order[start:stop], counts[start:stop]
    terms = []
    for rank in range(int(valid.max()) if stop > start else 0):
        token = None
        slot = slots[:, rank, None]
        row = positions.gather(1, slot)[:, 0]
        if bool((valid <= rank).any()):
            token = (valid > rank).nonzero().flatten()
            slot, row = slot[token], row[token]
        terms.append(_Terms(token, row, slot))
    return _Chunk(start, stop, valid, tuple(terms))


def _scale(arguments: Arguments, chunk: _Chunk, terms: _Terms) -> tuple[Tensor | None, Tensor | None]:
    """Weight and x_sf of the terms, fp32 [n, 1] each, or None."""
    weights, x_sf = arguments["topk_weights"], arguments["x_sf"]
    weight = None
    if weights is not None:
        weight = weights[chunk.start : chunk.stop]
        weight = (weight if terms.token is None else weight[terms.token]).gather(1, terms.slot)
    return weight, None if x_sf is None else x_sf[terms.row][:, None]


def accumulate(arguments: Arguments, chunks: Sequence[_Chunk] | None = None) -> Tensor:
    """fp32 [T, H]: the accumulator after the last slot, before sf and the cast."""
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    acc = torch.empty((positions.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    one, zero = (value((1, 1), dtype=torch.float32, device=x.device) for value in (torch.ones, torch.zeros))
    for chunk in _chunks(arguments) if chunks is None else chunks:
        part = acc[chunk.start : chunk.stop]
        if not chunk.full:
            part.zero_()
        for terms in chunk.terms:
            weight, x_sf = _scale(arguments, chunk, terms)
            scale = one if weight is None else weight
            scale = scale if x_sf is None else scale * x_sf
            value = x.index_select(0, terms.row).float()
            if terms.token is None:
                fma(value, scale, zero.expand_as(part) if terms is chunk.terms[0] else part, out=part)
            else:
                part.index_copy_(0, terms.token, fma(value, scale, part.index_select(0, terms.token)))
    return acc


def finish(acc: Tensor, arguments: Arguments, dtype: torch.dtype, full: bool = False) -> Tensor:
    """The accumulator [T, H] times sf, cast to ``dtype``; a token with only padding slots is +0 for every sf.
    ``full``: there is none."""
    if arguments["sf"] is not None:
        acc = acc * arguments["sf"]
        if not full:
            acc.masked_fill_((arguments["token_topk_to_pos"] < 0).all(dim=1, keepdim=True), 0.0)
    return cast(acc, dtype)


def golden(
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None = None,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The reference result [T, H] in the documented order of roundings. Raises as ``validate`` does."""
    arguments = dict(x=x, token_topk_to_pos=token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf)
    validate(arguments, None, strided=True)
    dtype = out_dtype or x.dtype
    if dtype not in (x.dtype, torch.float8_e4m3fn):
        raise TypeError(f"out_dtype is {dtype}: x's dtype {x.dtype} or float8_e4m3fn is required")
    if sf is not None and dtype != torch.float8_e4m3fn:
        raise ValueError(f"sf is given but out_dtype is {dtype}: sf requires a float8_e4m3fn output")
    return finish(accumulate(arguments), arguments, dtype)


def oracle(arguments: Arguments, chunks: Sequence[_Chunk] | None = None) -> Iterator[OracleRows]:
    """The exact sum before sf in fp64 with its error bound, some tokens at a time.

    With n = valid slots + 2 (each product and each addition rounds once, s = w * x_sf once, acc * sf once; a
    fused kernel makes fewer) and S = sum of |terms|: |error| <= n u / (1 - n u) * S, u = 2**-24 (Higham, Accuracy
    and Stability of Numerical Algorithms, 3.1), plus n of the smallest fp32 subnormal for products that underflow.
    """
    x = arguments["x"]
    for chunk in _chunks(arguments) if chunks is None else chunks:
        shape = (chunk.stop - chunk.start, x.shape[1])
        total = magnitude = None
        for terms in chunk.terms:
            weight, x_sf = _scale(arguments, chunk, terms)
            scale = torch.ones((1, 1), dtype=torch.float64, device=x.device) if weight is None else weight.double()
            scale = scale if x_sf is None else scale * x_sf.double()  # exact: 24 + 24 bits
            term = x.index_select(0, terms.row) * scale
            size = term.float().abs_()
            if total is None or magnitude is None:
                total, magnitude = (part if terms.token is None else part.new_zeros(shape).index_copy_(
                    0, terms.token, part) for part in (term, size))
            elif terms.token is None:
                total += term
                magnitude += size
            else:
                total.index_add_(0, terms.token, term)
                magnitude.index_add_(0, terms.token, size)
        if total is None or magnitude is None:  # padding slots only
            total, magnitude = (torch.zeros(shape, dtype=d, device=x.device) for d in (torch.float64, torch.float32))
        roundings = chunk.valid[:, None].double() + 2
        relative = roundings * _U / (1 - roundings * _U) * (1 + 2.0**-16)  # S itself was summed in fp32
        error = torch.addcmul(roundings.float() * _SMALLEST, magnitude, relative.float())
        yield OracleRows(chunk.start, chunk.stop, total, error)


def _scaled(rows: OracleRows, sf: Tensor | None, empty: Tensor) -> OracleRows:
    """The rows times sf, exactly in value and upwards in error. ``empty`` [n, 1]: tokens with padding slots only. These
    are 0, and where 0 times sf is NaN they may be that as well."""
    if sf is None:
        return rows
    factor, least = sf.abs() * (1 + 2.0**-20), torch.full_like(sf, _SMALLEST)
    known = float(sf)  # a number costs a pass over memory less time than a tensor of one element
    value, error = rows.value * known, torch.addcmul(least, rows.error, factor)
    if math.isfinite(known):
        return OracleRows(rows.start, rows.stop, value, error)
    also = (empty * NOT_A_NUMBER).to(torch.uint8).expand(value.shape)
    return OracleRows(rows.start, rows.stop, value.masked_fill_(empty, 0.0), error.masked_fill_(empty, 0.0), also)


def reference(call: Call, shared: Shared) -> Reference:
    """Golden and oracle of a call. Cases that differ only in the output share the accumulator and the
    oracle before sf."""
    case, arguments = call.case, call.arguments
    key = case.get("weights"), case.get("xsf"), case.get("scales")
    chunks = shared.get("chunks", lambda: _chunks(arguments))
    acc = shared.latest("acc", key, lambda: accumulate(arguments, chunks))

    def rows() -> Iterator[OracleRows]:
        unscaled = shared.latest("oracle", key, lambda: list(oracle(arguments, chunks)))
        return (_scaled(part, arguments["sf"], chunk.valid[:, None] == 0)
                for part, chunk in zip(unscaled, chunks, strict=True))

    full = all(chunk.full for chunk in chunks)
    return Reference(finish(acc, arguments, call.output.dtype, full), rows)
