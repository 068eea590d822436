"""What the page keeps of failing results: messages, full details and rules, each up to a fixed size.

A run may fail in every result. The page then keeps all states and numbers, one message per distinct sentence
up to a limit, and the full details of a varied selection; the record file keeps everything.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from reports.explain import explain
from reports.records import CONTRADICTIONS, Result
from reports.text import clip, embedded, generalise

MOST_DETAILS = 200  # results with trace, first mismatch and details
DETAIL_CHARACTERS = 400_000  # for all of them together
MESSAGE_CHARACTERS = 300_000  # for all distinct messages together
LONGEST_MESSAGE = 1_000
LONGEST_TRACE = 6_000
LONGEST_DETAIL = 2_000
MOST_CAUSES = 12  # of those that known faults explain, and of the others
MOST_RULES = 40  # groups of failures that get an explanation


class Messages:
    """A dictionary of generalised messages that stops growing at MESSAGE_CHARACTERS."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._left = MESSAGE_CHARACTERS
        self.left_out = 0

    def index(self, row: Result) -> int | None:
        """The index of the row's message; None when it has none, or when there is no room for a new one."""
        if not row.message:
            return None
        text = clip(generalise(row.message, row), LONGEST_MESSAGE)
        known = self._index.get(text)
        if known is not None:
            return known
        cost = len(embedded(text))
        if cost > self._left:
            self.left_out += 1
            return None
        self._left -= cost
        return self._index.setdefault(text, len(self._index))

    @property
    def values(self) -> list[str]:
        return list(self._index)


def group_key(row: Result) -> str:
    """Failures of one kernel, state and kind are read together."""
    return "|".join((row.kernel, row.state, row.kind or ""))


def groups(rows: Iterable[Result]) -> dict[str, list[Result]]:
    """Failing results by group: first what contradicts the expectations, then the largest group first."""
    found: dict[str, list[Result]] = {}
    for row in rows:
        if row.failing:
            found.setdefault(group_key(row), []).append(row)
    return dict(sorted(found.items(), key=lambda item: (item[1][0].kind not in CONTRADICTIONS, -len(item[1]))))


def rules(rows: Sequence[Result]) -> dict[str, str]:
    """Group key -> the sentence that says which parameter values its failures share, where one is telling."""
    executed: dict[str, list[Result]] = {}
    for row in rows:
        if row.state != "not-run":
            executed.setdefault(row.kernel, []).append(row)
    found = {}
    for key, members in list(groups(rows).items())[:MOST_RULES]:
        rule = explain(members, executed[members[0].kernel])
        if rule:
            found[key] = rule.text
    return found


def in_common(rows: Sequence[Result]) -> list[tuple[str, str, str]]:
    """The rules as (kernel, kind of failure, sentence)."""
    found = []
    for key, text in rules(rows).items():
        kernel, state, kind = key.split("|", 2)
        found.append((kernel, kind or state, text))
    return found


def diagnosis(row: Result) -> Mapping[str, Any]:
    """What a failure was diagnosed as; empty where it was not."""
    found = (row.details or {}).get("diagnosis")
    return found if row.failing and isinstance(found, dict) and isinstance(found.get("sentence"), str) else {}


def causes(rows: Iterable[Result]) -> list[tuple[str, str, int]]:
    """(kernel, sentence, results) of what failures were diagnosed as, by known faults first, then the most results."""
    found: Counter[tuple[str, str]] = Counter()
    unexplained: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if told := diagnosis(row):
            (found if told.get("explained") else unexplained)[row.kernel, told["sentence"]] += 1
    most = (*found.most_common(MOST_CAUSES), *unexplained.most_common(MOST_CAUSES))
    return [(kernel, text, count) for (kernel, text), count in most]


def diagnosed_first(rows: Iterable[Result]) -> list[Result]:
    """The rows in their order, but those that say why they failed before the others."""
    return sorted(rows, key=lambda row: not diagnosis(row))


def details(rows: Sequence[Result]) -> dict[int, dict[str, Any]]:
    """Row number -> what is kept of some failures only. Groups take turns, so that each is represented."""
    numbers: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        if row.failing:
            numbers.setdefault(group_key(row), []).append(number)
    kept: dict[int, dict[str, Any]] = {}
    left = DETAIL_CHARACTERS
    for number in _in_turn([sorted(group, key=lambda n: not diagnosis(rows[n])) for group in numbers.values()]):
        entry = _detail(rows[number])
        left -= len(embedded(entry))
        if left < 0 or len(kept) == MOST_DETAILS:
            break
        kept[number] = entry
    return kept


def _in_turn(lists: Sequence[Sequence[int]]) -> Iterable[int]:
    for turn in range(max(map(len, lists), default=0)):
        yield from (numbers[turn] for numbers in lists if turn < len(numbers))


def _detail(row: Result) -> dict[str, Any]:
    entry: dict[str, Any] = {"worker": row.worker}
    if row.first:
        entry["first"] = {key: spelled(value) for key, value in row.first.items()}
    if row.details:
        told = {key: value for key, value in row.details.items() if key != "diagnosis" or not diagnosis(row)}
        entry["details"] = {key: clip(spelled(value), LONGEST_DETAIL) for key, value in told.items()}
        if diagnosis(row):
            entry["diagnosed"] = clip(_said(diagnosis(row)), LONGEST_DETAIL)
    if row.trace:
        entry["trace"] = clip(row.trace, LONGEST_TRACE)
    return {key: value for key, value in entry.items() if value}


def _said(found: Mapping[str, Any]) -> str:
    others = [str(one) for one in found.get("others") or ()]
    return str(found["sentence"]) + (f"; as well as: {', '.join(others)}" if others else "")


def spelled(value: Any) -> str:
    """A JSON value as text: strings bare, the rest as JSON spells it (NaN and Infinity included)."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
