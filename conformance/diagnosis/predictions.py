"""What faulty semantics predict for one call, kept for the next kernel that fails on it.

To predict is most of the work of a diagnosis, and says nothing of the kernel: forty mutants that fail on one case are
held to the same hundred predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from conformance.diagnosis.evidence import Evidence
from conformance.operator import Call, Fault, FaultyOutputs, Results

_MOST_ELEMENTS = 1 << 22  # kept for one call, whatever its size


class Predictions:
    """Of one call. A prediction depends on the fault, on the poison in the call's inputs, and on the columns."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self._elements = 0

    def of_columns(self, fault: Fault, evidence: Evidence) -> Tensor | None:
        """[T, C], what ``fault`` predicts for the evidence's columns; its poison stands in the inputs."""
        found: Tensor | None = self._get((fault, evidence.poison, evidence.places),
                                         lambda: fault.predict(evidence.call, evidence.columns))
        return found

    def of_outputs(self, fault: FaultyOutputs, call: Call, poison: int) -> Results | None:
        """All outputs as ``fault`` predicts them; ``poison`` is the number of that in the inputs."""
        found: Results | None = self._get((fault, poison), lambda: fault.predict(call))
        return found

    def _get(self, key: Hashable, predict: Callable[[], Tensor | Results | None]) -> Any:
        if key in self._known:
            return self._known[key]
        found = predict()
        parts = () if found is None else (found,) if isinstance(found, Tensor) else found.values()
        size = sum(part.numel() for part in parts)
        if self._elements + size <= _MOST_ELEMENTS:
            self._known[key] = found
            self._elements += size
        return found
