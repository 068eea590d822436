"""What a folder of a zoo is about: one folder holds one zoo, and nothing that an earlier one left there."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conformance.errors import ConformanceError
from conformance.registry import matrices
from conformance.runs.recorder import lock

NAME = "zoo.json"
_ROUNDS = ("round-1", "round-2", "round-3", "complete")
Scope = Mapping[str, Any]  # operators, tiers, data, sizes, arch, complete


@contextlib.contextmanager
def claimed(folder: Path, scope: Scope, replaces: bool) -> Iterator[None]:
    """Hold the folder for a zoo of this scope; ``replaces``: also where it holds one of another scope, which goes.

    Raises ConformanceError for a folder of another scope, one in which another zoo runs, and one that cannot be
    written to.
    """
    place = folder / NAME
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(place.open("a+", encoding="utf-8", errors="replace"))
            lock(file.fileno(), place, "--out")
            file.seek(0)
            text = file.read()
            before = _parsed(text)
            if text.strip() and not replaces and (other := _differences(before, scope)):
                raise ConformanceError(f"--out {folder}: holds another zoo ({other}): name another folder, or delete "
                                       "that one")
            if text.strip() or replaces:
                _remove(folder, before)
            file.truncate(0)
            file.write(json.dumps(scope) + "\n")
            file.flush()
        except OSError as error:
            what = error.filename or place
            raise ConformanceError(f"{what}: cannot be written to: {error.strerror or error}") from None
        yield


def _parsed(text: str) -> Scope:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _differences(before: Scope, scope: Scope) -> str:
    """In words what the folder's zoo has otherwise, "" for nothing."""
    if not before:
        return f"{NAME} there says nothing of it"
    return ", ".join(f"{name} {_shown(before.get(name))} there, {_shown(value)} here"
                     for name, value in scope.items() if before.get(name) != value)


def _shown(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, list) else str(value)


def _remove(folder: Path, before: Scope) -> None:
    """The records and matrices of the zoo that was here, by the names that a zoo gives them."""
    operators = before.get("operators")
    for name in (*_ROUNDS, *(operators if isinstance(operators, list) else ())):
        if name in _ROUNDS or name in matrices():
            shutil.rmtree(folder / name, ignore_errors=True)
