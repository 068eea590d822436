"""Imports point one way: the engine imports no other folder, and its subpackages only those below them."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import conformance
from conformance.registry import ROOT

ENGINE = ROOT / "conformance"
ABOVE = ("references", "kernels", "matrices", "reports", "benchmarks", "tests")
ENTRY = ("conformance.__main__", "conformance.plugin")  # where Python and pytest come in
TABLES = ("expectations", "cases")  # what the other modules beside __init__.py read: rules and matrices
UPWARDS = {
    # a rule set's cells are expanded as those of a matrix
    ("conformance.expectations.rule_set", "conformance.cases.matrix"),
    ("conformance.expectations.rule_set", "conformance.cases.matrix_file"),
    # predictions are kept beside the results of the call that they are about
    ("conformance.verdicts.joint", "conformance.diagnosis.predictions"),
}


@functools.cache
def modules() -> dict[str, Path]:
    """All modules of the engine by name; packages by theirs."""
    found = {}
    for path in ENGINE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.Module, within_functions: bool) -> Iterator[str]:
    """The absolute names of what a module imports when it runs: not those for type checkers."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in modules() else node.module for name in whole)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            todo += node.orelse
        elif within_functions or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += ast.iter_child_nodes(node)


@functools.cache
def graph(within_functions: bool) -> dict[str, set[str]]:
    return {name: set(imports(ast.parse(path.read_text(encoding="utf-8")), within_functions))
            for name, path in modules().items()}


def subpackage(module: str) -> str | None:
    """That a module belongs to; None for the modules beside ``conformance/__init__.py``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ENGINE / parts[1]).is_dir() else None


def order() -> list[str]:
    """The subpackages, the lowest first, as the engine's docstring lists them."""
    return re.findall(r"^    (\w+)  ", conformance.__doc__ or "", re.MULTILINE)


def edges(within_functions: bool = True) -> Iterator[tuple[str, str]]:
    for module, targets in graph(within_functions).items():
        yield from ((module, target) for target in targets if target.split(".")[0] == "conformance")


def test_the_docstring_lists_all_subpackages_and_each_says_what_it_holds() -> None:
    packages = [path.parent for path in ENGINE.glob("*/__init__.py")]
    assert sorted(order()) == sorted(path.name for path in packages)
    for path in packages:
        assert ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8"))), path.name


def test_the_engine_imports_no_other_folder() -> None:
    found = [(module, target) for module, targets in graph(True).items() for target in targets
             if target.split(".")[0] in ABOVE]
    assert found == []


def test_subpackages_import_only_those_below_them() -> None:
    """Also within functions."""
    rank = {name: place for place, name in enumerate(order())}
    upwards = set()
    for module, target in edges():
        above, below = subpackage(module), subpackage(target)
        if above and below and rank[above] < rank[below]:
            upwards.add((module, target))
    assert upwards == UPWARDS


def test_the_modules_beside_them_import_only_tables() -> None:
    found = [(module, target) for module, target in edges()
             if subpackage(module) is None and module not in ENTRY and subpackage(target) not in (None, *TABLES)]
    assert found == []
    assert [edge for edge in edges() if edge[1] in ENTRY] == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """At import time; functions may import what is above their module."""
    ours = {module: {target for target in targets if target in modules() and target != module}
            for module, targets in graph(False).items()}
    del ours["conformance"]  # runs before every other module
    graphlib.TopologicalSorter({module: targets - {"conformance"} for module, targets in ours.items()}).prepare()
