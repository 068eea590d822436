"""Two draws of a case that take turns in two places of memory, and the check of every timed call's result.

Between trials the draws change places: the same addresses then hold other values, so that a kernel which remembers a
result returns a wrong one. Each call finds poison in its output, so that one which writes nothing is seen as well.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance.bench.clock import Step, WrongWhenTimed
from conformance.bench.compare import Findings
from conformance.case import Case
from conformance.kernel import Kernel
from conformance.launching.guards import Buffers
from conformance.launching.torch_settings import Modes
from conformance.operator import ONLY, Call, Operator, Results, Shared
from conformance.verdicts.joint import Joint

_POISONS = 2
_chance = random.SystemRandom()  # no kernel can foresee it, nor set its seed


@dataclass(frozen=True)
class Draw:
    """One set of inputs with its references. ``expected``: a result that was judged right, by name of the output."""

    joint: Joint
    expected: Results | None = None

    @property
    def call(self) -> Call:
        return self.joint.call

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The arguments that are tensors, which no kernel is given: it gets copies."""
        return {name: value for name, value in self.call.arguments.items() if isinstance(value, Tensor)}


@dataclass
class Place:
    """Memory of one call: arguments at fixed addresses, an output, and the kernel bound to both."""

    arguments: dict[str, Any]
    out: Buffers
    call: Callable[[], Any]
    draw: Draw
    poison: int = 0

    def fill(self) -> None:
        """Put the draw's values into the arguments."""
        for name, value in self.draw.tensors.items():
            self.arguments[name].copy_(value)


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
    findings: Findings = field(default_factory=Findings)
    modes: Modes = field(default_factory=Modes.now)  # to be put back after each call

    @functools.cached_property
    def exchangeable(self) -> bool:
        """Whether the draws have the same forms, so that each fits where the other was."""
        first, second = (_forms(draw.call.arguments) for draw in self.draws)
        return first == second

    @functools.cached_property
    def repeats(self) -> bool:
        """Whether the kernel must give the same bits for the same draw."""
        return self.kernel.repeats(self.draws[0].call.case.params)

    def judge(self) -> None:
        """Run each draw once, on memory of its own, and judge it; its bits are expected from then on.

        Raises WrongWhenTimed for a wrong result.
        """
        self.settle()
        judged = []
        for place in self.places:
            place.out.poison(0)
            returned, _ = self.kernel.run(place.arguments, place.out.tensors(), self.config)
            results = self.results(place, returned)
            self.check(place.draw.joint, results, "before the timed calls")
            expected = {name: one.clone() for name, one in results.items()} if self.repeats else None
            judged.append(Draw(place.draw.joint, expected))
        self.draws = judged
        self.places.clear()

    def settle(self) -> None:
        """Take new memory for both places and put a draw into each."""
        self.places.clear()
        for draw in self.draws:
            arguments = {name: value.clone() if isinstance(value, Tensor) else value
                         for name, value in draw.call.arguments.items()}
            out = Buffers.allocate(draw.call, self.device)
            call = self.kernel.bound(_own(arguments), out.tensors(), self.config)
            self.places.append(Place(arguments, out, call, draw))

    def exchange(self) -> None:
        """Let the draws change places, where they can."""
        if not self.exchangeable:
            return
        for place, draw in zip(self.places, [place.draw for place in reversed(self.places)], strict=True):
            place.draw = draw
            place.fill()

    def turn(self) -> None:
        """Between two trials: see that nothing was wrong, and let the draws change places."""
        self.settled()
        self.exchange()

    def steps(self, count: int, every: Callable[[int], None]) -> list[Step]:
        """``count`` calls, the places in turn; `settled` tells what was wrong. ``every`` is called with a number while
        that call may be running. The last call of each place and one that nobody can foresee are judged again."""
        strict = {*range(count - len(self.places), count), _chance.randrange(count)}
        return [self.step(self.places[number % len(self.places)], number, number in strict, every)
                for number in range(count)]

    def step(self, place: Place, number: int, strict: bool, every: Callable[[int], None]) -> Step:
        """One call of a place, whose result is compared with the expected one."""
        def before() -> None:
            self.poison(place, number // len(self.places) % _POISONS)

        def after(returned: Any) -> None:
            self.modes.put_back()  # what a kernel left there would see to it that all results are equal
            every(number)
            when = f"timed call {number + 1}"
            results = self.results(place, returned)
            self._compare(place.draw, results, when)
            if strict and self.kernel.fills_out and (damage := place.out.damage(place.poison)):
                raise WrongWhenTimed(f"{when}: {damage}")
            if strict and not self.repeats:
                self.check(place.draw.joint, results, when)

        return Step(before, place.call, after)

    def poison(self, place: Place, which: int) -> None:
        """Let the next call find poison where its result is to be."""
        place.poison = which
        if self.kernel.fills_out:
            place.out.poison(which)
        else:  # what it allocates for its result is poison, rather than an earlier right result
            Buffers.allocate(place.draw.call, self.device).poison(which)

    def settled(self) -> None:
        """Wait for the device. Raises WrongWhenTimed for the first wrong result of the calls since, and for inputs that
        are not as they were."""
        for place in self.places:
            for name, value in place.draw.tensors.items():
                self.findings.unchanged(name, value, place.arguments[name])
        self.findings.raise_first()

    def results(self, place: Place, returned: Any) -> Results:
        """By name: what stands in the outputs, or what the kernel returned."""
        value: Any = place.out.tensors() if self.kernel.fills_out else self.kernel.named(returned)
        several = isinstance(place.draw.call.form, Mapping) and isinstance(value, Mapping)
        return value if several else {ONLY: value}

    def check(self, joint: Joint, results: Results, when: str) -> None:
        """Against the reference. Raises WrongWhenTimed."""
        self._check_form(joint, results, when)
        verdict, _ = joint.judge(results, self.kernel.promise)
        if not verdict.passed:
            raise WrongWhenTimed(f"{when}: {verdict.message}")

    def _check_form(self, joint: Joint, results: Results, when: str) -> None:
        if problem := joint.problem(results, self.device, self.kernel.fills_out):
            raise WrongWhenTimed(f"{when}: {problem}")

    def _compare(self, draw: Draw, results: Results, when: str) -> None:
        """With the judged result bit by bit, or where bits are not repeated roughly with the reference."""
        references = draw.joint.references
        if not self.kernel.fills_out:
            self._check_form(draw.joint, results, when)
        if draw.expected is None and references.settle is None:
            self.findings.near(results, references.of, when)
        elif draw.expected is None:
            self.check(draw.joint, results, when)  # only the judge knows in which orders it may be
        elif references.settle is None:
            self.findings.same(draw.expected, results, references.of, when)
        elif (found := draw.joint.difference(draw.expected, results)) is not None:
            name, differs = found
            raise WrongWhenTimed(f"{when}: {int(differs.sum())} of {differs.numel()} elements of {name} differ from "
                                 "the judged result")


def _own(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of the kernel's own on the memory of the arguments: what it does to their shape stays with it."""
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _forms(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value
            for name, value in arguments.items()}
