"""Faulty semantics of two-stage MoE in microscaled operands: e2m1 nibbles, e8m0 scales, their order, their rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from references.moe_gemm_2stage import layouts, mx
from references.moe_gemm_2stage.faulty import Change, fault
from references.moe_gemm_2stage.operands import GROUP, Operand
from references.moe_gemm_2stage.reading import Reading, quantised, smoothed


def _rows(change: Callable[[Reading, Operand], Operand]) -> Change:
    """Rows of the first stage read otherwise, where they have e8m0 scales."""
    return lambda r: replace(r, rows=change(r, r.rows)) if r.mode.microscaled else None


def _weights(change: Callable[[Reading, str, Operand], Operand]) -> Change:
    """Weights of each stage, ``"w1"`` or ``"w2"``, read otherwise, where they have e8m0 scales."""

    def changed(r: Reading) -> Reading | None:
        if r.mode.weight not in mx.ELEMENTS:
            return None
        found = {name: w and change(r, name, w) for name, w in (("w1", r.w1), ("w2", r.w2))}
        return replace(r, w1=found["w1"], w2=found["w2"])

    return changed


def _scales(change: Callable[[Tensor], Tensor]) -> Callable[..., Operand]:
    """Other factors [..., K/32] of the blocks."""

    def changed(*given: object) -> Operand:
        of = given[-1]
        assert isinstance(of, Operand) and of.factors is not None
        return replace(of, factors=change(of.factors[..., ::GROUP]).repeat_interleave(GROUP, dim=-1))

    return changed


def _shifted(factors: Tensor) -> Tensor:
    """byte << 23 as the bits of a number: byte 0 is 0, 255 infinity."""
    return torch.where(factors.isnan(), torch.inf, torch.where(factors == 2.0**-127, 0.0, factors))


def _swapped(*given: object) -> Operand:
    of = given[-1]
    assert isinstance(of, Operand)
    pairs = of.payload.unflatten(-1, (of.payload.shape[-1] // 2, 2))
    return replace(of, payload=pairs.flip(-1).flatten(-2))


def _nibbles_of_rows(r: Reading) -> Reading | None:
    return replace(r, rows=_swapped(r.rows)) if r.mode.activation == "mxfp4" else None


def _with_codes(of: Operand, codes: Tensor) -> Operand:
    return replace(of, factors=mx.decode_e8m0(codes).repeat_interleave(GROUP, dim=-1))


def _unshuffled_weights(r: Reading, name: str, w: Operand) -> Operand:
    """The shuffled bytes row by row."""
    experts, rows, width = w.payload.shape
    stored = r.call.arguments[f"scale_{name}"]
    return _with_codes(w, stored[: experts * rows, : width // GROUP].reshape(experts, rows, -1))


def _stored_rows(r: Reading) -> tuple[Tensor, int]:
    """The e8m0 codes of rows as they stand, and how many there are to a row."""
    name = "scale_x" if "x" in r.call.arguments else "scale_a2"
    return r.call.arguments[name], r.rows.payload.shape[-1] // GROUP


def _by_row(r: Reading, rows: Operand) -> Operand:
    """Scales read at the row of the elements, as if they were not sorted."""
    stored, blocks = _stored_rows(r)
    plain = layouts.unshuffle_scales(stored, len(stored), blocks)
    index = torch.arange(len(rows.payload), device=stored.device)
    return _with_codes(rows, plain[index // r.topk if "x" in r.call.arguments else index])


def _unshuffled_rows(r: Reading, rows: Operand) -> Operand:
    """The shuffled bytes of the right row, in the order in which they stand."""
    stored, blocks = _stored_rows(r)
    valid = int(r.call.arguments["num_valid_ids"][0])
    ids = r.call.arguments["sorted_token_ids"][:valid]
    token, slot = (ids & 0xFFFFFF).long(), (ids >> 24).long()
    row = (token < r.tokens).nonzero().flatten()
    codes = torch.full((len(rows.payload), blocks), 127, dtype=torch.uint8, device=stored.device)
    codes[token[row] * r.topk + slot[row]] = stored[row, :blocks]
    return _with_codes(rows, codes)


def _other_rule(rule: str) -> Change:
    """Blocks between the stages are scaled by another rule."""

    def changed(r: Reading) -> Reading | None:
        if not r.mode.microscaled or r.w1 is None or r.w2 is None or r.call.arguments["rule"] == rule:
            return None
        return replace(r, between=lambda of, out1: quantised(of, smoothed(of, out1), rule))

    return changed


def _next(factors: Tensor) -> Tensor:
    return factors.roll(-1, -1)


def _expanded(factors: Tensor) -> Tensor:
    return factors[..., :1].expand(factors.shape)


def _infinite(factors: Tensor) -> Tensor:
    return factors.masked_fill(factors.isnan(), torch.inf)


def _both_infinite(r: Reading) -> Reading | None:
    """Of rows, where they have e8m0 scales, and of weights."""
    found = _weights(_scales(_infinite))(r)
    return found and (_rows(_scales(_infinite))(found) or found)


BLOCKS = (
    fault("e8m0-255", "an e8m0 scale of 255 is infinity and not NaN", _both_infinite),
    fault("e8m0-255", "an e8m0 scale of 255 is infinity and not NaN in rows", _rows(_scales(_infinite))),
    fault("e8m0-255", "an e8m0 scale of 255 is infinity and not NaN in weights", _weights(_scales(_infinite))),
    fault("e8m0-shifted", "e8m0 scales of rows are shifted into a number: byte 0 becomes 0", _rows(_scales(_shifted))),
    fault("e8m0-shifted", "e8m0 scales of weights are shifted into a number: byte 0 becomes 0",
          _weights(_scales(_shifted))),
    fault("nibbles-swapped", "low and high nibbles of the weights have changed places", _weights(_swapped)),
    fault("nibbles-swapped-rows", "low and high nibbles of the rows have changed places", _nibbles_of_rows),
    fault("row-scales-unsorted", "scales of rows are read by the row and not by its place in the sorted list",
          _rows(_by_row)),
    fault("row-scales-unshuffled", "shuffled scales of rows are read row by row", _rows(_unshuffled_rows)),
    fault("scales-unshuffled", "shuffled scales of weights are read row by row", _weights(_unshuffled_weights)),
    fault("row-blocks-missing", "the scales of the rows' blocks are left out", _rows(_scales(torch.ones_like))),
    fault("row-blocks-of-first", "the first block's scale counts for the whole row", _rows(_scales(_expanded))),
    fault("row-blocks-of-next", "a block of a row gets the scale of the next one", _rows(_scales(_next))),
    *(fault("requantise-scale-rule", f"scales between the stages follow the rule {rule}", _other_rule(rule))
      for rule in mx.RULES),
)
