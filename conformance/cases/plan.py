"""The plan of a run: which cases go to which kernels on which architectures, and the names of pytest's items."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from conformance.case import Case, parse_case
from conformance.cases.matrix import Matrix
from conformance.cases.options import Selection
from conformance.cases.rounds import cases_on
from conformance.errors import ConformanceError
from conformance.registry import kernels, matrices, matrix_files


@dataclass(frozen=True, slots=True)
class Planned:
    """One item: a case on a kernel. ``arch`` is None when the run has one architecture only."""

    case: Case
    kernel: str
    arch: str | None = None

    @property
    def name(self) -> str:
        return f"{self.kernel}{'@' + self.arch if self.arch else ''}[{self.case.name}]"


def plan(of: Matrix, selection: Selection, archs: tuple[str, ...]) -> Iterator[Planned]:
    """All items of one matrix, in groups that share data: for each case, every architecture and kernel."""
    known = kernels(of.operator, selection.kernels)
    labels: tuple[str | None, ...] = archs if len(archs) > 1 else (None,)
    cases = selection.cases_of(of)
    wanted = {kernel.name: cases_on(kernel, cases) for kernel in known}
    for label in labels:
        for case in cases:
            for kernel in known:
                ids = wanted[kernel.name]
                if ids is None or case.id in ids:
                    yield Planned(case, kernel.name, label)


_known: dict[str, Case] = {}


def remember(cases: Mapping[str, Case]) -> None:
    """Cases by id that node ids will name: one object for each of them, with its tiers, instead of one per parsing."""
    _known.update(cases)


def parse_nodeid(nodeid: str) -> Planned | None:
    """The planned item behind a node id, None when it is no conformance item. Needs neither torch nor kernels."""
    path, _, name = nodeid.partition("::")
    operator = _operators_by_file().get(path.rsplit("/", 1)[-1])
    kernel, bracket, rest = name.partition("[")
    if operator is None or not bracket or not rest.endswith("]"):
        return None
    name = f"{operator}/{rest[:-1]}"
    case = _known.get(name)
    if case is None:
        try:
            case = parse_case(name)
        except ConformanceError:
            return None
    kernel, _, arch = kernel.partition("@")
    return Planned(case, kernel, arch or None)


def group_of(nodeid: str) -> str:
    """The group that a node id belongs to: cases of one group share inputs. Other tests are groups of one."""
    planned = parse_nodeid(nodeid)
    if planned is None:
        return nodeid
    return f"{planned.case.operator}@{planned.arch}/{matrices()[planned.case.operator].group_of(planned.case)}"


@functools.cache
def _operators_by_file() -> dict[str, str]:
    return {of.path.name: name for name, of in matrices().items()} if matrix_files() else {}
