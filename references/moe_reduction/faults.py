"""The faulty semantics that a failure of moe_reduction is compared with, the most specific first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.formats import cast
from conformance.operator import Call, Fault
from references.moe_reduction.contract import valid_slots

_LARGEST = 3.4028234663852886e38
_OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


@dataclass(frozen=True)
class Reading:
    """How a kernel reads a call, and in which precision it adds. Right as ``_read`` makes it; a fault changes it.

    columns int64 [C]: those asked for. part [T, k, H] and terms, what each slot adds, [T, k, C] in part's dtype.
    valid bool [T, k]: which slots count. product: masked slots are multiplied by 0. widen: terms to fp32. accumulator:
    format of the sum; order: of the slots. after: change of the sum fp32 [T, C].
    """

    call: Call
    columns: Tensor
    part: Tensor
    terms: Tensor
    valid: Tensor
    product: bool = False
    widen: Callable[[Tensor], Tensor] = Tensor.float
    accumulator: torch.dtype = torch.float32
    descending: bool = False
    after: Callable[[Tensor], Tensor] = lambda total: total

    @property
    def masked(self) -> bool:
        """Whether the call says which slots are valid."""
        return any(self.call.arguments[name] is not None for name in ("valid_mask", "expert_mask"))

    @property
    def topk(self) -> int:
        return self.valid.shape[1]


Change = Callable[[Reading], "Reading | None"]


def _read(call: Call, columns: Tensor) -> Reading:
    part, valid = call.arguments["part"], valid_slots(call.arguments)
    if valid is None:
        valid = torch.ones(part.shape[:2], dtype=torch.bool, device=part.device)
    return Reading(call, columns, part, part[..., columns], valid)


def _compute(of: Reading) -> Tensor:
    """[T, C] in the output's dtype, one fp32 addition for each slot in its order."""
    terms = of.widen(of.terms)
    terms = terms * of.valid[..., None] if of.product else terms.masked_fill(~of.valid[..., None], 0.0)
    total = torch.zeros_like(terms[:, 0])
    slots = range(terms.shape[1])
    for slot in reversed(slots) if of.descending else slots:
        after = total + terms[:, slot]
        total = after if of.accumulator == torch.float32 else after.to(of.accumulator).float()
    return cast(of.after(total), of.call.output.dtype)


def _fault(key: str, sentence: str, change: Change) -> Fault:
    def predict(call: Call, columns: Tensor) -> Tensor | None:
        if not len(call.arguments["part"]):
            return None
        reading = change(_read(call, columns))
        return None if reading is None else _compute(reading)

    return Fault(key, sentence, predict)


# ---- Which slots count --------------------------------------------------------------------------------------------


def _counts(mask: Callable[[Reading], Tensor]) -> Change:
    """Slots count where the mask [T, k] says so."""

    def change(r: Reading) -> Reading | None:
        valid = mask(r)
        return None if torch.equal(valid, r.valid) else replace(r, valid=valid)

    return change


def _if_masked(change: Change) -> Change:
    return lambda r: change(r) if r.masked else None


def _slot(r: Reading) -> Tensor:
    return torch.arange(r.topk, device=r.valid.device)


def _values(r: Reading, test: Callable[[Tensor], Tensor]) -> Tensor:
    """Slots count where their value in the mask passes ``test``; uint8 or int32, as the mask is."""
    given = r.call.arguments
    if given["valid_mask"] is not None:
        return test(given["valid_mask"])
    if given["expert_mask"] is None:
        return r.valid
    ids, known = given["topk_ids"], given["expert_mask"]
    inside = (ids >= 0) & (ids < len(known))
    return inside & test(known)[torch.where(inside, ids, 0).long()]


def _outside(move: Callable[[Tensor, int], Tensor]) -> Change:
    """Ids outside of the mask are moved inside, int64 [T, k]."""

    def mask(r: Reading) -> Tensor:
        given = r.call.arguments
        if given["expert_mask"] is None:
            return r.valid
        known = given["expert_mask"]
        found: Tensor = known[move(given["topk_ids"].long(), len(known))] != 0
        return found

    return _counts(mask)


def _first_n(r: Reading) -> Tensor:
    return _slot(r) < r.valid.sum(dim=1, keepdim=True)


def _all_but_last_valid(r: Reading) -> Tensor:
    count = r.valid.sum(dim=1, keepdim=True)
    return r.valid & ((r.valid.cumsum(dim=1) < count) | (count == 1))


def _signed(value: Tensor) -> Tensor:
    return value.view(torch.int8) > 0 if value.dtype == torch.uint8 else value > 0


# ---- What is read -------------------------------------------------------------------------------------------------


def _terms(change: Callable[[Reading], Tensor | None]) -> Change:
    """Slots add something else, [T, k, C] in part's dtype or another."""

    def changed(r: Reading) -> Reading | None:
        terms = change(r)
        return None if terms is None else replace(r, terms=terms)

    return changed


def _contiguous(r: Reading) -> Tensor | None:
    if r.part.is_contiguous():
        return None
    tokens, topk, hidden = r.part.shape
    storage = torch.empty(0, dtype=r.part.dtype, device=r.part.device).set_(r.part.untyped_storage())
    flat = storage[r.part.storage_offset() :]
    if len(flat) < r.part.numel():
        return None
    return flat[: tokens * topk * hidden].view(tokens, topk, hidden)[..., r.columns]


def _slot_major(r: Reading) -> Tensor | None:
    tokens, topk, hidden = r.part.shape
    return None if topk == 1 or tokens == 1 else r.part.reshape(topk, tokens, hidden).transpose(0, 1)[..., r.columns]


def _other_bits(r: Reading) -> Tensor | None:
    other = _OTHER.get(r.part.dtype)
    return None if other is None else r.terms.contiguous().view(other)


def _of_group(r: Reading) -> Tensor | None:
    return r.terms[:, _slot(r) // 4 * 4] if r.topk > 1 else None


def _stale(r: Reading) -> Reading | None:
    """A masked slot adds the row that was last loaded for the slots 4, 8, ... before it."""
    if r.topk <= 4 or bool(r.valid.all()):
        return None
    terms, valid = r.terms.clone(), r.valid.clone()
    for slot in range(4, r.topk):
        take = ~r.valid[:, slot] & valid[:, slot - 4]
        terms[take, slot] = terms[take, slot - 4]
        valid[:, slot] |= take
    return replace(r, terms=terms, valid=valid)


def _divided(count: Callable[[Reading], Tensor | int]) -> Change:
    return lambda r: replace(r, after=lambda total: total / count(r))


def _nan_if_empty(r: Reading) -> Reading | None:
    empty = ~r.valid.any(dim=1, keepdim=True)
    return replace(r, after=lambda total: total.masked_fill(empty, torch.nan)) if bool(empty.any()) else None


FAULTS = (
    _fault("mask-ignored", "masked slots count", _counts(lambda r: torch.ones_like(r.valid))),
    _fault("mask-inverted", "valid slots are masked, and masked ones count", _if_masked(_counts(lambda r: ~r.valid))),
    _fault("mask-by-product", "slots are masked by a factor of 0, which keeps NaN and infinity",
           lambda r: None if bool(r.valid.all()) else replace(r, product=True)),
    _fault("mask-only-one", "only 1 in a mask counts as true", _counts(lambda r: _values(r, lambda v: v == 1))),
    _fault("mask-only-positive", "negative values of a mask count as false", _counts(lambda r: _values(r, _signed))),
    _fault("mask-low-byte", "of a mask's values only the low byte counts",
           _counts(lambda r: _values(r, lambda v: v.int() % 256 != 0))),
    _fault("ids-clamped", "ids outside of expert_mask are clamped to its ends",
           _outside(lambda ids, count: ids.clamp(0, count - 1))),
    _fault("ids-wrapped", "ids outside of expert_mask wrap", _outside(lambda ids, count: ids % count)),
    _fault("experts-from-1024", "experts from 1024 on count as masked", _counts(
        lambda r: r.valid if (ids := r.call.arguments["topk_ids"]) is None else r.valid & (ids < 1024))),
    _fault("stale-slot", "a masked slot adds the row of the slot 4 before it", _stale),
    _fault("nan-for-empty", "tokens with only masked slots are NaN", _nan_if_empty),
    _fault("stops-at-masked", "slots after the first masked one are left out",
           _counts(lambda r: r.valid.long().cumprod(dim=1).bool())),
    _fault("first-n-slots", "the first n slots are added, n being the number of valid ones", _counts(_first_n)),
    _fault("mask-of-slot-0", "every slot is masked as slot 0 is",
           _counts(lambda r: r.valid[:, :1].expand(r.valid.shape))),
    _fault("mask-of-previous-token", "tokens are masked as the one before them is",
           _counts(lambda r: r.valid.roll(1, 0))),
    _fault("mask-of-previous-slot", "slots are masked as the one before them is",
           _counts(lambda r: r.valid.roll(1, 1))),
    _fault("last-slot-dropped", "the last slot is left out",
           _counts(lambda r: r.valid & (_slot(r) < max(1, r.topk - 1)))),
    _fault("last-valid-dropped", "each token's last valid slot is left out", _counts(_all_but_last_valid)),
    _fault("slots-beyond-whole-4", "slots beyond the last whole 4 are left out",
           _counts(lambda r: r.valid & (_slot(r) < r.topk // 4 * 4))),
    _fault("slots-beyond-8", "slots beyond the eighth are left out", _counts(lambda r: r.valid & (_slot(r) < 8))),
    _fault("first-slot-dropped", "the first slot is left out", _counts(lambda r: r.valid & (_slot(r) > 0))),
    _fault("slot-0-everywhere", "every slot adds the row of slot 0",
           _terms(lambda r: r.terms[:, :1].expand(r.terms.shape) if r.topk > 1 else None)),
    _fault("slot-of-group", "every slot of a group of 4 adds the first one's row", _terms(_of_group)),
    _fault("rows-transposed", "rows are taken for slot-major", _terms(_slot_major)),
    _fault("mean", "the sum is divided by the number of slots", _divided(lambda r: r.topk)),
    _fault("valid-mean", "the sum is divided by the number of valid slots",
           _divided(lambda r: r.valid.sum(dim=1, keepdim=True))),
    _fault("part-contiguous", "part is read as if it were contiguous", _terms(_contiguous)),
    _fault("part-bits", "part's 16 bits are read in the other 16-bit format", _terms(_other_bits)),
    _fault("nan-as-zero", "NaN in part counts as 0", lambda r: replace(r, widen=lambda rows: rows.float().nan_to_num(
        nan=0.0, posinf=torch.inf, neginf=-torch.inf))),
    _fault("infinity-clamped", "infinity in part becomes the largest finite number",
           lambda r: replace(r, widen=lambda rows: rows.float().clamp(-_LARGEST, _LARGEST))),
    _fault("descending", "slots are added in descending order", lambda r: replace(r, descending=True)),
    _fault("acc-narrow", "the accumulator has part's format", lambda r: replace(r, accumulator=r.part.dtype)),
    _fault("acc-bf16", "the accumulator is bf16", lambda r: replace(r, accumulator=torch.bfloat16)),
)
