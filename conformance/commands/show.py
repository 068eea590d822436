"""``conformance show CASE``: everything that the suite knows about one case."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from conformance.case import Case
from conformance.cases.options import SIZES, Selection
from conformance.commands.lookup import find_case, find_kernels, pytest_line, settings_of
from conformance.commands.shapes import call_form
from conformance.console import amount, print_fields, print_table
from conformance.environment import ABSENT, archs_here
from conformance.errors import NoAnswer
from conformance.formats import format_of
from conformance.kernel import Kernel
from conformance.lanes.take import would_take
from conformance.operator import Call, Operator
from conformance.registry import arch as table_of
from conformance.registry import matrix, operator
from conformance.result import Settings, why_not_run


def show(text: str, selection: Selection) -> None:
    """Print a case, its forms at the sizes asked for (default: both), and the kernels that take it.

    The official form comes last: its routing may take a while to draw. Raises ConformanceError for an unknown
    case, kernel or architecture.
    """
    wanted = find_case(text, selection.data)
    case, contract = wanted.case, operator(wanted.case.operator)
    chosen = find_kernels(case.operator, selection.kernels)
    runs = settings_of(selection)
    _print_case(case, contract)
    takes = _print_kernels(case, chosen, runs)
    for settings, kernel in takes:
        print(pytest_line(case, [kernel], settings))
    if takes:
        print()
    device = torch.device("cuda" if "cuda" in archs_here().values() else "cpu")
    for sizes in (selection.sizes,) if selection.sizes else tuple(reversed(SIZES)):
        _print_form(case, contract, sizes, device)


def _print_case(case: Case, contract: Operator) -> None:
    of = matrix(case.operator)
    fields: list[tuple[str, object]] = [
        ("case", case.id),
        ("operator", f"{case.operator}: {contract.about}"),
        ("variant", contract.variant(case)),
        ("tiers", ", ".join(tier for tier in of.tier_names if tier in case.tiers)),
    ]
    family = of.families.get(case.family)
    if family is not None:
        fields += [("family", f"{family.name}: {family.about}"), ("source", family.source)]
        fields += [("needs", " or ".join(family.devices))] if family.devices else []
    fields += [("seed", case.seed), ("group", f"{of.group_of(case)} (cases of one group share inputs)")]
    print_fields(fields)
    print()
    print_table(("parameter", "value"), list(case.params.items()))


def _print_kernels(
    case: Case, chosen: Sequence[Kernel], runs: Sequence[Settings]
) -> list[tuple[Settings, Kernel]]:
    """Who takes the case on each architecture, and why others do not; returns those that do."""
    rows: list[tuple[str, str, str, str]] = []
    takes: list[tuple[Settings, Kernel]] = []
    for settings in runs:
        if settings.device == ABSENT:
            rows += [(k.name, settings.arch, k.promise, would_take(case, k, table_of(settings.arch))) for k in chosen]
            continue
        for kernel in chosen:
            try:
                why = why_not_run(case, kernel, settings)
                answer = f"not run: {why}" if why else "takes it"
                takes += [] if why else [(settings, kernel)]
            except NoAnswer as error:
                answer = f"error: {error}"
            rows.append((kernel.name, settings.arch, kernel.promise, answer))
    print_table(("kernel", "on", "promises", "this case"), rows)
    return takes


def _print_form(case: Case, contract: Operator, sizes: str, device: torch.device) -> None:
    """Arguments, memory and cost at one size."""
    note = sizes == "official" and device.type == "cpu" and sys.stderr.isatty()
    if note:
        print("drawing the official routing, seconds on a CPU (--sizes reduced leaves it out) ...", file=sys.stderr)
    start = time.perf_counter()
    sys.stdout.flush()
    with torch.no_grad():
        call = call_form(contract, case, sizes, device)
    slots = matrix(case.operator).slots
    rows = [_row(name, value, "-1 = padding slot" if name == slots else "") for name, value in call.arguments.items()]
    rows += [(name, _extents(out.shape), _dtype(out.dtype), amount(out.nbytes, "B", 1024), "the result")
             for name, out in call.outputs.items()]
    print_table(("argument", "shape", "dtype", "bytes", "remarks"), rows, f"at {sizes} sizes")
    print_fields(_figures(case, contract, sizes, call))
    print(f"(drawn in {time.perf_counter() - start:.1f} s)\n" if note else "")


def _figures(case: Case, contract: Operator, sizes: str, call: Call) -> list[tuple[str, object]]:
    cost = contract.cost(call)
    fields: list[tuple[str, object]] = [("  tokens", call.output.shape[0])] if len(call.outputs) == 1 else []
    slots = call.arguments.get(matrix(case.operator).slots)
    if isinstance(slots, Tensor) and not slots.is_meta:
        fields.append(("  valid slots", f"{int((slots >= 0).sum())} of {slots.numel()}"))
    intensity = f" ({cost.flops / cost.bytes:.2f} FLOPs per byte)" if cost.bytes else ""
    return [
        *fields,
        ("  memory", f"{amount(contract.memory(case, sizes), 'B', 1024)} (estimate, to judge the case once)"),
        ("  FLOPs", f"{cost.flops} ({amount(cost.flops, 'FLOP')})"),
        ("  bytes moved", f"{cost.bytes} ({amount(cost.bytes, 'B')}){intensity}"),
        ("  data", "exact: sums are exact in any order" if call.regime == "exact" else case.get("data", "real")),
    ]


def _row(name: str, value: object, remark: str) -> tuple[str, str, str, str, str]:
    if value is None:
        return name, "-", "-", "-", "none: not given in this case"
    if not isinstance(value, Tensor):
        return name, "-", "-", "-", f"the value {value}"
    if not value.is_contiguous():
        remark = f"strides {_extents(value.stride())}"
    elif not value.is_meta and value.numel() and value.data_ptr() % 16:
        remark = f"starts {value.data_ptr() % 16} bytes past a 16-byte boundary"
    size = amount(value.numel() * value.element_size(), "B", 1024)
    return name, _extents(value.shape), _dtype(value.dtype), size, remark


def _extents(extents: Sequence[int]) -> str:
    return f"[{', '.join(map(str, extents))}]"


def _dtype(dtype: torch.dtype) -> str:
    form = format_of(dtype)
    return form.name if form else str(dtype).removeprefix("torch.")
