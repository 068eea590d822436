"""Mutants that read the wrong place: padding as rows, wrong slot, token, row or column, wrong strides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels.mutants.reduce_fused import steps
from kernels.mutants.reduce_fused.steps import Work, wrong

_wrong = partial(wrong, __name__)


# ---- SENTINEL, ROUTING: which slots count ------------------------------------------------------------------------


def _all_valid(w: Work) -> tuple[Tensor, Tensor]:
    return w.positions.clamp(min=0).long(), torch.ones_like(w.positions, dtype=torch.bool)


def _wrapped(w: Work) -> tuple[Tensor, Tensor]:
    rows = len(w.x)
    return torch.where(w.positions < 0, w.positions + rows, w.positions).long(), _all_valid(w)[1]


def _with_valid(change: str) -> Callable[[Work], tuple[Tensor, Tensor]]:
    def located(w: Work) -> tuple[Tensor, Tensor]:
        index, valid = steps.locate(w)
        slot = torch.arange(valid.shape[1], device=valid.device)
        count = valid.sum(dim=1, keepdim=True)
        if change == "until padding":
            valid = valid.long().cumprod(dim=1).bool()
        elif change == "row 0 is padding":
            valid = w.positions > 0
        elif change == "all but the last":
            valid = valid & ((slot < len(slot) - 1) | (len(slot) == 1))
        elif change == "even number":
            valid = valid & ((slot < len(slot) // 2 * 2) | (len(slot) == 1))
        elif change == "the first n":
            valid = (slot < count) & (count > 0)
        elif change == "all but the last valid":
            valid = valid & ((valid.cumsum(dim=1) < count) | (count == 1))
        elif change == "distinct" or (change == "distinct of many" and len(slot) > 12):
            same = w.positions[:, :, None] == w.positions[:, None, :]
            valid = valid & ~torch.tril(same, -1).any(dim=2)
        return index, valid

    return located


def _by_product(w: Work, rows: Tensor, scale: Tensor | None) -> Tensor:
    mask = w.valid.float()
    return (rows * (mask if scale is None else scale * mask)[..., None]).sum(dim=1)


_wrong("sentinel_row_0", "SENTINEL", "A padding slot is clamped to row 0 and counts.", "padding-row-0",
       locate=_all_valid)
_wrong("sentinel_wrapped", "SENTINEL", "A padding slot's -1 wraps to the last row and counts.", "padding-last-row",
       locate=_wrapped)
_wrong("sentinel_product", "SENTINEL", "A padding slot is masked by a factor 0, which keeps NaN.", "padding-by-product",
       combine=_by_product)
_wrong("sentinel_stop", "SENTINEL", "The loop over slots ends at the first padding slot.", "stops-at-padding",
       locate=_with_valid("until padding"))
_wrong("sentinel_zero", "SENTINEL", "Position 0 is taken for padding (> 0 in the place of >= 0).", "row-0-as-padding",
       locate=_with_valid("row 0 is padding"))
_wrong("routing_first_n", "ROUTING", "The first n slots are used, n being the number of valid ones.", "first-n-slots",
       locate=_with_valid("the first n"))
_wrong("routing_last_valid", "ROUTING", "The last valid slot of each token is left out.", "last-valid-dropped",
       locate=_with_valid("all but the last valid"))
_wrong("routing_distinct", "ROUTING", "A row that several slots of a token name counts once.", "duplicates-dropped",
       locate=_with_valid("distinct"))
_wrong("routing_distinct_many", "ROUTING", "Of more than 12 slots those that name one row count once.",
       "duplicates-dropped", locate=_with_valid("distinct of many"))
_wrong("tail_last_slot", "TAIL", "The loop over slots ends one slot early.", "last-slot-dropped last-valid-dropped",
       locate=_with_valid("all but the last"))
_wrong("tail_odd_slot", "TAIL", "Slots are taken two at a time; an odd one is left out.",
       "last-slot-dropped last-valid-dropped", locate=_with_valid("even number"))


# ---- MAP, OVERFLOW: which row, weight, token ---------------------------------------------------------------------


def _slot_0(w: Work) -> tuple[Tensor, Tensor]:
    index, valid = steps.locate(w)
    first = torch.where(valid[:, :1], index[:, :1], index)
    return first.expand_as(index).contiguous(), valid


def _low_16_bits(w: Work) -> tuple[Tensor, Tensor]:
    index, valid = steps.locate(w)
    return index & 0xFFFF, valid


def _first_tokens(w: Work) -> tuple[Tensor, Tensor]:
    index, valid = steps.locate(w)
    return index, valid & (torch.arange(len(valid), device=valid.device)[:, None] < 4096)


def _weights(by: int, axis: int) -> Callable[[Work], None]:
    def begin(w: Work) -> None:
        w.weights = None if w.weights is None else w.weights.roll(by, axis)

    return begin


def _compacted(w: Work) -> None:
    if w.weights is not None:
        w.weights = w.weights.gather(1, ((w.positions >= 0).cumsum(dim=1) - 1).clamp(min=0))


def _scale_of(row: Callable[[Tensor, Tensor, Work], Tensor]) -> Callable[[Work], Tensor | None]:
    """x_sf of other rows: ``row(token, slot, work)``, [T, 1] or [T, K]."""

    def factors(w: Work) -> Tensor | None:
        if w.x_sf is None:
            return w.weights
        token, slot = (torch.arange(extent, device=w.x.device) for extent in w.index.shape)
        scale = w.x_sf[row(token[:, None], slot, w) % len(w.x_sf)].expand(w.index.shape)
        return scale if w.weights is None else w.weights * scale

    return factors


def _rows_rolled(w: Work, result: Tensor) -> None:
    w.out.copy_(result.view(torch.uint8).roll(1, 0).view(result.dtype))


_wrong("map_slot_0", "MAP", "Every slot reads the row of slot 0.", "slot-0-everywhere", locate=_slot_0)
_wrong("map_weight_slot", "MAP", "A slot gets the weight of the slot before it.", "weights-of-previous-slot",
       begin=_weights(1, 1))
_wrong("map_weight_token", "MAP", "A token gets the weights of the token before it.", "weights-of-previous-token",
       begin=_weights(1, 0))
_wrong("map_weight_compacted", "MAP", "Weights are counted over valid slots only.", "weights-compacted",
       begin=_compacted)
_wrong("map_scale_token", "MAP", "x_sf is indexed by token, not by row.", "x_sf-of-token",
       factors=_scale_of(lambda token, slot, w: token))
_wrong("map_scale_flat", "MAP", "x_sf is indexed by token and slot, not by row.", "x_sf-of-flat-slot",
       factors=_scale_of(lambda token, slot, w: token * len(slot) + slot))
_wrong("map_scale_slot_0", "MAP", "Every slot gets the x_sf of slot 0's row.", "x_sf-of-slot-0",
       factors=_scale_of(lambda token, slot, w: w.positions[:, :1].clamp(min=0).long()))
_wrong("map_rows_rolled", "MAP", "Each result goes to the row of the next token.", "rows-shifted", store=_rows_rolled)
_wrong("overflow_position", "OVERFLOW", "Positions are held in 16 bits.", "position-16-bit", locate=_low_16_bits)

_wrong("config_tokens", "CONFIG", "Tokens from 4096 on have no block and stay 0.", "zeroed", locate=_first_tokens)


# ---- LAYOUT ------------------------------------------------------------------------------------------------------


def _contiguous(w: Work) -> None:
    """Read x's storage as if it were contiguous."""
    if not w.x.is_contiguous():
        start = w.x.storage_offset()
        flat = torch.empty(0, dtype=w.x.dtype, device=w.x.device).set_(w.x.untyped_storage())[start:]
        w.x = flat[: w.x.numel()].view(w.x.shape)


def _halves_swapped(w: Work, result: Tensor) -> None:
    tokens, hidden = result.shape
    parts = result.view(torch.uint8).view(tokens, hidden // 32, 2, 16 * result.element_size())
    w.out.copy_(parts.flip(2).reshape(tokens, hidden * result.element_size()).view(result.dtype))


def _columns_rolled(w: Work) -> Tensor:
    return steps.gather(w).roll(1, 2)


_OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


def _other_format_in(w: Work) -> Tensor:
    if w.x.dtype not in _OTHER:
        return steps.gather(w)
    tokens, topk = w.index.shape
    return w.x.index_select(0, w.index.reshape(-1)).view(_OTHER[w.x.dtype]).float().view(tokens, topk, w.x.shape[1])


def _other_format_out(w: Work, total: Tensor) -> Tensor:
    if w.out.dtype not in _OTHER:
        return steps.narrow(w, total)
    return total.to(_OTHER[w.out.dtype]).view(w.out.dtype)


_wrong("layout_contiguous", "LAYOUT", "x is read as if it were contiguous.", "x-contiguous", begin=_contiguous)
_wrong("layout_halves", "LAYOUT", "The halves of every 32 columns change places.", "columns-permuted",
       store=_halves_swapped)
_wrong("layout_column", "LAYOUT", "Each column is read one place off.", "columns-shifted", gather=_columns_rolled)
_wrong("layout_bits_in", "LAYOUT", "x's bf16 is read as fp16, and fp16 as bf16.", "x-bits", gather=_other_format_in)
_wrong("layout_bits_out", "LAYOUT", "A bf16 output gets fp16 bits, and the other way round.", "out-bits",
       narrow=_other_format_out)
