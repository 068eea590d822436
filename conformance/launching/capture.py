"""A kernel's launches as a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

from conformance.launching.raised import CaptureFailed, KernelRaised

T = TypeVar("T")


def captured(run: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """What ``run`` launches as a graph, and what it returned. Raises CaptureFailed."""
    graph, pool, raised = torch.cuda.CUDAGraph(), torch.cuda.MemPool(), None
    try:
        with torch.cuda.graph(graph, pool=pool.id):  # type: ignore[arg-type]  # torch's own way of naming a pool
            try:
                returned = run()
            except KernelRaised as error:
                raised = error.__cause__
                raise
    except Exception as error:  # of the end of the capture, when the kernel did not raise what spoiled it
        _end_allocating(device, pool)
        raise CaptureFailed from raised or error
    return graph, returned


def _end_allocating(device: torch.device, pool: torch.cuda.MemPool) -> None:
    """Undo what a failed capture leaves behind in torch: its allocator takes the capture for unfinished, and gives no
    memory of any kind back to the device. There is no public way."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with contextlib.suppress(RuntimeError):
            end(device.index or 0, pool.id)
