"""What ends a launch: a kernel raised, cannot be captured, or took away the memory that it was given."""

from __future__ import annotations

import dis


class KernelRaised(Exception):
    """A kernel raised; ``__cause__`` is what it raised. Tells its faults from those of the suite."""


class Damaged(KernelRaised):
    """A kernel did something to the memory of its arguments after which nothing can be compared; says what."""


class CaptureFailed(KernelRaised):
    """A kernel cannot be captured in a CUDA graph."""


def raised_by_code(error: BaseException) -> bool:
    """Whether a ``raise`` statement raised it: Ctrl-C arrives between statements."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
