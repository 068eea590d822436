"""Whole runs over several architectures: pages, exit codes, declared and undeclared paths, rules that rotted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from suite_runs import CASES, MODULE, Ran, read_lines, run, write_kernels

# A kernel that says by its name alone which path it takes; nothing is compiled.
ROUTED = """
from conformance import NotSupported, report_path
from conformance.route import Route

def routed(name, path, **options):
    def route(params, arch):
        if path == "refused":
            raise NotSupported("wave 64 is not supported")
        return Route(path)
    def run(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        right(x, token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf, out=out)
        report_path(path)
    run.__module__ = __name__
    native = (*options.pop("native", (name,)), "vectorised")  # which `right` reports
    kernel("moe_reduce_fused", promise="published", name=name, route=route, native=native, **options)(run)

routed("plain", "plain")
routed("falls", "slow")
routed("wide", "wide", native=("narrow", "wide"))
routed("refuses", "refused")

def silent(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    from kernels.reduce_fused.vectorised import _reduce
    _reduce(x, token_topk_to_pos, topk_weights, x_sf, sf, out)
kernel("moe_reduce_fused", promise="published", native=("silent",))(silent)

def both(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    right(x, token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf, out=out)
    report_path("slow")
    report_path("both")
kernel("moe_reduce_fused", promise="published", native=("both", "vectorised"))(both)
"""


def rules(folder: Path, *entries: str) -> str:
    """``--expectations`` for a file of rules, each given by its distinguishing lines."""
    common = ('arch = ["gfx942", "cpu"]\nreason = "measured"\nsource = "here"\nsince = "2026-11-29"\n'
              'until = "2099-01-01"\n')
    file = folder / "rules.toml"
    file.write_text("".join(f"[[expect]]\n{entry}\n{common}" for entry in entries), encoding="utf-8")
    return f"--expectations={file}"


def run_on(folder: Path, *arguments: str, kernels: str = MODULE) -> Ran:
    write_kernels(folder, ROUTED)
    return run(folder, "--kernels", kernels, "--case", " ".join(CASES[:2]), *arguments)


def kinds(folder: Path, arch: str) -> dict[str, set[tuple[str, str | None, str]]]:
    found: dict[str, set[tuple[str, str | None, str]]] = {}
    for line in read_lines(folder / "out" / f"{arch}.jsonl"):
        if line["type"] == "result":
            found.setdefault(line["kernel"], set()).add((line["state"], line["kind"], line["lane"]))
    return found


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["no worker", "workers"])
def test_an_undeclared_fallback_fails_on_every_architecture(tmp_path: Path, workers: tuple[str, ...]) -> None:
    ran = run_on(tmp_path, "--arch", "gfx942,cpu", *workers)
    assert ran.code == 1
    for arch, lane in (("gfx942", "route"), ("cpu", "execute")):
        found = kinds(tmp_path, arch)
        assert found["plain"] == found["wide"] == {("pass", None, lane)}
        assert found["falls"] == {("fail", "silent-fallback", lane)}
    here = kinds(tmp_path, "cpu")
    assert here["silent"] == {("fail", "path-unknown", "execute")}  # it declares paths and reports none
    assert here["both"] == {("fail", "silent-fallback", "execute")}  # whatever it reports after the fallback
    assert kinds(tmp_path, "gfx942")["refuses"] == {("not-run", "refused", "route")}
    assert "nothing was executed: gfx942 is not here" in ran.output
    absent, _, executed = ran.output.rpartition("conformance on cpu")
    assert re.search(r"plain: (\d+) planned: \1 reached lane route \(not executed\)\n", absent)
    assert re.search(r"falls: (\d+) planned: \1 fail in lane route\n", absent)
    assert re.search(r"plain: (\d+) planned: \1 pass\n", executed)
    passed, elsewhere = (sum(line.get("state") == "pass" for line in read_lines(tmp_path / "out" / f"{arch}.jsonl"))
                         for arch in ("cpu", "gfx942"))
    assert elsewhere and re.search(rf"{passed} passed, \d+ skipped, {elsewhere} not executed in ", executed)
    assert {path.name for path in (tmp_path / "out").glob("*.html")} == {"gfx942.html", "cpu.html", "index.html"}
    overview = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "1 of 2 architectures executed something: cpu" in overview


def test_a_declared_fallback_passes_and_its_rule_is_in_the_records(tmp_path: Path) -> None:
    option = rules(tmp_path, 'match = { kernel = "falls" }\nexpect = "fallback"\npath = "slow"',
                   'match = { kernel = "refuses" }\nexpect = "unsupported"\nfailure = "refused"\nsignature = "wave 64"')
    ran = run_on(tmp_path, "--arch", "gfx942", option)
    assert kinds(tmp_path, "gfx942") == {
        **{name: {("not-run", None, "route")} for name in ("sound", "silent", "both")},
        **{name: {("pass", None, "route")} for name in ("plain", "wide", "falls")},
        "refuses": {("expected", "refused", "route")}}
    lines = read_lines(tmp_path / "out" / "gfx942.jsonl")
    assert [rule["text"] for rule in lines[0]["rules"]][-2:] == [
        "fallback = slow", "unsupported = refused ('wave 64')"]
    falls = next(line for line in lines if line.get("kernel") == "falls")
    assert falls["expected"]["where"].endswith("rules.toml:1")
    assert ran.code == 0, ran.output


@pytest.mark.parametrize(("rule", "words"), [
    ('match = { kernel = "plain" }\nexpect = "fallback"\npath = "slow"', "ran its native path 'plain'"),
    ('match = { kernel = "falls" }\nexpect = "fallback"\npath = "slower"', "ran the path 'slow', but"),
    ('match = { kernel = "plain" }\nexpect = "unsupported"\nfailure = "refused"', "works in lane execute"),
    ('match = { kernel = "plain" }\nexpect = "known-failure"\nfailure = "mismatch"\nsignature = "x"',
     "works in lane execute"),
    ('match = { kernel = "nobody" }\nexpect = "fallback"\npath = "slow"', "stale: it matches no case on cpu"),
    ('match = { kernl = "plain" }\nexpect = "fallback"\npath = "slow"', "Did you mean 'kernel'?"),
])
def test_a_rule_that_does_not_hold_fails_the_run(tmp_path: Path, rule: str, words: str) -> None:
    ran = run_on(tmp_path, rules(tmp_path, rule), "--arch", "cpu", "-k", "plain or falls")
    assert ran.code == 1
    assert words in ran.output
    assert "rules.toml:1" in ran.output


def test_two_rules_that_quarrel(tmp_path: Path) -> None:
    option = rules(tmp_path, 'match = { kernel = "plain" }\nexpect = "fallback"\npath = "a"',
                   'match = { weights = "yes" }\nexpect = "fallback"\npath = "b"')
    ran = run_on(tmp_path, option, "--arch", "cpu", "-k", "plain")
    assert ran.code == 1
    assert "ambiguous" in ran.output and "rules.toml:1" in ran.output and "rules.toml:10" in ran.output


@pytest.mark.parametrize(("text", "words"), [
    ("[[expect]\n", "malformed TOML"), ("[[expect]]\nmatch = {}\n", "'expect' is missing"), (None, "cannot be read"),
])
def test_a_malformed_file_of_rules_is_one_clear_error(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "rules.toml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    ran = run_on(tmp_path, f"--expectations={file}", "--arch", "cpu")
    assert ran.code == 4
    assert "rules.toml" in ran.output and words in ran.output and "Traceback" not in ran.output


def test_a_declared_hang_and_a_declared_exit_are_expected(tmp_path: Path) -> None:
    option = rules(
        tmp_path, 'match = { kernel = "hangs" }\nexpect = "known-failure"\nfailure = "hang"\nsignature = "running"',
        'match = { kernel = "exits" }\nexpect = "known-failure"\nfailure = "process-exit"\nsignature = "exit code 9"')
    write_kernels(tmp_path, "add('hangs', lambda: time.sleep(600))\nadd('exits', lambda: os._exit(9))\n")
    ran = run(tmp_path, "--kernels", MODULE, "--case", CASES[0], option, "--arch", "cpu", "-n", "2", "--case-timeout=8")
    states = {result["kernel"]: (result["state"], result["kind"]) for result in ran.results}
    assert states == {"sound": ("pass", None), "hangs": ("expected", "timeout"), "exits": ("expected", "crash")}
    assert ran.code == 0, ran.output


def test_a_route_that_never_ends_costs_its_own_case(tmp_path: Path) -> None:
    write_kernels(tmp_path, ROUTED + "def endless(params, arch):\n    while True: pass\n"
                  "def stuck(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out): pass\n"
                  "kernel('moe_reduce_fused', promise='published', route=endless, lower=endless)(stuck)\n")
    ran = run(tmp_path, "--kernels", MODULE, "--case", CASES[0], "--arch", "gfx942", "-n", "1", "--case-timeout=1",
              "-k", "stuck or plain")
    found = kinds(tmp_path, "gfx942")
    assert found == {"plain": {("pass", None, "route")}, "stuck": {("timeout", "timeout", "route")}}
    assert ran.code == 1


def test_a_known_mismatch_is_expected_and_costs_nothing(tmp_path: Path) -> None:
    option = rules(tmp_path, 'match = { kernel = "zeros" }\nexpect = "known-failure"\nfailure = "mismatch"\n'
                   'signature = "elements"')
    write_kernels(tmp_path, "def zeros(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):\n"
                  "    out.zero_()\nkernel('moe_reduce_fused', promise='published')(zeros)\n")
    ran = run(tmp_path, "--kernels", MODULE, "--case", CASES[0], option, "--arch", "cpu")
    (zeros,) = ran.of("zeros")
    assert (zeros["state"], ran.code) == ("expected", 0), ran.output
    assert "measured" in zeros["message"]
