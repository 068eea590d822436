"""Compiling ahead: what the cases of a run need is made before the first of them begins, by all processes together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

from conformance.case import Case
from conformance.cases.plan import parse_nodeid
from conformance.devices.gpus import cores
from conformance.environment import ABSENT
from conformance.kernel import Kernel
from conformance.registry import arch as table
from conformance.registry import kernels
from conformance.session.isolation import named
from conformance.session.run import LANES, Run

T = TypeVar("T")


def prepare(run: Run, work: Iterable[tuple[Case, Kernel, str | None]]) -> None:
    """Compile ahead. Each worker starts at another place of the list, so that together they compile in
    parallel; a kernel's ``prepare`` skips what another worker is already compiling. Where GPUs are few and cores
    many, each compiles in several threads.

    What goes wrong here goes wrong again in the case that needs it, and is reported there. A worker that
    replaces another one compiles nothing ahead: that may be what ended the other.
    """
    index, count = run.worker
    if index >= count:
        return
    todo: dict[tuple[str, ...], tuple[Kernel, Case, str]] = {}
    absent: dict[str, list[tuple[Case, Kernel]]] = {}
    for case, kernel, chosen in work:
        arch = chosen or next(iter(run.archs))
        device = run.archs[arch]
        if device == ABSENT:
            absent.setdefault(arch, []).append((case, kernel))
        if kernel.prepare is None or device not in kernel.devices:
            continue
        signature = kernel.operator, kernel.name, device, _configuration(kernel, case, arch)
        todo.setdefault(signature, (kernel, case, device))
    entries = list(todo.values())
    run.ahead.expect(len(entries))
    threads = max(1, cores() // count) if "cuda" in run.archs.values() else 1
    for done in _prepared(run, _rotated(entries, index * len(entries) // count), threads):
        for _ in range(done):
            run.ahead.step()
    steps: list[Callable[[], None]] = []
    for arch, pairs in absent.items():
        ahead = functools.partial(run.lanes_of(arch).ahead, pairs)
        steps += run.crash_log.call(f"routes for {arch}", LANES * run.case_timeout, ahead)
    run.ahead.expect(len(steps))
    for step in _rotated(steps, index * len(steps) // count):
        step()
        run.ahead.step()


def programs_of(run: Run, nodeid: str) -> str:
    """What the programs that an item loads are known by; items of one name may share them."""
    planned = parse_nodeid(nodeid)
    if planned is None:
        return ""
    case, arch = planned.case, planned.arch or next(iter(run.archs))
    kernel = next((k for k in kernels(case.operator, run.selection.kernels) if k.name == planned.kernel), None)
    return "" if kernel is None else f"{case.operator} {kernel.name} {_configuration(kernel, case, arch)}"


def _configuration(kernel: Kernel, case: Case, name: str) -> str:
    """What decides what ``prepare`` compiles for a case: the configuration that the kernel's route names; without a
    route, the parameters that usually do."""
    if kernel.route is None:
        return " ".join(str(case.get(key)) for key in ("in", "out", "weights", "xsf", "hidden"))
    try:
        return kernel.route(case.params, table(name)).config
    except (Exception, SystemExit):  # a refusal, or what the case itself reports
        return ""


def _prepared(run: Run, entries: Sequence[tuple[Kernel, Case, str]], threads: int) -> Iterator[int]:
    """Prepare the entries; how many more are done, again and again. A time limit holds for each of them with one
    thread, with several for the time in which none of them gets done."""
    labelled = [(f"prepare of {kernel.name} for {case.id}", functools.partial(_prepare, kernel, case, device))
                for kernel, case, device in entries]
    if threads == 1:
        for (label, step), (_, _, device) in zip(labelled, entries, strict=True):
            with run.judging(next(name for name, here in run.archs.items() if here == device)):
                _contained(run, label, functools.partial(_restoring, step))
            yield 1
        return
    with contextlib.ExitStack() as stack:
        for name in run.archs:
            stack.enter_context(run.judging(name))
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        left: set[Future[None]] = {pool.submit(named(label, step)) for label, step in labelled}

        def some() -> set[Future[None]]:
            return wait(left, return_when=FIRST_COMPLETED).done

        while left:
            done = _contained(run, "compiling ahead", some) or set()
            left -= done
            yield len(done)


def _contained(run: Run, label: str, step: Callable[[], T]) -> T | None:
    """What ``step`` returns, None where it raised."""
    try:
        found: T = run.crash_log.call(label, run.case_timeout, step)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not run.in_worker:
            raise
        return None
    return found


def _restoring(step: Callable[[], None]) -> None:
    from conformance.launching.restore import process_kept

    with process_kept():
        step()


def _prepare(kernel: Kernel, case: Case, device: str) -> None:
    assert kernel.prepare is not None
    if not kernel.lacks(device):
        kernel.prepare(case.params, device)


def _rotated(entries: Sequence[T], start: int) -> Sequence[T]:
    return [*entries[start:], *entries[:start]]
