"""Text tools shared by the pages: numbers, durations, clipping, and messages without the names in them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence

from reports.records import Result

# Stand-ins for what a message repeats about its own result. Cleaned records hold no control characters, so
# these are free; the page's script puts the names back.
CASE, NAME, KERNEL = "\x01", "\x02", "\x03"
DASH = "\N{EN DASH}"  # for what is absent
# One sign per state, so that colour is never the only one.
SIGNS = {"pass": "P", "expected": "X", "fail": "F", "error": "E", "crash": "C", "timeout": "T", "not-run": "N"}
UNEXECUTED = "not executed"

_SHOWN = {CASE: "<case>", NAME: "<case>", KERNEL: "<kernel>"}
# What messages open with: words around a stand-in, up to a colon. The page's script knows the same form.
_OPENING = re.compile(rf"\A[\w ]*[{CASE}{NAME}{KERNEL}][\w {CASE}{NAME}{KERNEL}]*: *")


def labels(states: Sequence[str], here: bool) -> dict[str, str]:
    """States as the pages of a run spell them: what went as far as it could where nothing is executed is no pass."""
    return {state: UNEXECUTED if state == "pass" and not here else state for state in states}


def signs(here: bool) -> dict[str, str]:
    """A letter for each state, as the pages of a run show it."""
    return SIGNS if here else SIGNS | {"pass": "U"}


def generalise(text: str, result: Result) -> str:
    """``text`` with stand-ins for the result's case id, case name and kernel, so that equal texts meet."""
    name = result.case.partition("/")[2]
    text = text.replace(result.case, CASE)
    if name:
        text = text.replace(name, NAME)
    if result.kernel in text:
        text = re.sub(rf"(?<![\w.]){re.escape(result.kernel)}(?![\w.])", KERNEL, text)
    return text


def shown(text: str) -> str:
    """A generalised text for reading: stand-ins become words."""
    for mark, word in _SHOWN.items():
        text = text.replace(mark, word)
    return text


def sentence(text: str, result: Result) -> str:
    """A message without its opening "case on kernel:", for where both stand beside it."""
    general = generalise(text, result)
    rest = _OPENING.sub("", general, count=1) or general
    return (
        rest.replace(CASE, result.case)
        .replace(NAME, result.case.partition("/")[2])
        .replace(KERNEL, result.kernel)
    )


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters; the middle of a longer text is left out, and its length said."""
    if len(text) <= limit:
        return text
    left = f" [... {len(text) - limit} characters left out ...] "
    head = max(0, limit - len(left)) // 2
    tail = max(0, limit - len(left) - head)
    return text[:head] + left + text[len(text) - tail :]


def embedded(value: object) -> str:
    """JSON that is safe inside a script element: ASCII without ``<``, ``>`` and ``&``, which HTML reads."""
    spelled = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        spelled = spelled.replace(character, f"\\u{ord(character):04x}")
    return spelled


def number(value: float | None, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits; a dash when absent."""
    return DASH if value is None else f"{value:.{digits}g}"


def fraction(value: float | None) -> str:
    """A budget fraction; one that is not 1 is never rounded to 1, since 1 is the limit."""
    spelled = number(value)
    if value is not None and spelled == "1" and value != 1:
        return "<1" if value < 1 else ">1"
    return spelled


def duration(seconds: float | None) -> str:
    """Seconds for people: ``0.021 s``, ``83 s``, ``12 min 05 s``; ``unknown`` when absent."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


_LONGEST = 200  # characters of a cell


def aligned(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of aligned columns, indented."""
    cells = [[clip(" ".join(cell.split()), _LONGEST) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells]
