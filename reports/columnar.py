"""The results as columns of small integers over dictionaries: the page's data, about 25 bytes per result.

A row is one result; rows are sorted by kernel, then case. Cases hold their parameters once for all kernels.
Combinations of state, level, path and so on repeat, so each row refers to one ``outcome``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from reports import failures
from reports.digest import Digest
from reports.explain import natural
from reports.records import CONTRADICTIONS, LEVELS, STATES, Records, Result
from reports.text import generalise, labels, signs

# How a column of numbers spells what JSON cannot.
ABSENT, INFINITE, NAN = -1, -2, -3


class Dictionary:
    """Distinct values in order of first use; calling it gives a value's index."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._index: dict[Any, int] = {value: i for i, value in enumerate(values)}

    def __call__(self, value: Any) -> int:
        return self._index.setdefault(value, len(self._index))

    @property
    def values(self) -> list[Any]:
        return list(self._index)


def payload(records: Records, digest: Digest) -> dict[str, Any]:
    """Everything the page's script reads, as JSON-able values without NaN."""
    kernels = Dictionary(row.name for row in digest.kernels)
    cases = _cases(records.results)
    index = {case.case: i for i, case in enumerate(cases)}
    rows = sorted(records.results, key=lambda r: (kernels(r.kernel), index[r.case]))
    words = labels(STATES, records.run.here)
    outcomes, messages = Dictionary(), failures.Messages()
    return {
        "states": list(STATES),
        "labels": list(words.values()),
        "marks": [state if label == state else "unexecuted" for state, label in words.items()],
        "signs": list(signs(records.run.here).values()),
        "levels": list(LEVELS),
        "contradictions": list(CONTRADICTIONS),
        "kernels": kernels.values,
        "promises": [row.promise for row in digest.kernels],
        "missing": sum(row.missing for row in digest.kernels),
        "cases": _case_columns(cases),
        "outcome": [outcomes(_outcome(row)) for row in rows],
        "outcomes": outcomes.values,
        "kernel": _runs([kernels(row.kernel) for row in rows]),
        "case": _deltas([index[row.case] for row in rows]),
        "budget": [_rounded(row.budget_fraction, 4) for row in rows],
        "error": [_rounded(row.max_error, 3) for row in rows],
        "seconds": [_rounded(row.seconds, 3) for row in rows],
        "wrong": _sparse(rows, lambda row: row.wrong or None),
        "elements": _sparse(rows, lambda row: row.elements if row.wrong else None),
        "message": _sparse(rows, messages.index),
        "messages": messages.values,
        "details": failures.details(rows),
        "rules": failures.rules(rows),
        "limits": {"details": failures.MOST_DETAILS, "messages_left_out": messages.left_out},
    }


def _cases(results: Sequence[Result]) -> list[Result]:
    """One result per case (the latest), by operator, family and parameters in natural order."""
    latest = {result.case: result for result in results}
    return sorted(
        latest.values(),
        key=lambda r: (r.operator, r.family, [natural(value) for value in r.params.values()], r.case),
    )


def _case_columns(cases: Sequence[Result]) -> dict[str, Any]:
    orders, tiers = Dictionary(), Dictionary()
    order = [orders(tuple(case.params)) for case in cases]
    tier = [tiers(case.tiers) for case in cases]
    keys = dict.fromkeys(key for names in orders.values for key in names)
    columns = [
        _column("operator", cases, lambda case: case.operator),
        _column("variant", cases, lambda case: case.variant),
        _column("family", cases, lambda case: case.family),
        *(_column(key, cases, lambda case, key=key: case.params.get(key), parameter=True) for key in keys),  # type: ignore[misc]
    ]
    return {
        "count": len(cases),
        "columns": columns,
        "orders": orders.values,
        "order": _runs(order),
        "tiers": tiers.values,
        "tier": tier,
        "ids": {i: case.case for i, case in enumerate(cases) if case.case != _spelled(case)},
    }


def _column(
    key: str, cases: Sequence[Result], get: Callable[[Result], str | None], *, parameter: bool = False
) -> dict[str, Any]:
    """Codes into ``values``; ABSENT where a case lacks the parameter, or the name is empty."""
    texts = [get(case) for case in cases]
    if not parameter:
        texts = [text or None for text in texts]
    values = Dictionary(sorted({text for text in texts if text is not None}, key=natural))
    codes = [ABSENT if text is None else values(text) for text in texts]
    return {"key": key, "values": values.values, "codes": codes, "parameter": parameter}


def _spelled(case: Result) -> str:
    """The id as the page rebuilds it from columns; cases whose id differs carry it whole."""
    point = "-".join(f"{key}:{value}" for key, value in case.params.items())
    return "/".join(part for part in (case.operator, case.family, point) if part)


def _outcome(row: Result) -> tuple[Any, ...]:
    rerun = generalise(row.rerun, row)
    expected = f"{row.expected.get('text')}: {row.expected.get('reason')}" if row.expected else None
    return (
        STATES.index(row.state), row.kind, row.promised, row.level, row.path, row.lane or None, rerun,
        expected, row.stopped or None,
    )


def _rounded(value: float | None, digits: int) -> float | int:
    """Few digits, and integers without a point: the shortest spelling that keeps what a reader uses."""
    if value is None:
        return ABSENT
    if math.isnan(value):
        return NAN
    if math.isinf(value):
        return INFINITE
    short = float(f"{value:.{digits}g}")
    while short == 1 != value:  # 1 is the limit of a budget fraction: keep the side that the value is on
        digits += 1
        short = float(f"{value:.{digits}g}")
    if math.isinf(short):  # rounded up from the end of the range
        return INFINITE
    return int(short) if short.is_integer() and abs(short) < 1e6 else short


def _runs(codes: Sequence[int]) -> list[int]:
    """Run lengths: [code, count, code, count, ...]."""
    flat: list[int] = []
    for code in codes:
        if flat and flat[-2] == code:
            flat[-1] += 1
        else:
            flat += [code, 1]
    return flat


def _deltas(numbers: Sequence[int]) -> list[int]:
    return [number - before for number, before in zip(numbers, [0, *numbers], strict=False)]


def _sparse(rows: Sequence[Result], get: Callable[[Result], int | None]) -> dict[str, list[int]]:
    """Values of the rows that have one: row numbers as differences, and the values beside them."""
    found = [(i, value) for i, row in enumerate(rows) if (value := get(row)) is not None]
    return {"rows": _deltas([i for i, _ in found]), "values": [value for _, value in found]}
