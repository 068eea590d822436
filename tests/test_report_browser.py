"""The HTML page in a real headless Chromium: it draws, in time, and answers to addresses, clicks and keys."""

from __future__ import annotations

import html
import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import report_samples as samples

from reports import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--dump-dom",
]

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium, chromium-browser or google-chrome on PATH: install one to test the page",
)


def _fail_some(line: samples.Line, number: int) -> None:
    point = line["params"]
    if line["kernel"] == "per_token" and (point["out"], point["topk"]) == ("e4m3", "9"):
        samples.fail(line, number, message=f"{line['case']} on per_token: </script><b>bold</b> & {number}")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("page")
    points = itertools.chain(samples.official_params(), samples.edge_params())
    return write_report(samples.write(where / "r.jsonl", samples.lines(points, _fail_some)), where)[0]


def _dump(page: Path, profile: Path, address: str = "", act: str = "") -> str:
    """The document after load. ``act`` is script that runs after the page's own, in a copy of it."""
    if act:
        text = page.read_text(encoding="utf-8")
        page = page.with_name("act.html")
        page.write_text(text.replace("</body>", f"<script>{act}</script></body>"), encoding="utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", page.as_uri() + address]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def _body(dom: str) -> dict[str, str]:
    found = re.search(r"<body([^>]*)>", dom)
    assert found
    return dict(re.findall(r'data-([a-z-]+)="([^"]*)"', found[1]))


def _note(dom: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>([^<]*)<', dom)
    assert found, name
    return html.unescape(found[1])


def test_the_full_matrix_opens_in_time(tmp_path: Path) -> None:
    page = write_report(
        samples.write(tmp_path / "r.jsonl", samples.lines(samples.full_params(), _fail_some)), tmp_path
    )[0]
    dom = _dump(page, tmp_path / "profile")
    body = _body(dom)
    assert (body["ready"], body["check"], body["results"], body["shown"]) == ("1", "ok", "22467", "22467")
    assert int(body["render-ms"]) < 2000
    assert int(body["cells"]) > 50 and dom.count('class="cell') > int(body["cells"])  # and the legend's
    assert dom.count("<tr><td><button") == 50  # the table holds one page of rows
    assert "page 1 of 450" in dom


def test_the_page_leads_to_the_cause(page: Path, tmp_path: Path) -> None:
    dom = _dump(page, tmp_path / "profile")
    assert _body(dom)["check"] == "ok"
    # The axes are the two telling parameters, and the rule names the values.
    assert re.search(r"<span>topk →</span><span>out ↓</span>|<span>out →</span><span>topk ↓</span>", dom)
    assert "all 144 results with topk:9, out:e4m3 fail like this" in dom
    assert 'aria-label="topk:9, out:e4m3, kernel:per_token: 144 results: 144 fail' in dom
    assert "&lt;/script&gt;&lt;b&gt;bold" in dom and "<b>bold" not in dom.split('id="data"')[0]
    assert "pytest --case 'moe_reduce_fused/send:4001-topk:9-" in dom


def test_an_address_sets_axes_and_filters(page: Path, tmp_path: Path) -> None:
    dom = _dump(
        page, tmp_path / "profile", "#x=hidden&y=ranks&facet=&kernel=per_token&state=fail&cx=7168&cy=64"
    )
    body = _body(dom)
    assert body["cells"] == "13" and body["shown"] == "8"
    assert _note(dom, "count") == "8 of 3816 results in one cell"
    assert _note(dom, "results-note") == "8 of 3816, hidden:7168 ranks:64"
    assert _note(dom, "clear-cell").startswith("hidden:7168 ranks:64")
    dom = _dump(
        page, tmp_path / "profile", "#family=F06-tokens&x=routing&y=tokens&colour=budget&q=exact+h_tiled"
    )
    assert _body(dom)["shown"] == "36" and 'style="--v:' in dom
    dom = _dump(page, tmp_path / "profile", "#x=nonsense&kernel=nobody&page=999&sort=budget&down=1")
    assert _body(dom)["shown"] == "3816" and "page 77 of 77" in dom


def test_clicks_and_keys_work(page: Path, tmp_path: Path) -> None:
    act = """
      const log = [], say = () => log.push(document.body.dataset.shown);
      const maps = [...document.querySelectorAll("#maps table")];
      const cells = maps.map((t) => [...t.querySelectorAll("button.cell")]);
      const key = (key) => document.activeElement.dispatchEvent(
        new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
      log.push(document.querySelectorAll("#maps button.cell[tabindex='0']").length === cells.length);
      cells[0][0].focus(); key("ArrowRight"); key("ArrowDown"); key("End"); key("Home"); key("ArrowUp");
      log.push(document.activeElement === cells[0][0] && cells[0][0].tabIndex === 0);
      cells[1][0].click(); say(); log.push(cells[1][0].getAttribute("aria-pressed"));
      cells[1][0].focus(); key("Escape"); say();
      const kernel = document.getElementById("f-kernel");
      kernel.value = "per_token"; kernel.dispatchEvent(new Event("change")); say();
      log.push(location.hash);
      document.querySelector("#failure-groups .buttons button:last-child").click(); say();
      document.querySelector("#table-body button.open").click();
      log.push(document.querySelectorAll("#table-body .opened .copyable").length);
      document.querySelector("#table-head th:nth-child(5) button").click();
      log.push(document.querySelector("#table-head th:nth-child(5)").getAttribute("aria-sort"));
      document.getElementById("reset").click(); say();
      document.body.dataset.log = log.join(" ");
    """
    dom = _dump(page, tmp_path / "profile", act=act)
    log = html.unescape(_body(dom)["log"])
    # One cell of the second kernel: topk 2 with e4m3 or the like, 144 results or fewer.
    assert re.fullmatch(r"true true \d+ true 3816 1272 #kernel=per_token 144 1 descending 3816", log), log


def test_a_damaged_page_says_so(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    damaged = tmp_path / "damaged.html"
    damaged.write_text(
        re.sub(r'(<td class="n">)1272(</td>)', r"\g<1>1271\2", text, count=1), encoding="utf-8"
    )
    dom = _dump(damaged, tmp_path / "profile")
    assert _body(dom)["check"] == "bad" and "summary and its data disagree on pass" in dom
