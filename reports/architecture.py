"""What a page says of the architecture itself: its facts, the rules that hold there, and what generated code uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.records import CONTRADICTIONS, STATES, Records, Result
from reports.text import DASH, labels

_LIMITS = (("shared_bytes", "shared bytes"), ("threads", "threads"))
_FIGURES = ("registers", "spill_bytes")


@dataclass(frozen=True)
class FactRow:
    """One line of the architecture's table; ``device``: what the device itself answered, where it could be asked."""

    name: str
    value: str
    source: str
    device: str
    differs: bool


@dataclass(frozen=True)
class RuleRow:
    """A rule: the cases that it governs in all tiers, those of this run, how they went, and how many contradict it."""

    text: str
    where: str
    reason: str
    source: str
    until: str
    cases: int
    states: Mapping[str, int]
    contradictions: int


@dataclass(frozen=True)
class CodeRow:
    """Generated code of one configuration: cells are (value, limit, whether beyond) as text."""

    kernel: str
    config: str
    lane: str
    results: int
    limits: Sequence[tuple[str, bool]]
    figures: Sequence[str]
    instructions: str


@dataclass(frozen=True)
class Architecture:
    facts: tuple[FactRow, ...]
    rules: tuple[RuleRow, ...]
    code: tuple[CodeRow, ...]
    contradictions: Mapping[str, int]  # kind -> results


def architecture(records: Records) -> Architecture:
    kinds = Counter(r.kind for r in records.results if r.failing and r.kind in CONTRADICTIONS)
    return Architecture(_facts(records), _rules(records), _code(records), {str(kind): n for kind, n in kinds.items()})


def _facts(records: Records) -> tuple[FactRow, ...]:
    rows = []
    for name, fact in records.run.facts.items():
        probed = records.run.probe.get(name)
        device = DASH if probed is None else _spelled(probed.get("device"))
        value = _spelled(fact.get("value"))
        rows.append(FactRow(name, value, str(fact.get("source", "")), device, probed is not None and device != value))
    return tuple(rows)


def _spelled(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{'' if held else 'no '}{name}" for name, held in value.items())
    return str(value)


def _rules(records: Records) -> tuple[RuleRow, ...]:
    by_rule: dict[str, list[Result]] = {}
    for result in records.results:
        if result.expected:
            by_rule.setdefault(str(result.expected.get("where", "")), []).append(result)
    rows, words = [], labels(STATES, records.run.here)
    for rule in records.run.rules:
        governed = by_rule.get(str(rule.get("where")), [])
        text, where, reason, source, until = (
            str(rule.get(key, "")) for key in ("text", "where", "reason", "source", "until")
        )
        against = sum(r.failing and r.kind in CONTRADICTIONS for r in governed)
        states = Counter(words[r.state] for r in governed)
        rows.append(RuleRow(text, where, reason, source, until, int(rule.get("cases") or 0), states, against))
    return tuple(sorted(rows, key=lambda row: -row.contradictions))


def _code(records: Records) -> tuple[CodeRow, ...]:
    found: dict[tuple[str, str], tuple[Result, int]] = {}
    for result in records.results:
        if result.resources:
            key = result.kernel, str(result.resources.get("config", ""))
            found[key] = (result, found.get(key, (result, 0))[1] + 1)
    rows = []
    for (kernel, config), (result, count) in found.items():
        uses = result.resources or {}
        limits = [_against(uses.get(name), records.run.facts.get(name, {}).get("value")) for name, _ in _LIMITS]
        figures = [_spelled(uses[name]) if name in uses else DASH for name in _FIGURES]
        instructions = ", ".join(map(str, uses.get("instructions", ()))) or DASH
        lane = f"{result.lane} by {uses['assembler']}" if uses.get("assembler") else result.lane
        rows.append(CodeRow(kernel, config, lane, count, limits, figures, instructions))
    return tuple(sorted(rows, key=lambda row: (not any(beyond for _, beyond in row.limits), row.kernel, row.config)))


def _against(value: Any, limit: Any) -> tuple[str, bool]:
    """("1024 / 65536", whether beyond); a limit that nobody could source is "unknown"."""
    if value is None:
        return DASH, False
    if not isinstance(limit, int) or not isinstance(value, (int, float)):  # of an edited file
        return f"{_spelled(value)} / {limit if isinstance(limit, int) else 'unknown'}", False
    return f"{value} / {limit}", value > limit
