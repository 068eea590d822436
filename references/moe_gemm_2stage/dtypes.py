"""The dtypes of a two-stage MoE: what is stored, what scales it, how products are summed, what passes between stages.

Source: FlyDSL 7e6dca08 (PRE) and 11c4174d (HEAD), moe_gemm_2stage, mxfp_moe and moe_2stage_a16wmix.
"""

from __future__ import annotations

from dataclasses import dataclass

from references.moe_gemm_2stage import mx
from references.moe_gemm_2stage.bounds import Arithmetic
from references.moe_gemm_2stage.quantise import INTEGER_RULES


@dataclass(frozen=True)
class Mode:
    """One in_dtype.

    activation: how x and the input of stage 2 are stored; fp8 and int8 have one fp32 scale per row, mx formats an
    e8m0 scale per 32 elements, f16 and bf16 none. weight: fp8, int8 and int4 have one fp32 scale per output channel,
    int4_g32 one per 32 elements, mxfp4 an e8m0 scale per 32. integer: sums are exact in int32. slot_major: stage 1
    reads x and its scales as [k T, H], multiplied by a smoothing factor of each expert beforehand. outputs: of stage
    2. modes: how stage 2 combines slots. head: whether FlyDSL HEAD's moe_gemm_2stage still takes it.
    """

    name: str
    activation: str
    weight: str
    integer: bool = False
    slot_major: bool = False
    outputs: tuple[str, ...] = ("f16", "bf16", "f32")
    modes: tuple[str, ...] = ("atomic", "reduce")
    head: bool = False

    @property
    def microscaled(self) -> bool:
        """Whether activations have e8m0 scales."""
        return self.activation in mx.ELEMENTS

    @property
    def row_quantised(self) -> bool:
        """Whether activations have one fp32 scale per row."""
        return self.activation in ("fp8", "int8")

    @property
    def arithmetic(self) -> Arithmetic:
        """What the contract lets a kernel do in its sums. Tensor cores multiply bf16 rows by bf16 weights, so that what
        is stored in 4 bits is dequantised before: exact codes, or codes times scales, rounded."""
        return Arithmetic(integer=self.integer,
                          bf16_weights=self.activation == "bf16" and self.weight.startswith("int4"))

    @property
    def rules(self) -> tuple[str, ...]:
        """Policies of the re-quantisation between the stages: of a block's scale, else of integers."""
        return mx.RULES if self.microscaled else INTEGER_RULES

    @property
    def multiple(self) -> int:
        """What H and I must be multiples of: 32 bytes of a packed weight's row are preshuffled together."""
        return 64 if self.weight in mx.ELEMENTS else 32


MODES = {
    mode.name: mode
    for mode in (
        Mode("fp8", "fp8", "fp8", head=True),
        Mode("int8", "int8", "int8", integer=True, head=True),
        Mode("int8smooth", "int8", "int8", integer=True, slot_major=True, head=True),
        Mode("int4", "int8", "int4", integer=True, head=True),
        Mode("fp16", "f16", "f16"),
        Mode("bf16", "bf16", "bf16"),
        Mode("int4_bf16", "bf16", "int4"),
        Mode("int4_bf16_g32", "bf16", "int4_g32"),
        Mode("fp4", "mxfp4", "mxfp4", outputs=("f16",)),
        Mode("a8w4", "mxfp8", "mxfp4", outputs=("f16",)),
        Mode("a16w4", "bf16", "mxfp4", outputs=("bf16",), modes=("atomic",)),
        Mode("a16wi4", "bf16", "int4_g32", outputs=("bf16",), modes=("atomic",)),
        Mode("a16w16", "bf16", "bf16", outputs=("bf16",), modes=("atomic",)),
    )
}


def check(mode: Mode, combine: str, out: str) -> None:
    """Raise ValueError for a combination of stage 2 that the contract refuses: fp32 partials do not exist."""
    if combine not in ("atomic", "reduce"):
        raise ValueError(f"combine is {combine!r}: atomic or reduce is required")
    if combine == "reduce" and out == "f32":
        raise ValueError("combine is 'reduce' and out is 'f32': partials are f16 or bf16 only")
    if combine not in mode.modes or out not in mode.outputs:
        raise ValueError(f"{mode.name} has {' and '.join(mode.modes)} with out {', '.join(mode.outputs)}, "
                         f"not {combine} with {out}")
