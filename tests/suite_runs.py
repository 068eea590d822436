"""Shared by the tests of the plugin: runs the suite in a process of its own, on kernels that a test writes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPERATOR = "moe_reduce_fused"
MODULE, JUNIT = "kernels_of_this_test", "junit.xml"
# Two groups (one per dtype) of two cases each
CASES = tuple(
    f"{OPERATOR}/send:4001-topk:2-experts:72-ranks:8-hidden:2048-weights:{weights}-in:{dtype}-out:{dtype}-xsf:no"
    for dtype in ("fp32", "bf16")
    for weights in ("yes", "no")
)
# Kernels under test begin with this: `right` computes what is asked for; `add` registers a function that does
# something first, in the cases for which `when(topk_weights, dtype name)` holds.
PRELUDE = """
import ctypes, os, signal, sys, threading, time
import torch
from conformance import kernel
from kernels.reduce_fused.vectorised import vectorised

def right(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
    vectorised.function(x, token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf, out=out)

def add(name, act, when=lambda weights, dtype: True, **options):
    def run(x, token_topk_to_pos, *, topk_weights=None, x_sf=None, sf=None, out):
        if when(topk_weights, str(x.dtype)):
            act()
        right(x, token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf, out=out)
    run.__module__ = __name__
    kernel("moe_reduce_fused", promise="published", name=name, native=("vectorised",), **options)(run)

kernel("moe_reduce_fused", promise="published", name="sound", native=("vectorised",))(right)
"""


@dataclass(frozen=True)
class Ran:
    """What a run left: exit code, everything it printed, its report directory."""

    code: int
    output: str
    directory: Path

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "cpu.jsonl")

    @property
    def junit(self) -> ET.Element:
        """The root of the JUnit file."""
        return ET.parse(self.directory.parent / JUNIT).getroot()

    @property
    def plan(self) -> dict[str, Any]:
        assert self.lines[0]["type"] == "run"
        return self.lines[0]

    @property
    def end(self) -> dict[str, Any]:
        assert self.lines[-1]["type"] == "end", self.output
        return self.lines[-1]

    @property
    def results(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == "result"]

    def of(self, kernel: str, state: str | None = None) -> list[dict[str, Any]]:
        """The results of one kernel, of one state if given."""
        return [r for r in self.results if r["kernel"] == kernel and state in (None, r["state"])]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """This process's environment for a run of its own, with modules of ``folder`` on the path. The names by which
    pytest knows a CI machine stay behind: there it prints each message a second time, in its short summary."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("PYTEST_") and name not in ("CI", "BUILD_NUMBER")}
    return kept | {"PYTHONPATH": str(folder), "COLUMNS": "200"} | more


def command(folder: Path, *arguments: str) -> list[str]:
    """A pytest line whose records, pages and cache go below ``folder``. Hypothesis is left out: importing it takes
    each process longer than the cases do."""
    places = [f"--report-dir={folder / 'out'}", "-o", f"cache_dir={folder / 'cache'}"]
    return [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", *places, *arguments]


def write_kernels(folder: Path, source: str, name: str = MODULE) -> None:
    (folder / f"{name}.py").write_text(PRELUDE + source, encoding="utf-8")


def run(folder: Path, *arguments: str, root: Path = ROOT) -> Ran:
    """Run pytest with these arguments and nothing else."""
    done = subprocess.run(
        command(folder, *arguments), cwd=root, env=environment(folder), timeout=180, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )
    return Ran(done.returncode, done.stdout, folder / "out")


def run_kernels(folder: Path, source: str, *arguments: str, cases: tuple[str, ...] = CASES) -> Ran:
    """Run the cases on ``sound`` and on the kernels that ``source`` adds, with a JUnit file."""
    write_kernels(folder, source)
    return run(folder, f"--junitxml={folder / JUNIT}", "--kernels", MODULE, "--case", " ".join(cases), *arguments)


def run_once(factory: pytest.TempPathFactory, name: str, source: str, *arguments: str, cases: tuple[str, ...] = CASES
             ) -> Ran:
    """As `run_kernels`, for a fixture of many tests: under xdist its first user runs it and the others read it."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    kept = folder / "ran.json"
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            ran = run_kernels(folder, source, *arguments, cases=cases)
            kept.write_text(json.dumps([ran.code, ran.output]), encoding="utf-8")
    code, output = json.loads(kept.read_text(encoding="utf-8"))
    return Ran(code, output, folder / "out")
