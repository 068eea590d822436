"""What a worker leaves behind when a case kills it: a per-case time limit and a stack file that outlives it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

_CONTEXT_LOST = "CONTEXT LOST: "
_FRAMES = 30  # of one thread, the innermost


class CrashLog:
    """Where one process dumps its stack: the file of a worker, or stderr where there are no workers.

    Segfaults and aborts are dumped by faulthandler's signal handlers; a case over its time limit is dumped by
    faulthandler's watchdog thread, which needs no GIL and then ends the process.
    """

    def __init__(self, path: Path | None) -> None:
        self._in_worker = path is not None
        # pytest redirects stderr while a test runs: without a file, keep the real one
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if path else os.dup(2)

    def call(self, label: str, seconds: float, function: Callable[[], Any]) -> Any:
        """``function()`` within ``seconds`` (0 = no limit); every stack dumped meanwhile names ``label``."""
        self._arm(seconds)
        try:
            return named(label, function)()
        finally:
            self._disarm(seconds > 0)

    def _arm(self, seconds: float) -> None:
        faulthandler.disable()  # pytest, or a library that a kernel loaded, may have put its own handlers in place
        faulthandler.enable(self._file)
        self._on_interrupt = signal.getsignal(signal.SIGINT)
        if self._in_worker:
            # Ctrl-C ends a worker at once; KeyboardInterrupt is then always a kernel's own
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if seconds > 0:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def _disarm(self, timed: bool) -> None:
        if timed:  # it waits for a thread to end, which takes a millisecond
            faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGINT, self._on_interrupt)

    def give_up(self, reason: str) -> None:
        """End this worker: its GPU context is lost, so the cases that follow must run in a fresh process. Of what CUDA
        says the first line is the reason."""
        if self._in_worker:
            first, *more = reason.splitlines()
            text = "\n".join((f"{first} (the GPU context is lost; later cases run in a fresh worker)", *more))
            os.write(self._file, f"{_CONTEXT_LOST}{text}\n".encode("utf-8", "backslashreplace"))
            os._exit(70)


def named(label: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """``function`` called from a frame whose name is ``label``: a stack dump shows names of code, never values."""

    def frame() -> Any:
        return function()

    # faulthandler writes 500 characters of a name at most
    code = frame.__code__.replace(co_name=label[:500])
    return FunctionType(code, globals(), label, None, frame.__closure__)


@dataclass(frozen=True)
class Death:
    """How a worker ended: the state of the case it was running, a sentence, the stack it left, and the label of what
    it was doing (each "" when not known)."""

    worker: str
    state: str
    sentence: str
    stack: str = ""
    label: str = ""


def read_death(worker: str, path: Path, limit: float, status: int | None) -> Death:
    """From a dead worker's stack file, and its exit status as subprocess gives it (None when not known)."""
    try:
        dump = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        dump = ""
    if _CONTEXT_LOST in dump:
        return Death(worker, "crash", dump.split(_CONTEXT_LOST, 1)[1].splitlines()[0], dump)
    stack, label = _relevant(dump)
    if dump.startswith("Timeout"):
        sentence = f"was still running after {limit:g} s; the worker was ended (--case-timeout)"
        return Death(worker, "timeout", sentence, stack, label)
    first = next((line for line in dump.splitlines() if line.startswith("Fatal Python error")), "")
    return Death(worker, "crash", f"killed its worker ({first or _how_it_ended(status)})", stack, label)


def _relevant(dump: str) -> tuple[str, str]:
    """A dump without pytest's own frames, idle threads and the list of extension modules; and the label in it."""
    kept: list[str] = []
    label = ""
    for block in re.split(r"\n\n|\n(?=Thread )", dump):
        inner, ours, outer = block.partition(f'  File "{__file__}", line ')
        if ours:
            label = outer.splitlines()[0].partition(" in ")[2]
        elif block.startswith(("Thread ", "Extension modules:")):
            continue
        lines = inner.rstrip().splitlines()
        kept += lines[:_FRAMES] + [f"  ... {len(lines) - _FRAMES} outer frames"] * (len(lines) > _FRAMES)
    return "\n".join(kept), label


def _how_it_ended(status: int | None) -> str:
    """Words for an exit status of which no stack was left."""
    if status is None:
        return "no stack was left"
    if status >= 0:
        return f"the process ended itself with exit code {status}; no stack was left"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    why = ", for example by the system when memory ran out" if name == "SIGKILL" else ""
    return f"ended by {name}{why}; no stack was left"


def end_leftovers(variables: Mapping[str, str]) -> None:
    """Kill every process that was started with all these environment variables: the compilers of a worker that ended
    over its time limit, which would go on without it. Where there is no /proc, none is found."""
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            if wanted <= set((place / "environ").read_bytes().split(b"\0")):
                os.kill(int(place.name), signal.SIGKILL)


def exit_status(process: Any, patience: float = 2.0) -> int | None:
    """Exit code, or minus the signal, of a process (``subprocess.Popen``) that closed its pipes; None if unknown."""
    try:
        return int(process.wait(timeout=patience))
    except Exception:  # it lingers on, or it is none of ours (xdist over ssh)
        return None
