"""The TileLang program of moe_reduction: a tile of one token's row, for all three ways to say which slots are valid."""
# No "from __future__ import annotations" here: TileLang reads the annotations of a traced function as values.
# mypy: disable-error-code="valid-type,name-defined"

from dataclasses import dataclass
from typing import Any

from kernels.dialect import Dialect

NO_MASK, VALID_MASK, EXPERT_MASK = 0, 1, 2


@dataclass(frozen=True)
class Spec:
    """One compiled kernel. Tokens, slots, hidden size, experts and the kind of mask stay dynamic.

    form: format of part and out ("fp16", "bf16", "fp32"). span: elements that one thread holds; threads: per block.
    ahead: slots whose validity and rows are loaded before the first of them is added.
    """

    target: str
    form: str
    span: int
    threads: int
    ahead: int

    @property
    def path(self) -> str:
        """"vector": 16 bytes at a time (on the C target, a tile); "element": rows that start off such a boundary."""
        return "vector" if self.span > 1 else "element"

    def __str__(self) -> str:
        return f"reduction_tiled[{self.form} span:{self.span} threads:{self.threads} ahead:{self.ahead}]"


def build(spec: Spec) -> Any:
    """The TileLang program of one specialisation.

    Slots are taken in ascending order, in groups of ``ahead``: first the validity of the group, then every valid row,
    then the chain of fp32 additions. The row of an invalid slot is skipped by branch: it is never read, nor is
    expert_mask where an id lies outside of it. The hidden axis is split as [chunks, span], so that a vector access is
    provably aligned while the number of chunks stays dynamic. Masks that are not given have extents of their own.
    """
    import tilelang.language as T

    dialect = Dialect(spec.target)
    span, ahead, threads, raw_dtype = spec.span, spec.ahead, spec.threads, dialect.dtype(spec.form)
    tokens, topk, chunks = (T.dynamic(name) for name in ("tokens", "topk", "chunks"))
    part_type = T.Tensor((tokens, topk, chunks, span), raw_dtype)
    valid_type = T.Tensor((T.dynamic("valid_tokens"), T.dynamic("valid_topk")), "uint8")
    ids_type = T.Tensor((T.dynamic("ids_tokens"), T.dynamic("ids_topk")), "int32")
    experts = T.dynamic("experts")
    known_type = T.Tensor((experts,), "int32")
    out_type = T.Tensor((tokens, chunks, span), raw_dtype)

    @T.macro
    def reduce_chunk(part, valid, ids, known, out, token, chunk, kind):
        acc = T.alloc_local((span,), "float32")
        raw = T.alloc_local((ahead, span), raw_dtype)
        take = T.alloc_local((ahead,), "int32")
        expert = T.alloc_var("int32")
        expert = 0
        for i in dialect.vector(span):
            acc[i] = 0.0
        for group in T.serial(T.ceildiv(topk, ahead)):
            for g in T.unroll(ahead):
                take[g] = 0
                if group * ahead + g < topk:
                    take[g] = 1
                    if kind == VALID_MASK:
                        take[g] = T.cast(valid[token, group * ahead + g], "int32")
                    if kind == EXPERT_MASK:
                        expert = ids[token, group * ahead + g]
                        take[g] = 0
                        if expert >= 0 and expert < experts:
                            take[g] = known[expert]
            for g in T.unroll(ahead):
                if take[g] != 0:
                    for i in dialect.vector(span):
                        raw[g, i] = part[token, group * ahead + g, chunk, i]
            for g in T.unroll(ahead):
                if take[g] != 0:
                    for i in dialect.lanes(span):
                        acc[i] = acc[i] + dialect.widen(spec.form, raw[g, i])
        for i in dialect.vector(span):
            out[token, chunk, i] = dialect.narrow(spec.form, acc[i])

    @T.prim_func
    def reduction_tiled(part: part_type, valid: valid_type, ids: ids_type, known: known_type, out: out_type,
                        kind: T.int32):
        with dialect.launch(tokens, T.ceildiv(chunks, threads), threads=threads) as (token, tile):
            chunk = tile * threads + dialect.thread()
            if chunk < chunks:
                reduce_chunk(part, valid, ids, known, out, token, chunk, kind)

    return reduction_tiled
