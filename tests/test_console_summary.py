"""The lines at the end of a run: what the failures of a kernel have in common stands there as on the pages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import report_samples as samples
from report_samples import Line

from conformance.runs.recorder import Recorder
from conformance.session.pages import Made, make_pages, remove_pages
from conformance.session.progress import Display


class Terminal:
    """Keeps what a run writes to pytest's terminal reporter."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines.append(title)

    def write_line(self, text: str) -> None:
        self.lines.append(text)


def summary_of(folder: Path, made: Made) -> list[str]:
    recorder = Recorder(folder / "cpu.jsonl", samples.run_line(planned={"h_tiled": 1}))
    recorder.add(samples.result_line(next(samples.official_params()), "h_tiled"))
    display: Any = Display({"cpu": recorder})
    display.terminal = Terminal()
    display.summary(made, {})
    recorder.close(False)
    return list(display.terminal.lines)


def test_what_failures_have_in_common_comes_with_the_pages(tmp_path: Path) -> None:
    def change(line: Line, number: int) -> None:
        if line["params"]["hidden"] == "4096" and line["kernel"] == "per_token":
            samples.fail(line, number)

    content = samples.lines(itertools.islice(samples.official_params(), 0, 96), change)
    made = make_pages(tmp_path, [samples.write(tmp_path / "cpu.jsonl", content)], [])
    assert [page.name for page in made.pages] == ["cpu.html", "cpu.md"] and not made.failed
    told = "per_token, budget: all 16 results with hidden:4096 fail like this, none of the 80 others"
    assert made.common == {"cpu": [told]}
    assert f"  in common: {told}" in summary_of(tmp_path / "next", made)


def test_a_page_that_cannot_be_replaced_costs_no_results(tmp_path: Path, capsys: Any) -> None:
    records = samples.write(tmp_path / "cpu.jsonl", samples.lines(itertools.islice(samples.official_params(), 2)))
    (tmp_path / "cpu.html").mkdir()
    remove_pages(tmp_path, [records], [])
    made = make_pages(tmp_path, [records], [])
    assert made.failed and made.pages == []
    assert f"{tmp_path / 'cpu.html'}: cannot be written: Is a directory" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cpu.html", "cpu.jsonl"]


def test_two_lines_for_a_kernel_at_most(tmp_path: Path) -> None:
    said = [f"{kernel}, {kind}: all 3 results fail like this" for kernel in ("one", "two") for kind in "abc"]
    shown = summary_of(tmp_path, Made([], {"cpu": said, "sm_90": ["other, a: not of this one"]}))
    assert [line for line in shown if "in common" in line] == [f"  in common: {said[place]}" for place in (0, 1, 3, 4)]


def test_causes_stand_first_on_the_pages_and_in_the_last_lines(tmp_path: Path) -> None:
    """What was diagnosed, what a message says by itself, and how many failures nobody looked into."""
    kinds = {0: ("budget", {"diagnosis": {"key": "k", "sentence": "the weights are left out", "explained": 1.0}}),
             1: ("budget", {"cause": "not looked for"}), 2: ("exception", None)}

    def change(line: Line, number: int) -> None:
        if line["kernel"] != "per_token":
            return
        samples.fail(line, number)
        kind, details = kinds[number // 3 % 3]
        line |= {"kind": kind, "details": details, "state": "error" if kind == "exception" else "fail",
                 "message": f"{line['case']} on per_token: raised KeyError: 'x'\nmore"}

    content = samples.lines(itertools.islice(samples.official_params(), 0, 18), change)
    records = samples.write(tmp_path / "cpu.jsonl", content)
    made = make_pages(tmp_path, [records], [])
    markdown, page = ((tmp_path / f"cpu.{kind}").read_text() for kind in ("md", "html"))
    assert "- `per_token`, 6 results: the weights are left out" in markdown
    assert page.index("<b>6</b> <span>the weights are left out <small><code>per_token") < page.index('id="counts"')
    assert markdown.index("raised KeyError") > markdown.index("the weights are left out")
    recorder = Recorder(tmp_path / "next" / "cpu.jsonl", samples.run_line(planned={"per_token": 18}))
    for line in content[1:]:
        if line["type"] == "result" and line["kernel"] == "per_token":
            recorder.add(line)
    display: Any = Display({"cpu": recorder})
    display.terminal = Terminal()
    display.summary(made, {})
    recorder.close(True)
    told = display.terminal.lines
    assert "  diagnosed: 6 of per_token: the weights are left out" in told
    assert "  diagnosed: 6 of per_token: raised KeyError: 'x'" in told
    assert "  not diagnosed: 6 more of per_token: run one by itself to have its cause looked for" in told
