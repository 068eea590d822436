"""A process that a kernel ends with exit code 0: the run's own exit code says that it has not passed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from suite_runs import CASES, ROOT, environment, read_lines, run_kernels

ENDINGS = {
    "os._exit": "os._exit(0)",
    "another program, found on PATH": "os.execlp('true', 'true')",
}


@pytest.mark.parametrize("workers", [("-n", "1"), ()], ids=["worker", "no worker"])
def test_a_module_that_ends_the_controller_while_it_is_imported(tmp_path: Path, workers: tuple[str, ...]) -> None:
    ran = run_kernels(tmp_path, "os._exit(0)", *workers, cases=CASES[:1])
    assert ran.code == 70
    assert "ERROR: os._exit(0) was called in the middle of the run; this run has not passed" in ran.output
    assert "kernels_of_this_test.py" in ran.output
    assert not (ran.directory / "cpu.jsonl").exists()


@pytest.mark.parametrize("name", ENDINGS)
def test_a_kernel_that_ends_a_run_without_workers(tmp_path: Path, name: str) -> None:
    ran = run_kernels(tmp_path, f"add('ends', lambda: {ENDINGS[name]})", cases=CASES[:1])
    assert ran.code == 70
    assert "was called in the middle of the run" in ran.output and "kernels_of_this_test.py" in ran.output
    assert "_pytest" not in ran.output
    assert "end" not in {line["type"] for line in read_lines(ran.directory / "cpu.jsonl")}


def test_exit_handlers_of_a_worker_run_although_it_ends_without_teardown(tmp_path: Path) -> None:
    """In their order, and what they print is flushed."""
    told = tmp_path / "told"
    kernels = f"""
import atexit
def tell(text):
    with open({str(told)!r}, "a") as file:
        file.write(text)
def leaves():
    atexit.register(tell, "second ")
    atexit.register(tell, "first ")
add("leaves", leaves)
"""
    ran = run_kernels(tmp_path, kernels, "-n", "1", cases=CASES[:1])
    assert (ran.code, ran.end["counts"]) == (0, {"pass": 2}), ran.output
    assert told.read_text() == "first second first second "  # the kernel is launched twice


def test_a_worker_that_ends_with_0_has_crashed(tmp_path: Path) -> None:
    ran = run_kernels(tmp_path, "add('ends', lambda: os._exit(0))", "-n", "1", cases=CASES[:1])
    assert ran.code == 1
    (result,) = ran.of("ends")
    assert result["state"] == "crash" and "the process ended itself with exit code 0" in result["message"]
    assert len(ran.of("sound", "pass")) == 1


def test_children_of_a_kernel_end_as_they_like(tmp_path: Path) -> None:
    kernels = """
def forks():
    child = os.fork() or os._exit(0)
    other = os.fork() or os.execv("/bin/true", ["true"])
    for one in (child, other):
        if os.waitpid(one, 0)[1] != 0:
            raise RuntimeError("a child was not let go")
add("forks", forks)
"""
    ran = run_kernels(tmp_path, kernels, cases=CASES[:1])
    assert (ran.code, ran.end["counts"]) == (0, {"pass": 2}), ran.output


def test_after_the_run_the_process_is_not_guarded() -> None:
    code = """
import os
from conformance.launching import exit_guard
before = os._exit, os.execv
exit_guard.guard()
assert os._exit is not before[0] and os.execv is not before[1]
exit_guard.unguard()
assert (os._exit, os.execv) == before
exit_guard.guard()
os._exit(3)  # says itself that something is wrong
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(ROOT), capture_output=True, text=True,
                          timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
