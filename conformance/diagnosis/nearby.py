"""A small failure of a GPU, brought to the CPU: a diagnosis is thousands of short steps, most of which wait for the
result of the one before, and on a card that several processes use each wait takes milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from conformance.diagnosis.evidence import Evidence
from conformance.diagnosis.exact import Observed
from conformance.operator import Call

_MOST_BYTES = 64 << 20  # of a call's arguments; larger ones stay where they are


def brought(call: Call) -> Call | None:
    """The call on the CPU. Its ``set_poison`` puts the poison into the call's own arguments and copies them anew.

    None where nothing would be won, and where it matters how arguments lie in memory.
    """
    tensors = _tensors(call.arguments)
    if not any(map(_far, tensors.values())) or not all(value.is_contiguous() for value in tensors.values()) or (
            sum(value.untyped_storage().nbytes() for value in tensors.values()) > _MOST_BYTES):
        return None
    copies = {name: _copy(value) for name, value in tensors.items()}

    def set_poison(which: int) -> None:
        call.set_poison(which)
        for name, copy in copies.items():
            copy.copy_(tensors[name])

    return replace(call, arguments={**call.arguments, **copies}, set_poison=set_poison)


def brought_evidence(observed: Sequence[Evidence]) -> Sequence[Evidence]:
    """All evidence of one call, there too where the call is brought."""
    if (call := brought(observed[0].call)) is None:
        return observed
    return [replace(one, call=call, **_tensors({field.name: getattr(one, field.name) for field in fields(one)}, True))
            for one in observed]


def brought_outputs(call: Call, launches: Sequence[Observed]) -> tuple[Call, Sequence[Observed]]:
    """The same of outputs whose every bit is fixed."""
    if (near := brought(call)) is None:
        return call, launches
    return near, [Observed(_tensors(one.results, True), {
        name: replace(reference, **_tensors({"golden": reference.golden, "open": reference.open}, True))
        for name, reference in one.references.items()}, one.poison) for one in launches]


def _tensors(values: Any, copied: bool = False) -> dict[str, Any]:
    found: Iterable[tuple[str, Any]] = ((name, one) for name, one in values.items() if isinstance(one, Tensor))
    return {name: _copy(one) if copied else one for name, one in found}


def _copy(value: Tensor) -> Tensor:
    return value.to("cpu", copy=True)


def _far(value: Tensor) -> bool:
    return value.device.type != "cpu"
