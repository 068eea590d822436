"""Mutants of numbers: scales, storage layouts, precision, casts and what passes between the stages."""

from __future__ import annotations

from kernels.mutants.gemm_2stage.family import BEFORE_SUMS, BF16_BY_4, FEW, PACKED, dequantised, wrong

_CHANNELS = "acc = acc * scale_w[expert]"
_ROWS = "return acc if scale_rows is None else acc * scale_rows[row][:, None]"
_GROUPS = "scale_w[expert] if grouped and scale_w is not None else None)"
_SUM = "return left.float() @ right.T"
_UNPACKED = "return tiles.reshape(rows, columns).float()"
_NIBBLES = "torch.cat([groups & 15, groups >> 4], dim=1)"
_Y = '(y * factor if doweight == "after" else y).to(out.dtype)'
_Z = "out[row] = z.to(out.dtype)"
_SCALED = ("fp8", "int8smooth")
_FP8 = "fp8-encoding fp8-encoding-rows"  # both are a factor of two
_OTHER = "{torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e4m3fnuz: torch.float8_e4m3fn}"


# ---- SCALE --------------------------------------------------------------------------------------------------------


wrong("no_channel_scale", "SCALE", "The scales of output channels are left out.", "channel-scale-missing", "12c",
      "per_expert", (_CHANNELS, "pass"), dtypes=_SCALED)
wrong("channel_scale_twice", "SCALE", "The scales of output channels are applied twice.", "channel-scale-twice", "12",
      "per_expert", (_CHANNELS, f"{_CHANNELS} ** 2"), dtypes=_SCALED)
wrong("channel_scale_one", "SCALE", "Channel 0's scale counts for all channels of an expert.",
      "channel-scale-of-channel-0", "12", "per_expert", (_CHANNELS, f"{_CHANNELS}[:1]"), dtypes=_SCALED)
wrong("channel_scale_expert", "SCALE", "Channels are scaled by the next expert's scales.",
      "channel-scale-of-next-expert", "12", "per_expert",
      (_CHANNELS, "acc = acc * scale_w[(expert + 1) % len(scale_w)]"), dtypes=_SCALED)
wrong("channel_scale_exponent", "SCALE", "Scales of channels are cut to powers of two, as e8m0 holds them.",
      "channel-scale-power-of-two", "12", "per_expert",
      (_CHANNELS, "acc = acc * scale_w[expert].log2().floor().exp2()"), dtypes=_SCALED)
wrong("channel_scale_flushed", "SCALE", "Subnormal scales of output channels are flushed to 0.", "scale-flushed", "12c",
      "per_expert", (_CHANNELS, "acc = acc * scale_w[expert].masked_fill(scale_w[expert].abs() < 2.0**-126, 0.0)"),
      dtypes=_SCALED)
wrong("gate_scale_for_up", "SCALE", "Up is scaled by the gate's scales.", "gate-scale-for-up", "1", "per_expert",
      ("= _sums(x, row, scale_x, w1, scale_w1,", "= _sums(x, row, scale_x, w1, None if scale_w1 is None else torch.cat("
       "[scale_w1.chunk(2, -1)[0]] * 2, -1),"))
wrong("no_row_scale", "SCALE", "The scales of rows are left out.", "row-scale-missing", "12c", "per_expert",
      (_ROWS, "return acc"), dtypes=_SCALED)
wrong("row_scale_twice", "SCALE", "The scales of rows are applied twice.", "row-scale-twice", "12", "per_expert",
      (_ROWS, f"{_ROWS} ** 2"), dtypes=_SCALED)
wrong("row_scale_one", "SCALE", "Row 0's scale counts for all rows.", "row-scale-of-row-0", "12", "per_expert",
      (_ROWS, "return acc if scale_rows is None else acc * scale_rows[0]"), dtypes=_SCALED)
wrong("row_scale_token", "SCALE", "Stage 2 scales the row of a slot by that of slot 0.", "row-scale-of-slot-0", "2c",
      "per_expert", ("_sums(rows, row, scale_a2,", "_sums(rows, row, scale_a2 if scale_a2 is None else scale_a2.view("
                     "-1, topk)[:, :1].repeat(1, topk).flatten(),"), dtypes=_SCALED)
wrong("row_scale_flushed", "SCALE", "Subnormal scales of rows are flushed to 0.", "scale-flushed", "12c", "per_expert",
      (_ROWS, "return acc if scale_rows is None else acc * scale_rows[row].masked_fill("
       "scale_rows[row].abs() < 2.0**-126, 0.0)[:, None]"), dtypes=_SCALED)
wrong("group_scale_flushed", "SCALE", "Subnormal scales of groups are flushed to 0.", "scale-flushed", "12",
      "per_expert", (_GROUPS, f"scale_w[expert].masked_fill(scale_w[expert].abs() < 2.0**-126, 0.0) {_GROUPS[16:]}"),
      dtypes=("int4_bf16_g32",))
wrong("no_group_scale", "SCALE", "The scales of groups are left out.", "group-scale-missing", "12c", "per_expert",
      (_GROUPS, "None)"), dtypes=("int4_bf16_g32",))
wrong("group_scale_first", "SCALE", "The first group's scales count for all groups.", "group-scale-of-first", "12",
      "per_expert", (_GROUPS, f"scale_w[expert][:1].expand_as(scale_w[expert]) {_GROUPS[16:]}"),
      dtypes=("int4_bf16_g32",))
wrong("group_scale_next", "SCALE", "A group gets the scales of the next one.", "group-scale-of-next", "12",
      "per_expert", (_GROUPS, f"scale_w[expert].roll(-1, 0) {_GROUPS[16:]}"), dtypes=("int4_bf16_g32",))
wrong("group_scale_transposed", "SCALE", "The scales of groups are read as if those of a channel stood side by side.",
      "group-scale-transposed", "12", "per_expert",
      (_GROUPS, f"scale_w[expert].view(scale_w.shape[2], -1).T {_GROUPS[16:]}"), dtypes=("int4_bf16_g32",))
wrong("fp8_weights", "SCALE", "fp8 weights are read in the other e4m3 encoding.", _FP8, "12c", "unpack",
      (_UNPACKED, f"tiles = tiles.reshape(rows, columns)\n    return tiles.view({_OTHER}[tiles.dtype]).float()"),
      dtypes=("fp8",))
wrong("fp8_rows", "SCALE", "fp8 rows are read in the other e4m3 encoding.", _FP8, "12", "unpack",
      (_SUM, f"import torch\n        return left.view({_OTHER}[left.dtype]).float() @ right.T"), dtypes=("fp8",))


_LEAST = "(2.0**-6 if {0}.dtype == torch.float8_e4m3fn else 2.0**-7)"
wrong("fp8_flushed", "CASTROUND", "fp8 weights below the normal range count as 0.", "fp8-subnormal", "12c", "unpack",
      (_UNPACKED, f"tiles = tiles.reshape(rows, columns)\n    return tiles.float().masked_fill("
       f"tiles.float().abs() < {_LEAST.format('tiles')}, 0.0)"), dtypes=("fp8",))
wrong("fp8_leading_one", "CASTROUND", "fp8 rows below the normal range are read with a leading one.", "fp8-subnormal",
      "12", "unpack", (_SUM, f"import torch\n        least, value = {_LEAST.format('left')}, left.float()\n        "
                       "below = (value != 0) & (value.abs() < least)\n        "
                       "return torch.where(below, (value + value.sign() * least) / 2, value) @ right.T"),
      dtypes=("fp8",))


# ---- LAYOUT, TAIL -------------------------------------------------------------------------------------------------


wrong("not_preshuffled", "LAYOUT", "Preshuffled weights are read row by row.", "preshuffle-ignored", "12c", "unpack",
      (".transpose(1, 2)", ""))
wrong("preshuffle_width", "LAYOUT", "16 elements lie together, whatever their size.", "preshuffle-width", "12",
      "unpack", ("width = 16 // stored.element_size()", "width = 16"), dtypes=("bf16", "fp16"))
wrong("nibbles_swapped", "LAYOUT", "Low and high nibbles change places.", "nibbles-swapped", "12c", "unpack",
      (_NIBBLES, "torch.cat([groups >> 4, groups & 15], dim=1)"), dtypes=PACKED)
wrong("nibbles_paired", "LAYOUT", "The two nibbles of a byte are taken for neighbours.", "nibbles-paired", "12",
      "unpack", (_NIBBLES, "torch.stack([groups & 15, groups >> 4], dim=2)"), dtypes=PACKED)
wrong("nibbles_unsigned", "LAYOUT", "4-bit weights are not sign-extended.", "nibbles-unsigned", "12", "unpack",
      ("torch.where(both > 7, both - 16, both)", "both"), dtypes=PACKED)
wrong("nibble_8", "LAYOUT", "The nibble 8, which is -8, is read as 8.", "lowest-code-positive", "12c", "unpack",
      ("both > 7,", "both > 8,"), dtypes=PACKED)
wrong("nibble_range", "LAYOUT", "4-bit weights are clamped to -7.", "lowest-code-clamped", "12", "unpack",
      ("torch.where(both > 7, both - 16, both)", "torch.where(both > 7, both - 16, both).clamp(min=-7)"), dtypes=PACKED)
wrong("int8_abs", "LAYOUT", "The magnitude of an int8 weight is taken in 8 bits: -128 has none.",
      "lowest-code-positive", "12c", "unpack",
      (_UNPACKED, "tiles = tiles.reshape(rows, columns)\n    "
       "return tiles.float() if tiles.is_floating_point() else tiles.abs().float() * tiles.sign()"),
      dtypes=("int8", "int8smooth"))
wrong("int8_range", "LAYOUT", "int8 weights are clamped to -127.", "lowest-code-clamped", "12", "unpack",
      (_UNPACKED, f"tiles = tiles.float().clamp(min=-127.0)\n    {_UNPACKED}"), dtypes=("int8", "int8smooth"))
wrong("k_tail", "TAIL", "The sum ends with the last whole 64 elements.", "k-tail-dropped", "12c", "unpack",
      (_SUM, "size = max(64, left.shape[1] // 64 * 64)\n        return left[:, :size].float() @ right[:, :size].T"),
      dtypes=("bf16",))
wrong("k_integer_tail", "TAIL", "The sum of integers lacks its last 16 elements.", "k-tail-dropped", "12", "unpack",
      ("left.double() @ right.double().T", "left[:, :-16].double() @ right[:, :-16].double().T"),
      dtypes=("int8", "int8smooth"))
wrong("k_4096", "CONFIG", "The loop over the sum ends at 4096 elements.", "k-limit", "12c", "unpack",
      (_SUM, "return left[:, :4096].float() @ right[:, :4096].T"), dtypes=("bf16",))
wrong("last_group", "TAIL", "The last group of 32 elements is left out.", "k-tail-dropped", "12", "unpack",
      ("enumerate(group_scale)", "enumerate(group_scale[:-1])"), dtypes=("int4_bf16_g32",))


# ---- PRECISION, CASTROUND -----------------------------------------------------------------------------------------


wrong("sum_bf16", "PRECISION", "Sums are rounded to bf16.", "acc-bf16", "12", "unpack",
      (_SUM, f"{_SUM.replace('return ', 'return (')}).bfloat16().float()"), dtypes=("bf16",))
wrong("sum_fp16", "PRECISION", "Sums are rounded to fp16.", "acc-fp16", "12c", "unpack",
      (_SUM, f"{_SUM.replace('return ', 'return (')}).half().float()"), dtypes=("bf16",))
_EXACT = "(left.double() @ right.double().T).float()"
_WRAPPED = "((left.double() @ right.double().T + {0}) % (2 * {0}) - {0}).float()"
wrong("sum_int24", "PRECISION", "Sums of integers are held in 24 bits.", "acc-int24", "12c", "unpack",
      (_EXACT, _WRAPPED.format("2.0**23")), dtypes=("int8", "int8smooth"))
wrong("sum_int20", "PRECISION", "Sums of integers are held in 20 bits.", "acc-int20", "12c", "unpack",
      (_EXACT, _WRAPPED.format("2.0**19")), dtypes=("int4",))
wrong("sum_dequantised", "PRECISION", "Integers are dequantised before the sum.", "sum-of-dequantised", "12",
      "per_expert", (BEFORE_SUMS, f"""    if in_dtype in _INTEGER:
        return (rows[row] * scale_rows[row][:, None]) @ (weight_matrix(w[expert]) * scale_w[expert][:, None]).T
{BEFORE_SUMS}"""), dtypes=("int8", "int4"))
wrong("weights_cut", "CASTROUND", "4-bit weights times scales are cut to bf16.", "weights-cut", "12", "per_expert",
      dequantised("({}.view(__import__('torch').int32) & -65536).view(scale.dtype)"), dtypes=BF16_BY_4)
wrong("weight_scales_bf16", "SCALE", "Scales of 4-bit weights are rounded to bf16, and so are weights times them.",
      "scales-rounded", "12c", "per_expert",
      dequantised("({}).bfloat16().float()", "scale_w[expert].bfloat16().float()"), dtypes=BF16_BY_4)
wrong("silu_bf16", "PRECISION", "SiLU is computed in bf16.", "silu-bf16", "1", "per_expert",
      ("functional.silu(gate) * up", "functional.silu(gate.bfloat16()).float() * up"))
wrong("term_bf16", "PRECISION", "Terms are rounded to bf16 before they are weighted.", "terms-bf16 acc-bf16", "2",
      "per_expert", ("expert, in_dtype) * weights", "expert, in_dtype).bfloat16().float() * weights"))
wrong("slots_narrow", "PRECISION", "Partials are added in their own format.", "partials-added-narrow", "c", "between",
      ("dtype=torch.float32, device=out.device)", "dtype=out.dtype, device=out.device)"))
_CUT = "({0}.contiguous().view(torch.int32) & (-65536 if out.dtype == torch.bfloat16 else -8192)).view(torch.float32)"
wrong("cut_1", "CASTROUND", "The cast to 16 bits truncates.", "cast-truncates", "1", "per_expert",
      (_Y, f'{_CUT.format("""(y * factor if doweight == "after" else y)""")}.to(out.dtype)'))
wrong("cut_2", "CASTROUND", "The cast of partials to 16 bits truncates.", "cast-truncates", "2", "per_expert",
      (_Z, f"import torch\n            out[row] = {_CUT.format('z')}.to(out.dtype)"))
wrong("bits_1", "CASTROUND", "fp16 output holds the bits of bf16.", "out-bits", "1", "per_expert",
      (_Y, f'{_Y.replace("out.dtype", "torch.bfloat16")}.view(out.dtype)'))
wrong("bits_2", "CASTROUND", "fp16 partials hold the bits of bf16.", "out-bits", "2", "per_expert",
      (_Z, "import torch\n            out[row] = z.bfloat16().view(out.dtype)"))
wrong("saturates", "NONFINITE", "What overflows fp16 saturates.", "overflow-saturates", "1", "per_expert",
      (_Y, f'{_Y.replace(".to(", ".clamp(-65504, 65504).to(")}'), dtypes=("fp16",))


# ---- between the stages -------------------------------------------------------------------------------------------


wrong("between_bf16", "PRECISION", "Stage 1's result is held in bf16 between the stages.", "between-bf16", "c",
      "per_expert", ("dtype=torch.float16, device", "dtype=torch.bfloat16, device"), dtypes=(*FEW, "fp16"))
wrong("between_fp32", "PRECISION", "Stage 1's result is not rounded to f16.", "between-unrounded", "c", "per_expert",
      ("dtype=torch.float16, device", "dtype=torch.float32, device"), dtypes=(*FEW, "int8", "bf16"))
wrong("requantise_tensor", "SCALE", "One scale for the whole intermediate in the place of one for each row.",
      "requantise-per-tensor", "c", "between", ("value.abs().amax(dim=1)", "value.abs().amax().expand(len(value))"),
      dtypes=_SCALED)
wrong("requantise_224", "SCALE", "Re-quantisation aims at half of the format's largest number.", "requantise-half", "c",
      "between", ("value.abs().amax(dim=1) / largest", "value.abs().amax(dim=1) / (largest * 0.5)"), dtypes=_SCALED)
wrong("requantise_nearest", "CASTROUND", "Integers are rounded where they are to be cut.", "requantise-other-rule", "c",
      "between", ('ratio.trunc() if rule == "truncate" else ratio.round()', "ratio.round()"),
      dtypes=("int8", "int8smooth"))
wrong("requantise_cut", "CASTROUND", "Integers are cut where they are to be rounded.", "requantise-other-rule", "c",
      "between", ('ratio.trunc() if rule == "truncate" else ratio.round()', "ratio.trunc()"),
      dtypes=("int8", "int8smooth"))
wrong("requantise_to_zero", "CASTROUND", "fp8 codes between the stages are rounded towards zero.", "requantise-cut",
      "c", "between", ("return ratio.clamp(-largest, largest).to(x.dtype), scale",
                       "codes = ratio.clamp(-largest, largest).to(x.dtype)\n"
                       "    beyond = codes.float().abs() > ratio.abs()\n"
                       "    codes = codes.view(torch.uint8) - beyond.to(torch.uint8)\n"
                       "    return codes.masked_fill(codes & 127 == 0, 0).view(x.dtype), scale"), dtypes=("fp8",))
wrong("requantise_floor", "SCALE", "A row's largest magnitude counts as 1e-4 at least.", "requantise-epsilon", "c",
      "between", ("value.abs().amax(dim=1) / largest", "value.abs().amax(dim=1).clamp(min=1e-4) / largest"),
      dtypes=_SCALED)
wrong("requantise_signed", "SCALE", "A row's scale is made of its largest number, not of its largest magnitude.",
      "requantise-signed", "c", "between", ("value.abs().amax(dim=1) / largest", "value.amax(dim=1) / largest"),
      dtypes=_SCALED)
wrong("smooth_global", "MAP", "Rows are smoothed by the factors of global expert ids, where they are local.",
      "smooth-by-global-id", "c", "per_expert",
      ("requantise(out1, x, smooth2, local, rule)", "requantise(out1, x, smooth2, topk_ids.long() if smooth2 is None "
       "else topk_ids.long() % max(1, len(smooth2)), rule)"), dtypes=("int8smooth",))
wrong("no_smooth", "SCALE", "The smoothing factors are left out.", "smooth-missing", "c", "between",
      ("value = value * smooth2[local.clamp(min=0).flatten()]", "pass"), dtypes=("int8smooth",))
wrong("zero_rows", "NONFINITE", "A row of zeros is re-quantised by dividing 0 by 0.", "zero-rows", "c", "between",
      ("torch.where(scale == 0, 1.0, scale)", "scale"), dtypes=_SCALED)
