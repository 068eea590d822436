"""Calls on values that a kernel has never seen, between calls on values that it has: both must take as long.

Two draws that take turns are soon known. A kernel that finds a result by its inputs, by a few of their elements or by
what counts their versions, gives right results for both, in no time. So its largest argument is shifted along its rows
by another number of columns before each of a few calls: an input as valid as before, whose result it cannot know. One
of these results, no kernel can foresee which, is judged.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from conformance.bench.clock import Clock, Step, WrongWhenTimed
from conformance.bench.rotation import Place, Rotation
from conformance.formats import bits
from conformance.joint import Joint
from conformance.operator import Call, Shared
from conformance.registry import operator

CALLS = 5  # of either sort
SLOWER = 1.5  # the fastest new call over the slowest known one; their order is mixed, so that noise is in both
_chance = random.SystemRandom()


def check_novelty(rotation: Rotation, clock: Clock) -> None:
    """Raises WrongWhenTimed for a kernel that takes longer for new values, or has a wrong result for them."""
    known, place = rotation.places
    name = widest(place.draw.tensors)
    if name is None:
        return
    width = place.draw.tensors[name].shape[-1]
    shifts = _chance.sample(range(1, width), min(CALLS, width - 1))
    chosen = _chance.choice(shifts)
    kept: list[Any] = []
    steps = []
    for number, shift in enumerate(shifts):
        steps.append(rotation.step(known, number, False, _nobody))
        steps.append(_new(rotation, place, name, shift, kept.append if shift == chosen else _nobody))
    times = clock.times(steps)
    shifted = shifted_call(place.draw.call, name, chosen)
    joint = Joint.of(shifted, operator(shifted.case.operator).reference(shifted, Shared()))
    rotation.check(joint, kept[0], f"on values that it was not timed on ({name} shifted by {chosen} columns)")
    place.fill()
    rotation.settled()
    old, new = max(times[::2]), min(times[1::2])
    if new > SLOWER * old:
        raise WrongWhenTimed(f"calls on values that were never seen take {new / old:.1f} times as long as others "
                             f"({new:.3g} s and {old:.3g} s): it remembers results, or what it made of its inputs")


def _new(rotation: Rotation, place: Place, name: str, shift: int, keep: Callable[[Any], None]) -> Step:
    """A call on the place's draw with one argument shifted."""
    known = rotation.step(place, 0, False, _nobody)

    def before() -> None:
        bits(place.arguments[name]).copy_(shifted(place.draw.tensors[name], shift))
        known.before()

    def after(returned: Any) -> None:
        rotation.modes.put_back()
        keep({key: value.clone() if isinstance(value, Tensor) else value
              for key, value in rotation.results(place, returned).items()})

    return Step(before, known.call, after)


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


def _nobody(_: Any) -> None:
    pass
