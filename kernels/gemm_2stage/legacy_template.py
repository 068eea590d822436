"""The TileLang program of `legacy`: one block of sorted rows times a few output channels, without tiles or pipeline.

A thread holds ``span`` output channels (on the C target, a tile of 16) and walks the rows of its block one after
another, each along K in steps of the 16 bytes that lie together in a preshuffled weight. Rows are gathered by packed
id; padding is skipped by branch, so that neither its row nor its weight is read.
"""
# No "from __future__ import annotations" here: TileLang reads the annotations of a traced function as values.
# mypy: disable-error-code="valid-type,name-defined"

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from kernels import bits
from kernels.dialect import Dialect
from kernels.gemm_2stage.epilogue import silu, writer
from kernels.tilelang_build import PASSES

TOKEN_MASK, TOKEN_BITS = (1 << 24) - 1, 24
# in_dtype: (format of activations, format of weights, elements of 16 preshuffled bytes)
_OPERANDS = {
    "fp8": ("e4m3", "e4m3", 16), "int8": ("int8", "int8", 16), "int4": ("int8", "int4", 16),
    "fp16": ("fp16", "fp16", 8), "bf16": ("bf16", "bf16", 8),
    "int4_bf16": ("bf16", "int4", 16), "int4_bf16_g32": ("bf16", "int4", 16),
}
IN_DTYPES = (*_OPERANDS, "int8smooth")  # the last one runs int8's program
GROUP = 32
NONE, AFTER, GATE, GATE_AND_UP = range(4)  # where stage 1 applies the routing weight


@dataclass(frozen=True)
class Spec:
    """One compiled kernel. Tokens, slots, experts, widths and the block's rows stay dynamic.

    target: "cuda", "hip" or "c". stage: 1 or 2. in_dtype: as cases spell it. result: format of the output ("fp32",
    "fp16", "bf16"). how: "store", or "add" to an output that was zeroed.
    """

    target: str
    stage: int
    in_dtype: str
    result: str
    how: str = "store"

    @property
    def dialect(self) -> Dialect:
        return Dialect(self.target, "bits")

    @property
    def activation(self) -> str:
        return _OPERANDS[self.in_dtype][0]

    @property
    def weight(self) -> str:
        return _OPERANDS[self.in_dtype][1]

    @property
    def width(self) -> int:
        """Elements along K that lie together in a preshuffled weight."""
        return _OPERANDS[self.in_dtype][2]

    @property
    def integer(self) -> bool:
        return self.activation == "int8"

    @property
    def grouped(self) -> bool:
        return self.in_dtype == "int4_bf16_g32"

    @property
    def span(self) -> int:
        return 16 if self.target == "c" else 1

    @property
    def threads(self) -> int:
        return 1 if self.target == "c" else 64

    @property
    def passes(self) -> Mapping[str, bool]:
        """Settings of TileLang's passes."""
        return PASSES

    def program(self) -> Any:
        """The TileLang program of this specialisation."""
        return build(self)

    def __str__(self) -> str:
        return f"legacy{self.stage}[in:{self.in_dtype} out:{self.result} {self.how}]"


def storage(spec: Spec, form: str) -> str:
    """TileLang dtype of a tensor of activations or weights."""
    return {"int8": "int8", "int4": "uint8"}.get(form) or spec.dialect.dtype(form)


def parameters(spec: Spec) -> Any:
    """TileLang types of the kernel's tensors, and the symbols that their extents share, as attributes.

    Activations are [rows, K/width, width]; weights [E, N/16, K/width, 16, width], 4-bit ones with width/2 bytes; the
    output is [rows, channels/16, 16].
    """
    import tilelang.language as T

    names = ("entries", "blocks", "rows", "chunks", "experts", "tiles", "out_rows", "out_tiles", "scales", "groups",
             "scaled_experts", "scaled_channels")
    of = SimpleNamespace(**{name: T.dynamic(name) for name in names})
    stored = spec.width // 2 if spec.weight == "int4" else spec.width
    of.ids = T.Tensor((of.entries,), "int32")
    of.block_experts = T.Tensor((of.blocks,), "int32")
    of.shares = T.Tensor((of.entries,), "float32")
    of.valid = T.Tensor((1,), "int32")
    of.x = T.Tensor((of.rows, of.chunks, spec.width), storage(spec, spec.activation))
    of.w = T.Tensor((of.experts, of.tiles, of.chunks, 16, stored), storage(spec, spec.weight))
    of.scale_x = T.Tensor((of.scales,), "float32")
    of.scale_w = T.Tensor((of.scaled_experts, of.groups, of.scaled_channels), "float32")
    of.out = T.Tensor((of.out_rows, of.out_tiles, 16), spec.dialect.dtype(spec.result))
    of.channels = of.out_tiles * 16
    return of


def build(spec: Spec) -> Any:
    """The TileLang program of one specialisation."""
    import tilelang.language as T

    dialect, of, width, span = spec.dialect, parameters(spec), spec.width, spec.span
    halves = 2 if spec.stage == 1 else 1
    number = "int32" if spec.integer else "float32"
    per_group = GROUP // width
    write = writer(dialect, spec.result, spec.how)

    def activation(raw: Any) -> Any:
        return T.cast(raw, "int32") if spec.integer else dialect.widen(spec.activation, raw)

    def weight(w: Any, expert: Any, channel: Any, chunk: Any, v: Any) -> Any:
        """The number at (channel, chunk * width + v)."""
        if spec.weight != "int4":
            raw = w[expert, channel // 16, chunk, channel % 16, v]
            return T.cast(raw, "int32") if spec.integer else dialect.widen(spec.weight, raw)
        byte = T.cast(w[expert, channel // 16, chunk, channel % 16, v // 8 * 4 + v % 4], "int32")
        nibble = (byte >> (v % 8 // 4 * 4)) & 15
        return T.cast((nibble ^ 8) - 8, number)

    @T.macro
    def row_times_channels(x, w, scale_w, row, expert, channel, channels, acc):
        """acc[h, c] = sum over K of x[row] * w[expert, h * channels + channel + c]."""
        left = T.alloc_local((width,), number)
        part = T.alloc_local((halves, span), "float32")
        for h in T.serial(halves):
            for c in T.serial(span):
                acc[h, c] = T.cast(0, number)
                part[h, c] = 0.0
        for chunk in T.serial(of.chunks):
            for v in dialect.lanes(width):
                left[v] = activation(x[row, chunk, v])
            for h in T.unroll(halves):
                for c in T.serial(span):
                    for v in dialect.lanes(width):
                        acc[h, c] = acc[h, c] + left[v] * weight(w, expert, h * channels + channel + c, chunk, v)
            if spec.grouped and (chunk + 1) % per_group == 0:
                for h in T.unroll(halves):
                    for c in T.serial(span):
                        part[h, c] = part[h, c] + acc[h, c] * scale_w[
                            expert, chunk // per_group, h * channels + channel + c]
                        acc[h, c] = T.cast(0, number)
        if spec.grouped:
            for h in T.unroll(halves):
                for c in T.serial(span):
                    acc[h, c] = part[h, c]

    @T.macro
    def scaled(acc, scale_w, expert, channel, scale_x, row, has_scale_w, has_scale_x, h, c, result):
        """result[h] = (acc * scale of the channel) * scale of the row."""
        result[h] = T.cast(acc[h, c], "float32")
        if not spec.grouped and has_scale_w != 0:
            result[h] = result[h] * scale_w[expert, 0, channel]
        if has_scale_x != 0:
            result[h] = result[h] * scale_x[row]

    @T.prim_func
    def legacy(ids: of.ids, block_experts: of.block_experts, shares: of.shares, valid: of.valid, x: of.x, w: of.w,
               scale_x: of.scale_x, scale_w: of.scale_w, out: of.out, tokens: T.int32, topk: T.int32, block: T.int32,
               slot_major: T.int32, has_scale_x: T.int32, has_scale_w: T.int32, doweight: T.int32):
        with dialect.launch(T.ceildiv(of.channels, span * spec.threads), of.blocks, threads=spec.threads) as (tile, at):
            channel = (tile * spec.threads + dialect.thread()) * span
            acc = T.alloc_local((halves, span), number)
            sums = T.alloc_local((2,), "float32")
            raw = T.alloc_local((1,), dialect.dtype(spec.result))
            wide = T.alloc_local((2,), "float32")
            token = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            row = T.alloc_var("int32")
            target = T.alloc_var("int32")
            if at * block < valid[0] and channel < of.channels:
                for r in T.serial(block):
                    token = ids[at * block + r] & TOKEN_MASK
                    slot = ids[at * block + r] >> TOKEN_BITS
                    if token < tokens and slot < topk:
                        row = token
                        target = token * topk + slot
                        if spec.stage == 2:
                            row = token * topk + slot
                            if spec.how == "add":
                                target = token
                        elif slot_major != 0:
                            row = slot * tokens + token
                        row_times_channels(x, w, scale_w, row, block_experts[at], channel, of.channels, acc)
                        for c in T.serial(span):
                            for h in T.unroll(halves):
                                scaled(acc, scale_w, block_experts[at], h * of.channels + channel + c, scale_x, row,
                                       has_scale_w, has_scale_x, h, c, sums)
                            if spec.stage == 2:
                                sums[0] = sums[0] * shares[at * block + r]
                            else:
                                if doweight >= GATE:
                                    sums[0] = sums[0] * shares[at * block + r]
                                if doweight == GATE_AND_UP:
                                    sums[1] = sums[1] * shares[at * block + r]
                                sums[0] = silu(sums[0]) * sums[1]
                                if doweight == AFTER:
                                    sums[0] = sums[0] * shares[at * block + r]
                            raw[0] = dialect.narrow(spec.result, sums[0])
                            write(out, target, channel + c, raw[0], wide)

    return legacy


def stored_dtype(spec: Spec, form: str) -> str | None:
    """Name of the torch dtype that a tensor must be viewed as, None where it is taken as it is."""
    if form in ("int8", "int4") or spec.dialect.native(form):
        return None
    return bits.STORAGE[form]
