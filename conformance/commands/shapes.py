"""The form of a case's arguments at sizes that would not fit in memory, or not in time.

The operator builds its inputs as ever, while every tensor over `LIMIT` bytes, and what is computed from it, exists
as a shape only (torch's meta device). Routing stays real, so token and slot counts are exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from conformance.case import Case
from conformance.operator import Call, Operator, Shared

LIMIT = 1 << 30  # bytes; above the scores that routing draws at a time


class _ShapesOnly(TorchDispatchMode):
    """Runs each operation on shapes first, and for real only when its results are small and all operands real."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {**(kwargs or {})}
        if kwargs.get("device") == torch.device("meta"):  # asked for "where x lies": small tensors stay real there
            kwargs["device"] = self._device
        abstract = any(_is_meta(leaf) for leaf in tree_leaves((args, kwargs)))
        try:
            shadow_args, shadow_kwargs = tree_map(_to_meta, (args, kwargs))
            shadow = func(*shadow_args, **shadow_kwargs)
        except (NotImplementedError, RuntimeError):  # the shape depends on the data: nonzero, item
            if abstract and func._schema.is_mutable and _is_meta(args[0]):
                return args[0]  # writing through a mask changes values only
            if abstract:
                raise
            return func(*args, **kwargs)
        if abstract or any(_is_meta(leaf) and leaf.nbytes > LIMIT for leaf in tree_leaves(shadow)):
            return shadow
        return func(*args, **kwargs)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, Tensor) and not _is_meta(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def call_form(contract: Operator, case: Case, sizes: str, device: torch.device) -> Call:
    """The call of a case whose large tensors are shapes only: never launch it, nor set its poison.

    Raises what ``contract.inputs`` raises, and RuntimeError when a shape depends on the values of a large tensor.
    """
    with _ShapesOnly(device):
        return contract.inputs(case, sizes, device, Shared())
