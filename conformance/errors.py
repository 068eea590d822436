"""Exceptions that end a run with one clear line, and those that a kernel may raise on purpose."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable


class ConformanceError(Exception):
    """Bad input from the user (option, file, name). Shown as one line, without a traceback."""


class NotSupported(Exception):
    """Raised by a kernel for a case it declares it cannot take: the result is "not-run" with this reason."""


class NoAnswer(Exception):
    """What a kernel declares as a function (supports=, requires=, repeatable=) raised, or returned no answer: the
    kernel is to blame, and the message says so in one line."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConformanceError:
    """An error that names the unknown value, the closest known one and all known ones."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConformanceError(f"unknown {what} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")


def text_of(error: BaseException) -> str:
    """What an exception says, "" for nothing; that it cannot say it, where its __str__ raises."""
    try:
        return str(error).strip()
    except BaseException as other:
        return f"(without a text: its __str__ raised {type(other).__name__})"


def spelled_out(error: BaseException) -> str:
    """"ValueError: its text", or the bare name of an exception that says nothing."""
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def trace_of(error: BaseException, frames: int) -> str:
    """The traceback with its innermost ``frames``; without it where the exception does not let itself be formatted."""
    try:
        return "".join(traceback.format_exception(error, limit=-frames))
    except Exception:
        return "".join(traceback.format_tb(error.__traceback__, limit=-frames)) + spelled_out(error)
