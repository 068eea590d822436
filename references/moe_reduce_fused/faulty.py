"""moe_reduce_fused computed with a fault: what a wrong kernel would return for some columns of a call.

It shares no code with the golden and with no kernel. Sums are taken in fp64, so a prediction is as near to a kernel's
result as that kernel's own roundings allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.formats import cast
from conformance.operator import Call, Fault


@dataclass(frozen=True)
class Reading:
    """How a kernel reads a call, and in which precision it computes. Right as ``read`` makes it; a fault changes it.

    x [E, H] in its dtype; columns int64 [C]: those asked for. positions int32 [T, K]. index int64 [T, K] and valid bool
    [T, K]: rows that slots read, and which count. weights [T, K], x_sf [E], row_scale [T, K] in the place of
    x_sf[index], sf [1]: fp32 or None. widen: rows to fp32. product, accumulator: dtypes that terms and sums are rounded
    to. before_sf, after: changes of the sum fp32 [T, C].
    """

    x: Tensor
    columns: Tensor
    positions: Tensor
    index: Tensor
    valid: Tensor
    weights: Tensor | None
    x_sf: Tensor | None
    sf: Tensor | None
    dtype: torch.dtype
    row_scale: Tensor | None = None
    widen: Callable[[Tensor], Tensor] = Tensor.float
    product: torch.dtype | None = None
    accumulator: torch.dtype | None = None
    before_sf: Callable[[Tensor], Tensor] | None = None
    after: Callable[[Tensor], Tensor] | None = None

    @property
    def empty(self) -> Tensor:
        return (self.positions < 0).all(dim=1, keepdim=True)

    @property
    def scales(self) -> Tensor | None:
        """fp32 [T, K]: what multiplies each slot's row."""
        row_scale = self.row_scale
        if row_scale is None and self.x_sf is not None:
            row_scale = self.x_sf[self.index]
        if self.weights is None or row_scale is None:
            return self.weights if row_scale is None else row_scale
        return self.weights * row_scale


Change = Callable[[Reading], "Reading | None"]


def read(call: Call, columns: Tensor) -> Reading:
    """The right reading of a call, for these columns (int64 [C])."""
    given = call.arguments
    positions = given["token_topk_to_pos"]
    return Reading(given["x"], columns, positions, positions.clamp(min=0).long(), positions >= 0,
                   given["topk_weights"], given["x_sf"], given["sf"], call.output.dtype)


def compute(reading: Reading) -> Tensor:
    """[T, C] in the output's dtype."""
    rows = reading.widen(reading.x[reading.index[..., None], reading.columns])
    scales = reading.scales
    terms = rows.double() if scales is None else rows.double() * scales.double()[..., None]
    terms = terms.masked_fill(~reading.valid[..., None], 0.0)
    if reading.product is None and reading.accumulator is None:
        total = terms.sum(dim=1).float()
    else:
        total = torch.zeros_like(terms[:, 0], dtype=torch.float32)
        for slot in range(terms.shape[1]):
            term = terms[:, slot] if reading.product is None else terms[:, slot].float().to(reading.product).double()
            after = (total.double() + term).float()
            total = after if reading.accumulator is None else after.to(reading.accumulator).float()
    if reading.before_sf is not None:
        total = reading.before_sf(total)
    if reading.sf is not None:
        total = (total * reading.sf).masked_fill(reading.empty, 0.0)
    return cast(total if reading.after is None else reading.after(total), reading.dtype)


def fault(key: str, sentence: str, change: Change) -> Fault:
    """The fault whose reading of a call ``change`` makes from the right one; None where it changes nothing."""

    def predict(call: Call, columns: Tensor) -> Tensor | None:
        if not len(call.arguments["x"]):
            return None
        reading = change(read(call, columns))
        return None if reading is None else compute(reading)

    return Fault(key, sentence, predict)


def whole(key: str, sentence: str, remember: Callable[[Call], Tensor | None]) -> Fault:
    """A fault in how x lies in memory: ``remember(call)`` is the x [E, H] that the kernel takes it for."""

    def predict(call: Call, columns: Tensor) -> Tensor | None:
        x = remember(call)
        return None if x is None else compute(replace(read(call, columns), x=x))

    return Fault(key, sentence, predict)
