"""Which cases are meant for an architecture at all, whatever the kernel: data of matrices and architecture tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from conformance.arch import Arch
from conformance.case import Case
from conformance.expectations.rule import matches
from conformance.registry import matrix


def why_not_meant(case: Case, arch: Arch, device: str = "") -> str | None:
    """Why a case is not run on an architecture: a ``[[skip]]`` of its matrix or of the architecture's table leaves it
    out, or its edge family needs another device; else None. ``device``: its torch device, where the table's is not the
    one."""
    of = matrix(case.operator)
    if (reason := of.left_out(case)) is not None:
        return reason
    wanted = of.devices(case)
    if wanted and (device or arch.device) not in wanted:
        return f"{case.family} needs {' or '.join(wanted)}"
    point = {**case.params, "operator": case.operator, "family": case.family}
    for skip in arch.skips:
        if matches(skip, point, arch):
            return f"left out on {arch.name}: {skip.reason} ({skip.where})"
    return None


def meant(cases: Iterable[Case], arch: Arch | None) -> tuple[list[Case], Counter[str]]:
    """(the cases that are meant for an architecture, how many are not by reason); without one, for any."""
    kept: list[Case] = []
    reasons: Counter[str] = Counter()
    for case in cases:
        reason = why_not_meant(case, arch) if arch else matrix(case.operator).left_out(case)
        if reason:
            reasons[reason] += 1
        else:
            kept.append(case)
    return kept, reasons
