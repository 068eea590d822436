#!/usr/bin/env python3
# `conformance repro CASE --write FILE` copies this file and fills in the block below. On its own it does nothing.
"""Rebuild the inputs of one conformance case, run the golden and the kernel, and show where they differ.

Exit code: 0 the kernel holds what it promises (equal bits, or a difference within its promise); 1 it does not, or
it raised; 2 the case cannot run here.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

# <<< filled in by "conformance repro"
CASE = ""  # the id; the inputs' seed is taken from it
KERNEL = ""
KERNELS: tuple[str, ...] = ()  # what --kernels needs to find the kernel
SIZES = "reduced"
DEVICE = "cpu"
ARCH = "cpu"
CHECKOUT = ""  # where the suite lies
PATHS: tuple[str, ...] = ()  # where the kernel's own package lies, if elsewhere
CHECKSUMS: dict[str, int] | None = None  # of the inputs, when this file was written
# >>>


def main() -> int:
    options = _options()
    sys.path[:0] = [options.checkout, *PATHS]
    try:
        from conformance.errors import ConformanceError
    except ImportError as error:
        print(f"error: no conformance suite in {options.checkout!r} (--checkout DIR): {error}", file=sys.stderr)
        return 2
    try:
        return run(options)
    except ConformanceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Inputs, golden, kernel, mismatch; then the suite's own verdict, which counts."""
    import torch

    from conformance.case import parse_case
    from conformance.errors import NoAnswer
    from conformance.judging.judge import Judge, torch_device
    from conformance.launching.guards import Buffers
    from conformance.launching.launch import Launched
    from conformance.launching.snapshot import checksum
    from conformance.launching.torch_settings import torch_settings_kept
    from conformance.operator import Shared
    from conformance.registry import kernels, operator
    from conformance.result import Settings, why_not_run
    from conformance.verdicts.joint import Joint

    case = parse_case(CASE)
    kernel = next((k for k in kernels(case.operator, KERNELS) if k.name == KERNEL), None)
    if kernel is None:
        print(f"error: {', '.join(KERNELS)} has no kernel {KERNEL!r} any more", file=sys.stderr)
        return 2
    arch = ARCH if options.device == DEVICE else options.device
    settings = Settings(options.device, options.sizes, arch)
    print(f"{CASE}\non {KERNEL} ({kernel.module}), {settings.sizes} sizes, {settings.device}")
    try:
        reason = why_not_run(case, kernel, settings)
    except NoAnswer as error:
        print(f"the kernel does not say whether it takes the case: {error}")
        return 1
    if reason is None and options.device == "cuda" and not torch.cuda.is_available():
        reason = "torch sees no GPU here (--device cpu runs on the CPU)"
    if reason:
        print(f"cannot run here: {reason}", file=sys.stderr)
        return 2

    contract, device = operator(case.operator), torch_device(settings)
    with torch_settings_kept():
        call = contract.inputs(case, settings.sizes, device, Shared())
        call.set_poison(1)  # rows that no slot refers to
        for name, value in call.arguments.items():
            form = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else value
            print(f"  {name}: {'none' if value is None else form}")
        sums = {name: checksum(value) for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
        if CHECKSUMS is not None and options.sizes == SIZES and sums != CHECKSUMS:
            print("WARNING: these are not the inputs of when this file was written: the suite has changed since")
        joint = Joint.of(call, contract.reference(call, Shared()))
        outputs = Buffers.allocate(call, device)
        outputs.poison(1)  # elements that the kernel does not write hold 0x5a bytes
        try:
            result, path = kernel.run(call.arguments, outputs.tensors())
            if options.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            print(f"the kernel raised {type(error).__name__}: {error}")
            if options.device == "cuda" and not context_works():
                print("the GPU context is lost: nothing more can be run in this process")
                return 1
        else:
            print(f"path: {path or 'not reported'}\n")
            results = Launched(KERNEL, call, result, path, 1).results
            problem = joint.problem(results, device, kernel.fills_out)
            if problem:
                print(f"the form is wrong: {problem}")
            for name, reference in {} if problem else joint.references.settled(results).items():
                print(f"{name}: " if len(results) > 1 else "", end="")
                show_mismatch(reference, results[name], options.show)
            del result, results
    del call, joint, outputs

    found = Judge(settings).run(case, kernel)
    levels = f"promised {kernel.promise}, reached {found.level or 'no level'}"
    print(f"\nverdict of the suite: {found.state}{f' [{found.kind}]' if found.kind else ''}; {levels}")
    if found.budget_fraction is not None:
        print(f"worst error: {found.budget_fraction:.3g} times the budget")
    if found.message:
        print(found.message)
    if found.trace:
        print(found.trace, end="")
    return {"pass": 0, "not-run": 2}.get(found.state, 1)


def context_works() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def show_mismatch(reference: Any, result: Any, most: int) -> None:
    """Print how many elements of ``result`` differ from the golden in their bits (a NaN equals a NaN), where they
    lie, and the first ``most`` of them. What the contract leaves open is left out."""
    from conformance.formats import bits
    from conformance.verdicts.verdict import number, spelled

    golden = reference.golden
    both_nan = golden.float().isnan() & result.float().isnan()
    differs = (bits(golden) != bits(result)) & ~both_nan
    if reference.open is not None:
        differs &= ~reference.open
    count = int(differs.sum())
    if count == 0:
        print(f"all {golden.numel()} elements equal the golden, bit for bit{_but(reference)}")
        return
    print(f"{count} of {golden.numel()} elements differ from the golden in their bits")
    table = differs.reshape(len(differs), -1)
    for axis, name in ((0, "row"), (1, "column"))[: golden.dim()]:
        hit = table.any(dim=1 - axis).nonzero().flatten().tolist()
        shown = ", ".join(map(str, hit[:8])) + (f", ... {hit[-1]}" if len(hit) > 8 else "")
        print(f"  in {len(hit)} of {table.shape[axis]} {name}s: {shown}")
    digits, mask = 2 * golden.element_size(), (1 << 8 * golden.element_size()) - 1
    print(f"  {'index':<16}{'expected':>16}{'actual':>16}   bits expected, actual")
    for place in map(tuple, differs.nonzero()[:most].tolist()):
        raw = [f"0x{int(bits(tensor)[place]) & mask:0{digits}x}" for tensor in (golden, result)]
        values = "".join(f"{spelled(number(tensor[place])):>16}" for tensor in (golden, result))
        print(f"  {list(place)!s:<16}{values}   {', '.join(raw)}")
    if count > most:
        print(f"  ... and {count - most} more (--show N)")


def _but(reference: Any) -> str:
    count = 0 if reference.open is None else int(reference.open.sum())
    return f" ({count} of them are left open and were not compared)" if count else ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", default=CHECKOUT, metavar="DIR", help="the suite (default: %(default)s)")
    parser.add_argument("--device", default=DEVICE, choices=("cpu", "cuda"), help="default: %(default)s")
    parser.add_argument("--sizes", default=SIZES, choices=("official", "reduced"), help="default: %(default)s")
    parser.add_argument("--show", default=10, type=int, metavar="N", help="how many elements (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
