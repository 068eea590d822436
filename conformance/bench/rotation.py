"""Two draws of a case that take turns in two places of memory, and the check of every timed call's result.

Between trials the draws change places: the same addresses then hold other values, so that a kernel which remembers a
result returns a wrong one. Each call finds poison in its output, so that one which writes nothing is seen as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.bench.clock import Step
from conformance.case import Case
from conformance.guards import Buffers
from conformance.joint import Joint
from conformance.kernel import Kernel
from conformance.operator import ONLY, Call, Operator, Results, Shared

_POISONS = 2


class WrongWhenTimed(Exception):
    """A kernel that was right when it was judged gave a wrong result when it was timed."""


@dataclass(frozen=True)
class Draw:
    """One set of inputs with its references. ``expected``: a result that was judged right, by name of the output."""

    joint: Joint
    expected: Results | None = None

    @property
    def call(self) -> Call:
        return self.joint.call


@dataclass
class Place:
    """Memory of one call: arguments at fixed addresses, an output, and the kernel bound to both."""

    arguments: dict[str, Any]
    out: Buffers
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
    return Draw(Joint.of(call, operator.reference(call, shared)))


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
            out = Buffers.allocate(draw.call, self.device)
            out.poison(0)
            returned, ran = self.kernel.run(draw.call.arguments, out.tensors(), self.config)
            results = self._results(draw, out, returned)
            self._check(draw, results, "before the timed calls")
            repeats = self.kernel.repeats(draw.call.case.params)
            expected = {name: one.clone() for name, one in results.items()} if repeats else None
            judged.append(Draw(draw.joint, expected))
        self.draws = judged
        return ran

    def settle(self) -> None:
        """Take new memory for both places and put a draw into each."""
        self.places.clear()
        for draw in self.draws:
            arguments = {name: value.clone() if isinstance(value, Tensor) else value
                         for name, value in draw.call.arguments.items()}
            out = Buffers.allocate(draw.call, self.device)
            call = self.kernel.bound(arguments, out.tensors(), self.config)
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
                Buffers.allocate(place.draw.call, self.device).poison(place.poison)

        def after(returned: Any) -> None:
            every(number)
            results = self._results(place.draw, place.out, returned)
            self._compare(place.draw, results, f"timed call {number + 1}")
            if last and (damage := place.out.damage(place.poison) if self.kernel.fills_out else None):
                raise WrongWhenTimed(f"timed call {number + 1}: {damage}")
            if last and place.draw.expected is None:
                self._check(place.draw, results, "after the timed calls")

        return Step(before, place.call, after)

    def _results(self, draw: Draw, out: Buffers, returned: Any) -> Results:
        """By name: what stands in the outputs, or what the kernel returned."""
        value: Any = out.tensors() if self.kernel.fills_out else self.kernel.named(returned)
        several = isinstance(draw.call.form, Mapping) and isinstance(value, Mapping)
        return value if several else {ONLY: value}

    def _compare(self, draw: Draw, results: Results, when: str) -> None:
        """Bit by bit with the judged result, where the kernel repeats its bits."""
        if draw.expected is None:
            return
        if problem := draw.joint.problem(results, self.device, self.kernel.fills_out):
            raise WrongWhenTimed(f"{when}: {problem}")
        if (found := draw.joint.difference(draw.expected, results)) is not None:
            name, differs = found
            where = "" if name == ONLY else f" of {name}"
            raise WrongWhenTimed(f"{when}: {int(differs.sum())} of {differs.numel()} elements{where} differ from the "
                                 f"judged result, first at {differs.nonzero()[0].tolist()}")

    def _check(self, draw: Draw, results: Results, when: str) -> None:
        """Against the reference."""
        if problem := draw.joint.problem(results, self.device, self.kernel.fills_out):
            raise WrongWhenTimed(f"{when}: {problem}")
        verdict, _ = draw.joint.judge(results, self.kernel.promise)
        if not verdict.passed:
            raise WrongWhenTimed(f"{when}: {verdict.message}")


def _forms(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
            for name, value in arguments.items()}
