"""The faulty semantics that a failure of moe_reduce_fused is compared with, the most specific first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from conformance.operator import Call
from references.moe_reduce_fused.faulty import Change, Reading, fault, whole

_LARGEST = 3.4028234663852886e38


# ---- Which slots count --------------------------------------------------------------------------------------------


def _padding_row(row: Callable[[Reading], int]) -> Change:
    def change(r: Reading) -> Reading | None:
        if bool(r.valid.all()):
            return None
        return replace(r, index=r.index.masked_fill(~r.valid, row(r)), valid=torch.ones_like(r.valid))

    return change


def _by_product(r: Reading) -> Reading | None:
    if bool(r.valid.all()):
        return None
    ones = torch.ones_like(r.positions, dtype=torch.float32)
    weights = (ones if r.weights is None else r.weights) * r.valid
    return replace(r, weights=weights, valid=torch.ones_like(r.valid))


def _counts(mask: Callable[[Reading], Tensor]) -> Change:
    """Slots count where the mask [T, K] says so."""

    def change(r: Reading) -> Reading | None:
        valid = mask(r)
        return None if torch.equal(valid, r.valid) else replace(r, valid=valid)

    return change


def _slot(r: Reading) -> Tensor:
    return torch.arange(r.valid.shape[1], device=r.valid.device)


def _first_n(r: Reading) -> Tensor:
    return _slot(r) < r.valid.sum(dim=1, keepdim=True)


def _all_but_last_valid(r: Reading) -> Tensor:
    count = r.valid.sum(dim=1, keepdim=True)
    return r.valid & ((r.valid.cumsum(dim=1) < count) | (count == 1))


def _distinct(r: Reading) -> Tensor:
    return r.valid & ~torch.tril(r.positions[:, :, None] == r.positions[:, None, :], -1).any(dim=2)


def _last(r: Reading) -> Tensor:
    slot = _slot(r)
    return r.valid & ((slot < len(slot) - 1) | (len(slot) == 1))


# ---- Which row, weight or scale -----------------------------------------------------------------------------------


def _index(change: Callable[[Reading], Tensor], valid: Callable[[Reading], Tensor] = lambda r: r.valid) -> Change:
    def changed(r: Reading) -> Reading | None:
        index = change(r)
        return None if torch.equal(index, r.index) else replace(r, index=index, valid=valid(r))

    return changed


def _weights(change: Callable[[Reading, Tensor], Tensor | None]) -> Change:
    return lambda r: None if r.weights is None else replace(r, weights=change(r, r.weights))


def _x_sf(change: Callable[[Reading, Tensor], Tensor | None]) -> Change:
    return lambda r: None if r.x_sf is None else replace(r, x_sf=change(r, r.x_sf))


def _sf(change: Callable[[Tensor], Tensor | None]) -> Change:
    return lambda r: None if r.sf is None else replace(r, sf=change(r.sf))


def _row_scale(by: Callable[[Reading], Tensor]) -> Change:
    """x_sf of the rows [T, K] that ``by`` gives, in the place of each slot's own."""
    return lambda r: None if r.x_sf is None else replace(r, row_scale=r.x_sf[by(r) % len(r.x_sf)])


def _of_slot_0(least: int) -> Callable[[Reading], Tensor]:
    """Rows [T, K] of slot 0; where that is padding row 0, or with ``least`` -1 the last one."""
    return lambda r: r.positions[:, :1].clamp(min=least).long().expand(r.valid.shape)


def _token(r: Reading) -> Tensor:
    return torch.arange(len(r.valid), device=r.valid.device)[:, None].expand(r.valid.shape)


def _compacted(r: Reading, weights: Tensor) -> Tensor:
    return weights.gather(1, (r.valid.cumsum(dim=1) - 1).clamp(min=0))


def _normalised(r: Reading, weights: Tensor) -> Tensor:
    return weights / weights.masked_fill(~r.valid, 0.0).sum(dim=1, keepdim=True)


def _power_of_two(r: Reading, scale: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale.abs().double()))).float().copysign(scale)


def _reciprocal(scale: Tensor) -> Tensor:
    """What dividing by the reciprocal multiplies by: 0 where that is infinite."""
    return 1 / (1 / scale)


def _flushed(scale: Tensor) -> Tensor:
    return scale.masked_fill(scale.abs() < torch.finfo(torch.float32).tiny, 0.0)


def _default_weights(r: Reading) -> Reading | None:
    if r.weights is not None:
        return None
    return replace(r, weights=torch.full(r.valid.shape, 1 / r.valid.shape[1], device=r.valid.device))


# ---- x in memory, NaN, precision ----------------------------------------------------------------------------------


def _contiguous(call: Call) -> Tensor | None:
    x = call.arguments["x"]
    flat = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())[x.storage_offset() :]
    return None if x.is_contiguous() or len(flat) < x.numel() else flat[: x.numel()].view(x.shape)


def _other_16_bits(call: Call) -> Tensor | None:
    other = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
    x = call.arguments["x"]
    return x.contiguous().view(other[x.dtype]) if x.dtype in other and len(x) else None


def _tf32(rows: Tensor) -> Tensor:
    raw = (rows.view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)
    return torch.where(rows.isfinite(), raw.view(torch.float32), rows)


_LOW: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
    ("bf16", lambda one: one.bfloat16().float()), ("fp16", lambda one: one.half().float()), ("tf32", _tf32))


def _to(low: Callable[[Tensor], Tensor]) -> Callable[[Reading, Tensor], Tensor]:
    return lambda r, one: low(one)


def _mean(r: Reading) -> Reading:
    count = r.valid.sum(dim=1, keepdim=True).clamp(min=1)
    return replace(r, before_sf=lambda total: total / count)


def _nan_if_empty(r: Reading) -> Reading | None:
    return replace(r, after=lambda total: total.masked_fill(r.empty, torch.nan)) if bool(r.empty.any()) else None


def _only(condition: Callable[[Reading], bool], change: Change) -> Change:
    return lambda r: change(r) if condition(r) else None


FAULTS = (
    fault("padding-row-0", "padding slots are read as row 0", _padding_row(lambda r: 0)),
    fault("padding-last-row", "padding slots are read as the last row (-1 wraps)",
          _padding_row(lambda r: len(r.x) - 1)),
    fault("padding-by-product", "padding slots are masked by a factor of 0, which keeps NaN and infinity", _by_product),
    fault("nan-for-empty", "tokens with only padding slots are NaN", _nan_if_empty),
    fault("stops-at-padding", "slots after the first padding slot are left out",
          _counts(lambda r: r.valid.long().cumprod(dim=1).bool())),
    fault("row-0-as-padding", "slots that refer to row 0 are taken for padding", _counts(lambda r: r.positions > 0)),
    fault("first-n-slots", "the first n slots are used, n being the number of valid ones", _counts(_first_n)),
    fault("duplicates-dropped", "a row that several slots of a token refer to counts once", _counts(_distinct)),
    fault("zero-weight-skipped", "slots of weight 0 are skipped, so that their NaN and infinity are lost",
          _only(lambda r: r.weights is not None, _counts(lambda r: r.valid & (r.weights != 0)))),
    fault("last-slot-dropped", "the last slot is left out", _counts(_last)),
    fault("last-valid-dropped", "each token's last valid slot is left out", _counts(_all_but_last_valid)),
    fault("first-slot-dropped", "the first slot is left out", _counts(lambda r: r.valid & (_slot(r) > 0))),
    fault("position-16-bit", "positions are held in 16 bits", _index(lambda r: r.index & 0xFFFF)),
    fault("slot-0-everywhere", "every slot reads the row of slot 0",
          _index(lambda r: torch.where(r.valid & r.valid[:, :1], r.index[:, :1], r.index))),
    fault("slot-0-everywhere", "every slot reads the row of slot 0",
          _index(lambda r: r.index[:, :1].expand(r.index.shape), lambda r: r.valid & r.valid[:, :1])),
    fault("weights-missing", "the weights are left out", _weights(lambda r, w: None)),
    fault("weights-twice", "the weights are applied twice", _weights(lambda r, w: w * w)),
    fault("weights-of-previous-slot", "each slot gets the weight of the slot before it",
          _weights(lambda r, w: w.roll(1, 1))),
    fault("weights-of-next-slot", "each slot gets the weight of the slot after it",
          _weights(lambda r, w: w.roll(-1, 1))),
    fault("weights-of-slot-0", "every slot gets the weight of slot 0", _weights(lambda r, w: w[:, :1].expand(w.shape))),
    fault("weights-of-previous-token", "each token gets the weights of the token before it",
          _weights(lambda r, w: w.roll(1, 0))),
    fault("weights-of-next-token", "each token gets the weights of the token after it",
          _weights(lambda r, w: w.roll(-1, 0))),
    fault("weights-compacted", "weights are counted over valid slots only", _weights(_compacted)),
    fault("weights-normalised", "the weights are divided by their sum over valid slots", _weights(_normalised)),
    fault("weights-by-reciprocal", "rows are divided by the reciprocals of weights, which may be infinite",
          _weights(lambda r, w: _reciprocal(w))),
    fault("weights-flushed", "weights below 2^-126 count as 0", _weights(lambda r, w: _flushed(w))),
    fault("weights-abs", "weights lose their sign", _weights(lambda r, w: w.abs())),
    fault("weights-negative", "negative weights count as 0", _weights(lambda r, w: w.clamp(min=0))),
    fault("weights-finite", "NaN and infinity among the weights count as 0",
          _weights(lambda r, w: w.nan_to_num(0.0, 0.0, 0.0))),
    fault("weights-default", "absent weights count as 1 / K", _default_weights),
    fault("x_sf-missing", "x_sf is left out", _x_sf(lambda r, s: None)),
    fault("x_sf-twice", "x_sf is applied twice", _x_sf(lambda r, s: s * s)),
    fault("x_sf-of-token", "x_sf is indexed by token, not by row", _row_scale(_token)),
    fault("x_sf-of-slot", "x_sf is indexed by slot, not by row", _row_scale(lambda r: _slot(r).expand(r.valid.shape))),
    *(fault("x_sf-of-slot-0", "every slot gets the x_sf of slot 0's row", _row_scale(_of_slot_0(least)))
      for least in (0, -1)),
    fault("x_sf-of-flat-slot", "x_sf is indexed by token and slot, not by row",
          _row_scale(lambda r: _token(r) * r.valid.shape[1] + _slot(r))),
    fault("x_sf-power-of-two", "x_sf is rounded up to a power of two", _x_sf(_power_of_two)),
    fault("x_sf-by-reciprocal", "rows are divided by the reciprocals of x_sf, which may be infinite",
          _x_sf(lambda r, s: _reciprocal(s))),
    fault("x_sf-flushed", "x_sf below 2^-126 counts as 0", _x_sf(lambda r, s: _flushed(s))),
    fault("x_sf-abs", "x_sf loses its sign", _x_sf(lambda r, s: s.abs())),
    fault("sf-by-reciprocal", "the sum is divided by the reciprocal of sf, which may be infinite", _sf(_reciprocal)),
    fault("sf-flushed", "an sf below 2^-126 counts as 0", _sf(_flushed)),
    fault("sf-missing", "sf is left out", _sf(lambda sf: None)),
    fault("sf-twice", "sf is applied twice", _sf(lambda sf: sf * sf)),
    fault("sf-reciprocal", "the sum is divided by sf", _sf(lambda sf: 1 / sf)),
    fault("mean", "the sum is divided by the number of valid slots", _mean),
    whole("x-contiguous", "x is read as if it were contiguous", _contiguous),
    whole("x-bits", "x's 16 bits are read in the other 16-bit format", _other_16_bits),
    fault("x-nan-as-zero", "NaN in x counts as 0", lambda r: replace(r, widen=lambda rows: rows.float().nan_to_num(
        nan=0.0, posinf=torch.inf, neginf=-torch.inf))),
    fault("x-infinity-clamped", "infinity in x becomes the largest finite number",
          lambda r: replace(r, widen=lambda rows: rows.float().clamp(-_LARGEST, _LARGEST))),
    fault("clamped-before-sf", "the sum is clamped to 448 before sf",
          _only(lambda r: r.sf is not None, lambda r: replace(r, before_sf=lambda total: total.clamp(-448.0, 448.0)))),
    fault("rounded-before-sf", "the sum is rounded to bf16 before sf",
          _only(lambda r: r.sf is not None, lambda r: replace(r, before_sf=lambda total: total.bfloat16().float()))),
    fault("acc-bf16", "the accumulator is bf16", lambda r: replace(r, accumulator=torch.bfloat16)),
    fault("acc-fp16", "the accumulator is fp16", lambda r: replace(r, accumulator=torch.float16)),
    fault("products-rounded", "products are rounded to x's dtype before they are added",
          _only(lambda r: r.x.dtype != torch.float32, lambda r: replace(r, product=r.x.dtype))),
    *(fault(f"weights-{form}", f"the weights are rounded to {form}", _weights(_to(low))) for form, low in _LOW),
    *(fault(f"x_sf-{form}", f"x_sf is rounded to {form}", _x_sf(_to(low))) for form, low in _LOW),
    fault("x-tf32", "fp32 rows are rounded to TF32", _only(lambda r: r.x.dtype == torch.float32,
                                                       lambda r: replace(r, widen=_tf32))),
)
