"""The protocol of a measurement, declared as data: what is written into every file of timings."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

_FEWEST = 3  # repeats of a trial, however long they take
_MOST = 60.0  # seconds of all calls of one kernel on one case, at their fewest

WRITE_READ, WRITE = "write+read", "write"
FLUSHES = {
    WRITE_READ: "before each call a buffer larger than the last cache is written, then another one is read",
    WRITE: "before each call a buffer larger than the last cache is written, and left for the call to push out",
}


@dataclass(frozen=True)
class Protocol:
    """How one kernel is timed on one case.

    A run is ``warmup`` untimed calls and ``trials`` trials of ``repeats`` calls; ``runs`` of them, each on memory of
    its own, show how far two runs of the same kernel differ. ``flush`` names what is done to the last cache before each
    call (`FLUSHES`), to buffers of ``flush_bytes`` at least: times under different ones are not comparable.
    ``longest``: seconds of a run's calls, beyond which a trial makes fewer repeats, and the record says how many.
    """

    warmup: int
    repeats: int
    trials: int
    runs: int
    flush_bytes: int
    longest: float
    flush: str = WRITE_READ

    def repeats_of(self, seconds: float) -> int:
        """Repeats of a trial whose calls take ``seconds`` each."""
        possible = self.longest / (self.trials * seconds) if seconds > 0 else math.inf
        return max(_FEWEST, min(self.repeats, int(min(possible, self.repeats))))

    def warmup_of(self, seconds: float) -> int:
        """Untimed calls that take ``seconds`` each: at least one for each of the two draws."""
        possible = self.longest / (4 * seconds) if seconds > 0 else math.inf
        return max(2, min(self.warmup, int(min(possible, self.warmup))))

    def too_slow(self, seconds: float) -> str | None:
        """Why a kernel whose calls take ``seconds`` each is not timed, or None."""
        calls = self.runs * (4 + self.trials * (_FEWEST + 2))
        if calls * seconds <= _MOST:
            return None
        return f"one call takes {seconds:.3g} s: the {calls} calls that a figure needs take more than {_MOST:g} s"

    def record(self) -> dict[str, Any]:
        """The protocol in words and numbers."""
        return {
            **asdict(self),
            "figure": "median of the trials' means",
            "spread": "largest less smallest mean of all trials of all runs, over their median",
            "flushing": FLUSHES[self.flush],
            "inputs": "two draws in turn, which change places between trials",
            "outputs": "poisoned before each call; every result is compared with the judged one",
            "novelty": "calls on values never seen before must not take longer",
            "compilation": "outside, and validation of arguments too",
        }


DEVICE = Protocol(warmup=10, repeats=50, trials=3, runs=2, flush_bytes=256 << 20, longest=12.0)
CPU = Protocol(warmup=2, repeats=10, trials=3, runs=2, flush_bytes=32 << 20, longest=4.0)


def protocol_of(device: str) -> Protocol:
    """The protocol on a type of device."""
    return CPU if device == "cpu" else DEVICE
