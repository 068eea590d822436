"""Pinned references: a changed oracle is named as such, on every kernel, and is accepted by one command only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_samples import call_of

from conformance.commands import cli
from conformance.errors import ConformanceError
from conformance.judging import pins
from conformance.judging.judge import Judge
from conformance.registry import kernels, matrix
from conformance.result import Settings

OPERATOR = "moe_reduce_fused"
PLAN = [case for case in matrix(OPERATOR).plan((pins.TIER, "edge")) if pins.TIER in case.tiers]
HERE = [case for case in PLAN if not matrix(OPERATOR).devices(case)]
CASE = HERE[0]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the pins that a test may spoil."""
    path = tmp_path / "pins.json"
    path.write_text(pins.path_of(OPERATOR).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(pins, "path_of", lambda name: path)
    pins._pinned.cache_clear()
    yield path
    monkeypatch.undo()
    pins._pinned.cache_clear()


def spoil(path: Path, digest: str = "0" * 12) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    content["goldens"][pins._key(CASE)] = digest
    path.write_text(json.dumps(content), encoding="utf-8")
    pins._pinned.cache_clear()


def test_every_smoke_case_is_pinned_and_nothing_else():
    pinned = json.loads(pins.path_of(OPERATOR).read_text(encoding="utf-8"))["goldens"]
    assert set(pinned) == {pins._key(case) for case in HERE}


@pytest.mark.parametrize("case", HERE[::12], ids=lambda case: case.name)
def test_the_oracle_is_as_it_was(case):
    assert pins.changed(case, "reduced", call_of(case)[1].golden) is None


def test_a_changed_oracle_is_no_failure_of_the_kernel(own):
    spoil(own)
    (kernel,) = kernels(OPERATOR, ("vectorised",))
    result = Judge(Settings()).run(CASE, kernel)
    assert (result.state, result.kind) == ("error", "oracle-changed")
    assert result.message.startswith(f"{CASE.id}: the oracle changed: ")
    assert "no kernel is to blame" in result.message and "python -m conformance pin" in result.message


def test_only_pinned_cases_at_reduced_sizes_are_looked_at(own):
    spoil(own)
    golden = call_of(CASE)[1].golden
    assert pins.changed(CASE, "official", golden) is None
    assert pins.changed(type(CASE)(CASE.operator, CASE.params), "reduced", golden) is None  # in no tier
    assert pins.changed(CASE, "reduced", golden.to("meta")) is None  # of a GPU: last bits may be others there
    assert pins.changed(CASE, "reduced", golden) is not None


def test_one_bit_changes_the_digest_and_the_payload_of_a_nan_does_not():
    value = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    other = value.clone()
    other.view(torch.int32)[0, 1] ^= 1
    assert torch.isnan(other[0, 1]) and pins.digest(other) == pins.digest(value)
    other.view(torch.int32)[1, 1] ^= 1
    assert pins.digest(other) != pins.digest(value)
    assert pins.digest(torch.zeros(2, 3)) != pins.digest(-torch.zeros(2, 3))
    assert pins.digest(torch.zeros(2, 3)) != pins.digest(torch.zeros(3, 2))
    codes = [torch.tensor([[0x38, nan]], dtype=torch.uint8).view(torch.float8_e4m3fn) for nan in (0x7F, 0xFF)]
    assert pins.digest(codes[0]) == pins.digest(codes[1])


def test_the_command_pins_what_is_there_now(own, capsys, monkeypatch):
    spoil(own)
    of = matrix(OPERATOR)
    few = SimpleNamespace(plan=lambda tiers: HERE[:5], grouped=of.grouped, devices=of.devices, group_of=of.group_of)
    monkeypatch.setattr(pins, "matrix", lambda name: few)
    assert cli.main(["pin", "--operator", OPERATOR]) == cli.OK
    assert "5 cases, 1 of them changed" in capsys.readouterr().out
    assert pins.changed(CASE, "reduced", call_of(CASE)[1].golden) is None


@pytest.mark.parametrize("content", ["", "[]", '{"torch": "2"}', '{"torch": "2", "goldens": 3}'])
def test_a_malformed_file_is_one_error(own, content):
    own.write_text(content, encoding="utf-8")
    pins._pinned.cache_clear()
    with pytest.raises(ConformanceError, match="no file of pinned references"):
        pins.changed(CASE, "reduced", torch.zeros(1, 1))
