"""Calls on values that a kernel has never seen, strewn among the timed ones: both must take as long.

Two draws that take turns are soon known. A kernel that finds a result by its inputs, by a few of their elements or by
what counts their versions, gives right results for both, in no time. So before a few calls of each trial, no kernel can
foresee which, its largest argument is shifted along its rows by another number of columns: an input as valid as before,
whose result it cannot know. These calls are in no figure, and one of their results is judged.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from conformance.bench.clock import Step
from conformance.bench.rotation import Place, Rotation
from conformance.formats import bits
from conformance.operator import Call, Results, Shared
from conformance.registry import operator
from conformance.verdicts.joint import Joint

CALLS = 2  # of each trial
SLOWER = 1.5  # times what three quarters of the known calls take at most, which three quarters of the new ones exceed
_chance = random.SystemRandom()


@dataclass
class Novelty:
    """The new calls of one kernel on one case, ``planned`` in all."""

    rotation: Rotation
    planned: int
    _new: list[float] = field(default_factory=list)
    _known: list[float] = field(default_factory=list)
    _kept: tuple[Call, str, int, Results] | None = None

    def __post_init__(self) -> None:
        self._name = widest(self.rotation.draws[0].tensors)
        width = self.rotation.draws[0].tensors[self._name].shape[-1] if self._name is not None else 1
        self._shifts = _chance.sample(range(1, width), min(self.planned, width - 1))
        self._chosen = _chance.choice(self._shifts) if self._shifts else 0

    def strewn(self, steps: Sequence[Step]) -> tuple[list[Step], list[bool]]:
        """The steps of a trial with new ones among them, and which are new."""
        count = min(CALLS, len(self._shifts))
        new = [self._step(_chance.choice(self.rotation.places), self._shifts.pop()) for _ in range(count)]
        at = set(_chance.sample(range(1, len(steps) + count), count))  # the first one may do more than call
        known, others = iter(steps), iter(new)
        places = range(len(steps) + count)
        return [next(others) if place in at else next(known) for place in places], [place in at for place in places]

    def told(self, times: Sequence[float], new: Sequence[bool]) -> list[float]:
        """Take note of the times of a trial; those of the known calls."""
        known = [time for time, is_new in zip(times, new, strict=True) if not is_new]
        self._new += [time for time, is_new in zip(times, new, strict=True) if is_new]
        self._known += known
        return known

    def check(self) -> None:
        """When all trials are over: the result that was kept is judged. Raises WrongWhenTimed."""
        if self._kept is not None:
            call, name, shift, results = self._kept
            of = shifted_call(call, name, shift)
            joint = Joint.of(of, operator(of.case.operator).reference(of, Shared()))
            when = f"on values that it was not timed on ({name} shifted by {shift} columns)"
            self.rotation.check(joint, results, when)

    def slower(self) -> str | None:
        """What new calls that take longer than known ones say of the kernel; None where they do not."""
        if not self._new:
            return None
        new, known = sorted(self._new)[len(self._new) // 4], sorted(self._known)[len(self._known) * 3 // 4]
        if new <= SLOWER * known:
            return None
        return (f"calls on values that were never seen take {new / known:.1f} times as long as others ({new:.3g} s and "
                f"{known:.3g} s): it remembers results, or what it made of its inputs")

    def _step(self, place: Place, shift: int) -> Step:
        """A call on the place's draw with one argument shifted, which is put back after it."""
        name = self._name
        assert name is not None

        def before() -> None:
            bits(place.arguments[name]).copy_(shifted(place.draw.tensors[name], shift))
            self.rotation.poison(place, shift % 2)

        def after(returned: Any) -> None:
            self.rotation.modes.put_back()
            if shift == self._chosen:
                results = self.rotation.results(place, returned)
                self._kept = place.draw.call, name, shift, {
                    key: value.clone() if isinstance(value, Tensor) else value for key, value in results.items()}
            place.arguments[name].copy_(place.draw.tensors[name])

        return Step(before, place.call, after)


def widest(tensors: dict[str, Tensor]) -> str | None:
    """The argument that is shifted: of those that hold numbers, rather than ids or masks, the largest."""
    numbers = {name: value for name, value in tensors.items()
               if (value.is_floating_point() or value.dtype == torch.int8) and value.dim() and value.shape[-1] > 1}
    return max(numbers, key=lambda name: numbers[name].numel(), default=None)


def shifted(value: Tensor, columns: int) -> Tensor:
    """The bits of a tensor, each row turned by some columns; whole rows stay what they are, poison among them."""
    return bits(value).roll(columns, dims=-1)


def shifted_call(call: Call, name: str, columns: int) -> Call:
    """The call with one argument shifted."""
    value = call.arguments[name]
    return replace(call, arguments={**call.arguments, name: shifted(value, columns).view(value.dtype)})
