"""How h_tiled is cut into thread blocks, by architecture, from measurements.

Measured on one H200: median device time of 10 launches, by CUPTI, with L2 full of clean lines before each, for bf16,
bf16 to e4m3 and fp32. "sparse": topk 6, hidden size 7168, routed to one of 8 and of 64 ranks, so that most slots are
padding (474 to 1349 MB); "dense": 4096 and 512 tokens of 8 slots, all valid (62 to 1057 MB). Bandwidth relative to the
best of all, geometric mean and lowest:

    blocks run along the    threads x vectors, tokens, resident     sparse        dense
    hidden axis first       32 x 2, up to 8, 1024                   0.99 0.98     (0.99 0.97 with 1 token)    chosen
    hidden axis first       32 x 4, up to 8                         0.98 0.97
    hidden axis first       32 x 2, up to 8                         0.84 0.81     0.99 0.97
    hidden axis first       64 x 2, 1                                             0.99 0.97
    tokens first            64 x 2, 1                               0.75 0.71     0.99 0.98
    tokens first            64 x 1, 1                               0.64 0.57     0.98 0.97

Where few slots are valid a block has little to load, and waits for positions before it knows what. So a block takes
several tokens, and loads the positions of the next one while rows are on their way; registers for 1024 threads on each
multiprocessor keep enough of them on their way; and blocks side by side work on the same rows of x and of the output.
The compiled-in presence of weights and scales counts as much: its branches keep loads from being issued together.
`benchmarks/kernel_configs.py` compares configurations by the lane's whole protocol.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """threads: of a thread block. vectors: of 16 bytes that each thread holds of a row. ahead: slots that may be loaded
    before the first is used, the most wanted first; the first that divides topk is taken. tokens: that a block takes
    one after the other, at most. resident: threads that a multiprocessor must have registers for, 0 = what the compiler
    likes."""

    threads: int
    vectors: int
    ahead: tuple[int, ...]
    tokens: int = 1
    resident: int = 0

    def ahead_of(self, topk: int) -> int:
        """Slots loaded ahead for ``topk`` slots; where nothing divides it, as many as may be."""
        return next((count for count in self.ahead if topk % count == 0), min(topk, self.ahead[0]) or 1)

    def tokens_of(self, blocks: int, multiprocessors: int) -> int:
        """Tokens of a block where there would be ``blocks`` with one each: as many as leave each of the
        ``multiprocessors`` 256 blocks, which is 8 or more times what it holds at once."""
        return max(1, min(self.tokens, blocks // (256 * multiprocessors)))


SAFE = Tuning(threads=128, vectors=1, ahead=(4, 2))
_MEASURED = {"sm_90": Tuning(threads=32, vectors=2, ahead=(4, 3, 2), tokens=8, resident=1024)}


def tuning_of(arch: str) -> Tuning:
    """For an architecture by name; what is safe where nothing has been measured."""
    return _MEASURED.get(arch, SAFE)
