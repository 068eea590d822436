"""Mutants of microscaled operands: e2m1 and e4m3 elements, e8m0 scales and their storage, blocks made between the
stages. Each is an edit of the PyTorch kernel's `microscaled` module."""

from __future__ import annotations

from kernels.mutants.edit import Edit
from kernels.mutants.gemm_2stage.family import wrong as edited

_ALL = ("fp4", "a8w4", "a16w4")  # with microscaled weights
_MX = _ALL[:2]  # rows as well
_WEIGHTS = "_scaled(fp4_numbers(packed), plain_scales(scale[expert * rows : (expert + 1) * rows]))"
_PLAIN = "plain_scales(scale[expert * rows : (expert + 1) * rows])"
_ROW_SCALES = "plain_scales(scale)[row])"
_ROW_BLOCKS = "plain_scales(scale)[row][:, : elements.shape[1] // _BLOCK]"
_ELEMENTS = "elements = fp4_numbers(chosen)"
_TABLE = "torch.tensor([*_HALVES, *(-value for value in _HALVES)], device=stored.device)"
_POWERS = "found = torch.exp2(codes.double() - _BIAS).float()"
_NAN = "return found.masked_fill(codes == _NAN, torch.nan)"
_FACTORS = "factors = powers(codes[:, :blocks])"
_APPLIED = "return (elements.view(len(elements), blocks, _BLOCK) * factors[..., None]).view(elements.shape)"
_PRODUCT = "return (left.double() @ right.double().T).float()"
_RULE = "mantissa, exponent = torch.frexp(top)"
_STEPS = "ratio = torch.round(size / step) * step * ratio.sign()"
_CLAMPED = "ratio = (blocks.double() / factor).clamp(-largest, largest)"
_TOP = "blocks.abs().amax(dim=2, keepdim=True)"
_FOUND = "found = (ratio * factor).float().masked_fill(~top.isfinite(), torch.nan)"


def _wrong(name: str, fault: str, what: str, diagnosis: str, on: str, *edits: Edit,
           dtypes: tuple[str, ...] = _MX) -> None:
    edited(f"mx_{name}", fault, what, diagnosis, on, "microscaled", *edits, dtypes=dtypes)


def _weight_scales(codes: str) -> Edit:
    """Other codes uint8 [N, K/32]; ``{}`` stands for the right ones."""
    blocks = f"{_PLAIN}[:, : half // 16]"
    return _WEIGHTS, _WEIGHTS.replace(_PLAIN, codes.format(blocks))


def _row_scales(codes: str) -> Edit:
    return _ROW_SCALES, f"{codes.format(_ROW_BLOCKS)})"


# ---- LAYOUT, CASTROUND: elements ----------------------------------------------------------------------------------


# Swapped in rows or in weights: the pairs that are multiplied are the same.
_wrong("nibbles", "LAYOUT", "Low and high nibbles of weights change places.", "nibbles-swapped nibbles-swapped-rows",
       "12c", ("fp4_numbers(packed)", "fp4_numbers(packed << 4 | packed >> 4)"), dtypes=_ALL)
_wrong("nibbles_rows", "LAYOUT", "Low and high nibbles of rows change places.", "nibbles-swapped-rows nibbles-swapped",
       "12c", (_ELEMENTS, "elements = fp4_numbers(chosen << 4 | chosen >> 4)"), dtypes=("fp4",))
_wrong("not_preshuffled", "LAYOUT", "Preshuffled packed weights are read row by row.", "preshuffle-ignored", "12c",
       (".transpose(1, 2).reshape(rows, half)", ".reshape(rows, half)"), dtypes=_ALL)
_wrong("unsigned", "LAYOUT", "The sign of an e2m1 element is not read.", "e2m1-unsigned", "12c",
       (_TABLE, "torch.tensor([*_HALVES, *_HALVES], device=stored.device)"), dtypes=_ALL)
_wrong("integers", "LAYOUT", "Nibbles are taken for 4-bit integers.", "e2m1-integers", "12c",
       (_TABLE, "torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float32, device=stored.device)"), dtypes=_ALL)
_wrong("subnormal", "CASTROUND", "The e2m1 number 0.5, which is subnormal, counts as 0.", "e2m1-subnormal", "12c",
       ("_HALVES = (0.0, 0.5,", "_HALVES = (0.0, 0.0,"), dtypes=_ALL)
_wrong("minus_zero", "NONFINITE", "The nibble 8, which is -0, is read as NaN.", "e2m1-minus-zero", "12c",
       (_TABLE, f"{_TABLE}\n    table[8] = torch.nan"), dtypes=_ALL)
_wrong("flushed_rows", "CASTROUND", "e4m3 rows below the normal range count as 0.", "fp8-subnormal", "12c",
       ("else chosen.float()", "else chosen.float().masked_fill(chosen.float().abs() < 2.0**-6, 0.0)"),
       dtypes=("a8w4",))
_wrong("fnuz_rows", "SCALE", "e4m3 rows are read as FNUZ.", "fp8-encoding-rows e8m0-bias", "12c",
       ("else chosen.float()", "else chosen.view(torch.float8_e4m3fnuz).float()"), dtypes=("a8w4",))


# ---- SCALE: e8m0 bytes --------------------------------------------------------------------------------------------


_BIAS_OF = "e8m0-bias constant-factor"  # without an activation they are the same
_wrong("bias", "SCALE", "e8m0 scales of rows and weights have a bias of 128.", _BIAS_OF, "12c",
       (_POWERS, _POWERS.replace("_BIAS", "128")))
_wrong("bias_weights", "SCALE", "e8m0 scales of weights have a bias of 126.", _BIAS_OF, "12",
       ("return _scaled(fp4_numbers(packed),", "return 2 * _scaled(fp4_numbers(packed),"), dtypes=_ALL)
_wrong("bias_rows", "SCALE", "e8m0 scales of rows have a bias of 128.", f"{_BIAS_OF} fp8-encoding-rows", "12",
       ("= _scaled(elements,", "= 0.5 * _scaled(elements,"))
_wrong("scale_0", "SCALE", "An e8m0 scale of 0 is 0 and not 2^-127.", "e8m0-shifted", "12c",
       (_NAN, f"{_NAN}.masked_fill(codes == 0, 0.0)"))
_wrong("scale_shifted", "SCALE", "An e8m0 scale is made by a shift: 0 is 0, and 255 infinity.",
       "e8m0-shifted e8m0-255", "12c",  # on a case that has either of the two bytes
       (_POWERS, "return (codes.int() << 23).view(torch.float32)"))
_wrong("scale_255_zero", "NONFINITE", "A block with the e8m0 scale 255 counts as 0.", "e8m0-255", "12c",
       (_NAN, "return found.masked_fill(codes == _NAN, 0.0)"))
_wrong("scale_255_one", "NONFINITE", "An e8m0 scale of 255 counts as 1.", "e8m0-255", "12c",
       (_NAN, "return found.masked_fill(codes == _NAN, 1.0)"))
_wrong("scale_255_infinite", "NONFINITE", "An e8m0 scale of 255 is infinity.", "e8m0-255", "12c",
       (_NAN, "return found.masked_fill(codes == _NAN, torch.inf)"), dtypes=_ALL)
_wrong("no_scales", "SCALE", "The scales of the weights' blocks are left out.", "group-scale-missing", "12c",
       _weight_scales("{} * 0 + 127"), dtypes=_ALL)
_wrong("no_row_scales", "SCALE", "The scales of the rows' blocks are left out.", "row-blocks-missing", "12c",
       _row_scales("torch.full_like({}, 127)"))
_wrong("scale_next", "SCALE", "A block of weights gets the scale of the next one.", "group-scale-of-next", "12c",
       _weight_scales("{}.roll(-1, 1)"), dtypes=_ALL)
_wrong("scale_next_row", "SCALE", "A block of a row gets the scale of the next one.", "row-blocks-of-next", "12c",
       _row_scales("{}.roll(-1, 1)"))
_wrong("scale_first", "SCALE", "The first block's scale counts for a whole row of weights.", "group-scale-of-first",
       "12c", _weight_scales("{}[:, :1].expand(-1, half // 16)"), dtypes=_ALL)
_wrong("scale_first_row", "SCALE", "The first block's scale counts for the whole row.", "row-blocks-of-first", "12c",
       _row_scales("{}[:, :1].expand(-1, elements.shape[1] // _BLOCK)"))
_wrong("block_16", "SCALE", "Blocks of 16 elements share a scale.", "block-of-16", "12c",
       (_APPLIED, "return elements * factors.repeat_interleave(16, 1).repeat(1, 2)"), dtypes=_ALL)
_wrong("block_64", "SCALE", "Blocks of 64 elements share a scale.", "block-of-64", "12c",
       (_APPLIED, "return elements * factors.repeat_interleave(64, 1)[:, : elements.shape[1]]"), dtypes=_ALL)


# ---- LAYOUT, MAP: where scales stand ------------------------------------------------------------------------------


_wrong("scales_raw", "LAYOUT", "Shuffled scales of weights are read row by row.", "scales-unshuffled", "12c",
       (_PLAIN, "scale[expert * rows : (expert + 1) * rows]"), dtypes=_ALL)
_wrong("row_scales_raw", "LAYOUT", "Shuffled scales of rows are read row by row.", "row-scales-unshuffled", "12c",
       (_ROW_SCALES, "scale[row])"))
_wrong("scales_dense", "LAYOUT", "Rows of scales are not taken to be padded to 8 columns.", "scales-dense", "12c",
       (_PLAIN, f"{_PLAIN}.flatten()[: rows * half // 16].view(rows, -1)"), dtypes=_ALL)
_wrong("row_scales_unsorted", "MAP", "Scales of rows are read at the row, not at its place in the sorted list.",
       "row-scales-unsorted", "12c",
       (_ROW_SCALES, "plain_scales(scale)[token if stored.dim() == 2 else token * topk + slot])"))
_wrong("scales_expert_0", "MAP", "Weights have the scales of expert 0.", "scales-of-expert-0", "12c",
       ("scale[expert * rows : (expert + 1) * rows]", "scale[:rows]"), dtypes=_ALL)
_wrong("scales_next_expert", "MAP", "Weights have the scales of the next expert.", "scales-of-next-expert", "12c",
       ("scale[expert * rows : (expert + 1) * rows]", "scale.roll(-rows, 0)[expert * rows : (expert + 1) * rows]"),
       dtypes=_ALL)


# ---- TAIL, PRECISION ----------------------------------------------------------------------------------------------


_wrong("last_block", "TAIL", "The last block of 32 elements is left out of the sum.", "k-tail-dropped", "12c",
       (_PRODUCT, _PRODUCT.replace("left", "left[:, :-32]").replace("right", "right[:, :-32]")), dtypes=_ALL)
_wrong("k_128", "TAIL", "The sum ends with the last whole 128 elements.", "k-tail-dropped", "12c",
       (_PRODUCT, "size = max(128, left.shape[1] // 128 * 128)\n    " + _PRODUCT.replace("left", "left[:, :size]")
        .replace("right", "right[:, :size]")), dtypes=_ALL)
_wrong("sum_bf16", "PRECISION", "Sums of microscaled products are rounded to bf16.", "acc-bf16", "12",
       (_PRODUCT, _PRODUCT.replace(".float()", ".bfloat16().float()")), dtypes=_ALL)


# ---- between the stages -------------------------------------------------------------------------------------------


for _rule in ("floor", "even", "up"):
    _wrong(f"rule_{_rule}", "SCALE", f"Scales between the stages follow the rule {_rule} whatever is asked.",
           "requantise-scale-rule", "c", (_RULE, f'rule = "{_rule}"\n    {_RULE}'))
_wrong("between_row", "SCALE", "One scale is taken for a whole row between the stages.", "requantise-per-row", "c",
       (_TOP, "blocks.abs().amax(dim=(1, 2), keepdim=True).expand(-1, blocks.shape[1], 1)"))
_wrong("between_cut", "CASTROUND", "fp4 elements between the stages are cut.", "requantise-cut", "c",
       (_STEPS, _STEPS.replace("torch.round", "torch.floor")), dtypes=("fp4",))
_wrong("between_half_up", "CASTROUND", "fp4 ties between the stages are rounded up.", "requantise-ties", "c",
       (_STEPS, "ratio = torch.floor(size / step + 0.5) * step * ratio.sign()"), dtypes=("fp4",))
_wrong("between_wraps", "OVERFLOW", "fp4 elements between the stages wrap to 0 and do not saturate.",
       "requantise-wraps", "c", (_STEPS, f"{_STEPS}.masked_fill(blocks.double().abs() >= 7 * factor, 0.0)"),
       dtypes=("fp4",))
_wrong("between_zero", "NONFINITE", "A block of zeros between the stages is divided by 0.", "requantise-zero-blocks",
       "c", (_FOUND, f"{_FOUND}.masked_fill(top == 0, torch.nan)"))
_wrong("between_infinite", "NONFINITE", "Infinities between the stages saturate by their block's finite elements.",
       "requantise-nonfinite", "c", (_TOP, _TOP.replace(".abs()", ".abs().masked_fill(~blocks.isfinite(), 0.0)")))
_wrong("up_at_6", "SCALE", "The rule up takes the next scale where the largest is the format's largest.",
       "requantise-up-early", "c", ("(mantissa * 2 > largest / 2.0**range_exponent)",
                                    "(mantissa * 2 >= largest / 2.0**range_exponent)"))
