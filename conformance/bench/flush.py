"""The flush before each timed call: nothing that the call reads is in the last cache, and what it pushes out is clean.

A buffer larger than the cache is written, as published protocols have it. That alone leaves the cache full of lines
that memory does not have yet, and the call that pushes them out waits while they are written back: of an H200's 50 MB
that is as much as a call of such a size moves itself. So another buffer, larger than the cache too, is read after it.
"""

from __future__ import annotations

import torch

from conformance.bench.protocol import WRITE_READ


class Flush:
    """Call it before each timed call. ``nbytes``: of either buffer, at least, and twice the last cache of a GPU;
    ``how``: one of `protocol.FLUSHES`. No element has the type of the marks that a clock puts around calls (`cupti`).
    """

    def __init__(self, device: torch.device, nbytes: int, how: str = WRITE_READ) -> None:
        self.device, self.how = device, how
        self.nbytes = max(nbytes, 2 * last_cache(device))
        count = max(1, self.nbytes // 4)
        self._written = torch.zeros(count, dtype=torch.float32, device=device)
        self._read = torch.zeros(count, dtype=torch.float32, device=device) if how == WRITE_READ else None
        self._seen = torch.zeros((), dtype=torch.float32, device=device)
        self._turn = 0

    def __call__(self) -> None:
        self._turn = self._turn % 250 + 1  # never 0, which is a memset rather than a kernel
        self._written.fill_(self._turn)
        if self._read is not None:
            torch.sum(self._read, dim=0, out=self._seen)


def last_cache(device: torch.device) -> int:
    """Bytes of a GPU's last cache; 0 where that is not known."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
