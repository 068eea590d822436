"""The pull-request summary: GitHub's Markdown, bounded in every part so that it stays far below 60 KB."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from reports import failures
from reports.digest import Digest, KernelRow
from reports.identity import facts, sizes_notice
from reports.records import STATES, Records, Result
from reports.text import DASH, clip, fraction, labels, sentence

FIRST_FAILURES = 10
MOST_ROWS = 60  # of a table
MOST_REASONS = 20
MOST_RULES = 10
LONGEST = 300  # characters of a message, reason or id
LONGEST_COMMAND = 600


def render(records: Records, digest: Digest) -> str:
    """The whole summary, ending in a newline."""
    verdict, words = digest.verdict, list(labels(STATES, records.run.here).values())
    parts = [
        f"## {verdict.word}: {escaped(clip(verdict.reason, LONGEST))}",
        *(f"**{escaped(text)}**" for text in [sizes_notice(records.run)] if text),
        " · ".join(
            f"{label} {code(clip(value, 100))}" for label, value in facts(records) if label != "command"
        ),
        *_problems(records, digest),
        _kernels(digest.kernels, words),
        _tiers(digest.tiers, words),
        *_causes(records),
        *_rules(records),
        *_first_failures(records, digest),
        *_not_run(digest),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def escaped(text: str) -> str:
    """One line of plain text in which no character means anything to Markdown, HTML or GitHub."""
    text = " ".join(text.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # An underscore inside a word means nothing; escaping it would only make names hard to read.
    text = re.sub(r"([\\`*\[\]|#~$]|(?<!\w)_|_(?!\w))", r"\\\1", text)
    text = re.sub(r"\A(\d*)([-+.)])(?=\s)", r"\1\\\2", text)  # no list inside a list
    return text.replace("@", "&#64;")  # no mention of anybody


def code(text: str) -> str:
    """``text`` as inline code, also safe in a table, with a fence longer than any backticks in it."""
    text = " ".join(text.split()).replace("|", "\\|") or " "
    runs = re.findall(r"`+", text)
    fence = "`" * (1 + max(map(len, runs), default=0))
    pad = " " if runs else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str, most: int = MOST_ROWS) -> str:
    """A table of escaped cells, ``align`` being "l" or "r" for each column; ``most`` rows of it."""
    lines = [head, ["---:" if side == "r" else "---" for side in align], *rows[:most]]
    if len(rows) > most:
        lines.append([f"... {len(rows) - most} more", *("" for _ in head[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _counts(counts: Mapping[str, int]) -> list[str]:
    return [str(counts.get(state, 0)) for state in STATES]


def _kernels(rows: Sequence[KernelRow], words: Sequence[str]) -> str:
    if not rows:
        return ""
    head = ["kernel", "promise", "reached", "planned", *words, "budget fraction"]
    lines = []
    for row in rows:
        counts = {**row.counts, "not-run": row.counts.get("not-run", 0) + row.missing}
        reached = ", ".join(f"{level} {count}" for level, count in row.levels.items()) or DASH
        lines.append(
            [code(clip(row.name, 80)), row.promise or DASH, escaped(clip(reached, 120)), str(row.planned)]
        )
        lines[-1] += [*_counts(counts), fraction(row.budget)]
    return table(head, lines, "lll" + "r" * (len(STATES) + 2))


def _tiers(tiers: Mapping[str, Mapping[str, int]], words: Sequence[str]) -> str:
    rows = [[escaped(clip(tier, 80)), *_counts(counts)] for tier, counts in tiers.items()]
    return table(["tier", *words], rows, "l" + "r" * len(STATES)) if rows else ""


def _problems(records: Records, digest: Digest) -> list[str]:
    lines = [*digest.verdict.notes, *(records.end.problems if records.end else ())]
    return ["\n".join(f"- {escaped(clip(line, LONGEST))}" for line in lines[:MOST_REASONS])]


def _causes(records: Records) -> list[str]:
    lines = [f"- {code(clip(kernel, 80))}, {count} results: {escaped(clip(text, LONGEST))}"
             for kernel, text, count in failures.causes(records.results)]
    return ["### What failures were diagnosed as", "\n".join(lines)] if lines else []


def _rules(records: Records) -> list[str]:
    lines = [f"- {code(clip(kernel, 80))} {escaped(kind)}: {escaped(clip(text, LONGEST))}"
             for kernel, kind, text in failures.in_common(records.results)[:MOST_RULES]]
    return ["### What the failures share", "\n".join(lines)] if lines else []


def _first_failures(records: Records, digest: Digest) -> list[str]:
    if not digest.failing:
        return []
    groups = failures.groups(records.results)
    shown = _varied({key: failures.diagnosed_first(rows) for key, rows in groups.items()})
    title = (
        "### Failures" if digest.failing <= len(shown) else f"### {len(shown)} of {digest.failing} failures"
    )
    return [title, "\n".join(_failure(number, result) for number, result in enumerate(shown, start=1))]


def _varied(groups: Mapping[str, Sequence[Result]]) -> list[Result]:
    """The first failures, taking turns over the groups so that every kind is seen."""
    turns = max(map(len, groups.values()), default=0)
    found: list[Result] = []
    for turn in range(min(turns, FIRST_FAILURES)):
        found += [members[turn] for members in groups.values() if turn < len(members)]
    return found[:FIRST_FAILURES]


def _failure(position: int, result: Result) -> str:
    message = escaped(clip(sentence(result.message, result), LONGEST)) or "no message was recorded"
    lead = f"{position}. "
    indent = " " * len(lead)
    lines = [f"{lead}**{result.state}** {code(clip(result.kernel, 80))}: {message}"]
    if result.rerun:
        command = clip(" ".join(result.rerun.split()), LONGEST_COMMAND)
        fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", command)), default=0))
        lines += [f"{indent}{fence}sh", f"{indent}{command}", f"{indent}{fence}"]
    else:
        lines.append(f"{indent}{code(clip(result.case, LONGEST))}")
    return "\n".join(lines)


def _not_run(digest: Digest) -> list[str]:
    if not digest.not_run:
        return []
    lines = []
    for group in digest.not_run[:MOST_REASONS]:
        kernels = ", ".join(f"{kernel} {count}" for kernel, count in group.kernels.items())
        lines.append(
            f"- {group.count} x {escaped(clip(group.reason, LONGEST))} ({escaped(clip(kernels, LONGEST))})"
        )
    if len(digest.not_run) > MOST_REASONS:
        lines.append(f"- and {len(digest.not_run) - MOST_REASONS} more reasons, in the HTML report")
    return [f"### Not run: {digest.counts.get('not-run', 0)}", "\n".join(lines)]
