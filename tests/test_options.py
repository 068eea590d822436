"""The shared options: what they select, and one line for each wrong value."""

from __future__ import annotations

import argparse
import itertools

import pytest
from _pytest.config import _prepareconfig
from engine_samples import NAME

from conformance import environment
from conformance.case import Case
from conformance.cases.options import OPTIONS, Selection, add_to_argparse, select, with_data
from conformance.cases.plan import Planned, group_of, parse_nodeid, plan
from conformance.devices import gpus
from conformance.errors import ConformanceError, unknown_name
from conformance.registry import matrices, matrix

OFFICIAL = f"{NAME}/send:4001-topk:2-experts:72-ranks:8-hidden:7168-weights:yes-in:bf16-out:e4m3-xsf:no"
TINY = f"{NAME}/model:tiny-tokens:32-topk:2-hidden:256-weights:yes-in:bf16-out:e4m3-xsf:no"


def selected(*words: str) -> Selection:
    parser = argparse.ArgumentParser()
    add_to_argparse(parser)
    parsed = parser.parse_args(words)
    return select(lambda dest: getattr(parsed, dest))


def counted(*words: str) -> int:
    return len(selected(*words).cases_of(matrix(NAME)))


# ---- parsing --------------------------------------------------------------------------------------------------------


def test_nothing_asked_for() -> None:
    assert selected() == Selection((), (), (), (), None, "real", ())


def test_everything_asked_for() -> None:
    found = selected("--operator", NAME, "--kernels", "h_tiled, per_token", "--tier", "smoke,edge", "--arch",
                     "cpu,sm_90", "--sizes", "official", "--data", "exact", "--case", f"{OFFICIAL} {TINY}")
    assert found == Selection((NAME,), ("h_tiled", "per_token"), ("smoke", "edge"), ("cpu", "sm_90"), "official",
                              "exact", (OFFICIAL, TINY))


def test_every_option_has_help_and_a_place_of_its_own() -> None:
    assert [option.flag for option in OPTIONS] == [
        "--operator", "--kernels", "--tier", "--arch", "--sizes", "--data", "--case",
        "--expectations"]
    assert all(option.dest.startswith("conformance_") and len(option.help) > 20 for option in OPTIONS)
    assert len({option.dest for option in OPTIONS}) == len(OPTIONS)
    parser = argparse.ArgumentParser()
    add_to_argparse(parser, but=("--case",))
    assert not hasattr(parser.parse_args([]), "conformance_case")


@pytest.mark.parametrize(("words", "message"), [
    (("--operator", "moe_reduce_fus"), "unknown operator 'moe_reduce_fus'. Did you mean 'moe_reduce_fused'? Known: "),
    (("--tier", "smok"), "unknown tier 'smok'. Did you mean 'smoke'? Known: benchmark, benchmark-smoke, dtypes, edge"),
    (("--tier", "smoke,edges"), "unknown tier 'edges'. Did you mean 'edge'?"),
    (("--sizes", "small"), "unknown value of --sizes 'small'. Known: official, reduced."),
    (("--data", "exakt"), "unknown value of --data 'exakt'. Did you mean 'exact'? Known: exact, real."),
    (("--case", "nonsense"), "malformed case id 'nonsense'"),
    (("--case", "other/a:1"), "unknown operator 'other'"),
    (("--case", OFFICIAL.replace("7168", "7169")), "no tier of moe_reduce_fused holds the case"),
    (("--case", OFFICIAL.replace("/send", "/F01-padding/send")), "no tier of moe_reduce_fused holds the case"),
    (("--case", f"{OFFICIAL}-data:coded"), "no tier of moe_reduce_fused holds the case"),
])
def test_a_wrong_value_is_one_line(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConformanceError) as raised:
        selected(*words)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unknown_names_in_general() -> None:
    assert str(unknown_name("thing", "b", ["c", "a"])) == "unknown thing 'b'. Known: a, c."
    assert str(unknown_name("thing", "abcd", ["abce"])) == "unknown thing 'abcd'. Did you mean 'abce'? Known: abce."
    assert str(unknown_name("thing", "b", [])) == "unknown thing 'b'. Known: none."


# ---- which cases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "count"), [
    (("--tier", "official,full"), 7489),
    (("--tier", "official"), 1152), (("--tier", "smoke"), 48), (("--tier", "official,smoke"), 1152),
    (("--tier", "benchmark,models"), 144 + 96), (("--tier", "full"), 7489),
    (("--operator", NAME, "--tier", "benchmark"), 144),
    (("--case", OFFICIAL), 1), (("--case", f"{OFFICIAL} {TINY}"), 2), (("--case", f"{OFFICIAL} {OFFICIAL}"), 1),
    (("--case", OFFICIAL, "--tier", "edge"), 1),
])
def test_counts(words: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TK_FULL_TEST", raising=False)
    assert counted(*words) == count


def test_official_and_edge_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TK_FULL_TEST", raising=False)
    assert counted() == 1152 + counted("--tier", "edge") > 1500


@pytest.mark.parametrize(("value", "tiers"), [
    ("1", ("full", "edge")), ("true", ("full", "edge")), ("True", ("full", "edge")), ("0", ("official", "edge")),
    ("", ("official", "edge")), ("yes", ("official", "edge")), (None, ("official", "edge")),
])
def test_tk_full_test_puts_full_in_the_place_of_official(
    value: str | None, tiers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is None:
        monkeypatch.delenv("TK_FULL_TEST", raising=False)
    else:
        monkeypatch.setenv("TK_FULL_TEST", value)
    assert selected().tiers_of(matrix(NAME)) == tiers
    assert selected("--tier", "official").tiers_of(matrix(NAME)) == ("official",)


def test_a_case_keeps_its_tiers_and_the_matrixs_order_of_parameters() -> None:
    shuffled = f"{NAME}/xsf:no-out:e4m3-in:bf16-weights:yes-hidden:7168-ranks:8-experts:72-topk:2-send:4001"
    (case,) = selected("--case", shuffled).cases_of(matrix(NAME))
    assert case.id == OFFICIAL  # so that the seed, and with it the data, is that of the tier
    assert "official" in case.tiers
    assert counted("--case", f"{OFFICIAL} {shuffled}") == 1
    edge = matrix(NAME).cases("edge")[5]
    (found,) = selected("--case", edge.id).cases_of(matrix(NAME))
    assert (found.id, found.tiers) == (edge.id, edge.tiers)


def test_exact_data_for_the_cases_that_name_none() -> None:
    def kinds(*words: str) -> set[str]:
        return {case.get("data") for case in selected(*words).cases_of(matrix(NAME))}

    assert kinds("--tier", "smoke", "--data", "exact") == {"exact"}
    assert kinds("--tier", "smoke") == {""}
    edge = kinds("--tier", "edge", "--data", "exact")
    assert {"real", "coded", "cancel", "exact"} <= edge
    assert "" not in edge
    assert counted("--tier", "edge", "--data", "exact") == counted("--tier", "edge")


def test_a_case_of_a_run_on_exact_data_can_be_named() -> None:
    for words in (("--case", f"{OFFICIAL}-data:exact"), ("--case", OFFICIAL, "--data", "exact"),
                  ("--case", f"{OFFICIAL} {OFFICIAL}-data:exact", "--data", "exact")):
        (case,) = selected(*words).cases_of(matrix(NAME))
        assert case.id == f"{OFFICIAL}-data:exact"
        assert "official" in case.tiers
    assert counted("--case", f"{OFFICIAL} {OFFICIAL}-data:exact") == 2


def test_with_data() -> None:
    plain, coded = Case("op", {"a": "1"}, "F", frozenset({"edge"})), Case("op", {"a": "1", "data": "coded"})
    assert with_data(plain, "exact").id == "op/F/a:1-data:exact"
    assert with_data(plain, "exact").tiers == {"edge"}
    assert with_data(coded, "exact") is coded


def test_matrices_of_a_selection() -> None:
    assert [of.operator for of in selected().matrices()] == list(matrices())
    assert [of.operator for of in selected("--operator", NAME).matrices()] == [NAME]
    assert [of.operator for of in selected("--case", OFFICIAL).matrices()] == [NAME]


def test_cases_that_share_data_follow_one_another() -> None:
    of = matrix(NAME)
    groups = [of.group_of(case) for case in selected("--tier", "official").cases_of(of)]
    assert sum(a != b for a, b in itertools.pairwise(groups)) + 1 == len(set(groups)) == 144


# ---- items ----------------------------------------------------------------------------------------------------------


def items(archs: tuple[str, ...], *words: str) -> list[Planned]:
    return list(plan(matrix(NAME), selected(*words), archs))


def test_items_are_every_case_on_every_kernel() -> None:
    found = items(("cpu",), "--case", f"{OFFICIAL} {TINY}", "--kernels", "h_tiled,vectorised")
    name = OFFICIAL.partition("/")[2]
    assert [item.kernel for item in found] == ["h_tiled", "vectorised"] * 2
    assert [item.name for item in found if item.case.id == OFFICIAL] == [f"h_tiled[{name}]", f"vectorised[{name}]"]
    assert all(item.arch is None for item in found)


def test_items_name_their_architecture_where_there_are_several() -> None:
    found = items(("sm_90", "cpu"), "--case", OFFICIAL, "--kernels", "h_tiled")
    assert [(item.arch, item.name.partition("[")[0]) for item in found] == [("sm_90", "h_tiled@sm_90"),
                                                                            ("cpu", "h_tiled@cpu")]


def test_an_item_is_read_back_from_its_node_id() -> None:
    for archs in (("cpu",), ("sm_90", "cpu")):
        for item in items(archs, "--tier", "smoke,edge"):
            again = parse_nodeid(f"matrices/{NAME}.toml::{item.name}")
            assert again == item
            assert again.case.id == item.case.id


@pytest.mark.parametrize("nodeid", [
    "tests/test_case.py::test_id_and_name", f"matrices/{NAME}.toml", f"matrices/{NAME}.toml::h_tiled",
    f"matrices/{NAME}.toml::h_tiled[nonsense]", f"matrices/{NAME}.toml::h_tiled[a:1", "matrices/other.toml::k[a:1]",
])
def test_other_node_ids_are_no_items(nodeid: str) -> None:
    assert parse_nodeid(nodeid) is None
    assert group_of(nodeid) == nodeid


def test_items_of_one_group_share_their_data() -> None:
    smoke = items(("cpu",), "--tier", "official", "--kernels", "vectorised,per_token")
    groups = {group_of(f"matrices/{NAME}.toml::{item.name}") for item in smoke}
    assert len(groups) == 144
    name = OFFICIAL.partition("/")[2]
    points = {"h_tiled": name, "vectorised": name.replace("xsf:no", "xsf:yes"),
              "per_token": name.replace("topk:2", "topk:6")}
    one, two, other = (group_of(f"matrices/{NAME}.toml::{kernel}[{point}]") for kernel, point in points.items())
    assert one == two != other
    assert group_of(f"matrices/{NAME}.toml::h_tiled@cpu[{name}]") != group_of(
        f"matrices/{NAME}.toml::h_tiled@sm_90[{name}]")


def test_auto_starts_few_workers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """xdist asks for their number before the plugins are configured."""
    monkeypatch.setattr(environment, "gpu", lambda: environment.Gpu("sm_90", "a GPU", None))
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(gpus.os, "sched_getaffinity", lambda _: range(64))
    for words, expected in (([], 8), (["--arch", "sm_90,cpu"], 8), (["--arch", "cpu"], 64), (["--arch", "gfx942"], 64)):
        config = _prepareconfig(["-n", "auto", *words])
        try:
            assert config.hook.pytest_xdist_auto_num_workers(config=config) == expected
        finally:
            config._ensure_unconfigure()
