"""What a run asks to change in the rules of expectation, as a diff for a person to read and apply.

A rule that every one of its cases contradicts is taken out; one that some contradict is narrowed, when one parameter
tells them apart; a path that nothing declares is offered as a new rule that matches no other case of the run and whose
reason a person must fill in; where it would match cases of other tiers, it says how many. No rule is ever made to match
more than it did.
"""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError
from conformance.expectations.files import FILL_IN
from conformance.registry import ROOT, matrices

_AGAINST = ("unexpected-native", "unexpected-pass", "wrong-fallback", "other-failure")
_READ = ("kernel", "operator", "params", "kind", "state", "path", "expected")  # what is read of a result
Line = Mapping[str, Any]


@dataclass(frozen=True)
class _Place:
    """Where a rule stands: its file and the number of its header's line, from 1."""

    file: Path
    line: int


def propose(records: Path) -> tuple[str, list[str]]:
    """(unified diff, remarks on what no diff can mend) for a record file. Raises ConformanceError for other files."""
    run, results = _read(records)
    edits: dict[Path, list[str]] = {}
    remarks: list[str] = []
    by_rule: dict[str, list[Line]] = {}
    for result in results:
        if result.get("expected") and result["expected"].get("where"):
            by_rule.setdefault(result["expected"]["where"], []).append(result)
    # from the last line of a file to its first, so that the numbers of earlier lines stay right
    for where, members in sorted(by_rule.items(), key=lambda item: -_place(item[0]).line):
        against = [result for result in members if result["kind"] in _AGAINST]
        if against:
            remarks += _change(edits, _place(where), against, [r for r in members if r not in against])
    silent = [result for result in results if result["kind"] == "silent-fallback"]
    own = [result for result in silent if _is_own(result["kernel"], run)]
    if own:
        rules = "\n".join(_new_rules(own, results, str(run["arch"])))
        remarks.append(f"for a file of --expectations, as these kernels are not this checkout's:\n{rules}\n")
    silent = [result for result in silent if result not in own]
    if silent:
        file = ROOT / "matrices" / "archs" / f"{run['arch']}.toml"
        if not file.exists():
            remarks.append(f"{run['arch']} has no table in matrices/archs; make one, then ask again")
        else:
            lines = edits.setdefault(file, file.read_text(encoding="utf-8").splitlines())
            lines += _new_rules(silent, results)
    return "".join(_diff(file, lines) for file, lines in edits.items()), remarks


def _read(path: Path) -> tuple[Line, list[Line]]:
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConformanceError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConformanceError(f"{path}: cannot be read as records: {error}") from None
    if not lines or not isinstance(lines[0], dict) or lines[0].get("type") != "run" or "arch" not in lines[0]:
        raise ConformanceError(f"{path}: no 'run' line at its start: this is no record file")
    results: list[Line] = [line for line in lines[1:] if isinstance(line, dict) and line.get("type") == "result"]
    for result in results:
        lacking = [key for key in _READ if key not in result]
        if lacking:
            raise ConformanceError(f"{path}: a result without {', '.join(lacking)}: this is no record file")
        for key in ("expected", "params"):
            if not isinstance(result[key] or {}, dict):
                raise ConformanceError(f"{path}: a result whose {key!r} is {result[key]!r}: this is no record file")
    return lines[0], results


def _is_own(kernel: str, run: Line) -> bool:
    """Whether the kernel came from elsewhere: a rule for it in this checkout would be stale in every other run."""
    module = str(run.get("kernels", {}).get(kernel, {}).get("module", "kernels."))
    return not module.startswith("kernels.")


def _place(where: str) -> _Place:
    file, _, line = where.rpartition(":")
    return _Place(ROOT / file, int(line) if line.isdecimal() else 0)


def _change(
    edits: dict[Path, list[str]], place: _Place, against: Sequence[Line], agreeing: Sequence[Line]
) -> list[str]:
    """Take the rule out, or narrow it; returns a remark where neither can be told from the run."""
    try:
        lines = edits.setdefault(place.file, place.file.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        return [f"{place.file}: cannot be read: {error.strerror}"]
    start = place.line - 1
    if not re.match(r"\s*\[\[.*expect\s*\]\]", lines[start] if 0 <= start < len(lines) else ""):
        return [f"{place.file}:{place.line}: no rule stands here any more; run again with the present file"]
    stop = next((i for i in range(start + 1, len(lines)) if re.match(r"\s*\[", lines[i])), len(lines))
    if not agreeing:
        del lines[start:stop]
        return []
    key = _telling(against, agreeing)
    match = next((i for i in range(start, stop) if lines[i].strip().startswith("match")), None)
    if key is None or match is None:
        return [f"{place.file}:{place.line}: {len(against)} cases contradict it and {len(agreeing)} agree; no single "
                "parameter tells them apart"]
    values = ", ".join(json.dumps(value, ensure_ascii=False) for value in _values(agreeing, key))
    ending = f", {key} = [{values}] }}"
    lines[match] = re.sub(r"\s*\}\s*$", lambda _: ending, _without(lines[match], key))
    return []


def _telling(against: Sequence[Line], agreeing: Sequence[Line]) -> str | None:
    """A parameter whose values among the one and among the other have nothing in common."""
    for key in agreeing[0]["params"]:
        if not set(_values(against, key)) & set(_values(agreeing, key)):
            return str(key)
    return None


def _values(results: Sequence[Line], key: str) -> list[str]:
    return sorted({str(result["params"].get(key, "")) for result in results})


def _without(line: str, key: str) -> str:
    """A one-line ``match`` without a key that it has already: what replaces it allows fewer values."""
    rest = re.sub(rf",?\s*\b{key}\s*=\s*(\[[^\]]*\]|\{{[^}}]*\}}|\"[^\"]*\"|\d+)", "", line)
    return re.sub(r"\{\s*,\s*", "{ ", rest)


def _new_rules(silent: Sequence[Line], results: Sequence[Line], arch: str = "") -> list[str]:
    """One rule for each kernel and undeclared path, with the parameter values that those cases have and others lack.
    ``arch``: named in the rule, as a file of --expectations needs it."""
    found: list[str] = []
    for kernel, path in dict.fromkeys((r["kernel"], r["path"]) for r in silent):
        members = [r for r in silent if (r["kernel"], r["path"]) == (kernel, path)]
        others = [r for r in results if r["kernel"] == kernel and r["path"] != path and r["state"] != "not-run"]
        match = {"operator": [members[0]["operator"]], "kernel": [kernel]}
        for key in members[0]["params"]:
            values = _values(members, key)
            if others and not set(values) >= set(_values(others, key)):
                match[key] = values
        spelled = ", ".join(f"{key} = {_toml(values)}" for key, values in match.items())
        today = datetime.date.today()
        same = [r for r in results if (r["operator"], r["kernel"]) == (members[0]["operator"], kernel)]
        remark = _unseen(match, same)
        found += ["", *remark, "[[expect]]", f"match = {{ {spelled} }}", *([f'arch = ["{arch}"]'] if arch else []),
                  'expect = "fallback"', f"path = {_toml([str(path)])}",
                  f'reason = "{FILL_IN}: why this is right"', f'source = "{FILL_IN}"', f'since = "{today}"',
                  f'until = "{today + datetime.timedelta(days=365)}"']
    return found


def _unseen(match: Mapping[str, Sequence[str]], known: Sequence[Line]) -> list[str]:
    """A comment where the matrices hold cases that a rule would match and that the run did not contain: nobody knows
    yet whether they take that path."""
    name = known[0]["operator"]
    if name not in matrices():
        return []
    of = matrices()[name]
    params = [case.params for case in of.plan(of.tier_names)]
    matched = [each for each in params if all(each.get(key) in values for key, values in match.items()
                                              if key not in ("operator", "kernel"))]
    # exact data can be asked for in a run, and then stand in no matrix
    seen = {frozenset(item for item in result["params"].items() if item[0] != "data") for result in known}
    unseen = sum(frozenset(item for item in each.items() if item[0] != "data") not in seen for each in matched)
    if not unseen:
        return []
    return [f"# {FILL_IN}: of the {len(matched)} cases that this matches in all tiers, {unseen} were not in the run: "
            "run them, or narrow it"]


def _toml(values: Sequence[str]) -> str:
    quoted = [json.dumps(value, ensure_ascii=False) for value in values]  # a basic string of TOML
    return quoted[0] if len(quoted) == 1 else f"[{', '.join(quoted)}]"


def _diff(file: Path, lines: Sequence[str]) -> str:
    name = str(file.relative_to(ROOT) if file.is_relative_to(ROOT) else file)
    before = file.read_text(encoding="utf-8").splitlines()
    found = difflib.unified_diff(before, list(lines), f"a/{name}", f"b/{name}", lineterm="")
    return "".join(f"{line}\n" for line in found)
