"""How h_tiled is cut into thread blocks, by architecture, from measurements.

Measured on one H200: median device time of 10 launches, by CUDA events, L2 full of clean lines before each. "sparse":
topk 6, hidden sizes 2048, 4096 and 7168, routed to one of 8 and of 64 ranks, so that most slots are padding (136 to
1349 MB); "dense": 4096 and 512 tokens of 8 slots, all valid (62 to 529 MB). Time relative to what is chosen, geometric
mean, with as many tokens in a block as are best for each:

    threads x vectors, ahead, resident    bf16 to e4m3    bf16       fp32 to e4m3    fp32

    sparse
    32 x 4, 1, 896 (fp32: 1024)           1.00            1.00       1.00            1.00       chosen
    32 x 4, 1, 1024                       1.00            1.01       1.00            1.00
    32 x 4, 2, 768 (fp32: 1024)           1.01            1.01       1.01            1.00
    32 x 2, 3, 1024                       1.12            1.05       1.20            1.04

    dense
    32 x 4, 4, 512                        1.00            1.00                                  chosen
    32 x 2, 4, 1024                       0.99            1.01

Where few slots are valid a block has little to load: what it waits for is the chain from positions to rows. So a warp
takes 1024 or 512 elements of a token, which halves the chains beside 32 x 2, and one slot after the other: most of the
next ones would load nothing, and their registers would keep other warps away. Where all slots are valid, rows are
loaded four at a time. A block takes two tokens if there are enough blocks, and loads the positions of the second while
rows of the first are on their way; blocks side by side work on the same rows of x and of the output. The compiled-in
presence of weights and scales counts as much: its branches keep loads from being issued together. Of earlier sweeps:
64 x 2 and blocks that run along tokens first, 25 % slower on sparse routings.
`benchmarks/kernel_configs.py` compares configurations by the lane's whole protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

_REGISTERS = 65536  # of a multiprocessor, for all threads that it holds
_OTHERS = 20  # registers of a thread besides sums and rows
_BLOCKS = 32  # that a multiprocessor holds at most


@dataclass(frozen=True)
class Tuning:
    """threads: of a thread block. vectors: of 16 bytes that each thread may hold of a row, the most wanted first.
    ahead: slots that may be loaded before the first is used; the first that divides topk is taken. tokens: that a block
    takes one after the other, at most. held: whether the compiler is told how many threads a multiprocessor shall have
    registers for, or does what it likes."""

    threads: int
    vectors: tuple[int, ...]
    ahead: tuple[int, ...]
    tokens: int = 1
    held: bool = False

    def vectors_of(self, chunks: int) -> int:
        """Vectors of a thread where a tile has ``chunks`` pieces of one vector for each thread of a warp."""
        return next((count for count in self.vectors if chunks % count == 0), 1)

    def ahead_of(self, topk: int) -> int:
        """Slots loaded ahead for ``topk`` slots; where nothing divides it, as many as may be."""
        return next((count for count in self.ahead if topk % count == 0), min(topk, self.ahead[0]) or 1)

    def tokens_of(self, blocks: int, multiprocessors: int) -> int:
        """Tokens of a block where there would be ``blocks`` with one each: as many as leave each of the
        ``multiprocessors`` 128 blocks, which is 4 or more times what it holds at once."""
        return max(1, min(self.tokens, blocks // (128 * multiprocessors)))

    def resident(self, threads: int, span: int, vectors: int, ahead: int) -> int:
        """Thread blocks that a multiprocessor shall have registers for: each thread holds sums and rows of ``vectors``
        vectors of ``span`` elements. 0 = what the compiler likes."""
        each = vectors * span + 4 * vectors * ahead + _OTHERS
        return min(_BLOCKS, _REGISTERS // each // 128 * 128 // threads) if self.held else 0


SAFE = Tuning(threads=128, vectors=(1,), ahead=(4, 2))
_MEASURED = {"sm_90": Tuning(threads=32, vectors=(4, 5, 3, 2), ahead=(4, 1), tokens=2, held=True)}


def tuning_of(arch: str) -> Tuning:
    """For an architecture by name; what is safe where nothing has been measured."""
    return _MEASURED.get(arch, SAFE)
