"""The matrix of moe_reduce_fused: counts and axes as published, and one clear line for what is wrong in a file."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from engine_samples import NAME

from conformance.case import Case, parse_case
from conformance.cases.coverage import coverage
from conformance.cases.matrix import Matrix, load_matrix
from conformance.cases.options import Selection
from conformance.errors import ConformanceError
from conformance.registry import matrix

HIDDEN = ("2048", "2560", "3072", "4096", "6144", "7168")
FAMILIES = {"F01", "F04", "F06", "F07", "F11", "F12", "F17", "F18", "F20", "F23", "F25", "F26", "F27", "F29", "F30",
            "F31"}  # at least these, from the fault catalogue


@pytest.fixture(scope="module")
def of() -> Matrix:
    return matrix(NAME)


# ---- tiers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tier", "count"), [
    ("official", 1152), ("full", 7489), ("upstream-full", 7584), ("benchmark", 144), ("models", 96), ("smoke", 48),
])
def test_counts_and_unique_ids(of: Matrix, tier: str, count: int) -> None:
    ids = [case.id for case in of.cases(tier)]
    assert len(ids) == count
    assert len(set(ids)) == count


def test_official_is_the_product_of_its_published_axes(of: Matrix) -> None:
    cases = of.cases("official")
    rows = {(c.get("topk"), c.get("experts"), c.get("ranks")) for c in cases}
    assert rows == set(itertools.product(("2", "6", "8", "9"), ("72",), ("8",))) | set(
        itertools.product(("2", "6", "8", "9"), ("256",), ("8", "64")))
    assert {c.get("send") for c in cases} == {"4001"}
    per_row = Counter((c.get("topk"), c.get("experts"), c.get("ranks")) for c in cases)
    assert set(per_row.values()) == {96}
    points = {tuple(c.get(key) for key in ("hidden", "weights", "in", "xsf")) for c in cases}
    assert points == set(itertools.product(HIDDEN, ("yes", "no"), ("fp32", "bf16"), ("yes", "no")))
    assert {(c.get("in"), c.get("out")) for c in cases} == {
        ("fp32", "fp32"), ("fp32", "e4m3"), ("bf16", "bf16"), ("bf16", "e4m3")}


def test_full_has_78_rows_and_one_case_without_tokens(of: Matrix) -> None:
    cases = of.cases("full")
    empty = [case for case in cases if case.get("send") == "0"]
    assert [case.name for case in empty] == [
        "send:0-topk:1-experts:1-ranks:1-hidden:2048-weights:yes-in:bf16-out:bf16-xsf:no"]
    rows = {(c.get("topk"), c.get("experts"), c.get("ranks")) for c in cases if c.get("send") != "0"}
    locals_ = {("72", "8"), ("72", "1"), ("72", "72"), ("256", "8"), ("256", "64"), ("256", "1"), ("256", "256"),
               ("288", "8"), ("288", "1"), ("288", "72"), ("384", "8"), ("384", "64"), ("384", "1")}
    assert rows == {(topk, *local) for topk in ("1", "2", "6", "7", "8", "9") for local in locals_}
    assert len(cases) == 78 * 96 + 1


def test_upstream_full_crosses_the_empty_row_with_every_axis(of: Matrix) -> None:
    ids = {case.id for case in of.cases("upstream-full")}
    assert {case.id for case in of.cases("full")} < ids
    assert sum("send:0-" in id_ for id_ in ids) == 96


def test_official_is_part_of_full(of: Matrix) -> None:
    assert {case.id for case in of.cases("official")} < {case.id for case in of.cases("full")}


def test_benchmark_is_topk_6_with_weights(of: Matrix) -> None:
    cases = of.cases("benchmark")
    assert {(c.get("topk"), c.get("weights")) for c in cases} == {("6", "yes")}
    assert {c.id for c in cases} < {c.id for c in of.cases("official")}


def test_benchmark_smoke_covers_every_pair_of_the_benchmark_tier(of: Matrix) -> None:
    whole, part = of.cases("benchmark"), of.cases("benchmark-smoke")
    assert len(part) == 48
    assert {case.id for case in part} < {case.id for case in whole}
    assert coverage([c.params for c in part], [c.params for c in whole], 2) == coverage(
        [c.params for c in whole], [c.params for c in whole], 2)
    kinds = {(c.get("in"), c.get("out"), c.get("xsf")) for c in part}
    assert len(kinds) == 8


@pytest.mark.parametrize(("name", "tiers", "count"), [
    (NAME, ("benchmark", "models"), 240), ("moe_reduction", ("models",), 30), ("moe_sorting", ("models",), 64),
    ("moe_gemm1", ("benchmark",), 18),
    ("moe_gemm2", ("benchmark",), 36), ("moe_gemm_2stage", ("benchmark",), 36),
])
def test_what_is_timed_by_default(name: str, tiers: tuple[str, ...], count: int) -> None:
    of = matrix(name)
    assert of.bench_tiers == tiers
    assert len(of.plan(of.bench_tiers)) == count
    assert len(Selection(bench=True).cases_of(of)) == count
    assert len(Selection(bench=True, tiers=("smoke",)).cases_of(of)) == len(of.cases("smoke"))


@pytest.mark.parametrize("name", ["moe_gemm1", "moe_gemm2", "moe_gemm_2stage"])
def test_the_gemm_shapes_to_time(name: str) -> None:
    cases = matrix(name).cases("benchmark")
    assert {case.get("shape") for case in cases} == {"S", "M", "L", "decode", "prefill"}
    decode = {(c.get("tokens"), c.get("experts"), c.get("bm")) for c in cases if c.get("shape") == "decode"}
    assert decode == {(tokens, experts, "16") for tokens in ("1", "8") for experts in ("128", "256")}
    assert {case.get("mode") for case in cases} == ({""} if name == "moe_gemm1" else {"atomic", "reduce"})


def test_an_unknown_tier_to_time_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text('operator = "one"\nbench_tiers = ["fast"]\n[tier.a]\nexpand = [{ x = 1 }]\n')
    with pytest.raises(ConformanceError, match=r"key 'bench_tiers': 'fast'.* Known: a"):
        load_matrix(path)


def test_models_are_the_contracts_workloads_in_every_variant(of: Matrix) -> None:
    cases = of.cases("models")
    shapes = {(c.get("model"), c.number("tokens"), c.number("topk"), c.number("hidden")) for c in cases}
    assert shapes == {
        ("deepseek_v3_decode", 512, 8, 7168), ("deepseek_v3_prefill", 4096, 8, 7168), ("qwen3_235b", 512, 8, 7168),
        ("qwen3_30b", 512, 8, 3072), ("kimi_k2", 512, 8, 7168), ("tiny", 32, 2, 256),
    }
    assert set(Counter(c.get("model") for c in cases).values()) == {16}
    assert {(c.get("in"), c.get("out")) for c in cases} == {
        ("bf16", "bf16"), ("bf16", "e4m3"), ("fp16", "fp16"), ("fp16", "e4m3")}


def test_smoke_is_marked_in_official_and_nowhere_else(of: Matrix) -> None:
    smoke = {case.id for case in of.cases("smoke")}
    official = of.cases("official")
    assert {case.id for case in official if "smoke" in case.tiers} == smoke
    assert all(case.tiers in ({"official"}, {"official", "smoke"}) for case in official)
    assert all(case.tiers == {"smoke"} for case in of.cases("smoke"))
    assert all(case.tiers == {"full"} for case in of.cases("full"))


def test_a_plan_joins_the_tiers_of_a_repeated_case(of: Matrix) -> None:
    planned = of.plan(["official", "benchmark", "smoke"])
    assert len(planned) == 1152
    assert sum(case.tiers == {"official", "benchmark", "smoke"} for case in planned) == sum(
        case.get("topk") == "6" and case.get("weights") == "yes" for case in of.cases("smoke"))
    assert sum("benchmark" in case.tiers for case in planned) == 144


def test_cases_are_expanded_alike_every_time_and_cannot_be_spoilt(of: Matrix) -> None:
    first = of.cases("official")
    again = load_matrix(of.path).cases("official")
    assert [case.id for case in again] == [case.id for case in first]
    first.clear()
    assert len(of.cases("official")) == 1152


def test_an_unknown_tier_lists_the_known_ones(of: Matrix) -> None:
    with pytest.raises(ConformanceError) as raised:
        of.cases("oficial")
    assert str(raised.value) == (
        "unknown tier of moe_reduce_fused 'oficial'. Did you mean 'official'? "
        "Known: benchmark, benchmark-smoke, edge, full, models, official, smoke, upstream-full.")


# ---- edge families ----------------------------------------------------------------------------------------------


LONG = {"F27-extents"}  # few cases, too long for a pull request


def test_every_family_has_cases_a_reason_and_a_source(of: Matrix) -> None:
    cases = of.cases("edge")
    counts = Counter(case.family for case in cases)
    assert {name.partition("-")[0] for name in of.families} >= FAMILIES
    assert set(counts) == set(of.families)
    assert len({case.id for case in cases}) == len(cases) > 350
    for name, family in of.families.items():
        assert family.name == name
        assert counts[name] >= (3 if family.devices or name in LONG else 8)
        assert len(family.about) > 15
        assert "#" in family.source  # repository#number
    for edge in of.edges:
        assert counts[edge["family"]] <= edge.get("cover", 10**9)


def test_the_smoke_part_of_every_family_that_needs_no_gpu(of: Matrix) -> None:
    smoke = Counter(case.family for case in of.cases("edge") if "smoke" in case.tiers)
    assert smoke == {edge["family"]: edge["smoke"] for edge in of.edges
                     if not edge.get("devices") and edge["family"] not in LONG}
    assert min(smoke.values()) >= 2
    needing = {name: family.devices for name, family in of.families.items() if family.devices}
    assert needing == {"F27-large": ("cuda",), "F29-replay": ("cuda",)}


def test_each_family_covers_every_value_of_its_axes(of: Matrix) -> None:
    cases = of.cases("edge")
    for edge in of.edges:
        mine = [case for case in cases if case.family == edge["family"]]
        for block in edge["expand"]:
            for key, values in block.items():
                if key in ("require", "out"):
                    continue
                wanted = {str(value) for value in (values if isinstance(values, list) else [values])}
                assert wanted <= {case.get(key) for case in mine}, (edge["family"], key)
        assert all(case.get("out") in (case.get("in"), "e4m3") for case in mine)


def test_families_have_both_regimes_of_data_where_that_makes_sense(of: Matrix) -> None:
    exact = {"exact", "coded", "zeros", "negative_zeros"}
    data: dict[str, set[str]] = {}
    for case in of.cases("edge"):
        data.setdefault(case.family, set()).add(case.get("data", "real"))
    both = {name for name, kinds in data.items() if kinds & exact and kinds - exact}
    assert {"F01-padding", "F04-duplicates", "F06-tokens", "F07-token-tails", "F08-hidden-tails", "F30-repeats"} <= both
    assert data["F23-codes"] == {"codes", "overflow", "tiny"}
    assert data["F12-accuracy"] == {"cancel", "small_addends", "real", "wide"}


def test_codes_have_single_slots(of: Matrix) -> None:
    """Their sums would be exact in no order, and they are judged as if in all."""
    assert {case.get("topk") for case in of.cases("edge") if case.get("data") == "codes"} == {"1"}


def test_large_cases_have_more_than_two_to_the_31_elements(of: Matrix) -> None:
    for case in of.cases("edge"):
        if case.family == "F27-large":
            assert case.number("tokens") * case.number("topk") * case.number("hidden") > 2**31
            assert case.number("tokens") > 65535


# ---- groups -----------------------------------------------------------------------------------------------------


def test_groups_stay_together_and_lose_nothing(of: Matrix) -> None:
    cases = of.plan(["official", "edge"])
    grouped = of.grouped(reversed(cases))
    assert sorted(case.id for case in grouped) == sorted(case.id for case in cases)
    seen = [key for key, _ in itertools.groupby(of.group_of(case) for case in grouped)]
    assert len(seen) == len(set(seen))
    assert len({of.group_of(case) for case in of.cases("official")}) == 12 * 6 * 2  # rows x hidden x dtype of x


def test_cases_of_a_group_differ_only_in_what_shares_its_data(of: Matrix) -> None:
    one = parse_case(f"{NAME}/send:4001-topk:2-experts:72-ranks:8-hidden:2048-weights:yes-in:bf16-out:bf16-xsf:no")
    alike = [case for case in of.cases("official") if of.group_of(case) == of.group_of(one)]
    assert len(alike) == 8
    assert {(c.get("weights"), c.get("out"), c.get("xsf")) for c in alike} == set(
        itertools.product(("yes", "no"), ("bf16", "e4m3"), ("yes", "no")))
    edge = Case(NAME, one.params, family="F01-padding")
    assert of.group_of(edge) != of.group_of(one)


def test_cases_alike_in_weights_and_scales_follow_one_another(of: Matrix) -> None:
    grouped = of.grouped(of.cases("official"))
    keys = [(of.group_of(c), c.get("weights"), c.get("xsf")) for c in grouped]
    runs = [key for key, _ in itertools.groupby(keys)]
    assert len(runs) == len(set(runs)) == 576  # each with its two output dtypes


def test_devices_of_a_case(of: Matrix) -> None:
    families = {case.family: case for case in of.cases("edge")}
    assert of.devices(families["F27-large"]) == ("cuda",)
    assert of.devices(families["F01-padding"]) == ()
    assert of.devices(of.cases("official")[0]) == ()


# ---- files ------------------------------------------------------------------------------------------------------

TIER = 'operator = "op"\n[tier.a]\nabout = "all"\nexpand = [{ p = [1, 2], q = ["x", "y"] }]\n'
EDGE = '[[edge]]\nfamily = "F"\nabout = "why"\nsource = "a#1"\nexpand = [{ p = [1, 2] }]\n'


def load(folder: Path, text: str) -> Matrix:
    path = folder / "op.toml"
    path.write_text(text, encoding="utf-8")
    return load_matrix(path)


def block(text: str) -> str:
    return f'operator = "op"\n[tier.a]\nexpand = [{{ {text} }}]\n'


def test_a_small_file(tmp_path: Path) -> None:
    of = load(tmp_path, 'group = ["p"]\n' + TIER + '[tier.b]\nfrom = "a"\nselect = { q = "y" }\nmark = true\n' + EDGE)
    assert of.operator == "op"
    assert of.tier_names == ("a", "b", "edge")
    assert of.default_tiers == ("a", "b")
    assert of.about == {"a": "all", "b": ""}
    assert [case.name for case in of.cases("a")] == ["p:1-q:x", "p:1-q:y", "p:2-q:x", "p:2-q:y"]
    assert [sorted(case.tiers) for case in of.cases("a")] == [["a"], ["a", "b"], ["a"], ["a", "b"]]
    assert [case.name for case in of.cases("b")] == ["p:1-q:y", "p:2-q:y"]
    assert [case.id for case in of.cases("edge")] == ["op/F/p:1", "op/F/p:2"]
    assert [of.group_of(case) for case in of.cases("edge")] == ["F/1", "F/2"]


def test_copied_values_and_divisibility(tmp_path: Path) -> None:
    of = load(tmp_path, block('p = ["1", "2"], q = ["=p", "z"], r = [3, 4], require = [["p", "divides", "r"]]'))
    assert [case.name for case in of.cases("a")] == [
        "p:1-q:1-r:3", "p:1-q:1-r:4", "p:1-q:z-r:3", "p:1-q:z-r:4", "p:2-q:2-r:4", "p:2-q:z-r:4"]


def test_a_tier_by_way_of_another(tmp_path: Path) -> None:
    of = load(tmp_path, TIER + '[tier.b]\nfrom = "a"\nselect = { q = "y" }\n[tier.c]\nfrom = "b"\ncover = 1\n')
    assert [case.name for case in of.cases("c")] == ["p:1-q:y"]


@pytest.mark.parametrize(("text", "message"), [
    ("operator = [", "malformed TOML"),
    ('operator = "op"\nfoo = 1\n', "key in {}: 'foo'"),
    ('operator = "op"\noperators = 1\n', "Did you mean 'operator'"),
    ('about = "x"\n', "key 'operator' is missing"),
    ("operator = 3\n", "key 'operator' must be a string, is 3"),
    ('operator = "op"\ntier = 3\n', "key 'tier' must be a table, is 3"),
    ('operator = "op"\n[tier]\na = 3\n', "tier 'a': must be a table"),
    (TIER + "tears = 1\n", "tier 'a': 'tears'. Known: about, cover, expand, from"),
    (TIER + 'from = "a"\n', "tier 'a': give either 'expand' or 'from'"),
    ('operator = "op"\n[tier.a]\nabout = "x"\n', "tier 'a': give either 'expand' or 'from'"),
    ('operator = "op"\n[tier.a]\nfrom = "b"\n', "tier 'a', key 'from': 'b'. Known: a."),
    (TIER + '[tier.b]\nfrom = "aa"\n', "tier 'b', key 'from': 'aa'. Did you mean 'a'?"),
    ('operator = "op"\n[tier.a]\nfrom = ["b"]\n', "tier 'a': key 'from' must be a string"),
    ('operator = "op"\n[tier.a]\nfrom = "a"\n', "tier 'a', key 'from': the tier 'a' would be taken from itself"),
    ('operator = "op"\n[tier.a]\nfrom = "b"\n[tier.b]\nfrom = "a"\n', "key 'from': the tier 'a' would be taken"),
    ('operator = "op"\n[tier.a]\nexpand = { p = 1 }\n', "tier 'a': key 'expand' must be a list"),
    ('operator = "op"\n[tier.a]\nexpand = [3]\n', "tier 'a': key 'expand' must list tables of axes"),
    (TIER + "[tier.b]\nfrom = 'a'\ncover = 'x'\n", "tier 'b': key 'cover' must be an integer, is 'x'"),
    (TIER + "[tier.b]\nfrom = 'a'\nmark = 1\n", "tier 'b': key 'mark' must be true or false, is 1"),
    ('default_tiers = ["z"]\n' + TIER, "key 'default_tiers': 'z'. Known: a."),
    ('default_tiers = "a"\n' + TIER, "key 'default_tiers' must be a list of names, is 'a'"),
    ("default_tiers = []\n" + TIER, "key 'default_tiers' must not be empty"),
    ("default_tiers = [3]\n" + TIER, "key 'default_tiers' must be a list of names, is [3]"),
    ('default_tiers = ["a", "a"]\n' + TIER, "key 'default_tiers': a name stands twice"),
    ("bench_tiers = [[1]]\n" + TIER, "key 'bench_tiers' must be a list of names, is [[1]]"),
    ("group = [[1]]\n" + TIER, "key 'group' must be a list of names, is [[1]]"),
    ('group = ["pp"]\n' + TIER, "key 'group': 'pp'. Did you mean 'p'? Known: data, p, q."),
    ('order = ["r"]\n' + TIER, "key 'order': 'r'. Known: data, p, q."),
    ('slots = ""\n' + TIER, "key 'slots' must not be empty"),
    (TIER.replace('"all"', '" "'), "tier 'a': key 'about' must not be empty"),
    (TIER + "cover = 1\n", "tier 'a': key 'cover' says what is taken from another tier: it needs 'from'"),
    (TIER + '[tier.b]\nfrom = "a"\nselect = {}\n', "tier 'b': select = {}: leave it out"),
    (TIER + '[tier.b]\nfrom = "a"\nspread = ["p"]\n', "tier 'b': key 'spread' says how to choose cases: it needs"),
    (TIER + '[tier.b]\nfrom = "a"\ncover = 2\nspread = [[1]]\n', "tier 'b': key 'spread' must be a list of names"),
    (TIER + '[tier.b]\nfrom = "a"\ncover = 99999999999999999999\n', "key 'cover': 99999999999999999999 needs more"),
    ('operator = "op"\n[tier.a]\nexpand = []\n', "tier 'a': key 'expand' must list tables of axes, is []"),
    ('operator = "op"\n[tier.a]\nexpand = [{ p = 1, require = 3 }]\n', "tier 'a': key 'require' must list"),
    ('operator = "op"\n[tier.a]\nexpand = [{ p = 1, require = "" }]\n', "tier 'a': key 'require' must list"),
    (TIER + EDGE + "devices = [3]\n", "edge family 'F': key 'devices' must be a list of names, is [3]"),
    (TIER + EDGE + "devices = []\n", "edge family 'F': key 'devices' must not be empty"),
    (TIER + EDGE.replace('"a#1"', '""'), "edge family 'F': key 'source' must not be empty"),
    (f"group = {['a' * 300] * 2}\n{TIER}", f"a name stands twice in ['{'a' * 198}"),
    (TIER + EDGE + EDGE, "edge family 'F': two edge families have this name"),
    (TIER + EDGE.replace('source = "a#1"\n', ""), "edge family 'F': key 'source' is missing"),
    (TIER + EDGE.replace('family = "F"\n', ""), "edge family 0: key 'family' is missing"),
    (TIER + EDGE.replace('"F"', '"F/1"'), "edge family 'F/1': no case id can hold this name"),
    (TIER + EDGE + "smokes = 1\n", "edge family 'F': 'smokes'. Did you mean 'smoke'?"),
    (TIER + EDGE + 'devices = ["gpu"]\n', "edge family 'F', key 'devices': 'gpu'"),
    ('operator = "op"\nedge = [3]\n', "edge family 0: must be a table"),
    (TIER.replace("tier.a", "tier.edge") + EDGE, "tier 'edge' is the one of the edge families"),
])
def test_a_wrong_file_is_refused_with_its_name_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConformanceError) as raised:
        load(tmp_path, text)
    path = str(tmp_path / "op.toml")
    assert path in str(raised.value)
    assert message.replace("in {}", f"in {path}") in str(raised.value)


@pytest.mark.parametrize(("axes", "message"), [
    ("p = [], q = 1", "axis 'p' has no values"),
    ("p = [1.5]", "axis 'p': value 1.5 must be a string or an integer"),
    ("p = true", "axis 'p': value True must be a string or an integer"),
    ('p = "a-b"', "axis 'p': no case id can hold p:a-b"),
    ("p = -1", "axis 'p': no case id can hold p:-1"),
    ('p = ""', "axis 'p': no case id can hold p:"),
    ("P = 1", "axis 'P': no case id can hold P:1"),
    ("p = [1, 1]", "axis 'p': a value stands twice"),
    ('p = "=q"', "p = '=q' refers to no axis"),
    ('p = "=q", q = "=p"', "p = '=q' refers to no axis"),
    ('p = 1, q = 2, require = [["p", "divides"]]', "rule ['p', 'divides'] is not"),
    ('p = 1, q = 2, require = [["p", "over", "q"]]', "rule ['p', 'over', 'q'] is not"),
    ('p = 1, q = 2, require = [["p", "divides", "r"]]', "rule ['p', 'divides', 'r'] is not"),
    ("p = 1, q = 2, require = [3]", "rule 3 is not"),
    ('p = 1, q = 2, require = [[["p"], "divides", "q"]]', "rule [['p'], 'divides', 'q'] is not"),
    ("p = 10000000000000000000000", "axis 'p': 10000000000000000000000 needs more than 64 bits"),
    ('p = "x", q = 2, require = [["p", "divides", "q"]]', "key 'require'"),
    ('p = 0, q = 2, require = [["p", "divides", "q"]]', "key 'require'"),
    ('p = 2, q = 3, require = [["p", "divides", "q"]]', "no case is left"),
])
def test_a_wrong_block_is_refused_with_file_tier_and_axis(tmp_path: Path, axes: str, message: str) -> None:
    of = load(tmp_path, block(axes))
    with pytest.raises(ConformanceError) as raised:
        of.cases("a")
    assert str(raised.value).startswith("op.toml: tier 'a': ")
    assert message in str(raised.value)


@pytest.mark.parametrize(("text", "message"), [
    ("select = { r = 1 }", "unknown parameter in op.toml: tier 'b', key 'select': 'r'. Known: p, q."),
    ("select = { p = 7 }", "unknown value of p in op.toml: tier 'b', key 'select': '7'. Known: 1, 2."),
    ("select = { p = 1, q = ['x', 'z'] }", "unknown value of q in op.toml: tier 'b', key 'select': 'z'"),
    ("cover = 0", "op.toml: tier 'b': cover = 0: give a number from 1 to 4"),
    ("cover = -3", "op.toml: tier 'b': cover = -3: give a number from 1 to 4"),
    ("cover = 5", "op.toml: tier 'b': cover = 5: give a number from 1 to 4"),
    ("cover = 2\nspread = ['r']", "unknown parameter in op.toml: tier 'b', key 'spread': 'r'. Known: p, q."),
])
def test_a_choice_of_no_case_is_refused(tmp_path: Path, text: str, message: str) -> None:
    of = load(tmp_path, f'{TIER}[tier.b]\nfrom = "a"\n{text}\n')
    with pytest.raises(ConformanceError) as raised:
        of.cases("b")
    assert message in str(raised.value)


@pytest.mark.parametrize(("text", "message"), [
    ("cover = -3", "cover = -3: give a number from 1 to 2"), ("cover = 0", "cover = 0: give a number from 1 to 2"),
    ("cover = 3", "cover = 3: give a number from 1 to 2"), ("smoke = -1", "smoke = -1: give a number from 1 to 2"),
    ("smoke = 0", "smoke = 0: give a number from 1 to 2"), ("smoke = 3", "smoke = 3: give a number from 1 to 2"),
    ("cover = 1\nsmoke = 2", "smoke = 2: give a number from 1 to 1"),
])
def test_a_wrong_number_of_a_family_is_refused(tmp_path: Path, text: str, message: str) -> None:
    of = load(tmp_path, TIER + EDGE + text + "\n")
    with pytest.raises(ConformanceError) as raised:
        of.cases("edge")
    assert str(raised.value).startswith(f"op.toml: edge family 'F': {message}")


def test_a_family_without_cases_is_refused(tmp_path: Path) -> None:
    wrong = EDGE.replace("{ p = [1, 2] }", '{ p = 2, q = 3, require = [["p", "divides", "q"]] }')
    with pytest.raises(ConformanceError, match=r"op\.toml: edge family 'F': no case is left"):
        load(tmp_path, TIER + wrong).cases("edge")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConformanceError, match=r"none\.toml: cannot be read"):
        load_matrix(tmp_path / "none.toml")
    (tmp_path / "op.toml").write_bytes(b'operator = "\xff"')
    with pytest.raises(ConformanceError, match=r"op\.toml: cannot be read"):
        load_matrix(tmp_path / "op.toml")
