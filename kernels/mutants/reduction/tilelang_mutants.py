"""TileLang mutants: the template of `reduction_tiled` with one passage edited, compiled for bf16."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from conformance.mutants import control, mutant
from kernels.mutants.edit import Edit
from kernels.mutants.reduction.family import FAMILY

_TWIN = "tl_control"
_TAKE = "take[g] = T.cast(valid[token, group * ahead + g], \"int32\")"
_INSIDE = "if expert >= 0 and expert < experts:"
_GROUPS = "for group in T.serial(T.ceildiv(topk, ahead)):"
_ROW = "raw[g, i] = part[token, group * ahead + g, chunk, i]"
_WRITE = "out[token, chunk, i] = dialect.narrow(spec.form, acc[i])"


def _shown_on(params: Mapping[str, str]) -> bool:
    """One program for each mutant is enough to compile: bf16, whole tiles, 4 slots ahead."""
    return params["in"] == "bf16" and int(params["hidden"]) % 256 == 0 and int(params["topk"]) >= 4


def program(name: str, target: str) -> Any:
    """The traced program of a mutant or the twin."""
    template = sys.modules[f"{FAMILY.package}.{name}.template"]
    return template.build(template.Spec(target, "bf16", 256 if target == "c" else 8, 1 if target == "c" else 128, 4))


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Without configurations, each of which would be a program more."""
    return {key: value for key, value in options.items() if key != "configs"}


def _wrong(name: str, fault: str, what: str, diagnosis: str, *edits: Edit) -> None:
    source = FAMILY.tilelang_source(name, *edits)
    mutant(FAMILY.operator, name, source.function, fault=fault, wrong=what, twin=_TWIN,
           diagnosis=tuple(diagnosis.split()), shown_on=_shown_on, **_options(source.options))


_source = FAMILY.tilelang_source(_TWIN)
control(FAMILY.operator, _TWIN, _source.function, "the unedited TileLang kernel", shown_on=_shown_on,
        **_options(_source.options))

_wrong("tl_mask_ignored", "SENTINEL", "valid_mask is not read.", "mask-ignored", (_TAKE, "take[g] = 1"))
_wrong("tl_mask_one", "SENTINEL", "Only 1 in a mask counts as true.", "mask-only-one",
       ("if take[g] != 0:\n                    for i in dialect.vector(span):", "if take[g] == 1:\n"
        "                    for i in dialect.vector(span):"),
       ("if take[g] != 0:\n                    for i in dialect.lanes(span):", "if take[g] == 1:\n"
        "                    for i in dialect.lanes(span):"))
_wrong("tl_stale_row", "STALE", "A masked slot adds what the slot four before it has loaded.", "stale-slot",
       ("if take[g] != 0:\n                    for i in dialect.lanes(span):", "if group * ahead + g < topk and "
        "(take[g] != 0 or group > 0):\n                    for i in dialect.lanes(span):"))
_wrong("tl_id_wrapped", "SENTINEL", "Ids outside of the mask wrap.", "ids-wrapped",
       (_INSIDE, "expert = (expert % experts + experts) % experts\n                        if True:"))
_wrong("tl_slot_tail", "TAIL", "Slots beyond the last whole 4 are left out.", "slots-beyond-whole-4",
       (_GROUPS, "for group in T.serial(topk // ahead):"))
_wrong("tl_slot_of_group", "MAP", "Every slot of a group of 4 reads the first one's row.", "slot-of-group",
       (_ROW, "raw[g, i] = part[token, group * ahead, chunk, i]"))
_wrong("tl_chunk_shift", "LAYOUT", "Columns are read 256 places further on.", "columns-shifted",
       (_ROW, "raw[g, i] = part[token, group * ahead + g, (chunk + 1) % chunks, i]"))
_wrong("tl_token_shift", "MAP", "Each result goes to the row of the next token.", "rows-shifted",
       (_WRITE, _WRITE.replace("out[token,", "out[(token + 1) % tokens,")))
_wrong("tl_start", "STALE", "The accumulator starts at what stands in the output.", "stale-added",
       ("acc[i] = 0.0", "acc[i] = dialect.widen(spec.form, out[token, chunk, i])"))
_wrong("tl_bf16_sum", "PRECISION", "The accumulator is bf16.", "acc-bf16 acc-narrow",
       ("acc[i] = acc[i] + dialect.widen(spec.form, raw[g, i])",
        "acc[i] = dialect.widen(\"bf16\", dialect.narrow(\"bf16\", acc[i] + dialect.widen(spec.form, raw[g, i])))"))
