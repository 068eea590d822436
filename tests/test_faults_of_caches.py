"""Whole runs on one cache of compiled kernels: two at once compile each kernel once; what is damaged is made again."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from suite_runs import CASES, ROOT, Ran, command, environment

from conformance.disk_cache import keep, kept
from kernels import tilelang_build

needs_compiler = pytest.mark.skipif(tilelang_build.missing("cpu") is not None,
                                    reason=str(tilelang_build.missing("cpu")))


class Cache:
    """A cache directory, and a compiler that logs its calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder / "cache", folder / "calls"
        script = folder / "cxx"
        real = shutil.which("g++") or shutil.which("clang++")
        script.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo $$ >> {self.log}\nexec {real} "$@"\n')
        script.chmod(0o755)
        self.more = {"TILELANG_CACHE_DIR": str(self.folder), "CXX": str(script)}

    @property
    def compilations(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0

    def start(self, folder: Path) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        line = command(folder, "-n", "1", "--kernels", "h_tiled", "--case", CASES[0])
        return subprocess.Popen(line, cwd=ROOT, env=environment(folder, **self.more), text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def run(self, folder: Path) -> Ran:
        process = self.start(folder)
        return _ended(process, folder)


def _ended(process: subprocess.Popen[str], folder: Path) -> Ran:
    output, _ = process.communicate(timeout=300)
    return Ran(process.returncode, output, folder / "out")


@needs_compiler
def test_two_runs_at_once_and_a_damaged_cache(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    folders = [tmp_path / name for name in ("one", "two")]
    processes = [cache.start(folder) for folder in folders]
    for ran in [_ended(process, folder) for process, folder in zip(processes, folders, strict=True)]:
        assert (ran.code, ran.end["counts"]) == (0, {"pass": 1}), ran.output
    assert cache.compilations == 1  # of the two together

    (library,) = cache.folder.rglob("kernel_lib.so")
    whole = library.read_bytes()
    # one byte in the middle: as long as before, and perhaps loadable
    library.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :])
    ran = cache.run(tmp_path / "three")
    assert (ran.code, ran.end["counts"]) == (0, {"pass": 1}), ran.output
    assert cache.compilations == 2 and len(library.read_bytes()) == len(whole)

    for path in library.parent.iterdir():  # nothing of it can be read
        os.truncate(path, 0)
    ran = cache.run(tmp_path / "four")
    assert (ran.code, ran.end["counts"]) == (0, {"pass": 1}), ran.output
    assert cache.compilations == 3


def test_an_entry_in_which_one_byte_has_changed_is_none(tmp_path: Path) -> None:
    entry = tmp_path / "folder" / "entry.json"
    assert kept(entry) is None
    keep(entry, '{"registers": 20}\n')
    assert kept(entry) == '{"registers": 20}\n'
    whole = entry.read_bytes()
    for place in range(len(whole)):
        entry.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert kept(entry) is None, place
    for size in range(len(whole)):
        entry.write_bytes(whole[:size])
        assert kept(entry) is None
    assert [path.name for path in entry.parent.iterdir()] == ["entry.json"]
