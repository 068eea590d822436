"""The contract of one operation, and the records that pass between it and the engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from conformance.case import Case

T = TypeVar("T")
Arguments = dict[str, Any]
ONLY = "out"  # name of the one output of an operator that names none


def by_name(value: T | Mapping[str, T]) -> Mapping[str, T]:
    """What an operator has for each of its outputs, by name, whether it has one or several."""
    return value if isinstance(value, Mapping) else {ONLY: value}


@dataclass(frozen=True)
class Output:
    """Form that an output tensor must have; ``gap`` elements stand between the rows of an ``out`` argument."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gap: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """What one case hands to a kernel.

    ``arguments`` are the operator's inputs by name (None where the variant has none). ``form`` is that of the output,
    or of each output by name. ``set_poison`` fills every place of the inputs that no result may depend on with poison
    number 0 or 1. ``regime`` is "exact" where every order of summation must give the same bits. ``bitwise_rows`` masks
    rows of the one output that the contract fixes bit by bit for every kernel, whatever it promises. ``poisoned``, of
    large inputs: the rows (int64 [n]) that ``set_poison`` writes to, so that what a kernel did there can be seen before
    the next poison hides it, without all of the input being looked at.
    """

    case: Case
    arguments: Arguments
    form: Output | Mapping[str, Output]
    set_poison: Callable[[int], None]
    regime: str = "real"
    bitwise_rows: Tensor | None = None
    poisoned: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def outputs(self) -> Mapping[str, Output]:
        return by_name(self.form)

    @property
    def output(self) -> Output:
        """The form of the one output."""
        (form,) = self.outputs.values()
        return form

    def written_over(self) -> dict[str, Tensor]:
        """What ``set_poison`` may write to, by input: the rows that are known, else all of it."""
        tensors = {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}
        return {name: value.index_select(0, self.poisoned[name]) if name in self.poisoned else value
                for name, value in tensors.items()}

    def part(self, name: str) -> Call:
        """The same call as seen by one output alone."""
        return replace(self, form=self.outputs[name]) if isinstance(self.form, Mapping) else self


PLUS_INFINITY, MINUS_INFINITY, NOT_A_NUMBER = 1, 2, 4  # what may stand in the place of a number


@dataclass(frozen=True)
class OracleRows:
    """Rows [start, stop) of the exact result (fp64) and of the error that correct arithmetic may make before the
    cast to the output format (fp32, same shape, >= 0, rounded up). ``also``, uint8 of the same shape, is the sum of
    what an element may be besides a number within its budget, because the contract leaves order and width of a sum
    open and some of them overflow: PLUS_INFINITY, MINUS_INFINITY, NOT_A_NUMBER. None where that is nothing anywhere."""

    start: int
    stop: int
    value: Tensor
    error: Tensor
    also: Tensor | None = None


def no_oracle() -> Iterator[OracleRows]:
    """Of an output whose every bit is fixed."""
    return iter(())


@dataclass(frozen=True)
class Reference:
    """What one output must be.

    ``golden``: the documented order of roundings, in the output's dtype. ``oracle`` yields the fp64 result a
    few rows at a time, so that no tensor of the output's size is ever held in fp64; without one, of integers and of
    numbers that are only moved, the golden's bits are required. ``published``: the tolerance (atol = rtol) that the
    field quotes for the operator, where it is not the output format's. ``open``, bool of the golden's shape: elements
    of an output without an oracle that the contract leaves unspecified."""

    golden: Tensor
    oracle: Callable[[], Iterator[OracleRows]] = no_oracle
    published: float | None = None
    open: Tensor | None = None

    @property
    def exact(self) -> bool:
        """Whether the golden's bits are required of every kernel, whatever it promises."""
        return self.oracle is no_oracle


Results = Mapping[str, Tensor]


@dataclass(frozen=True)
class References:
    """What each output of one call must be, by name. settle(results): where the contract leaves an order open, the
    same references in the order that the results have; a result that is right in no order must differ from them. A
    kernel that promises "bit-exact" is held to the references as they are."""

    of: Mapping[str, Reference]
    settle: Callable[[Results], Mapping[str, Reference]] | None = None

    @classmethod
    def made_of(cls, reference: Reference | References) -> References:
        return reference if isinstance(reference, References) else cls({ONLY: reference})

    @property
    def elements(self) -> int:
        return sum(reference.golden.numel() for reference in self.of.values())

    def settled(self, results: Results) -> Mapping[str, Reference]:
        return self.of if self.settle is None else self.settle(results)


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes moved by one call, counting valid slots only. ``arithmetic``: the dtype
    whose dense matrix product bounds the operations (fp32, fp16, bf16, e4m3, int8)."""

    flops: int
    bytes: int
    arithmetic: str = "fp32"


@dataclass(frozen=True)
class Fault:
    """A faulty semantics that may explain a wrong result. key: short and stable. sentence: what the kernel does wrong,
    as a clause ("padding slots are read as row 0"). predict(call, columns): what a kernel with this fault returns for
    the columns (int64 [C]) of the call as its arguments stand now, [T, C] in the output's dtype; None where the call
    gives the fault nothing to act on."""

    key: str
    sentence: str
    predict: Callable[[Call, Tensor], Tensor | None]


@dataclass(frozen=True)
class FaultyOutputs:
    """A faulty semantics of an operator whose outputs are exact; key and sentence as of a `Fault`. predict(call): all
    outputs of a kernel with this fault, by name and in the forms of the call; None where the call gives the fault
    nothing to act on."""

    key: str
    sentence: str
    predict: Callable[[Call], Results | None]


@dataclass(frozen=True)
class Excluded:
    """A way to compute that the contract rules out although it is sound: what comes of it has another error, and cannot
    be predicted bit by bit. key and sentence as of a `Fault`. reference(call): what it may leave, the call's own
    reference with another budget; None where the call leaves no choice."""

    key: str
    sentence: str
    reference: Callable[[Call], Reference | None]


class Shared:
    """Values that the cases of one group have in common; they are dropped when the group changes."""

    def __init__(self) -> None:
        self.group: str | None = None
        self._values: dict[Any, Any] = {}
        self._slots: dict[str, None] = {}

    def enter(self, group: str) -> None:
        if group != self.group:
            self._values.clear()
            self.group = group

    def get(self, key: Any, build: Callable[[], T]) -> T:
        if key not in self._values:
            self._values[key] = build()
        value: T = self._values[key]
        return value

    def holds(self, value: Any) -> bool:
        return any(known is value for known in self._values.values())

    def latest(self, slot: str, key: Any, build: Callable[[], T]) -> T:
        """Like ``get``, but of one ``slot`` only the value of the last key is kept."""
        known = self._values.get(slot)
        if known is None or known[0] != key:
            self._slots[slot] = None
            self._values.pop(slot, None)  # free it before its successor is made
            self._values[slot] = known = (key, build())
        value: T = known[1]
        return value

    def latest_values(self) -> Iterator[tuple[str, Any]]:
        """(slot, value) of what ``latest`` keeps."""
        return ((slot, self._values[slot][1]) for slot in self._slots if slot in self._values)

    def clear(self) -> None:
        self._values.clear()
        self.group = None


@dataclass(frozen=True)
class Operator:
    """Contract of one operation. Each module of ``references`` defines one as ``OPERATOR``.

    name, about: as printed. arguments: input names in order. variants: public forms; ``variant(case)`` names one.
    validate(arguments, out, strided): raises ValueError or TypeError naming argument, value and rule.
    inputs(case, sizes, device, shared): the call of a case, ``sizes`` being "official" or "reduced". reference(call,
    shared): golden and oracle. memory(case, sizes): peak bytes of judging the case once. cost(call): roofline figures.
    policies: values that are choice, not mathematics. budget: the formula in words. contract: what is computed, and of
    what: the formula and each argument with shape, dtype and layout. workloads: named model shapes
    (tokens, topk, hidden). published: the field's tolerance for this operator, where it is not the formats'. faults:
    faulty semantics that failures are compared with, most specific first; where there are any, the inputs'
    ``set_poison`` knows a third poison, number 2: finite values that differ from row to row and so tell what was read.

    outputs: names of the outputs, where there are several: ``output`` and ``inputs`` then give a form for each,
    ``reference`` gives `References`, and ``validate`` gets the tensors to fill by name. faulty_outputs: what failures
    of exact outputs are compared with, most specific first. another_expert: the key of the fault by which a row, or a
    block, is that of another expert; every case must reject it where it is wrong. excluded: sound ways to compute
    that it rules out, which failures are compared with before ``faults``.
    """

    name: str
    about: str
    arguments: tuple[str, ...]
    variants: tuple[str, ...]
    variant: Callable[[Case], str]
    validate: Callable[[Arguments, Any, bool], None]
    output: Callable[[Arguments, torch.dtype | None], Output | Mapping[str, Output]]
    inputs: Callable[[Case, str, torch.device, Shared], Call]
    reference: Callable[[Call, Shared], Reference | References]
    memory: Callable[[Case, str], int]
    cost: Callable[[Call], Cost]
    policies: Mapping[str, str] = field(default_factory=dict)
    budget: str = ""
    contract: str = ""
    workloads: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    published: float | None = None
    faults: tuple[Fault, ...] = ()
    outputs: tuple[str, ...] = (ONLY,)
    faulty_outputs: tuple[FaultyOutputs, ...] = ()
    another_expert: str = ""
    excluded: tuple[Excluded, ...] = ()
