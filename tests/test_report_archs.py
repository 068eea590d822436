"""Pages of architectures that were not here, their rules and resources, and the overview of several."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from conformance.commands import cli
from reports import ReportError, write_overview, write_report

RULE: dict[str, Any] = {
    "where": "matrices/archs/gfx942.toml:44", "text": "fallback = h_tiled/bits", "reason": "8-bit floats are FNUZ",
    "source": "its ISA", "until": "fp8=ocp", "cases": 4064,
}
FACTS = {"shared_bytes": {"value": 65536, "source": "its ISA"}, "fp8": {"value": "fnuz", "source": "its ISA"},
         "atomics": {"value": {"pk_bf16": False, "pk_f16": True}, "source": "its ISA"}}
CODE = {"config": "h_tiled[block_h:1024]", "shared_bytes": 2048, "threads": 256, "registers": 71,
        "instructions": ["fused multiply-add"]}


def lowered(line: samples.Line, number: int) -> None:
    """As on an architecture that is not here: TileLang kernels lowered, PyTorch routed, e4m3 by a declared fallback."""
    torch = line["kernel"] == "torch_gather"
    line.update(lane="route" if torch else "lower", level=None, budget_fraction=None, max_error=None,
                stopped="nothing to lower" if torch else "not assembled: no assembler")
    if not torch:
        line["resources"] = CODE
    if line["kernel"] == "h_tiled" and line["params"]["out"] == "e4m3":
        line.update(path="h_tiled/bits", expected={"kind": "fallback", **RULE})


def wrong_path(line: samples.Line, number: int) -> None:
    lowered(line, number)
    if line["kernel"] == "per_token" and line["params"]["topk"] == "2":
        message = f"{line['case']} on per_token: fell back"
        line.update(state="fail", kind="silent-fallback", path="slow", message=message)
    if line["kernel"] == "torch_gather" and line["params"]["hidden"] == "2048":
        samples.fail(line, number, kind="exception")


def absent(change: samples.Change = lowered, **run: Any) -> list[samples.Line]:
    run = {"arch": "gfx942", "here": False, "device": "none here", "facts": FACTS, "rules": [RULE], **run}
    return samples.lines(itertools.islice(samples.official_params(), 48), change, **run)


def executed(**run: Any) -> list[samples.Line]:
    return samples.lines(itertools.islice(samples.official_params(), 48), **run)


def page(folder: Path, content: list[samples.Line]) -> str:
    html, _ = write_report(samples.write(folder / "r.jsonl", content), folder / "out")
    return html.read_text(encoding="utf-8")


def text(html: str) -> str:
    body = re.sub(r"<(script|style).*?</\1>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_a_page_without_execution_never_says_pass(tmp_path: Path) -> None:
    html = page(tmp_path, absent())
    said = text(html)
    assert "NOT EXECUTED nothing was executed, gfx942 was not here: of 144 results went 96 to lane lower, 48 " in said
    assert 'class="unexecuted"' in html
    assert "went as far as it can without gfx942" in said
    markdown = (tmp_path / "out" / "gfx942.md").read_text(encoding="utf-8")
    assert markdown.startswith("## NOT EXECUTED: nothing was executed")
    assert "| planned | not executed | expected |" in markdown and "| tier | not executed | expected |" in markdown
    assert "promised reached U not executed X expected F fail" in said
    assert not re.search(r"\bpass(ed)?\b", said + markdown)


def test_a_figure_of_an_edited_file_that_is_no_number_is_shown_as_it_is(tmp_path: Path) -> None:
    def edited(line: samples.Line, number: int) -> None:
        lowered(line, number)
        if line.get("resources"):
            line["resources"] = {**CODE, "shared_bytes": "many"}

    assert "many / 65536" in text(page(tmp_path, absent(edited)))


def test_an_executed_page_says_pass(tmp_path: Path) -> None:
    said = text(page(tmp_path, executed()))
    assert said.startswith("PASS ") and "promised reached P pass X expected F fail" in said


def test_nothing_executed_where_the_device_is_fails(tmp_path: Path) -> None:
    def none(line: samples.Line, number: int) -> None:
        line.update(state="not-run", lane="route", message="no compiler", level=None)

    said = text(page(tmp_path, samples.lines(itertools.islice(samples.official_params(), 4), none)))
    assert "FAIL nothing was executed" in said


def test_rules_facts_and_resources_are_shown(tmp_path: Path) -> None:
    said = text(page(tmp_path, absent()))
    for words in ("fallback = h_tiled/bits", "8-bit floats are FNUZ", "fp8=ocp", "4064", RULE["where"],
                  "h_tiled[block_h:1024]", "2048 / 65536", "256 / unknown", "71", "no pk_bf16, pk_f16",
                  "24 not executed"):
        assert words in said, words


def test_a_device_that_differs_from_its_table_is_marked(tmp_path: Path) -> None:
    probe = {"shared_bytes": {"table": 65536, "device": 32768}, "fp8": {"table": "fnuz", "device": "fnuz"}}
    html = page(tmp_path, executed(facts=FACTS, probe=probe))
    assert '<td class="bad">32768</td>' in html
    assert '<td class="">fnuz</td>' in html


def test_beyond_a_limit_is_marked_and_first(tmp_path: Path) -> None:
    def large(line: samples.Line, number: int) -> None:
        lowered(line, number)
        if line["kernel"] == "per_token":
            uses = {**CODE, "config": "per_token[wide]", "shared_bytes": 65537}
            line.update(resources=uses, state="error", kind="soft-error", message="too much")

    html = page(tmp_path, absent(large))
    assert '<td class="n bad">65537 / 65536</td>' in html
    assert html.index("per_token[wide]") < html.index("h_tiled[block_h:1024]")


def test_contradictions_come_first(tmp_path: Path) -> None:
    html = page(tmp_path, absent(wrong_path))
    said = text(html)
    assert "silent-fallback: what ran is not what the rules of gfx942 expect" in said
    markdown = (tmp_path / "out" / "gfx942.md").read_text(encoding="utf-8")
    failures = markdown.partition("failures")[2]
    assert failures.index("fell back") < failures.index("exceed the budget")


def test_an_expected_failure_is_no_failure(tmp_path: Path) -> None:
    def declared(line: samples.Line, number: int) -> None:
        if line["kernel"] == "per_token":
            line.update(state="expected", kind="mismatch", message="declared: known")

    content = samples.lines(itertools.islice(samples.official_params(), 4), declared)
    content[-1]["exit"] = 0
    assert "PASS 8 of 12 results passed, 4 failed as declared" in text(page(tmp_path, content))


# ---- the overview ---------------------------------------------------------------------------------------------------


def overview(folder: Path, *runs: list[samples.Line]) -> str:
    paths = [samples.write(folder / f"{run[0]['arch']}.jsonl", run) for run in runs]
    (page,) = write_overview(paths, folder)
    assert page.name == "index.html"
    return page.read_text(encoding="utf-8")


def test_the_overview_tells_lanes_apart(tmp_path: Path) -> None:
    html = overview(tmp_path, executed(), absent())
    said = text(html)
    assert "PASS 1 of 2 architectures executed something: cpu" in said
    assert "nothing was executed on gfx942" in said
    assert 'href="cpu.html"' in html and 'href="gfx942.html"' in html
    assert "execute 48" in said and "lower 48" in said and "route 48" in said
    assert "declared fallback h_tiled/bits 24" in said
    assert html.count('class="sign s-pass"') == 3  # the CPU's; a lane below execution has a sign of its own
    assert html.count('class="sign s-lower"') == 2 and html.count('class="sign s-route"') == 1


def test_the_overview_names_what_differs(tmp_path: Path) -> None:
    said = text(overview(tmp_path, executed(), absent(), executed(arch="sm_90", commit="other")))
    assert "cpu and gfx942 : 24 results" in said
    assert "24 of h_tiled : cpu pass, path h_tiled; gfx942 pass, path h_tiled/bits" in said
    assert "cpu and sm_90" not in said
    assert "the runs differ in commit: cpu: 3f9c1d27ab04; gfx942: 3f9c1d27ab04; sm_90: other" in said


def test_levels_are_compared_where_both_were_executed(tmp_path: Path) -> None:
    def lower_level(line: samples.Line, number: int) -> None:
        if line["kernel"] == "h_tiled":
            line["level"] = "within-budget"

    other = samples.lines(itertools.islice(samples.official_params(), 48), lower_level, arch="sm_90")
    said = text(overview(tmp_path, executed(), other))
    assert "48 of h_tiled : cpu pass, path h_tiled, bit-exact; sm_90 pass, path h_tiled, within-budget" in said


def test_a_failing_architecture_fails_the_overview(tmp_path: Path) -> None:
    html = overview(tmp_path, executed(), absent(wrong_path))
    said = text(html)
    assert said.startswith("FAIL ") or " FAIL 1 of 2" in said
    assert re.search(r"\d+ failed \(\d+ against the rules\)", said)


def test_an_overview_without_execution_never_says_pass(tmp_path: Path) -> None:
    html = overview(tmp_path, absent(), absent(arch="gfx950"))
    assert "NOT EXECUTED 0 of 2 architectures executed something" in text(html)
    assert 'class="unexecuted"' in html


def test_two_runs_on_one_architecture_do_not_overwrite_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(samples.write(tmp_path / f"{name}.jsonl", executed())) for name in ("a", "b")]
    assert cli.main(["report", *paths, "--out", str(tmp_path / "pages")]) == 2
    assert "both runs on cpu" in capsys.readouterr().err


def test_no_overview_of_one_and_none_of_what_is_no_record(tmp_path: Path) -> None:
    one = samples.write(tmp_path / "cpu.jsonl", executed())
    assert write_overview([one], tmp_path) == []
    with pytest.raises(ReportError, match=r"none\.jsonl"):
        write_overview([one, tmp_path / "none.jsonl"], tmp_path)


def test_the_command_line_makes_all_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(samples.write(tmp_path / f"{run[0]['arch']}.jsonl", run)) for run in (executed(), absent(wrong_path))]
    assert cli.main(["report", *paths, "--out", str(tmp_path / "pages")]) == 1
    printed = capsys.readouterr()
    assert {Path(line).name for line in printed.out.splitlines()} == {
        "cpu.html", "cpu.md", "gfx942.html", "gfx942.md", "index.html"}
    assert "gfx942.jsonl: " in printed.err and "cpu.jsonl" not in printed.err


def test_a_directory_stands_for_its_record_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in (executed(), absent(wrong_path)):
        samples.write(tmp_path / f"{run[0]['arch']}.jsonl", run)
    (tmp_path / "cpu.bench.jsonl").write_text('{"type": "bench-run"}\n')  # timings are no records
    assert cli.main(["report", str(tmp_path)]) == 1
    assert {Path(line) for line in capsys.readouterr().out.splitlines()} == {
        tmp_path / name for name in ("cpu.html", "cpu.md", "gfx942.html", "gfx942.md", "index.html")}
    (tmp_path / "gfx942.jsonl").unlink()
    assert cli.main(["report", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # of one run no overview
    assert cli.main(["report", str(tmp_path), str(tmp_path / "cpu.jsonl")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # nor of one that is named twice
    (tmp_path / "notes.jsonl").write_text("{}\n")
    assert cli.main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / 'notes.jsonl'}:1: ") and said.count("\n") == 1


def test_the_page_says_which_toolchain_assembled(tmp_path: Path) -> None:
    def assembled(line: samples.Line, number: int) -> None:
        lowered(line, number)
        if line["kernel"] == "h_tiled":
            line.update(lane="assemble", resources=CODE | {"assembler": "NVRTC + ptxas"})

    said = text(page(tmp_path, absent(assembled)))
    assert "assemble by NVRTC + ptxas" in said
    assert "lower by" not in said
