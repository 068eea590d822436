"""Taking a case as far as it can go on an architecture that is not here: route, lower, assemble."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from conformance.arch import Arch
from conformance.case import Case
from conformance.cases.applies import why_not_meant
from conformance.disk_cache import cache_dir, hold
from conformance.errors import NoAnswer, NotSupported, spelled_out, trace_of
from conformance.kernel import Kernel
from conformance.lanes import assembly, lowering
from conformance.lanes.resources import beyond, malformed, unknown_limits, used
from conformance.result import REJECTED, Result, Settings, blank_result, refusal
from conformance.route import Failure, Lowered, Route


def would_take(case: Case, kernel: Kernel, arch: Arch) -> str:
    """In words: the path that a case would take on an architecture that is not here, or why none."""
    try:
        reason = not_routed(case, kernel, arch) or refusal(case, kernel)
        if reason:
            return f"not run: {reason}"
        return f"not here; it would take the path {route_of(case, kernel, arch).path}"
    except NotSupported as error:
        return f"refused: {error}"
    except NoAnswer as error:
        return f"error: {error}"
    except (Exception, SystemExit) as error:
        return f"not routed: {spelled_out(error)}"


def not_routed(case: Case, kernel: Kernel, arch: Arch) -> str | None:
    """Why nothing can be said of the case on this kernel and architecture, or None."""
    if arch.device not in kernel.devices:
        return f"{kernel.name} runs on {' or '.join(kernel.devices)}"
    reason = why_not_meant(case, arch)
    if reason:
        return reason
    if kernel.route is None:
        return f"{arch.name} is not here, and {kernel.name} says nothing of it (@kernel(route=...))"
    return None


def route_of(case: Case, kernel: Kernel, arch: Arch) -> Route:
    """What the kernel's ``route`` answers. Raises what it raises, and TypeError when the answer is no route."""
    assert kernel.route is not None
    found = kernel.route(case.params, arch)
    texts = (found.path, found.config) if isinstance(found, Route) else ()
    if not (texts and all(isinstance(text, str) for text in texts)) or found.path in ("", REJECTED):
        raise TypeError(f"route() of {kernel.name} returned {found!r:.200}: a Route is required, whose path and config "
                        f"are strings, the path neither empty nor {REJECTED!r}")
    return found


class Lanes:
    """Takes cases on one absent architecture; remembers each configuration's way."""

    def __init__(self, settings: Settings, arch: Arch, seconds: float) -> None:
        self.settings = settings
        self.arch = arch
        self.seconds = seconds
        self._known: dict[tuple[str, str, str], dict[str, Any]] = {}

    def run(self, case: Case, kernel: Kernel) -> Result:
        """The case's result, with the highest lane that it reached and why it went no further."""
        blank = blank_result(case, kernel, self.settings, "pass")
        reason = not_routed(case, kernel, self.arch)
        if reason:
            return replace(blank, state="not-run", lane="route", message=reason)
        try:
            refused = refusal(case, kernel)
            if refused:
                return replace(blank, state="not-run", lane="route", kind="refused", message=refused)
            route = route_of(case, kernel, self.arch)
        except NotSupported as error:
            return replace(blank, state="not-run", lane="route", kind="refused", message=str(error))
        except (Exception, SystemExit) as error:
            said = str(error) if isinstance(error, NoAnswer) else f"not routed: {spelled_out(error)}"
            message = f"{case.id} on {kernel.name}: {said}"
            return replace(blank, state="error", lane="route", kind="exception", message=message,
                           trace=trace_of(error, 6))
        blank = replace(blank, path=route.path, lane="route")
        if kernel.lower is None or not route.config:
            return replace(blank, stopped=f"nothing to lower: {kernel.name} compiles nothing of its own")
        if not self.arch.target:
            return replace(blank, stopped=f"not lowered: TileLang has no target for {self.arch.name}")
        way = dict(self._way(case, kernel, route.config))
        if "message" in way:
            way["message"] = f"{case.id} on {kernel.name}: {way['message']}"
        return replace(blank, **way)

    def _way(self, case: Case, kernel: Kernel, config: str) -> dict[str, Any]:
        key = kernel.operator, kernel.name, config
        if key not in self._known:
            self._known[key] = self._compile(case, kernel, config)
        return self._known[key]

    def ahead(self, work: Iterable[tuple[Case, Kernel]]) -> list[Callable[[], None]]:
        """One step for each configuration of these cases, which compiles it unless another worker is at it."""
        found: dict[tuple[str, str, str], Callable[[], None]] = {}
        for case, kernel in work:
            if not_routed(case, kernel, self.arch) or kernel.lower is None or not self.arch.target:
                continue
            try:
                config = route_of(case, kernel, self.arch).config
            except (Exception, SystemExit):  # what goes wrong here goes wrong again in the case, and is reported there
                continue
            key = kernel.operator, kernel.name, config
            found.setdefault(key, functools.partial(self._ahead, case, kernel, config))
        return list(found.values())

    def _ahead(self, case: Case, kernel: Kernel, config: str) -> None:
        """What goes wrong with it, as with a disk that is full, is reported by the case that needs it."""
        name = f"ahead {kernel.operator} {kernel.name} {config} {self.arch.name}"
        with contextlib.suppress(Exception), hold(cache_dir() / "locks", name, wait=False) as free:
            if free:
                self._way(case, kernel, config)

    def _compile(self, case: Case, kernel: Kernel, config: str) -> dict[str, Any]:
        """The fields of a result that all cases of one configuration share."""
        lowered = lowering.lower(kernel, case.params, self.arch.name, config, self.seconds)
        if isinstance(lowered, Failure):
            return _failed(lowered, "route", f"lowering {config} for {self.arch.name}")
        uses: dict[str, Any] = {"config": config, **used(lowered)}
        for what, wrong in (("generated code", malformed(lowered.source)), ("limits", beyond(uses, self.arch))):
            if wrong:
                failure = Failure("soft-error", f"{config} was lowered, but {wrong}")
                return _failed(failure, "lower", what) | {"resources": uses}
        unknown = unknown_limits(self.arch)
        if unknown:
            uses["unknown_limits"] = list(unknown)
        return self._assemble(lowered, uses)

    def _assemble(self, lowered: Lowered, uses: dict[str, Any]) -> dict[str, Any]:
        found = assembly.assemble(lowered, self.seconds)
        if isinstance(found, assembly.NotAssembled):
            return {"lane": "lower", "stopped": f"not assembled: {found.reason}", "resources": uses}
        if isinstance(found, Failure):
            return _failed(found, "lower", f"assembling {uses['config']} for {self.arch.name}") | {"resources": uses}
        uses |= {**found.figures, "assembler": found.by}
        uses["shared_bytes"] = max(uses["shared_bytes"], lowered.dynamic_shared + found.figures.get("static_shared", 0))
        too_much = beyond(uses, self.arch)
        if too_much:
            over = Failure("soft-error", f"{uses['config']} was assembled, but {too_much}")
            return _failed(over, "assemble", "limits") | {"resources": uses}
        stopped = f"not executed: {self.arch.name} is not here"
        return {"lane": "assemble", "stopped": stopped, "resources": uses}


def _failed(failure: Failure, lane: str, what: str) -> dict[str, Any]:
    return {"state": "not-run" if failure.kind == "refused" else "error", "kind": failure.kind, "lane": lane,
            "message": f"{what}: {failure.message}", "stopped": f"stopped by {failure.kind}"}
