"""Reading a matrix file: every key, type and name is checked before anything is expanded."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError, unknown_name
from conformance.kernel import DEVICES

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - Python 3.10
    import tomli as tomllib

EDGE = "edge"
_TOP = {"operator": str, "about": str, "group": list, "order": list, "default_tiers": list, "bench_tiers": list,
        "tier": dict, "edge": list, "skip": list, "slots": str}
_TIER = {"about": str, "expand": list, "from": str, "select": dict, "cover": int, "spread": list, "mark": bool}
_EDGE = {"family": str, "about": str, "source": str, "expand": list, "cover": int, "smoke": int, "devices": list}
_TYPES = {str: "a string", list: "a list", dict: "a table", int: "an integer", bool: "true or false"}
_KEY, _VALUE, _FAMILY = (re.compile(text) for text in (r"[a-z0-9_]+", r"[^-/:\s]+", r"[A-Za-z0-9_.-]+"))


def read_matrix_file(path: Path) -> dict[str, Any]:
    """The checked content of one matrix file. Raises ConformanceError with file name and key."""
    data = parse_toml(path)
    check_table(data, _TOP, str(path), ("operator",))
    tables, edges = data.get("tier", {}), data.get("edge", [])
    for name, table in tables.items():
        check_table(table, _TIER, f"{path}: tier {name!r}")
    for name in tables:
        _check_source(name, tables, f"{path}: tier {name!r}")
    for number, edge in enumerate(edges):
        name = edge.get("family", number) if isinstance(edge, dict) else number
        _check_edge(edge, [other["family"] for other in edges[:number]], f"{path}: edge family {name!r}")
    if edges and EDGE in tables:
        raise ConformanceError(f"{path}: tier {EDGE!r} is the one of the edge families: give it another name")
    known = (*tables, EDGE) if edges else tuple(tables)
    for key in ("default_tiers", "bench_tiers"):
        for tier in data.get(key, ()):
            if tier not in known:
                raise unknown_name(f"tier in {path}, key {key!r}:", tier, known)
    return data


def parse_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. Raises ConformanceError with file and, where it is malformed, line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConformanceError(f"{path}: malformed TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConformanceError(f"{path}: cannot be read: {error}") from None


def words(values: Any, axis: str, where: str) -> list[str]:
    """The values of an axis, one or a list of them, as strings. Raises ConformanceError for what no id can hold."""
    items = values if isinstance(values, list) else [values]
    if not items:
        raise ConformanceError(f"{where}: axis {axis!r} has no values, which would make the tier empty")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (str, int)):
            raise ConformanceError(f"{where}: axis {axis!r}: value {item!r} must be a string or an integer")
        if not _VALUE.fullmatch(str(item)) or not _KEY.fullmatch(axis):
            raise ConformanceError(f"{where}: axis {axis!r}: no case id can hold {axis}:{item}")
    texts = [str(item) for item in items]
    if len(set(texts)) != len(texts):
        raise ConformanceError(f"{where}: axis {axis!r}: a value stands twice in {items}")
    return texts


def _check_source(name: str, tables: Mapping[str, Any], where: str) -> None:
    """A tier is expanded by itself, or taken ``from`` one that is, perhaps by way of others."""
    table, seen = tables[name], {name}
    if ("expand" in table) == ("from" in table):
        raise ConformanceError(f"{where}: give either 'expand' or 'from'")
    while "from" in table:
        name = table["from"]
        if name not in tables:
            raise unknown_name(f"tier in {where}, key 'from':", name, tables)
        if name in seen:
            raise ConformanceError(f"{where}, key 'from': the tier {name!r} would be taken from itself")
        seen.add(name)
        table = tables[name]


def _check_edge(edge: Any, before: list[str], where: str) -> None:
    check_table(edge, _EDGE, where, ("family", "about", "source", "expand"))
    if not _FAMILY.fullmatch(edge["family"]):
        raise ConformanceError(f"{where}: no case id can hold this name")
    if edge["family"] in before:
        raise ConformanceError(f"{where}: two edge families have this name")
    for device in edge.get("devices", ()):
        if device not in DEVICES:
            raise unknown_name(f"device in {where}, key 'devices':", device, DEVICES)


def check_table(table: Any, known: Mapping[str, type], where: str, required: tuple[str, ...] = ()) -> None:
    """Check the keys of a table and the types of their values (``object``: any). Raises ConformanceError."""
    if not isinstance(table, dict):
        raise ConformanceError(f"{where}: must be a table")
    for key in table:
        if key not in known:
            raise unknown_name(f"key in {where}:", key, known)
        if known[key] is not object and type(table[key]) is not known[key]:
            raise ConformanceError(f"{where}: key {key!r} must be {_TYPES[known[key]]}, is {table[key]!r}")
    for key in required:
        if key not in table:
            raise ConformanceError(f"{where}: key {key!r} is missing")
    if not all(isinstance(block, dict) and block for block in table.get("expand", ())):
        raise ConformanceError(f"{where}: key 'expand' must list tables of axes")
