"""Faults that only a GPU has: a context that is lost, memory that runs out, streams that nobody waits for.

They run where torch sees a CUDA device; elsewhere each is skipped with that reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_samples import right, subject
from suite_runs import OPERATOR, Ran, read_lines, run_once
from torch import Tensor

from conformance.environment import archs_here
from conformance.judging.judge import Judge
from conformance.kernel import Kernel
from conformance.registry import matrix
from conformance.result import Result, Settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")

FORM = "{}/send:4001-topk:2-experts:72-ranks:8-hidden:2048-weights:{}-in:{}-out:{}-xsf:no"
CASES = tuple(FORM.format(OPERATOR, weights, dtype, dtype) for dtype in ("fp32", "bf16") for weights in ("yes", "no"))
CULPRIT = CASES[0]
# Each kernel shows its fault in the fp32 case with weights.
KERNELS = """
WHEN = lambda weights, dtype: weights is not None and dtype.endswith("float32")

def asserts():
    torch.zeros(8, device="cuda")[torch.tensor([1 << 40], device="cuda")]

def stores_far_away():
    source = 'extern "C" __global__ void far(float* p) { p[(1ull << 40) + threadIdx.x] = 1.0f; }'
    torch.cuda._compile_kernel(source, "far")((1, 1, 1), (32, 1, 1), (torch.zeros(8, device="cuda"),))

def endless():
    source = 'extern "C" __global__ void spin(volatile float* p) { while (p[0] == 0.0f) {} }'
    torch.cuda._compile_kernel(source, "spin")((1, 1, 1), (1, 1, 1), (torch.zeros(8, device="cuda"),))

add("asserts", asserts, WHEN)
add("hoards", lambda: torch.empty(1 << 50, dtype=torch.uint8, device="cuda"), WHEN)
if hasattr(torch.cuda, "_compile_kernel"):
    add("stores_far_away", stores_far_away, WHEN)
    add("endless", endless, WHEN)
try:
    import triton
    import triton.language as tl
except ImportError:
    pass
else:
    @triton.jit
    def store(p, offset):
        tl.store(p + offset + tl.arange(0, 8), 1.0)

    add("triton_store", lambda: store[(1,)](torch.zeros(8, device="cuda"), 1 << 40), WHEN)
"""
LIMIT = "40"  # seconds; compiling with NVRTC or Triton takes a few


def _on_gpu(ran: Ran) -> Ran:
    """Records are named by architecture."""
    file = ran.directory / f"{next(iter(archs_here()))}.jsonl"
    ran.__dict__["lines"] = read_lines(file)  # in the place of the cached property
    return ran


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    more = ("-n", "2", f"--case-timeout={LIMIT}", "--sizes", "reduced")
    return _on_gpu(run_once(tmp_path_factory, "cuda faults", KERNELS, *more, cases=CASES))


def _planned(ran: Ran, name: str) -> None:
    if name not in ran.plan["planned"]:
        pytest.skip(f"{name} cannot be written with this torch (no torch.cuda._compile_kernel, or no Triton)")


@pytest.mark.parametrize("name", ["asserts", "stores_far_away", "triton_store"])
def test_a_lost_context_costs_the_culprit_and_nobody_else(ran: Ran, name: str) -> None:
    """The first error is the true one; what the worker had not begun is run again in another process."""
    _planned(ran, name)
    (bad,) = [result for result in ran.of(name) if result["state"] != "pass"]
    assert (bad["case"], bad["state"], bad["kind"]) == (CULPRIT, "crash", "crash")
    assert bad["message"].startswith(f"{CULPRIT} on {name}: raised ")
    assert "CUDA error" in bad["message"] and "the GPU context is lost" in bad["message"]
    assert len(ran.of(name, "pass")) == len(CASES) - 1


def test_an_endless_kernel_on_the_gpu_is_ended_by_the_limit_of_its_case(ran: Ran) -> None:
    _planned(ran, "endless")
    (bad,) = [result for result in ran.of("endless") if result["state"] != "pass"]
    assert (bad["case"], bad["state"]) == (CULPRIT, "timeout")
    assert f"still running after {LIMIT} s" in bad["message"]
    assert "synchronize" in bad["trace"]  # the stack shows what waits for the device


def test_memory_that_a_kernel_asks_for_in_vain_is_its_error(ran: Ran) -> None:
    (bad,) = [result for result in ran.of("hoards") if result["state"] != "pass"]
    assert (bad["case"], bad["state"]) == (CULPRIT, "error")
    assert "out of memory" in bad["message"]


def test_the_innocent_have_their_results_and_the_run_has_failed(ran: Ran) -> None:
    assert len(ran.of("sound", "pass")) == len(CASES)
    assert len(ran.results) == sum(ran.plan["planned"].values())
    assert (ran.code, ran.end["exit"], ran.end["problems"]) == (1, 1, [])


def test_without_workers_the_others_are_not_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """There is no fresh process: nothing after the culprit passes."""
    source = KERNELS[: KERNELS.index("def stores_far_away")] + 'add("asserts", asserts, WHEN)'
    found = _on_gpu(run_once(tmp_path_factory, "cuda alone", source, "--sizes", "reduced", cases=CASES))
    states = [result["state"] for result in found.results]
    first = states.index("error")
    assert found.results[first]["case"] == CULPRIT and found.results[first]["kernel"] == "asserts"
    assert set(states[first + 1 :]) == {"not-run"}
    assert all("the GPU context was lost by" in result["message"] for result in found.results[first + 1 :])
    assert found.code == 1


def test_too_little_for_any_case_is_said_with_both_figures(tmp_path_factory: pytest.TempPathFactory) -> None:
    more = ("-n", "1", "--sizes", "official", "--memory-limit", "100MB")
    found = _on_gpu(run_once(tmp_path_factory, "cuda memory", "", *more, cases=CASES))
    assert [result["state"] for result in found.results] == ["not-run"] * len(CASES)
    for result in found.results:
        assert (result["kind"], result["message"].startswith("needs ")) == ("memory", True)
        assert result["message"].endswith(" free")
    assert found.code == 1 and any("sound executed nothing" in problem for problem in found.end["problems"])


# ---- streams --------------------------------------------------------------------------------------------------------


def _on_a_stream(before: bool, after: bool) -> Kernel:
    """Computes what is asked for on a stream of its own, and waits for the current one or lets it wait."""

    def streamed(x: Tensor, token_topk_to_pos: Tensor, topk_weights: Any, x_sf: Any, sf: Any, out: Tensor) -> None:
        current, own = torch.cuda.current_stream(), torch.cuda.Stream()
        if before:
            own.wait_stream(current)
        with torch.cuda.stream(own):
            if before:  # what is too late comes late for sure; what is too early must not be made late
                torch.cuda._sleep(100_000_000)  # cycles: about 50 ms
            rows = token_topk_to_pos.clamp(max=len(x) - 1)  # what is read too early may be anything
            out.copy_(right(x, rows, topk_weights, x_sf, sf, out.dtype))
        if after:
            current.wait_stream(own)

    return subject(streamed, "within-budget", devices=("cuda",))


def _judged(kernel: Kernel) -> Result:
    cases = matrix(OPERATOR).cases("edge")
    case = next(case for case in cases if case.get("launch") == "stream" and case.get("out") == "bf16")
    return Judge(Settings("cuda", "reduced", next(iter(archs_here())))).run(case, kernel)


def test_a_kernel_that_orders_its_own_stream_passes() -> None:
    result = _judged(_on_a_stream(before=True, after=True))
    assert result.state == "pass", result.message


@pytest.mark.parametrize("order", [(True, False), (False, True), (False, False)],
                         ids=["nobody waits for it", "it waits for nobody", "neither"])
def test_a_stream_that_is_left_unsynchronised_fails(order: tuple[bool, bool]) -> None:
    """The whole device is waited for before a result is judged, which would hide it; what the next work on the stream
    finds does not."""
    result = _judged(_on_a_stream(*order))
    assert result.state == "fail", result.message


# ---- settings of the device -----------------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "random generator": (lambda: torch.cuda.manual_seed(99), lambda: torch.cuda.get_rng_state().tolist()),
    "TF32": (lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
             lambda: torch.backends.cuda.matmul.allow_tf32),
    "cuDNN": (lambda: setattr(torch.backends.cudnn, "benchmark", True), lambda: torch.backends.cudnn.benchmark),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_device_are_put_back(name: str) -> None:
    from conformance.launching.restore import process_kept
    from conformance.launching.torch_settings import torch_settings_kept

    change, ask = SETTINGS[name]
    torch.cuda.init()
    before = ask()
    with process_kept(), torch_settings_kept():
        change()
        assert ask() != before
    assert ask() == before
