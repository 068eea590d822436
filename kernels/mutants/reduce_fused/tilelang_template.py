"""A small TileLang template of the reduction with places where a mutant differs; the production template has none."""
# No "from __future__ import annotations" here: TileLang reads the annotations of a traced function as values.
# mypy: disable-error-code="valid-type,name-defined"

from dataclasses import dataclass
from typing import Any

from kernels.dialect import Dialect
from kernels.reduce_fused.template import Spec, parameters


@dataclass(frozen=True)
class Places:
    """Where a mutant may differ; the defaults are the right kernel.

    first_valid: smallest position that counts; padding_row: row that a padding slot reads, None to skip it;
    stop_at_padding: no slot after it counts. first_slot, fewer_slots: the loop's bounds. position_slot, weight_slot:
    slot that is read in the place of each one's own, or an offset to it. weight_power, x_sf_power, sf_power: how
    often a factor is applied. x_sf_by_token: index of x_sf. start_from_out: the accumulator starts from the output.
    acc: format that the accumulator is rounded to, x's where that is "x". fewer_chunks: chunks that are not
    computed. chunk_shift, token_shift: how far reads and writes are off. write_empty: whether a token without valid
    slots is written. truncate: the cast to bf16 drops bits. overflow: value that e4m3 saturates at.
    """

    first_valid: int = 0
    padding_row: int | None = None
    stop_at_padding: bool = False
    first_slot: int = 0
    fewer_slots: int = 0
    position_slot: int | None = None
    weight_slot: int | None = None
    weight_offset: int = 0
    weight_power: int = 1
    x_sf_power: int = 1
    sf_power: int = 1
    x_sf_by_token: bool = False
    start_from_out: bool = False
    acc: str = "fp32"
    fewer_chunks: int = 0
    chunk_shift: int = 0
    token_shift: int = 0
    write_empty: bool = True
    truncate: bool = False
    overflow: float | None = None


def _rounded(dialect: Dialect, places: Places, value: Any) -> Any:
    """The accumulator as the mutant holds it, again as fp32."""
    return value if places.acc == "fp32" else dialect.widen(places.acc, dialect.narrow(places.acc, value))


def _finished(spec: Spec, places: Places, value: Any) -> Any:
    """What goes into the final cast."""
    import tilelang.language as T

    if places.truncate and spec.result == "bf16":
        return T.reinterpret(T.reinterpret(value, "uint32") & T.uint32(0xFFFF0000), "float32")
    if places.overflow is not None and spec.result == "e4m3":
        limit = T.float32(places.overflow)
        return T.Select(value > limit, limit, T.Select(value < -limit, -limit, value))
    return value


def build(places: Places, spec: Spec) -> Any:
    """The TileLang program: one block per token, which loops over chunks of the hidden axis."""
    import tilelang.language as T

    dialect, of, span = spec.dialect, parameters(spec), spec.span

    @T.prim_func
    def reduce(x: of.x, positions: of.positions, weights: of.weights, x_sf: of.x_sf, sf: of.sf, out: of.out,
               has_weights: T.int32, has_x_sf: T.int32, has_sf: T.int32):
        with dialect.launch(of.tokens, of.chunks - places.fewer_chunks, threads=1) as (token, chunk):
            acc = T.alloc_local((span,), "float32")
            row = T.alloc_var("int32")
            scale = T.alloc_var("float32")
            seen = T.alloc_var("int32")
            open_ = T.alloc_var("int32")
            seen = 0
            open_ = 1
            for i in T.serial(span):
                if places.start_from_out and spec.result != "e4m3":  # e4m3 is never widened on the C target
                    acc[i] = dialect.widen(spec.result, out[token, chunk, i])
                else:
                    acc[i] = 0.0
            for j in T.serial(of.topk - places.first_slot - places.fewer_slots):
                slot = j + places.first_slot
                row = positions[token, slot if places.position_slot is None else places.position_slot]
                if places.padding_row is not None and row < 0:
                    row = places.padding_row
                if places.position_slot is not None and positions[token, slot] < 0:
                    row = -1
                if places.stop_at_padding and row < 0:
                    open_ = 0
                if row >= places.first_valid and open_ != 0:
                    seen = 1
                    scale = 1.0
                    if has_weights != 0:
                        for _ in T.unroll(places.weight_power):
                            if places.weight_slot is not None:
                                scale = scale * weights[token, places.weight_slot]
                            else:
                                scale = scale * weights[token, (slot + places.weight_offset + of.topk) % of.topk]
                    if has_x_sf != 0:
                        for _ in T.unroll(places.x_sf_power):
                            scale = scale * x_sf[token % x.shape[0] if places.x_sf_by_token else row]
                    for i in T.serial(span):
                        value = dialect.widen(spec.source, x[row, (chunk + places.chunk_shift) % of.chunks, i])
                        acc[i] = _rounded(dialect, places, dialect.fma(value, scale, acc[i]))
            if has_sf != 0 and seen != 0:
                for _ in T.unroll(places.sf_power):
                    for i in T.serial(span):
                        acc[i] = acc[i] * sf[0]
            if places.write_empty or seen != 0:
                for i in T.serial(span):
                    target = (token + places.token_shift) % of.tokens
                    out[target, chunk, i] = dialect.narrow(spec.result, _finished(spec, places, acc[i]))

    return reduce
