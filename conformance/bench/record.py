"""Lines of a file of timings. Needs no torch: the controlling process writes the lines of cases that were not timed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from conformance.result import REJECTED

SCHEMA = 1
TIMING = "timing"  # the member with which a timing travels beside its result
TIMED, NOT_TIMED = "timed", "not-timed"
_PLAIN = ("plain", "eager")
_SAME = ("case", "operator", "variant", "kernel", "tiers", "params", "path", "level", "worker")


def why_not(result: Mapping[str, Any]) -> str | None:
    """Why a case with this result line is not timed, None where it is: only what is right, in this run, is."""
    state = result["state"]
    if state != "pass":
        kind = f" ({result['kind']})" if result.get("kind") else ""
        message = f": {result['message'].splitlines()[0]}" if result.get("message") else ""
        return f"its verdict is {state}{kind}{message}"
    if result["lane"] != "execute":
        return f"it was not executed here, only taken to the lane {result['lane']}"
    if result["family"]:
        return f"it is a case of the edge family {result['family']}, which is judged only"
    if result["path"] == REJECTED:
        return "the kernel refused its arguments, as the contract allows"
    if (launch := result["params"].get("launch", _PLAIN[0])) not in _PLAIN:
        return f"its launch is {launch!r}: only plain calls are timed"
    return None


def verdict_id(result: Mapping[str, Any]) -> str:
    """What ties a timing to its verdict: 16 digits of the SHA-256 of the result's line in the records."""
    return verdict_of(spelled(result))


def verdict_of(line: bytes) -> str:
    """The same of the line as it stands there."""
    return hashlib.sha256(line).hexdigest()[:16]


def spelled(line: Mapping[str, Any]) -> bytes:
    """A line as it stands in a file, without its end."""
    return json.dumps(line, separators=(",", ":")).encode()


def timing_line(result: Mapping[str, Any], timing: Mapping[str, Any] | None) -> dict[str, Any]:
    """The line of one case and kernel: what it shares with its result line, and its timing or why there is none."""
    line = {"type": TIMING, **{name: result[name] for name in _SAME}, "verdict": verdict_id(result)}
    if timing is None:
        timing = {"state": NOT_TIMED, "reason": why_not(result) or "the worker that was to time it ended"}
    return {**line, **timing}
