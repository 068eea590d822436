"""What is expected of a kernel on an architecture, and whether what happened agrees - strict in both directions.

Without a rule a kernel is expected to run one of its native paths. A rule says otherwise and gives its reason:

    native            a native path, although a wider rule says something else
    fallback          the named other path
    unsupported       a refusal of the named kind
    known-failure     a failure of the named kind whose message holds the signature

The rule with the most conditions counts; two with equally many that both match are an error (`rule_set`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conformance.errors import ConformanceError

if TYPE_CHECKING:
    from conformance.arch import Arch

KINDS = ("native", "fallback", "unsupported", "known-failure")
LANES = ("route", "lower", "assemble", "execute")
# How a kernel can fail, and the lowest lane in which that shows.
FAILURES: Mapping[str, str] = {
    "refused": "route",  # before compilation, by the kernel's own check
    "refused-by-compiler": "lower",
    "compiler-abort": "lower",  # a signal ended the compiler
    "process-exit": "lower",  # the process ended itself
    "soft-error": "lower",  # reported as success, with an error in the output or beyond a hardware limit
    "launch-error": "execute",
    "mismatch": "execute",
    "hang": "execute",
}


@dataclass(frozen=True)
class Range:
    """Limits of a number, both included; ``above`` names an architecture's fact that the number must exceed."""

    least: float | None = None
    most: float | None = None
    above: str = ""


Condition = tuple[str, ...] | Range


@dataclass(frozen=True)
class Expectation:
    """One rule. ``match``: parameter, or operator, variant, family, kernel -> allowed values; ``facts``: fact of the
    architecture -> allowed values; ``archs``: names, empty = the architecture of the rule's own file.

    lane: the lowest lane in which the failure shows. where: file and line of the rule, empty for the default.
    """

    kind: str = "native"
    path: str = ""
    failure: str = ""
    signature: str = ""
    lane: str = "route"
    match: Mapping[str, Condition] = field(default_factory=dict)
    facts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    archs: tuple[str, ...] = ()
    reason: str = ""
    source: str = ""
    since: str = ""
    until: str = ""
    where: str = ""

    @property
    def rank(self) -> int:
        """The number of conditions: the more there are, the more special is the rule."""
        return len(self.match) + len(self.facts) + bool(self.archs)

    def __str__(self) -> str:
        if self.kind == "fallback":
            return f"fallback = {self.path}"
        if self.failure:
            return f"{self.kind} = {self.failure}" + (f" ({self.signature!r})" if self.signature else "")
        return self.kind


NATIVE = Expectation()


def matches(rule: Expectation, point: Mapping[str, str], arch: Arch) -> bool | None:
    """Whether the rule is about this point on this architecture; None when that depends on an unknown fact."""
    if rule.archs and arch.name not in rule.archs:
        return False
    answer: bool | None = True
    for key, condition in rule.match.items():
        held = _holds(condition, point.get(key), arch)
        if held is False:
            return False
        answer = answer if held else None
    for name, values in rule.facts.items():
        value = arch.fact(name)
        if value is None:
            answer = None
        elif value not in values:
            return False
    return answer


def _holds(condition: Condition, value: str | None, arch: Arch) -> bool | None:
    if value is None:
        return False
    if not isinstance(condition, Range):
        return value in condition
    try:
        number = float(value)
    except ValueError:
        return False
    if (condition.least is not None and number < condition.least) or (
        condition.most is not None and number > condition.most
    ):
        return False
    if condition.above:
        limit = arch.limit(condition.above)
        return None if limit is None else number > limit
    return True


def expected(rules: Iterable[Expectation], point: Mapping[str, str], arch: Arch) -> Expectation | None:
    """The expectation for a point: that of the most special rule, the default, or None where that hangs on an
    unknown fact. Raises ConformanceError when two rules of the same rank match."""
    found = [(rule, matches(rule, point, arch)) for rule in rules]
    best = max((rule.rank for rule, held in found if held is not False), default=-1)
    top = [(rule, held) for rule, held in found if held is not False and rule.rank == best]
    if not top:
        return NATIVE
    if len(top) > 1:
        raise ConformanceError(
            f"{top[0][0].where} and {top[1][0].where}: two rules of rank {best} match {_spelled(point)} on "
            f"{arch.name}; give one of them another condition"
        )
    return top[0][0] if top[0][1] else None


def _spelled(point: Mapping[str, str]) -> str:
    return "-".join(f"{key}:{value}" for key, value in point.items())


@dataclass(frozen=True)
class Outcome:
    """What happened to a case: the highest lane reached, the path that ran or would run, and the failure, if any."""

    lane: str
    path: str | None = None
    failure: str | None = None
    message: str = ""


def contradiction(rule: Expectation, outcome: Outcome, native: tuple[str, ...]) -> tuple[str, str] | None:
    """(kind, sentence) when the outcome is not what the rule expects; None when it is, or cannot be told yet.

    A failure that no rule expects is not judged here: it fails by itself.
    """
    if rule.failure:
        return _failure_contradiction(rule, outcome)
    if outcome.failure:
        return None
    is_native = outcome.path in native
    if rule.kind == "fallback":
        if outcome.path == rule.path:
            return None
        if is_native:
            return "unexpected-native", f"ran its native path {outcome.path!r}, but {_declared(rule)}"
        ran = f"ran the path {outcome.path!r}" if outcome.path else "did not say which path ran (report_path)"
        return "wrong-fallback", f"{ran}, but {_declared(rule)}"
    if outcome.path is None or is_native:
        return None
    return "silent-fallback", (
        f"fell back to the path {outcome.path!r}, which nothing declares; native: {', '.join(native)}. If it is native "
        "too, name it in @kernel(native=...); if the fallback is right, add an [[expect]] rule"
    )


def _failure_contradiction(rule: Expectation, outcome: Outcome) -> tuple[str, str] | None:
    if outcome.failure is None:
        if LANES.index(outcome.lane) < LANES.index(rule.lane):
            return None
        works = f"works in lane {outcome.lane}, but {_declared(rule)}"
        return "unexpected-pass", f"{works}; remove the rule if it is out of date"
    if outcome.failure != rule.failure:
        return "other-failure", f"failed as {outcome.failure!r}, but {_declared(rule)}"
    if rule.signature and rule.signature not in outcome.message:
        return "other-failure", f"failed without {rule.signature!r} in its message, but {_declared(rule)}"
    return None


def _declared(rule: Expectation) -> str:
    return f"{rule.where} expects {rule} ({rule.reason})"
