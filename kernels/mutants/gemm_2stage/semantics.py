"""Mutants that compute something else: activation, routing weight, expert, row, slot, and how slots are combined."""

from __future__ import annotations

from kernels.mutants.gemm_2stage.family import wrong

_SILU = "y = torch.nn.functional.silu(gate) * up"
_AFTER = '(y * factor if doweight == "after" else y)'
_SHARE = "expert, in_dtype) * weights[token, slot][:, None]"
_ROWS2 = "_sums(rows, row, scale_a2"
_LOCAL = "return (here.cumsum(0) - 1).masked_fill(~here, -1)[topk_ids.long()]"
_ADD = "out[token] = out[token] + z.to(out.dtype)"
_LOCAL_IDS = "local_experts(topk_ids, expert_mask)"


# ---- SEMANTIC: the activation -------------------------------------------------------------------------------------


wrong("gate_up_swapped", "SEMANTIC", "Gate and up change places.", "gate-up-swapped", "1c", "per_expert",
      ("gate, up = _sums(", "up, gate = _sums("))
wrong("gate_up_interleaved", "SEMANTIC", "Gate and up rows are taken for interleaved.", "gate-up-interleaved", "1",
      "per_expert", (".chunk(2, dim=1)", ".unflatten(1, (-1, 2)).unbind(2)"))
wrong("no_silu", "SEMANTIC", "The gate is not activated.", "silu-missing", "1c", "per_expert", (_SILU, "y = gate * up"))
wrong("no_up", "SEMANTIC", "The gate is not multiplied by up.", "up-missing", "1", "per_expert",
      (_SILU, "y = torch.nn.functional.silu(gate)"))
wrong("gelu", "SEMANTIC", "GELU in the place of SiLU.", "gelu", "1", "per_expert",
      (_SILU, "y = torch.nn.functional.gelu(gate) * up"))
wrong("sigmoid", "SEMANTIC", "The sigmoid in the place of SiLU.", "sigmoid", "1", "per_expert",
      (_SILU, "y = torch.sigmoid(gate) * up"))
wrong("swiglu_alpha", "SEMANTIC", "silu(x) with 1.702 x in the exponent.", "silu-alpha", "1", "per_expert",
      (_SILU, "y = gate * torch.sigmoid(1.702 * gate) * up"))
wrong("swiglu_limit", "SEMANTIC", "Gate and up are clamped to 0.5 before the activation.", "swiglu-limit", "1",
      "per_expert", (_SILU, "y = torch.nn.functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)"))


# ---- SEMANTIC: the routing weight ---------------------------------------------------------------------------------


wrong("weight_uninvited", "SEMANTIC", "Stage 1 applies the routing weight although it is not asked to.",
      "weights-after-activation", "1", "per_expert", (_AFTER, "(y * factor)"))
wrong("weight_ignored", "SEMANTIC", "Stage 1 ignores that it is to apply the routing weight.", "weights-missing", "1",
      "per_expert", (_AFTER, "y"), ('doweight in ("gate", "gate-and-up")', "False"),
      ('doweight == "gate-and-up"', "False"))
wrong("weight_before_silu", "SEMANTIC", "The weight meant for y is applied to the gate, before SiLU.",
      "weights-on-gate", "1", "per_expert", (_AFTER, "y"),
      ('doweight in ("gate", "gate-and-up")', 'doweight in ("gate", "gate-and-up", "after")'))
wrong("weight_on_up_too", "SEMANTIC", "The weight meant for the gate is applied to up as well.",
      "weights-on-gate-and-up", "1", "per_expert", ('doweight == "gate-and-up"', '"gate" in doweight'))
wrong("weight_in_both_stages", "SEMANTIC", "The routing weight is applied in stage 1 and again in stage 2.",
      "weights-in-both-stages", "c", "per_expert", ('in_dtype, "none", out1)', 'in_dtype, "gate-and-up", out1)'))
wrong("weight_in_stage_1", "SEMANTIC", "The routing weight is applied in stage 1, to gate and up, in the place of "
      "stage 2.", "weights-in-stage-1", "c", "per_expert",
      ('in_dtype, "none", out1)', 'in_dtype, "gate-and-up", out1)'),
      (_SHARE, "expert, in_dtype)"))
wrong("no_weight", "SEMANTIC", "The routing weights are left out.", "weights-missing", "2c", "per_expert",
      (_SHARE, "expert, in_dtype)"))
wrong("weight_twice", "SEMANTIC", "The routing weights are applied twice.", "weights-twice", "2c", "per_expert",
      (_SHARE, f"{_SHARE} ** 2"))
wrong("weight_uniform", "SEMANTIC", "1/k in the place of the routing weights.", "weights-uniform", "2c", "per_expert",
      (_SHARE, "expert, in_dtype) / topk"))
wrong("slots_mean", "SEMANTIC", "The partials of the slots are averaged.", "mean", "c", "between",
      ("out.copy_(total)", "out.copy_(total / topk)"))
wrong("slots_overwrite", "SEMANTIC", "Terms overwrite the output in the place of being added to it.",
      "slots-overwrite", "2c", "per_expert", (_ADD, "out[token] = z.to(out.dtype)"))


# ---- MAP: expert, row, slot ---------------------------------------------------------------------------------------


wrong("expert_next", "MAP", "Weights of the next expert are used.", "next-expert", "12c", "per_expert",
      ("weight_matrix(w[expert])", "weight_matrix(w[(expert + 1) % len(w)])"))
wrong("expert_of_slot_0", "MAP", "Every slot is given slot 0's expert.", "expert-of-slot-0", "12", "between",
      (_LOCAL, f"{_LOCAL}[:, :1].expand(topk_ids.shape)"),
      ("return topk_ids.long()\n", "return topk_ids.long()[:, :1].expand(topk_ids.shape)\n"))
wrong("expert_global", "SENTINEL", "Global expert ids are used where weights are local.", "global-expert-ids", "12c",
      "between", (_LOCAL, "return topk_ids.long().masked_fill(~here[topk_ids.long()], -1)"))
wrong("mask_ignored", "SENTINEL", "Slots of experts that are elsewhere count.", "mask-ignored", "12c", "between",
      ("if expert_mask is None:", "if True:"))
wrong("expert_off_by_one", "SENTINEL", "Local numbers of experts are one too large.", "next-local-expert", "12c",
      "between", ("here.cumsum(0) - 1)", "here.cumsum(0))"))
wrong("row_of_slot_0", "MAP", "Every slot reads the row of slot 0, as of a view that lost its slot axis.",
      "row-of-slot-0", "2", "per_expert",
      ("rows = a2.view(-1, a2.shape[-1])",
       "rows = a2.view(-1, topk, a2.shape[-1])[:, :1].expand(-1, topk, -1).reshape(-1, a2.shape[-1])"))
wrong("row_of_token", "MAP", "Stage 2 reads row t in the place of t k + s.", "row-of-token", "2c", "per_expert",
      (_ROWS2, "_sums(rows, token, scale_a2"))
wrong("row_slot_major", "MAP", "Stage 2 reads row s T + t in the place of t k + s.", "rows-transposed", "2",
      "per_expert", (_ROWS2, "_sums(rows, slot * (len(rows) // topk) + token, scale_a2"))
wrong("row_token_major", "MAP", "Slot-major rows are read as token-major.", "rows-transposed", "1c", "per_expert",
      ("slot * tokens + token if", "token * topk + slot if"), dtypes=("int8smooth",))
wrong("row_without_slot", "MAP", "Slot-major rows are read by token.", "row-of-token", "1", "per_expert",
      ('row = slot * tokens + token if in_dtype == "int8smooth" else token', "row = token"), dtypes=("int8smooth",))
wrong("target_slot_major", "MAP", "Stage 1 writes row s T + t in the place of t k + s.", "targets-transposed", "1",
      "per_expert", ("out[token * topk + slot] =", "out[slot * tokens + token] ="))
wrong("weight_previous_slot", "MAP", "A slot gets the weight of the slot before it.", "weights-of-previous-slot", "2",
      "per_expert", (_SHARE, "expert, in_dtype) * weights[token, slot - 1][:, None]"))
wrong("weight_of_slot_0", "MAP", "Every slot gets the weight of slot 0.", "weights-of-slot-0", "2", "per_expert",
      (_SHARE, "expert, in_dtype) * weights[token, 0][:, None]"))
wrong("weight_previous_token", "MAP", "A token gets the weights of the token before it.", "weights-of-previous-token",
      "2", "per_expert", (_SHARE, "expert, in_dtype) * weights[token - 1, slot][:, None]"))
wrong("weight_without_factor", "MAP", "The weight's index lacks the factor k.", "weights-index-without-k", "2",
      "per_expert", (_SHARE, "expert, in_dtype) * weights.flatten()[token + slot][:, None]"))
wrong("smooth_of_expert_0", "MAP", "Every row is smoothed by the factors of expert 0.", "smooth-of-expert-0", "c",
      "between", ("smooth2[local.clamp(min=0).flatten()]", "smooth2[:1]"), dtypes=("int8smooth",))


_BY_COUNT = """def by_count(rows, ids, valid, local):
    ids = ids[: int(valid)]
    ids = ids[(ids & 0xFFFFFF) < len(local)].long()
    counted = local.flatten().argsort(stable=True)[int((local < 0).sum()):]
    rows[counted] = rows[(ids & 0xFFFFFF) * local.shape[1] + (ids >> 24)]
    return rows


def _experts("""
wrong("run_counted", "MAP", "An expert's rows are put back by counting, as if they were sorted by token.", "run-order",
      "12c", "per_expert", ("def _experts(", _BY_COUNT),
      (f"{_LOCAL_IDS}, topk_weights, in_dtype, doweight, out)", f"{_LOCAL_IDS}, topk_weights, in_dtype, doweight, out)"
       f"\n    by_count(out, sorted_token_ids, num_valid_ids, {_LOCAL_IDS})"),
      ("    _stage2(a2, w2, scale_a2, scale_w2, local_experts(", "    rows = a2.clone().view(-1, a2.shape[-1])\n    "
       f"a2 = by_count(rows, sorted_token_ids, num_valid_ids, {_LOCAL_IDS})\n    "
       "_stage2(a2, w2, scale_a2, scale_w2, local_experts("),
      ('in_dtype, "none", out1)',
       'in_dtype, "none", out1)\n    by_count(out1, sorted_token_ids, num_valid_ids, local)'),
      dtypes=("bf16", "fp16"))


# ---- ROUTING, EMPTY: which routes are taken -----------------------------------------------------------------------


_YIELD = "yield expert, token, slot"
wrong("last_slot", "ROUTING", "The last slot is left out.", "last-slot-dropped", "12c", "per_expert",
      ("(local == expert)", "(local[:, :-1] == expert)"))
wrong("first_slot", "ROUTING", "The first slot is left out.", "first-slot-dropped", "12", "per_expert",
      (_YIELD, "yield expert, token[slot > 0], slot[slot > 0]"))
wrong("last_expert", "ROUTING", "The last expert is left out.", "last-expert-dropped", "12c", "per_expert",
      ("range(len(weights))", "range(len(weights) - 1)"))
wrong("expert_0", "ROUTING", "Expert 0 is left out.", "expert-0-dropped", "12", "per_expert",
      ("range(len(weights))", "range(1, len(weights))"))
wrong("token_0", "SENTINEL", "Token 0 in slot 0, packed id 0, is taken for padding.", "packed-id-0-dropped", "12c",
      "per_expert", (_YIELD, "keep = token + slot > 0\n            yield expert, token[keep], slot[keep]"))
wrong("capacity", "ROUTING", "An expert takes no more than 16 rows.", "rows-beyond-tile-dropped", "12", "per_expert",
      (_YIELD, "yield expert, token[:16], slot[:16]"))
wrong("one_row_experts", "EMPTY", "An expert with a single row is taken for an empty one.", "single-rows-dropped",
      "12", "per_expert", ("if len(token):", "if len(token) > 1:"))
wrong("only_slot_0", "ROUTING", "All slots but the first are left out.",
      "slots-beyond-first-dropped last-slot-dropped", "12", "per_expert",  # of two slots they are the same
      (_YIELD, "yield expert, token[slot < 1], slot[slot < 1]"))
_NOT_LAST = """def without_last_block(local, block):
    if not len(local):
        return local
    last = (local.flatten() == local.max()).nonzero().flatten()
    return local.flatten().index_fill(0, last[(len(last) - 1) // block * block :], -1).view(local.shape)


def _experts("""
wrong("last_block", "ROUTING", "The last block of rows is left out.",
      "last-block-dropped last-expert-dropped rows-beyond-tile-dropped single-rows-dropped", "12c", "per_expert",
      ("def _experts(", _NOT_LAST),
      (f"{_LOCAL_IDS}, topk_weights, in_dtype, doweight, out)",
       f"without_last_block({_LOCAL_IDS}, block), topk_weights, in_dtype, doweight, out)"),
      (f"{_LOCAL_IDS}, topk_weights, in_dtype,\n            combine",
       f"without_last_block({_LOCAL_IDS}, block), topk_weights, in_dtype,\n            combine"),
      (f"local = {_LOCAL_IDS}\n", f"local = without_last_block({_LOCAL_IDS}, block)\n"))
wrong("no_tokens", "EMPTY", "No tokens: division by zero.", "exception", "12c", "per_expert",
      ("for expert in range(len(weights)):", "weights.shape[1] // len(local)\n    for expert in range(len(weights)):"),
      dtypes=("bf16",))
