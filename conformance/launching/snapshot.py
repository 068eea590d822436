"""What a tensor's memory was, to tell whether a kernel wrote to it: a copy of what is small, else a checksum."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SMALL = 1 << 22  # bytes
_UNSIGNED = (1 << 35) - 1  # of a word shifted by 29: without copies of its sign, which made 0 of -1
_WIDTH = 8 * 8191  # words in a row of a checksum's grid


@dataclass(frozen=True)
class Snapshot:
    """Of a tensor's whole storage, outside the tensor itself included. ``kept``: a copy of its words where it is
    ``small``, which takes less time to compare than to sum; else its checksum."""

    kept: Tensor
    small: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Snapshot:
        words = _words(tensor)
        return cls(words.clone(), True) if words.nbytes <= _SMALL else cls(_sums(tensor), False)

    def differs(self, tensor: Tensor) -> Tensor:
        """bool [], on the device, which is not waited for: whether the tensor's memory holds something else now."""
        now = _words(tensor) if self.small else _sums(tensor)
        if now.shape != self.kept.shape:
            return torch.ones((), dtype=torch.bool, device=now.device)
        return torch.ne(now, self.kept).any()


@dataclass(frozen=True)
class Watched:
    """A tensor, what it was, and a name to tell of it; several may have one name."""

    name: str
    before: Snapshot
    now: Tensor


def changed(*groups: Sequence[Watched]) -> list[list[str]]:
    """For each group the names, each once, of what is no longer as it was; the device is waited for once."""
    flags = [one.before.differs(one.now) for group in groups for one in group]
    differs = iter(torch.stack(flags).tolist() if flags else ())
    return [list(dict.fromkeys(one.name for one in group if next(differs))) for group in groups]


def checksum(tensor: Tensor) -> int:
    """A number that moves when a byte of ``tensor``'s storage changes or moves, outside the tensor itself included."""
    words, tail = _sums(tensor).tolist()
    return int(words + (tail << 64))


def _bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _words(tensor: Tensor) -> Tensor:
    """Its storage as the widest integers that divide it."""
    data = _bytes(tensor)
    return data.view(torch.int64) if len(data) % 8 == 0 else data


def _sums(tensor: Tensor) -> Tensor:
    """The checksum as int64 [2] on the tensor's device, which is not waited for: of whole words, and of the up to seven
    bytes after them.

    Words are summed in columns of a grid, in one pass over memory and without a copy, and the sums, their halves mixed,
    by odd weights of their own: every change of one word is seen, and every move but those by a multiple of the grid's
    width, 8 times a prime that is no extent of any tensor. Of words that stand so far apart, an even number of which
    change in the highest bit only, nothing is seen.
    """
    data = _bytes(tensor)
    whole = len(data) // 8 * 8
    words, tail = data[:whole].view(torch.int64), data[whole:]
    grid = words[: len(words) // _WIDTH * _WIDTH].view(-1, _WIDTH)
    rest = words[grid.numel() :]
    odd = _odd(tensor.device)
    total = (_mixed(rest) * odd[_WIDTH : _WIDTH + len(rest)]).sum()
    if len(grid):
        total += (_mixed(grid.sum(dim=0)) * odd[:_WIDTH]).sum()
    return torch.stack([total, (tail * odd[: len(tail)]).sum()])


def _mixed(words: Tensor) -> Tensor:
    """The high bits on the low ones as well: else changes of the highest bit in two words would cancel in a sum. Not by
    32 bits, which makes 0 of the low half of a word that holds one 4-byte value twice: the sum of what is left over
    many words that change alike, as when rows are cleared, is a multiple of 2^64."""
    return words ^ ((words >> 29) & _UNSIGNED)


@functools.cache
def _odd(device: torch.device) -> Tensor:
    return torch.arange(2 * _WIDTH, dtype=torch.int64, device=device) * 2 + 1
