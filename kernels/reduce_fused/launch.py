"""From a checked call of the operator to a launch of a compiled specialisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance import report_path
from kernels import tilelang_build
from kernels.reduce_fused.template import Spec

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "e4m3": 1}


def form_of(tensor: Tensor) -> str:
    """Name of a float tensor's format, as case parameters spell it."""
    import torch

    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
            torch.float8_e4m3fn: "e4m3"}[tensor.dtype]


def target_of(device_type: str) -> str:
    return "cuda" if device_type == "cuda" else "c"


def options(config: str | None, known: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Parse "name:value-name:value". ValueError names what is not known and what is."""
    found: dict[str, str] = {}
    for part in config.split("-") if config else ():
        name, _, value = part.partition(":")
        if name not in known:
            raise ValueError(f"config {config!r} sets {name!r}; known: {', '.join(known)}")
        if value not in known[name]:
            raise ValueError(f"config {config!r} sets {name} to {value!r}; known: {', '.join(known[name])}")
        found[name] = value
    return found


def prepare(spec: Spec, build: Callable[[Spec], Any]) -> None:
    """Compile ``spec`` unless it is there or another process is at it."""
    tilelang_build.load(str(spec), spec.target, partial(build, spec), wait=False)


def launch(spec: Spec, build: Callable[[Spec], Any], x: Tensor, positions: Tensor, weights: Tensor | None,
           x_sf: Tensor | None, sf: Tensor | None, out: Tensor) -> None:
    """Run ``spec`` on contiguous tensors that follow the operator's contract. No tokens: nothing is launched.

    Nothing is allocated and nothing waits for the device, so the launch can be captured in a CUDA graph.
    """
    import torch

    report_path(spec.kernel)
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
            int(weights is not None), int(x_sf is not None), int(sf is not None),
        )


def _stored(tensor: Tensor, form: str, spec: Spec) -> Tensor:
    """The tensor as the dialect's kernel takes it: [rows, chunks, span], bit patterns on the C target."""
    import torch

    rows, hidden = tensor.shape
    if spec.target == "c" and form != "fp32":
        tensor = tensor.view(torch.uint8 if form == "e4m3" else torch.uint16)
    return tensor.view(rows, hidden // spec.span, spec.span)
