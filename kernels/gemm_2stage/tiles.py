"""Tile sizes, by the class of a shape: S, M, L, or decode (fewer routes than experts); what a program with such a tile
is and needs; and which of them an architecture has the matrix instruction and the room for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from conformance.arch import Arch
from kernels.dialect import Dialect, fp8_of
from kernels.gemm_2stage.legacy_template import GROUP, Spec
from kernels.tilelang_build import WITHOUT_WGMMA

DECODE, SMALL, MEDIUM, LARGE = "decode", "S", "M", "L"


@dataclass(frozen=True)
class Tile:
    """rows: sorted rows, a divisor of the routing block. channels: output channels, of stage 1 as many gates as ups.
    depth: bytes along K of one step. threads: of a thread block."""

    name: str
    rows: int
    channels: int
    depth: int
    threads: int


# More rows per tile read weights less often; the accumulators of gate and up bound their product with channels. A
# decode step streams each weight once: narrow tiles, so that few routes still make many thread blocks. Measured on an
# H200, shape L, stage 1: with 128 threads 6 % (bf16), 12 % (fp8) and 48 % (groups) faster than with 256.
_TILES = {
    DECODE: Tile(DECODE, 16, 32, 256, 64),
    SMALL: Tile(SMALL, 16, 64, 128, 128),
    MEDIUM: Tile(MEDIUM, 32, 64, 128, 128),
    LARGE: Tile(LARGE, 64, 128, 128, 128),
}


def class_of(block: int, slots: int, experts: int) -> str:
    """The class of a call: ``block`` rows of a routing block, ``slots`` = T k, ``experts`` of the weights."""
    if block % _TILES[MEDIUM].rows:
        return DECODE if slots < experts else SMALL
    return MEDIUM if block % _TILES[LARGE].rows else LARGE


def class_of_case(params: Mapping[str, str]) -> str:
    """The class of a case at official sizes."""
    return class_of(int(params["bm"]), int(params["tokens"]) * int(params["topk"]), int(params["experts"]))


def smaller(name: str) -> tuple[str, ...]:
    """A class and those with smaller tiles that can stand in for it, by falling size."""
    return (name, *(other for other in (MEDIUM, SMALL) if _TILES[other].rows < _TILES[name].rows))


# Format of a weight or activation: format of the tile that is multiplied, bits of a stored element.
_FACTORS = {"e4m3": ("fp16", 8), "int8": ("int8", 8), "bf16": ("bf16", 16), "fp16": ("fp16", 16)}


@dataclass(frozen=True)
class Tiled(Spec):
    """A specialisation with tiles. size: their class. fp8: how e4m3 is widened, "native" or "bits". overlapped: whether
    the next step is copied while one is multiplied."""

    size: str = "S"
    fp8: str = "bits"
    overlapped: bool = True

    @property
    def dialect(self) -> Dialect:
        return Dialect(self.target, self.fp8)

    @property
    def tile(self) -> Tile:
        tile = _TILES[self.size]
        # Group scales of stage 2, one step after the other: 711 us instead of 789 (H200, shape L).
        wider = self.size == LARGE and self.grouped and self.stage == 2 and not self.overlapped
        return replace(tile, threads=256) if wider else tile

    @property
    def factor(self) -> str:
        """Format of the tiles that are multiplied."""
        return _FACTORS[self.activation][0]

    @property
    def depth(self) -> int:
        """Elements along K of one step; with group scales one group, whose sum is scaled before it is added."""
        return GROUP if self.grouped else self.tile.depth // (1 if self.factor == "int8" else 2)

    @property
    def halves(self) -> int:
        """Tiles of weights: stage 1 has a gate and an up."""
        return 2 if self.stage == 1 else 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of one thread block on a GPU: in a pipeline what is copied twice, what is made from it once."""
        bits_of = {form: size for form, (_, size) in _FACTORS.items()} | {"int4": 4}
        tile, columns, made = self.tile, self.tile.channels * self.halves, bits_of[self.factor]
        found = 4 * (columns * (1 + (self.grouped and self.overlapped)) + tile.rows * (6 if self.stage == 1 else 4))
        for form, rows in ((self.activation, tile.rows), (self.weight, columns)):
            held = (2 if self.overlapped else 1) * bits_of[form] + (made if form != self.factor else 0)
            found += rows * self.depth * held // 8
        return found

    @property
    def passes(self) -> Mapping[str, bool]:
        return WITHOUT_WGMMA

    def program(self) -> Any:
        from kernels.gemm_2stage.tiled_template import build

        return build(self)

    def __str__(self) -> str:
        how = f" e4m3:{self.fp8}" if self.activation == "e4m3" else ""
        name = f"{'pipelined' if self.overlapped else 'tiled'}{self.stage}"
        return f"{name}[in:{self.in_dtype} out:{self.result} {self.how} tile:{self.size}{how}]"


# The matrix instruction that TileLang uses, by language and format of the factors, as tables of architectures name it.
_INSTRUCTIONS = {
    ("cuda", "bf16"): "bf16 16x8x16 f32", ("cuda", "fp16"): "f16 16x8x16 f32", ("cuda", "int8"): "i8 16x8x32 i32",
    ("hip", "bf16"): "bf16 16x16x16 f32", ("hip", "fp16"): "f16 16x16x16 f32", ("hip", "int8"): "i8 16x16x32 i32",
}


def tiled(arch: Arch, plain: Spec, size: str, overlapped: bool) -> Tiled | None:
    """The program that computes on ``arch`` what ``plain`` does, with the largest tile up to the class ``size`` that
    there is room for. None where no tile fits or no matrix instruction is known, and for HIP where 8 or 4 bits are
    copied: TileLang 0.1.15 writes 16 zeros of 8 bits as make_uint4 of 16 arguments, which no compiler takes.

    The C target has one program: what is run there has reduced sizes, and nothing overlaps.
    """
    fp8 = fp8_of(arch) if arch.language == "cuda" else "bits"
    if arch.language == "c":
        return Tiled(plain.target, plain.stage, plain.in_dtype, plain.result, plain.how, SMALL, fp8)
    if arch.language == "hip" and not {plain.activation, plain.weight} <= {"fp16", "bf16"}:
        return None
    for name in smaller(size):
        found = Tiled(plain.target, plain.stage, plain.in_dtype, plain.result, plain.how, name, fp8, overlapped)
        instruction = _INSTRUCTIONS.get((arch.language, found.factor))
        if instruction is None or not arch.fact(f"mma.{instruction}"):
            return None
        room = arch.limit("shared_bytes")
        if room is None or found.shared_bytes <= room:
            return found
    return None
