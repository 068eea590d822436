"""A run that a kernel ends in the middle never looks like a success.

``os._exit(0)``, or replacing the process by another program, ends a run before its end line and pages, with an exit
code that says nothing is wrong. Where workers judge, the controller sees them die; but nobody watches the controller,
which imports the kernels' modules too, and a run without workers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import posix
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

ENDED = 70  # exit code in the place of 0
_NAMES = ("_exit", "execv", "execve")  # every os.exec* comes down to the last two
_real = {name: getattr(os, name) for name in _NAMES}
_owner = 0  # the process that is guarded; children that it forks may end as they like
_stderr = 2


def end_process(status: int) -> NoReturn:
    """``os._exit`` for the suite's own use."""
    _real["_exit"](status)
    raise AssertionError("unreachable")


def end_without_teardown() -> None:
    """Let this process end right after its exit handlers, without the second in which the interpreter takes torch and
    its GPU apart. For workers, at the end of their run: what they had to tell is told."""

    def end() -> None:
        atexit.unregister(end)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        end_process(0)

    atexit.register(end)


def guard() -> None:
    """From here on this process does not end by ``os._exit(0)`` and is not replaced. Children are not concerned."""
    global _owner, _stderr
    _owner = os.getpid()
    with contextlib.suppress(OSError):
        _stderr = os.dup(2)  # pytest redirects it while a test runs
    for name in _NAMES:
        for module in (os, posix):
            setattr(module, name, _guarded(name))


def unguard() -> None:
    """The run is over: the process may end as it likes."""
    global _owner
    _owner = 0
    for name, function in _real.items():
        for module in (os, posix):
            setattr(module, name, function)


def _guarded(name: str) -> Callable[..., Any]:
    def act(*given: Any, **named: Any) -> Any:
        status = named.get("status", *given[:1])
        if os.getpid() != _owner or (name == "_exit" and status != 0):
            return _real[name](*given, **named)
        with contextlib.suppress(Exception):  # whatever state the stream is in
            what = "os._exit(0)" if name == "_exit" else f"os.{name}({status!r:.80}, ...)"
            text = f"\nERROR: {what} was called in the middle of the run; this run has not passed\n{_stack()}"
            os.write(_stderr, text.encode("utf-8", "backslashreplace"))
        end_process(ENDED)

    return act


def _stack() -> str:
    """Who called, without the frames of the test runner."""
    runner = ("pluggy", "_pytest", os.path.basename(__file__))
    frames = [frame for frame in traceback.extract_stack() if not any(name in frame.filename for name in runner)]
    return "".join(traceback.format_list(frames[-12:]))
