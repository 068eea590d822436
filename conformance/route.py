"""What a kernel says of itself for hardware that is not here: the path it would take, and the code it would run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Route:
    """``path``: the path that would run. ``config``: name of the compiled configuration, empty when nothing is
    compiled; cases of one configuration are lowered once."""

    path: str
    config: str = ""


@dataclass(frozen=True)
class Lowered:
    """Generated source of one configuration. language: "cuda" or "hip". target: the architecture as the vendor's
    compiler spells it ("sm_90a"). dynamic_shared and static_shared: bytes that one block uses. threads: of one block.
    includes: directories that the source needs. nvrtc_header: what NVRTC must include before the source."""

    language: str
    target: str
    source: str
    dynamic_shared: int
    static_shared: int
    threads: int
    includes: tuple[str, ...] = ()
    nvrtc_header: str = ""


@dataclass(frozen=True)
class Failure:
    """How lowering or assembling went wrong: a kind of `expectation.FAILURES`, and what was said."""

    kind: str
    message: str
