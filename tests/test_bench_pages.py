"""Pages of timings from files with known figures: ratios, noise, every form of the table, and what is malformed."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from bench_samples import bench_run, end, not_timed, three_way, timing, write

from reports.bench import markdown, page, spelling, svg, text
from reports.bench.ratios import Ratio, rows, summaries
from reports.bench.records import BenchRun, read_bench
from reports.bench.write import write_bench
from reports.fields import ReportError
from reports.text import DASH


@pytest.fixture
def run(tmp_path: Path) -> BenchRun:
    return read_bench(write(tmp_path / "sm_90.bench.jsonl", three_way()))


# ---- figures --------------------------------------------------------------------------------------------------------


def test_three_ratios_of_each_workload_and_which_are_noise(run: BenchRun) -> None:
    decode, tiny = rows(run)
    assert (decode.workload, decode.point, decode.moved) == ("decode", "tokens 512, in bf16", 100_000_000)
    assert decode.over_baseline == Ratio(pytest.approx(1.25), False)
    assert decode.over_pytorch == Ratio(pytest.approx(10.0), False)
    assert decode.baseline_over_pytorch == Ratio(pytest.approx(8.0), False)
    assert tiny.over_baseline == Ratio(pytest.approx(1.004), True)
    assert tiny.over_pytorch == Ratio(pytest.approx(0.9), False)


@pytest.mark.parametrize(("spread", "noise"), [(0.01, False), (0.2499, False), (0.2501, True)])
def test_noise_is_what_lies_within_the_wider_spread(tmp_path: Path, spread: float, noise: bool) -> None:
    lines = [bench_run(), timing("fast", 40e-6), timing("plain", 50e-6, spread=spread), end()]
    (row,) = rows(read_bench(write(tmp_path / "a.bench.jsonl", lines)))
    assert row.over_baseline is not None
    assert row.over_baseline.noise is noise


def test_summaries_are_geometric_means(run: BenchRun) -> None:
    (one,) = summaries(rows(run))
    assert (one.operator, one.variant, one.candidate) == ("op", "base", "fast")
    assert (one.cases, one.noise, one.slower) == (2, 1, 0)
    assert one.over_pytorch == pytest.approx((0.9, 3.0, 10.0))
    assert one.of_copy == pytest.approx((0.5, 0.5625))
    by_workload = summaries(rows(run), by_workload=True)
    assert [(found.workload, found.cases) for found in by_workload] == [("decode", 1), ("tiny", 1)]


def test_slower_beyond_noise_is_counted(tmp_path: Path) -> None:
    lines = [bench_run(), timing("fast", 60e-6), timing("plain", 50e-6), end()]
    (one,) = summaries(rows(read_bench(write(tmp_path / "a.bench.jsonl", lines))))
    assert (one.noise, one.slower) == (0, 1)


def test_every_candidate_has_a_row_and_a_case_without_one_too(tmp_path: Path) -> None:
    lines = [bench_run(), timing("fast", 4e-5), timing("mine", 2e-5), timing("plain", 5e-5),
             timing("plain", 5e-5, workload="b"), timing("eager", 1e-4, workload="b"), end()]
    found = rows(read_bench(write(tmp_path / "a.bench.jsonl", lines)))
    assert [row.candidate and row.candidate.kernel for row in found] == ["fast", "mine", None]
    assert found[2].over_baseline is None
    assert found[2].baseline_over_pytorch == Ratio(2.0, False)
    summary = summaries(found)[-1]
    assert text.summary_cells(summary)[-3:] == (DASH, DASH, DASH)


@pytest.mark.parametrize(("seconds", "words"), [(15.94e-6, "15.9 us"), (145e-6, "145 us"), (1.2e-3, "1.20 ms"),
                                                 (2.5, "2.50 s"), (3e-7, "300 ns")])
def test_how_times_are_written(seconds: float, words: str) -> None:
    assert spelling.seconds(seconds) == words


def test_how_figures_are_written() -> None:
    assert spelling.times(Ratio(1.254, False)) == "1.25x"
    assert spelling.times(Ratio(1.004, True)) == "noise (1.00x)"
    assert spelling.per_second(4.312e12, "B") == "4.31 TB/s"
    assert spelling.size(66_060_288) == "66.1 MB"
    assert spelling.percent(0.9512) == "95.1 %"


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_text(run: BenchRun) -> None:
    shown = text.tables(run)
    assert "timings on sm_90: One GPU; device time by cupti; 6 of 6 timed" in shown
    assert "device copy: 4 TB/s" in shown
    assert "fp32 matrix product: 50 TFLOP/s" in shown
    line = next(line for line in shown.splitlines() if "decode tokens 512" in line)
    assert re.split(r" {2,}", line.strip()) == [
        "op", "base", "decode tokens 512, in bf16", "40.0 us ±1 %", "50.0 us ±1 %", "400 us ±1 %", "1.25x", "10.00x",
        "8.00x", "100 MB", "2.5 TB/s", "62.5 %", "62.5 %"]
    assert "noise (1.00x)" in shown
    assert "tokens 512" not in text.tables(run, cases=False)


def test_markdown(run: BenchRun) -> None:
    shown = markdown.render(run)
    assert "## Timings on sm_90: 6 of 6 timed" in shown
    assert "| op | base | decode tokens 512, in bf16 | 40.0 us ±1 % |" in shown
    assert "warm-up 10, 50 repeats x 3 trials, 2 runs" in shown
    widths = {line.count("|") for line in shown.split("### Each case")[1].splitlines() if line.startswith("|")}
    assert widths == {len(text.ROW_HEAD) + 1}


def test_html_is_whole_by_itself_and_holds_both_drawings(run: BenchRun) -> None:
    shown = page.render(run)
    assert "default-src 'none'" in shown
    assert not re.search(r"<script|<link|<img|url\(", shown)
    assert shown.count("<svg") == 2
    assert "40.0 us ±1 %" in shown
    assert '<td class="dim">noise (1.00x)</td>' in shown


def test_the_roofline_has_a_mark_for_each_timing_below_the_ceiling(run: BenchRun) -> None:
    drawing = ET.fromstring(svg.roofline(run.timed))
    titles = [title.text or "" for title in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("op/model:" in title for title in titles) == 6
    assert "fast op/model:decode-tokens:512-in:bf16: 40.0 us, 2.5 TB/s, 2.5 TFLOP/s, 62.5 % of the roofline" in titles
    words = [found.text for found in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"copy 4 TB/s", "fp32 50 TFLOP/s", "fast", "plain", "eager", "FLOPs per byte"} <= set(words)
    heights = {title.text: float(mark.get("cy") or 0) for mark in drawing.iter("{http://www.w3.org/2000/svg}circle")
               for title in mark if "op/" in (title.text or "")}
    faster, slower = (next(y for name, y in heights.items() if name and workload in name) for workload in
                      ("decode", "tiny"))
    assert faster < slower  # the faster is the higher


def test_bars_show_the_share_of_the_roofline(run: BenchRun) -> None:
    drawing = ET.fromstring(svg.bars(run.timed))
    bars = list(drawing.iter("{http://www.w3.org/2000/svg}rect"))
    widths = [float(bar.get("width") or 0) for bar in bars]
    assert len(bars) == 6
    assert widths[0] / widths[1] == pytest.approx(1.25, rel=0.01)  # 40 and 50 us on the same case
    assert svg.bars(()) == svg.roofline(()) == ""


def test_json_has_the_same_figures(tmp_path: Path) -> None:
    source = write(tmp_path / "sm_90.bench.jsonl", [*three_way()[:-1], not_timed("slow", "its verdict is fail"), end()])
    paths = write_bench(source, tmp_path / "out")
    assert [path.name for path in paths] == [f"sm_90.bench.{kind}" for kind in ("html", "md", "txt", "json")]
    found = json.loads(paths[3].read_text(encoding="utf-8"))
    assert found["kind"] == "device"
    assert found["cases"][0]["over_baseline"] == {"value": pytest.approx(1.25), "noise": False}
    assert found["cases"][1]["over_baseline"]["noise"] is True
    assert found["cases"][0]["candidate"]["of_copy"] == pytest.approx(0.625)
    assert found["not_timed"] == [{"kernel": "slow", "case": "op/model:decode-tokens:512-in:bf16",
                                   "reason": "its verdict is fail"}]


def test_what_makes_figures_doubtful_is_said_first(tmp_path: Path) -> None:
    lines = [
        bench_run(sizes="reduced"),
        timing("fast", 4e-5, remarks=["throttled: power cap"]),
        timing("plain", 5e-5, clock="cuda-events", clock_note="not cupti: nothing was recorded", watched=""),
    ]
    run = read_bench(write(tmp_path / "a.bench.jsonl", lines))
    remarks = spelling.remarks(run)
    assert remarks == [
        "the run did not finish: there are fewer timings than were planned",
        "reduced sizes: not the official workloads",
        "1 of 2 timings: not cupti: nothing was recorded",
        "1 of 2 timings (*): throttled: power cap",
        "the card was not watched: whether it was throttled or shared is not known",
    ]
    assert "40.0 us ±1 % *" in text.tables(run)
    for remark in remarks:
        assert remark in page.render(run)


def test_names_from_a_file_are_no_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    lines = [bench_run(device=evil), timing("fast", 4e-5, variant=evil, workload="w"), not_timed("slow", evil), end()]
    run = read_bench(write(tmp_path / "a.bench.jsonl", lines))
    assert "<script" not in page.render(run)
    assert "<script" not in markdown.render(run)


def test_long_names_are_shortened_where_there_is_no_room(tmp_path: Path) -> None:
    lines = [bench_run(), timing("k" * 5000, 4e-5, variant="v" * 5000), end()]
    run = read_bench(write(tmp_path / "a.bench.jsonl", lines))
    for drawing in (svg.roofline(run.timed), svg.bars(run.timed)):
        words = [found.text or "" for found in ET.fromstring(drawing).iter("{http://www.w3.org/2000/svg}text")]
        assert max(map(len, words)) == 42
    assert len(markdown.render(run)) < 20_000


def test_without_a_product_the_pages_have_the_copy_alone(tmp_path: Path) -> None:
    line = timing("fast", 4e-5)
    line["ceilings"] |= {"product": None, "product_note": "torch has no product of fp3"}
    line["figures"] |= {"of_product": None}
    idle = timing("fast", 4e-5, workload="idle", flops=0)
    idle["figures"] |= {"rate": 0.0, "intensity": 0.0, "of_product": 0.0}
    run = read_bench(write(tmp_path / "a.bench.jsonl", [bench_run(), line, idle, end()]))
    words = [found.text for found in ET.fromstring(svg.roofline(run.timed)).iter("{http://www.w3.org/2000/svg}text")]
    assert "copy 4 TB/s" in words and not [word for word in words if word and word.startswith("fp32")]
    assert len(list(ET.fromstring(svg.bars(run.timed)).iter("{http://www.w3.org/2000/svg}rect"))) == 2
    assert page.render(run).count("<svg") == 2


def test_nothing_timed_makes_pages_all_the_same(tmp_path: Path) -> None:
    lines = [bench_run(), not_timed("fast", "its verdict is fail (budget)"), end(problems=["no case was timed"])]
    run = read_bench(write(tmp_path / "a.bench.jsonl", lines))
    assert "its verdict is fail (budget)" in page.render(run)
    assert "nothing was timed; 0 of 1 timed" in text.tables(run)


# ---- malformed files ------------------------------------------------------------------------------------------------


def inside(line: dict, name: str, **changes: object) -> dict:
    return line | {name: line[name] | changes}


def without(line: dict, name: str) -> dict:
    return {key: value for key, value in line.items() if key != name}


@pytest.mark.parametrize(("lines", "message"), [
    ([], "no 'bench-run' line"),
    ([{"type": "run"}], "a line of type 'run' does not belong here"),
    ([bench_run(schema=2)], "schema 2 is not the 1"),
    ([bench_run(), bench_run()], "does not belong here"),
    ([bench_run(), timing("a", 1.0, state="odd")], "unknown state 'odd'"),
    ([bench_run(), timing("a", 1.0, kind="wall")], "unknown kind of time 'wall'; known: device, cpu"),
    ([bench_run(), timing("a", 1.0) | {"seconds": 0}], "'seconds' must be a finite number, more than 0, is 0.0"),
    ([bench_run(), without(timing("a", 1.0), "spread")], "'spread' is missing"),
    ([bench_run(), timing("a", 1.0) | {"seconds": math.inf}], "'seconds' must be a finite number, more than 0, is inf"),
    ([bench_run(), timing("a", 1.0) | {"seconds": math.nan}], "'seconds' must be a finite number, more than 0, is nan"),
    ([bench_run(), timing("a", 1.0) | {"seconds": 10**400}], "'seconds' is too large a number"),
    ([bench_run(), timing("a", 1.0) | {"spread": -0.1}], "'spread' must be a finite number, 0 or more than 0, is -0.1"),
    ([bench_run(), timing("a", 1.0) | {"bytes": -1}], "'bytes' must be 0 or more"),
    ([bench_run(), inside(timing("a", 1.0), "ceilings", copy=0)], "'copy' must be a finite number, more than 0, is 0"),
    ([bench_run(), inside(timing("a", 1.0), "figures", of_roof=math.nan)], "'of_roof' must be a finite number"),
    ([bench_run(), inside(timing("a", 1.0), "figures", rate=5e-324)], "'rate' must be a finite number"),
    ([bench_run(protocol={"repeats": math.nan})], "protocol: 'repeats' must be a finite number or a string, is nan"),
    ([bench_run(protocol={"repeats": [5]})], "protocol: 'repeats' must be a finite number or a string, is [5]"),
    ([bench_run(), timing("a", 1.0), timing("b", 1.0, kind="cpu")], "cpu and device time, which are never mixed"),
])
def test_a_malformed_file_is_one_error(tmp_path: Path, lines: list[dict], message: str) -> None:
    with pytest.raises(ReportError, match=re.escape(message)):
        read_bench(write(tmp_path / "a.bench.jsonl", lines))


def test_a_run_that_was_killed_can_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bench.jsonl", three_way()[:3])
    path.write_text(path.read_text() + '{"type":"timing","case":"op/', encoding="utf-8")
    run = read_bench(path)
    assert (len(run.timings), run.ended) == (2, False)
