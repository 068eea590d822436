"""How far compiling ahead has come: each process tells a file of its own, the controlling one reads them all."""

from __future__ import annotations

import contextlib
from pathlib import Path

_PREFIX = "ahead-"


class Ahead:
    """Steps that one process has seen to, and all that there are. ``file``: where to tell, None = nowhere."""

    def __init__(self, folder: Path | None, worker: int) -> None:
        self._file = folder / f"{_PREFIX}{worker}" if folder else None
        self.done = self.total = 0

    def expect(self, more: int) -> None:
        self.total += more
        self._tell()

    def step(self) -> None:
        self.done += 1
        self._tell()

    def so_far(self) -> tuple[int, int]:
        """(done, total) of this process."""
        return self.done, self.total

    def _tell(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk hides progress and spoils nothing
                self._file.write_text(f"{self.done} {self.total}")


def so_far(folder: Path) -> tuple[int, int]:
    """(done, total) of all processes together. Each goes through the whole list from a place of its own and finds what
    another has done: so many have been seen to, at most."""
    done = total = 0
    for file in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):  # just being written
            own, all_of_them = map(int, file.read_text().split())
            done, total = done + own, max(total, all_of_them)
    return min(done, total), total
