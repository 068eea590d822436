"""pytest's own options on conformance items: selection, stopping, reruns, reports, verbosity."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from suite_runs import CASES, JUNIT, MODULE, ROOT, Ran, run, run_kernels, run_once, write_kernels

# `wrong` fails in the two cases with weights, `partly` does not take them
KERNELS = """
def wrong(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    print("printed by wrong")
    right(x, token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf, out=out)
    if topk_weights is not None:
        out.zero_()
kernel("moe_reduce_fused", promise="published", native=("vectorised",))(wrong)
add("partly", lambda: None, supports=lambda params: "no weights" if params["weights"] == "yes" else None)
"""
ITEM = "matrices/moe_reduce_fused.toml::{}[" + CASES[0].partition("/")[2] + "]"


@pytest.fixture(
    scope="module",
    params=[
        ("-n", "2", "-v"),
        ("-n", "1", "-q", "--dist", "worksteal"),
        ("-v", "-s", "-p", "no:xdist", "--durations=3"),
        ("-p", "no:terminal", "-p", "no:cacheprovider"),
    ],
    ids=" ".join,
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, tuple[str, ...]]:
    name = f"options-{request.param_index}"
    return run_once(tmp_path_factory, name, KERNELS, *request.param), request.param


def test_every_case_is_counted_once_whatever_is_shown(ran: tuple[Ran, tuple[str, ...]]) -> None:
    done, arguments = ran
    assert done.code == 1
    assert done.end["counts"] == {"pass": 8, "fail": 2, "not-run": 2}
    assert done.end["problems"] == []
    if "no:terminal" not in arguments:
        assert "2 failed, 8 passed, 2 skipped" in done.output
    assert done.output.count("PASSED") == (8 if "-v" in arguments else 0)


def test_junit_has_every_case_once_with_its_outcome(ran: tuple[Ran, tuple[str, ...]]) -> None:
    words = {"pass": "passed", "fail": "failure", "not-run": "skipped"}
    expected = sorted((f"{r['kernel']}[{r['case'].partition('/')[2]}]", words[r["state"]]) for r in ran[0].results)
    found = sorted(
        (case.get("name"), next((child.tag for child in case if child.tag != "system-out"), "passed"))
        for case in ran[0].junit.iter("testcase")
    )
    assert found == expected


def test_a_failure_shows_its_message_and_how_to_run_it_again(ran: tuple[Ran, tuple[str, ...]]) -> None:
    done, arguments = ran
    if "no:terminal" in arguments:
        assert done.output.strip() == ""
        return
    for result in done.of("wrong", "fail"):
        assert result["message"] in done.output
        assert f"Run it again: {result['rerun']}" in done.output
        assert result["rerun"].startswith(f"PYTHONPATH={done.directory.parent}${{PYTHONPATH:+:$PYTHONPATH}} ")
    if "-s" not in arguments:
        assert done.output.count("\nprinted by wrong") == 2  # not for the cases that passed
    assert "  wrong: 4 planned: 2 fail, 2 pass" in done.output
    assert "  not run: 2 of partly: not supported by partly: no weights" in done.output
    assert f"  report: {done.directory / 'cpu.html'}" in done.output


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (("-k", "wrong and weights:no"), {"wrong": 2}),
        ((ITEM.format("sound"), ITEM.format("wrong")), {"sound": 1, "wrong": 1}),
        (("matrices/moe_reduce_fused.toml", "--deselect", ITEM.format("sound"), "-k", "sound"), {"sound": 3}),
    ],
    ids=["-k", "node ids", "--deselect"],
)
def test_items_are_selected_as_tests_are(tmp_path: Path, arguments: tuple[str, ...], names: dict[str, int]) -> None:
    ran = run_kernels(tmp_path, KERNELS, *arguments)
    assert ran.plan["planned"] == names
    assert len(ran.results) == sum(names.values())


def test_the_smoke_marker_selects_the_smoke_tier(tmp_path: Path) -> None:
    write_kernels(tmp_path, "")
    ran = run(tmp_path, "--kernels", MODULE, "--tier", "official", "-m", "smoke", "--collect-only", "-q")
    assert sum(line.startswith("matrices/") for line in ran.output.splitlines()) == 48
    assert ran.code == 0


def test_a_path_that_is_not_there_is_one_line_with_workers_too(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "pytest", "-n", "2", f"--report-dir={tmp_path}", "matrices/no_such.toml"]
    done = subprocess.run(line, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "could not collect anything: no file or folder matrices/no_such.toml" in done.stdout + done.stderr
    assert "INTERNALERROR" not in done.stdout + done.stderr


def test_collecting_only_runs_and_writes_nothing(tmp_path: Path) -> None:
    ran = run_kernels(tmp_path, KERNELS, "--collect-only", "-q", "-n", "2")
    assert ran.code == 0
    assert ITEM.format("wrong") in ran.output.splitlines()
    assert "12 tests collected" in ran.output
    assert not ran.directory.exists()


def test_stopping_early_leaves_an_unfinished_plan(tmp_path: Path) -> None:
    ran = run_kernels(tmp_path, KERNELS, "-x", "-n", "1")
    assert ran.code == 2
    assert len(ran.of("wrong", "fail")) == 1
    assert "stopping after 1 failures" in ran.output
    assert any("planned cases have no result" in problem for problem in ran.end["problems"])


def test_the_last_failures_alone_are_run_again(tmp_path: Path) -> None:
    run_kernels(tmp_path, KERNELS)
    again = run_kernels(tmp_path, KERNELS, "--lf")
    assert again.plan["planned"] == {"wrong": 2}
    assert again.end["counts"] == {"fail": 2}


def test_other_tests_in_the_same_run_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_it():\n    assert 1 + 1 == 3\n", encoding="utf-8")
    ran = run_kernels(tmp_path, KERNELS, ITEM.format("sound"), str(tmp_path / "test_other.py"))
    assert ran.code == 1
    assert "assert (1 + 1) == 3" in ran.output
    assert ran.end["counts"] == {"pass": 1}
    assert "1 failed, 1 passed" in ran.output


def test_a_shuffling_plugin_does_not_part_cases_that_share_data(tmp_path: Path) -> None:
    """As pytest-randomly does it: in a wrapper around everybody else's."""
    (tmp_path / "shuffles.py").write_text(
        "import pytest\n"
        "@pytest.hookimpl(wrapper=True, tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    items.sort(key=lambda item: hash(item.name))\n"
        "    return (yield)\n",
        encoding="utf-8",
    )
    ran = run_kernels(tmp_path, KERNELS, "-p", "shuffles")
    order = [(case, name) for case in CASES for name in ("sound", "wrong", "partly")]
    assert [(result["case"], result["kernel"]) for result in ran.results] == order


def test_many_failures_are_listed_in_part_and_counted_in_full(tmp_path: Path) -> None:
    write_kernels(tmp_path, KERNELS + "def raises():\n    raise RuntimeError('no luck')\nadd('raises', raises)")
    chosen = ("--kernels", MODULE, "--tier", "smoke", "-k", "(wrong and weights:yes) or raises")
    ran = run(tmp_path, *chosen, f"--junitxml={tmp_path / JUNIT}")
    failed = sum(result["state"] in ("fail", "error") for result in ran.results)
    assert failed > 60
    listed = [line for line in ran.output.splitlines() if line.startswith("FAILED ")]
    assert len(listed) == 20
    assert sum("::raises[" in line for line in listed) == 10  # both kinds take their turns
    assert ran.output.count("Run it again: ") == 20
    assert f"20 of {failed} failed cases are listed" in ran.output
    assert f"{failed} failed" in ran.output.splitlines()[-1]
    assert ran.code == 1
    assert len(list(ran.junit.iter("failure"))) == failed


def test_progress_is_told_now_and_then(tmp_path: Path) -> None:
    ran = run_kernels(tmp_path, "add('slow', lambda: time.sleep(0.7))")  # twice for each of four cases
    lines = [line for line in ran.output.splitlines() if " done, " in line]
    assert 1 <= len(lines) <= ran.end["seconds"] / 5
    assert "/8 done, 0 failed | sound " in lines[0]


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_what_is_compiled_before_the_first_result_shows_progress(tmp_path: Path, workers: tuple[str, ...]) -> None:
    (tmp_path / "sooner.py").write_text("from conformance.session import progress\nprogress._FIRST = 0.3\n")
    kernels = "add('slow', lambda: None, prepare=lambda params, device: time.sleep(0.8))"  # for each case
    ran = run_kernels(tmp_path, kernels, "-p", "sooner", *workers)
    lines = [line for line in ran.output.splitlines() if "compiling ahead: " in line]
    assert lines
    found = [re.fullmatch(r"compiling ahead: (\d)/4 steps, \d+ s; no result yet", line) for line in lines]
    counts = [int(match.group(1)) for match in found if match]
    assert len(counts) == len(lines)
    assert counts == sorted(counts)
    first = next(number for number, line in enumerate(ran.output.splitlines()) if " done, " in line or "passed" in line)
    assert ran.output.splitlines().index(lines[-1]) < first
    assert ran.end["counts"] == {"pass": 8}


def test_a_file_of_kernels_is_named_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere" / "kernels_of_a_file.py"
    file.parent.mkdir()
    write_kernels(tmp_path, "")
    (tmp_path / f"{MODULE}.py").rename(file)
    for workers in ((), ("-n", "1")):
        ran = run(tmp_path, f"--kernels={file}", "--case", CASES[0], *workers)
        assert (ran.code, ran.end["counts"]) == (0, {"pass": 1}), ran.output


def test_a_marker_that_there_is_not_is_an_error(tmp_path: Path) -> None:
    for expression in ("smok", "not smok", "smoke and (skip or smok)"):
        ran = run(tmp_path, "-m", expression)
        assert ran.code == 4 and "unknown marker in -m 'smok'. Did you mean 'smoke'?" in ran.output
