"""Whether a kernel wrote to the memory of the reference: golden, exact result, error budget, and what the cases of a
group share of them. A stray write there would make a wrong kernel right, or the next kernel wrong."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import Tensor

from conformance.launching.snapshot import Snapshot, Watched
from conformance.operator import ONLY, OracleRows, References, Shared


class ReferenceGuard:
    """Remembers what each tensor was when it was first seen, for as long as it lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Snapshot]] = {}

    def watch(self, references: References, shared: Shared) -> None:
        """Before a kernel runs: look at what is there and was not seen yet."""
        here = {key: tensor for key, (_, tensor) in _by_id(references, shared).items()}
        kept = {key: entry for key, entry in self._known.items() if key in here and entry[0]() is here[key]}
        new = {key: (weakref.ref(tensor), Snapshot.of(tensor)) for key, tensor in here.items() if key not in kept}
        self._known = kept | new

    def watched(self, references: References, shared: Shared) -> list[Watched]:
        """What is there and was seen before."""
        here = _by_id(references, shared)
        return [Watched(here[key][0], snapshot, here[key][1]) for key, (of, snapshot) in self._known.items()
                if key in here and of() is here[key][1]]


def _by_id(references: References, shared: Shared) -> dict[int, tuple[str, Tensor]]:
    """Name and tensor, the first name of each."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _tensors(references, shared):
        found.setdefault(id(tensor), (name, tensor))
    return found


def _tensors(references: References, shared: Shared) -> Iterator[tuple[str, Tensor]]:
    for name, reference in references.of.items():
        yield "golden" if name == ONLY else f"golden of {name}", reference.golden
    for slot, value in shared.latest_values():
        if isinstance(value, Tensor):
            yield slot, value
        elif isinstance(value, (list, tuple)):
            for rows in value:
                if isinstance(rows, OracleRows):
                    yield "exact result", rows.value
                    yield "error budget", rows.error
