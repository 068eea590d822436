"""Reading TOML files whose keys, types and values are all checked; a mistake is one line with file and key."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError, unknown_name

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - Python 3.10
    import tomli as tomllib

_TYPES = {str: "a string", list: "a list", dict: "a table", int: "an integer", bool: "true or false",
          list[str]: "a list of names"}
_LARGEST = 2**63 - 1  # what TOML promises of integers


def parse_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConformanceError with file and, where it is malformed, line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConformanceError(f"{path}: malformed TOML: {error}") from None
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise ConformanceError(f"{path}: cannot be read as TOML: {error}") from None


def check_table(table: Any, known: Mapping[str, Any], where: str, required: tuple[str, ...] = ()) -> None:
    """Check the keys of a table and their values, whose types ``known`` gives (``object``: any; ``list[str]``: names,
    at least one, none of them twice). No string may be blank, and no integer beyond 64 bits. Raises ConformanceError.
    """
    if not isinstance(table, dict):
        raise ConformanceError(f"{where}: must be a table, is {table!r:.200}")
    for key, value in table.items():
        if key not in known:
            raise unknown_name(f"key in {where}:", key, known)
        if known[key] is not object:
            _check_value(value, known[key], f"{where}: key {key!r}")
    for key in required:
        if key not in table:
            raise ConformanceError(f"{where}: key {key!r} is missing")


def _check_value(value: Any, kind: Any, where: str) -> None:
    names = kind == list[str]
    fits = type(value) is (list if names else kind)
    if not fits or (names and not all(isinstance(item, str) for item in value)):
        raise ConformanceError(f"{where} must be {_TYPES[kind]}, is {value!r:.200}")
    if (names and not value) or not all(text.strip() for text in (value if names else [value] if kind is str else [])):
        raise ConformanceError(f"{where} must not be empty, is {value!r:.200}")
    if names and len(set(value)) != len(value):
        raise ConformanceError(f"{where}: a name stands twice in {value!r:.200}")
    if kind is int:
        check_size(value, where)


def check_size(value: int, where: str) -> None:
    """Raises ConformanceError for an integer that needs more than 64 bits."""
    if abs(value) > _LARGEST:
        raise ConformanceError(f"{where}: {value} needs more than 64 bits")
