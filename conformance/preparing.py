"""Compiling ahead: what the cases of a run need is made before the first of them begins, by all processes together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from conformance.case import Case
from conformance.environment import ABSENT
from conformance.kernel import Kernel
from conformance.run import LANES, Run

T = TypeVar("T")


def prepare(run: Run, work: Iterable[tuple[Case, Kernel, str | None]]) -> None:
    """Compile ahead. Each worker starts at another place of the list, so that together they compile in
    parallel; a kernel's ``prepare`` skips what another worker is already compiling.

    What goes wrong here goes wrong again in the case that needs it, and is reported there. A worker that
    replaces another one compiles nothing ahead: that may be what ended the other.
    """
    index, count = run.worker
    if index >= count:
        return
    todo: dict[tuple[str, ...], tuple[Kernel, Case, str]] = {}
    absent: dict[str, list[tuple[Case, Kernel]]] = {}
    for case, kernel, named in work:
        arch = named or next(iter(run.archs))
        device = run.archs[arch]
        if device == ABSENT:
            absent.setdefault(arch, []).append((case, kernel))
        if kernel.prepare is None or device not in kernel.devices:
            continue
        signature = (kernel.name, device, *(case.get(key) for key in ("in", "out", "weights", "xsf", "hidden")))
        todo.setdefault(signature, (kernel, case, device))
    entries = list(todo.values())
    run.ahead.expect(len(entries))
    for kernel, case, device in _rotated(entries, index * len(entries) // count):
        with run.judging(next(name for name, here in run.archs.items() if here == device)):
            _prepare(run, kernel, case, device)
        run.ahead.step()
    steps: list[Callable[[], None]] = []
    for arch, pairs in absent.items():
        ahead = functools.partial(run.lanes_of(arch).ahead, pairs)
        steps += run.crash_log.call(f"routes for {arch}", LANES * run.case_timeout, ahead)
    run.ahead.expect(len(steps))
    for step in _rotated(steps, index * len(steps) // count):
        step()
        run.ahead.step()


def _prepare(run: Run, kernel: Kernel, case: Case, device: str) -> None:
    from conformance.restore import process_kept

    def prepared() -> None:
        assert kernel.prepare is not None
        with process_kept():
            if not (kernel.requires and kernel.requires(device)):
                kernel.prepare(case.params, device)

    try:
        run.crash_log.call(f"prepare of {kernel.name} for {case.id}", run.case_timeout, prepared)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not run.in_worker:
            raise


def _rotated(entries: Sequence[T], start: int) -> Sequence[T]:
    return [*entries[start:], *entries[:start]]
