"""Finds what the other folders define: operators, matrices and kernels, by folder and by entry point."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from conformance.arch import Arch
from conformance.cases.matrix import Matrix, load_matrix
from conformance.decorator import all_registered, registered
from conformance.errors import ConformanceError, spelled_out, unknown_name
from conformance.expectations.files import read_arch
from conformance.kernel import Kernel

if TYPE_CHECKING:
    from conformance.operator import Operator

ROOT = Path(__file__).resolve().parent.parent
ENTRY_POINTS = "conformance.kernels"
MUTANTS = "kernels.mutants"


def put_checkout_first() -> None:
    """Make ``references`` and ``kernels`` mean this checkout's folders (a published package is called kernels too).

    Raises ConformanceError when another package of that name is already imported.
    """
    if sys.path[:1] != [str(ROOT)]:
        sys.path.insert(0, str(ROOT))
    for name in ("references", "kernels"):
        module = sys.modules.get(name)
        if module is not None and str(ROOT / name) not in map(str, getattr(module, "__path__", ())):
            raise ConformanceError(
                f"the package {name!r} was imported from {getattr(module, '__file__', '?')}, not from {ROOT / name}; "
                f"put {ROOT} first on PYTHONPATH"
            )


def _import(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ConformanceError as error:
        raise ConformanceError(f"{error}{_place_of(error)}") from error
    except SystemExit as error:
        raise ConformanceError(f"{what} {name} called sys.exit({error.code!r}) while it was imported") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said = " ".join(spelled_out(error).split())  # one line
        raise ConformanceError(f"{what} {name} cannot be imported: {said}{_place_of(error)}") from error


def _place_of(error: BaseException) -> str:
    """" (my_kernels.py, line 7)" where a module raised while it was imported, or called this package when that raised;
    "" where the error says so itself, or nothing of the module ran."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    own = [Path(frame.filename) for frame in frames]
    places = [(file.name, frame.lineno) for file, frame in zip(own, frames, strict=True)
              if ROOT / "conformance" not in file.parents and file.parent.name != "importlib"]
    return "" if isinstance(error, SyntaxError) or not places else " ({}, line {})".format(*places[-1])


@functools.cache
def operators() -> dict[str, Operator]:
    """Every operator that a module of ``references`` defines, by name."""
    from conformance.operator import Operator  # brings torch, which planning does without

    put_checkout_first()
    found: dict[str, Operator] = {}
    for info in pkgutil.iter_modules([str(ROOT / "references")]):
        contract = getattr(_import(f"references.{info.name}", "reference module"), "OPERATOR", None)
        if isinstance(contract, Operator):
            found[contract.name] = contract
    return found


def operator(name: str) -> Operator:
    """One operator. Raises ConformanceError that lists the known ones."""
    if name not in operators():
        raise unknown_name("operator", name, operators())
    return operators()[name]


def matrix_files() -> list[Path]:
    return sorted((ROOT / "matrices").glob("*.toml"))


@functools.cache
def matrices() -> dict[str, Matrix]:
    """Every matrix of ``matrices/*.toml`` by operator name. Needs no torch. Raises ConformanceError for one that has
    another file's name, and might hide that file's."""
    found = {}
    for path in matrix_files():
        of = found[path.stem] = load_matrix(path)
        if of.operator != path.stem:
            raise ConformanceError(f"{path}: operator = {of.operator!r}: must be the file's name, {path.stem!r}")
    return found


def matrix(name: str) -> Matrix:
    """The matrix of one operator. Raises ConformanceError that lists the known ones."""
    if name not in matrices():
        raise unknown_name("operator", name, matrices())
    return matrices()[name]


@functools.cache
def archs() -> dict[str, Arch]:
    """Every architecture of ``matrices/archs/*.toml`` by name."""
    return {table.name: table for table in map(read_arch, sorted((ROOT / "matrices" / "archs").glob("*.toml")))}


def arch(name: str) -> Arch:
    """One architecture; of one that has no table nothing is known."""
    return archs().get(name) or Arch(name)


def rule_set_file(name: str) -> Path:
    """``matrices/rule_sets/NAME.toml``. Raises ConformanceError that lists the known ones."""
    known = {path.stem: path for path in (ROOT / "matrices" / "rule_sets").glob("*.toml")}
    if name not in known:
        raise unknown_name("rule set", name, known)
    return known[name]


@functools.cache
def _load_kernels() -> None:
    put_checkout_first()
    for info in pkgutil.iter_modules([str(ROOT / "kernels")]):
        if info.ispkg and info.name != "mutants":
            _import(f"kernels.{info.name}", "kernel package")
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        _import(point.module, f"kernel module of entry point {point.name!r}:")
    _check_operators()


def _check_operators() -> None:
    for kernel in all_registered():
        if kernel.operator not in matrices():
            raise unknown_name(f"operator of kernel {kernel.name} in {kernel.module}:", kernel.operator, matrices())


def kernels(operator_name: str, wanted: Sequence[str] = ()) -> list[Kernel]:
    """The kernels of an operator: all, or those ``wanted`` by name or by importable module ("package.module").

    Raises ConformanceError for a name that is neither a known kernel of any operator nor a module, and for a
    module that defines no kernel.
    """
    _load_kernels()
    if not wanted:  # mutants may be loaded in this process, and are no part of any ordinary run
        return [kernel for kernel in registered(operator_name).values() if not kernel.module.startswith(MUTANTS)]
    chosen: dict[str, Kernel] = {}
    for name in sorted(wanted, key=_may_be_module, reverse=True):  # a name may be that of a kernel in a later module
        if not _named(name):
            _import_module(name)
    for name in wanted:
        chosen |= {kernel.name: kernel for kernel in _named(name) if kernel.operator == operator_name}
    return list(chosen.values())


def importable(name: str) -> str:
    """What ``--kernels`` names, as a kernel's or module's name: of a Python file, whose folder is put on ``sys.path``,
    its module's. Raises ConformanceError for a file that is not there, or cannot be imported by its name."""
    if not name.endswith(".py"):
        return name
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ConformanceError(f"--kernels {name}: there is no file {path}")
    if not path.stem.isidentifier():
        raise ConformanceError(f"--kernels {name}: {path.stem!r} is no module's name; rename the file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = importlib.util.find_spec(path.stem)
    if found is None or found.origin is None or Path(found.origin).resolve() != path:
        other = found.origin if found else "nothing"
        raise ConformanceError(f"--kernels {name}: Python takes {path.stem!r} for {other}; rename the file")
    return path.stem


def _named(name: str) -> list[Kernel]:
    """The kernels that the bodies of a module and the modules below it registered, by a factory elsewhere too; else
    those called so; else those of other modules that it has as its attributes."""
    everything = all_registered()
    inside = [kernel for kernel in everything if f"{kernel.module}.".startswith(f"{name}.")]
    called = [kernel for kernel in everything if kernel.name == name]
    attributes = vars(sys.modules[name]).values() if name in sys.modules else ()
    return inside or called or [kernel for kernel in everything if any(kernel is one for one in attributes)]


def _may_be_module(name: str) -> bool:
    """Whether a name without dots is a module's, as far as can be told without importing it; with dots it may be."""
    is_path = all(part.isidentifier() for part in name.split("."))
    return is_path and ("." in name or name in sys.modules or importlib.util.find_spec(name) is not None)


def _import_module(name: str) -> None:
    """Import a module that ``--kernels`` names. Raises ConformanceError when there is none, or no kernel in it."""
    if not _may_be_module(name):
        known = {kernel.name for kernel in all_registered() if not kernel.module.startswith(MUTANTS)}
        raise ConformanceError(f"{unknown_name('kernel', name, known)} A module is found through PYTHONPATH; a file is "
                               "named by its path, which ends in .py.")
    before = all_registered()
    _import(name, "kernel module")
    _check_operators()
    if not _named(name):
        others = sorted({kernel.module for kernel in all_registered() if kernel not in before})
        instead = f"; the modules that it imports define some: --kernels {','.join(others)}" if others else ""
        raise ConformanceError(
            f"module {name} defines no kernel: decorate a function with @conformance.kernel{instead}")


@functools.cache
def _loaded_by_itself() -> tuple[str, ...]:
    return ("kernels", *(point.module for point in importlib.metadata.entry_points(group=ENTRY_POINTS)))


def selector(kernel: Kernel) -> str:
    """What ``--kernels`` needs in a fresh process: the kernel's name, or its module where that is not loaded by
    itself."""
    inside = any(kernel.module == name or kernel.module.startswith(f"{name}.") for name in _loaded_by_itself())
    return kernel.name if inside and not kernel.module.startswith(MUTANTS) else kernel.module


@functools.cache
def _installed() -> frozenset[Path]:
    return frozenset(Path(path).resolve() for path in sysconfig.get_paths().values())


def import_root(module: str) -> Path | None:
    """The folder that must be on ``sys.path`` for a kernel's module; None for this checkout and for installed
    packages, which are found anyway."""
    top = sys.modules.get(module.partition(".")[0])
    places = [*getattr(top, "__path__", ())] or [getattr(top, "__file__", None)]
    if not places[0]:
        return None
    root = Path(places[0]).resolve().parent
    return None if root == ROOT or root in _installed() else root
