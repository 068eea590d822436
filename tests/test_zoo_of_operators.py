"""The mutants of two-stage MoE and of moe_reduction: killed by a few cases, named by their cause, compiled for CUDA."""

from __future__ import annotations

import functools
from collections import Counter
from functools import partial

import pytest
from engine_samples import one_thread as one_thread

from conformance.case import Case
from conformance.judge import Judge
from conformance.kernel import LEVELS
from conformance.registry import MUTANTS, arch, kernels, matrix, operator
from conformance.result import Settings
from conformance.zoo import mutants
from conformance.zoo.kill_matrix import FATAL, cause_of
from conformance.zoo.mutants import FAULTS
from kernels import tilelang_lower

OPERATORS = ("moe_gemm1", "moe_gemm2", "moe_gemm_2stage", "moe_reduction", "moe_sorting")
kernels(OPERATORS[0], (MUTANTS,))
every_operator = pytest.mark.parametrize("name", OPERATORS)
_FAILURES = 2  # of each mutant that are looked at
_CASES = 3  # of each edge family and dtype
# Few cases cannot show these: they need one point of the matrix, or an operand of one kind.
_RARE = {"config_topk_9", "config_block_48", "config_fp16", "config_k_127", "saturates", "preshuffle_width",
         "slots_8", "k_tail", "slots_narrow"}


def _pytorch(name: str) -> dict[str, mutants.Mutant]:
    """The mutants that may be run in this process, without those that compile."""
    return {key: one for key, one in mutants.mutants(name).items()
            if not key.startswith("tl_") and not set(one.diagnosis) & FATAL}


def _few(name: str) -> list[Case]:
    """Of each edge family the first cases in each dtype, those that share data side by side."""
    of, seen = matrix(name), Counter[tuple[str, str]]()
    chosen = []
    for case in of.grouped(of.cases("edge")):
        key = case.family, case.get("in")
        if not of.devices(case) and case.number("hidden") <= 512 and seen[key] < _CASES:
            seen[key] += 1
            chosen.append(case)
    return chosen


@functools.cache
def named(name: str) -> dict[str, Counter[str | None]]:
    """Mutant -> what the first sentences of its failures name."""
    judge, found = Judge(Settings()), {key: Counter[str | None]() for key in _pytorch(name)}
    for case in _few(name):
        for key, one in _pytorch(name).items():
            if sum(found[key].values()) < _FAILURES and mutants.is_shown(one.kernel, case.params):
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
def test_a_few_cases_kill_every_mutant(name):
    assert {key for key, causes in named(name).items() if not causes} <= _RARE


@every_operator
def test_at_least_nine_mutants_in_ten_get_the_right_first_sentence(name):
    killed = {key: causes for key, causes in named(name).items() if causes}
    wrong = {key: dict(causes) for key, causes in killed.items()
             if causes.most_common(1)[0][0] not in _pytorch(name)[key].diagnosis}
    assert len(wrong) <= len(killed) // 10, wrong


@every_operator
def test_the_controls_pass(name):
    judge = Judge(Settings())
    for case in _few(name)[::7]:
        assert judge.run(case, mutants.controls(name)["torch_control"]).state == "pass", case.id


@every_operator
def test_every_expected_cause_exists(name):
    """Beside the operator's own faults: patterns, casts and what explains itself."""
    general = {"unwritten", "stale-added", "zeroed", "constant-factor", "rows-shifted", "columns-shifted", "one-tile",
               "last-element", "one-element", "history", "remembered-result", "not-repeatable", "overrun", "exception",
               "input-changed", "cast-truncates", "cast-ties-away", "cast-flushes", "overflow-saturates", "out-bits",
               *FATAL}
    known = {fault.key for fault in operator(name).faults} | general
    assert {key for one in mutants.mutants(name).values() for key in one.diagnosis} <= known


def test_what_ends_a_process_is_planned_for_few_cases():
    """Each failure costs a worker, an endless one also the time limit."""
    for one in mutants.mutants("moe_reduction").values():
        if set(one.diagnosis) & FATAL:
            cases = [case for case in matrix("moe_reduction").plan(("smoke", "edge")) if one.shown_on(case.params)]
            assert 1 <= len(cases) <= 2, one.name


# ---- TileLang -----------------------------------------------------------------------------------------------------


def _programs(key: str, of: tuple[str, ...]) -> dict[str, partial]:
    """What a TileLang mutant traces for CUDA."""
    from kernels.mutants.gemm_2stage import tilelang_mutants as gemm
    from kernels.mutants.reduction import tilelang_mutants as reduction

    if "moe_reduction" in of:
        return {"": partial(reduction.program, key, "cuda")}
    stages = {"moe_gemm1": (1, "store"), "moe_gemm2": (2, "add")}
    return {name: partial(gemm.program, key, "cuda", *stages[name]) for name in of if name in stages}


_TILELANG = sorted({(key, tuple(other for other in names if key in mutants.mutants(other)))
                    for names in (OPERATORS[:3], OPERATORS[3:]) for name in names
                    for key in mutants.mutants(name) if key.startswith("tl_")})


@pytest.mark.parametrize(("key", "of"), _TILELANG, ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_tilelang_mutant_lowers_for_cuda_to_another_program(key, of):
    twins = _programs("tl_control", of)
    for name, traced in _programs(key, of).items():
        assert "__global__" in tilelang_lower.lower(traced, arch("sm_90")).source
        assert str(traced().script()) != str(twins[name]().script())
