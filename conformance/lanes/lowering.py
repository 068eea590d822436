"""Generating a kernel's code for an architecture that need not be here, each time in a process that may die.

A server process imports TileLang once and forks a child for each configuration: a compiler that aborts, exits or hangs
takes the child with it and becomes a result. What was generated is kept on disk, keyed by the kernel's own source
files, so that the next run has it at once; failures that need not repeat (signals, time limits) are not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from conformance.arch import Arch
from conformance.disk_cache import cache_dir, hold, keep, kept
from conformance.environment import version
from conformance.errors import NotSupported
from conformance.expectations.rule import FAILURES
from conformance.kernel import Kernel
from conformance.lanes.process_group import end_group
from conformance.registry import ROOT, arch, kernels, selector
from conformance.route import Failure, Lowered

_VERSION = 3  # of what is kept
_SHOWN = 500  # characters of a compiler's message
_READ = 4 << 20  # bytes of a compiler's output
_LARGEST_FILE = 1 << 30  # bytes that a compiler may write to one file


def lower(kernel: Kernel, params: Mapping[str, str], arch_name: str, config: str, seconds: float) -> Lowered | Failure:
    """The code of one configuration, from disk or generated now within ``seconds`` (0 = no limit)."""
    table = arch(arch_name)
    facts = {name: fact.value for name, fact in table.facts.items()}
    text = (f"{_VERSION} {kernel.operator} {kernel.module} {kernel.name} {config} {version('tilelang')} "
            f"{_sources(kernel)} {arch_name} {table.language} {dict(table.target)} {facts}")
    key = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:32]
    entry = cache_dir() / "lowered" / f"{key}.json"
    with hold(cache_dir() / "locks", key):
        known = _read(entry)
        if isinstance(known, Failure) or (known is not None and wrong_with(known, table) is None):
            return known
        found = _in_child(kernel, params, arch_name, seconds)
        if isinstance(found, Lowered) or found.kind in ("refused", "refused-by-compiler"):
            keep(entry, json.dumps(asdict(found)))
        return found


def _sources(kernel: Kernel) -> str:
    """A hash of the files that a kernel's code may come from: all Python files of its top package, and those that
    this checkout offers to every kernel."""
    top = sys.modules.get(kernel.module.partition(".")[0])
    places = [Path(place) for place in getattr(top, "__path__", ())]
    files = sorted(file for place in places for file in place.rglob("*.py"))
    if not places and getattr(top, "__file__", None):
        files = [Path(str(top.__file__))]  # type: ignore[union-attr]
    files += sorted((ROOT / "kernels").glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _in_child(kernel: Kernel, params: Mapping[str, str], arch_name: str, seconds: float) -> Lowered | Failure:
    context = multiprocessing.get_context("forkserver")
    if importlib.util.find_spec("tilelang") is not None:
        context.set_forkserver_preload(["tilelang"])
    with tempfile.TemporaryDirectory(prefix="conformance-lower-") as folder:
        answer, said = Path(folder) / "answer.json", Path(folder) / "output"
        arguments = (kernel.operator, selector(kernel), kernel.name, dict(params), arch_name, str(answer), str(said))
        process = context.Process(target=_child, args=arguments, daemon=True)
        process.start()
        process.join(seconds or None)
        return _outcome(process, answer, said, seconds)


def _outcome(process: BaseProcess, answer: Path, said: Path, seconds: float) -> Lowered | Failure:
    alive = process.is_alive()
    if alive:
        if process.pid is not None:
            end_group(process.pid)
        process.kill()  # should it not have come to lead a group yet
        process.join()
    output = _end_of(said)
    if alive:
        return Failure("hang", f"still lowering after {seconds:g} s; {_tail(output)}")
    code = process.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        return Failure("compiler-abort", f"the compiler ended by {name}: {_tail(output)}")
    found = _read(answer)
    if code or found is None:
        return Failure("process-exit", f"the compiler's process ended with exit code {code}: {_tail(output)}")
    errors = [line for line in output.splitlines() if "error:" in line.lower()]
    if isinstance(found, Lowered) and errors:
        return Failure("soft-error", f"lowering reported success and wrote: {errors[0][:_SHOWN]}")
    return found


def _end_of(said: Path) -> str:
    """The last megabytes of what was written: a compiler in a loop writes more than memory holds."""
    with contextlib.suppress(OSError), open(said, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _READ))
        return file.read(_READ).decode("utf-8", "replace")
    return ""


def _tail(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-_SHOWN:] or "nothing was written"


def _child(
    operator: str, words: str, name: str, params: dict[str, str], arch_name: str, answer: str, said: str
) -> None:
    """Runs in the forked process: everything it prints goes to ``said``, its result to ``answer``."""
    os.setsid()  # what the compiler starts ends with it
    _bound_to_worker()
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(Path(answer).parent)  # what a compiler leaves behind goes with it
    try:
        kernel = next(k for k in kernels(operator, (words,)) if k.name == name)
        assert kernel.lower is not None
        lowered: Any = kernel.lower(params, arch(arch_name))
        wrong = wrong_with(lowered, arch(arch_name))
        found: Lowered | Failure = Failure("soft-error", f"lower() of {name} {wrong}") if wrong else lowered
    except NotSupported as reason:
        found = Failure("refused", str(reason))
    except (OSError, MemoryError, ImportError) as error:  # the machine's fault, which need not come again
        found = Failure("process-exit", f"{type(error).__name__}: {_first_line(error)}")
    except Exception as error:
        traceback.print_exc()
        found = Failure("refused-by-compiler", f"{type(error).__name__}: {_first_line(error)}")
    keep(Path(answer), json.dumps(asdict(found)))


def wrong_with(lowered: Any, table: Arch) -> str | None:
    """Why an answer of ``lower`` is no code for this architecture, or None."""
    if not isinstance(lowered, Lowered):
        return f"returned {type(lowered).__name__}, a Lowered is required"
    for name in ("language", "target", "source", "nvrtc_header"):
        if not isinstance(getattr(lowered, name), str):
            return f"returned {name} = {getattr(lowered, name)!r:.100}: a string is required"
    for name in ("dynamic_shared", "static_shared", "threads"):
        value = getattr(lowered, name)
        if type(value) is not int or value < 0:
            return f"returned {name} = {value!r:.100}: a whole number from 0 is required"
    if not all(isinstance(place, str) for place in lowered.includes):
        return f"returned includes = {lowered.includes!r:.100}: strings are required"
    if not lowered.source.strip():
        return "returned no source"
    if lowered.source.encode("utf-8", "replace").decode() != lowered.source:
        return "returned a source that cannot be encoded"
    target = table.target.get("arch") or table.target.get("mcpu") or lowered.target
    if lowered.language != table.language or _plain(lowered.target) != _plain(target):
        return (f"returned code for {lowered.language} {lowered.target!r}, {table.name} takes {table.language} "
                f"{target!r}")
    return None


def _plain(target: str) -> str:
    """A target without the features behind its name: "sm_90" of "sm_90a", "gfx942" of "gfx942:xnack-"."""
    name = target.partition(":")[0]
    return name.rstrip("af") if name.startswith("sm_") else name


def _bound_to_worker() -> None:
    """End with the worker, however that ends; limit what one file can grow to."""
    with contextlib.suppress(Exception):
        resource.setrlimit(resource.RLIMIT_FSIZE, (_LARGEST_FILE, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    worker = multiprocessing.parent_process()
    if worker is not None:

        def watch() -> None:
            worker.join()
            end_group(os.getpid())

        threading.Thread(target=watch, daemon=True).start()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:_SHOWN]


def _read(path: Path) -> Lowered | Failure | None:
    """What was kept; None when it is not there, or damaged."""
    text = kept(path)
    if text is None:
        return None
    try:
        fields: dict[str, Any] = json.loads(text)
        if "source" in fields:
            return Lowered(**fields | {"includes": tuple(fields["includes"])})
        found = Failure(**fields)
        return found if found.kind in FAILURES and isinstance(found.message, str) else None
    except (ValueError, TypeError, KeyError):
        return None
