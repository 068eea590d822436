"""The golden's budget fraction in one pass over memory, by a Triton kernel, where PyTorch's operations take ten.

No verdict rests on it: it is a figure of results that have the golden's bits. Where it cannot tell, `measurement` does.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from conformance.formats import Format, format_of
from conformance.operator import OracleRows, Reference

_BLOCK = 1024  # elements


def begin(reference: Reference) -> Callable[[], float | None]:
    """Begin to measure the golden's largest budget fraction, and give a function that waits for it; it gives None on a
    CPU, without Triton, and where an element is not finite or over its budget. The formula is that of
    `measurement.element_errors`."""
    golden = reference.golden
    form, kernel = format_of(golden.dtype), _kernel() if golden.is_cuda and golden.numel() else None
    if kernel is None or form is None or reference.exact or not golden.is_contiguous():
        return lambda: None
    parts: list[Tensor] = []
    with torch.cuda.device(golden.device):
        for rows in reference.oracle():
            if not (rows.value.is_contiguous() and rows.error.is_contiguous()):
                return lambda: None
            try:
                parts.append(_worst(kernel, golden[rows.start : rows.stop], rows, form))
            except Exception:  # a compiler that is missing, a card that it does not know: PyTorch can do it as well
                return lambda: None
        largest = torch.stack(parts).max()

    def read() -> float | None:
        worst = float(largest)
        return worst if worst <= 1.0 else None

    return read


def _worst(kernel: Any, golden: Tensor, rows: OracleRows, form: Format) -> Tensor:
    """fp64 [], on the device, which is not waited for."""
    saturates = form.name == "e4m3"
    golden = golden.float() if saturates else golden  # not every card that Triton knows has this type
    blocks = -(-golden.numel() // _BLOCK)
    worst = torch.empty(blocks, dtype=torch.float64, device=golden.device)
    kernel[(blocks,)](golden, rows.value, rows.error, worst, golden.numel(), 2.0**-form.precision,
                      2.0**form.minimum_exponent, form.maximum if saturates else math.inf, BLOCK=_BLOCK)
    return worst.max()


@functools.cache
def _kernel() -> Any:
    """None where Triton is not installed or cannot be imported."""
    with contextlib.suppress(Exception):
        from conformance.verdicts.fused_triton import worst_of_blocks

        return worst_of_blocks
    return None
