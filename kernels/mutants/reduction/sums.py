"""Mutants that add other slots, read other places, round otherwise, or treat NaN and infinity as numbers."""

from __future__ import annotations

from kernels.mutants.reduction.family import wrong

_VALID = "masked = valid_mask[chunk] == 0"
_KNOWN = "(expert_mask[nearest.long()] == 0)"
_OUTSIDE = f"return (nearest != ids) | {_KNOWN}"
_CLAMPED = "nearest = ids.clamp(0, len(expert_mask) - 1)"
_CALL = "_reduce(part[chunk], masked, out[chunk])"
_SLOTS = "for slot in range(part.shape[1]):"
_ROWS = "rows = part[:, slot].float()"
_ADD = "total += rows if masked is None else rows.masked_fill(masked[:, slot, None], 0.0)"
_MASK = "masked[:, slot, None]"
_CAST = "out.copy_(total)"


def _mask(change: str) -> tuple[str, str]:
    """The mask, where there is one, is made another before anything is added."""
    return _CALL, f"_reduce(part[chunk], None if masked is None else {change}, out[chunk])"


# ---- SENTINEL, ROUTING: which slots count -------------------------------------------------------------------------


wrong("mask_ignored", "SENTINEL", "Masked slots count.", "mask-ignored", _mask("None"))
wrong("mask_inverted", "SENTINEL", "Valid slots are masked, masked ones count.", "mask-inverted", _mask("~masked"))
wrong("mask_one", "SENTINEL", "Only 1 in a mask counts as true.", "mask-only-one", (_VALID, _VALID.replace("== 0",
      "!= 1")), (_KNOWN, _KNOWN.replace("== 0", "!= 1")))
wrong("mask_positive", "SENTINEL", "Negative values of a mask count as false.", "mask-only-positive",
      (_VALID, "masked = (valid_mask[chunk] == 0) | (valid_mask[chunk] > 127)"), (_KNOWN, _KNOWN.replace("==", "<=")))
wrong("mask_low_byte", "SENTINEL", "Of expert_mask only the low byte counts.", "mask-low-byte",
      (_KNOWN, _KNOWN.replace("== 0", "% 256 == 0")))
wrong("id_clamped", "SENTINEL", "Ids outside of the mask are clamped to its ends.", "ids-clamped",
      (_OUTSIDE, f"return {_KNOWN}"))
wrong("id_wrapped", "SENTINEL", "Ids outside of the mask wrap.", "ids-wrapped",
      (_CLAMPED, "nearest = ids = ids % len(expert_mask)"))
wrong("mask_1024", "CONFIG", "Masks are held in a table of 1024 experts; others are not local.", "experts-from-1024",
      (_OUTSIDE, f"return (nearest != ids) | (nearest >= 1024) | {_KNOWN}"))
wrong("mask_product", "NONFINITE", "Slots are masked by a factor of 0, which keeps NaN.", "mask-by-product",
      (_ADD, f"total += rows if masked is None else rows * ~{_MASK}"))
wrong("stops", "SENTINEL", "The loop ends at the first masked slot.", "stops-at-masked",
      _mask("masked.cumsum(dim=1) > 0"))
wrong("first_n", "ROUTING", "The first n slots count, n being the number of valid ones.", "first-n-slots",
      _mask("masked.sort(dim=1).values"))
wrong("last_slot", "TAIL", "The last slot is left out.", "last-slot-dropped last-valid-dropped",
      (_SLOTS, "for slot in range(max(1, part.shape[1] - 1)):"))
wrong("odd_slot", "TAIL", "Slots are taken two at a time; an odd one is left out.",
      "last-slot-dropped last-valid-dropped", (_SLOTS, "for slot in range(max(1, part.shape[1] // 2 * 2)):"))
wrong("first_slot", "TAIL", "The first slot is left out.", "first-slot-dropped",
      (_SLOTS, "for slot in range(part.shape[1] > 1, part.shape[1]):"))
wrong("last_valid", "ROUTING", "The last valid slot of each token is left out.", "last-valid-dropped",
      _mask("masked | ((~masked).cumsum(1) == (~masked).sum(1, keepdim=True).clamp(min=2))"))
wrong("slots_8", "CONFIG", "No more than 8 slots are added.",
      "slots-beyond-8 slots-beyond-whole-4 last-slot-dropped", (_SLOTS, _SLOTS.replace(
      "range(part.shape[1])", "range(min(8, part.shape[1]))")))


# ---- MAP, LAYOUT: which place is read -----------------------------------------------------------------------------


wrong("slot_0", "MAP", "Every slot reads the row of slot 0.", "slot-0-everywhere", (_ROWS, "rows = part[:, 0].float()"))
wrong("mask_slot_0", "MAP", "Every slot is masked as slot 0 is.", "mask-of-slot-0",
      _mask("masked[:, :1].expand(masked.shape)"))
wrong("mask_previous_token", "MAP", "A token is masked as the one before it is.", "mask-of-previous-token",
      _mask("masked.roll(1, 0)"))
wrong("mask_previous_slot", "MAP", "A slot is masked as the one before it is.", "mask-of-previous-slot",
      _mask("masked.roll(1, 1)"))
wrong("slot_major", "MAP", "Rows are taken for slot-major: s T + t.", "rows-transposed",
      (_ROWS, "rows = part.reshape(part.shape[1], part.shape[0], -1)[slot].float()"))
wrong("contiguous", "LAYOUT", "Strides of part are ignored.", "part-contiguous",
      (_ROWS, "rows = part.as_strided(part.shape, (part.shape[1] * part.shape[2], part.shape[2], 1))[:, slot].float()"))
wrong("other_bits", "LAYOUT", "16 bits are read in the other 16-bit format.", "part-bits",
      (_ROWS, f"{_ROWS} if part.element_size() == 4 else part[:, slot].contiguous().view(torch.float16 if "
       "part.dtype == torch.bfloat16 else torch.bfloat16).float()"))


# ---- SEMANTIC, NONFINITE, EMPTY -----------------------------------------------------------------------------------


wrong("mean", "SEMANTIC", "The sum is divided by the number of slots.", "mean",
      (_CAST, "out.copy_(total / part.shape[1])"))
wrong("valid_mean", "EMPTY", "The sum is divided by the number of valid slots; none gives NaN.", "valid-mean",
      (_CAST, "count = torch.tensor(part.shape[1]) if masked is None else (~masked).sum(dim=1, keepdim=True)\n"
       "    out.copy_(total / count)"))
wrong("empty_nan", "EMPTY", "A token without a valid slot is NaN.", "nan-for-empty",
      (_CAST, "total = total if masked is None else total.masked_fill(masked.all(dim=1, keepdim=True), torch.nan)\n"
       "    out.copy_(total)"))
wrong("no_tokens", "EMPTY", "No tokens: division by zero.", "exception",
      ("step = max(1,", "part.shape[2] // tokens\n    step = max(1,"))
wrong("nan_zero", "NONFINITE", "NaN counts as 0.", "nan-as-zero",
      (_ROWS, f"{_ROWS}.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)"))
wrong("infinity_clamped", "NONFINITE", "Infinity becomes the largest finite number.", "infinity-clamped",
      (_ROWS, f"{_ROWS}.clamp(-3.4028234663852886e38, 3.4028234663852886e38)"), dtypes=("fp32",))
wrong("saturates", "OVERFLOW", "What overflows fp16 saturates.", "overflow-saturates",
      (_CAST, "out.copy_(total.clamp(-65504, 65504) if out.dtype == torch.float16 else total)"), dtypes=("fp16",))
wrong("flushes", "CASTROUND", "Results below the normal range become 0.", "cast-flushes",
      (_CAST, "out.copy_(torch.where(total.abs() < torch.finfo(out.dtype).tiny, total * 0, total))"), dtypes=("fp16",))


# ---- PRECISION, CASTROUND -----------------------------------------------------------------------------------------


_CUT = "(total.view(torch.int32){0} & -{1}).view(torch.float32)"
wrong("narrow_sum", "PRECISION", "The accumulator has the format of part.", "acc-narrow",
      ("dtype=torch.float32, device=out.device)", "dtype=part.dtype, device=out.device)"),
      (_ROWS, "rows = part[:, slot]"),
      dtypes=("fp16", "bf16"))
wrong("bf16_sum", "PRECISION", "The accumulator is bf16.", "acc-bf16 acc-narrow",
      (_ADD, f"{_ADD}\n        total = total.bfloat16().float()"), dtypes=("fp32",))
wrong("descending", "PRECISION", "Promised bit-exact, slots are added in descending order.", "descending",
      (_SLOTS, "for slot in reversed(range(part.shape[1])):"), dtypes=("fp32",))
wrong("truncates", "CASTROUND", "The cast to bf16 truncates.", "cast-truncates",
      (_CAST, f"out.copy_({_CUT.format('', 65536)} if out.dtype == torch.bfloat16 else total)"))
wrong("ties_away", "CASTROUND", "The cast to bf16 rounds ties away from zero.", "cast-ties-away",
      (_CAST, f"out.copy_({_CUT.format(' + 32768', 65536)} if out.dtype == torch.bfloat16 else total)"))
wrong("out_bits", "CASTROUND", "The output holds the bits of the other 16-bit format.", "out-bits",
      (_CAST, "other = torch.float16 if out.dtype == torch.bfloat16 else torch.bfloat16\n"
       "    out.copy_(total if out.element_size() == 4 else total.to(other).view(out.dtype))"), dtypes=("fp16", "bf16"))
