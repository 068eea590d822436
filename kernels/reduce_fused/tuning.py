"""How h_tiled is cut into thread blocks, by architecture, from measurements.

Measured on one H200 over 27 workloads of 2, 6, 8 and 9 slots, hidden sizes 2048 to 7168, 27 to 803 MB, in bf16, fp32
and to e4m3: median device time of 24 launches, by CUPTI, with L2 full of clean lines before each.
`benchmarks/kernel_configs.py` compares configurations by the lane's whole protocol. Bandwidth relative to the best
configuration of each workload:

    threads x vectors, slots ahead        geometric mean   lowest
    64 x 2, 4 or 3 or 2 that divide topk       0.99          0.97
    64 x 1, the same                           0.98          0.91    chosen for 16 bits: one tile for every hidden size
    128 x 2, the same                          0.98          0.96
    128 x 1, 4                                 0.94          0.85
    128 x 1, as many as there are              0.95          0.88
    128 x 1, 4, presence known at run time     0.90          0.80

The chosen one moves 4.07 TB/s at 66 MB and 4.35 TB/s at 529 MB (bf16), 4.35 to 4.44 TB/s in fp32 (64 x 2) from 200 MB
on; copies move 4.29 TB/s at 1 GB and 4.43 at 128 MB. The compiled-in presence of weights and scales counts most: its
branches keep loads from being issued together. Each further tile size is another 24 programs for the official matrix,
which cost more to load than 1 % of bandwidth is worth to a suite.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """block: elements of a row for a thread block. threads: of a thread block at most; each holds as many 16-byte
    vectors as it takes. ahead: slots that may be loaded before the first is used, the most wanted first; the first
    that divides topk is taken."""

    block: int
    threads: int
    ahead: tuple[int, ...]

    def ahead_of(self, topk: int) -> int:
        """Slots loaded ahead for ``topk`` slots; where nothing divides it, as many as may be."""
        return next((count for count in self.ahead if topk % count == 0), min(topk, self.ahead[0]) or 1)


SAFE = Tuning(block=1024, threads=128, ahead=(4, 2))
_MEASURED = {"sm_90": Tuning(block=512, threads=64, ahead=(4, 3, 2))}


def tuning_of(arch: str) -> Tuning:
    """For an architecture by name; what is safe where nothing has been measured."""
    return _MEASURED.get(arch, SAFE)
