"""The result of one case on one kernel, and what is known of it before it runs. Needs no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from conformance.case import Case
from conformance.cases.applies import why_not_meant
from conformance.environment import ABSENT, python_here
from conformance.kernel import Kernel
from conformance.registry import arch, import_root, matrix, operator, selector

STATES = ("pass", "expected", "fail", "error", "crash", "timeout", "not-run")


NOT_LOOKED_FOR = "not looked for"  # the cause of a failure, in its details: others of the kernel were diagnosed
REJECTED = "rejected"  # the path of a case whose arguments a kernel may refuse, and did


@dataclass(frozen=True)
class Result:
    """One line of the records: how one case went on one kernel. ``kind`` is the kind of failure, or "refused" where
    the kernel did not take the case. ``lane`` is the highest one reached, ``stopped`` says why it went no further.
    ``expected``: the rule that holds for the case, None for the default (native). ``resources``: what its code uses.
    ``memory``: bytes that its case was taken for ("estimate") and that its group really took so far ("peak").
    """

    case: str
    operator: str
    variant: str
    kernel: str
    family: str
    tiers: list[str]
    params: dict[str, str]
    group: str
    state: str
    promised: str
    level: str | None = None
    kind: str | None = None
    message: str = ""
    budget_fraction: float | None = None
    max_error: float | None = None
    wrong: int = 0
    elements: int = 0
    first: dict[str, Any] | None = None
    path: str | None = None
    lane: str = "execute"
    stopped: str = ""
    expected: dict[str, str] | None = None
    resources: dict[str, Any] | None = None
    memory: dict[str, int] | None = None
    seconds: float = 0.0
    worker: str = ""
    rerun: str = ""
    details: dict[str, Any] | None = None
    trace: str | None = None
    type: str = field(default="result")

    def record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """What a run decides for all its cases on one architecture. ``device``: torch's name of what is here, or ABSENT."""

    device: str = "cpu"
    sizes: str = "reduced"
    arch: str = "cpu"


def rerun_command(case: str, chosen: Sequence[Kernel], settings: Settings, *more: str) -> str:
    """The shell line that runs a case on these kernels again in this environment, from the checkout, in a shell that
    does not know yet where they lie. ``more``: words of it, quoted."""
    kernels = shlex.quote(",".join(dict.fromkeys(map(selector, chosen))))
    roots = sorted({str(root) for kernel in chosen if (root := import_root(kernel.module)) is not None})
    path = [f"PYTHONPATH={':'.join(map(shlex.quote, roots))}${{PYTHONPATH:+:$PYTHONPATH}}"] if roots else []
    return " ".join([*path, python_here(), "-m pytest", *more, f"--case '{case}' --kernels {kernels}",
                     f"--sizes {settings.sizes} --arch {settings.arch}"])


def blank_result(case: Case, kernel: Kernel, settings: Settings, state: str, **more: Any) -> Result:
    """A result with everything that is known before the case runs."""
    more.setdefault("lane", "route" if settings.device == ABSENT else "execute")  # more was seen only where it is said
    return Result(
        case=case.id,
        operator=case.operator,
        variant=operator(case.operator).variant(case),
        kernel=kernel.name,
        family=case.family,
        tiers=sorted(case.tiers),
        params=dict(case.params),
        group=matrix(case.operator).group_of(case),
        state=state,
        promised=kernel.promise,
        rerun=rerun_command(case.id, [kernel], settings),
        worker=os.environ.get("PYTEST_XDIST_WORKER", "main"),
        **more,
    )


def why_not_run(case: Case, kernel: Kernel, settings: Settings) -> str | None:
    """Why the case cannot be executed here on this kernel, or None. Raises NoAnswer where the kernel does not say."""
    reason = why_not_meant(case, arch(settings.arch), settings.device)
    if reason:
        return reason
    if settings.device not in kernel.devices:
        return f"{kernel.name} runs on {' or '.join(kernel.devices)}"
    return kernel.lacks(settings.device) or refusal(case, kernel)


def refusal(case: Case, kernel: Kernel) -> str | None:
    """Why the kernel itself does not take the case, or None. Raises NoAnswer where ``supports`` does not say."""
    reason = kernel.unsupported(case.params)
    return f"not supported by {kernel.name}: {reason}" if reason else None
