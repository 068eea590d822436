"""What a time limit says of a mutant: something where slowness is its fault or its twin was quick, else nothing."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.cases.rounds import CASE_SECONDS
from conformance.commands import zoo as command
from conformance.kernel import Kernel
from conformance.mutants import DIFFERS, Mutant
from conformance.zoo.kill_matrix import KillMatrix, collect, matrix_of

OF = "moe_reduction"
ONE, TWO = f"{OF}/a:1", f"{OF}/a:2"


def record(kernel: str, state: str, case: str = ONE, seconds: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"kernel": kernel, "case": case, "state": state, "kind": None if state == "pass" else state,
            "seconds": seconds, "message": f"{kernel} {state}", "tiers": ["edge"], "details": None} | more


def known(*diagnosis: str) -> dict[str, Mutant]:
    kernel = Kernel("m", OF, lambda **given: None, "within-budget", parameters=frozenset({"out"}))
    return {"m": Mutant(kernel, "STATE", "x.", "twin", diagnosis)}


def made(mutants: dict[str, Mutant], *results: dict[str, Any]) -> KillMatrix:
    found = collect(results, OF, mutants, ["twin"])
    return matrix_of(found, mutants, ["twin"], {"m": 2}, operator=OF, arch="cpu", tiers=("edge",), data="real",
                     complete=False, elsewhere=())


SLOW, QUICK = CASE_SECONDS / 2, CASE_SECONDS / 100


@pytest.mark.parametrize(("diagnosis", "twin", "killed"), [
    ("mean", record("twin", "pass", seconds=QUICK), True),
    ("mean", record("twin", "pass", seconds=SLOW), False),  # on this machine right kernels are slow
    ("mean", record("twin", "pass", TWO, seconds=QUICK), False),  # quick on another case
    ("mean", record("twin", "fail", seconds=QUICK), False),
    ("timeout", record("twin", "pass", seconds=SLOW), True),  # an endless kernel
])
def test_a_timeout_kills_where_the_machine_cannot_be_to_blame(
    diagnosis: str, twin: dict[str, Any], killed: bool
) -> None:
    for results in ([record("m", "timeout"), twin], [twin, record("m", "timeout")]):
        found = made(known(diagnosis), *results)
        row, = found.rows
        assert (row.killed, row.undecided, row.checks) == (killed, 0 if killed else 1,
                                                           {"timeout": {"edge": 1}} if killed else {})
        assert found.undecided == ([] if killed else ["m"])
        assert found.sound == (killed and twin["state"] == "pass")
        assert row.differs_on == (ONE if killed else "")


def test_a_mutant_that_something_else_kills_is_decided() -> None:
    found = made(known("mean"), record("m", "timeout"), record("m", "fail", TWO, details={DIFFERS: True}),
                 record("twin", "pass", seconds=SLOW))
    assert found.rows[0].killed and found.rows[0].undecided == 1 and not found.undecided and found.sound


def test_a_twin_that_runs_out_of_time_is_flagged() -> None:
    found = made(known("mean"), record("m", "fail", details={DIFFERS: True}), record("twin", "timeout"))
    assert found.flagged == ["twin"] and not found.sound


def test_a_crash_beside_a_twin_that_was_not_seen_to_pass_proves_no_mutation() -> None:
    crash = record("m", "crash")
    assert made(known("crash"), crash, record("twin", "pass", TWO)).rows[0].differs_on == ""
    assert made(known("crash"), crash, record("twin", "pass")).rows[0].differs_on == ONE


def test_the_zoo_says_so_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
                                   ) -> None:
    """Through both rounds: the second has all other cases of a mutant that is not decided."""
    rounds = []

    def run(names: Any, selection: Any, directory: Any, this: Any, words: str) -> tuple[str, list[Any]]:
        rounds.append(this.survivors)
        return "cpu", [record("m", "timeout"), record("twin", "pass", seconds=SLOW)] if len(rounds) == 1 else []

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(command, "mutants", lambda name: known("mean"))
    monkeypatch.setattr(command, "controls", lambda name: {"twin": None})
    assert not command.zoo(command.Selection(operators=(OF,), archs=("cpu",)), tmp_path)
    out = capsys.readouterr().out
    assert rounds == [None, (f"{OF}/m",)]
    assert f"not decided (timeout): {OF}/m: each was ended by the time limit of 30 s" in out
    assert "SURVIVED" not in out and "not seen to differ" not in out and out.splitlines()[-1] == "killed 0/1"
    assert "not decided (timeout)" in (tmp_path / OF / "kill-matrix.html").read_text(encoding="utf-8")
