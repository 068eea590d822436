"""Guards around one call: poison in the output, bands on both sides of it, inputs that stay where they are."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conformance.data.layouts import BAND
from conformance.operator import ONLY, Call, Output, Results

POISON_BYTES = (0xFF, 0x5A, 0x3C)  # NaN in every float format here, a finite value, and a small one for diagnosis


@dataclass(frozen=True)
class GuardedOutput:
    """An output buffer [shape] in the middle of a larger one. ``tensor`` is what the kernel gets."""

    tensor: Tensor
    storage: Tensor

    @classmethod
    def allocate(cls, form: Output, device: torch.device) -> GuardedOutput:
        shape = (*form.shape[:-1], form.shape[-1] + form.gap)
        count = math.prod(shape) * form.dtype.itemsize
        storage = torch.empty(count + 2 * BAND, dtype=torch.uint8, device=device)
        inner = storage[BAND : BAND + count].view(form.dtype).view(shape)
        return cls(inner[..., : form.shape[-1]] if form.gap else inner, storage)

    def poison(self, which: int) -> None:
        """Fill the output, gaps between its rows included, with poison 0 or 1 and renew the bands."""
        self.storage[:BAND] = self.storage[-BAND:] = _band(self.storage.device)
        self.storage[BAND:-BAND].fill_(POISON_BYTES[which])

    @property
    def moved(self) -> bool:
        """Whether the tensor was made to point at other memory."""
        return bool(self.tensor.numel()) and self.tensor.data_ptr() != self.storage.data_ptr() + BAND

    def touched(self, which: int) -> Tensor:
        """bool [], on the device, which is not waited for: whether anything outside the output is not as
        ``poison(which)`` left it."""
        return torch.cat([mask.flatten() for mask in self._changed(which).values()]).any()

    def overrun(self, which: int) -> str | None:
        """Where the kernel wrote outside its output since ``poison(which)``, or None."""
        if not bool(self.touched(which)):  # the device is waited for once
            return None
        changed = self._changed(which)
        for side in ("before", "after"):
            if len(touched := changed[side].nonzero().flatten()):
                offset = int(touched[-1]) - BAND if side == "before" else int(touched[0])
                return f"{len(touched)} bytes changed {side} the output (nearest at byte offset {offset})"
        return f"{int(changed['between'].sum())} bytes changed between the output's rows"

    def _changed(self, which: int) -> dict[str, Tensor]:
        """Masks of the bytes in each band and between the rows."""
        whole = _band(self.storage.device)
        found = {"before": self.storage[:BAND] != whole, "after": self.storage[-BAND:] != whole}
        inside = len(self.storage) - 2 * BAND
        if inside > self.tensor.numel() * self.tensor.element_size():  # of one row, too, which is contiguous
            rows = self.storage[BAND:-BAND].view(self.tensor.shape[0], -1)
            found["between"] = rows[:, self.tensor.shape[-1] * self.tensor.element_size() :] != POISON_BYTES[which]
        return found


@dataclass(frozen=True)
class Buffers:
    """The guarded outputs of one call, by name."""

    by_name: Mapping[str, GuardedOutput]

    @classmethod
    def allocate(cls, call: Call, device: torch.device) -> Buffers:
        return cls({name: GuardedOutput.allocate(form, device) for name, form in call.outputs.items()})

    def tensors(self) -> Tensor | Results:
        """The one output, or the outputs by name; tensors made anew, so that who gets them cannot change ours."""
        only = self.by_name.get(ONLY)
        return only.tensor.detach() if only else {name: one.tensor.detach() for name, one in self.by_name.items()}

    def poison(self, which: int) -> None:
        for one in self.by_name.values():
            one.poison(which)

    def touched(self, which: int) -> Tensor:
        """bool [], on the device, which is not waited for: whether ``damage(which)`` is something."""
        return torch.stack([one.touched(which) | one.moved for one in self.by_name.values()]).any()

    def damage(self, which: int) -> str | None:
        """What was done to a buffer since ``poison(which)`` that must not be done, or None."""
        for name, one in self.by_name.items():
            if one.moved:
                return f"the tensor given as {name} was made to point at other memory"
            if (found := one.overrun(which)) is not None:
                return found if name == ONLY else f"{name}: {found}"
        return None


@dataclass(frozen=True)
class Storages:
    """The memory behind some tensors, by name: where it lies, and how many bytes it is."""

    known: Mapping[str, tuple[torch.UntypedStorage, int, int]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Storages:
        behind = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
        return cls({name: (one, one.data_ptr(), one.nbytes()) for name, one in behind.items()})

    def changed(self) -> str | None:
        """Which of them has other memory now: it was freed or resized, and its tensors with it. Else None."""
        for name, (storage, place, size) in self.known.items():
            if storage.nbytes() != size:
                return f"resized the storage behind {name} from {size} to {storage.nbytes()} bytes"
            if storage.data_ptr() != place:
                return f"gave the storage behind {name} other memory"
        return None


@functools.cache
def _band(device: torch.device) -> Tensor:
    """What stands in the bands: no constant, so that no single byte written there goes unseen for long."""
    return ((torch.arange(BAND, device=device) * 37 + 11) % 251).to(torch.uint8)


def memory_lost(tensor: Tensor) -> str | None:
    """That a strided tensor's storage does not hold all of it any more, in words; to read it would end the process."""
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size() if tensor.numel() else 0
    there = tensor.untyped_storage().nbytes()
    return f"its storage has {there} bytes and its elements need {needed}: it was freed" if there < needed else None


def unwritten(output: Tensor, which: int) -> Tensor:
    """Mask [shape] of elements that still hold poison ``which`` in every byte."""
    size = output.element_size()
    return (output.contiguous().view(torch.uint8).view(*output.shape, size) == POISON_BYTES[which]).all(dim=-1)


def shares_memory(result: Tensor, arguments: Mapping[str, Any]) -> str | None:
    """The input whose storage the result lies in, or None."""
    here = result.untyped_storage().data_ptr()
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    return next((name for name, value in tensors.items() if value.untyped_storage().data_ptr() == here), None)
