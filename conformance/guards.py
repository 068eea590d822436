"""Guards around one call: poison in the output, bands on both sides of it, checksums of the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.operator import Output

BAND = 4096  # bytes on each side; keeps the output 16-byte (and 4 KiB) aligned within its storage
POISON_BYTES = (0xFF, 0x5A)  # NaN in every float format here, and a finite value
_BAND_BYTE = 0xA5


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
        self.storage.fill_(_BAND_BYTE)
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


def checksum(arguments: Mapping[str, object]) -> dict[str, int]:
    """A 64-bit sum per tensor that moves when a byte or a row changes (sums per row, weighted by row)."""
    return {name: _row_sum(value) for name, value in arguments.items() if isinstance(value, Tensor) and value.numel()}


def _row_sum(tensor: Tensor) -> int:
    words = tensor.view(torch.int32) if tensor.element_size() == 4 else tensor.view(torch.int16)
    rows = words.reshape(words.shape[0], -1).sum(dim=1, dtype=torch.int64)
    weight = torch.arange(1, len(rows) + 1, dtype=torch.int64, device=rows.device) * 2 + 1
    return int((rows * weight).sum())
