"""Mutants that leave routes out, take them for another expert's, or number and count the experts wrongly."""

from __future__ import annotations

from kernels.mutants.sorting.family import having, wrong

_NEAREST = "nearest = ids.clamp(0, experts - 1).long()"
_NONE = "none = nearest != ids"
_HERE = "here = expert_mask != 0"
_NUMBERS = "numbers = torch.where(here, here.cumsum(0) - 1, experts)"
_LOCAL = "local = _local(topk_ids, expert_mask, experts).flatten()"
_SORT = "expert, slot_of = torch.sort(local, stable=True)"
_CLEARED = "counts[-1:].zero_()"
_WRONG_IDS = having(ids="holes all_holes wild")
_MASKED = having(mask="third half most one_left all")


def _lost(name: str, fault: str, what: str, diagnosis: str, mask: str) -> None:
    """Routes of a mask, given ``ids`` [T, k], ``token`` [T, 1] and ``slot`` [k], are left out."""
    wrong(name, fault, what, diagnosis, (_LOCAL, f"""ids, token = topk_ids, torch.arange(tokens, device=device)[:, None]
    slot = torch.arange(topk, device=device)
    lost = ({mask}).expand(tokens, topk)
    {_LOCAL.replace("topk_ids", "torch.where(lost, -1, ids)")}"""))


# ---- SENTINEL, ROUTING: ids and masks -----------------------------------------------------------------------------


wrong("negative_is_0", "SENTINEL", "Negative ids are taken for expert 0.", "invalid-first",
      (_NONE, "none = ids > nearest"), shown_on=_WRONG_IDS)
wrong("minus_1_wraps", "SENTINEL", "Id -1 wraps to the last expert.", "invalid-last",
      (_NEAREST, f"ids = torch.where(ids == -1, experts - 1, ids)\n    {_NEAREST}"), shown_on=_WRONG_IDS)
wrong("negative_wraps", "SENTINEL", "-1 has no route, but ids from -E to -2 count from the end.", "invalid-wrapped",
      (_NEAREST, "ids = torch.where((ids < -1) & (ids >= -experts), ids + experts, ids)\n    " + _NEAREST),
      shown_on=_WRONG_IDS)
wrong("id_clamped", "SENTINEL", "Ids beyond the last expert are taken for it.", "invalid-clamped",
      (_NONE, "none = ids < 0"), shown_on=_WRONG_IDS)
wrong("unrouted_counted", "SENTINEL", "Slots without a local expert count as valid rows.", "valid-unrouted",
      (_CLEARED, "pass"))
wrong("mask_ignored", "SENTINEL", "expert_mask is not read.", "masked-kept",
      ("if expert_mask is None:", "if True:"), shown_on=_MASKED)
wrong("mask_inverted", "SENTINEL", "Masked experts are sorted, local ones are not.", "mask-inverted",
      (_HERE, "here = expert_mask == 0"), shown_on=_MASKED)
wrong("mask_one", "SENTINEL", "Only 1 in expert_mask counts as true.", "mask-is-1",
      (_HERE, "here = expert_mask == 1"), shown_on=_MASKED)
wrong("mask_positive", "SENTINEL", "Negative values of expert_mask count as false.", "mask-positive",
      (_HERE, "here = expert_mask > 0"), shown_on=_MASKED)
wrong("mask_low_byte", "OVERFLOW", "expert_mask is held in 8 bits.", "mask-low-byte",
      (_HERE, "here = expert_mask % 256 != 0"), shown_on=_MASKED)
wrong("mask_as_map", "SENTINEL", "Values of expert_mask are taken for numbers of experts.", "mask-as-map",
      ("sorted_expert_ids.copy_(torch.where(owner == experts, -1, owner))", "sorted_expert_ids.copy_(torch.where("
       "owner == experts, -1, owner if expert_mask is None else torch.cat([expert_mask[expert_mask != 0].long(), "
       "expert_mask.new_zeros(experts + 1).long()])[owner]))"), shown_on=_MASKED)
wrong("global_ids", "MAP", "Blocks have the global ids of their experts.", "global-ids",
      (_NUMBERS, "numbers = torch.where(here, torch.arange(experts, device=ids.device), experts)"), shown_on=_MASKED)
wrong("duplicate_lost", "ROUTING", "One byte per expert and token: an expert's second route is lost.",
      "duplicate-lost", (_LOCAL, f"""before = torch.tril(topk_ids[:, :, None] == topk_ids[:, None, :], diagonal=-1)
    {_LOCAL.replace("topk_ids", "torch.where(before.any(dim=2), -1, topk_ids)")}"""), shown_on=having(ids="duplicates"))
wrong("not_skipped", "SENTINEL", "Ids are used as an index as they are.", "exception crash",
      ("return nearest.masked_fill(none, experts)", "return ids.long()"),
      shown_on=having(ids="wild", mask="none", tokens="5", topk="2"))
_lost("id_0_is_padding", "SENTINEL", "Id 0 is taken for padding.", "expert-0-lost", "ids == 0")
_lost("last_expert", "ROUTING", "Ids of a shared expert, the last one, are taken for invalid.", "last-expert-lost",
      "ids == experts - 1")


# ---- TAIL, CONFIG: what is left out -------------------------------------------------------------------------------


_lost("last_slot", "TAIL", "The last slot of each token is left out.", "last-slot-lost", "slot == topk - 1")
_lost("last_token", "TAIL", "The last token is left out.", "last-token-lost", "token == tokens - 1")
_lost("only_token_0", "MAP", "All tokens but the first are left out.", "only-token-0", "token > 0")
_lost("tokens_beyond_64", "TAIL", "Tokens beyond the last whole 64 are left out.", "tokens-beyond-whole-64",
      "(token >= tokens // 64 * 64) & (tokens >= 64)")
_lost("tokens_beyond_16", "TAIL", "Tokens beyond the last whole 16 are left out.", "tokens-beyond-whole-16",
      "(token >= tokens // 16 * 16) & (tokens >= 16)")
_lost("experts_256", "CONFIG", "One thread for each of 256 experts: others are left out.", "experts-from-256",
      "ids >= 256")
_lost("experts_1024", "CONFIG", "One thread for each of 1024 experts: others are left out.", "experts-from-1024",
      "ids >= 1024")
_lost("experts_512", "CONFIG", "Of more than 512 experts the rest is left out.", "experts-from-512", "ids >= 512")


# ---- LAYOUT: how ids are read -------------------------------------------------------------------------------------


wrong("ids_slot_major", "LAYOUT", "Ids are read slot-major.", "ids-transposed",
      (_LOCAL, _LOCAL.replace("topk_ids", "topk_ids.reshape(topk, tokens).T.contiguous()")))
wrong("ids_contiguous", "LAYOUT", "The strides of topk_ids are ignored.", "ids-contiguous",
      (_LOCAL, _LOCAL.replace("topk_ids", "topk_ids.as_strided((tokens, topk), (topk, 1))")),
      shown_on=having(layout="strided strided_all column_major"))


# ---- EMPTY, OVERFLOW, PRECISION: how runs are laid out ------------------------------------------------------------


# What would be written behind the list is not: there is a mutant for that, and a GPU would lose its context.
_WITHIN = ("row = torch.where(expert == experts, nowhere, row)",
           "row = torch.where((expert == experts) | (row > nowhere), nowhere, row)")
_PADDED = "padded = counts.cumsum(0) - counts, (counts + block - 1) // block * block"


def _laid_out(name: str, fault: str, what: str, diagnosis: str, padded: str) -> None:
    """Runs of other lengths, given ``counts`` [E + 1] and ``block``; where it is needed ``known``, local experts."""
    wrong(name, fault, what, diagnosis, (_PADDED, f"padded = counts.cumsum(0) - counts, {padded}"), _WITHIN)


_KNOWN = "(experts if expert_mask is None else (expert_mask != 0).sum())"
_laid_out("block_for_empty", "EMPTY", "An expert without a route gets a block.", "block-for-empty",
          f"torch.where(torch.arange(experts + 1, device=device) < {_KNOWN}, (counts.clamp(min=1) + block - 1) // "
          "block * block, 0)")
_laid_out("block_too_many", "TAIL", "A run that fills its blocks gets one more.", "block-too-many",
          "(counts // block + (counts > 0)) * block")
_laid_out("block_power", "CONFIG", "Rows are padded by a mask, which takes powers of 2.", "block-power-of-two",
          "(counts + (1 << (block.bit_length() - 1)) - 1) // (1 << (block.bit_length() - 1)) * "
          "(1 << (block.bit_length() - 1))")
_laid_out("unpadded", "LAYOUT", "Runs are not padded to blocks.", "runs-unpadded", "counts")
_laid_out("count_8_bit", "OVERFLOW", "Routes of an expert are counted in 8 bits.", "count-8-bit",
          "((counts & 255) + block - 1) // block * block")
_laid_out("count_16_bit", "OVERFLOW", "Routes of an expert are counted in 16 bits.", "count-16-bit",
          "((counts & 0xFFFF) + block - 1) // block * block")
wrong("offsets_bf16", "PRECISION", "First rows of runs pass through bf16.", "offsets-bf16",
      ("row = (ends - padded - before)[expert] + ", "row = ((ends - padded).bfloat16().long() - before)[expert] + "),
      _WITHIN)
wrong("run_tail", "TAIL", "Routes beyond an expert's last whole block are left out.", "run-tail-lost",
      (_PADDED, "padded = counts.cumsum(0) - counts, torch.where(counts < block, (counts > 0) * block, counts // block "
       "* block)"),
      ("row = torch.where(expert == experts, nowhere, row)", "most = torch.where(counts < block, counts, padded)\n"
       "    rank = torch.arange(tokens * topk, device=device) - before[expert]\n"
       "    row = torch.where((expert == experts) | (rank >= most[expert]), nowhere, row)"))
wrong("no_tokens", "EMPTY", "No tokens: the largest id of none is asked for.", "exception",
      (_LOCAL, f"topk_ids.max()\n    {_LOCAL}"))
wrong("inverse", "MAP", "The permutation is inverted.", "inverse", (_SORT, f"{_SORT}\n    slot_of = slot_of.argsort()"))
wrong("by_slot", "SEMANTIC", "Promised bit-exact, a run's routes stand by slot, then by token.", "by-slot",
      (_SORT, """by_slot = torch.arange(tokens * topk, device=device).view(tokens, topk).T.flatten()
    expert, place = torch.sort(local[by_slot], stable=True)
    slot_of = by_slot[place]"""))
wrong("unstable", "RACE", "Promised bit-exact, each run stands in descending order.", "backwards",
      (_SORT, "expert, place = torch.sort(local.flip(0), stable=True)\n    slot_of = tokens * topk - 1 - place"))
