"""What is kept for each of 100 000 results is little: one copy of every text, and of passing reports one for all."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import report_samples as samples
from test_scheduling import Run

from conformance.arch import Arch
from conformance.cases.plan import parse_nodeid, remember
from conformance.expectations.check import Points, governed
from conformance.expectations.rule import Expectation
from conformance.registry import matrix
from conformance.runs.recorder import Recorder
from conformance.session.progress import keep_one_of_many
from reports import read_records

OPERATOR = "moe_reduce_fused"


def reports(count: int, **more: Any) -> list[SimpleNamespace]:
    return [SimpleNamespace(passed=True, outcome="passed", conformance={}, nodeid=str(number), **more)
            for number in range(count)]


def terminal(chars: str = "", durations: int | None = None) -> Any:
    config = SimpleNamespace(option=SimpleNamespace(durations=durations))
    return SimpleNamespace(stats={}, reportchars=chars, config=config)


@pytest.mark.parametrize(("chars", "durations", "kept"), [
    ("", None, 1), ("fE", None, 1), ("p", None, 5), ("PA", None, 5), ("", 10, 5),
])
def test_of_reports_that_passed_one_is_kept(chars: str, durations: int | None, kept: int) -> None:
    here = terminal(chars, durations)
    for report in reports(5):
        here.stats.setdefault("passed", []).append(report)
        keep_one_of_many(here, report)
    assert len(here.stats["passed"]) == 5  # their number is right
    assert len({id(report) for report in here.stats["passed"]}) == kept


def test_other_reports_are_kept_as_they_are() -> None:
    here = terminal()
    failed, foreign = SimpleNamespace(passed=False, conformance={}), SimpleNamespace(passed=True)
    here.stats = {"failed": [failed], "passed": [foreign]}
    for report in (failed, foreign):
        keep_one_of_many(here, report)
    keep_one_of_many(None, failed)
    assert here.stats == {"failed": [failed], "passed": [foreign]}


def test_workers_that_planned_alike_share_one_plan() -> None:
    run = Run(3, ["a::1", "a::2", "b::1"])
    run.collect()
    kept = list(run.scheduler._collections.values())
    assert len(kept) == 3 and all(one is kept[0] for one in kept)


def test_a_node_id_names_the_case_that_was_planned() -> None:
    case = matrix(OPERATOR).cases("smoke")[0]
    nodeid = f"matrices/{OPERATOR}.toml::k[{case.name}]"
    remember({case.id: case})
    planned = parse_nodeid(nodeid)
    assert planned is not None and planned.case is case and planned.case.tiers == case.tiers
    other = parse_nodeid(nodeid.replace("hidden:", "hidden:1"))
    assert other is not None and other.case != case


def test_points_that_rules_cannot_tell_apart_are_counted_together() -> None:
    rules = [Expectation("fallback", "slow", match={"out": ("e4m3",)}, where="f:1"),
             Expectation("fallback", "slow", match={"kernel": ("k",), "hidden": ("256",)}, where="f:2")]
    points = [{"kernel": kernel, "out": out, "hidden": str(hidden), "draw": str(draw)} for kernel in ("k", "l")
              for out in ("fp32", "e4m3") for hidden in (256, 512) for draw in range(50)]
    found = Points.of(points, rules)
    assert len(found.counts) == 8 and sum(found.counts.values()) == len(points) == 400
    assert found.names == {"kernel", "out", "hidden", "draw"}
    for given in (rules, rules[:1], rules[1:]):
        assert governed(given, [Arch("any")], found) == governed(given, [Arch("any")], points)
    assert [entry.points for entry in governed(rules, [Arch("any")], found)] == [200, 100]


def test_a_recorder_keeps_a_hundred_bytes_of_a_result(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "cpu.jsonl", {"planned": {"k": 5000}})
    line = {"type": "result", "kernel": "k", "state": "pass", "message": "", "lane": "execute"}
    tracemalloc.start()
    for number in range(5000):
        recorder.add({**line, "case": f"operator/a-long-name-of-many-parameters:{number}"})
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 5000 * 200
    recorder.add({**line, "case": "operator/a-long-name-of-many-parameters:7", "state": "fail"})
    assert recorder.states == {"pass": 4999, "fail": 1}
    recorder.close(False)


def test_records_are_read_in_little_memory(tmp_path: Path) -> None:
    first, *results = samples.lines(samples.full_params())
    path = tmp_path / "cpu.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in (first, *results[:6000])), encoding="utf-8")
    tracemalloc.start()
    found = read_records(path)
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.results) == 6000
    assert size < 6000 * 2500 and peak - size < 2 << 20
