"""Handing generated code to the vendor's assembler: does it take the code, and what does each thread use?

Of the ways that this machine has, the first that knows the target and can compile what the code includes decides. None
found, or none that can, is a reason for "not assembled", never a pass, and no fault of the code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.disk_cache import cache_dir, hold, keep, kept
from conformance.lanes import process_group
from conformance.lanes.toolchains import PROBES, WANTED, Toolchain, toolchains
from conformance.route import Failure, Lowered

_UNKNOWN = re.compile(  # how compilers say that they do not know a target
    r"unsupported (hip )?gpu architecture|invalid target id|is not defined for option|invalid value for --gpu-arch",
    re.IGNORECASE,
)
_SHOWN = 500  # characters of a compiler's message


@dataclass(frozen=True)
class Assembled:
    """``figures``: registers of a thread, bytes that it spills, and static shared memory in bytes, as far as they were
    told. ``by``: the name of the toolchain."""

    figures: Mapping[str, int]
    by: str


@dataclass(frozen=True)
class NotAssembled:
    """Why nothing here can assemble the code."""

    reason: str


Answer = Assembled | Failure | NotAssembled
_refused: dict[str, Failure] = {}  # of this process only: what was missing may be installed by the next run


def assemble(lowered: Lowered, seconds: float) -> Answer:
    """What the assembler makes of the code, all in ``seconds`` (0 = no limit). What it took is kept on disk, keyed by
    source, target and the toolchain's version."""
    if lowered.language not in WANTED:
        return NotAssembled(f"no assembler is known for {lowered.language}")
    end = time.monotonic() + seconds
    reasons: list[str] = []
    for chain in toolchains(lowered.language):
        left = seconds and max(0.1, end - time.monotonic())
        found = _remembered(lowered, chain, functools.partial(_able, lowered, chain, left))
        if not isinstance(found, NotAssembled):
            return found
        reasons.append(found.reason)
    return NotAssembled("; ".join(dict.fromkeys(reasons)) or f"no assembler ({WANTED[lowered.language]})")


def _remembered(code: Lowered, chain: Toolchain, make: Callable[[], Answer]) -> Answer:
    """What a toolchain made of some code before, or makes of it now."""
    key = hashlib.sha256(f"{code}\n{chain.name}\n{[*map(_version, chain.files)]}".encode()).hexdigest()[:32]
    if key in _refused:
        return _refused[key]
    entry = cache_dir() / "assembled" / f"{key}.json"
    with hold(cache_dir() / "locks", key):
        if (text := kept(entry)) is not None:
            return Assembled({name: int(value) for name, value in json.loads(text).items()}, chain.name)
        found = make()
        if isinstance(found, Assembled):
            keep(entry, json.dumps(dict(found.figures)))
        elif isinstance(found, Failure) and found.kind == "refused-by-compiler":
            _refused[key] = found
        return found


def _able(lowered: Lowered, chain: Toolchain, seconds: float) -> Answer:
    """The code, after a probe showed that the toolchain knows the target; when the code is refused, a second one shows
    whether it is the headers that this toolchain lacks or cannot read."""
    empty = PROBES[lowered.language]
    refusal = _refusal(replace(lowered, source=empty, includes=(), nvrtc_header=""), chain, seconds)
    if refusal:
        unknown = f"{chain.name} does not know {lowered.target}"
        return NotAssembled(unknown if _UNKNOWN.search(refusal) else f"for {lowered.target}: {refusal}")
    found = _run(lowered, chain, seconds)
    headers = "".join(f"{line}\n" for line in lowered.source.splitlines() if line.startswith("#include"))
    if headers and isinstance(found, Failure) and found.kind == "refused-by-compiler":
        refusal = _refusal(replace(lowered, source=headers + empty), chain, seconds)
        if refusal:
            return NotAssembled(f"what the code includes: {refusal}")
    return found


def _refusal(probe: Lowered, chain: Toolchain, seconds: float) -> str:
    """What the toolchain has against a kernel that does nothing, "" when it takes it."""
    found = _remembered(probe, chain, functools.partial(_run, probe, chain, seconds))
    return "" if isinstance(found, Assembled) else found.message if isinstance(found, Failure) else found.reason


def _run(lowered: Lowered, chain: Toolchain, seconds: float) -> Assembled | Failure:
    end = time.monotonic() + seconds
    said = ""
    with tempfile.TemporaryDirectory(prefix="conformance-assemble-") as name:
        source = Path(name) / ("kernel.cu" if lowered.language == "cuda" else "kernel.hip")
        source.write_text(lowered.source, encoding="utf-8")
        for command in chain.commands(lowered, source):
            try:
                status, output = process_group.run(command, seconds and max(0.1, end - time.monotonic()), Path(name))
            except OSError as error:
                return Failure("process-exit", f"{chain.name}: {command[0]} cannot be run: {error.strerror}")
            output = output.replace(f"{name}{os.sep}", "")  # the same words for every configuration
            if status is None:
                return Failure("hang", f"{chain.name} was still running after {seconds:.3g} s")
            if status < 0:
                return Failure("compiler-abort", f"{chain.name} ended by signal {-status}")
            if status:
                return Failure("refused-by-compiler", f"{chain.name}: {_first_error(output)}")
            said += output
    return Assembled(_numbers(said, chain.figures), chain.name)


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(error|fatal)\b", line, re.IGNORECASE)] or lines
    return telling[0][:_SHOWN] if telling else "no message"


def _numbers(said: str, patterns: Mapping[str, str]) -> dict[str, int]:
    """The largest value of each figure over all functions of the code; figures that are not reported are left out."""
    found = {name: [int(text) for text in re.findall(pattern, said)] for name, pattern in patterns.items()}
    return {name: max(values) for name, values in found.items() if values}


@functools.cache
def _version(file: str) -> str:
    """What a program says of itself; of a library, its size and age."""
    if ".so" in Path(file).name:
        with contextlib.suppress(OSError):
            state = os.stat(file)
            return f"{file} {state.st_size} {state.st_mtime_ns}"
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run([file, "--version"], capture_output=True, text=True, errors="replace", timeout=60,
                              check=False).stdout
    return ""
