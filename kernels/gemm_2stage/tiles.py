"""Tile sizes of `pipelined`, by the class of a shape: S, M, L, or decode (fewer routes than experts); and what a
program with such a tile is and needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.dialect import Dialect
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
# decode step streams each weight once: narrow tiles, so that few routes still make many thread blocks.
_TILES = {
    DECODE: Tile(DECODE, 16, 32, 256, 64),
    SMALL: Tile(SMALL, 16, 64, 128, 128),
    MEDIUM: Tile(MEDIUM, 32, 64, 128, 128),
    LARGE: Tile(LARGE, 64, 128, 128, 256),
}


def class_of(block: int, slots: int, experts: int) -> str:
    """The class of a call: ``block`` rows of a routing block, ``slots`` = T k, ``experts`` of the weights."""
    if block % _TILES[MEDIUM].rows:
        return DECODE if slots < experts else SMALL
    return MEDIUM if block % _TILES[LARGE].rows else LARGE


def smaller(name: str) -> tuple[str, ...]:
    """A class and those with smaller tiles that can stand in for it, by falling size."""
    return (name, *(other for other in (MEDIUM, SMALL) if _TILES[other].rows < _TILES[name].rows))


# Format of a weight or activation: format of the tile that is multiplied, bits of a stored element.
_FACTORS = {"e4m3": ("fp16", 8), "int8": ("int8", 8), "bf16": ("bf16", 16), "fp16": ("fp16", 16)}


@dataclass(frozen=True)
class Tiled(Spec):
    """A specialisation of `pipelined`. size: a class of `tiles`. fp8: how e4m3 is widened, "native" or "bits"."""

    size: str = "S"
    fp8: str = "bits"

    @property
    def dialect(self) -> Dialect:
        return Dialect(self.target, self.fp8)

    @property
    def tile(self) -> Tile:
        return _TILES[self.size]

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
        """Shared memory of one thread block on a GPU: what is copied twice, what is made from it once."""
        bits_of = {form: size for form, (_, size) in _FACTORS.items()} | {"int4": 4}
        tile, columns, made = self.tile, self.tile.channels * self.halves, bits_of[self.factor]
        found = 4 * (columns * (2 if self.grouped else 1) + tile.rows * (6 if self.stage == 1 else 4))
        for form, rows in ((self.activation, tile.rows), (self.weight, columns)):
            found += rows * self.depth * (2 * bits_of[form] + (made if form != self.factor else 0)) // 8
        return found

    @property
    def passes(self) -> Mapping[str, bool]:
        return WITHOUT_WGMMA

    def program(self) -> Any:
        from kernels.gemm_2stage.pipelined_template import build

        return build(self)

    def __str__(self) -> str:
        how = f" e4m3:{self.fp8}" if self.activation == "e4m3" else ""
        return f"pipelined{self.stage}[in:{self.in_dtype} out:{self.result} {self.how} tile:{self.size}{how}]"
