"""Tile sizes of `pipelined`, by the class of a shape: S, M, L, or decode (fewer routes than experts)."""

from __future__ import annotations

from dataclasses import dataclass

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


def tile_of(name: str) -> Tile:
    """The tile of a class."""
    return _TILES[name]
