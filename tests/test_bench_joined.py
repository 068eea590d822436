"""Timings of several runs as one: gone on from, or joined from shards, and never those of another verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_samples import timing
from suite_runs import CASES, MODULE, Ran, read_lines, run, write_kernels
from test_resume import PINNED
from test_sharding import IDENTITY, OWN, PLAN, merged, shard

from conformance.bench.record import verdict_id
from conformance.errors import ConformanceError
from conformance.runs.bench_recorder import BenchRecorder, path_beside
from conformance.runs.earlier import TIMINGS, read_earlier
from conformance.runs.portion import Portion, read_portion
from conformance.runs.sharding import Item
from conformance.runs.timings import check_protocol, tied
from reports.bench import spelling
from reports.bench.records import read_bench

QUICK = PINNED + """
import conformance.bench.protocol as protocol
protocol.CPU = protocol.Protocol(warmup=2, repeats=3, trials=2, runs=2, flush_bytes=1 << 16, longest=1e9)
"""


# ---- gone on from ---------------------------------------------------------------------------------------------------


def bench(folder: Path, *more: str) -> Ran:
    cases = " ".join(CASES[:2])
    return run(folder, "--conformance-bench", "--kernels", MODULE, "--case", cases, "-p", "no:xdist", *more)


def cut(path: Path, count: int) -> list[dict[str, Any]]:
    """Leave so many results, or timings, and a half line, as a kill does. These lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 1 + count]) + b'{"type":"ti')
    return [json.loads(line) for line in lines[1 : 1 + count]]


def test_a_killed_run_is_gone_on_from_case_by_case(tmp_path: Path) -> None:
    """Five of six results are there, and timings of four: the first case is done on all kernels, the second on one,
    and is done again on all of them, so that times that are compared come from one run."""
    write_kernels(tmp_path, QUICK)
    whole = bench(tmp_path)
    assert whole.code == 0, whole.output
    cut(whole.directory / "cpu.jsonl", 5)
    timings = cut(whole.directory / "cpu.bench.jsonl", 4)
    kernels = {line["kernel"] for line in timings[:3]}
    assert len(kernels) == 3 and len({line["case"] for line in timings[:3]}) == 1
    (tmp_path / "done.txt").write_text("", encoding="utf-8")
    again = bench(tmp_path, f"--resume={whole.directory / 'cpu.jsonl'}")
    assert again.code == 0, again.output
    assert "3 passed" in again.output
    found = read_lines(again.directory / "cpu.bench.jsonl")
    lines = [line for line in found if line["type"] == "timing"]
    assert len(lines) == len({(line["case"], line["kernel"]) for line in lines}) == 6
    assert lines[:3] == timings[:3] and timings[3] not in lines
    assert found[-1]["counts"] == {"timed": 6}
    verdicts = {(r["case"], r["kernel"]): verdict_id(r) for r in again.results}
    assert all(line["verdict"] == verdicts[line["case"], line["kernel"]] for line in lines)
    assert "resumed: 3 cases on their kernels are as the run timed them that started" in (
        again.directory / "cpu.bench.txt").read_text(encoding="utf-8")
    nothing = bench(tmp_path, f"--resume={whole.directory}")
    assert nothing.code == 0, nothing.output
    assert read_lines(again.directory / "cpu.bench.jsonl")[-1]["counts"] == {"timed": 6}


def test_what_cannot_be_gone_on_from_is_told(tmp_path: Path) -> None:
    write_kernels(tmp_path, QUICK)
    plain = run(tmp_path, "--kernels", MODULE, "--case", CASES[0], "-p", "no:xdist")
    assert plain.code == 0, plain.output
    records = plain.directory / "cpu.jsonl"
    refused = bench(tmp_path, f"--resume={records}")
    assert refused.code == 4
    assert "was without --conformance-bench and timed nothing; run all of it with timings" in refused.output


def written(folder: Path, records: Path, **changed: Any) -> Path:
    """A file of timings beside records: 50 us each; ``changed`` members of its lines, or of its protocol."""
    earlier = read_earlier(records)
    protocol = {"repeats": 50} | changed.pop("protocol", {})
    recorder = BenchRecorder(path_beside(records), earlier.run, protocol, {"k": "candidate"})
    for result in earlier.results():
        recorder.carry(timing("k", 50e-6) | {"case": result["case"], "verdict": verdict_id(result)} | changed)
    recorder.close()
    return recorder.path


def test_a_timing_of_another_verdict_is_not_taken(tmp_path: Path) -> None:
    records = shard(tmp_path, 1, bench=True)
    path = written(tmp_path, records)
    assert set(read_portion(None, None, str(records), False, ["cpu"], ["cpu"]).recorded["cpu"]) == {
        f"{case} on k" for case in ("o/i:1", "o/i:2", "o/a:1", "o/a:2")}
    lines = read_lines(path)
    lines[2]["verdict"] = "0" * 16
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:3], *lines[4:]]), encoding="utf-8")
    assert set(tied(read_earlier(records), read_earlier(path, TIMINGS))) == {"o/i:1 on k", "o/a:2 on k"}
    path.unlink()
    with pytest.raises(ConformanceError, match="put both files side by side"):
        read_portion(None, None, str(records), False, ["cpu"], ["cpu"])


def test_timings_by_another_protocol_are_not_gone_on_from(tmp_path: Path) -> None:
    timings = read_earlier(written(tmp_path, shard(tmp_path, 1, bench=True)), TIMINGS)
    check_protocol(timings, {"repeats": 50})
    with pytest.raises(ConformanceError, match="was timed by another protocol than this run's"):
        check_protocol(timings, {"repeats": 20})


def test_a_case_is_done_when_it_is_on_all_kernels() -> None:
    from conformance.case import parse_case

    items = [Item(f"n{case}{kernel}", parse_case(f"o/F/i:{case}"), kernel, "cpu", "g") for case in (1, 2)
             for kernel in ("a", "b")]
    done = frozenset(f"{item.case.id} on {item.kernel}" for item in items[:3])
    assert Portion(recorded={"cpu": done}).divide(items, lambda item: 1.0)[0] == [3]
    assert Portion(recorded={"cpu": done}, whole_cases=True).divide(items, lambda item: 1.0)[0] == [2, 3]


# ---- joined from shards ---------------------------------------------------------------------------------------------


def shards(folder: Path, **changed: dict[str, Any]) -> list[Path]:
    """Three made-up shards with timings; ``changed`` as of `written`, by shard."""
    paths = [shard(folder, index, bench=True) for index in OWN]
    for index, path in enumerate(paths, start=1):
        written(folder, path, **changed.get(f"s{index}", {}))
    return paths


def test_timings_of_shards_become_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = shards(tmp_path, s2={"seconds": 60e-6})
    code, said = merged(capsys, *paths, *map(path_beside, paths), "--out", tmp_path / "all")
    assert code == 0, said
    assert str(tmp_path / "all" / "cpu.bench.html") in said
    found = read_bench(tmp_path / "all" / "cpu.bench.jsonl")
    assert [[one.case, one.kernel] for one in found.timings] == PLAN
    assert found.ended and found.roles == {"k": "candidate"} and found.protocol == {"repeats": 50}
    assert {one.case: one.seconds for one in found.timings if one.case in ("o/i:1", "o/b:1")} == {
        "o/i:1": 50e-6, "o/b:1": 60e-6}
    remarks = spelling.remarks(found)
    assert "joined from 3 shards, each with the times of its own machine" in remarks
    assert "two machines' times of o/i:1 on k are 1.2 times apart, beyond their spreads" in remarks
    results = {(line["case"], line["kernel"]): line for line in read_lines(tmp_path / "all" / "cpu.jsonl")[1:-1]}
    assert all(one.verdict == verdict_id(results[one.case, one.kernel]) for one in found.timings)


@pytest.mark.parametrize(("index", "changed", "words"), [
    (2, {"verdict": "0" * 16}, "s2/cpu.bench.jsonl: 3 results have no timing of theirs, such as o/b:1 on k; run the "
     "rest with its options, --shard 2/3 and --resume="),
    (3, {"protocol": {"flush": "write"}}, "were timed by different protocols"),
    (1, None, "s1/cpu.bench.jsonl: the timings of"),
])
def test_timings_that_do_not_belong_together(index: int, changed: dict[str, Any] | None, words: str, tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    paths = shards(tmp_path, **({f"s{index}": changed} if changed else {}))
    if changed is None:
        path_beside(paths[index - 1]).unlink()
    code, said = merged(capsys, *paths, "--out", tmp_path / "all")
    assert code == 2
    assert words in said
    assert not (tmp_path / "all").exists()


def test_a_shard_without_timings_among_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [shard(tmp_path, index, bench=index != 2) for index in OWN]
    written(tmp_path, paths[0])
    written(tmp_path, paths[2])
    code, said = merged(capsys, *paths, "--out", tmp_path / "all")
    assert code == 2 and "s2/cpu.jsonl: was run without --conformance-bench, others were not" in said
    code, said = merged(capsys, path_beside(paths[0]))
    assert code == 2 and "is a file of timings; give the record files" in said
    assert len(IDENTITY) == 2


@pytest.mark.parametrize(("line", "words"), [
    ('"verdict":"0"', "'state' is missing"), ('"state":"timed","spread":0.1', "'seconds' is missing"),
    ('"state":"timed","seconds":0.1', "'spread' is missing"), ('"state":3', "'state' is 3, of a wrong type"),
])
def test_a_timing_without_what_is_read_of_it_is_one_clear_error(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "cpu.bench.jsonl"
    file.write_text(f'{{"type":"bench-run","schema":1,"arch":"cpu"}}\n{{"type":"timing","case":"a","kernel":"k",{line}}}\n',
                    encoding="utf-8")
    with pytest.raises(ConformanceError, match=f"bench.jsonl:2: no line of a file of timings: {words}"):
        read_earlier(file, TIMINGS)
