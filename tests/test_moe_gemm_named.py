"""First sentences of two-stage MoE for kernels that would be right elsewhere: each names what is other than here, and
none speaks of low precision where a part of the sum is left out."""

from __future__ import annotations

import inspect

import pytest
from engine_samples import one_thread as one_thread
from gemm_calls import OPERATORS

from conformance import Kernel
from conformance.case import parse_case
from conformance.judging.judge import Judge
from conformance.registry import MUTANTS, kernels
from conformance.result import Settings
from conformance.zoo.kill_matrix import cause_of

pytestmark = pytest.mark.usefixtures("one_thread")
_ACT = "y = torch.nn.functional.silu(gate) * up"
_SHARE = "expert, in_dtype) * weights[token, slot][:, None]"
_SUM = "return left.float() @ right.T"
_SCALE = "scale = value.abs().amax(dim=1) / largest"
# cause: operator, dtype, module, the passage and what stands in its place
WRONG = {
    "relu": ("1", "bf16", "per_expert", _ACT, "y = gate.relu() * up"),
    "hardswish": ("1", "bf16", "per_expert", _ACT, "y = torch.nn.functional.hardswish(gate) * up"),
    "silu-of-up": ("1", "bf16", "per_expert", _ACT,
                   "y = torch.nn.functional.silu(gate) * torch.nn.functional.silu(up)"),
    "silu-of-product": ("1", "bf16", "per_expert", _ACT, "y = torch.nn.functional.silu(gate * up)"),
    "up-plus-one": ("1", "bf16", "per_expert", _ACT, f"{_ACT[:-2]}(up + 1)"),
    "swiglu-biased": ("c", "bf16", "per_expert", _ACT, "y = gate.clamp(max=7.0) * torch.sigmoid(1.702 * gate.clamp("
                      "max=7.0)) * (up.clamp(-7.0, 7.0) + 1)"),
    "gate-up-rounded": ("1", "fp8", "per_expert", _ACT, "gate, up = gate.half().float(), up.half().float()\n        "
                        + _ACT),
    "scales-rounded": ("2", "fp8", "per_expert", "acc = acc * scale_w[expert]",
                       "acc = acc * scale_w[expert].bfloat16().float()"),
    "weights-rounded": ("2", "fp8", "per_expert", _SHARE, "expert, in_dtype) * weights[token, slot][:, None].half()"),
    "weights-softmax": ("2", "fp8", "per_expert", _SHARE,
                        "expert, in_dtype) * weights.softmax(dim=1)[token, slot][:, None]"),
    "weights-sorted": ("2", "fp8", "per_expert", _SHARE,
                       "expert, in_dtype) * weights.sort(dim=1, descending=True)[0][token, slot][:, None]"),
    "k-head-dropped": ("2", "fp8", "unpack", _SUM, "return left[:, 32:].float() @ right[:, 32:].T"),
    "requantise-token-scale": ("c", "int8", "between", _SCALE, f"{_SCALE}\n    scale = scale.view(local.shape).amax("
                               "dim=1).repeat_interleave(local.shape[1])"),
    "requantise-power-of-two": ("c", "fp8", "between", _SCALE, f"scale = ({_SCALE[8:]}).log2().ceil().exp2()"),
    "requantise-unscaled": ("c", "int8", "between", "scale = torch.where(scale == 0, 1.0, scale)",
                            "scale = torch.ones_like(scale)"),
    "requantise-other-largest": ("c", "fp8", "between", _SCALE, "scale = value.abs().amax(dim=1) / 240.0"),
}


def said(operator: str, dtype: str, module: str, passage: str, instead: str, name: str) -> tuple[str | None, str]:
    """Cause and message of the plain kernel with one passage replaced."""
    of = {letter: operator for operator, letter in zip(OPERATORS, "12c", strict=True)}[operator]
    kernels(of, (MUTANTS,))
    from kernels.mutants.gemm_2stage.family import sources

    source = sources("torch", name, {module: [(passage, instead)]})[of]
    kernel = Kernel(name, of, source.function, "within-budget",
                    parameters=frozenset(inspect.signature(source.function).parameters))
    case = parse_case(f"{of}/F/tokens:37-hidden:128-inter:128-experts:6-topk:3-bm:16-in:{dtype}-mode:reduce-out:f16-"
                      "mask:yes")
    found = Judge(Settings()).run(case, kernel)
    assert found.state == "fail", found.message
    return cause_of(found.record()), found.message


@pytest.mark.parametrize("cause", WRONG)
def test_what_is_right_elsewhere_is_named(cause: str) -> None:
    found, message = said(*WRONG[cause], f"named_{list(WRONG).index(cause)}")
    assert found == cause, message


def test_a_part_of_the_sum_that_is_left_out_is_no_low_precision() -> None:
    part = "left, right = left.clone(), right.clone()\n        left[:, 8:24] = 0\n        " + _SUM
    cause, message = said("2", "bf16", "unpack", _SUM, part, "named_part")
    assert cause != "low-precision", message


def test_roundings_on_the_way_are_low_precision() -> None:
    rounded = ("return sum((left[:, i : i + 32].float() @ right[:, i : i + 32].T).bfloat16().float() "
               "for i in range(0, left.shape[1], 32))")
    cause, message = said("2", "bf16", "unpack", _SUM, rounded, "named_rounded")
    assert cause == "low-precision", message
