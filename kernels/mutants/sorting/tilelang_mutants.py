"""TileLang mutants: the template of `sort_block` with one passage edited, compiled for boards of 256 experts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from conformance.mutants import Shown, control, mutant
from kernels.mutants.edit import Edit
from kernels.mutants.sorting.family import FAMILY, having

_TWIN = "tl_control"
_PADDING = "ids[n * step + thread] = (topk << TOKEN_BITS) | tokens"
_ENTRIES = "for n in T.serial(T.ceildiv(entries, step)):\n            if n * step + thread < entries:"
_PACKED = "ids[row] = (((n * step + thread) % topk) << TOKEN_BITS) | ((n * step + thread) // topk)"
_SHARE = "shares[row] = topk_weights[n * step + thread]"
_TRUE = "number[n * step + thread] = T.if_then_else(expert != 0, 0, _ABSENT)"
_LENGTH = "row = row + T.ceildiv(count[e], block) * block"
_COUNTED = ("expert = topk_ids[n * step + thread]\n                if expert >= 0 and expert < experts:\n"
            "                    if dialect.gpu:\n                        T.atomic_add(count[expert], 1)")
_PLACED = ("expert = topk_ids[n * step + thread]\n                row = _ABSENT\n                if expert >= 0 "
           "and expert < experts:")
_ONCE = ("if dialect.gpu:\n                        row = T.atomic_add(count[expert], 1, return_prev=True)")
_RUN = "for b in T.serial(last - row):\n                    owners[row + b] = expert"
_ZERO = "if first_word + s * step < words:"


def _shown_on(params: Mapping[str, str]) -> bool:
    """One program for each mutant is enough to compile: a small board, a buffer of whole words, no configurations."""
    whole = int(params["hidden"]) % 2 == 0 or params["out"] == "fp32"
    return int(params["experts"]) <= 256 and whole and params.get("launch") != "configs"


def _and(shown_on: Shown) -> Shown:
    return lambda params: _shown_on(params) and shown_on(params)


def program(name: str, target: str) -> Any:
    """The traced program of a mutant or the twin."""
    template = sys.modules[f"{FAMILY.package}.{name}.template"]
    return template.build(template.Spec(target, 256, "int32", 1 if target == "c" else 256))


def _wrong(name: str, fault: str, what: str, diagnosis: str, *edits: Edit, shown_on: Shown = _shown_on,
           **options: Any) -> None:
    source = FAMILY.tilelang_source(name, *edits)
    mutant(FAMILY.operator, name, source.function, fault=fault, wrong=what, twin=_TWIN,
           diagnosis=tuple(diagnosis.split()), shown_on=_and(shown_on), **source.options | options)


_source = FAMILY.tilelang_source(_TWIN)
control(FAMILY.operator, _TWIN, _source.function, "the unedited TileLang kernel", shown_on=_shown_on, **_source.options)

_wrong("tl_padding_token_0", "SENTINEL", "Padding is 0: slot 0 of token 0.", "sentinel-token-0",
       (_PADDING, "ids[n * step + thread] = 0"))
_wrong("tl_padding_no_slot", "SENTINEL", "Padding is T without the slot's bits.", "sentinel-no-slot",
       (_PADDING, "ids[n * step + thread] = tokens"))
_wrong("tl_tail_unwritten", "STALE", "Ids past the valid rows are not written.", "unwritten",
       (_ENTRIES, _ENTRIES.replace("thread < entries", "thread < first[experts]")))
_wrong("tl_id_clamped", "SENTINEL", "Negative ids are taken for expert 0.", "invalid-first",
       (_COUNTED, _COUNTED.replace("\n", "\n                expert = T.max(expert, 0)\n", 1)),
       (_PLACED, _PLACED.replace("\n", "\n                expert = T.max(expert, 0)\n", 1)),
       shown_on=having(ids="holes all_holes wild"))
_wrong("tl_mask_one", "SENTINEL", "Only 1 in expert_mask counts as true.", "mask-is-1",
       (_TRUE, _TRUE.replace("expert != 0", "expert == 1")))
_wrong("tl_mask_inverted", "SENTINEL", "Masked experts are sorted, local ones are not.", "mask-inverted",
       (_TRUE, _TRUE.replace("expert != 0", "(expert == 0) == (masked != 0)")))
_wrong("tl_global_ids", "MAP", "Blocks have the global ids of their experts.", "global-ids",
       ("number[e] = local\n", "number[e] = e\n"))
_wrong("tl_slot_bits", "LAYOUT", "The slot stands in bits 16 to 23.", "slot-bits-16",
       (_PACKED, _PACKED.replace("TOKEN_BITS", "16")))
_wrong("tl_slot_lost", "MAP", "The slot is missing in the ids.", "slot-lost",
       (_PACKED, "ids[row] = (n * step + thread) // topk"))
_wrong("tl_weight_token_0", "MAP", "Weights are those of token 0.", "weight-token-0",
       (_SHARE, "shares[row] = topk_weights[(n * step + thread) % topk]"))
_wrong("tl_weight_next_token", "MAP", "Weights are those of the next token.", "weight-next-token",
       (_SHARE, "shares[row] = topk_weights[(n * step + thread + topk) % slots]"))
_wrong("tl_block_for_empty", "EMPTY", "An expert without a route gets a block.", "block-for-empty",
       (_LENGTH, "row = row + T.ceildiv(T.max(count[e], 1), block) * block"),
       shown_on=lambda params: params["tokens"] != "0")
_wrong("tl_block_too_many", "TAIL", "A run that fills its blocks gets one more.", "block-too-many",
       (_LENGTH, "row = row + T.if_then_else(count[e] > 0, count[e] // block + 1, 0) * block"))
_wrong("tl_count_8_bit", "OVERFLOW", "Routes of an expert are counted in 8 bits.", "count-8-bit",
       (_LENGTH, "row = row + T.ceildiv(count[e] % 256, block) * block"),
       shown_on=lambda params: int(params["tokens"]) > 256)
_wrong("tl_valid_blocks", "SCALE", "Blocks are counted, not rows.", "valid-blocks",
       ("valid[0] = row\n", "valid[0] = row // block\n"))
_wrong("tl_owner_once", "STALE", "Only the first block of a run gets its expert.", "unwritten",
       (_RUN, _RUN.replace("last - row", "T.min(last - row, 1)")))
_wrong("tl_last_route", "TAIL", "The last route is left out.", "last-route-lost",
       (_PLACED, _PLACED.replace("expert < experts", "expert < experts and n * step + thread < slots - 1")))
_wrong("tl_buffer_tail", "TAIL", "The last word of the buffer is not zeroed.", "unwritten",
       (_ZERO, "if first_word + s * step < words - 1:"))
_wrong("tl_no_atomic", "RACE", "Each route's row is counted without an atomic addition.",
       "not-repeatable one-element history",
       (_ONCE, _ONCE.replace("T.atomic_add(count[expert], 1, return_prev=True)",
                             "count[expert]\n                        count[expert] = row + 1")), devices=("cuda",))
