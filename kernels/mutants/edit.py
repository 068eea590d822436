"""Mutants by editing source: a kernel of this package's neighbours with one passage of its text replaced.

The text that is replaced must stand in the module exactly once, so that a mutant never outlives the line it changes.
Modules that import an edited one are executed again as well, on the edited one; the originals are left alone.
"""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.errors import ConformanceError

Edit = tuple[str, str]
_REGISTERS = "from conformance import kernel, report_path"
_CAPTURES = "from conformance import report_path; from kernels.mutants.edit import captured as kernel"


@dataclass(frozen=True)
class Source:
    """What a module hands to ``@kernel``: operator, function and options, those that name the kernel left out."""

    operator: str
    function: Callable[..., Any]
    options: dict[str, Any]


def captured(operator: str, **options: Any) -> Callable[[Callable[..., Any]], Source]:
    """Stands for ``@kernel`` in edited modules: it registers nothing."""
    kept = {key: value for key, value in options.items() if key not in ("name", "about")}

    def capture(function: Callable[..., Any]) -> Source:
        native = options.get("native") or (options.get("name") or function.__name__,)
        return Source(operator, function, kept | {"native": native})

    return capture


def edited(package: str, name: str, modules: Sequence[str], edits: Mapping[str, Sequence[Edit]]) -> dict[str, Source]:
    """Kernels by operator that the last of ``modules`` defines once ``edits`` are made.

    package: where the edited modules are put. modules: in the order of their imports. edits: module -> (text, text in
    its place). Raises ConformanceError when a text does not stand exactly once in its module.
    """
    moved: dict[str, str] = {}
    module: ModuleType | None = None
    parent = sys.modules[f"{package}.{name}"] = ModuleType(f"{package}.{name}")
    parent.__path__ = []  # a package, so that its modules are found by name once this one has made them
    for original in modules:
        text = _changed(original, name, edits.get(original, ()))
        for known, copy in moved.items():
            text = text.replace(f"from {known} import", f"from {copy} import")
            package_of, _, short = known.rpartition(".")
            text = text.replace(f"from {package_of} import {short}\n", f"from {package}.{name} import {short}\n")
        if edits.get(original) or any(copy in text for copy in moved.values()) or original == modules[-1]:
            moved[original] = f"{package}.{name}.{original.rpartition('.')[2]}"
            module = _executed(moved[original], text.replace(_REGISTERS, _CAPTURES))
    found = [value for value in vars(module).values() if isinstance(value, Source)]
    for source in found:
        source.function.__qualname__ = f"{name}.{source.function.__name__}"
    return {source.operator: source for source in found}


def _changed(original: str, name: str, edits: Sequence[Edit]) -> str:
    file = importlib.import_module(original).__file__
    assert file is not None
    text = Path(file).read_text(encoding="utf-8")
    for old, new in edits:
        if text.count(old) != 1:
            raise ConformanceError(f"mutant {name}: {old!r} stands {text.count(old)} times in {file}: adapt the mutant "
                                   "to the changed kernel")
        text = text.replace(old, new)
    return text


def _executed(name: str, text: str) -> ModuleType:
    """A module made from text; its lines are known to tracebacks and to TileLang, which reads functions' sources."""
    file = f"<{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    module = ModuleType(name)
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(text, file, "exec", dont_inherit=True), module.__dict__)
    return module
