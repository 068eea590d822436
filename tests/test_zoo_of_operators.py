"""The mutants of two-stage MoE and of moe_reduction: killed by a few cases, named by their cause, compiled for CUDA."""

from __future__ import annotations

import functools
from collections import Counter
from functools import partial

import pytest
from engine_samples import one_thread as one_thread

from conformance import mutants
from conformance.case import Case
from conformance.cases import rounds
from conformance.judging.judge import Judge
from conformance.kernel import LEVELS
from conformance.mutants import FAULTS
from conformance.registry import MUTANTS, arch, kernels, matrix, operator
from conformance.result import Settings
from conformance.zoo.kill_matrix import FATAL, cause_of
from kernels import tilelang_lower

OPERATORS = ("moe_gemm1", "moe_gemm2", "moe_gemm_2stage", "moe_reduction", "moe_sorting")
kernels(OPERATORS[0], (MUTANTS,))
every_operator = pytest.mark.parametrize("name", OPERATORS)
_FAILURES = 2  # of each mutant that are looked at


def _pytorch(name: str) -> dict[str, mutants.Mutant]:
    """The mutants that may be run in this process, without those that compile."""
    return {key: one for key, one in mutants.mutants(name).items()
            if not key.startswith("tl_") and not set(one.diagnosis) & FATAL}


@functools.cache
def _cases(name: str) -> list[Case]:
    of = matrix(name)
    return of.grouped(of.plan(("smoke", "edge")))


@functools.cache
def named(name: str) -> dict[str, Counter[str | None]]:
    """Mutant -> what the first sentences of its failures name, on the cases of the zoo's first round."""
    judge, found = Judge(Settings()), {key: Counter[str | None]() for key in _pytorch(name)}
    wanted = {key: rounds.Round().takes(one.kernel, [case for case in _cases(name) if mutants.is_shown(
        one.kernel, case.params)]) for key, one in _pytorch(name).items()}
    for case in _cases(name):
        for key, one in _pytorch(name).items():
            if case.id in wanted[key] and sum(found[key].values()) < _FAILURES:
                result = judge.run(case, one.kernel)
                if result.state in ("fail", "error"):
                    found[key][cause_of(result.record())] += 1
    return found


@every_operator
def test_a_record_is_complete(name):
    known, twins = mutants.mutants(name), mutants.controls(name)
    for one in known.values():
        assert one.wrong.endswith(".") and one.diagnosis and one.twin in twins, one.name
        assert LEVELS.index(one.kernel.promise) >= LEVELS.index(twins[one.twin].promise)
        assert one.kernel.module.startswith(f"{MUTANTS}.")
    assert max(Counter((one.twin, one.wrong) for one in known.values()).values()) == 1


def test_every_fault_kind_has_mutants():
    assert {one.fault for name in OPERATORS for one in mutants.mutants(name).values()} == set(FAULTS)


@every_operator
def test_the_first_round_kills_most_mutants(name):
    """The others need one point of the matrix, or an operand of one kind: the second round has all cases."""
    alive = {key for key, causes in named(name).items() if not causes}
    assert len(alive) <= len(named(name)) // 6, alive


@every_operator
def test_at_least_nine_mutants_in_ten_get_the_right_first_sentence(name):
    killed = {key: causes for key, causes in named(name).items() if causes}
    wrong = {key: dict(causes) for key, causes in killed.items()
             if causes.most_common(1)[0][0] not in _pytorch(name)[key].diagnosis}
    assert len(wrong) <= len(killed) // 10, wrong


@every_operator
def test_the_controls_pass(name):
    judge = Judge(Settings())
    for case in rounds.in_turn(_cases(name))[:30:3]:
        assert judge.run(case, mutants.controls(name)["torch_control"]).state == "pass", case.id


@every_operator
def test_every_expected_cause_exists(name):
    """Beside the operator's own faults: patterns, casts and what explains itself."""
    general = {"unwritten", "stale-added", "zeroed", "constant-factor", "rows-shifted", "columns-shifted", "one-tile",
               "last-element", "one-element", "history", "remembered-result", "not-repeatable", "overrun", "exception",
               "input-changed", "zero-sign", "cast-truncates", "cast-ties-away", "cast-flushes", "overflow-saturates",
               "out-bits", *FATAL}
    of = operator(name)
    known = {fault.key for fault in (*of.faults, *of.faulty_outputs, *of.excluded)} | general
    assert {key for one in mutants.mutants(name).values() for key in one.diagnosis} <= known


@every_operator
def test_what_ends_a_process_is_planned_for_few_cases(name):
    """Each failure costs a worker, an endless one also the time limit."""
    for one in mutants.mutants(name).values():
        if set(one.diagnosis) & FATAL:
            assert 1 <= sum(one.shown_on(case.params) for case in _cases(name)) <= 2, one.name


def test_every_explanation_of_a_sort_has_a_mutant():
    expected = {key for one in mutants.mutants("moe_sorting").values() for key in one.diagnosis}
    assert {fault.key for fault in operator("moe_sorting").faulty_outputs} <= expected


# ---- TileLang -----------------------------------------------------------------------------------------------------


def _programs(key: str, of: tuple[str, ...]) -> dict[str, partial]:
    """What a TileLang mutant traces for CUDA."""
    from kernels.mutants.gemm_2stage import tilelang_mutants as gemm
    from kernels.mutants.reduction import tilelang_mutants as reduction
    from kernels.mutants.sorting import tilelang_mutants as sorting

    for operator_name, of_one in (("moe_reduction", reduction), ("moe_sorting", sorting)):
        if operator_name in of:
            return {"": partial(of_one.program, key, "cuda")}
    stages = {"moe_gemm1": (1, "store"), "moe_gemm2": (2, "add")}
    return {name: partial(gemm.program, key, "cuda", *stages[name]) for name in of if name in stages}


_TILELANG = sorted({(key, tuple(other for other in names if key in mutants.mutants(other)))
                    for names in (OPERATORS[:3], OPERATORS[3:4], OPERATORS[4:]) for name in names
                    for key in mutants.mutants(name) if key.startswith("tl_")})


@pytest.mark.parametrize(("key", "of"), _TILELANG, ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_tilelang_mutant_lowers_for_cuda_to_another_program(key, of):
    twins = _programs("tl_control", of)
    for name, traced in _programs(key, of).items():
        assert "__global__" in tilelang_lower.lower(traced, arch("sm_90")).source
        assert str(traced().script()) != str(twins[name]().script())
