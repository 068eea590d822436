"""pytest's view of a matrix: a TOML file that is collected into one light item per case and kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from conformance.bench.record import TIMING
from conformance.case import Case
from conformance.cases.plan import group_of, plan
from conformance.errors import ConformanceError
from conformance.kernel import Kernel
from conformance.registry import kernels, matrices
from conformance.runs.sharding import Item

_LONGEST = 8000
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")  # all but tab and newline


def clipped(text: str) -> str:
    """Text that a kernel had a hand in, made fit to be sent, stored and shown: the middle of long text left out;
    escaped what cannot be encoded (lone surrogates) or would change a terminal (control characters)."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    return text.encode("utf-8", "backslashreplace").decode()


class CaseFailed(Exception):
    """Carries the message of a failed case to pytest."""


class MatrixFile(pytest.File):
    """``matrices/<operator>.toml``."""

    def collect(self) -> Iterator[pytest.Item]:
        run = self.config.stash[RUN]
        of = next((m for m in matrices().values() if m.path == self.path), None)
        if of is None or of not in run.selection.matrices():
            return
        known = {kernel.name: kernel for kernel in kernels(of.operator, run.selection.kernels)}
        for place, planned in enumerate(plan(of, run.selection, tuple(run.archs))):
            yield CaseItem.from_parent(
                self, name=planned.name, case=planned.case, kernel=known[planned.kernel], arch=planned.arch,
                place=place,
                nodeid=f"{self.nodeid}::{planned.name}",  # as pytest's cache will parse it: --lf compares the two
            )


class CaseItem(pytest.Item):
    """One case on one kernel. The work is done by the worker's judge; the result travels with the report."""

    def __init__(self, *, case: Case, kernel: Kernel, arch: str | None, place: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.place = place  # in the plan of its matrix
        self.case = case
        self.kernel = kernel
        self.arch = arch
        self.result: dict[str, Any] | None = None
        for tier in case.tiers:
            if tier in _MARKED:
                self.add_marker(tier)

    def as_item(self, run: Any) -> Item:
        """As what sharding and resuming see it."""
        arch = self.arch or next(iter(run.archs))
        return Item(self.nodeid, self.case, self.kernel.name, arch, group_of(self.nodeid))

    def runtest(self) -> None:
        run = self.config.stash[RUN]
        judged = run.judge_case(self.case, self.kernel, self.arch)
        found, timing = run.time_case(self.case, self.kernel, self.arch, judged)
        result = replace(found, message=clipped(found.message), trace=found.trace and clipped(found.trace))
        self.result = result.record() | ({TIMING: timing} if timing else {})
        if result.state == "not-run":
            pytest.skip(result.message)
        if result.state not in ("pass", "expected"):
            parts = result.message, (result.trace or "").rstrip(), f"Run it again: {result.rerun}"
            raise CaseFailed("\n".join(filter(None, parts)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, (CaseFailed, ConformanceError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name


_MARKED = {"smoke"}
RUN: pytest.StashKey[Any] = pytest.StashKey()
