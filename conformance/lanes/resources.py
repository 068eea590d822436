"""What generated code uses of the hardware, and whether an architecture has that much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from conformance.arch import Arch
from conformance.route import Lowered

# What to look for in generated CUDA and HIP source: the instructions that decide how a kernel computes and moves data.
_INSTRUCTIONS: Mapping[str, str] = {
    "wgmma": r"\bwgmma_\w+|\bwgmma\.mma_async",
    "tcgen05.mma": r"\btcgen05_?mma\w*|\btcgen05\.mma",
    "mma.sync": r"\bmma_sync\b|\bmma\.sync",
    "mfma": r"\bmfma_\w+|__builtin_amdgcn_mfma\w*",
    "wmma": r"\bwmma_\w+|__builtin_amdgcn_wmma\w*",
    "tl::gemm": r"\btl::gemm\w*",
    "TMA": r"\btma_(load|store)\w*",
    "cp.async": r"\bcp_async_gs\w*|\bcp\.async",
    "ldmatrix": r"\bptx_ldmatrix\w*|\bldmatrix\b",
    "packed atomic add": r"\bAtomicAddx[24]\w*",
    "atomic add": r"\b[Aa]tomicAdd\b",
    "fused multiply-add": r"\bieee_fmaf\b|\b__fmaf_rn\b|\bfmaf\s*\(",
    "fp8 conversion": r"\(fp8_e[45]_\w*t\)\(|__nv_cvt_\w*fp8\w*",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _INSTRUCTIONS.items()}


def instructions(source: str) -> tuple[str, ...]:
    """Names of the instructions that matter as far as they stand in generated source (includes not expanded)."""
    body = "\n".join(line for line in source.splitlines() if not line.startswith("#include"))
    return tuple(name for name, pattern in _PATTERNS.items() if pattern.search(body))


def used(lowered: Lowered) -> dict[str, Any]:
    """Shared memory in bytes, threads of a block, and the instructions found."""
    return {"shared_bytes": lowered.dynamic_shared + lowered.static_shared, "threads": lowered.threads,
            "instructions": list(instructions(lowered.source))}


_VECTOR = re.compile(r"\bmake_(?:u?(?:char|short|int|long|longlong)|float|double|half|bfloat16)([234])\(")


def malformed(source: str) -> str | None:
    """What no compiler takes in generated CUDA or HIP source, where it can be told without one, or None: a vector made
    of another number of elements than it has, as by TileLang's code for HIP from 16 zeros of 8 bits."""
    for match in _VECTOR.finditer(source):
        given, depth = 1, 1
        for letter in source[match.end():]:
            depth += (letter in "([{") - (letter in ")]}")
            given += letter == "," and depth == 1
            if depth == 0:
                break
        if given != int(match[1]):
            return f"{match[0]}...) is given {given} elements, which no compiler takes"
    return None


def beyond(uses: Mapping[str, Any], arch: Arch) -> str | None:
    """What the code uses beyond the architecture's limits, or None. A limit that nobody could source limits nothing;
    `unknown_limits` names those."""
    found = []
    for name, what in (("shared_bytes", "bytes of shared memory"), ("threads", "threads")):
        limit = arch.limit(name)
        if limit is not None and uses[name] > limit:
            found.append(f"uses {uses[name]} {what} in a block, {arch.name} has {limit}")
    return "; ".join(found) or None


def unknown_limits(arch: Arch) -> tuple[str, ...]:
    return tuple(name for name in ("shared_bytes", "threads") if arch.limit(name) is None)
