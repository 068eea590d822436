"""Changes to the rules that a run asks for: removed, narrowed, offered; never widened."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from conformance.commands import cli
from conformance.errors import ConformanceError
from conformance.expectations import proposal
from conformance.expectations.proposal import _without, propose
from conformance.registry import matrix
from conformance.toml_file import tomllib

RULES = """# a table
name = "gfx942"

[[expect]]
match = { kernel = "k", out = "e4m3" }
expect = "fallback"
path = "slow"
reason = "no fp8"
source = "ISA"
since = "2026-11-29"
until = "2027-06-30"

[[expect]]
match = { kernel = "other" }
expect = "native"
reason = "as ever"
source = "ISA"
since = "2026-11-29"
until = "2027-06-30"
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proposal, "ROOT", tmp_path)
    file = tmp_path / "matrices" / "archs" / "gfx942.toml"
    file.parent.mkdir(parents=True)
    file.write_text(RULES, encoding="utf-8")
    return tmp_path


def records(folder: Path, *results: dict[str, Any]) -> Path:
    file = folder / "gfx942.jsonl"
    lines = [{"type": "run", "arch": "gfx942"}, *({"type": "result", **result} for result in results)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def result(kind: str | None, path: str, where: str | None = "matrices/archs/gfx942.toml:4", **params: str
           ) -> dict[str, Any]:
    return {"operator": "op", "kernel": "k", "state": "fail" if kind else "pass", "kind": kind, "path": path,
            "params": params, "expected": {"where": where} if where else None}


def test_a_run_that_agrees_asks_for_nothing(checkout: Path) -> None:
    assert propose(records(checkout, result(None, "slow", out="e4m3"))) == ("", [])


def test_a_rule_that_all_its_cases_contradict_is_taken_out(checkout: Path) -> None:
    diff, remarks = propose(records(checkout, result("unexpected-native", "k", out="e4m3", hidden="1"),
                                    result("unexpected-native", "k", out="e4m3", hidden="2")))
    assert remarks == []
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert sorted(removed) == sorted(RULES.splitlines()[3:12])
    assert 'kernel = "other"' not in "".join(removed)
    assert "--- a/matrices/archs/gfx942.toml" in diff
    assert not [line for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]


def test_a_rule_that_some_contradict_is_narrowed_to_the_others(checkout: Path) -> None:
    diff, remarks = propose(records(
        checkout, result("unexpected-native", "k", out="e4m3", hidden="1"),
        result(None, "slow", out="e4m3", hidden="2"), result(None, "slow", out="e4m3", hidden="4")))
    assert remarks == []
    assert '+match = { kernel = "k", out = "e4m3", hidden = ["2", "4"] }' in diff
    assert diff.count("\n-") == 1


def test_a_rule_that_no_parameter_splits_is_left_to_a_person(checkout: Path) -> None:
    diff, remarks = propose(records(checkout, result("unexpected-native", "k", out="e4m3"),
                                    result(None, "slow", out="e4m3")))
    assert diff == ""
    assert "gfx942.toml:4: 1 cases contradict it and 1 agree" in remarks[0]


def test_an_undeclared_path_is_offered_with_a_reason_to_fill_in(checkout: Path) -> None:
    diff, _ = propose(records(
        checkout, result("silent-fallback", "slow", None, out="fp16", hidden="1"),
        result("silent-fallback", "slow", None, out="fp16", hidden="2"),
        result(None, "k", None, out="fp32", hidden="1"), result(None, "k", None, out="fp32", hidden="2")))
    added = [line[1:] for line in diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert added[:4] == ["", "[[expect]]", 'match = { operator = "op", kernel = "k", out = "fp16" }',
                         'expect = "fallback"']
    assert 'reason = "FILL IN: why this is right"' in added
    assert f'since = "{datetime.date.today()}"' in added


def test_a_rule_that_would_match_cases_which_the_run_did_not_contain_says_so(checkout: Path) -> None:
    """The smoke tier is 48 of 1152 official cases and 7489 full ones."""
    smoke = matrix("moe_reduce_fused").cases("smoke")
    fp8 = [case for case in smoke if case.params["out"] == "e4m3"]
    lines = [result("silent-fallback" if case in fp8 else None, "slow" if case in fp8 else "k", None, **case.params)
             | {"operator": "moe_reduce_fused"} for case in smoke]
    diff, _ = propose(records(checkout, *lines))
    (comment,) = [line for line in diff.splitlines() if line.startswith("+#")]
    every = matrix("moe_reduce_fused").plan(matrix("moe_reduce_fused").tier_names)
    (rule,) = [line for line in diff.splitlines() if line.startswith("+match")]
    assert 'out = "e4m3"' in rule
    matched = sum(case.params.get("out") == "e4m3" for case in every)
    unseen = len({case.id for case in every if case.params.get("out") == "e4m3"} - {case.id for case in fp8})
    assert comment == (f"+# FILL IN: of the {matched} cases that this matches in all tiers, {unseen} were not in the "
                       "run: run them, or narrow it")
    assert 0 < len(fp8) < matched


def test_a_rule_that_matches_nothing_else_says_nothing(checkout: Path) -> None:
    every = matrix("moe_reduction").plan(matrix("moe_reduction").tier_names)
    lines = [result("silent-fallback", "slow", None, **case.params) | {"operator": "moe_reduction"} for case in every]
    diff, _ = propose(records(checkout, *lines))
    assert "+[[expect]]" in diff
    assert "+#" not in diff


def test_no_proposal_matches_more_than_before(checkout: Path) -> None:
    """A wrong fallback is a person's to judge: the rule is narrowed or taken out, its path is never changed."""
    diff, _ = propose(records(checkout, result("wrong-fallback", "slower", out="e4m3")))
    assert 'path = "slower"' not in diff
    assert '-path = "slow"' in diff


def test_a_rule_for_a_kernel_from_elsewhere_goes_to_a_file_of_expectations(checkout: Path) -> None:
    file = records(checkout, result("silent-fallback", 'quoted "path"', where=None, out="e4m3"))
    lines = file.read_text(encoding="utf-8").splitlines()
    run = {"type": "run", "arch": "gfx942", "kernels": {"k": {"module": "my_kernels"}}}
    file.write_text("\n".join([json.dumps(run), *lines[1:]]), encoding="utf-8")
    diff, remarks = propose(file)
    assert not diff
    offered = remarks[0].partition("\n")[2]
    (found,) = tomllib.loads(offered)["expect"]
    assert (found["arch"], found["path"]) == (["gfx942"], 'quoted "path"')


@pytest.mark.parametrize(("line", "shorter"), [
    ('match = { out = ["a", "b"], kernel = "x" }', 'match = { kernel = "x" }'),
    ('match = { kernel = "x", out = { min = 2, max = 8 } }', 'match = { kernel = "x" }'),
    ('match = { kernel = "x", out = 8 }', 'match = { kernel = "x" }'),
])
def test_a_condition_is_taken_out_of_its_line(line: str, shorter: str) -> None:
    assert _without(line, "out") == shorter


def test_a_file_that_changed_meanwhile(checkout: Path) -> None:
    where = "matrices/archs/gfx942.toml:2"
    diff, remarks = propose(records(checkout, result("unexpected-native", "k", where, out="e4m3")))
    assert diff == ""
    assert "no rule stands here any more" in remarks[0]


def test_the_command_line(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = records(checkout, result("unexpected-native", "k", out="e4m3"))
    before = (checkout / "matrices" / "archs" / "gfx942.toml").read_text()
    assert cli.main(["expectations", "--update", str(file)]) == 1
    assert '-path = "slow"' in capsys.readouterr().out
    assert (checkout / "matrices" / "archs" / "gfx942.toml").read_text() == before  # proposed, never written
    assert cli.main(["expectations", "--update", str(records(checkout, result(None, "slow", out="e4m3")))]) == 0
    assert "nothing to change" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "not json\n", '{"type": "result"}\n', "[]\n", '{"type": "run"}\n',
                                  '{"type": "run", "arch": "x"}\n{"type": "result"}\n'])
def test_what_is_no_record_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConformanceError, match=r"x\.jsonl"):
        propose(file)
    with pytest.raises(ConformanceError, match="cannot be read"):
        propose(tmp_path / "missing.jsonl")


def test_the_rules_in_force_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["expectations", "--arch", "gfx942,sm_90"]) == 0
    out = capsys.readouterr().out
    assert "fallback = h_tiled/bits" in out
    assert "matrices/archs/gfx942.toml:" in out
    assert "sm_90" not in out  # it has no rule
