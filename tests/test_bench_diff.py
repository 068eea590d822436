"""Two runs' timings side by side: what counts as slower, and the exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_samples import bench_run, end, not_timed, timing, write

from conformance.commands.cli import main
from reports.bench.diff import BenchDiff, bench_diff, tables
from reports.bench.records import read_bench


def pair(tmp_path: Path, first: list[dict], second: list[dict], **changes: object) -> tuple[Path, Path]:
    one = write(tmp_path / "one.bench.jsonl", [bench_run(), *first, end()])
    return one, write(tmp_path / "two.bench.jsonl", [bench_run(**changes), *second, end()])


def compared(tmp_path: Path, first: list[dict], second: list[dict], threshold: float = 0.05) -> BenchDiff:
    one, two = pair(tmp_path, first, second)
    return bench_diff(read_bench(one), read_bench(two), threshold)


@pytest.mark.parametrize(("seconds", "spread", "where"), [
    (104e-6, 0.001, None), (106e-6, 0.001, "regressions"), (106e-6, 0.07, "noise"), (94e-6, 0.001, "improvements"),
    (94e-6, 0.07, "noise"), (50e-6, 0.2, "improvements"), (200e-6, 0.2, "regressions"),
])
def test_beyond_threshold_and_spread(tmp_path: Path, seconds: float, spread: float, where: str | None) -> None:
    found = compared(tmp_path, [timing("fast", 100e-6, spread=0.01)], [timing("fast", seconds, spread=spread)])
    counts = {name: len(getattr(found, name)) for name in ("regressions", "improvements", "noise")}
    assert counts == {name: int(name == where) for name in counts}
    assert found.worse is (where == "regressions")
    assert found.common == 1


def test_the_first_runs_spread_counts_as_well(tmp_path: Path) -> None:
    found = compared(tmp_path, [timing("fast", 100e-6, spread=0.3)], [timing("fast", 120e-6, spread=0.01)])
    assert (len(found.noise), found.worse) == (1, False)


def test_the_largest_regression_comes_first(tmp_path: Path) -> None:
    found = compared(tmp_path, [timing("fast", 1e-4), timing("fast", 1e-4, workload="b")],
                     [timing("fast", 1.1e-4), timing("fast", 2e-4, workload="b")])
    assert [change.slower for change in found.regressions] == pytest.approx([1.0, 0.1])


def test_what_is_not_timed_any_more_is_lost(tmp_path: Path) -> None:
    found = compared(tmp_path, [timing("fast", 1e-4), timing("plain", 1e-4)],
                     [not_timed("fast", "its verdict is fail")])
    assert [(old.kernel, why) for old, why in found.lost] == [("fast", "its verdict is fail"), ("plain", "no line")]
    assert found.worse
    assert "its verdict is fail" in tables(found)


def test_a_new_timing_is_no_change(tmp_path: Path) -> None:
    found = compared(tmp_path, [timing("fast", 1e-4)], [timing("fast", 1e-4), timing("plain", 1e-4)])
    assert not found.worse


@pytest.mark.parametrize("change", [{"clock": "cuda-events"}, {"bytes": 1}, {"flops": 1}])
def test_other_clocks_and_costs_are_not_compared(tmp_path: Path, change: dict) -> None:
    found = compared(tmp_path, [timing("fast", 1e-4)], [timing("fast", 3e-4, **change)])
    assert (len(found.apart), found.common, found.worse) == (1, 0, True)  # a run that compares nothing is no pass
    assert tables(found).startswith("NOTHING COMPARED: ")
    assert "not compared: other clock or other cost: 1" in tables(found)
    also = [timing("plain", 1e-4)]
    assert not compared(tmp_path, [timing("fast", 1e-4), *also], [timing("fast", 3e-4, **change), *also]).worse


# ---- the commands ---------------------------------------------------------------------------------------------------


def test_exit_codes_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = pair(tmp_path, [timing("fast", 100e-6)], [timing("fast", 120e-6)], device="Another GPU",
                    commit="def5678")
    assert main(["bench-diff", str(one), str(one)]) == 0
    assert capsys.readouterr().out.startswith("NOT SLOWER: 0 regressions beyond 5 % and spread")
    assert main(["bench-diff", str(one), str(two)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("SLOWER: 1 regression beyond 5 % and spread, 0 lost timings")
    assert "+20.0 %" in shown
    assert "device: One GPU and Another GPU" in shown
    assert "commit: abc1234 and def5678" in shown
    assert main(["bench-diff", str(one), str(two), "--threshold", "0.25"]) == 0


def test_a_directory_stands_for_its_only_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        pair(tmp_path, [timing("fast", 1e-4)], [])[0].rename(tmp_path / place / "sm_90.bench.jsonl")
    assert main(["bench-diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    (tmp_path / "b" / "cpu.bench.jsonl").write_text("")
    assert main(["bench-diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "2 files of timings (ARCH.bench.jsonl): name one of cpu.bench.jsonl, sm_90" in capsys.readouterr().err


def test_an_absent_baseline_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, two = pair(tmp_path, [], [timing("fast", 1e-4)])
    assert main(["bench-diff", str(tmp_path / "none.jsonl"), str(two)]) == 0
    assert "no baseline: " in capsys.readouterr().out
    assert main(["bench-diff", str(two), str(tmp_path / "none.jsonl")]) == 2
    assert main(["bench-diff", str(tmp_path / ("n" * 300)), str(two)]) == 0
    _, empty = pair(tmp_path, [], [not_timed("fast", "its verdict is fail")])
    assert main(["bench-diff", str(tmp_path / "none.jsonl"), str(empty)]) == 1


def test_times_behind_other_flushes_are_never_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    protocol = bench_run()["protocol"]
    one, two = pair(tmp_path, [timing("fast", 1e-4)], [timing("fast", 1e-4)], protocol=protocol | {"flush": "write"})
    assert main(["bench-diff", str(one), str(two)]) == 2
    assert "behind the flush 'write+read'" in capsys.readouterr().err
    one, two = pair(tmp_path, [timing("fast", 1e-4)], [timing("fast", 1e-4)], protocol=protocol | {"repeats": 20})
    assert main(["bench-diff", str(one), str(two)]) == 0
    assert "the protocols differ in repeats" in capsys.readouterr().out


def test_cpu_time_and_device_time_are_never_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = pair(tmp_path, [timing("fast", 1e-4)], [timing("fast", 1e-4, kind="cpu")])
    assert main(["bench-diff", str(one), str(two)]) == 2
    assert "never compared" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--threshold", "-1"], ["--threshold", "nan"]])
def test_a_wrong_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    one, _ = pair(tmp_path, [timing("fast", 1e-4)], [])
    assert main(["bench-diff", str(one), str(one), *words]) == 2
    assert "give a relative change" in capsys.readouterr().err


def test_bench_prints_the_table_and_writes_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = pair(tmp_path, [timing("fast", 1e-4)], [not_timed("fast", "its verdict is fail")])
    assert main(["bench", str(one), "--out", str(tmp_path / "pages")]) == 0
    shown = capsys.readouterr().out
    assert "1 of 1 timed" in shown
    assert str(tmp_path / "pages" / "one.bench.html") in shown
    assert (tmp_path / "pages" / "one.bench.json").exists()
    assert main(["bench", str(two)]) == 1
    assert main(["bench", str(tmp_path / "none.jsonl")]) == 2
