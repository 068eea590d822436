"""Exceptions that end a run with one clear line, and those that a kernel may raise on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConformanceError(Exception):
    """Bad input from the user (option, file, name). Shown as one line, without a traceback."""


class NotSupported(Exception):
    """Raised by a kernel for a case it declares it cannot take: the result is "not-run" with this reason."""


class KernelRaised(Exception):
    """A kernel raised; ``__cause__`` is what it raised. Tells its faults from those of the suite."""


class CaptureFailed(KernelRaised):
    """A kernel cannot be captured in a CUDA graph."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> ConformanceError:
    """An error that names the unknown value, the closest known one and all known ones."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ConformanceError(f"unknown {what} {name!r}.{hint} Known: {', '.join(names) or 'none'}.")
