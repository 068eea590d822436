"""`pytest --conformance-bench` as a process of its own: what is timed, what is not and why, and what fails for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from suite_runs import CASES, OPERATOR, Ran, read_lines, run, run_kernels, run_once

from conformance.bench.record import verdict_id, why_not

SOURCE = """
import conformance.bench.protocol as protocol
protocol.CPU = protocol.Protocol(warmup=2, repeats=4, trials=3, runs=2, flush_bytes=1 << 16, longest=1e9)

calls = []

def later(name, act):
    def run(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        calls.append((name, topk_weights is None))
        right(x, token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf, out=out)
        if calls.count(calls[-1]) > 8:
            act(out)
    run.__module__ = __name__
    run.__qualname__ = name
    kernel("moe_reduce_fused", promise="published", name=name, native=("vectorised",))(run)

def give_up(out):
    raise RuntimeError("no more")

later("later_wrong", lambda out: out.zero_())
later("later_raising", give_up)

def wrong(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    out.zero_()

kernel("moe_reduce_fused", promise="published", name="wrong", native=("wrong",))(wrong)
kernel("moe_reduce_fused", promise="published", name="refusing", native=("vectorised",), role="baseline",
       supports=lambda params: "never")(right)
"""


@pytest.fixture(scope="module", params=[(), ("-n", "2")], ids=["one process", "two workers"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    name = "bench" if not request.param else "bench-xdist"
    return run_once(tmp_path_factory, name, SOURCE, "--conformance-bench", *request.param, cases=CASES[:2])


def timings(ran: Ran) -> list[dict]:
    return read_lines(ran.directory / "cpu.bench.jsonl")


def test_what_is_right_is_timed(ran: Ran) -> None:
    found = [line for line in timings(ran) if line.get("kernel") == "sound"]
    assert [line["state"] for line in found] == ["timed", "timed"], ran.output
    for line in found:
        means = [mean for one in line["runs"] for mean in one]
        assert (line["kind"], line["clock"], line["repeats"], len(means)) == ("cpu", "wall", 4, 6)
        assert line["exchanged"] is True
        assert min(means) <= line["seconds"] <= max(means)
        assert line["figures"]["bandwidth"] == pytest.approx(line["bytes"] / line["seconds"])
        assert line["figures"]["of_copy"] == pytest.approx(line["figures"]["bandwidth"] / line["ceilings"]["copy"])


def test_a_timing_is_tied_to_its_verdict(ran: Ran) -> None:
    results = {(line["case"], line["kernel"]): line for line in ran.results}
    found = [line for line in timings(ran) if line["type"] == "timing"]
    assert len(found) == len(results) == 10
    for line in found:
        assert line["verdict"] == verdict_id(results[line["case"], line["kernel"]])


def test_what_is_wrong_when_timed_fails(ran: Ran) -> None:
    assert ran.code == 1
    failed = ran.of("later_wrong", "fail")
    assert [result["kind"] for result in failed] == ["timed", "timed"], ran.output
    for result in failed:
        assert "right when it was judged, wrong when it was timed: timed call" in result["message"]
        assert result["level"] is None
    for line in timings(ran):
        if line.get("kernel") == "later_wrong":
            assert line["state"] == "not-timed"
            assert "wrong when it was timed" in line["reason"]


def test_what_raises_when_timed_is_an_error(ran: Ran) -> None:
    found = ran.of("later_raising", "error")
    assert [result["kind"] for result in found] == ["exception", "exception"]
    assert all("raised RuntimeError while it was timed: no more" in result["message"] for result in found)
    assert all("give_up" in result["trace"] for result in found)


def test_what_is_not_right_is_not_timed_and_the_reason_stands_there(ran: Ran) -> None:
    reasons = {line["kernel"]: line["reason"] for line in timings(ran) if line.get("state") == "not-timed"}
    assert reasons["wrong"].startswith("its verdict is fail (")
    assert reasons["refusing"] == "its verdict is not-run (refused): not supported by refusing: never"


def test_first_and_last_line(ran: Ran) -> None:
    first, *_, last = timings(ran)
    assert first["type"] == "bench-run"
    assert first["roles"] == {"sound": "candidate", "later_wrong": "candidate", "later_raising": "candidate",
                              "wrong": "candidate", "refusing": "baseline"}
    assert first["protocol"]["repeats"] == 4
    assert first["device"] == ran.plan["device"]
    assert last["counts"] == {"timed": 2, "not-timed": 8}
    assert last["problems"] == []


def test_pages_are_written_and_linked(ran: Ran) -> None:
    for suffix in ("html", "md", "txt", "json"):
        assert (ran.directory / f"cpu.bench.{suffix}").exists()
        assert f"report: {ran.directory / f'cpu.bench.{suffix}'}" in ran.output
    assert 'href="cpu.bench.html"' in (ran.directory / "cpu.html").read_text(encoding="utf-8")
    found = json.loads((ran.directory / "cpu.bench.json").read_text(encoding="utf-8"))
    assert found["kind"] == "cpu"
    assert {case["candidate"]["kernel"] for case in found["cases"]} == {"sound"}


def test_when_nothing_was_timed_the_run_fails(tmp_path: Path) -> None:
    case = next(line for line in (f"{OPERATOR}/F30-repeats/tokens:41-topk:8-hidden:2048-routing:padding-weights:yes-"
                                  f"in:bf16-out:bf16-xsf:{xsf}-data:{data}-launch:repeat"
                                  for xsf in ("yes", "no") for data in ("exact", "real")) if _known(line))
    found = run(tmp_path, "--conformance-bench", "--kernels", "vectorised", "--case", case)
    assert found.code == 1
    assert "PROBLEM: --conformance-bench: no case was timed" in found.output
    (line,) = [line for line in timings(found) if line["type"] == "timing"]
    assert line["reason"] == "it is a case of the edge family F30-repeats, which is judged only"


def _known(case: str) -> bool:
    from conformance.registry import matrix

    return any(found.id == case for found in matrix(OPERATOR).cases("edge"))


DYING = """
import conformance.bench.protocol as protocol
protocol.CPU = protocol.Protocol(warmup=2, repeats=4, trials=3, runs=2, flush_bytes=1 << 16, longest=1e9)

calls = {}

def later(name, act):
    def count():
        calls[name] = calls.get(name, 0) + 1
        if calls[name] > 8:
            act()
    add(name, count)

later("dies", lambda: os.kill(os.getpid(), signal.SIGKILL))
later("hangs", lambda: time.sleep(600))
"""


def test_a_process_that_ends_while_it_times_costs_that_case_alone(tmp_path: Path) -> None:
    """The turn at the device is free again, and what follows is timed."""
    found = run_kernels(tmp_path, DYING, "--conformance-bench", "-n", "1", "--case-timeout", "20", cases=CASES[:1])
    assert found.code == 1
    assert [(line["kernel"], line["state"]) for line in sorted(found.results, key=lambda line: line["kernel"])] == [
        ("dies", "crash"), ("hangs", "timeout"), ("sound", "pass")], found.output
    states = {line["kernel"]: (line["state"], line["reason"]) for line in timings(found) if line["type"] == "timing"}
    assert states["sound"] == ("timed", "")
    assert states["dies"][0] == states["hangs"][0] == "not-timed"
    assert states["dies"][1].startswith("its verdict is crash (crash): ") and "SIGKILL" in states["dies"][1]
    assert "was still running after 20 s" in states["hangs"][1]


def test_without_the_option_nothing_is_timed(tmp_path: Path) -> None:
    found = run(tmp_path, "--kernels", "vectorised", "--case", CASES[0])
    assert found.code == 0
    assert not list(tmp_path.rglob("*.bench.*"))
    assert "bench.html" not in (found.directory / "cpu.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("changes", "reason"), [
    ({}, None),
    ({"params": {"launch": "eager"}}, None),
    ({"state": "fail", "kind": "budget", "message": "too far\nmore"}, "its verdict is fail (budget): too far"),
    ({"state": "expected"}, "its verdict is expected"),
    ({"lane": "lower"}, "it was not executed here, only taken to the lane lower"),
    ({"family": "F01-padding"}, "it is a case of the edge family F01-padding, which is judged only"),
    ({"path": "rejected"}, "the kernel refused its arguments, as the contract allows"),
    ({"params": {"launch": "graph"}}, "its launch is 'graph': only plain calls are timed"),
])
def test_why_a_case_is_not_timed(changes: dict, reason: str | None) -> None:
    line = {"state": "pass", "kind": None, "message": "", "lane": "execute", "family": "", "path": "p", "params": {}}
    assert why_not(line | changes) == reason
