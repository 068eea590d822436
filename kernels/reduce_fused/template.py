"""The one TileLang template of the reduce_fused kernels: a tile of some tokens, for all four variants."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kernels.dialect import Dialect


@dataclass(frozen=True)
class Spec:
    """One compiled kernel. Tokens, slots, rows and hidden size stay dynamic.

    source, result: formats of x and out ("fp32", "bf16", "fp16", "e4m3"). span: elements of one vector; threads: per
    block, each with ``vectors`` of them, so that a block covers ``span * threads * vectors`` elements of the hidden
    axis. ahead: slots whose positions, scales and rows are loaded before the first of them is used. presence: "runtime"
    when the kernel is told at each call which of weights, x_sf and sf are given, else their fixed presence as "101".
    fp8: how e4m3 is converted, "native" or "bits". resident: thread blocks that a multiprocessor must have registers
    for, 0 = what the compiler likes.
    """

    kernel: str
    target: str
    source: str
    result: str
    span: int
    threads: int
    ahead: int = 1
    presence: str = "runtime"
    fp8: str = "native"
    vectors: int = 1
    resident: int = 0

    @property
    def path(self) -> str:
        """What the dispatcher reports: converting e4m3 in integer arithmetic is a fallback of its own."""
        return f"{self.kernel}/bits" if self.result == "e4m3" and self.fp8 == "bits" else self.kernel

    @property
    def dialect(self) -> Dialect:
        return Dialect(self.target, self.fp8)

    @property
    def block(self) -> int:
        return self.span * self.threads * self.vectors

    def given(self, index: int, flag: Any) -> Any:
        """Whether weights (0), x_sf (1) or sf (2) is given: a fixed answer, or the condition on the run-time flag."""
        return flag != 0 if self.presence == "runtime" else self.presence[index] == "1"

    def __str__(self) -> str:
        held = f"block_h:{self.block} vectors:{self.vectors} ahead:{self.ahead}"
        return (f"{self.kernel}[in:{self.source} out:{self.result} {held} flags:{self.presence}"
                f"{' fp8:bits' if self.path != self.kernel else ''}]")


def parameters(spec: Spec) -> Any:
    """TileLang types of the kernel's tensors, and the symbols that their extents share, as attributes.

    The hidden axis is split as [chunks, span]: the last extent is static, so that a vector access is provably
    aligned while the number of chunks stays dynamic.
    """
    import tilelang.language as T

    dialect = spec.dialect
    tokens, topk, rows, chunks = (T.dynamic(name) for name in ("tokens", "topk", "rows", "chunks"))
    return SimpleNamespace(
        x=T.Tensor((rows, chunks, spec.span), dialect.dtype(spec.source)),
        positions=T.Tensor((tokens, topk), "int32"),
        weights=T.Tensor((tokens, topk), "float32"),
        x_sf=T.Tensor((T.dynamic("scales"),), "float32"),
        sf=T.Tensor((T.dynamic("factors"),), "float32"),
        out=T.Tensor((tokens, chunks, spec.span), dialect.dtype(spec.result)),
        tokens=tokens, topk=topk, chunks=chunks,
    )


def reduce_tokens(spec: Spec) -> Any:
    """The macro that computes a thread's elements of ``count`` tokens from ``first`` on: ``(tensors..., first, count,
    chunk, topk, flags...)``.

    ``chunk`` is that of its first vector; the others lie ``threads`` chunks apart each. Slots are taken in ascending
    order, in groups of ``ahead``: first every weight of the group, then every row and row scale, then the positions of
    the next group or token, then the chain of fused multiply-adds. A slot with a negative position is skipped by
    branch: neither its weight nor any row is read. ``flags`` (weights, x_sf, sf are given) are integers.
    """
    import tilelang.language as T

    dialect = spec.dialect
    span, ahead, vectors, apart = spec.span, spec.ahead, spec.vectors, spec.threads
    raw_dtype = dialect.dtype(spec.source)

    @T.macro
    def fetch(positions, token, slot, topk, into):
        for g in T.unroll(ahead):
            into[g] = -1
            if slot + g < topk:
                into[g] = positions[token, slot + g]

    @T.macro
    def macro(x, positions, weights, x_sf, sf, out, first, count, chunk, topk, has_weights, has_x_sf, has_sf):
        weighted = spec.given(0, has_weights)
        scaled = spec.given(1, has_x_sf)
        rescaled = spec.given(2, has_sf)
        acc = T.alloc_local((vectors, span), "float32")
        raw = T.alloc_local((ahead, vectors, span), raw_dtype)
        row = T.alloc_local((ahead,), "int32")
        next_row = T.alloc_local((ahead,), "int32")
        scale = T.alloc_local((ahead,), "float32")
        row_scale = T.alloc_local((ahead,), "float32")
        factor = T.alloc_local((1,), "float32")
        seen = T.alloc_var("int32")
        fetch(positions, first, 0, topk, next_row)
        factor[0] = 1.0
        if rescaled:  # here, where nothing waits for it yet
            factor[0] = sf[0]
        for step in T.serial(count):
            seen = 0
            for v in T.unroll(vectors):
                for i in dialect.vector(span):
                    acc[v, i] = 0.0
            for group in T.serial(T.ceildiv(topk, ahead)):
                for g in T.unroll(ahead):
                    row[g] = next_row[g]
                    scale[g] = 1.0
                    row_scale[g] = 1.0
                    if weighted and row[g] >= 0:
                        scale[g] = weights[first + step, group * ahead + g]
                for g in T.unroll(ahead):
                    if row[g] >= 0:
                        for v in T.unroll(vectors):
                            for i in dialect.vector(span):
                                raw[g, v, i] = x[row[g], chunk + v * apart, i]
                        if scaled:
                            row_scale[g] = x_sf[row[g]]
                if (group + 1) * ahead < topk:
                    fetch(positions, first + step, (group + 1) * ahead, topk, next_row)
                elif step + 1 < count:
                    fetch(positions, first + step + 1, 0, topk, next_row)
                for g in T.unroll(ahead):
                    if row[g] >= 0:
                        seen = 1
                        # One fp32 product; a factor that is not given is 1, which changes no bit.
                        scale[g] = scale[g] * row_scale[g]
                        for v in T.unroll(vectors):
                            for i in dialect.lanes(span):
                                acc[v, i] = dialect.fma(dialect.widen(spec.source, raw[g, v, i]), scale[g], acc[v, i])
            if rescaled and seen != 0:  # a token without valid slots stays +0, also under a negative sf
                for v in T.unroll(vectors):
                    for i in dialect.lanes(span):
                        acc[v, i] = acc[v, i] * factor[0]
            for v in T.unroll(vectors):
                for i in dialect.vector(span):
                    out[first + step, chunk + v * apart, i] = dialect.narrow(spec.result, acc[v, i])

    return macro
