"""``conformance repro CASE``: one pytest line that reruns a case, or a Python file of its own that shows the fault."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path

import torch

from conformance.case import Case
from conformance.cases.options import Selection
from conformance.commands.lookup import find_case, find_kernels, pytest_line, settings_of
from conformance.environment import ABSENT
from conformance.errors import ConformanceError, NoAnswer
from conformance.judging.judge import torch_device
from conformance.kernel import Kernel
from conformance.launching.snapshot import checksum
from conformance.operator import Shared
from conformance.registry import ROOT, import_root, operator, selector
from conformance.result import Settings, why_not_run

TEMPLATE = Path(__file__).with_name("standalone.py")
_FILE_SECONDS = 300
_BEGIN, _END = '# <<< filled in by "conformance repro"', "# >>>"


def repro(text: str, selection: Selection, kernel_name: str | None, target: Path | None,
          shrink_for: float | None = None) -> None:
    """Print the pytest line on stdout; with ``target``, also write the standalone file (told on stderr).

    shrink_for: seconds; the file then is of the smallest case that fails alike, and is run before it is handed out.
    Raises ConformanceError for an unknown case, kernel or architecture, when a file is asked for and several
    kernels are left, when the file cannot be written, and when there is nothing to shrink or the file shows nothing.
    """
    wanted = find_case(text, selection.data)
    chosen = find_kernels(wanted.case.operator, selection.kernels, kernel_name or wanted.kernel)
    runs = settings_of(selection)
    if len(runs) != 1:
        raise ConformanceError(f"repro takes one architecture, not {len(runs)}: --arch {runs[0].arch}")
    settings = runs[0]
    if shrink_for is not None and not (math.isfinite(shrink_for) and shrink_for > 0):
        raise ConformanceError(f"--within {shrink_for:g}: give seconds above 0, as in --within 60")
    if shrink_for is not None and target is None:
        raise ConformanceError("--minimise needs --write FILE: the smallest case stands in no tier")
    if target is not None:
        if settings.device == ABSENT:
            raise ConformanceError(f"{settings.arch} is not here: a file can only repeat what is executed")
        if len(chosen) != 1:
            known = ", ".join(kernel.name for kernel in chosen)
            raise ConformanceError(f"a file reproduces one kernel: give --kernel NAME (here: {known})")
        if shrink_for is None:
            write_file(target, wanted.case, chosen[0], settings)
        else:
            _write_smallest(target, wanted.case, chosen[0], settings, shrink_for)
        print(f"wrote {target}: run it with 'python {target}'", file=sys.stderr)
    print(pytest_line(wanted.case, chosen, settings))
    for kernel in chosen:
        try:
            reason = None if settings.device == ABSENT else why_not_run(wanted.case, kernel, settings)
            remark = f"{kernel.name} does not run this case here: {reason}" if reason else ""
        except NoAnswer as error:
            remark = f"on {kernel.name} this case ends in an error: {error}"
        if remark:
            print(f"note: {remark}", file=sys.stderr)


def _write_smallest(target: Path, case: Case, kernel: Kernel, settings: Settings, seconds: float) -> None:
    """Shrink the case, write its file and run it. The case is first run in a process of its own, which it may end."""
    from conformance.commands.minimise import minimise

    write_file(target, case, kernel, settings)
    _confirm(target, "the case as it was given")
    found = minimise(case, kernel, settings, seconds)
    write_file(target, found.case, kernel, settings)
    _confirm(target, found.case.id)
    now = found.case.params
    changed = [f"{name} {value} -> {now.get(name, 'left out')}" for name, value in case.params.items()
               if now.get(name) != value]
    ended = f" (ended after {seconds:g} s)" if found.cut_short else ""
    print(f"smallest of {found.tried} cases{ended}: {found.case.id}\n{', '.join(changed) or 'nothing was left out'}\n"
          f"{found.result.message}\nconfirmed: the file was run and shows the failure", file=sys.stderr)


def _confirm(target: Path, what: str) -> None:
    """Run a written file. Raises ConformanceError unless it shows a failure, exit code 1."""
    try:
        done = subprocess.run([sys.executable, str(target)], capture_output=True, text=True, timeout=_FILE_SECONDS,
                              check=False)
    except subprocess.TimeoutExpired:
        raise ConformanceError(f"{what} was not done after {_FILE_SECONDS} s: an endless kernel is not shrunk; "
                               f"{target} repeats it") from None
    if done.returncode == 1:
        return
    if done.returncode < 0 or done.returncode > 2:
        raise ConformanceError(f"{what} ends the process (exit code {done.returncode}): it is not shrunk; {target} "
                               "repeats it")
    said = (done.stderr or done.stdout).strip().splitlines()[-1:]
    raise ConformanceError(f"{what} does not fail by itself: {''.join(said)}")


def write_file(target: Path, case: Case, kernel: Kernel, settings: Settings) -> None:
    """Write a Python file that rebuilds the case's inputs and shows how the kernel's result differs.

    An earlier file of this kind is replaced; any other file is left alone. Raises ConformanceError then, and when
    the file cannot be written.
    """
    try:
        if target.exists() and _BEGIN not in target.read_text(encoding="utf-8", errors="replace"):
            raise ConformanceError(f"{target} exists and is no reproduction file: choose another name")
        target.write_text(file_text(case, kernel, settings), encoding="utf-8")
        target.chmod(0o755)
    except OSError as error:
        raise ConformanceError(f"cannot write {target}: {error.strerror or error}") from None


def file_text(case: Case, kernel: Kernel, settings: Settings) -> str:
    """The template with this case's values in place of its own."""
    root = import_root(kernel.module)
    values = {
        "CASE": case.id,
        "KERNEL": kernel.name,
        "KERNELS": (selector(kernel),),
        "SIZES": settings.sizes,
        "DEVICE": settings.device,
        "ARCH": settings.arch,
        "CHECKOUT": str(ROOT),
        "PATHS": (str(root),) if root else (),
        "CHECKSUMS": _checksums(case, kernel, settings),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    head, _, rest = text.partition(f"{_BEGIN}\n")
    block, _, tail = rest.partition(f"{_END}\n")
    lines = []
    for line in block.splitlines():
        name = line.partition("=")[0].partition(":")[0].strip()
        target, comment = line.partition("=")[0].rstrip(), line.partition("  # ")[2]
        lines.append(f"{target} = {values[name]!r}{f'  # {comment}' if comment else ''}")
    shebang, _, head = head.partition("\n")
    head = head.partition("\n")[2]  # the template's own remark
    made = '# Written by "conformance repro" for one case; it needs the suite\'s checkout and torch.\n'
    text = "\n".join([shebang, made + head + _BEGIN, *lines, _END, tail])
    ast.parse(text)
    return text


def _checksums(case: Case, kernel: Kernel, settings: Settings) -> dict[str, int] | None:
    """Sums of the inputs, by which the file can tell that it rebuilt the same ones; None where building them now
    would be slow (official sizes without a GPU) or the case does not run here."""
    slow = settings.device == "cpu" and settings.sizes == "official"
    try:
        if slow or why_not_run(case, kernel, settings):
            return None
    except NoAnswer:  # the file shows it
        return None
    with torch.no_grad():
        call = operator(case.operator).inputs(case, settings.sizes, torch_device(settings), Shared())
        call.set_poison(1)
        return {name: checksum(value) for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
