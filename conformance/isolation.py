"""What a worker leaves behind when a case kills it: a per-case time limit and a stack file that outlives it."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
from typing import IO

_CONTEXT_LOST = "CONTEXT LOST: "


class CrashLog:
    """The stack file of one worker. Segfaults and aborts are dumped there by faulthandler's signal handlers; a
    case over its time limit is dumped by faulthandler's watchdog thread, which then ends the process."""

    def __init__(self, path: Path | None) -> None:
        self._file: IO[str] | None = path.open("w", encoding="utf-8") if path else None
        if self._file is not None:
            faulthandler.enable(self._file, all_threads=False)

    def arm(self, seconds: float) -> None:
        """Start the time limit of one case; 0 means none. Without a file the stack goes to stderr."""
        if seconds > 0:
            if self._file is not None:
                faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)
            else:
                faulthandler.dump_traceback_later(seconds, exit=True)

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()

    def give_up(self, reason: str) -> None:
        """End this worker: its GPU context is lost, so the cases that follow must run in a fresh process."""
        if self._file is not None:
            self._file.write(f"{_CONTEXT_LOST}{reason}\n")
            self._file.flush()
            os._exit(70)


def read_crash(path: Path, limit: float) -> tuple[str, str, str]:
    """(state, sentence, stack) of a dead worker, from its stack file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    if text.startswith("Timeout"):
        return "timeout", f"was still running after {limit:g} s; the worker was ended (--case-timeout)", text
    if _CONTEXT_LOST in text:
        return "crash", text.split(_CONTEXT_LOST, 1)[1].splitlines()[0], text
    first = next((line for line in text.splitlines() if line.startswith("Fatal Python error")), "")
    return "crash", f"killed its worker ({first or 'no stack was left: killed from outside, or out of memory'})", text
