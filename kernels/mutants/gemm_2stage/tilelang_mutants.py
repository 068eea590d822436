"""TileLang mutants: the template of `legacy`, or its epilogue, with one passage edited. Each compiles a program of its
own, for int4 weights and, but for one, fp16 output."""

from __future__ import annotations

import sys
from typing import Any

from conformance.mutants import Shown, control, mutant
from kernels.mutants.edit import Edit, Source
from kernels.mutants.gemm_2stage.family import OPERATORS, PACKAGE, only, sources

_DTYPES = ("int4",)
_ALSO = {"moe_gemm1": ("bf16",)}  # outputs but f16 that a mutant is shown on, and so the twin
_TOKEN = "token = ids[at * block + r] & TOKEN_MASK"
_SLOT = "slot = ids[at * block + r] >> TOKEN_BITS"
_TAKEN = "if token < tokens and slot < topk:"
_SUMS = "row_times_channels(x, w, scale_w, row, block_experts[at], channel, of.channels, acc)"
_SECOND = "row = token * topk + slot\n"
_SHARE = "if spec.stage == 2:\n                                sums[0] = sums[0] * shares[at * block + r]"


def _shown_on(*out: str) -> Shown:
    """int4 weights with these outputs, and no forced configuration: each would be a program more."""
    chosen = only(_DTYPES, out=out)
    return lambda params: chosen(params) and params.get("launch") != "configs"


def _sources(name: str, *edits: Edit, module: str = "legacy_template") -> dict[str, Source]:
    """The kernels; their programs are labelled by the mutant's name, since a label stands for one program, and are
    those in loops on GPUs, too."""
    label = ('return f"legacy{self.stage}[', f'return f"{name}{{self.stage}}[')
    loops = ('"loops" if arch.language == "c" else "tiles"', '"loops"')
    return sources("tl", name, {"legacy": (loops,), "legacy_template": (label,)} | (
        {module: edits} if module != "legacy_template" else {module: (label, *edits)}))


def program(name: str, target: str, stage: int, how: str) -> Any:
    """The traced program of a mutant or the twin: int4 weights, fp16 output, ``how`` "store" or "add"."""
    template = sys.modules[f"{PACKAGE}.{name}.legacy_template"]
    return template.build(template.Spec(target, stage, "int4", "fp16", how))


def _wrong(name: str, fault: str, what: str, diagnosis: str, on: str, *edits: Edit, out: tuple[str, ...] = ("f16",),
           module: str = "legacy_template") -> None:
    found = _sources(name, *edits, module=module)
    for letter in on:
        source = found[OPERATORS[letter]]
        mutant(source.operator, name, source.function, fault=fault, wrong=what, twin="tl_control",
               diagnosis=tuple(diagnosis.split()), shown_on=_shown_on(*out), **source.options)


for _source in _sources("tl_control").values():
    control(_source.operator, "tl_control", _source.function, "the unedited TileLang kernel",
            shown_on=_shown_on("f16", *_ALSO.get(_source.operator, ())), **_source.options)

_wrong("tl_padding_0", "SENTINEL", "Padding decodes to token 0 in slot 0.", "padding-row-0", "12",
       (_TOKEN, f"{_TOKEN.replace('= ', '= (')}) % tokens"), (_SLOT, f"{_SLOT.replace('= ', '= (')}) % topk"))
_wrong("tl_padding_last", "SENTINEL", "Padding is clamped to the last token in the last slot.", "padding-last-row", "2",
       (_TOKEN, f"{_TOKEN.replace('= ', '= T.min(')}, tokens - 1)"),
       (_SLOT, f"{_SLOT.replace('= ', '= T.min(')}, topk - 1)"))
_wrong("tl_tail_blocks", "SENTINEL", "Blocks past the valid rows are not skipped.", "tail-blocks", "12",
       ("if at * block < valid[0] and channel < of.channels:", "if channel < of.channels and block_experts[at] >= 0:"))
_wrong("tl_id_0", "SENTINEL", "Packed id 0 is taken for padding.", "packed-id-0-dropped", "1",
       (_TAKEN, "if ids[at * block + r] != 0 and token < tokens and slot < topk:"))
_wrong("tl_block_expert", "MAP", "A block uses the expert of the block before it.", "expert-of-previous-block", "2",
       (_SUMS, _SUMS.replace("block_experts[at]", "block_experts[T.max(at - 1, 0)]")),
       ("scaled(acc, scale_w, block_experts[at],", "scaled(acc, scale_w, block_experts[T.max(at - 1, 0)],"))
_wrong("tl_last_of_block", "TAIL", "The last row of a block is left out.", "last-row-of-block-dropped", "1",
       ("for r in T.serial(block):", "for r in T.serial(block - 1):"))
_wrong("tl_rows_16", "CONFIG", "Of a block of any size 16 rows are computed.", "rows-beyond-tile-dropped", "2",
       ("for r in T.serial(block):", "for r in T.serial(16):"))
_wrong("tl_token_bits", "OVERFLOW", "Tokens are held in 6 bits.", "token-6-bit", "1",
       ("TOKEN_MASK, TOKEN_BITS = (1 << 24) - 1, 24", "TOKEN_MASK, TOKEN_BITS = (1 << 6) - 1, 24"),
       (_TAKEN, "if slot < topk:"), out=("f16", "bf16"))
_wrong("tl_row_slot_0", "MAP", "Stage 2 reads row and scale of slot 0.", "row-and-scale-of-slot-0", "2",
       (_SECOND, "row = token * topk\n"))
_wrong("tl_row_slot_major", "MAP", "Stage 2 reads row s T + t.", "rows-transposed", "2",
       (_SECOND, "row = slot * tokens + token\n"))
_wrong("tl_target", "MAP", "Row s T + t is written.", "targets-transposed", "1",
       ("target = token * topk + slot\n", "target = slot * tokens + token\n"))
_wrong("tl_nibbles", "LAYOUT", "Low and high nibbles change places.", "nibbles-swapped", "12",
       ("(v % 8 // 4 * 4)", "((1 - v % 8 // 4) * 4)"))
_wrong("tl_unsigned", "LAYOUT", "4-bit weights are not sign-extended.", "nibbles-unsigned", "1",
       ("(nibble ^ 8) - 8", "nibble"))
_wrong("tl_k_tail", "TAIL", "The last 16 elements of the sum are left out.", "k-tail-dropped", "12",
       ("for chunk in T.serial(of.chunks):", "for chunk in T.serial(of.chunks - 1):"))
_wrong("tl_row_scale", "SCALE", "Row 0's scale counts for all rows.", "row-scale-of-row-0", "1",
       ("result[h] * scale_x[row]", "result[h] * scale_x[0]"))
_wrong("tl_no_channel_scale", "SCALE", "The scales of channels are left out.", "channel-scale-missing", "2",
       ("if not spec.grouped and has_scale_w != 0:", "if not spec.grouped and has_scale_w > 1:"))
_wrong("tl_gate_up", "SEMANTIC", "Gate and up change places.", "gate-up-swapped", "1",
       ("sums[0] = silu(sums[0]) * sums[1]", "sums[0] = silu(sums[1]) * sums[0]"))
_wrong("tl_silu", "SEMANTIC", "SiLU takes powers of 2 in the place of e.", "silu-base-2", "1c",
       ("T.exp2(x * T.float32(-_LOG2_E))", "T.exp2(-x)"), module="epilogue")
_wrong("tl_no_weight", "SEMANTIC", "The routing weights are left out.", "weights-missing", "2c",
       (_SHARE, _SHARE.replace("sums[0] * shares[at * block + r]", "sums[0]")))
_wrong("tl_overwrite", "SEMANTIC", "Terms overwrite the output.", "slots-overwrite", "2",
       ('if how == "store":', "if True:"), module="epilogue")
_wrong("tl_sum_16", "OVERFLOW", "Sums of integers are held in 16 bits.", "acc-int16", "1",
       ('result[h] = T.cast(acc[h, c], "float32")', 'result[h] = T.cast(T.cast(acc[h, c], "int16"), "float32")'))
