"""Whether two runs are so alike that their results may stand in one record file, and what a plan is known by."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from conformance.runs.earlier import key

# Facts of the run line that results depend on. "changes" is a digest of what is not committed.
FACTS = ("arch", "here", "commit", "dirty", "changes", "torch", "tilelang", "python", "compiler", "driver", "device",
         "sizes", "data", "vacuity")
_SHOWN = 60


def plan_digest(pairs: Iterable[tuple[str, str]]) -> str:
    """What the (case id, kernel) pairs of a plan are known by, whatever their order."""
    whole = hashlib.sha256()
    for text in sorted(key(case, kernel) for case, kernel in pairs):
        whole.update(text.encode() + b"\n")
    return whole.hexdigest()[:16]


def source_digest(module: str) -> str | None:
    """What the source file of an imported module is known by; None for one without a readable file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else None
    except OSError:
        return None


def differences(old: Mapping[str, Any], new: Mapping[str, Any], facts: Iterable[str] = FACTS) -> dict[str, str]:
    """Fact -> "old there, new here", for each fact in which two run lines differ, kernels among them."""
    found = {name: _pair(old.get(name), new.get(name)) for name in facts if old.get(name) != new.get(name)}
    before, after = old.get("kernels", {}), new.get("kernels", {})
    for kernel in dict.fromkeys((*before, *after)):
        if kernel not in before or kernel not in after:
            found[f"kernel {kernel}"] = _pair(_presence(kernel in before), _presence(kernel in after))
            continue
        for name in ("operator", "promise", "module", "source"):
            one, other = before[kernel].get(name), after[kernel].get(name)
            if one != other:
                found[f"{name} of kernel {kernel}"] = _pair(one, other)
    return found


def listed(found: Mapping[str, str]) -> str:
    """Differences as one clause: "torch (2.11 there, 2.13 here), device (...)"."""
    return ", ".join(f"{name} ({pair})" for name, pair in found.items())


def _presence(there: bool) -> str:
    return "planned" if there else "not planned"


def _pair(old: object, new: object) -> str:
    return f"{_spelled(old)} there, {_spelled(new)} here"


def _spelled(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
