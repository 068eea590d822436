"""Where no result may depend on what stands: weights no token uses, ids past the valid rows, weights of padding.

Poison 0 spreads: NaN, and ids and experts that are valid elsewhere, so that a block that should have stopped adds
once more. Poison 1 is finite: large numbers, the sentinel, no expert. Poison 2 is for diagnosis: finite, and differs
from place to place, so that it tells what was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from references.moe_gemm_2stage.sorting import TOKEN_BITS, Sorted, sentinel

_FLOATS = (math.nan, 30000.0)
_BYTES = {torch.float8_e4m3fn: (0x7F, 0x7E), torch.float8_e4m3fnuz: (0x80, 0x7F)}
_INTEGERS = {torch.int8: (-128, 127), torch.uint8: (0x88, 0x77)}
_SCALES = (0xFF, 0x90)  # of e8m0: NaN and 2^17
_KINDS = 7  # of rows in poison 2


@dataclass(frozen=True)
class Place:
    """Elements of a tensor, by a mask of its leading axes or a range of its first. ``e8m0``: they are scales."""

    tensor: Tensor
    where: Tensor | slice
    e8m0: bool = False

    def fill(self, which: int) -> None:
        tensor = self.tensor
        if which == 2:
            self._tell_apart()
        elif self.e8m0:
            tensor[self.where] = _SCALES[which]
        elif tensor.dtype in _BYTES:
            tensor.view(torch.uint8)[self.where] = _BYTES[tensor.dtype][which]
        elif tensor.dtype in _INTEGERS:
            tensor[self.where] = _INTEGERS[tensor.dtype][which]
        else:
            tensor[self.where] = _FLOATS[which]

    def _tell_apart(self) -> None:
        """Rows hold numbers from 0.5 to 2, or small integers, that differ from their neighbours'."""
        raw = self.tensor.view(torch.uint8) if self.tensor.dtype in _BYTES else self.tensor
        rows = raw[self.where]
        kind = torch.arange(len(rows), device=raw.device).view(-1, *[1] * (rows.dim() - 1)) % _KINDS
        first = 0x30 if self.tensor.dtype in _BYTES else 0x7C if self.e8m0 else 1
        raw[self.where] = (0.5 + kind / 4 if raw.is_floating_point() else first + kind).to(raw.dtype).expand(rows.shape)


def setter(places: list[Place], routes: Sorted, tokens: int, topk: int, state: dict[str, int]) -> Callable[[int], None]:
    """The call's ``set_poison``. ``state`` tells, over all calls that share the tensors, which poison stands there:
    what stands already is not written again, so that a kernel's own writes show in the checksum."""
    rows, blocks = routes.valid_rows, routes.valid_rows // routes.block
    pad = sentinel(tokens, topk)
    padding = Place(routes.weights, routes.token_ids == pad)

    def set_poison(which: int) -> None:
        if state.get("now") == which:
            return
        for place in (padding, *places):
            place.fill(which)
        tail = routes.token_ids[rows:]
        if which == 0 and tokens:
            count = torch.arange(len(tail), device=tail.device)
            tail.copy_((count % topk << TOKEN_BITS) | count % tokens)
            routes.expert_ids[blocks:] = 0
        else:
            tail.fill_(pad)
            routes.expert_ids[blocks:] = -1
        state["now"] = which

    return set_poison
