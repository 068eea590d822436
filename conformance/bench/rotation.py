"""Two draws of a case that take turns in two places of memory, and the check of every timed call's result.

Between trials the draws change places: the same addresses then hold other values, so that a kernel which remembers a
result returns a wrong one. Each call finds poison in its output, so that one which writes nothing is seen as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.bench.clock import Step
from conformance.case import Case
from conformance.formats import bits
from conformance.guards import GuardedOutput
from conformance.kernel import Kernel
from conformance.operator import Call, Operator, Reference, Shared
from conformance.verdict import check_form, golden_fraction, judge

_POISONS = 2


class WrongWhenTimed(Exception):
    """A kernel that was right when it was judged gave a wrong result when it was timed."""


@dataclass(frozen=True)
class Draw:
    """One set of inputs with its reference. ``expected``: the bits of a result that was judged right."""

    call: Call
    reference: Reference
    fraction: float
    expected: Tensor | None = None


@dataclass
class Place:
    """Memory of one call: arguments at fixed addresses, an output, and the kernel bound to both."""

    arguments: dict[str, Any]
    out: GuardedOutput
    call: Callable[[], Any]
    draw: Draw
    poison: int = 0


def other_draw(case: Case) -> Case:
    """The case with other values; its shapes are the same where the operator draws them from other parameters."""
    return Case(case.operator, {**case.params, "turn": "2"}, case.family, case.tiers)


def drawn(operator: Operator, case: Case, sizes: str, device: torch.device, shared: Shared) -> Draw:
    """The inputs of a case and their reference."""
    call = operator.inputs(case, sizes, device, shared)
    call.set_poison(0)
    reference = operator.reference(call, shared)
    return Draw(call, reference, golden_fraction(reference))


@dataclass
class Rotation:
    """A kernel, two draws, and the places they take turns in. ``config`` forces a configuration of the kernel."""

    kernel: Kernel
    draws: Sequence[Draw]
    device: torch.device
    config: str | None = None
    places: list[Place] = field(default_factory=list)

    @property
    def exchangeable(self) -> bool:
        """Whether the draws have the same forms, so that each fits where the other was."""
        first, second = (_forms(draw.call.arguments) for draw in self.draws)
        return first == second

    def judge(self) -> str | None:
        """Run each draw once and judge it; its bits are expected from then on. Returns the path that ran.

        Raises WrongWhenTimed for a wrong result.
        """
        ran: str | None = None
        judged = []
        for draw in self.draws:
            out = GuardedOutput.allocate(draw.call.output, self.device)
            out.poison(0)
            result, ran = self.kernel.run(draw.call.arguments, out.tensor, self.config)
            result = out.tensor if self.kernel.fills_out else result
            self._check(draw, result, "before the timed calls")
            repeats = self.kernel.repeats(draw.call.case.params)
            judged.append(Draw(draw.call, draw.reference, draw.fraction, bits(result).clone() if repeats else None))
        self.draws = judged
        return ran

    def settle(self) -> None:
        """Take new memory for both places and put a draw into each."""
        self.places.clear()
        for draw in self.draws:
            arguments = {name: value.clone() if isinstance(value, Tensor) else value
                         for name, value in draw.call.arguments.items()}
            out = GuardedOutput.allocate(draw.call.output, self.device)
            call = self.kernel.bound(arguments, out.tensor.detach(), self.config)
            self.places.append(Place(arguments, out, call, draw))

    def exchange(self) -> None:
        """Let the draws change places, where they can."""
        if not self.exchangeable:
            return
        for place, draw in zip(self.places, [place.draw for place in reversed(self.places)], strict=True):
            place.draw = draw
            for name, value in draw.call.arguments.items():
                if isinstance(value, Tensor):
                    place.arguments[name].copy_(value)

    def steps(self, count: int, every: Callable[[int], None]) -> list[Step]:
        """``count`` calls, the places in turn. ``every`` is called with a number while that call may be running."""
        return [self._step(self.places[number % len(self.places)], number, count, every) for number in range(count)]

    def _step(self, place: Place, number: int, count: int, every: Callable[[int], None]) -> Step:
        last = number >= count - len(self.places)

        def before() -> None:
            place.poison = number // len(self.places) % _POISONS
            if self.kernel.fills_out:
                place.out.poison(place.poison)
            else:  # what it allocates for its result is poison, rather than an earlier right result
                GuardedOutput.allocate(place.draw.call.output, self.device).poison(place.poison)

        def after(result: Any) -> None:
            every(number)
            self._compare(place, place.out.tensor if self.kernel.fills_out else result, f"timed call {number + 1}")
            if last and (damage := place.out.overrun(place.poison) if self.kernel.fills_out else None):
                raise WrongWhenTimed(f"timed call {number + 1}: {damage}")
            if last and place.draw.expected is None:
                self._check(place.draw, place.out.tensor if self.kernel.fills_out else result, "after the timed calls")

        return Step(before, place.call, after)

    def _compare(self, place: Place, result: Any, when: str) -> None:
        """Bit by bit with the judged result, where the kernel repeats its bits."""
        expected = place.draw.expected
        if expected is None:
            return
        if problem := check_form(result, place.draw.call.output, self.device, self.kernel.fills_out):
            raise WrongWhenTimed(f"{when}: {problem}")
        if not torch.equal(bits(result), expected):
            differs = bits(result) != expected
            raise WrongWhenTimed(f"{when}: {int(differs.sum())} of {differs.numel()} elements differ from the judged "
                                 f"result, first at {differs.nonzero()[0].tolist()}")

    def _check(self, draw: Draw, result: Any, when: str) -> None:
        """Against the reference."""
        if problem := check_form(result, draw.call.output, self.device, self.kernel.fills_out):
            raise WrongWhenTimed(f"{when}: {problem}")
        verdict = judge(result, draw.call, draw.reference, self.kernel.promise, draw.fraction)
        if not verdict.passed:
            raise WrongWhenTimed(f"{when}: {verdict.message}")


def _forms(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
            for name, value in arguments.items()}
