"""Mutants that write the lists wrongly: ids, their weights, experts of blocks, and the two numbers."""

from __future__ import annotations

from kernels.mutants.sorting.family import having, wrong

_PADDING = "topk << 24 | tokens, dtype=torch.int32"
_IDS = "((slot_of % topk) << 24 | slot_of // topk)"
_TAIL = "sorted_token_ids.copy_(ids[:nowhere])"
_SHARES = "topk_weights.flatten()[slot_of]"
_OWNERS = "sorted_expert_ids.copy_(torch.where(owner == experts, -1, owner))"
_ROWS = "num_valid_ids[:1].copy_(ends[experts:])"
_TOKENS = "num_valid_ids[1:].fill_(tokens)"
_SPECIAL = having(data="special")


def _padding(name: str, what: str, diagnosis: str, value: str) -> None:
    wrong(name, "SENTINEL", what, diagnosis, (_PADDING, f"{value}, dtype=torch.int32"))


def _id(name: str, fault: str, what: str, diagnosis: str, packed: str) -> None:
    """Ids from ``slot`` and ``token``."""
    wrong(name, fault, what, diagnosis,
          (_IDS, f"(lambda slot, token: {packed})(slot_of % topk, slot_of // topk)"))


def _weight(name: str, fault: str, what: str, diagnosis: str, place: str) -> None:
    """Weights at other places, given ``t`` and ``s``."""
    wrong(name, fault, what, diagnosis,
          (_SHARES, f"topk_weights[(lambda t, s: ({place}))(slot_of // topk, slot_of % topk)]"))


def _changed(name: str, fault: str, what: str, diagnosis: str, change: str, special: bool = False) -> None:
    """Other weights, given ``w`` [T, k]."""
    wrong(name, fault, what, diagnosis, (_SHARES, f"(lambda w: {change})(topk_weights).flatten()[slot_of]"),
          shown_on=_SPECIAL if special else None)


# ---- ids and their padding ----------------------------------------------------------------------------------------


_padding("padding_token_0", "Padding is 0: slot 0 of token 0.", "sentinel-token-0", "0")
_padding("padding_no_slot", "Padding is T without the slot's bits.", "sentinel-no-slot", "tokens")
_padding("padding_last_token", "Padding has the last token and the slot of padding.", "sentinel-last-token",
         "topk << 24 | (tokens - 1)")
_padding("padding_last_slot", "Padding has the last slot and the token of padding.", "sentinel-last-slot",
         "(topk - 1) << 24 | tokens")
_padding("padding_minus_1", "Padding is -1.", "sentinel-minus-1", "-1")
_padding("padding_last_route", "Padding is the last route.", "sentinel-last-route", "(topk - 1) << 24 | (tokens - 1)")
for _name, _what, _key, _value in (("tail_zeros", "0", "tail-zeros", "0"),
                                   ("tail_no_slot", "T without the slot's bits", "tail-no-slot", "tokens")):
    wrong(_name, "SENTINEL", f"Ids past the valid rows are {_what}.", _key,
          (_TAIL, f"{_TAIL}\n    sorted_token_ids[torch.arange(nowhere, device=device) >= ends[experts]] = {_value}"))
_id("slot_lost", "MAP", "The slot is missing in the ids.", "slot-lost", "token")
_id("slot_from_1", "MAP", "Slots are counted from 1.", "slot-from-1", "(slot + 1) << 24 | token")
_id("slot_bits_16", "LAYOUT", "The slot stands in bits 16 to 23.", "slot-bits-16", "slot << 16 | token")
_id("slot_6_bit", "OVERFLOW", "Slots are held in 6 bits.", "slot-6-bit", "(slot & 63) << 24 | token")
_id("token_10_bit", "OVERFLOW", "Tokens are held in 10 bits.", "token-10-bit", "slot << 24 | (token & 1023)")
_id("token_16_bit", "OVERFLOW", "Tokens are held in 16 bits.", "token-16-bit", "slot << 24 | (token & 65535)")
_id("exchanged", "MAP", "Token and slot change places.", "exchanged", "token << 24 | slot")
wrong("ids_reversed", "MAP", "The ids of a run are reversed, their weights are not.", "ids-reversed",
      ("ids = torch.full(", "back = before[expert] + counts[expert] - 1 - torch.arange(tokens * topk, device=device) + "
       "before[expert]\n    back = torch.where(expert == experts, 0, back)\n    ids = torch.full("),
      (f"ids[row] = {_IDS}", f"ids[row] = {_IDS.replace('slot_of', 'slot_of[back]')}"))


# ---- weights ------------------------------------------------------------------------------------------------------


_weight("weight_next_slot", "MAP", "Weights are those of the next slot.", "weight-next-slot", "t, (s + 1) % topk")
_weight("weight_token_0", "MAP", "Weights are those of token 0.", "weight-token-0", "t * 0, s")
_weight("weight_next_token", "MAP", "Weights are those of the next token.", "weight-next-token", "(t + 1) % tokens, s")
_changed("weights_slot_major", "LAYOUT", "Weights are read slot-major.", "weights-transposed",
         "w.reshape(topk, tokens).T")
wrong("weights_contiguous", "LAYOUT", "The strides of topk_weights are ignored.", "weights-contiguous",
      (_SHARES, "topk_weights.as_strided((tokens, topk), (topk, 1)).flatten()[slot_of]"),
      shown_on=having(layout="strided strided_all column_major"))
_changed("weight_one", "SEMANTIC", "Weights are 1.", "weight-one", "torch.ones_like(w)")
_changed("weight_twice", "SEMANTIC", "Weights are applied twice.", "weight-twice", "w * w")
_changed("weight_renormalised", "SEMANTIC", "Weights are divided by their token's sum.", "weight-renormalised",
         "w / w.sum(dim=1, keepdim=True)")
_changed("weight_doubled", "SCALE", "Weights are multiplied by 2.", "weight-doubled", "w * 2")
_changed("weight_bf16", "PRECISION", "Weights pass through bf16.", "weight-bf16", "w.bfloat16().float()")
_changed("weight_fp16", "PRECISION", "Weights pass through fp16.", "weight-fp16", "w.half().float()")
_changed("weight_truncated", "CASTROUND", "The lowest 16 bits of weights are cut off.", "weight-truncated",
         "(w.contiguous().view(torch.int32) & -65536).view(torch.float32)")
_changed("weight_plus_0", "CASTROUND", "A weight of -0 becomes +0.", "weight-plus-0", "w + 0.0", special=True)
_changed("weight_flushed", "CASTROUND", "Weights below the normal range become 0.", "weight-flushed",
         "torch.where(w.abs() < torch.finfo(torch.float32).tiny, 0.0, w)", special=True)
_changed("weight_nan_zero", "NONFINITE", "A weight of NaN becomes 0.", "weight-nan-zero",
         "w.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)", special=True)
_changed("weight_nan_canonical", "NONFINITE", "The payload and the sign of a NaN among the weights are lost.",
         "weight-nan-canonical", "w.masked_fill(w.isnan(), torch.nan)", special=True)
_changed("weight_finite", "NONFINITE", "An infinite weight becomes the largest finite one.", "weight-finite",
         "w.nan_to_num(nan=torch.nan)", special=True)


# ---- experts of blocks, and numbers -------------------------------------------------------------------------------


wrong("next_block", "MAP", "Each block has the expert of the next one.", "next-block",
      (_OWNERS, f"owner = owner.roll(-1)\n    {_OWNERS}"))
wrong("previous_block", "MAP", "Each block has the expert of the one before it.", "previous-block",
      (_OWNERS, f"owner = torch.cat([owner[:1], owner[:-1]])\n    {_OWNERS}"))
wrong("owner_8_bit", "OVERFLOW", "Experts of blocks are held in 8 bits.", "owner-8-bit",
      (_OWNERS, f"owner = torch.where(owner == experts, owner, owner & 255)\n    {_OWNERS}"))
wrong("empty_not_numbered", "EMPTY", "Experts without a route are not counted in the numbers.", "empty-not-numbered",
      (_OWNERS, f"used = (counts > 0).cumsum(0) - 1\n    owner = torch.where(owner == experts, experts, used[owner])\n"
       f"    {_OWNERS}"))
wrong("rows_unpadded", "SEMANTIC", "Valid rows are counted without padding.", "valid-unpadded",
      (_ROWS, "num_valid_ids[:1].copy_(counts.sum())"))
wrong("rows_all", "SEMANTIC", "Valid rows are the length of the list.", "valid-all",
      (_ROWS, "num_valid_ids[:1].fill_(nowhere)"))
wrong("tokens_routes", "SEMANTIC", "All slots are counted in the place of tokens.", "tokens-routes",
      (_TOKENS, "num_valid_ids[1:].fill_(tokens * topk)"))
wrong("rows_blocks", "SCALE", "Blocks are counted, not rows.", "valid-blocks",
      (_ROWS, "num_valid_ids[:1].copy_(ends[experts:] // block)"))
wrong("rows_of_expert_0", "SEMANTIC", "The rows of the first expert stand for all.", "valid-of-expert-0",
      (_ROWS, "num_valid_ids[:1].copy_(ends[:1])"))
wrong("tokens_padded", "SEMANTIC", "The number of tokens is rounded up to a block.", "tokens-padded",
      (_TOKENS, "num_valid_ids[1:].fill_((tokens + block - 1) // block * block)"))
wrong("rows_tokens", "MAP", "Valid rows and tokens change places.", "valid-exchanged",
      (_ROWS, "num_valid_ids[1:].copy_(ends[experts:])"), (_TOKENS, "num_valid_ids[:1].fill_(tokens)"))
wrong("descending", "MAP", "Experts stand in descending order.", "descending",
      ("local = _local(topk_ids, expert_mask, experts).flatten()", """last = (experts if expert_mask is None else
            (expert_mask != 0).sum()) - 1
    local = _local(topk_ids, expert_mask, experts).flatten()
    local = torch.where(local == experts, experts, last - local)"""),
      (_OWNERS, "sorted_expert_ids.copy_(torch.where(owner == experts, -1, last - owner))"))
