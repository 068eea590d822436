"""What can be said and compiled of a TileLang kernel before it is called: its route, its code, its programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance.arch import Arch
from conformance.errors import NotSupported
from conformance.route import Lowered, Route
from kernels import tilelang_build, tilelang_lower
from kernels.dialect import arch_here, target_of

if TYPE_CHECKING:
    from kernels.gemm_2stage.legacy_template import Spec

Params = Mapping[str, str]
Stages = tuple[int, ...]


@dataclass(frozen=True)
class Programs:
    """chosen(stages, params, arch): the programs that a case at official sizes runs, one for each stage. path_of(spec):
    what a program is reported as; ``paths``: all of these, and of several a case is said to take the first.
    supports(params): None, or why a case is not taken."""

    chosen: Callable[[Stages, Params, Arch], tuple[Spec, ...]]
    path_of: Callable[[Spec], str]
    paths: tuple[str, ...]
    supports: Callable[[Params], str | None]

    def options(self, *stages: int) -> dict[str, Any]:
        """Arguments of ``@kernel`` for a kernel of these stages."""
        return {"supports": self.supports, "requires": tilelang_build.missing, "prepare": partial(self.prepare, stages),
                "route": partial(self.route, stages), "lower": partial(self.lower, stages)}

    def prepare(self, stages: Stages, params: Params, device_type: str) -> None:
        for spec in self.chosen(stages, params, arch_here(target_of(device_type))):
            tilelang_build.load(str(spec), spec.target, spec.program, wait=False, passes=spec.passes)

    def route(self, stages: Stages, params: Params, arch: Arch) -> Route:
        if (reason := self.supports(params)) is not None:
            raise NotSupported(reason)
        found = self.chosen(stages, params, arch)
        path = min(map(self.path_of, found), key=self.paths.index)
        return Route(path, " + ".join(map(str, found)))

    def lower(self, stages: Stages, params: Params, arch: Arch) -> Lowered:
        """The code of the last stage; the first one of a chain is lowered by moe_gemm1's own cases."""
        last = self.chosen(stages, params, arch)[-1]
        return tilelang_lower.lower(last.program, arch, last.passes)
