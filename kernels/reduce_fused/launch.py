"""From a checked call of the operator to a launch of a compiled specialisation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance import report_path
from kernels import tilelang_build
from kernels.reduce_fused.template import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def prepare(spec: Spec, build: Callable[[Spec], Any]) -> None:
    """Compile ``spec`` unless it is there or another process is at it."""
    tilelang_build.load(str(spec), spec.target, partial(build, spec), wait=False)


def launch(spec: Spec, build: Callable[[Spec], Any], x: Tensor, positions: Tensor, weights: Tensor | None,
           x_sf: Tensor | None, sf: Tensor | None, out: Tensor, *numbers: int) -> None:
    """Run ``spec`` on contiguous tensors that follow the operator's contract; ``numbers`` are what a kernel takes
    besides. No tokens: nothing is launched.

    Nothing is allocated and nothing waits for the device, so the launch can be captured in a CUDA graph.
    """
    import torch

    report_path(spec.path)
    if len(positions) == 0:
        return
    if len(x) == 0:  # no rows, so every slot is padding; an empty x may come without a pointer
        out.zero_()
        return
    device = x.device
    there = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    # Tensors that are not given are stood for by the positions; the flags keep the kernel from reading them.
    unread = positions.view(torch.float32)
    with there:
        kernel = tilelang_build.load(str(spec), spec.target, partial(build, spec))
        assert kernel is not None
        kernel(
            _stored(x, spec.source, spec),
            positions,
            unread if weights is None else weights,
            unread[0] if x_sf is None else x_sf,
            unread[0] if sf is None else sf,
            _stored(out, spec.result, spec),
            int(weights is not None), int(x_sf is not None), int(sf is not None), *numbers,
        )


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for the CPU."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _stored(tensor: Tensor, form: str, spec: Spec) -> Tensor:
    """The tensor as the dialect's kernel takes it: [rows, chunks, span], bit patterns where it has no such type."""
    import torch

    rows, hidden = tensor.shape
    if not spec.dialect.native(form):
        tensor = tensor.view(torch.uint8 if form == "e4m3" else torch.uint16)
    return tensor.view(rows, hidden // spec.span, spec.span)
