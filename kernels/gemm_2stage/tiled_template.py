"""The TileLang program with tiles in shared memory and tensor cores: in a software pipeline of two stages for
`pipelined`, one step after the other for `legacy`.

A thread block holds a tile of sorted rows times one of output channels. The rows of x are gathered by packed id and
the preshuffled weights read in the order in which they lie in memory. In the pipeline, asynchronous copies of 16 bytes
fill step k + 1 while step k is multiplied. Padding rows, channels past the last tile and the rest of the last step are
zeros in shared memory: none of them is read from, and nothing is written for them.

Tensor cores multiply bf16, fp16 or int8. e4m3 is widened to fp16 and 4-bit weights to int8 or bf16 in shared memory,
exactly. Matrix instructions of 8-bit floats are left alone, since Hopper's keep about 14 bits of a sum; wgmma is, too
(see `tilelang_build.WITHOUT_WGMMA`).
On the C target the same program runs in plain loops, with fp32 in the place of 16-bit floats.
"""
# No "from __future__ import annotations" here: TileLang reads the annotations of a traced function as values.
# mypy: disable-error-code="valid-type,name-defined"

from types import SimpleNamespace
from typing import Any

from kernels.gemm_2stage.epilogue import silu, writer
from kernels.gemm_2stage.legacy_template import (
    AFTER,
    GATE,
    GATE_AND_UP,
    TOKEN_BITS,
    TOKEN_MASK,
    parameters,
    storage,
)
from kernels.gemm_2stage.tiles import Tiled


def build(spec: Tiled) -> Any:
    """The TileLang program of one specialisation; arguments as `legacy` has them."""
    import tilelang.language as T

    dialect, of, width, tile = spec.dialect, parameters(spec), spec.width, spec.tile
    rows, channels, depth, threads = tile.rows, tile.channels, spec.depth, tile.threads
    steps, tiles = depth // width, channels // 16  # chunks of 16 preshuffled bytes, and weight tiles, of one step
    part_of = width // 2 if spec.weight == "int4" else width  # stored elements of a weight row's chunk
    factor, number = dialect.factor(spec.factor), "int32" if spec.integer else "float32"
    widened, unpacked = spec.activation != spec.factor, spec.weight != spec.factor
    row_dtype = storage(spec, spec.activation) if widened else factor
    weight_dtype = storage(spec, spec.weight) if unpacked else factor
    write = writer(dialect, spec.result, spec.how)

    def fetched(form: str, raw: Any) -> Any:
        """A stored element as it is put into shared memory: as it is, but where the target has no such type."""
        return raw if form in ("int8", "int4", "e4m3") or dialect.native(form) else dialect.widen(form, raw)

    def weight(raw: Any, i: Any, c: Any, r: Any, v: Any) -> Any:
        """Weight ``v`` of chunk ``c`` in row ``r`` of tile ``i``; eight of 4 bits lie in four bytes."""
        if spec.weight != "int4":
            return dialect.widen_e4m3(raw[i * steps + c, r * part_of + v])
        byte = T.cast(raw[i * steps + c, r * part_of + v // 8 * 4 + v % 4], "int32")
        return T.cast((((byte >> (v % 8 // 4 * 4)) & 15) ^ 8) - 8, factor)

    @T.macro
    def read_routes(held, ids, scale_x, first, tokens, topk, slot_major, has_scale_x):
        """Row of x and of the output, and its scale, of each sorted row of the tile. Source -1: padding."""
        for r in dialect.parallel(rows):
            token = ids[first + r] & TOKEN_MASK
            slot = ids[first + r] >> TOKEN_BITS
            by_slot = token * topk + slot
            row = by_slot if spec.stage == 2 else T.if_then_else(slot_major != 0, slot * tokens + token, token)
            known = token < tokens and slot < topk
            held.source[r] = T.if_then_else(known, row, -1)
            held.target[r] = token if spec.how == "add" else by_slot
            held.row_scale[r] = T.if_then_else(known and has_scale_x != 0, scale_x[row], T.float32(1.0))

    @T.macro
    def read_share(into, shares, first, applies):
        """Routing weights of the tile's rows, 1 where they are not applied. Those of padding are read, and not used."""
        for r in dialect.parallel(rows):
            into[r] = T.if_then_else(applies, shares[first + r], T.float32(1.0))

    @T.macro
    def fetch_rows(x, source, step, into):
        for r, c, v in dialect.parallel(rows, steps, width):
            into[r, c * width + v] = T.if_then_else(
                source[r] >= 0 and step * steps + c < of.chunks,
                fetched(spec.activation, x[source[r], step * steps + c, v]), T.cast(0, row_dtype))

    @T.macro
    def fetch_weights(w, expert, first, last, step, into):
        """Weight tiles from ``first`` on, those before ``last``."""
        for i, c, b in dialect.parallel(tiles, steps, 16 * part_of):
            if unpacked:
                into[i * steps + c, b] = T.if_then_else(
                    first + i < last and step * steps + c < of.chunks,
                    w[expert, first + i, step * steps + c, b // part_of, b % part_of], T.cast(0, weight_dtype))
            else:
                into[i * 16 + b // width, c * width + b % width] = T.if_then_else(
                    first + i < last and step * steps + c < of.chunks,
                    fetched(spec.weight, w[expert, first + i, step * steps + c, b // width, b % width]),
                    T.cast(0, factor))

    @T.macro
    def fetch_scales(scale_w, expert, group, first, last, has_scale_w, into):
        for j in dialect.parallel(channels):
            into[j] = T.if_then_else(
                has_scale_w != 0 and first + j < last, scale_w[expert, group, first + j], T.float32(1.0))

    @T.macro
    def widen_rows(raw, into):
        for r, v in dialect.parallel(rows, depth):
            into[r, v] = dialect.widen_e4m3(raw[r, v])

    @T.macro
    def unpack(raw, into):
        for i, c, r, v in dialect.parallel(tiles, steps, 16, width):
            into[i * 16 + r, c * width + v] = weight(raw, i, c, r, v)

    @T.macro
    def add_group(part, scales, acc):
        for i, j in dialect.parallel(rows, channels):
            acc[i, j] = acc[i, j] + part[i, j] * scales[j]

    def scaled(held: Any, h: int, i: Any, j: Any) -> Any:
        """(sum * scale of the channel) * scale of the row; group scales are in the sum."""
        total = T.cast(held.acc[h][i, j], "float32")
        return (total if spec.grouped else total * held.scales[h][j]) * held.row_scale[i]

    def finished(held: Any, i: Any, j: Any) -> Any:
        """The fp32 number of an output element: scales, the routing weight where it belongs, in stage 1 SiLU."""
        gate = scaled(held, 0, i, j) * held.share[0][i]
        if spec.stage == 2:
            return gate
        return silu(gate) * (scaled(held, 1, i, j) * held.share[1][i]) * held.share[2][i]

    @T.macro
    def finish(held, out, n, wide):
        """One rounding; nothing is written for padding and for channels past the end."""
        for i, j in dialect.parallel(rows, channels):
            total = finished(held, i, j)
            held.rounded[i, j] = dialect.narrow(spec.result, total)
        for i, t, c in dialect.parallel(rows, tiles, 16):
            if held.source[i] >= 0 and n * tiles + t < of.out_tiles:
                write(out, held.target[i], (n * tiles + t) * 16 + c, held.rounded[i, t * 16 + c], wide)

    def prepare(held: Any, shares: Any, scale_w: Any, expert: Any, at: Any, n: Any, has_scale_w: Any, doweight: Any
                ) -> None:
        """Sums at zero; scales of output channels, 1 where there are none; routing weights."""
        for h in range(spec.halves):
            dialect.clear(held.acc[h], rows, channels)
            if not spec.grouped:
                first = h * of.channels + n * channels
                fetch_scales(scale_w, expert, 0, first, last_of(h), has_scale_w, held.scales[h])
        applies = [True] if spec.stage == 2 else [doweight >= GATE, doweight == GATE_AND_UP, doweight == AFTER]
        for into, where in zip(held.share, applies, strict=True):
            read_share(into, shares, at * rows, where)

    def buffers() -> Any:
        """What a thread block holds. Lists have an entry for each half of stage 1's weights: gate, then up."""
        def each(make: Any) -> list[Any]:
            return [make() for _ in range(spec.halves)]

        held = SimpleNamespace(
            source=dialect.shared((rows,), "int32"), target=dialect.shared((rows,), "int32"),
            row_scale=dialect.shared((rows,), "float32"),
            share=[dialect.shared((rows,), "float32") for _ in range(3 if spec.stage == 1 else 1)],
            left=dialect.shared((rows, depth), factor), right=each(lambda: dialect.shared((channels, depth), factor)),
            scales=each(lambda: dialect.shared((channels,), "float32")),
            acc=each(lambda: dialect.fragment((rows, channels), number)))
        stored = dialect.shared if spec.overlapped else dialect.fragment
        held.raw_left = stored((rows, depth), row_dtype) if widened else held.left
        held.raw_right = held.right if not unpacked else each(
            lambda: stored((tiles * steps, 16 * part_of), weight_dtype))
        held.rounded = dialect.fragment((rows, channels), dialect.dtype(spec.result))
        held.part = each(lambda: dialect.fragment((rows, channels), number)) if spec.grouped else held.acc
        return held

    def last_of(h: int) -> Any:
        """Channels of the weight up to the end of a half."""
        return (h + 1) * of.channels

    def fetch(held: Any, x: Any, w: Any, scale_w: Any, expert: Any, n: Any, step: Any) -> None:
        fetch_rows(x, held.source, step, held.raw_left)
        for h in range(spec.halves):
            first = h * of.channels + n * channels
            fetch_weights(w, expert, first // 16, last_of(h) // 16, step, held.raw_right[h])
            if spec.grouped:
                fetch_scales(scale_w, expert, step, first, last_of(h), 1, held.scales[h])

    def multiply(held: Any) -> None:
        if widened:
            widen_rows(held.raw_left, held.left)
        for h in range(spec.halves):
            if unpacked:
                unpack(held.raw_right[h], held.right[h])
            if spec.grouped:
                dialect.clear(held.part[h], rows, channels)
            dialect.gemm(held.left, held.right[h], held.part[h], rows, channels, depth)
            if spec.grouped:
                add_group(held.part[h], held.scales[h], held.acc[h])

    @T.prim_func
    def tiled(ids: of.ids, block_experts: of.block_experts, shares: of.shares, valid: of.valid, x: of.x, w: of.w,
              scale_x: of.scale_x, scale_w: of.scale_w, out: of.out, tokens: T.int32, topk: T.int32, block: T.int32,
              slot_major: T.int32, has_scale_x: T.int32, has_scale_w: T.int32, doweight: T.int32):
        with dialect.launch(of.blocks * (block // rows), T.ceildiv(of.channels, channels), threads=threads) as (at, n):
            held = buffers()
            wide = T.alloc_local((2,), "float32")
            expert = T.alloc_var("int32")
            if at * rows < valid[0]:
                expert = block_experts[T.truncdiv(at * rows, block)]
                read_routes(held, ids, scale_x, at * rows, tokens, topk, slot_major, has_scale_x)
                prepare(held, shares, scale_w, expert, at, n, has_scale_w, doweight)
                for step in dialect.steps(T.ceildiv(of.chunks, steps), spec.overlapped):
                    for _ in T.serial(1):  # one statement of the pipeline, whose copies are waited for together
                        fetch(held, x, w, scale_w, expert, n, step)
                    for _ in T.serial(1):
                        multiply(held)
                finish(held, out, n, wide)

    return tiled
