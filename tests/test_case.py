"""Case ids: what they say, that they can be read back, and that seeds never move."""

from __future__ import annotations

import pytest
from engine_samples import NAME

from conformance.case import Case, parse_case
from conformance.errors import ConformanceError
from conformance.registry import matrix

OFFICIAL = "moe_reduce_fused/send:4001-topk:2-experts:72-ranks:8-hidden:7168-weights:yes-in:bf16-out:e4m3-xsf:no"


def test_id_and_name() -> None:
    case = Case("op", {"a": "1", "b": "x.y_z"})
    assert case.id == "op/a:1-b:x.y_z"
    assert case.name == "a:1-b:x.y_z"
    edge = Case("op", {"a": "1"}, family="F01-padding")
    assert edge.id == "op/F01-padding/a:1"
    assert edge.name == "F01-padding/a:1"


def test_parsing_an_id() -> None:
    case = parse_case(f"  {OFFICIAL}\n")
    assert case.operator == "moe_reduce_fused"
    assert case.family == ""
    assert list(case.params.items()) == [
        ("send", "4001"), ("topk", "2"), ("experts", "72"), ("ranks", "8"), ("hidden", "7168"), ("weights", "yes"),
        ("in", "bf16"), ("out", "e4m3"), ("xsf", "no"),
    ]
    assert parse_case("op/F06-tokens/tokens:1").family == "F06-tokens"


@pytest.mark.parametrize("tier", ["upstream-full", "full", "models", "edge"])
def test_every_id_of_the_matrix_is_read_back(tier: str) -> None:
    for case in matrix(NAME).cases(tier):
        again = parse_case(case.id)
        assert again == case
        assert again.id == case.id  # the order of parameters too: the seed depends on it


@pytest.mark.parametrize(("text", "seed"), [
    (OFFICIAL, 1463236731966265446),
    ("moe_reduce_fused/F01-padding/tokens:37-topk:1", 4252489155678498899),
    ("op/a:1", 7088357883445029942),
    ("op/a:1-b:2", 6611593449635822809),
    ("op/b:2-a:1", 1164546725625705498),
])
def test_seeds_never_move(text: str, seed: int) -> None:
    assert parse_case(text).seed == seed


def test_seeds_are_63_bits_and_all_different() -> None:
    seeds = {case.seed for case in matrix(NAME).cases("full")}
    assert len(seeds) == 7489
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_tiers_are_no_part_of_the_identity() -> None:
    plain, smoke = Case("op", {"a": "1"}), Case("op", {"a": "1"}, tiers=frozenset({"smoke"}))
    assert plain == smoke
    assert plain.seed == smoke.seed
    assert plain != Case("op", {"a": "1"}, family="F01")
    assert plain != Case("op", {"a": "2"})


@pytest.mark.parametrize("text", [
    "", "op", "op/", "/a:1", "op/a", "op/a:", "op/:1", "op/a:1-", "op/-a:1", "op/a:1--b:2", "op/a=1", "op/A:1",
    "op/a:1:2", "op/a:1-b", "op/F/G/a:1", "op/F 1/a:1", "op/F01/", "op/a:1 2", "o p/a:1", "op/a:b/c", "op/a:1-a:1",
    "op/a:1-a:2",
])
def test_a_malformed_id_is_refused_with_the_text_in_the_message(text: str) -> None:
    with pytest.raises(ConformanceError, match="malformed case id") as raised:
        parse_case(text)
    assert repr(text) in str(raised.value)


def test_a_repeated_parameter_is_named_as_such() -> None:
    with pytest.raises(ConformanceError, match="stands twice"):
        parse_case("op/a:1-b:2-a:1")


def test_get_and_number() -> None:
    case = parse_case("op/F01/a:12-b:yes")
    assert case.get("b") == "yes"
    assert case.get("c") == ""
    assert case.get("c", "none") == "none"
    assert case.number("a") == 12
    assert case.number("c", 7) == 7
    for key in ("b", "c"):
        with pytest.raises(ConformanceError, match=f"case op/F01/a:12-b:yes: parameter '{key}' must be an integer"):
            case.number(key)
    with pytest.raises(ConformanceError, match="'b'"):
        case.number("b", 7)  # a default stands in for what is absent, not for what is wrong


def test_ids_can_be_used_by_pytest_and_in_a_shell() -> None:
    for case in matrix(NAME).cases("edge") + matrix(NAME).cases("full"):
        assert not set(case.id) & set(" '\"[]()=\\$`*?")
