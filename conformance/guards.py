"""Guards around one call: poison in the output, bands on both sides of it, checksums of the inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.formats import bits
from conformance.operator import Output

BAND = 4096  # bytes on each side; keeps the output 16-byte (and 4 KiB) aligned within its storage
POISON_BYTES = (0xFF, 0x5A)  # NaN in every float format here, and a finite value
_BAND_BYTE = 0xA5
_NARROW = 64  # columns


@dataclass(frozen=True)
class GuardedOutput:
    """An output buffer [shape] in the middle of a larger one. ``tensor`` is what the kernel gets."""

    tensor: Tensor
    storage: Tensor

    @classmethod
    def allocate(cls, form: Output, device: torch.device) -> GuardedOutput:
        storage = torch.empty(form.nbytes + 2 * BAND, dtype=torch.uint8, device=device)
        inner = storage[BAND : BAND + form.nbytes]
        return cls(inner.view(form.dtype).view(form.shape), storage)

    def poison(self, which: int) -> None:
        """Fill the output with poison 0 or 1 and renew the bands."""
        self.storage[:BAND].fill_(_BAND_BYTE)
        self.storage[-BAND:].fill_(_BAND_BYTE)
        self.storage[BAND:-BAND].fill_(POISON_BYTES[which])

    def overrun(self) -> str | None:
        """Where the kernel wrote outside its output, or None."""
        for side, band in (("before", self.storage[:BAND]), ("after", self.storage[-BAND:])):
            touched = (band != _BAND_BYTE).nonzero().flatten()
            if len(touched):
                offset = int(touched[-1]) - BAND if side == "before" else int(touched[0])
                return f"{len(touched)} bytes changed {side} the output (nearest at byte offset {offset})"
        return None


def unwritten(output: Tensor, which: int) -> Tensor:
    """Mask [shape] of elements that still hold poison ``which`` in every byte."""
    size = output.element_size()
    return (output.contiguous().view(torch.uint8).view(*output.shape, size) == POISON_BYTES[which]).all(dim=-1)


def checksum(tensor: Tensor) -> int:
    """64 bits that move when a byte of ``tensor`` changes or a row moves: sums per row, weighted by row. Elements
    of narrow tensors (positions, weights) are rows of their own, so that moving one within its row is seen as well."""
    if not tensor.numel():
        return 0
    rows = tensor.reshape(tensor.shape[0], -1)
    if rows.shape[1] <= _NARROW:
        rows = rows.reshape(-1, 1)
    wide = rows.shape[1] * rows.element_size() % 8 == 0 and rows.is_contiguous() and rows.data_ptr() % 8 == 0
    words = rows.view(torch.int64) if wide else bits(rows)
    weight = torch.arange(1, 2 * len(rows), 2, dtype=torch.int64, device=rows.device)
    return int((words.sum(dim=1, dtype=torch.int64) * weight).sum())
