"""Kernels under test: the record, the decorator that registers one, and the event that says which path ran."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conformance.errors import NoAnswer, NotSupported, spelled_out, text_of

if TYPE_CHECKING:
    from torch import Tensor

    from conformance.arch import Arch
    from conformance.operator import Results
    from conformance.route import Lowered, Route

LEVELS = ("bit-exact", "within-budget", "published")
DEVICES = ("cpu", "cuda")
ROLES = ("candidate", "baseline", "pytorch")
_path: ContextVar[list[str] | None] = ContextVar("path", default=None)


def report_path(path: str) -> None:
    """Called by a kernel's dispatcher: the path that really runs for this call (for example "h_tiled")."""
    events = _path.get()
    if events is not None:
        events.append(path)


@dataclass(frozen=True)
class Kernel:
    """An implementation under test.

    function: called with the operator's arguments by name; it either fills ``out`` or, having no such parameter,
    returns the result (and may take ``out_dtype``); ``**rest`` takes the arguments that it does not name. Of an
    operator with several outputs it fills them all, each the parameter of its name, or returns them all, by name or in
    the operator's order. promise: the level below which it fails. devices: where it runs. supports(params): None, or
    why a case is not taken. requires(device): None, or why it cannot run on this machine. prepare(params, device):
    compile ahead what a case needs. configs: strings that can be forced through the function's ``config`` parameter.
    repeatable: same bits on every run, for all cases or by their parameters. strided: takes strided and unaligned
    tensors. graph_safe: its launches can be captured in a CUDA graph, which fails where it waits for a result. native:
    the paths that are no fallback (default: the kernel's own name); another one that the function reports needs a rule
    of expectation. route(params, arch): the path and configuration for an architecture that need not be here,
    NotSupported when it would refuse. lower(params, arch): the code of that configuration.
    role: what its speed is for: "baseline" and "pytorch" are what the candidates of the operator are compared with.
    home: the module whose body registered it, if need be by a factory in another module; "" where none did.
    """

    name: str
    operator: str
    function: Callable[..., Any]
    promise: str
    about: str = ""
    devices: tuple[str, ...] = DEVICES
    supports: Callable[[Mapping[str, str]], str | None] | None = None
    requires: Callable[[str], str | None] | None = None
    prepare: Callable[[Mapping[str, str], str], None] | None = None
    configs: tuple[str, ...] = ()
    repeatable: bool | Callable[[Mapping[str, str]], bool] = True
    strided: bool = False
    graph_safe: bool = True
    native: tuple[str, ...] = ()
    route: Callable[[Mapping[str, str], Arch], Route] | None = None
    lower: Callable[[Mapping[str, str], Arch], Lowered] | None = None
    role: str = "candidate"
    parameters: frozenset[str] = field(default_factory=frozenset)
    takes_rest: bool = False
    home: str = ""

    @property
    def module(self) -> str:
        """The module to import to have this kernel."""
        return self.home or str(code_of(self.function).__module__)

    @property
    def modules(self) -> tuple[str, ...]:
        """That one, and where the function's code stands, if elsewhere."""
        return tuple(dict.fromkeys((self.module, str(code_of(self.function).__module__))))

    def repeats(self, params: Mapping[str, str]) -> bool:
        """Whether a case with these parameters must give the same bits on every run. Raises NoAnswer."""
        if isinstance(self.repeatable, bool):
            return self.repeatable
        found = self._answer("repeatable", self.repeatable, params)
        if not isinstance(found, bool):
            raise NoAnswer(f"repeatable= of {self.name} returned {found!r:.200}: return True or False")
        return found

    def unsupported(self, params: Mapping[str, str]) -> str | None:
        """What ``supports`` says of a case with these parameters: why it is not taken, or None. Raises NoAnswer."""
        return self._reason("supports", self.supports, params, "where the case is taken")

    def lacks(self, device: str) -> str | None:
        """What ``requires`` says of this machine: why the kernel cannot run on the device, or None. Raises NoAnswer."""
        return self._reason("requires", self.requires, device, "where it can run")

    def _reason(self, option: str, ask: Callable[[Any], Any] | None, given: Any, where: str) -> str | None:
        try:
            reason = None if ask is None else self._answer(option, ask, given)
        except NoAnswer as error:
            if not isinstance(error.__cause__, NotSupported):
                raise
            reason = text_of(error.__cause__) or "it does not say why"
        if reason is not None and not isinstance(reason, str):
            raise NoAnswer(f"{option}= of {self.name} returned {reason!r:.200}: return None {where}, else the reason "
                           "in words")
        return reason or None

    def _answer(self, option: str, ask: Callable[[Any], Any], given: Any) -> Any:
        try:
            return ask(given)
        except (Exception, SystemExit) as error:
            if isinstance(error, KeyError) and isinstance(given, Mapping) and not {*error.args} & {*given}:
                raise NoAnswer(f"{option}= of {self.name} asks for parameter {error}, which the case does not have; it "
                               f"has {', '.join(given)}: use .get()") from error
            said = " ".join(spelled_out(error).split())  # one line, also in a table
            raise NoAnswer(f"{option}= of {self.name} raised {said}") from error

    @property
    def tells_path(self) -> bool:
        """Whether the kernel must say which path ran: it does once it declares anything about its paths."""
        return bool(self.native) or self.route is not None

    @property
    def native_paths(self) -> tuple[str, ...]:
        return self.native or (self.name,)

    @property
    def fills_out(self) -> bool:
        from conformance.registry import operator

        return self.parameters.issuperset(operator(self.operator).outputs)

    def run(self, arguments: Mapping[str, Any], out: Tensor | Results, config: str | None = None,
            validate: bool = True) -> tuple[Any, str | None]:
        """Validate, call, and return (result, path that ran). ``out`` is filled, or tells the dtype to return; of an
        operator with several outputs it and the result hold them by name.

        Raises what the operator's ``validate`` raises, before the function is entered; TypeError when an argument
        that the case gives is not taken by the function, or some of several outputs and not all. To validate may need
        values of tensors, and so wait for the device: a call that is captured in a graph leaves it out.
        """
        from conformance.registry import operator

        if validate:
            operator(self.operator).validate(dict(arguments), out, self.strided)
        call = self.bound(arguments, out, config)
        events: list[str] = []
        token = _path.set(events)
        try:
            result = call()
        finally:
            _path.reset(token)
        # Of several paths, one that is not native counts: a fallback is not undone by what runs after it.
        last = events[-1] if events else None
        ran = next((path for path in reversed(events) if path not in self.native_paths), last)
        return (out if self.fills_out else self.named(result)), ran

    def named(self, result: Any) -> Any:
        """What the function returned; several outputs that came in the operator's order by name."""
        from conformance.registry import operator

        names = operator(self.operator).outputs
        several = isinstance(result, (tuple, list)) and len(result) == len(names) > 1
        return dict(zip(names, result, strict=True)) if several else result

    def bound(self, arguments: Mapping[str, Any], out: Tensor | Results, config: str | None = None
              ) -> Callable[[], Any]:
        """The bare call of the function with these arguments, which are not validated. Raises TypeError when the case
        gives an argument, or forces a configuration, that the function does not take, or some of several outputs."""
        given: dict[str, Any] = {}
        lacking = []
        for name, value in arguments.items():
            if name in self.parameters or self.takes_rest:
                given[name] = value
            elif value is not None:
                lacking.append(name)
        if lacking:
            names = ", ".join(map(repr, lacking))
            raise TypeError(f"kernel {self.name} has no parameter {names}, which this case gives; add what it needs, "
                            "and **rest for others, or declare through supports= that such cases are not taken")
        outs: Mapping[str, Tensor] = out if isinstance(out, Mapping) else {"out": out}
        taken = [name for name in outs if name in self.parameters]
        if taken and len(taken) < len(outs):
            raise TypeError(f"kernel {self.name} has parameters for the outputs {', '.join(taken)} and none for "
                            f"{', '.join(name for name in outs if name not in taken)}: fill all of them or return all")
        if taken:
            given |= outs
        elif "out_dtype" in self.parameters and "out" in outs:
            given["out_dtype"] = outs["out"].dtype
        if config is not None:
            if "config" not in self.parameters:
                raise TypeError(f"kernel {self.name} has no parameter 'config', config={config!r} is given")
            given["config"] = config
        return functools.partial(self.function, **given)

    def __call__(self, *args: Any, out: Tensor | Results | None = None, out_dtype: Any = None,
                 config: str | None = None, **kwargs: Any) -> Any:
        """Call as a plain function: the operator's arguments in order or by name, ``out`` allocated if absent."""
        import torch

        from conformance.operator import ONLY, by_name
        from conformance.registry import operator

        contract = operator(self.operator)
        if len(args) > len(contract.arguments):
            raise TypeError(f"{self.name} takes {len(contract.arguments)} arguments: {', '.join(contract.arguments)}")
        by_place = dict(zip(contract.arguments, args, strict=False))
        for name in kwargs:
            if name not in contract.arguments:
                raise TypeError(f"{self.name} has no argument {name!r}; it takes {', '.join(contract.arguments)}")
            if name in by_place:
                raise TypeError(f"{self.name} got its argument {name!r} twice: by place and by name")
        arguments = dict.fromkeys(contract.arguments) | by_place | kwargs
        contract.validate(arguments, out, self.strided)
        if out is None:
            device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
            forms = contract.output(arguments, out_dtype)
            made = {name: torch.empty(form.shape, dtype=form.dtype, device=device)
                    for name, form in by_name(forms).items()}
            out = made if isinstance(forms, Mapping) else made[ONLY]
        return self.run(arguments, out, config)[0]


def code_of(function: Callable[..., Any]) -> Any:
    """What has ``__module__`` and ``__qualname__``: of a partial function what it calls, of an object its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)
