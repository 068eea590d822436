"""Reading a matrix file: every key, type and name is checked before anything is expanded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError, unknown_name
from conformance.kernel import DEVICES
from conformance.toml_file import check_size, check_table, parse_toml

EDGE = "edge"
REQUIRE = "require"  # of a block: which of its points there are
_TOP = {"operator": str, "about": str, "group": list[str], "order": list[str], "default_tiers": list[str],
        "bench_tiers": list[str], "tier": dict, "edge": list, "skip": list, "slots": str}
_TIER = {"about": str, "expand": list, "from": str, "select": dict, "cover": int, "spread": list[str], "mark": bool}
_EDGE = {"family": str, "about": str, "source": str, "expand": list, "cover": int, "smoke": int, "devices": list[str]}
_DATA = "data"  # a parameter that --data gives to cases without it
_KEY, _VALUE, _FAMILY = (re.compile(text) for text in (r"[a-z0-9_]+", r"[^-/:\s]+", r"[A-Za-z0-9_.-]+"))


def read_matrix_file(path: Path) -> dict[str, Any]:
    """The checked content of one matrix file. Raises ConformanceError with file name and key."""
    data = parse_toml(path)
    check_table(data, _TOP, str(path), ("operator",))
    tables, edges = data.get("tier", {}), data.get("edge", [])
    for name, table in tables.items():
        _check_tier(table, f"{path}: tier {name!r}")
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
    blocks = [block for table in (*tables.values(), *edges) for block in table.get("expand", ())]
    axes = {_DATA, *(axis for block in blocks for axis in block)}
    for key in ("group", "order"):
        for axis in data.get(key, ()):
            if axis not in axes:
                raise unknown_name(f"parameter in {path}, key {key!r}:", axis, axes - {REQUIRE})
    return data


def words(values: Any, axis: str, where: str) -> list[str]:
    """The values of an axis, one or a list of them, as strings. Raises ConformanceError for what no id can hold."""
    items = values if isinstance(values, list) else [values]
    if not items:
        raise ConformanceError(f"{where}: axis {axis!r} has no values, which would make the tier empty")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, (str, int)):
            raise ConformanceError(f"{where}: axis {axis!r}: value {item!r:.200} must be a string or an integer")
        if isinstance(item, int):
            check_size(item, f"{where}: axis {axis!r}")
        if not _VALUE.fullmatch(str(item)) or not _KEY.fullmatch(axis):
            raise ConformanceError(f"{where}: axis {axis!r}: no case id can hold {axis}:{item}")
    texts = [str(item) for item in items]
    if len(set(texts)) != len(texts):
        raise ConformanceError(f"{where}: axis {axis!r}: a value stands twice in {items!s:.200}")
    return texts


def check_blocks(table: Mapping[str, Any], where: str) -> None:
    """Check the form of the blocks that a table expands. Raises ConformanceError."""
    blocks = table.get("expand", [{"": ""}])
    if not blocks or not all(isinstance(block, dict) and block.keys() - {REQUIRE} for block in blocks):
        raise ConformanceError(f"{where}: key 'expand' must list tables of axes, is {blocks!r:.200}")
    for block in blocks:
        rules = block.get(REQUIRE, [[]])
        if not isinstance(rules, list) or not rules:
            raise ConformanceError(f"{where}: key {REQUIRE!r} must list [axis, 'divides', axis], is {rules!r:.200}")


def check_number(table: Mapping[str, Any], key: str, there: int, where: str) -> None:
    """Check a number of cases that are chosen out of ``there``. Raises ConformanceError."""
    if key in table and not 1 <= table[key] <= there:
        raise ConformanceError(f"{where}: {key} = {table[key]}: give a number from 1 to {there}, the cases that there "
                               "are, or leave it out")


def _check_tier(table: Any, where: str) -> None:
    check_table(table, _TIER, where)
    check_blocks(table, where)
    for key in ("select", "cover", "spread", "mark"):
        if key in table and "from" not in table:
            raise ConformanceError(f"{where}: key {key!r} says what is taken from another tier: it needs 'from'")
    if table.get("select") == {}:
        raise ConformanceError(f"{where}: select = {{}}: leave it out where every case is taken")
    if "spread" in table and "cover" not in table:
        raise ConformanceError(f"{where}: key 'spread' says how to choose cases: it needs 'cover'")


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
    check_blocks(edge, where)
    if not _FAMILY.fullmatch(edge["family"]):
        raise ConformanceError(f"{where}: no case id can hold this name")
    if edge["family"] in before:
        raise ConformanceError(f"{where}: two edge families have this name")
    for device in edge.get("devices", ()):
        if device not in DEVICES:
            raise unknown_name(f"device in {where}, key 'devices':", device, DEVICES)
