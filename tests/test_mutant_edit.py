"""Mutants by edited source: the text must be there once, the original is left alone, any process finds the result."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from conformance.errors import ConformanceError
from conformance.registry import ROOT
from kernels.moe_reduction import reduction_torch
from kernels.mutants.edit import edited

MODULE = "kernels.moe_reduction.reduction_torch"
SLOTS = "for slot in range(part.shape[1]):"


def _edit(name: str, *edits: tuple[str, str]):
    return edited("kernels.mutants.of_the_edit_test", name, (MODULE,), {MODULE: edits})["moe_reduction"]


def _sum(function) -> float:
    part = torch.arange(1.0, 5.0).view(1, 4, 1)
    out = torch.zeros(1, 1)
    function(part, out=out)
    return float(out)


def test_the_edited_kernel_differs_and_the_original_does_not():
    source = _edit("two_slots", (SLOTS, "for slot in range(2):"))
    assert _sum(source.function) == 3.0
    assert _sum(reduction_torch.reduction_torch.function) == 10.0
    assert _sum(_edit("none").function) == 10.0


def test_it_keeps_the_options_but_for_those_that_name_the_original():
    options = _edit("kept").options
    assert options["promise"] == "bit-exact" and options["strided"] is True
    assert options["native"] == ("reduction_torch",)
    assert not {"name", "about"} & set(options)
    assert options["route"].__module__.endswith("kept.reduction_torch")  # its own, not that of the original


@pytest.mark.parametrize(("text", "times"), [("for slot in nothing:", "0"), ("import ", "[2-9]")])
def test_text_that_does_not_stand_once_is_refused(text, times):
    with pytest.raises(ConformanceError, match=f"mutant m: '{text}' stands {times} times .* adapt the mutant"):
        _edit("m", (text, "x"))


def test_modules_that_import_an_edited_one_are_executed_on_it():
    modules = tuple(f"kernels.gemm_2stage.{name}" for name in ("unpack", "between", "per_expert"))
    found = edited("kernels.mutants.of_the_edit_test", "inner", modules, {modules[0]: ((".transpose(1, 2)", ""),)})
    assert set(found) == {"moe_gemm1", "moe_gemm2", "moe_gemm_2stage"}
    names = found["moe_gemm1"].function.__globals__
    assert names["weight_matrix"].__module__ == "kernels.mutants.of_the_edit_test.inner.unpack"
    assert names["requantise"].__module__ == "kernels.gemm_2stage.between"  # not edited, nor on an edited one


def test_a_module_that_is_imported_as_a_whole_is_the_edited_one():
    """``from package import module``: what was edited had no effect then, and the mutant was its twin."""
    modules = tuple(f"kernels.gemm_2stage.{name}" for name in ("microscaled", "per_expert"))
    found = edited("kernels.mutants.of_the_edit_test", "whole", modules, {modules[0]: (("pair >> 4)", "pair & 15)"),)})
    used = found["moe_gemm2"].function.__globals__["microscaled"]
    assert used.__name__ == "kernels.mutants.of_the_edit_test.whole.microscaled"
    assert used.fp4_numbers(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [0.5, 0.5]


def test_a_fresh_process_finds_an_edited_kernel_by_its_module():
    code = ("import conformance.registry as r; "
            "of = {k.name: k for k in r.kernels('moe_gemm1', ['kernels.mutants.gemm_2stage.semantics'])}; "
            "print(of['no_silu'].module, of['no_silu'].function.__module__)")
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["kernels.mutants.gemm_2stage.semantics",
                                  "kernels.mutants.gemm_2stage.no_silu.per_expert"]
