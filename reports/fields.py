"""Typed access to one JSON object of a record file; a mistake becomes one ReportError with file and line."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Final, TypeVar, overload

_REQUIRED: Final = object()
_SHORT = 40
_D = TypeVar("_D")

# Terminal colours in tracebacks, then every control character but tab and newline, then halves of surrogate
# pairs, which JSON can spell and UTF-8 cannot.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


class ReportError(Exception):
    """A record file that cannot be turned into a report. Shown as one line, without a traceback."""


def clean(text: str) -> str:
    """``text`` without terminal colours; other control characters and lone surrogates become U+FFFD. Short texts are
    shared: 100 000 results say the same few things."""
    if text.isprintable():
        return sys.intern(text) if len(text) <= _SHORT else text
    return _UNPRINTABLE.sub("\ufffd", _ESCAPES.sub("", text.replace("\r\n", "\n")))


def clean_tree(value: Any) -> Any:
    """A JSON value with every string and key cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [clean_tree(item) for item in value]
    if isinstance(value, dict):
        return {clean(str(key)): clean_tree(item) for key, item in value.items()}
    return value


class Fields:
    """The members of one JSON object. An absent or null one gives the default, or is an error without it."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise ReportError(f"{where}: expected an object, found {_short(value)}")
        self._members: dict[str, Any] = value
        self.where = where

    def _get(self, key: str, default: Any, types: type | tuple[type, ...], name: str) -> Any:
        value = self._members.get(key)
        if value is None:
            if default is _REQUIRED:
                raise ReportError(f"{self.where}: {key!r} is missing")
            return default
        # bool is an int in Python; a count that reads "true" is a mistake of the writer.
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise ReportError(f"{self.where}: {key!r} must be {name}, is {_short(value)}")
        return value

    def text(self, key: str, default: Any = _REQUIRED) -> str:
        return clean(self._get(key, default, str, "a string"))

    def optional(self, key: str) -> str | None:
        """A string, or None when the member is absent, null or empty."""
        return clean(self._get(key, "", str, "a string or null")) or None

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._get(key, default, bool, "true or false"))

    @overload
    def integer(self, key: str) -> int: ...
    @overload
    def integer(self, key: str, default: _D) -> int | _D: ...
    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, int, "an integer")

    def number(self, key: str) -> float | None:
        """A float (NaN and infinities included), or None when absent."""
        value = self._get(key, None, (int, float), "a number or null")
        try:
            return None if value is None else float(value)
        except OverflowError:
            raise ReportError(f"{self.where}: {key!r} is too large a number: {_short(value)}") from None

    def texts(self, key: str) -> tuple[str, ...]:
        items = self._get(key, [], list, "a list of strings")
        if not all(isinstance(item, str) for item in items):
            raise ReportError(f"{self.where}: {key!r} must be a list of strings, is {_short(items)}")
        return tuple(clean(item) for item in items)

    def table(self, key: str) -> dict[str, Any]:
        table: dict[str, Any] = clean_tree(self._get(key, {}, dict, "an object"))
        return table

    def tables(self, key: str) -> tuple[Mapping[str, Any], ...]:
        items = self._get(key, [], list, "a list of objects")
        if not all(isinstance(item, dict) for item in items):
            raise ReportError(f"{self.where}: {key!r} must be a list of objects, is {_short(items)}")
        return tuple(clean_tree(item) for item in items)

    def counts(self, key: str) -> dict[str, int]:
        table = self.table(key)
        inner = Fields(table, f"{self.where}: {key}")
        return {name: inner.integer(name) for name in table}

    def strings(self, table: Any, name: str) -> Mapping[str, str]:
        """``table`` as strings; numbers and the like are spelled as JSON would."""
        if not isinstance(table, dict):
            raise ReportError(f"{self.where}: {name!r} must be an object, is {_short(table)}")
        return {key: value if isinstance(value, str) else _short(value) for key, value in table.items()}

    def numbers(self, table: Any, name: str) -> Mapping[str, float]:
        if not isinstance(table, dict) or not all(isinstance(v, (int, float)) for v in table.values()):
            raise ReportError(f"{self.where}: {name!r} must be an object of numbers, is {_short(table)}")
        try:
            return {key: float(value) for key, value in table.items()}
        except OverflowError:
            raise ReportError(f"{self.where}: {name!r} holds too large a number: {_short(table)}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
