"""What the mutants of two-stage MoE have in common: the sources they are made from, their twins, how one is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance.mutants import Shown, control, mutant
from kernels.mutants.edit import Edit, Source, edited

OPERATORS = {"1": "moe_gemm1", "2": "moe_gemm2", "c": "moe_gemm_2stage"}
PACKAGE = __name__.rpartition(".")[0]
_OF = "kernels.gemm_2stage."
SOURCES = {
    "torch": tuple(_OF + name for name in ("unpack", "between", "microscaled", "per_expert")),
    "tl": tuple(_OF + name for name in ("between", "epilogue", "legacy_template", "launching", "legacy")),
}
# What is wrong in one of these is wrong in the others: scales of rows and of channels; groups, and no scale of rows.
FEW = ("fp8", "int4_bf16_g32")
PACKED = ("int4", "int4_bf16_g32")
BF16_BY_4 = ("int4_bf16", "int4_bf16_g32")
BEFORE_SUMS = '    grouped = in_dtype == "int4_bf16_g32" and scale_w is not None\n'


def only(dtypes: Sequence[str], **other: Sequence[str]) -> Shown:
    """``shown_on`` for these dtypes, and these values of other parameters where a case has them."""
    taken = {"in": dtypes, **other}
    return lambda params: all(params.get(name, values[0]) in values for name, values in taken.items())


def dequantised(cast: str, scale: str = "scale_w[expert]") -> Edit:
    """Of `per_expert`: 4-bit weights of bf16 rows are multiplied by ``scale`` before the product, and ``cast`` then."""
    return BEFORE_SUMS, f"""    if in_dtype.startswith("int4_bf16") and scale_w is not None:
        scale = {scale}
        scale = scale.T.repeat_interleave(32, dim=1) if in_dtype.endswith("g32") else scale[:, None]
        weights = weight_matrix(w[expert]) * scale
        return rows[row].float() @ {cast.format("weights")}.T
{BEFORE_SUMS}"""


def sources(kind: str, name: str, edits: Mapping[str, Sequence[Edit]]) -> dict[str, Source]:
    """Kernels by operator with the edits made; modules are named by their last part."""
    whole = {_OF + module: change for module, change in edits.items()}
    return edited(PACKAGE, name, SOURCES[kind], whole)


def wrong(name: str, fault: str, what: str, diagnosis: str, on: str, module: str, *edits: Edit,
          dtypes: Sequence[str] = FEW, **options: Any) -> None:
    """Register a mutant of the PyTorch kernel for the operators of ``on`` ("1", "2", "c"); ``diagnosis`` holds one or
    more keys, separated by spaces."""
    found = sources("torch", name, {module: edits})
    for letter in on:
        source = found[OPERATORS[letter]]
        mutant(source.operator, name, source.function, fault=fault, wrong=what, twin="torch_control",
               diagnosis=tuple(diagnosis.split()), shown_on=only(dtypes), **source.options | options)


for _source in sources("torch", "torch_control", {}).values():
    control(_source.operator, "torch_control", _source.function, "the unedited PyTorch kernel", **_source.options)
for _source in sources("torch", "bf16_control", {"per_expert": (dequantised("({}).bfloat16().float()"),)}).values():
    control(_source.operator, "bf16_control", _source.function, "4-bit weights times their scales rounded to bf16",
            shown_on=only(BF16_BY_4), **_source.options)
