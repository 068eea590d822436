"""The pages as text: what the first screen says, escaping, sizes, the bounds of the Markdown, and rules."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import report_samples as samples

from reports import read_records, write_report
from reports.explain import explain

HOSTILE = "</script><script>alert(1)</script> <!-- "
HOSTILE += "& \"quote\" 'tick' `tick` | @someone *b* \u2028 \U0001f600 {{ x }} $"


def _pages(tmp_path: Path, content: list[samples.Line]) -> tuple[str, str]:
    page, summary = write_report(samples.write(tmp_path / "records.jsonl", content), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [page.name, summary.name]
    return page.read_text(encoding="utf-8"), summary.read_text(encoding="utf-8")


def _data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


class _Reader(HTMLParser):
    """Texts outside scripts and styles, the scripts, and every attribute that could reach the network."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")
        ]

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] not in (["script"], ["style"]):
            self.texts.append(data)


def _read(page: str) -> _Reader:
    reader = _Reader()
    reader.feed(page)
    return reader


def _text(page: str) -> str:
    return " ".join(" ".join(_read(page).texts).split())


def _mixed(line: samples.Line, number: int) -> None:
    point = line["params"]
    if line["kernel"] == "per_token" and (point["out"], point["topk"]) == ("e4m3", "9"):
        samples.fail(line, number)
    if line["kernel"] == "torch_gather" and point["hidden"] == "7168":
        line.update(state="not-run", level=None, message=f"{line['case']} on torch_gather: needs 9.1 GB")


def test_the_first_screen_says_it_all(tmp_path: Path) -> None:
    page, summary = _pages(tmp_path, samples.lines(samples.official_params(), _mixed, dirty=True))
    text = _text(page)
    for said in (
        "FAIL 144 of 3456 results failed",
        "reduced sizes: not the official result",
        "moe_reduce_fused on cpu",
        "Intel(R) Xeon(R) Platinum 8481C, 2 cores",
        "torch 2.13.0+cpu",
        "3f9c1d27ab04 + uncommitted changes",
        "pytest -n auto",
        "192 needs 9.1 GB torch_gather 192",
        "bit-exact 1008",
        "published 144",
        "saturate to 448 (0x7e)",
        "half an ULP of the output",
        "bf16 0.016",
    ):
        assert said in text, said
    assert "### 10 of 144 failures" in summary and "needs 9.1 GB" in summary
    assert "all 144 results with topk:9, out:e4m3 fail like this, none of the 1008 others" in summary


def test_official_sizes_carry_no_notice(tmp_path: Path) -> None:
    page, summary = _pages(tmp_path, samples.lines(samples.official_params(), sizes="official", arch="sm_90"))
    assert "not the official result" not in page + summary
    assert "PASS 3456 of 3456 results passed" in _text(page)


def test_a_killed_run_says_so(tmp_path: Path) -> None:
    page, summary = _pages(tmp_path, samples.lines(samples.official_params())[:100])
    assert "FAIL run did not finish: 99 of 3456 planned results recorded" in _text(page)
    assert "no result was recorded" in summary and "Not run: 3357" in summary


def test_no_text_can_leave_its_place(tmp_path: Path) -> None:
    def hostile(line: samples.Line, number: int) -> None:
        samples.fail(
            line,
            number,
            message=f"{HOSTILE} {number}",
            trace=HOSTILE,
            kind="b<i>",
            details={HOSTILE: HOSTILE},
        )
        if number % 5 == 0:
            line.update(state="not-run", message=HOSTILE)

    points = itertools.islice(samples.official_params(), 40)
    content = samples.lines(
        points, hostile, device=HOSTILE, command=HOSTILE, policies={"op": {HOSTILE: HOSTILE}}
    )
    content[-1]["problems"] = [HOSTILE]
    page, summary = _pages(tmp_path, content)
    reader = _read(page)
    assert reader.tags.count("script") == 2 and page.count("</script>") == 2
    assert "alert(1)" in _text(page)  # shown, as text
    messages = _data(page)["messages"]
    assert f"{HOSTILE} 1" in messages
    bare = re.sub(r"(?s)(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", summary)  # without code
    assert "&lt;script&gt;" in bare and "&#64;someone" in bare
    assert "<" not in bare and "@" not in bare


def test_the_page_is_alone_and_accessible(tmp_path: Path) -> None:
    page, _ = _pages(tmp_path, samples.lines(samples.official_params(), _mixed))
    reader = _read(page)
    assert all(address.startswith("#") for address in reader.addresses)
    assert "default-src 'none'" in page and "link" not in reader.tags and "img" not in reader.tags
    assert 'class="skip" href="#matrix"' in page and 'lang="en"' in page
    assert len(re.findall(r"<th(?= |>)", page)) == len(re.findall(r"<th scope=", page))
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for label in re.findall(r'aria-labelledby="([^"]+)"', page):
        assert label in ids


def _pairs(runs: list[int]) -> list[tuple[int, int]]:
    return list(zip(runs[::2], runs[1::2], strict=True))


def _all_fail(line: samples.Line, number: int) -> None:
    samples.fail(line, number, trace=f"frame {number}\n" * 200)


@pytest.mark.parametrize(("change", "limit"), [(_mixed, 1_100_000), (_all_fail, 2_000_000)])
def test_7489_cases_on_3_kernels_stay_small(tmp_path: Path, change: samples.Change, limit: int) -> None:
    content = samples.lines(samples.full_params(), change)
    page, summary = _pages(tmp_path, content)
    assert len(page.encode()) < limit
    assert len(summary.encode()) < 8_000
    data = _data(page)
    assert len(data["outcome"]) == 22467 and data["cases"]["count"] == 7489 and len(data["details"]) <= 200


def test_the_columns_give_back_every_result(tmp_path: Path) -> None:
    points = itertools.chain(itertools.islice(samples.official_params(), 30), samples.edge_params())
    content = samples.lines(points, _mixed)
    content[1]["case"] = "moe_reduce_fused/odd-one"  # an id that its parameters do not spell
    content[2].update(budget_fraction=float("inf"), max_error=float("nan"), seconds=None)
    data = _data(_pages(tmp_path, content)[0])
    assert {c["key"] for c in data["cases"]["columns"]} >= {"family", "topk", "routing"}
    columns = {c["key"]: c for c in data["cases"]["columns"]}
    orders = [code for code, count in _pairs(data["cases"]["order"]) for _ in range(count)]
    ids = []
    for case in range(data["cases"]["count"]):
        names = data["cases"]["orders"][orders[case]]
        point = "-".join(f"{n}:{columns[n]['values'][columns[n]['codes'][case]]}" for n in names)
        code = columns["family"]["codes"][case]
        family = [columns["family"]["values"][code]] if code >= 0 else []
        ids.append(data["cases"]["ids"].get(str(case), "/".join(["moe_reduce_fused", *family, point])))
    kernels = [data["kernels"][k] for k, count in _pairs(data["kernel"]) for _ in range(count)]
    cases = [ids[at] for at in itertools.accumulate(data["case"])]
    states = [data["states"][data["outcomes"][o][0]] for o in data["outcome"]]
    want = {(line["case"], line["kernel"]): line["state"] for line in content if line["type"] == "result"}
    assert dict(zip(zip(cases, kernels, strict=True), states, strict=True)) == want
    odd = kernels.index("per_token") + cases[kernels.index("per_token") :].index(content[2]["case"])
    assert (data["budget"][odd], data["error"][odd], data["seconds"][odd]) == (-2, -3, -1)


def test_markdown_is_bounded_whatever_the_records_hold(tmp_path: Path) -> None:
    def long(line: samples.Line, number: int) -> None:
        samples.fail(line, number, message="`|<" * 3000 + str(number), rerun="x" * 9000, kind=f"kind{number}")
        if number % 2:
            line.update(state="not-run", message=f"reason {number} " * 400)

    names = tuple(f"kernel_{i}_" + "k" * 200 for i in range(100))
    points = itertools.islice(samples.official_params(), 10)
    content = samples.lines(points, long, kernels=names, command="c" * 99_999, device="d" * 9_999)
    content[-1]["problems"] = ["p" * 9_999] * 999
    summary = _pages(tmp_path, content)[1]
    assert len(summary.encode()) < 60_000
    fences = [line for line in summary.splitlines() if line.strip().startswith("```")]
    assert len(fences) == 20  # each failure's block is opened and closed


def test_a_rule_names_the_values_and_luck_names_none(tmp_path: Path) -> None:
    records = read_records(samples.write(tmp_path / "r.jsonl", samples.lines(samples.official_params())))
    executed = [result for result in records.results if result.kernel == "h_tiled"]
    cause = [r for r in executed if r.params["hidden"] in ("6144", "7168") and r.params["weights"] == "no"]
    rule = explain(cause, executed)
    assert rule and dict(rule.conditions) == {"hidden": ("6144", "7168"), "weights": ("no",)}
    assert (rule.failing, rule.inside, rule.outside) == (192, 192, 960)
    some = explain(cause[::7], executed)
    assert some and some.text.startswith(f"{len(cause[::7])} of ")
    assert explain([executed[3], executed[500], executed[901]], executed) is None
    assert explain(executed, executed) is None


@pytest.mark.parametrize(("value", "said"), [(0.99997, "<1"), (1.00003, ">1"), (1.0, "1"), (0.4321, "0.432")])
def test_a_budget_fraction_is_never_rounded_onto_its_limit(tmp_path: Path, value: float, said: str) -> None:
    points = itertools.islice(samples.official_params(), 2)
    content = samples.lines(points, lambda line, number: line.update(budget_fraction=value))
    page, summary = _pages(tmp_path, content)
    assert f" {said} |" in summary
    kept = _data(page)["budget"][0]
    assert (kept > 1, kept < 1) == (value > 1, value < 1)


def test_reports_import_nothing_of_the_suite() -> None:
    code = "import reports, sys; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert not {"torch", "conformance", "references", "kernels", "numpy"} & set(
        json.loads(done.stdout.replace("'", '"'))
    )
