"""Turns at a device: any number of processes may judge on it at a time, and one may time while nobody judges.

A process that wants to time holds the gate while it waits, so that no new judging begins and its turn comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conformance.disk_cache import cache_dir, hold


@dataclass(frozen=True)
class Turns:
    """The turns at one device, named alike by every process that uses it. Locks end with their process."""

    device: str
    directory: Path

    @contextlib.contextmanager
    def judging(self) -> Iterator[None]:
        """Together with others that judge."""
        with contextlib.ExitStack() as held:
            with hold(self.directory, f"{self.device} gate"):
                held.enter_context(hold(self.directory, self.device, shared=True))
            yield

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Alone."""
        with hold(self.directory, f"{self.device} gate"), hold(self.directory, self.device):
            yield


def turns_at(device: str) -> Turns:
    """The turns at a device of this machine, those of other runs included."""
    return Turns(device, cache_dir() / "turns")
