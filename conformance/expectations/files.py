"""Reading architecture tables and rules of expectation: every key, type, name and date is checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.arch import FACTS, FP8_FORMATS, Arch, Fact, kind_of
from conformance.errors import ConformanceError, unknown_name
from conformance.expectations.rule import FAILURES, KINDS, LANES, Condition, Expectation, Range
from conformance.expectations.until import check_dates
from conformance.toml_file import check_size, check_table, parse_toml

_ARCH = {"name": str, "about": str, "device": str, "language": str, "target": dict, "fact": dict, "expect": list,
         "skip": list}
_FACT = {"value": object, "source": str}
_RULE = {
    "match": dict, "facts": dict, "arch": list[str], "expect": str, "path": str, "failure": str, "signature": str,
    "lane": str, "reason": str, "source": str, "since": str, "until": str,
}
_SKIP = {"match": dict, "facts": dict, "reason": str, "source": str}
_NEEDED = ("match", "expect", "reason", "source", "since", "until")
FILL_IN = "FILL IN"  # what a proposed rule says where a person must say why
_ROOT = Path(__file__).resolve().parents[2]


def read_arch(path: Path) -> Arch:
    """One ``matrices/archs/NAME.toml``. Raises ConformanceError with file, line or key, and what is wrong."""
    data = parse_toml(path)
    check_table(data, _ARCH, str(path), ("name", "about", "device", "language"))
    if data["name"] != path.stem:
        raise ConformanceError(f"{path}: name = {data['name']!r}: must be the file's, {path.stem!r}")
    for key, known in (("device", ("cpu", "cuda")), ("language", ("c", "cuda", "hip", "maca"))):
        if data[key] not in known:
            raise unknown_name(f"{key} in {path}", data[key], known)
    facts = {name: _fact(name, table, f"{path}: fact {name!r}") for name, table in data.get("fact", {}).items()}
    rules = read_rules(path, data.get("expect", []), needs_arch=False)
    for rule in rules:
        if rule.archs:
            raise ConformanceError(f"{rule.where}: key 'arch' is not for a table's own rules: they are about it")
    target = _target(data, path)
    skips = read_skips(path, data.get("skip", []))
    return Arch(data["name"], data["about"], data["device"], data["language"], target, facts, rules, skips)


def _target(data: Mapping[str, Any], path: Path) -> dict[str, str]:
    """TileLang's target; one for other hardware would pass for this architecture's."""
    target = data.get("target", {})
    if target == {} and "target" in data:
        raise ConformanceError(f"{path}: target = {{}}: leave it out where TileLang has no target for {data['name']}")
    key = {"cuda": "arch", "hip": "mcpu"}.get(data["language"])
    check_table(target, {"kind": str, **({key: str} if key else {})}, f"{path}: target")
    if target and target.get("kind") != data["language"]:
        raise ConformanceError(f"{path}: target: kind = {target.get('kind')!r} must be the language")
    if target and key and str(target.get(key)).rstrip("af" if key == "arch" else "") != data["name"]:
        raise ConformanceError(f"{path}: target: {key} = {target.get(key)!r} is not {data['name']}")
    return dict(target)


def read_rules_file(path: Path) -> tuple[Expectation, ...]:
    """A file of nothing but ``[[expect]]`` rules, as ``--expectations`` names it; each says for which ``arch``."""
    data = parse_toml(path)
    check_table(data, {"expect": list}, str(path), ("expect",))
    return read_rules(path, data["expect"])


def _fact(name: str, table: Any, where: str) -> Fact:
    if name not in FACTS:
        raise unknown_name(f"fact in {where}:", name, FACTS)
    check_table(table, _FACT, where, ("value", "source"))
    kind, value = FACTS[name][0], table["value"]
    if type(value) is not kind:
        raise ConformanceError(f"{where}: value {value!r} must be of type {kind.__name__}: {FACTS[name][1]}")
    if isinstance(value, int) and kind is int and value <= 0:
        raise ConformanceError(f"{where}: value {value} must be above 0; leave out what is not known")
    if isinstance(value, int):
        check_size(value, where)
    if isinstance(value, dict) and not (value and all(type(e) is bool and key.strip() for key, e in value.items())):
        raise ConformanceError(f"{where}: must have entries, each with a name and true or false, is {value!r}")
    if name == "fp8" and value not in FP8_FORMATS:
        raise unknown_name(f"value of {where}:", str(value), FP8_FORMATS)
    return Fact(value, table["source"])


def read_rules(
    path: Path, tables: list[Any], header: str = "expect", needs_arch: bool = True
) -> tuple[Expectation, ...]:
    """The rules under the headers ``[[header]]`` of one file. ``needs_arch``: each must say for which architectures."""
    places = _places(path, tables, header)
    return tuple(_rule(table, where, needs_arch) for table, where in zip(tables, places, strict=True))


def read_skips(path: Path, tables: list[Any], operator: str = "") -> tuple[Expectation, ...]:
    """The cases that a file leaves out, each with its reason; kernels are told apart by rules only. Those of an
    architecture's table name operators; those of the matrix of one ``operator`` hold on every architecture."""
    found = []
    for table, where in zip(tables, _places(path, tables, "skip"), strict=True):
        check_table(table, _SKIP, where, ("match", "reason", "source"))
        match, facts = _conditions(table, where)
        if operator:
            if not match or facts or {"operator", "kernel", "variant"} & set(match):
                raise ConformanceError(f"{where}: a skip of a matrix matches parameters of its own cases or 'family', "
                                       "everywhere: it takes no 'facts', 'operator', 'kernel' or 'variant'")
            if any(isinstance(value, Range) and value.above for value in match.values()):
                raise ConformanceError(f"{where}: a skip of a matrix compares with no fact of an architecture")
        elif "operator" not in match or {"kernel", "variant"} & set(match):
            raise ConformanceError(f"{where}: a skip's match needs 'operator' and takes neither 'kernel' nor 'variant'")
        found.append(Expectation(match=match, facts=facts, reason=table["reason"], source=table["source"], where=where))
    return tuple(found)


def _places(path: Path, tables: list[Any], header: str) -> list[str]:
    """File and line of each table under the headers ``[[header]]``."""
    lines = _lines_of(path, header)
    if len(lines) != len(tables):  # an inline list, a quoted name: TOML, but a rule could not say its line
        raise ConformanceError(
            f"{path}: {len(tables)} tables and {len(lines)} headers [[{header}]]: begin each one with such a line"
        )
    shown = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
    return [f"{shown}:{line}" for line in lines]


def _conditions(table: Mapping[str, Any], where: str) -> tuple[dict[str, Condition], dict[str, tuple[Any, ...]]]:
    if table.get("facts") == {}:
        raise ConformanceError(f"{where}: facts = {{}}: leave it out where no fact counts")
    match = {key: _condition(value, f"{where}: match.{key}") for key, value in table["match"].items()}
    return match, {key: _values(key, value, f"{where}: facts.{key}") for key, value in table.get("facts", {}).items()}


def _lines_of(path: Path, table: str) -> list[int]:
    """Line numbers of the headers ``[[table]]``: the parser does not tell them."""
    header = re.compile(rf"\s*\[\[\s*{re.escape(table)}\s*\]\]")
    return [n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if header.match(line)]


def _rule(table: Any, where: str, needs_arch: bool) -> Expectation:
    check_table(table, _RULE, where, (*_NEEDED, *(("arch",) if needs_arch else ())))
    if table["reason"].startswith(FILL_IN):
        raise ConformanceError(f"{where}: say why in 'reason': {table['reason']!r} is only a place for it")
    kind, failure = table["expect"], table.get("failure", "")
    if kind not in KINDS:
        raise unknown_name(f"expectation in {where}", kind, KINDS)
    fails = kind in ("unsupported", "known-failure")
    for key, needed in (("path", kind == "fallback"), ("failure", fails)):
        if (key in table) != needed:
            raise ConformanceError(f"{where}: expect = {kind!r} {'needs' if needed else 'takes no'} {key!r}")
    if fails and failure not in FAILURES:
        raise unknown_name(f"failure in {where}", failure, FAILURES)
    if (kind == "known-failure" or failure == "refused-by-compiler") and not table.get("signature"):
        what = "a known failure" if kind == "known-failure" else f"failure = {failure!r}"
        raise ConformanceError(f"{where}: {what} needs a 'signature', a part of its message")
    if not fails and ("signature" in table or "lane" in table):
        raise ConformanceError(f"{where}: expect = {kind!r} takes neither 'signature' nor 'lane'")
    lane = table.get("lane", FAILURES.get(failure, "route"))
    if lane not in LANES:
        raise unknown_name(f"lane in {where}", lane, LANES)
    check_dates(table["since"], table["until"], where)
    match, facts = _conditions(table, where)
    return Expectation(
        kind=kind, path=table.get("path", ""), failure=failure, signature=table.get("signature", ""), lane=lane,
        match=match, facts=facts, archs=tuple(table["arch"]) if "arch" in table else (),
        reason=table["reason"], source=table["source"], since=table["since"], until=table["until"], where=where,
    )


def _condition(value: Any, where: str) -> Condition:
    """A value, a list of values, or a table with ``min``, ``max`` or ``above``."""
    if isinstance(value, dict):
        check_table(value, {"min": int, "max": int, "above": str}, where)
        if not value:
            raise ConformanceError(f"{where}: a range needs 'min', 'max' or 'above'")
        if "min" in value and "max" in value and value["min"] > value["max"]:
            raise ConformanceError(f"{where}: no number is in the range from {value['min']} to {value['max']}")
        if "above" in value and FACTS.get(value["above"], (None,))[0] is not int:
            raise unknown_name(f"fact in {where}.above", value["above"], [n for n, (t, _) in FACTS.items() if t is int])
        return Range(value.get("min"), value.get("max"), value.get("above", ""))
    items = value if isinstance(value, list) else [value]
    if not items or not all(type(item) in (str, int) and str(item).strip() for item in items):
        raise ConformanceError(f"{where}: {value!r} must be a string, an integer, a list of them, or a range; "
                               "not empty")
    if len({str(item) for item in items}) != len(items):
        raise ConformanceError(f"{where}: a value stands twice in {value!r}")
    return tuple(str(item) for item in items)


def _values(name: str, value: Any, where: str) -> tuple[Any, ...]:
    kind = kind_of(name, where)
    values = tuple(value) if isinstance(value, list) else (value,)
    if not values or not all(type(each) is kind for each in values):
        raise ConformanceError(f"{where}: {value!r} must be of type {kind.__name__}, or a list of such values")
    return values
