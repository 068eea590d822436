"""Rules of expectation: which one holds, and that an outcome that contradicts it fails, in both directions."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.arch import Arch, Fact
from conformance.errors import ConformanceError
from conformance.expectations.check import governed, problems
from conformance.expectations.files import read_rules_file
from conformance.expectations.rule import NATIVE, Expectation, Outcome, Range, contradiction, expected, matches
from conformance.expectations.until import over

GFX = Arch("gfx942", facts={"fp8": Fact("fnuz", "ISA"), "shared_bytes": Fact(65536, "ISA"),
                            "atomics": Fact({"pk_bf16": False}, "ISA")})
BARE = Arch("new")
FALLBACK = Expectation("fallback", path="slow", match={"out": ("e4m3",)}, reason="no fp8", where="f.toml:3")
POINT = {"kernel": "k", "out": "e4m3", "hidden": "512"}


def rule(**fields: object) -> Expectation:
    return replace(FALLBACK, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("fields", "arch", "answer"), [
    ({}, GFX, True),
    ({"match": {"out": ("fp32", "e4m3")}}, GFX, True),
    ({"match": {"out": ("fp32",)}}, GFX, False),
    ({"match": {"absent": ("x",)}}, GFX, False),
    ({"match": {"hidden": Range(512, 512)}}, GFX, True),
    ({"match": {"hidden": Range(513)}}, GFX, False),
    ({"match": {"hidden": Range(most=511)}}, GFX, False),
    ({"match": {"out": Range(1)}}, GFX, False),  # not a number
    ({"match": {"hidden": Range(above="shared_bytes")}}, GFX, False),
    ({"match": {"hidden": Range(above="shared_bytes")}}, BARE, None),
    ({"match": {"hidden": Range(above="shared_bytes"), "out": ("fp32",)}}, BARE, False),
    ({"facts": {"fp8": ("fnuz", "none")}}, GFX, True),
    ({"facts": {"fp8": ("ocp",)}}, GFX, False),
    ({"facts": {"fp8": ("ocp",)}}, BARE, None),
    ({"facts": {"atomics.pk_bf16": (False,)}}, GFX, True),
    ({"facts": {"atomics.other": (False,)}}, GFX, None),
    ({"archs": ("gfx942",)}, GFX, True),
    ({"archs": ("gfx950",)}, GFX, False),
])
def test_when_a_rule_matches(fields: dict[str, object], arch: Arch, answer: bool | None) -> None:
    assert matches(rule(**fields), POINT, arch) is answer


def test_a_number_exactly_at_the_limit_fits() -> None:
    above = rule(match={"lds": Range(above="shared_bytes")})
    assert matches(above, {"lds": "65536"}, GFX) is False
    assert matches(above, {"lds": "65537"}, GFX) is True


def test_the_most_special_rule_counts() -> None:
    special = rule(kind="native", path="", match={"out": ("e4m3",), "hidden": ("512",)}, where="f.toml:9")
    assert expected([FALLBACK, special], POINT, GFX) is special
    assert expected([FALLBACK, special], POINT | {"hidden": "256"}, GFX) is FALLBACK
    assert expected([FALLBACK, special], {"out": "fp32"}, GFX) is NATIVE
    assert expected([], POINT, GFX) is NATIVE


def test_two_rules_of_one_rank_are_an_error_that_names_both() -> None:
    other = rule(match={"hidden": ("512",)}, where="f.toml:9")
    with pytest.raises(ConformanceError, match=r"f\.toml:3 and f\.toml:9: two rules of rank 1 match kernel:k.*gfx942"):
        expected([FALLBACK, other], POINT, GFX)


def test_a_rule_that_hangs_on_an_unknown_fact_makes_the_expectation_unknown() -> None:
    assert expected([rule(facts={"fp8": ("none",)})], POINT, BARE) is None
    assert expected([FALLBACK, rule(match={}, facts={"fp8": ("ocp",)})], POINT, GFX) is FALLBACK


NOT_TAKEN = rule(kind="unsupported", path="", failure="refused", lane="route")
ABORTS = rule(kind="known-failure", path="", failure="compiler-abort", signature="Cannot select", lane="lower")
WRONG = rule(kind="known-failure", path="", failure="mismatch", signature="row 3", lane="execute")


@pytest.mark.parametrize(("expectation", "outcome", "kind"), [
    (NATIVE, Outcome("execute", "k"), None),
    (NATIVE, Outcome("execute", "k/wide"), None),
    (NATIVE, Outcome("execute", None), None),
    (NATIVE, Outcome("route", "slow"), "silent-fallback"),
    (NATIVE, Outcome("execute", "slow"), "silent-fallback"),
    (NATIVE, Outcome("execute", "slow", "mismatch"), None),  # fails by itself
    (FALLBACK, Outcome("execute", "slow"), None),
    (FALLBACK, Outcome("execute", "k"), "unexpected-native"),
    (FALLBACK, Outcome("route", "k"), "unexpected-native"),
    (FALLBACK, Outcome("execute", "other"), "wrong-fallback"),
    (FALLBACK, Outcome("execute", None), "wrong-fallback"),
    (NOT_TAKEN, Outcome("route", None, "refused", "no"), None),
    (NOT_TAKEN, Outcome("route", "k"), "unexpected-pass"),
    (NOT_TAKEN, Outcome("execute", "k"), "unexpected-pass"),
    (NOT_TAKEN, Outcome("lower", "k", "compiler-abort", "LLVM ERROR"), "other-failure"),
    (ABORTS, Outcome("lower", "k", "compiler-abort", "LLVM ERROR: Cannot select"), None),
    (ABORTS, Outcome("lower", "k", "compiler-abort", "out of memory"), "other-failure"),
    (ABORTS, Outcome("route", "k"), None),  # nobody could tell yet
    (ABORTS, Outcome("lower", "k"), "unexpected-pass"),
    (WRONG, Outcome("assemble", "k"), None),
    (WRONG, Outcome("execute", "k"), "unexpected-pass"),
    (WRONG, Outcome("execute", "k", "mismatch", "wrong in row 3"), None),
])
def test_both_ways(expectation: Expectation, outcome: Outcome, kind: str | None) -> None:
    found = contradiction(expectation, outcome, ("k", "k/wide"))
    assert (found and found[0]) == kind
    if found and expectation is not NATIVE:
        assert "f.toml:3" in found[1] and "no fp8" in found[1]


# ---- rules as a whole -----------------------------------------------------------------------------------------------

POINTS = [{"kernel": "k", "out": out, "hidden": hidden} for out in ("fp32", "e4m3") for hidden in ("256", "512")]
TODAY = datetime.date(2026, 11, 29)


def test_sound_rules_have_no_problem_and_their_cases_are_counted() -> None:
    assert problems(GFX, [FALLBACK], POINTS, TODAY) == []
    (entry,) = governed([FALLBACK], [GFX], POINTS)
    assert (entry.arch, entry.rule, entry.points) == ("gfx942", FALLBACK, 2)


@pytest.mark.parametrize(("fields", "words"), [
    ({"match": {"out": ("fp64",)}}, ("f.toml:3", "stale", "gfx942", "remove or mend")),
    ({"match": {"outt": ("e4m3",)}}, ("f.toml:3", "unknown key", "'outt'", "Did you mean 'out'?")),
    ({"match": {"out": ("e4m3", "e4m4")}}, ("f.toml:3", "unknown out", "'e4m4'", "Did you mean 'e4m3'?")),
    ({"match": {"kernel": ("k", "h_tilde")}}, ("f.toml:3", "unknown kernel", "'h_tilde'", "Known: k.")),
    ({"match": {"operator": ("moe_sortin",)}}, ("f.toml:3", "unknown operator", "Did you mean 'moe_sorting'?")),
    ({"until": "2026-11-29"}, ("f.toml:3", "past its end", "2026-11-29", "move the date")),
    ({"until": "torch>=2.0"}, ("f.toml:3", "past its end", "torch", "is installed")),
    ({"until": "fp8=fnuz"}, ("f.toml:3", "past its end", "fp8 is fnuz now")),
    ({"archs": ("gfx492",)}, ("f.toml:3", "unknown architecture", "'gfx492'", "Did you mean 'gfx942'?")),
    ({"facts": {"atomics.pk_bf61": (True,)}}, ("f.toml:3", "unknown entry of atomics", "'pk_bf61'")),
])
def test_rules_that_rotted(fields: dict[str, object], words: tuple[str, ...]) -> None:
    text = "\n".join(problems(GFX, [rule(**fields)], POINTS, TODAY))
    assert all(word in text for word in words), text


@pytest.mark.parametrize("until", ["2026-11-30", "tilelang>=99.1", "fp8=ocp", "nothing>=1"])
def test_rules_that_still_hold(until: str) -> None:
    assert over(rule(until=until), GFX, TODAY, {"tilelang": "0.1.15"}) is None


def test_versions_are_compared_as_versions() -> None:
    assert over(rule(until="tilelang>=0.1.9"), GFX, TODAY, {"tilelang": "0.1.15"}) == "tilelang 0.1.15 is installed"


def test_an_ambiguous_point_is_found_without_running_it() -> None:
    text = "\n".join(problems(GFX, [FALLBACK, rule(match={"hidden": ("512",)}, where="f.toml:9")], POINTS, TODAY))
    assert "ambiguous: f.toml:3 and f.toml:9" in text


RULE = """
[[expect]]
match = { kernel = "k", hidden = { min = 256 } }
arch = ["gfx942"]
expect = "fallback"
path = "slow"
reason = "no fp8"
source = "ISA"
since = "2026-11-29"
until = "2027-06-30"
"""


def test_a_file_of_rules(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text("# mine\n" + RULE + RULE.replace("256", "512"), encoding="utf-8")
    first, second = read_rules_file(file)
    assert (first.where, second.where) == (f"{file}:3", f"{file}:13")
    assert first.match == {"kernel": ("k",), "hidden": Range(256)}
    assert (str(first), first.archs) == ("fallback = slow", ("gfx942",))


@pytest.mark.parametrize(("old", "new", "words"), [
    ('expect = "fallback"', 'expect = "falback"', ("unknown expectation", "Did you mean 'fallback'?")),
    ('path = "slow"\n', "", ("needs 'path'",)),
    ('reason = "no fp8"\n', "", ("'reason' is missing",)),
    ('reason = "no fp8"', 'reason = "FILL IN: why"', ("say why",)),
    ('reason = "no fp8"', "reason = 3", ("must be a string", "3")),
    ('arch = ["gfx942"]\n', "", ("'arch' is missing",)),
    ('source = "ISA"', 'sauce = "ISA"', ("unknown key", "'sauce'", "Did you mean 'source'?")),
    ("{ min = 256 }", "{ mn = 256 }", ("unknown key", "'mn'")),
    ("{ min = 256 }", "{}", ("a range needs",)),
    ("{ min = 256 }", '{ above = "fp8" }', ("unknown fact", "shared_bytes")),
    ("{ min = 256 }", "2.5", ("2.5", "must be a string")),
    ("2026-11-29", "yesterday", ("since = 'yesterday'",)),
    ("2026-11-29", "2026-13-01", ("since = '2026-13-01'",)),
    ("2027-06-30", "never", ("until = 'never'", "2027-06-30", "tilelang>=0.1.16")),
    ('path = "slow"', 'path = "slow"\nfailure = "refused"', ("takes no 'failure'",)),
    ('expect = "fallback"\npath = "slow"', 'expect = "known-failure"\nfailure = "hang"', ("signature",)),
    ('expect = "fallback"\npath = "slow"', 'expect = "unsupported"\nfailure = "hung"', ("unknown failure", "'hang'")),
    ('expect = "fallback"\npath = "slow"', 'expect = "unsupported"', ("needs 'failure'",)),
    ('path = "slow"', 'path = "slow"\nfacts = { fp9 = "ocp" }', ("unknown fact", "'fp9'", "Did you mean 'fp8'?")),
    ('path = "slow"', 'path = "slow"\nfacts = { atomics = true }', ("atomics.NAME, an entry of a table",)),
    ('path = "slow"', 'path = "slow"\nfacts = { "wave.x" = 64 }', ("'wave.x' must be written wave",)),
    ('path = "slow"', 'path = "slow"\nfacts = { wave = ["64"] }', ("['64'] must be of type int",)),
    ('path = "slow"', 'path = "slow"\nfacts = { fp4 = [] }', ("[] must be of type bool",)),
    ('reason = "no fp8"', 'reason = ""', ("'reason' must not be empty",)),
    ('path = "slow"', 'path = ""', ("'path' must not be empty",)),
    ('arch = ["gfx942"]', "arch = []", ("'arch' must not be empty",)),
    ('arch = ["gfx942"]', "arch = [942]", ("'arch' must be a list of names, is [942]",)),
    ("2026-11-29", "", ("'since' must not be empty",)),
    ("2027-06-30", "triton>=3.0", ("unknown package", "'triton'", "tilelang, torch")),
    ("2027-06-30", "torch>=next", ("'next' is no version",)),
    ("2027-06-30", "fp9=ocp", ("unknown fact", "'fp9'")),
    ("2027-06-30", "fp8=ocq", ("fp8 never has this value",)),
    ("2027-06-30", "shared_bytes=much", ("shared_bytes never has this value",)),
    ("2027-06-30", "atomics=true", ("atomics.NAME",)),
    ("2027-06-30", "2026-11-29", ("until = '2026-11-29' must be later than since",)),
    ("{ min = 256 }", "{ min = 256, max = 255 }", ("no number is in the range from 256 to 255",)),
    ("{ min = 256 }", "{ min = 256000000000000000000 }", ("'min'", "needs more than 64 bits")),
    ("{ min = 256 }", '["256", 256]', ("a value stands twice",)),
    ("{ min = 256 }", '""', ("'' must be a string", "not empty")),
    ('reason = "no fp8"', 'reason = "  "', ("'reason' must not be empty",)),
    ('path = "slow"', 'path = " "', ("'path' must not be empty",)),
    ('path = "slow"', 'path = "slow"\nfacts = {}', ("facts = {}: leave it out",)),
    ('arch = ["gfx942"]', 'arch = ["gfx942", "gfx942"]', ("'arch': a name stands twice",)),
    ('expect = "fallback"\npath = "slow"', 'expect = "known-failure"\nsignature = "x"\nfailure = ""', ("'failure'",)),
])
def test_what_is_wrong_in_a_rule_is_said_with_file_and_line(tmp_path: Path, old: str, new: str,
                                                            words: tuple[str, ...]) -> None:
    assert old in RULE
    file = tmp_path / "rules.toml"
    file.write_text(RULE.replace(old, new), encoding="utf-8")
    with pytest.raises(ConformanceError) as error:
        read_rules_file(file)
    assert all(word in str(error.value) for word in (f"{file}:2", *words)), str(error.value)


@pytest.mark.parametrize(("text", "words"), [
    ("[[expect]\n", "malformed TOML"), ("[other]\n", "unknown key"), ("", "'expect' is missing"),
    ("expect = [{ match = {} }]\n", r"1 tables and 0 headers \[\[expect\]\]"),
    (RULE.replace("[[expect]]", '[["expect"]]'), "1 tables and 0 headers"),
])
def test_what_is_no_file_of_rules(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConformanceError, match=words):
        read_rules_file(file)
    with pytest.raises(ConformanceError, match="cannot be read"):
        read_rules_file(tmp_path / "missing.toml")
