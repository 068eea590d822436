"""Reading record files: whole, killed, repeated and malformed."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from reports import ReportError, read_records, write_report
from reports.architecture import architecture
from reports.digest import NO_RESULT, digest

POINTS = list(itertools.islice(samples.official_params(), 4))


def _file(tmp_path: Path, content: list[samples.Line]) -> Path:
    return samples.write(tmp_path / "cpu.jsonl", content)


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    records = read_records(_file(tmp_path, samples.lines(iter(POINTS))))
    assert (len(records.results), records.truncated, records.replaced, records.missing) == (12, False, 0, {})
    assert records.end is not None and records.end.exit == 0
    first = records.results[0]
    assert first.params["topk"] == "2" and first.kernel == "h_tiled" and first.level == "bit-exact"
    assert records.run.kernels["torch_gather"].promise == "within-budget"
    verdict = digest(records).verdict
    assert (verdict.word, verdict.reason) == ("PASS", "12 of 12 results passed")


@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_killed_writer_is_told(tmp_path: Path, cut: int) -> None:
    content = samples.lines(iter(POINTS))[:-1]
    path = _file(tmp_path, content)
    path.write_bytes(path.read_bytes()[: -1 - cut])
    records = read_records(path)
    assert records.truncated and records.end is None and len(records.results) == 11
    verdict = digest(records).verdict
    assert not verdict.passed
    assert verdict.reason == "run did not finish: 11 of 12 planned results recorded"
    assert any("cut off" in note for note in verdict.notes)


def test_a_last_line_without_newline_counts_when_it_is_whole(tmp_path: Path) -> None:
    path = _file(tmp_path, samples.lines(iter(POINTS)))
    path.write_bytes(path.read_bytes()[:-1])
    records = read_records(path)
    assert records.end is not None and not records.truncated


def test_planned_results_without_a_line_are_not_run(tmp_path: Path) -> None:
    content = samples.lines(iter(POINTS))
    del content[1], content[4]
    summary = digest(read_records(_file(tmp_path, content)))
    assert summary.counts["not-run"] == 2 and summary.total == 12
    assert [(group.reason, group.count) for group in summary.not_run] == [(NO_RESULT, 2)]
    assert not summary.verdict.passed and summary.verdict.reason == "2 planned results of 12 not recorded"


def test_the_later_of_two_lines_wins(tmp_path: Path) -> None:
    content = samples.lines(iter(POINTS))
    again = dict(content[1])
    samples.fail(again, 1)
    content.insert(-1, again)
    records = read_records(_file(tmp_path, content))
    assert records.replaced == 1 and len(records.results) == 12 and records.results[0].state == "fail"
    assert digest(records).verdict.reason == "1 of 12 results failed"


def test_not_run_reasons_are_grouped_without_the_names_in_them(tmp_path: Path) -> None:
    def idle(line: samples.Line, number: int) -> None:
        if line["kernel"] == "per_token":
            message = f"{line['case']} on per_token: no C compiler"
            line.update(state="not-run", level=None, budget_fraction=None, message=message)

    content = samples.lines(iter(POINTS), idle)
    content[-1].update(exit=1, problems=["per_token executed nothing: no C compiler"])
    summary = digest(read_records(_file(tmp_path, content)))
    assert [(group.reason, group.kernels) for group in summary.not_run] == [
        ("no C compiler", {"per_token": 4})
    ]
    assert summary.verdict.reason == "per_token executed nothing: no C compiler"
    assert summary.verdict.notes == ()  # the problem says it already


@pytest.mark.parametrize(
    ("state", "lane", "end", "reason"),
    [
        ("pass", "lower", {}, "nothing was executed"),
        ("not-run", "execute", {}, "nothing was executed"),
        ("pass", "execute", {"exit": 2}, "the run ended with exit code 2"),
        ("pass", "execute", {"exit": None, "problems": ["disk full"]}, "disk full"),
        ("timeout", "execute", {"exit": 1}, "12 of 12 results failed"),
    ],
)
def test_verdicts(tmp_path: Path, state: str, lane: str, end: dict[str, Any], reason: str) -> None:
    content = samples.lines(iter(POINTS), lambda line, number: line.update(state=state, lane=lane))
    content[-1].update(samples.end_line(**end))
    verdict = digest(read_records(_file(tmp_path, content))).verdict
    assert (verdict.reason, verdict.passed) == (reason, reason.startswith("12 of 12 results passed"))


def test_a_rule_without_a_number_of_cases_is_shown_with_none(tmp_path: Path) -> None:
    content = samples.lines(iter(POINTS))
    content[0].update(rules=[{"text": "a rule", "cases": None}])
    (row,) = architecture(read_records(_file(tmp_path, content))).rules
    assert (row.text, row.cases) == ("a rule", 0)


def test_nan_infinity_and_control_characters_survive(tmp_path: Path) -> None:
    content = samples.lines(iter(POINTS[:1]))
    content[1].update(budget_fraction=math.inf, max_error=math.nan, trace="\x1b[31mred\x1b[0m\x00 \ud800")
    result = read_records(_file(tmp_path, content)).results[0]
    assert (
        result.budget_fraction == math.inf and result.max_error is not None and math.isnan(result.max_error)
    )
    assert result.trace == "red\ufffd \ufffd"


def _raw(*lines: Any) -> str:
    return "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)


RUN = samples.run_line()
RESULT = samples.result_line(POINTS[0], "h_tiled")


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "no complete 'run' line"),
        ('{"type": "run", "sch', 1, "no complete 'run' line"),
        (_raw("{broken", RUN), 1, "not a JSON line"),
        (_raw(RUN, "{broken", RESULT), 2, "not a JSON line"),
        (_raw(RUN, [1]), 2, "expected an object, found [1]"),
        (_raw(RESULT, RUN), 1, "before the 'run' line"),
        (_raw(RUN, RUN), 2, "second 'run' line"),
        (_raw({"type": "bench-run"}), 1, "this is a file of timings, whose pages 'conformance bench' makes"),
        (_raw(RUN, {"type": "note"}), 2, "unknown type 'note'"),
        (_raw({**RUN, "schema": 2}), 1, "schema 2 is not the 1"),
        (_raw({**RUN, "rules": [{"cases": "all"}]}), 1, "rules.0: 'cases' must be an integer, is 'all'"),
        (_raw({**RUN, "planned": {"h_tiled": True}}), 1, "'h_tiled' must be an integer, is True"),
        (_raw({**RUN, "arch": None}), 1, "'arch' is missing"),
        (
            _raw({**RUN, "tolerances": {"op": {"bf16": "0.1"}}}),
            1,
            "'tolerances.op' must be an object of numbers",
        ),
        (_raw({**RUN, "tolerances": {"op": {"bf16": 10**400}}}), 1, "'tolerances.op' holds too large a number"),
        (_raw({**RUN, "probe": {"wave": 32}}), 1, "probe.wave: expected an object, found 32"),
        (_raw(RUN, {"type": "x" * 3000}), 2, f"unknown type '{'x' * 59};"),
        (_raw(RUN, {**RESULT, "state": "ok"}), 2, "unknown state 'ok'; known: pass, expected, fail"),
        (_raw(RUN, {**RESULT, "case": 7}), 2, "'case' must be a string, is 7"),
        (_raw(RUN, {**RESULT, "tiers": ["official", 3]}), 2, "'tiers' must be a list of strings"),
        (_raw({**RUN, "arch": "../cpu"}), 1, "cannot name a file"),
    ],
)
def test_a_malformed_file_is_one_error_with_its_line(tmp_path: Path, text: str, line: int, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError) as caught:
        write_report(path, tmp_path / "out")
    assert str(caught.value).startswith(f"{path}:{line}: ") and says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_and_a_closed_directory_are_errors_too(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ReportError, match="cannot be written"):
        write_report(_file(tmp_path, samples.lines(iter(POINTS))), tmp_path / "file")
