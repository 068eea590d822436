"""``conformance diff``: two runs side by side, printed, as a page, and as an exit code."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from conformance.commands import cli
from reports import compare, read_records
from reports.compare import Comparison

Drop = Callable[[samples.Line], bool]


def content(change: samples.Change | None = None, drop: Drop = lambda line: False, **run: Any) -> list[samples.Line]:
    """16 points on three kernels; ``drop`` says which result lines are left out."""
    lines = samples.lines(itertools.islice(samples.official_params(), 16), change, **run)
    return [line for line in lines if line["type"] != "result" or not drop(line)]


def compared(folder: Path, first: list[samples.Line], second: list[samples.Line], threshold: float = 0.05
             ) -> Comparison:
    return compare(*(read_records(samples.write(folder / f"{name}.jsonl", lines))
                     for name, lines in (("a", first), ("b", second))), threshold)


def diff(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, what was printed, and the page's text, of a diff of the files that `compared` wrote."""
    page = folder / "d.html"
    code = cli.main(["diff", str(folder / "a.jsonl"), str(folder / "b.jsonl"), "--out", str(page), *arguments])
    printed = capsys.readouterr()
    html = page.read_text(encoding="utf-8") if page.exists() else ""
    body = re.sub(r"<style.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)
    return code, printed.out + printed.err, " ".join(body.split())


def first_of(kernel: str, **edits: Any) -> samples.Change:
    """Edit the first result of one kernel."""
    number_of = samples.KERNELS.index(kernel)

    def change(line: samples.Line, number: int) -> None:
        if number == number_of:
            line.update(edits)
    return change


def test_runs_of_other_kernels_say_so_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = samples.KERNELS[0]
    second = content(drop=lambda line: line["kernel"] == gone)
    second[0]["kernels"] = {name: facts for name, facts in second[0]["kernels"].items() if name != gone}
    compared(tmp_path, content(), second)
    code, said, page = diff(tmp_path, capsys)
    assert code == 1
    assert f"note: only the first run has {gone}: nothing of it is compared" in said.splitlines()[:6]
    assert f"only the first run has {gone}" in page


def test_the_same_run_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(tmp_path, content(), content())
    assert found.common == 48 and not found.worse and not found.environment
    code, said, page = diff(tmp_path, capsys)
    assert code == 0
    assert said.startswith("NOT WORSE: 0 new failures, 0 lost results, 0 fixed, 0 changed, 0 added; 48 results in both")
    assert page.count("no clear change") == 3 and "The same in both runs." in page
    assert {timing.ratio.median for timing in found.timing} == {1}


def test_a_directory_stands_for_its_one_record_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        samples.write(tmp_path / name / "cpu.jsonl", content())
    assert cli.main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'two' / 'diff.html'}\n")
    samples.write(tmp_path / "two" / "sm_90.jsonl", content(arch="sm_90"))
    assert cli.main(["diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path / 'two'}: a directory of several record files: name one of cpu.jsonl, sm_90.jsonl\n")


def test_a_page_cannot_be_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(samples.write(tmp_path / "cpu.jsonl", content()))
    assert cli.main(["diff", one, one, "--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path}: is a directory; name a page, such as {tmp_path}/diff.html" in capsys.readouterr().err


def test_a_new_failure_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(tmp_path, content(), content(first_of("h_tiled", state="fail", kind="budget", message="<b>off</b> by 2")))
    code, said, page = diff(tmp_path, capsys)
    assert code == 1
    assert said.startswith("WORSE: 1 new failure, 0 lost results")
    assert re.search(r"h_tiled +pass, bit-exact, path h_tiled +fail \(budget\), bit-exact", said)
    assert "&lt;b&gt;off&lt;/b&gt; by 2" in page and "pytest --case" in page


def test_a_fixed_failure_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(tmp_path, content(first_of("h_tiled", state="crash", level=None)), content())
    assert [change.kernel for change in found.fixed] == ["h_tiled"] and not found.changed
    assert diff(tmp_path, capsys)[0] == 0


def test_a_failure_that_stays_is_neither(tmp_path: Path) -> None:
    failing = first_of("h_tiled", state="fail", kind="budget")
    found = compared(tmp_path, content(failing), content(failing))
    assert not found.worse and not found.fixed and not found.changed
    other = compared(tmp_path, content(failing), content(first_of("h_tiled", state="crash", kind="crash")))
    assert [change.second.split(",")[0] for change in other.changed] == ["crash (crash)"] and not other.worse


@pytest.mark.parametrize(("second", "way"), [
    (content(drop=lambda line: line["kernel"] == "h_tiled" and line["params"]["hidden"] == "2048"), "no result"),
    (content(first_of("h_tiled", state="not-run", message="no compiler", level=None)), "not-run, path h_tiled"),
    (content(first_of("h_tiled", lane="route", level=None)), "pass, path h_tiled, lane route"),
], ids=["no line", "not run", "lower lane"])
def test_a_lost_result_fails(
    second: list[samples.Line], way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compared(tmp_path, content(), second)
    assert found.lost and not found.failures
    assert {change.second for change in found.lost} == {way}
    assert diff(tmp_path, capsys)[0] == 1


def test_what_was_not_run_before_cannot_be_lost(tmp_path: Path) -> None:
    idle = first_of("h_tiled", state="not-run", level=None)
    assert not compared(tmp_path, content(idle), content(idle)).worse
    found = compared(tmp_path, content(idle), content())
    assert not found.worse and [change.second for change in found.changed] == ["pass, bit-exact, path h_tiled"]


def test_added_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def new(line: samples.Line) -> bool:
        return bool(line["kernel"] == "torch_gather")

    found = compared(tmp_path, content(drop=new), content())
    assert len(found.added) == 16 and not found.worse
    assert diff(tmp_path, capsys)[0] == 0
    worse = compared(tmp_path, content(drop=new), content(first_of("torch_gather", state="error", kind="exception")))
    assert [change.first for change in worse.failures] == ["no result"]  # a failure that nobody has seen before
    assert len(worse.added) == 15


def test_changed_levels_and_paths_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(line: samples.Line, number: int) -> None:
        if line["kernel"] == "per_token":
            line.update(level="within-budget", path="slow")

    found = compared(tmp_path, content(), content(change))
    assert len(found.changed) == 16 and not found.worse
    code, said, page = diff(tmp_path, capsys)
    assert code == 0
    assert re.search(r"16 +per_token +pass, bit-exact, path per_token +pass, within-budget, path slow", said)
    assert "per_token pass, bit-exact, path per_token pass, within-budget, path slow 16" in page


def test_budget_fractions_that_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = {0: 0.9, 3: 0.45, 6: 0.31}

    def flat(line: samples.Line, number: int) -> None:
        line["budget_fraction"] = 0.3

    def change(line: samples.Line, number: int) -> None:
        line["budget_fraction"] = moved.get(number, 0.3)

    found = compared(tmp_path, content(flat), content(change), threshold=0.1)
    assert [round(drift.by, 3) for drift in found.drift] == [0.6, 0.15] and not found.worse
    assert len(compared(tmp_path, content(flat), content(change), threshold=0).drift) == 3
    code, said, page = diff(tmp_path, capsys, "--drift", "0.2")
    assert code == 0
    assert "budget fraction moved by more than 0.2: 1\n" in said and "0.3    0.9     +0.6" in said
    assert "+0.6" in page


@pytest.mark.parametrize(("factor", "word"), [(1.5, "slower"), (0.5, "faster"), (1.05, "no clear change")])
def test_times_per_kernel(factor: float, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(line: samples.Line, number: int) -> None:
        if line["kernel"] == "h_tiled":
            line["seconds"] *= factor

    found = compared(tmp_path, content(), content(change))
    timing = {timing.kernel: timing for timing in found.timing}
    assert timing["h_tiled"].word == word and timing["per_token"].word == "no clear change"
    assert timing["h_tiled"].ratio.median == pytest.approx(factor)
    assert timing["h_tiled"].first.low < timing["h_tiled"].first.median < timing["h_tiled"].first.high
    assert diff(tmp_path, capsys)[0] == 0  # a busy machine fails nobody


def test_noise_is_no_change_and_a_timeout_no_time(tmp_path: Path) -> None:
    def noisy(line: samples.Line, number: int) -> None:
        line["seconds"] *= 3 if number % 2 else 0.4
        if number == 0:
            line.update(state="timeout", seconds=120.0)

    found = compared(tmp_path, content(), content(noisy))
    assert {timing.word for timing in found.timing} == {"no clear change"}
    assert {timing.kernel: timing.cases for timing in found.timing} == {
        "h_tiled": 15, "per_token": 16, "torch_gather": 16}


def test_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = {"moe_reduce_fused": {"bf16": 0.5}}
    compared(tmp_path, content(), content(commit="new", torch="2.14", sizes="official", tolerances=rules))
    code, said, page = diff(tmp_path, capsys)
    assert code == 0
    for words in ("3f9c1d27ab04 +new", r"2\.13\.0\+cpu +2\.14", "tolerances of moe_reduce_fused"):
        assert re.search(words, said), words
    assert "the runs differ in sizes: their numbers are of different inputs" in page


def test_two_architectures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A lower lane on an architecture that is not here is a change; a case that it does not run is lost."""
    def lowered(line: samples.Line, number: int) -> None:
        line.update(lane="lower", level=None, budget_fraction=None)

    found = compared(tmp_path, content(), content(lowered, arch="gfx942", here=False))
    assert not found.worse and len(found.changed) == 48 and not found.timing
    assert found.environment["arch"] == ("cpu", "gfx942")
    assert "No case was executed in both." in diff(tmp_path, capsys)[2]


def test_a_killed_run_and_runs_without_anything_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared(tmp_path, content(drop=lambda line: line["kernel"] != "h_tiled"),
             content(drop=lambda line: line["kernel"] == "h_tiled")[:-1])
    code, _, page = diff(tmp_path, capsys)
    assert code == 1
    assert "the second run did not finish" in page and "the runs have no result in common" in page


def test_a_page_stays_usable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1152 cases of three kernels that all fail anew."""
    def failing(line: samples.Line, number: int) -> None:
        samples.fail(line, number)

    first = samples.lines(samples.official_params())
    found = compared(tmp_path, first, samples.lines(samples.official_params(), failing))
    assert len(found.failures) == 3456
    code, said, page = diff(tmp_path, capsys)
    assert code == 1
    assert "... and 3436 more, in the page" in said and len(said) < 30_000
    assert (tmp_path / "d.html").stat().st_size < 2_000_000 and "and 2956 more" in page
    html = (tmp_path / "d.html").read_text(encoding="utf-8")
    assert "<script" not in html and "http://" not in html and "https://" not in html


@pytest.mark.parametrize(("arguments", "words"), [
    (["a.jsonl", "none.jsonl"], "none.jsonl: cannot be read"),
    (["a.jsonl", "a.jsonl", "--drift", "-1"], "--drift -1: give a change"),
    (["a.jsonl", "a.jsonl", "--drift", "nan"], "--drift nan: give a change"),
    (["a.jsonl", "a.jsonl", "--out", "a.jsonl"], "is one of the record files"),
    (["a.jsonl"], "required: B"),
])
def test_wrong_usage(arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples.write(tmp_path / "a.jsonl", content())
    given = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in arguments]
    assert cli.main(["diff", *given]) == 2
    assert words in capsys.readouterr().err
