"""Running a compiler so that nothing of it outlives its time limit: compilers start processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path


def run(command: Sequence[str], seconds: float, folder: Path) -> tuple[int | None, str]:
    """(exit status, stdout and stderr) of a command started in ``folder``; a status below 0 is minus the signal.

    After ``seconds`` (0 = no limit) the command and all that it started are killed, and the status is None. Raises
    OSError when it cannot be started.
    """
    with tempfile.TemporaryFile() as said:  # a pipe would stay open as long as any child of the command holds it
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
                                   cwd=folder, start_new_session=True)
        status: int | None = None
        try:
            status = process.wait(seconds or None)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if status is None:
                end_group(process.pid)
                process.wait()
        said.seek(0)
        return status, said.read().decode("utf-8", "replace")


def end_group(leader: int) -> None:
    """Kill a process and all others of the group that it leads; nothing happens where it leads none."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
