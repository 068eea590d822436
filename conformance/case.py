"""A case: one point of a matrix, with an id that is stable, readable and parseable.

An id reads ``operator/[family/]key:value-key:value``. Ids hold no device, no time and no order, so that the
seed taken from an id gives the same data everywhere. ``key:value`` rather than ``key=value`` because pytest's
``-k`` expressions accept a colon inside a word and not an equals sign.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from conformance.errors import ConformanceError

_PAIR = re.compile(r"(?P<key>[a-z0-9_]+):(?P<value>[^-/:\s]+)")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
AGAIN = "again_"  # before a parameter's name: its value in the case's other draw


@dataclass(frozen=True, slots=True)
class Case:
    """One point of a matrix.

    ``params`` maps parameter names to values, all strings, in the matrix's declared order. ``tiers`` says which
    tiers the case belongs to; it is no part of the identity.
    """

    operator: str
    params: Mapping[str, str]
    family: str = ""
    tiers: frozenset[str] = field(default_factory=frozenset, compare=False)

    @property
    def name(self) -> str:
        """The id without the operator: what stands in a pytest item's brackets."""
        point = "-".join(f"{key}:{value}" for key, value in self.params.items())
        return f"{self.family}/{point}" if self.family else point

    @property
    def id(self) -> str:
        """``operator/[family/]key:value-...``"""
        return f"{self.operator}/{self.name}"

    @property
    def seed(self) -> int:
        """63 bits taken from the id alone."""
        return int.from_bytes(hashlib.sha256(self.id.encode()).digest()[:8], "little") >> 1

    def get(self, key: str, default: str = "") -> str:
        return self.params.get(key, default)

    def number(self, key: str, default: int | None = None) -> int:
        """The parameter as an integer. Raises ConformanceError when it is absent or no integer."""
        value = self.params.get(key)
        if value is None and default is not None:
            return default
        try:
            return int(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise ConformanceError(f"case {self.id}: parameter {key!r} must be an integer, is {value!r}") from None


def parse_case(text: str) -> Case:
    """The case that an id describes. Raises ConformanceError on a malformed id."""
    operator, _, rest = text.strip().partition("/")
    family, _, point = rest.rpartition("/")
    pairs = point.split("-")
    matches = [_PAIR.fullmatch(pair) for pair in pairs]
    if not _NAME.fullmatch(operator) or (family and not _NAME.fullmatch(family)) or not all(matches):
        raise ConformanceError(
            f"malformed case id {text!r}: expected operator/[family/]key:value-key:value; "
            "'python -m conformance list' prints the known ones"
        )
    params = {match["key"]: match["value"] for match in matches if match}
    if len(params) != len(pairs):
        raise ConformanceError(f"malformed case id {text!r}: a parameter stands twice")
    return Case(operator, params, family)


def data_seed(case: Case, no_data: Collection[str]) -> int:
    """The seed of a case without the parameters ``no_data``, nor those of its other draw: cases that differ in nothing
    else have the same data."""
    kept = {key: value for key, value in case.params.items() if key not in no_data and not key.startswith(AGAIN)}
    return Case(case.operator, kept, case.family).seed & 0x7FFFFFFF


def other_draw(case: Case) -> Case:
    """The same case with other values: same shapes, another seed. What it has as ``again_routing`` is the routing of
    this draw, and so with every parameter: other slots are valid then, more or fewer of them."""
    params = {key: value for key, value in case.params.items() if not key.startswith(AGAIN)}
    changes = {key.removeprefix(AGAIN): value for key, value in case.params.items() if key.startswith(AGAIN)}
    return Case(case.operator, {**params, **changes, "draw": "2"}, case.family, case.tiers)
