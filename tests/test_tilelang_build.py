"""The build helper: one compilation for all processes, and a cache that survives crashes and corruption.

Each child process builds the same tiny kernel into a cache of its own test; ``CXX`` names a script that logs every
call before it runs the real compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conformance import disk_cache
from kernels import tilelang_build

ROOT = Path(__file__).resolve().parent.parent
CHILD = """
import sys, torch
from conformance import disk_cache
from kernels import tilelang_build

def trace():
    import tilelang.language as T
    @T.prim_func
    def double(a: T.Tensor((64,), "float32"), b: T.Tensor((64,), "float32")):
        with T.Kernel(1) as block:
            for i in T.serial(64):
                b[i] = a[i] * 2.0
    return double

kernel = tilelang_build.load("double[64]", "c", trace, wait="--no-wait" not in sys.argv)
if kernel is None:
    print("nothing loaded")
else:
    a, b = torch.arange(64).float(), torch.zeros(64)
    kernel(a, b)
    print("right" if torch.equal(b, 2 * a) else "wrong")
"""
needs_compiler = pytest.mark.skipif(
    tilelang_build.missing("cpu") is not None, reason=str(tilelang_build.missing("cpu")))


class Workshop:
    """A cache directory, a logging compiler, and child processes that use both."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.log = folder, folder / "cache", folder / "calls"
        (folder / "child.py").write_text(CHILD)
        self.compiler(pause=0)

    def compiler(self, pause: float, fails: bool = False) -> None:
        real = shutil.which("g++") or shutil.which("clang++")
        script = self.folder / "cxx"
        script.write_text(
            "#!/bin/sh\n"
            f'if [ "$1" = --version ]; then exec {real} --version; fi\n'
            f"echo $$ >> {self.log}\nsleep {pause}\n"
            + ("echo broken >&2; exit 1\n" if fails else f'exec {real} "$@"\n')
        )
        script.chmod(0o755)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = os.environ | {"CXX": str(self.folder / "cxx"), "TILELANG_CACHE_DIR": str(self.cache),
                                    "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder)}
        return subprocess.Popen([sys.executable, str(self.folder / "child.py"), *arguments], env=environment, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)

    def run(self, *arguments: str) -> tuple[str, str]:
        return self.start(*arguments).communicate(timeout=120)

    @property
    def compilations(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return Workshop(tmp_path)


@needs_compiler
def test_workers_that_start_together_compile_once_and_silently(workshop: Workshop) -> None:
    workshop.compiler(pause=1)
    children = [workshop.start() for _ in range(2)]
    for output, errors in [child.communicate(timeout=120) for child in children]:
        assert (output, errors) == ("right\n", "")
    assert workshop.compilations == 1
    left = {path.suffix for path in workshop.folder.iterdir()}
    assert not left & {".so", ".cpp"}, "TileLang's intermediate files were left in the temporary directory"

    # A later run loads it; a truncated library is noticed and rebuilt.
    assert workshop.run() == ("right\n", "")
    assert workshop.compilations == 1
    (library,) = workshop.cache.rglob("kernel_lib.so")
    size = library.stat().st_size
    os.truncate(library, size // 2)
    output, errors = workshop.run()
    assert output.endswith("right\n") and "failed integrity verification" in output + errors
    assert workshop.compilations == 2 and library.stat().st_size == size


@needs_compiler
def test_a_killed_worker_blocks_nobody(workshop: Workshop) -> None:
    workshop.compiler(pause=100)
    victim = workshop.start()
    deadline = time.monotonic() + 60
    while not workshop.compilations and time.monotonic() < deadline:
        time.sleep(0.05)
    assert workshop.compilations == 1
    assert workshop.run("--no-wait") == ("nothing loaded\n", "")
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    workshop.compiler(pause=0)
    assert workshop.run() == ("right\n", "")


@needs_compiler
def test_a_compile_error_is_one_exception_that_names_kernel_and_target(workshop: Workshop) -> None:
    workshop.compiler(pause=0, fails=True)
    _, errors = workshop.run()
    last = errors.strip().splitlines()[-1]
    assert re.search(r"KernelBuildError: kernel double\[64\] did not compile for c with backend cython: RuntimeError: "
                     r"Compilation Failed!", last)


def test_a_trace_error_is_named_too() -> None:
    pytest.importorskip("tilelang")

    def trace() -> None:
        raise KeyError("tile")

    rule = r"kernel bad\[1\] did not compile for c .*KeyError: 'tile'"
    with pytest.raises(tilelang_build.KernelBuildError, match=rule):
        tilelang_build.load("bad[1]", "c", trace)


def test_loading_again_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    calls = []

    def compile_once(label: str, target: str, *_: object) -> str:
        calls.append((label, target))
        return "kernel"

    monkeypatch.setattr(tilelang_build, "_compile", compile_once)
    monkeypatch.setattr(tilelang_build, "_ready", {})
    for _ in range(3):
        assert tilelang_build.load("some kernel", "c", lambda: None) == "kernel"  # type: ignore[comparison-overlap]
    assert calls == [("some kernel", "c")]


def test_a_lock_that_is_held_elsewhere_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tilelang_build, "_ready", {})
    monkeypatch.setattr(tilelang_build, "_compile", lambda *_: "kernel")
    name = hashlib.sha256(b"held c").hexdigest()[:32]
    (tmp_path / "conformance-locks").mkdir()
    with open(tmp_path / "conformance-locks" / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert tilelang_build.load("held", "c", lambda: None, wait=False) is None
    assert tilelang_build.load("held", "c", lambda: None, wait=False) == "kernel"  # type: ignore[comparison-overlap]


def test_a_file_system_without_locks_costs_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(disk_cache.fcntl, "flock", refuse)
    monkeypatch.setattr(tilelang_build, "_ready", {})
    monkeypatch.setattr(tilelang_build, "_compile", lambda *_: "kernel")
    assert tilelang_build.load("held", "c", lambda: None) == "kernel"  # type: ignore[comparison-overlap]


def test_what_is_missing_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CXX", "CC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    find = tilelang_build.importlib.util.find_spec
    monkeypatch.setattr(tilelang_build.importlib.util, "find_spec",
                        lambda name: None if name in ("tilelang", "cuda") else find(name))
    assert tilelang_build.missing("cpu") == "tilelang is not installed"
    monkeypatch.setattr(tilelang_build.importlib.util, "find_spec", lambda name: None if name == "cuda" else name)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tilelang_build.missing("cpu") == "no C compiler (install gcc)"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert str(tilelang_build.missing("cuda")).startswith("no CUDA compiler")
    (tmp_path / "gcc").write_text("")
    (tmp_path / "gcc").chmod(0o755)
    assert str(tilelang_build.missing("cpu")).startswith("no C++ compiler")
    monkeypatch.setenv("CC", "gcc")
    assert tilelang_build.missing("cpu") is None


def test_an_unusable_cache_directory_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tilelang_build.tempfile, "gettempdir", lambda: str(tmp_path))
    directory = tilelang_build.cache_dir()
    assert directory == tmp_path / f"tilelang-cache-{os.getuid()}" and directory.is_dir()
    assert os.environ["TILELANG_CACHE_DIR"] == str(directory)


def test_the_key_covers_compiler_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(version: str, processor: str) -> str:
        tilelang_build._toolchain.cache_clear()
        monkeypatch.setattr(tilelang_build, "_first_output", lambda _: version)
        monkeypatch.setattr(tilelang_build.Path, "read_text", lambda _: processor)
        return tilelang_build._toolchain("c")

    try:
        found = {identity(*facts) for facts in (("g++ 12", "model name: A"), ("g++ 13", "model name: A"),
                                                ("g++ 12", "model name: B"), ("g++ 12", "model name: A\nflags: avx2"))}
    finally:
        tilelang_build._toolchain.cache_clear()
    assert len(found) == 4 and all(re.fullmatch("h[0-9a-f]{16}", value) for value in found)


def test_the_backend_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tilelang_build.BACKEND_VARIABLE, raising=False)
    assert (tilelang_build.backend("c"), tilelang_build.backend("cuda")) == ("cython", "auto")
    monkeypatch.setenv(tilelang_build.BACKEND_VARIABLE, "nvrtc")
    assert (tilelang_build.backend("c"), tilelang_build.backend("cuda")) == ("cython", "nvrtc")
    monkeypatch.setenv(tilelang_build.BACKEND_VARIABLE, "nvcc")
    with pytest.raises(tilelang_build.KernelBuildError, match="is 'nvcc'; known: auto, tvm_ffi, nvrtc, cython"):
        tilelang_build.backend("cuda")


def test_importing_the_kernels_imports_neither_tilelang_nor_torch() -> None:
    code = "import sys, kernels.reduce_fused; print({'tilelang', 'torch', 'tvm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


@needs_compiler
def test_what_was_compiled_before_is_not_compiled_ahead_again(workshop: Workshop) -> None:
    """Nor loaded: a run that needs few of its programs would load all of them. A call still loads it."""
    assert workshop.run("--no-wait") == ("right\n", "")
    assert workshop.run("--no-wait") == ("nothing loaded\n", "")
    assert workshop.run() == ("right\n", "") and workshop.compilations == 1
    child = workshop.folder / "child.py"
    child.write_text(child.read_text().replace("a[i] * 2.0", "a[i] + a[i]"))  # other sources: another program, perhaps
    assert workshop.run("--no-wait") == ("right\n", "") and workshop.compilations == 2
