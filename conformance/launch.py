"""Ways to launch a kernel: plain, again and again, captured in a graph, on a side stream, each configuration.

Each way returns the results that must all be right, labelled, for the engine to judge.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.errors import NotSupported, unknown_name
from conformance.formats import bits
from conformance.guards import Buffers, Storages, memory_lost
from conformance.kernel import Kernel
from conformance.operator import ONLY, Call, Operator, Shared, by_name
from conformance.restore import torch_settings_kept

REPEATS = 25
AGAIN = "again_"


class KernelRaised(Exception):
    """A kernel raised; ``__cause__`` is what it raised. Tells its faults from those of the suite."""


class Damaged(Exception):
    """A kernel did something to the memory of its arguments after which nothing can be compared; says what."""


class CaptureFailed(KernelRaised):
    """A kernel cannot be captured in a CUDA graph."""


@dataclass(frozen=True)
class Launched:
    """One result: what was done, the call it answers, the result (of several outputs, by name), the path that ran,
    which poison was in place, and which configuration was forced."""

    label: str
    call: Call
    result: Any
    path: str | None
    poison: int
    overrun: str | None = None
    config: str | None = None

    @property
    def results(self) -> Mapping[str, Any]:
        """By name; of an operator with several outputs only what came by name, or in their order, has their names."""
        several = isinstance(self.call.form, Mapping) and isinstance(self.result, Mapping)
        return self.result if several else {ONLY: self.result}

    def part(self, name: str) -> Launched:
        """The same launch as seen by one output alone."""
        return replace(self, call=self.call.part(name), result=self.results[name])


@dataclass(frozen=True)
class Launcher:
    """Everything that a launch needs."""

    operator: Operator
    kernel: Kernel
    call: Call
    sizes: str
    device: torch.device
    shared: Shared

    def launch(self, mode: str) -> Iterator[Launched]:
        """Results of launching in ``mode``. Raises ConformanceError for an unknown mode."""
        if mode not in _MODES:
            raise unknown_name("launch mode", mode, _MODES)
        return _MODES[mode](self)

    def once(self, label: str, poison: int, config: str | None = None, out: Buffers | None = None) -> Launched:
        """Poison inputs and output, run, and look at the guard bands. ``out`` reuses a buffer."""
        self.call.set_poison(poison)
        if out is None:
            out = Buffers.allocate(self.call, self.device)
        out.poison(poison)
        if not self.kernel.fills_out:
            self._dirty_allocator(poison)
        result, path = self.run(self.call.arguments, out, config)
        self.synchronize()
        return Launched(label, self.call, result, path, poison, out.damage(poison), config)

    def run(self, arguments: Mapping[str, Any], out: Buffers, config: str | None = None, validate: bool = True
            ) -> tuple[Any, str | None]:
        """The kernel's result and path, with torch's settings put back. Raises KernelRaised, also for what ends a
        process elsewhere, such as SystemExit; and Damaged.

        The kernel gets tensors of its own on the memory of inputs and outputs: it may give an output other memory,
        which is no result, and what it does to a tensor's shape or gradient stays with it.
        """
        storages = Storages.of({name: value for name, value in arguments.items() if isinstance(value, Tensor)}
                               | {name: one.storage for name, one in out.by_name.items()})
        try:
            with torch_settings_kept():
                given = {name: value.detach() if isinstance(value, Tensor) else value
                         for name, value in arguments.items()}
                result, path = self.kernel.run(given, out.tensors(), config, validate)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not _raised_by_code(error):
                raise
            raise KernelRaised from error
        if (what := storages.changed()) is not None:
            raise Damaged(what)
        return (out.tensors() if self.kernel.fills_out else result), path

    def synchronize(self) -> None:
        """Wait for the device. Raises KernelRaised."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:  # an asynchronous fault of the kernel's
                raise KernelRaised from error

    def _dirty_allocator(self, poison: int) -> None:
        """Let a kernel that allocates its own result find poison rather than zeros, or an earlier right result."""
        block = Buffers.allocate(self.call, self.device)
        block.poison(poison)
        del block


def _raised_by_code(error: BaseException) -> bool:
    """Whether a ``raise`` statement raised it: Ctrl-C arrives between statements."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"


def _plain(launcher: Launcher) -> Iterator[Launched]:
    yield launcher.once("run with poison 0", 0)
    yield launcher.once("run with poison 1", 1)


def _repeat(launcher: Launcher) -> Iterator[Launched]:
    for number in range(REPEATS):
        yield launcher.once(f"repeat {number + 1} of {REPEATS}", number % 2)


def _configs(launcher: Launcher) -> Iterator[Launched]:
    """The kernel's own choice, then every configuration that it declares, each into a freshly poisoned output."""
    for config in (None, *launcher.kernel.configs):
        for poison in (0, 1):
            yield launcher.once(f"configuration {config or 'default'}, poison {poison}", poison, config)


def _side_stream(launcher: Launcher) -> Iterator[Launched]:
    """On a stream of its own, behind queued work; then the default stream again."""
    stream = torch.cuda.Stream(launcher.device)
    stream.wait_stream(torch.cuda.current_stream(launcher.device))
    with torch.cuda.stream(stream):
        busy = torch.ones((4096, 4096), device=launcher.device)
        for _ in range(8):
            busy = busy @ busy * 2.0**-12
        yield launcher.once("on a side stream", 0)
    torch.cuda.current_stream(launcher.device).wait_stream(stream)
    yield launcher.once("on the default stream afterwards", 1)


def other_draw(case: Case) -> Case:
    """The same case with other values: same shapes, another seed. What it has as ``again_routing`` is the routing of
    this draw, and so with every parameter: other slots are valid then, more or fewer of them."""
    params = {key: value for key, value in case.params.items() if not key.startswith(AGAIN)}
    changes = {key.removeprefix(AGAIN): value for key, value in case.params.items() if key.startswith(AGAIN)}
    return Case(case.operator, {**params, **changes, "draw": "2"}, case.family, case.tiers)


def _other_draw(launcher: Launcher) -> Call:
    case = other_draw(launcher.call.case)
    return launcher.operator.inputs(case, launcher.sizes, launcher.device, launcher.shared)


def _refill(static: Mapping[str, Any], call: Call) -> None:
    for name, value in call.arguments.items():
        if isinstance(value, Tensor):
            static[name].copy_(value)


def _static(launcher: Launcher) -> dict[str, Any]:
    """Copies of the call's arguments, to be filled with other values at the same addresses."""
    arguments = launcher.call.arguments
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def _redraw(launcher: Launcher) -> Iterator[Launched]:
    """Other values at the same addresses, then the first ones again: nothing may be remembered from call to call,
    and a result that was returned stays as it was."""
    static, other = _static(launcher), _other_draw(launcher)
    earlier: list[tuple[Tensor, Tensor]] = []
    for label, call in (
        ("first values", launcher.call),
        ("other values at the same addresses", other),
        ("the first values again", launcher.call),
    ):
        call.set_poison(0)
        _refill(static, call)
        out = Buffers.allocate(call, launcher.device)
        out.poison(0)
        result, path = launcher.run(static, out)
        launcher.synchronize()
        damage = out.damage(0)
        if any(memory_lost(kept) or not torch.equal(bits(kept), bits(copy)) for kept, copy in earlier):
            damage = "a result returned earlier was overwritten by this call"
        earlier += [(one, one.clone()) for one in by_name(result).values() if _readable(one)]
        yield Launched(label, call, result, path, 0, damage)


def _readable(result: Any) -> bool:
    """Whether it is a tensor that can be looked at again; what else is wrong with it is said by its form."""
    return isinstance(result, Tensor) and result.layout == torch.strided and memory_lost(result) is None


def _captured(launcher: Launcher, static: Mapping[str, Any], out: Buffers
              ) -> tuple[torch.cuda.CUDAGraph, Any, str | None]:
    """The kernel's launches as a graph, its result and path. Raises CaptureFailed."""
    graph, pool, raised = torch.cuda.CUDAGraph(), torch.cuda.MemPool(), None
    try:
        with torch.cuda.graph(graph, pool=pool.id):  # type: ignore[arg-type]  # torch's own way of naming a pool
            try:
                result, path = launcher.run(static, out, validate=False)  # it was, when launched eagerly
            except KernelRaised as error:
                raised = error.__cause__
                raise
    except Exception as error:  # of the end of the capture, when the kernel did not raise what spoiled it
        _end_allocating(launcher.device, pool)
        raise CaptureFailed from raised or error
    return graph, result, path


def _end_allocating(device: torch.device, pool: torch.cuda.MemPool) -> None:
    """Undo what a failed capture leaves behind in torch: its allocator takes the capture for unfinished, and gives no
    memory of any kind back to the device. There is no public way."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with contextlib.suppress(RuntimeError):
            end(device.index or 0, pool.id)


def _graph(launcher: Launcher) -> Iterator[Launched]:
    """Captured once, replayed on the same and then on other inputs written to the same addresses. Where there are no
    graphs, on a CPU, the calls are made one by one: what a replay would remember must be remembered by nobody."""
    if launcher.device.type != "cuda":
        yield from _redraw(launcher)
        return
    if not launcher.kernel.graph_safe:
        raise KernelRaised from NotSupported("it cannot be captured in a graph (graph_safe=False)")
    yield launcher.once("eagerly, before capture", 0)
    out = Buffers.allocate(launcher.call, launcher.device)
    out.poison(0)
    static, other = _static(launcher), _other_draw(launcher)
    graph, result, path = _captured(launcher, static, out)
    for label, call, poison in (("replayed", launcher.call, 0), ("replayed with new inputs", other, 1)):
        call.set_poison(poison)
        _refill(static, call)
        out.poison(poison)
        graph.replay()
        launcher.synchronize()
        yield Launched(label, call, result, path, poison, out.damage(poison))


_MODES: dict[str, Callable[[Launcher], Iterator[Launched]]] = {
    "plain": _plain,
    "eager": _plain,  # what the opposite of a graph is called
    "repeat": _repeat,
    "configs": _configs,
    "redraw": _redraw,
    "stream": _side_stream,
    "graph": _graph,
}
