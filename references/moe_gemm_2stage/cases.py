"""What the parameters of a case mean: extents, at official and at reduced sizes, dtype, combination and policies.

    shape    name of a published shape, for the reader      tokens, hidden, inter, experts, topk   T, H, I, E, k
    bm       rows of a routing block                        in     name of a mode in `dtypes`
    mode     atomic or reduce (stage 2)                     out    f16, bf16, f32
    mask     which experts are here, see `draw`             values   of the mask: one, or any value but 0
    routing  how tokens choose experts, see `draw`          weights  of the routes: one of `WEIGHTS`
    runs     order of an expert's rows: by token, or shuffled
    data     one of `DATA`                                  encoding of fp8: ocp or fnuz
    rule     of re-quantisation between the stages          doweight  where stage 1 applies the routing weight
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conformance.case import Case
from conformance.case import data_seed as seed_without
from conformance.errors import ConformanceError
from references.moe_gemm_2stage import mx
from references.moe_gemm_2stage.dtypes import MODES, Mode, check
from references.moe_gemm_2stage.rounding import OUTPUTS
from references.moe_gemm_2stage.storage import STORED

MASKS = ("no", "yes", "other", "lower", "upper", "one", "none", "all")
ROUTINGS = ("skewed", "even", "one_expert", "sentinel")
RUNS = ("by_token", "shuffled")
WEIGHTS = ("share", "signed", "large", "subnormal", "nan")
DATA = ("real", "coded", "exact", "zero_rows", "large", "larger", "overflow", "nonfinite", "nan_weights",
        "nan_blocks", "scales", "block_tops", "subnormal_channels", "subnormal_rows", "subnormal_codes", "one_sign")
DOWEIGHT = {"none": "none", "after": "after", "gate": "gate", "gate_and_up": "gate-and-up"}
_REDUCED_BLOCK, _REDUCED_TOKENS, _REDUCED_EXPERTS = 16, 33, 20
# Parameters that change neither the data nor the routes, so that the cases which differ in them share both.
_NO_DATA = ("shape", "mode", "out", "launch", "model", "doweight", "rule")


@dataclass(frozen=True)
class Extents:
    """T, H, I, E (all experts), k and BM."""

    tokens: int
    hidden: int
    inter: int
    experts: int
    topk: int
    block: int

    def reduced(self, unit: int) -> Extents:
        """Extents, H and I multiples of ``unit``, that a CPU is done with at once. Blocks shrink with the tokens, so
        that popular experts still have several of them, the last one partial, and others none; k stays, and so do the
        dtypes' layouts."""
        return Extents(
            tokens=min(self.tokens, _REDUCED_TOKENS + self.tokens % 8),
            hidden=min(self.hidden, _whole(32 * ((self.hidden // 256).bit_length() + 3), unit)),
            inter=min(self.inter, _whole(32 * ((self.inter // 128).bit_length() + 2), unit)),
            experts=min(self.experts, max(_REDUCED_EXPERTS, self.topk + 3)),
            topk=self.topk,
            block=_REDUCED_BLOCK,
        )


def _whole(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def extents(case: Case, sizes: str) -> Extents:
    """Edge families are meant as they are; everything else is reduced where ``sizes`` says so."""
    names = ("tokens", "hidden", "inter", "experts", "topk", "bm")
    full = Extents(*(case.number(name) for name in names))
    if full.topk > full.experts:
        raise ConformanceError(f"case {case.id}: topk:{full.topk} is more than experts:{full.experts}")
    unit = MODES[case.get("in")].multiple if case.get("in") in MODES else 32
    if full.hidden % unit or full.inter % unit:
        raise ConformanceError(f"case {case.id}: hidden and inter must be multiples of {unit}")
    return full.reduced(unit) if sizes == "reduced" and not case.family else full


def mode_of(case: Case) -> Mode:
    """The case's dtype. Raises ConformanceError for one without a storage, or a combination that does not exist."""
    name = case.get("in")
    if name not in STORED:
        raise ConformanceError(f"case {case.id}: in:{name} is none of {', '.join(STORED)}")
    try:
        check(MODES[name], case.get("mode", "atomic"), case.get("out"))
    except ValueError as error:
        raise ConformanceError(f"case {case.id}: {error}") from None
    return MODES[name]


def choice(case: Case, name: str, known: tuple[str, ...], default: str) -> str:
    """A parameter with few values. Raises ConformanceError that lists them."""
    value = case.get(name, default)
    if value not in known:
        raise ConformanceError(f"case {case.id}: {name}:{value} is none of {', '.join(known)}")
    return value


def data_of(case: Case) -> str:
    """"coded", integers whose sums are exact, where they are asked for and the operator is linear, else "real": no
    data makes silu exact; nor, where "exact" ones are asked for, sums that are kept in 16 bits. "zero_rows": some rows
    are zeros. "large": results at the end of fp16's range; "larger" and "overflow": many beyond it, of stage 1 and of
    stage 2. "nonfinite": some rows hold a NaN or an infinity, or a scale that is NaN. "nan_weights":
    some channels of weights do. "nan_blocks": some blocks have a scale that is NaN, and products of one sign, none
    of them 0. "scales": e8m0 scales at both ends of their range. "subnormal_channels", "subnormal_rows":
    fp32 scales on either side of 2^-126. "subnormal_codes": fp8 numbers below and just above the end of their normal
    range. "one_sign": rows and weights above 0, whose sums are as large as their length lets them be. "block_tops":
    blocks between the stages whose largest magnitude is where the
    rules of e8m0 scales part. Raises ConformanceError where there are none,
    and where what comes of them is unspecified."""
    wanted = choice(case, "data", DATA, "real")
    if wanted in ("scales", "block_tops") and not MODES[case.get("in")].microscaled:
        raise ConformanceError(f"case {case.id}: data:{wanted} needs e8m0 scales, which in:{case.get('in')} has not")
    if wanted == "nan_blocks" and MODES[case.get("in")].weight not in mx.ELEMENTS:
        raise ConformanceError(f"case {case.id}: data:{wanted} needs weights with e8m0 scales, which in:"
                               f"{case.get('in')} has not")
    if (wanted == "subnormal_rows" and not MODES[case.get("in")].row_quantised) or (
            wanted == "subnormal_channels" and MODES[case.get("in")].weight not in ("fp8", "int8", "int4", "int4_g32")):
        raise ConformanceError(f"case {case.id}: data:{wanted} needs fp32 scales, which those of in:{case.get('in')} "
                               "are not")
    chained, mode = case.operator == "moe_gemm_2stage", MODES[case.get("in")]
    if wanted == "subnormal_codes" and mode.activation not in ("fp8", "mxfp8"):
        raise ConformanceError(f"case {case.id}: data:{wanted} needs fp8 rows, which in:{mode.name} has not")
    if wanted in ("nonfinite", "larger") and chained and mode.row_quantised:
        raise ConformanceError(f"case {case.id}: data:{wanted} makes rows NaN or infinite that are re-quantised, of "
                               f"which the contract of in:{mode.name} says nothing")
    if wanted in ("coded", "exact"):
        rounded = wanted == "exact" and case.get("mode") == "atomic" and case.get("out") != "f32"
        return "coded" if case.operator == "moe_gemm2" and not rounded else "real"
    return wanted


def output_dtype(case: Case) -> torch.dtype:
    return OUTPUTS[choice(case, "out", tuple(OUTPUTS), "f16")]


def data_seed(case: Case) -> int:
    """Of everything but the parameters that change no input."""
    return seed_without(case, _NO_DATA)
