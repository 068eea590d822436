"""Reading architecture tables and rules of expectation: every key, type, name and date is checked."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.arch import FACTS, FP8_FORMATS, Arch, Fact
from conformance.errors import ConformanceError, unknown_name
from conformance.expectations.rule import FAILURES, KINDS, LANES, Condition, Expectation, Range
from conformance.matrix_file import check_table, parse_toml

_ARCH = {"name": str, "about": str, "device": str, "language": str, "target": dict, "fact": dict, "expect": list,
         "skip": list}
_FACT = {"value": object, "source": str}
_RULE = {
    "match": dict, "facts": dict, "arch": list, "expect": str, "path": str, "failure": str, "signature": str,
    "lane": str, "reason": str, "source": str, "since": str, "until": str,
}
_SKIP = {"match": dict, "facts": dict, "reason": str, "source": str}
_NEEDED = ("match", "expect", "reason", "source", "since", "until")
PACKAGES = ("tilelang", "torch")  # whose versions an "until" may name
FILL_IN = "FILL IN"  # what a proposed rule says where a person must say why
_ROOT = Path(__file__).resolve().parents[2]
_UNTIL = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)|(?P<package>[\w-]+)\s*>=\s*(?P<version>[\w.]+)|(?P<fact>[\w.]+)=(?P<value>\w+)"
)


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
    if not table["source"].strip():
        raise ConformanceError(f"{where}: key 'source' must not be empty")
    if isinstance(value, dict) and not all(type(entry) is bool for entry in value.values()):
        raise ConformanceError(f"{where}: every entry must be true or false")
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
        for key in ("reason", "source"):
            if not table[key].strip():
                raise ConformanceError(f"{where}: key {key!r} must not be empty")
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
    match = {key: _condition(value, f"{where}: match.{key}") for key, value in table["match"].items()}
    return match, {key: _values(key, value, f"{where}: facts.{key}") for key, value in table.get("facts", {}).items()}


def _lines_of(path: Path, table: str) -> list[int]:
    """Line numbers of the headers ``[[table]]``: the parser does not tell them."""
    header = re.compile(rf"\s*\[\[\s*{re.escape(table)}\s*\]\]")
    return [n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if header.match(line)]


def _rule(table: Any, where: str, needs_arch: bool) -> Expectation:
    check_table(table, _RULE, where, (*_NEEDED, *(("arch",) if needs_arch else ())))
    for key in ("reason", "source", "since", "path", "arch"):
        if table.get(key) in ("", []):
            raise ConformanceError(f"{where}: key {key!r} must not be empty")
    if not all(isinstance(name, str) for name in table.get("arch", ())):
        raise ConformanceError(f"{where}: arch = {table['arch']!r} must be a list of names")
    if table["reason"].startswith(FILL_IN):
        raise ConformanceError(f"{where}: say why in 'reason': {table['reason']!r} is only a place for it")
    kind, failure = table["expect"], table.get("failure", "")
    if kind not in KINDS:
        raise unknown_name(f"expectation in {where}", kind, KINDS)
    fails = kind in ("unsupported", "known-failure")
    for key, needed in (("path", kind == "fallback"), ("failure", fails)):
        if (key in table) != needed:
            raise ConformanceError(f"{where}: expect = {kind!r} {'needs' if needed else 'takes no'} {key!r}")
    if failure and failure not in FAILURES:
        raise unknown_name(f"failure in {where}", failure, FAILURES)
    if (kind == "known-failure" or failure == "refused-by-compiler") and not table.get("signature"):
        what = "a known failure" if kind == "known-failure" else f"failure = {failure!r}"
        raise ConformanceError(f"{where}: {what} needs a 'signature', a part of its message")
    if not fails and ("signature" in table or "lane" in table):
        raise ConformanceError(f"{where}: expect = {kind!r} takes neither 'signature' nor 'lane'")
    lane = table.get("lane", FAILURES.get(failure, "route"))
    if lane not in LANES:
        raise unknown_name(f"lane in {where}", lane, LANES)
    _check_dates(table, where)
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
        if "above" in value and FACTS.get(value["above"], (None,))[0] is not int:
            raise unknown_name(f"fact in {where}.above", value["above"], [n for n, (t, _) in FACTS.items() if t is int])
        return Range(value.get("min"), value.get("max"), value.get("above", ""))
    items = value if isinstance(value, list) else [value]
    if not items or not all(type(item) in (str, int) for item in items):
        raise ConformanceError(f"{where}: {value!r} must be a string, an integer, a list of them, or a range")
    return tuple(str(item) for item in items)


def _values(name: str, value: Any, where: str) -> tuple[Any, ...]:
    kind = _kind_of(name, where)
    values = tuple(value) if isinstance(value, list) else (value,)
    if not values or not all(type(each) is kind for each in values):
        raise ConformanceError(f"{where}: {value!r} must be of type {kind.__name__}, or a list of such values")
    return values


def _kind_of(name: str, where: str) -> type:
    """Type of the value that a fact has, by the name that rules use: an entry of a table is true or false."""
    table, dot, entry = name.partition(".")
    if table not in FACTS:
        raise unknown_name(f"fact in {where}", name, FACTS)
    kind = FACTS[table][0]
    if (kind is dict) != bool(dot and entry):
        form = f"{table}.NAME, an entry of a table" if kind is dict else table
        raise ConformanceError(f"{where}: {name!r} must be written {form}")
    return bool if kind is dict else kind


def _check_dates(table: Mapping[str, Any], where: str) -> None:
    until = _UNTIL.fullmatch(table["until"])
    if until is None:
        raise ConformanceError(
            f"{where}: until = {table['until']!r} must be a date (2027-06-30), a version (tilelang>=0.1.16) or a fact "
            "(fp8=ocp)"
        )
    for key, text in (("since", table["since"]), ("until", until["date"])):
        try:
            datetime.date.fromisoformat(text or "2000-01-01")
        except ValueError:
            raise ConformanceError(f"{where}: {key} = {text!r} is no date such as 2026-11-29") from None
    if until["package"]:
        _check_version(until["package"], until["version"], where)
    if until["fact"]:
        kind = _kind_of(until["fact"], f"{where}: until")
        known = {bool: ("true", "false"), str: FP8_FORMATS}.get(kind)
        if (known and until["value"].lower() not in known) or (kind is int and not until["value"].isdecimal()):
            raise ConformanceError(f"{where}: until = {table['until']!r}: {until['fact']} never has this value")


def _check_version(package: str, text: str, where: str) -> None:
    from packaging.version import InvalidVersion, Version

    if package not in PACKAGES:  # of another one it could never come
        raise unknown_name(f"package in {where}: until", package, PACKAGES)
    try:
        Version(text)
    except InvalidVersion:
        raise ConformanceError(f"{where}: until: {text!r} is no version") from None


def over(rule: Expectation, arch: Arch, today: datetime.date, versions: Mapping[str, str]) -> str | None:
    """Why the rule's ``until`` has come, or None. ``versions``: installed packages."""
    from packaging.version import Version

    until = _UNTIL.fullmatch(rule.until)
    if until is None:
        return None
    if until["date"]:
        return f"{until['date']} has come" if today >= datetime.date.fromisoformat(until["date"]) else None
    if until["package"]:
        here = versions.get(until["package"])
        reached = here is not None and Version(here) >= Version(until["version"])
        return f"{until['package']} {here} is installed" if reached else None
    value = arch.fact(until["fact"])
    return f"{until['fact']} is {until['value']} now" if str(value).lower() == until["value"].lower() else None
