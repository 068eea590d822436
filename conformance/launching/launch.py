"""Ways to launch a kernel: plain, again and again, captured in a graph, on a side stream, each configuration.

Each way returns the results that must all be right, labelled, for the engine to judge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conformance.case import other_draw
from conformance.errors import NotSupported, unknown_name
from conformance.formats import bits
from conformance.kernel import Kernel
from conformance.launching.capture import captured
from conformance.launching.guards import Buffers, Storages, memory_lost
from conformance.launching.raised import Damaged, KernelRaised, raised_by_code
from conformance.launching.torch_settings import torch_settings_kept
from conformance.operator import ONLY, Call, Operator, Shared, by_name

REPEATS = 25


@dataclass(frozen=True)
class Launched:
    """One result: what was done, the call it answers, the result (of several outputs, by name), the path that ran,
    which poison was in place, and which configuration was forced. ``damage``: what was written that must not be, in
    words; ``touched``, bool [] on the device, which was not waited for: whether there is some, None where that is not
    known."""

    label: str
    call: Call
    result: Any
    path: str | None
    poison: int
    damage: Callable[[], str | None] = lambda: None
    config: str | None = None
    touched: Tensor | None = None

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

    def once(self, label: str, poison: int, config: str | None = None, out: Buffers | None = None, *,
             behind: bool = False) -> Launched:
        """Poison inputs and output, run, and have the guard bands looked at. ``out`` reuses a buffer. ``behind``: the
        result is what the next work on the current stream finds, not what stands there once the device is done."""
        self.call.set_poison(poison)
        if out is None:
            out = Buffers.allocate(self.call, self.device)
        out.poison(poison)
        if not self.kernel.fills_out:
            self._dirty_allocator(poison)
        result, path = self.run(self.call.arguments, out, config)
        if behind:
            result = _copied(result)
        self.synchronize()
        return Launched(label, self.call, result, path, poison, functools.partial(out.damage, poison), config,
                        out.touched(poison))

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
            if isinstance(error, KeyboardInterrupt) and not raised_by_code(error):
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


def _in_words(poison: int) -> str:
    """The label of a launch that differs from others by its poison only."""
    what = ("NaN", "0x5a")[poison]
    return f"launch {poison + 1} (output pre-filled with {what} bytes)"


def _plain(launcher: Launcher) -> Iterator[Launched]:
    for poison in (0, 1):
        yield launcher.once(_in_words(poison), poison)


def _repeat(launcher: Launcher) -> Iterator[Launched]:
    for number in range(REPEATS):
        yield launcher.once(f"repeat {number + 1} of {REPEATS}", number % 2)


def _configs(launcher: Launcher) -> Iterator[Launched]:
    """The kernel's own choice, then every configuration that it declares, each into a freshly poisoned output."""
    for config in (None, *launcher.kernel.configs):
        for poison in (0, 1):
            yield launcher.once(f"configuration {config or 'default'}, {_in_words(poison)}", poison, config)


def _side_stream(launcher: Launcher) -> Iterator[Launched]:
    """On a stream of its own, behind queued work; then the default stream again. A kernel that works on yet another
    stream must make the current one wait for it: what comes next there reads the result."""
    stream = torch.cuda.Stream(launcher.device)
    stream.wait_stream(torch.cuda.current_stream(launcher.device))
    with torch.cuda.stream(stream):
        busy = torch.ones((4096, 4096), device=launcher.device)
        for _ in range(8):
            busy = busy @ busy * 2.0**-12
        yield launcher.once("on a side stream", 0, behind=True)
    torch.cuda.current_stream(launcher.device).wait_stream(stream)
    yield launcher.once("on the default stream afterwards", 1, behind=True)


def _copied(result: Any) -> Any:
    """A result, or several by name or in order, copied on the current stream; strides stay as they are."""
    if isinstance(result, Tensor) and result.layout == torch.strided:
        copy = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=result.device)
        return copy.copy_(result)
    if isinstance(result, Mapping):
        return {name: _copied(value) for name, value in result.items()}
    return type(result)(map(_copied, result)) if type(result) in (tuple, list) else result


def _other_draw(launcher: Launcher) -> Call:
    """The same case with other values: same shapes, another seed."""
    return launcher.operator.inputs(other_draw(launcher.call.case), launcher.sizes, launcher.device, launcher.shared)


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
        damage = functools.partial(out.damage, 0)
        if any(memory_lost(kept) or not torch.equal(bits(kept), bits(copy)) for kept, copy in earlier):
            damage = functools.partial(str, "a result returned earlier was overwritten by this call")
        earlier += [(one, one.clone()) for one in by_name(result).values() if _readable(one)]
        yield Launched(label, call, result, path, 0, damage)


def _readable(result: Any) -> bool:
    """Whether it is a tensor that can be looked at again; what else is wrong with it is said by its form."""
    return isinstance(result, Tensor) and result.layout == torch.strided and memory_lost(result) is None


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
    # validated when it was launched eagerly
    graph, (result, path) = captured(lambda: launcher.run(static, out, validate=False), launcher.device)
    for label, call, poison in (("replayed", launcher.call, 0), ("replayed with new inputs", other, 1)):
        call.set_poison(poison)
        _refill(static, call)
        out.poison(poison)
        graph.replay()
        launcher.synchronize()
        yield Launched(label, call, result, path, poison, functools.partial(out.damage, poison))


_MODES: dict[str, Callable[[Launcher], Iterator[Launched]]] = {
    "plain": _plain,
    "eager": _plain,  # what the opposite of a graph is called
    "repeat": _repeat,
    "configs": _configs,
    "redraw": _redraw,
    "stream": _side_stream,
    "graph": _graph,
}
