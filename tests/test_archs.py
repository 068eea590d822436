"""Architecture tables: what they must hold, how they are read, and the routes of our kernels on each of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance import environment
from conformance.arch import FACTS, Arch, Fact
from conformance.commands import cli
from conformance.environment import ABSENT, arch_name, chosen_archs
from conformance.errors import ConformanceError
from conformance.expectations.check import every_point, problems
from conformance.expectations.files import read_arch
from conformance.expectations.probe import disagreements, probe
from conformance.expectations.rule import Outcome, contradiction, expected
from conformance.kernel import Kernel
from conformance.registry import arch, archs, kernels, matrices, matrix
from kernels.dialect import fp8_of

NAMES = {"cpu", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1201",
         "gfx1250", "c500", "gfx936", "gfx946"}
OPERATORS = sorted(matrices())


def test_every_architecture_has_a_table_and_every_fact_a_source() -> None:
    assert set(archs()) >= NAMES
    for table in archs().values():
        assert table.facts, table.name
        assert all(len(fact.source) > 10 for fact in table.facts.values())


@pytest.mark.parametrize(("name", "fact", "value"), [
    ("gfx942", "fp8", "fnuz"), ("gfx950", "fp8", "ocp"), ("sm_90", "fp8", "ocp"), ("sm_80", "fp8", "none"),
    ("gfx942", "shared_bytes", 65536), ("gfx950", "shared_bytes", 163840), ("sm_90", "shared_bytes", 232448),
    ("gfx946", "shared_bytes", 131072), ("c500", "wave", 64), ("c500", "shared_bytes", None),
    ("gfx942", "atomics.buffer_atomic_pk_add_bf16", False), ("gfx950", "atomics.buffer_atomic_pk_add_bf16", True),
    ("gfx90a", "atomics.buffer_atomic_pk_add_bf16", None), ("gfx942", "mma.bf16 16x16x32 f32", False),
    ("gfx1201", "mma.bf16 wmma 16x16x16 f32", True), ("gfx1250", "mma.bf16 wmma 16x16x32 f32", True),
    ("gfx1250", "mma.bf16 wmma 16x16x16 f32", False), ("gfx1201", "mma.bf16 16x16x16 f32", False),
])
def test_what_is_known(name: str, fact: str, value: Any) -> None:
    assert arch(name).fact(fact) == value


def test_what_is_not_known_is_unknown_and_a_misspelt_fact_is_an_error() -> None:
    assert arch("sm_999").fact("fp8") is None
    assert arch("sm_999").facts == {}
    with pytest.raises(KeyError, match="fp9"):
        arch("sm_90").fact("fp9")


TABLE = """
name = "new"
about = "a new chip"
device = "cuda"
language = "hip"
[fact.fp8]
value = "ocp"
source = "its manual"
[fact.wave]
value = 64
source = "its manual"
"""


@pytest.mark.parametrize(("old", "new", "words"), [
    ('name = "new"', 'name = "old"', ("name = 'old'", "'new'")),
    ('device = "cuda"', 'device = "gpu"', ("unknown device", "'gpu'")),
    ('language = "hip"', 'language = "hop"', ("unknown language", "Did you mean 'hip'?")),
    ("[fact.wave]", "[fact.waves]", ("unknown fact", "'waves'", "Did you mean 'wave'?")),
    ("value = 64", 'value = "64"', ("'wave'", "must be of type int", "lanes")),
    ('value = "ocp"', 'value = "OCP"', ("'fp8'", "unknown value", "'OCP'")),
    ("value = 64\nsource", "value = 64\nsauce", ("'wave'", "'sauce'")),
    ('about = "a new chip"\n', "", ("'about' is missing",)),
    ("value = 64", "value = 0", ("'wave'", "must be above 0")),
    ('value = 64\nsource = "its manual"', 'value = 64\nsource = ""', ("'wave'", "'source' must not be empty")),
    ('language = "hip"', 'language = "hip"\ntarget = { kind = "hip", mcpu = "gfx942" }', ("'gfx942' is not new",)),
    ('language = "hip"', 'language = "hip"\ntarget = { mcpu = "new" }', ("kind = None must be the language",)),
    ('language = "hip"', 'language = "hip"\ntarget = { kind = "hip", mcpi = "new" }', ("'mcpi'", "'mcpu'")),
    ('language = "hip"', 'language = "hip"\nexpect = [{}]', ("1 tables and 0 headers",)),
    ('language = "hip"', 'language = "hip"\ntarget = {}', ("target = {}", "leave it out")),
    ("value = 64", "value = 64000000000000000000000", ("'wave'", "needs more than 64 bits")),
    ("[fact.wave]\nvalue = 64", "[fact.mma]\nvalue = {}", ("'mma'", "must have entries")),
    ("[fact.wave]\nvalue = 64", '[fact.mma]\nvalue = { "" = true }', ("'mma'", "must have entries")),
    ('about = "a new chip"', 'about = " "', ("'about' must not be empty",)),
    ('[fact.fp8]', '[fact]\nfp4 = 3\n[fact.fp8]', ("'fp4'", "must be a table, is 3")),
])
def test_a_malformed_table(tmp_path: Path, old: str, new: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "new.toml"
    file.write_text(TABLE, encoding="utf-8")
    assert read_arch(file).fact("wave") == 64
    file.write_text(TABLE.replace(old, new), encoding="utf-8")
    with pytest.raises(ConformanceError) as error:
        read_arch(file)
    assert all(word in str(error.value) for word in (str(file), *words)), str(error.value)


def test_a_rule_of_a_table_is_about_its_own_architecture(tmp_path: Path) -> None:
    file = tmp_path / "new.toml"
    file.write_text(TABLE + """
[[expect]]
match = {}
arch = ["gfx942"]
expect = "native"
reason = "r"
source = "s"
since = "2026-11-29"
until = "2027-06-30"
""", encoding="utf-8")
    with pytest.raises(ConformanceError, match=r"new\.toml:13: key 'arch' is not for a table's own rules"):
        read_arch(file)


# ---- which architectures a run takes --------------------------------------------------------------------------------


def test_architectures_that_are_not_here_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "archs_here", lambda: {"sm_90": "cuda", "cpu": "cpu"})
    assert chosen_archs(()) == {"sm_90": "cuda"}
    assert chosen_archs(("gfx942", "cpu")) == {"gfx942": ABSENT, "cpu": "cpu"}
    everything = chosen_archs(("all",))
    assert everything.keys() >= NAMES
    assert {name for name, device in everything.items() if device != ABSENT} == {"sm_90", "cpu"}
    with pytest.raises(ConformanceError, match=r"unknown architecture 'gfx943'.*Did you mean 'gfx94"):
        chosen_archs(("gfx943",))


@pytest.mark.parametrize(("properties", "name"), [
    (SimpleNamespace(major=9, minor=0), "sm_90"),
    (SimpleNamespace(major=12, minor=0, gcnArchName=""), "sm_120"),
    (SimpleNamespace(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-"), "gfx942"),
])
def test_names_of_devices(properties: Any, name: str) -> None:
    assert arch_name(properties) == name


# ---- the device that is here ----------------------------------------------------------------------------------------


def test_a_device_that_is_as_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimpleNamespace(shared_memory_per_block_optin=232448, warp_size=32, max_threads_per_block=1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: real)
    found = probe(arch("sm_90"), "cuda")
    assert found["shared_bytes"] == {"table": 232448, "device": 232448}
    assert disagreements(arch("sm_90"), found) == []
    assert probe(arch("cpu"), "cpu") == probe(arch("gfx942"), ABSENT) == {}


def test_a_device_that_is_not_as_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = SimpleNamespace(shared_memory_per_block_optin=101376, warp_size=64)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: odd)
    table = Arch("sm_90", facts={"shared_bytes": Fact(232448, "guide")})
    (told,) = disagreements(table, probe(table, "cuda"))  # the wave width is in no table here: no disagreement
    assert "sm_90.toml" in told and "232448" in told and "101376" in told


# ---- routes of our own kernels, as pure tables ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "how"), [
    ("sm_80", "bits"), ("sm_86", "bits"), ("gfx90a", "bits"), ("gfx942", "bits"), ("sm_89", "native"),
    ("sm_90", "native"), ("gfx950", "native"), ("gfx1201", "native"), ("cpu", "native"), ("c500", "native"),
    ("sm_999", "native"),
])
def test_how_e4m3_is_converted(name: str, how: str) -> None:
    assert fp8_of(arch(name)) == how


def routed() -> list[tuple[str, Kernel]]:
    return [(of, kernel) for of in OPERATORS for kernel in kernels(of) if kernel.route is not None]


@pytest.mark.parametrize(("of", "kernel"), routed(), ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_route_is_the_declared_one(of: str, kernel: Kernel, name: str) -> None:
    table = arch(name)
    assert kernel.route is not None
    for case in matrix(of).cases("smoke"):
        point = {**case.params, "operator": of, "kernel": kernel.name, "family": "", "variant": ""}
        rule = expected(table.rules, point, table)
        assert rule is not None
        route = kernel.route(case.params, table)
        assert contradiction(rule, Outcome("route", route.path), kernel.native_paths) is None, (case.id, route)


def test_every_kernel_of_this_checkout_has_a_route() -> None:
    assert [kernel.name for of in OPERATORS for kernel in kernels(of) if kernel.route is None] == []


def test_show_and_repro_say_what_can_be_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = next(case for case in matrix("moe_reduce_fused").cases("smoke") if case.params["out"] == "e4m3").id
    assert cli.main(["show", case, "--arch", "gfx942", "--kernels", "h_tiled"]) == 0
    assert "not here; it would take the path h_tiled/bits" in capsys.readouterr().out
    assert cli.main(["repro", case, "--arch", "gfx942", "--kernel", "h_tiled"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("--sizes official --arch gfx942")
    words = ["repro", case, "--arch", "gfx942", "--kernel", "h_tiled", "--write", str(tmp_path / "x.py")]
    assert cli.main(words) == 2
    assert "gfx942 is not here" in capsys.readouterr().err


def test_configurations_are_named_by_all_that_is_compiled_in() -> None:
    (tiled,) = kernels("moe_reduce_fused", ["h_tiled"])
    assert tiled.route is not None
    case = matrix("moe_reduce_fused").cases("smoke")[0].params | {"in": "bf16", "out": "e4m3", "hidden": "7168"}
    names = {name: tiled.route(case, arch(name)) for name in ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")}
    assert names["sm_100"] == names["gfx950"] != names["sm_90"]  # the last one is tuned
    assert names["sm_80"] == names["gfx942"] != names["gfx950"]
    assert (names["gfx942"].path, names["gfx950"].path) == ("h_tiled/bits", "h_tiled")


@pytest.mark.parametrize("name", sorted(NAMES))
def test_no_rule_of_this_checkout_rotted(name: str, points: list[dict[str, str]]) -> None:
    assert problems(arch(name), arch(name).rules, points) == []


@pytest.fixture(scope="module")
def points() -> list[dict[str, str]]:
    return every_point([rule for table in archs().values() for rule in (*table.rules, *table.skips)])


def test_the_names_of_facts_are_all_used() -> None:
    assert set(FACTS) == {name for table in archs().values() for name in table.facts}
