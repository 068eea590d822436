"""Kernels that end, hang or leave their process: the case at fault is named, every other case still gets its result."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from suite_runs import CASES, Ran, run_kernels, run_once

FP32, BF16 = CASES[0], CASES[2]  # with weights
LIMIT = "5"  # seconds; a sound case takes a few milliseconds, its imports one or two on a busy machine
# name, act, dtype of the case at fault, state, words of the message
FAULTS = [
    ("segfault", "lambda: ctypes.string_at(0)", FP32, "crash", "Fatal Python error: Segmentation fault"),
    ("aborts", "os.abort", BF16, "crash", "Fatal Python error: Aborted"),
    ("exits", "lambda: os._exit(3)", FP32, "crash", "ended itself with exit code 3"),
    ("killed", "lambda: os.kill(os.getpid(), signal.SIGKILL)", BF16, "crash", "ended by SIGKILL"),
    ("endless_loop", "lambda: [None for _ in iter(int, 1)]", FP32, "timeout", f"still running after {LIMIT} s"),
    # PyDLL keeps the interpreter lock: no other Python thread can run
    ("hangs_in_native_code", "lambda: ctypes.PyDLL(None).sleep(600)", BF16, "timeout", f"running after {LIMIT} s"),
    ("system_exit", "lambda: sys.exit(5)", FP32, "error", "raised SystemExit: 5"),
    ("interrupts", "lambda: (_ for _ in ()).throw(KeyboardInterrupt)", BF16, "error", "raised KeyboardInterrupt"),
    ("base", "lambda: (_ for _ in ()).throw(BaseException('odd'))", FP32, "error", "raised BaseException: odd"),
    ("skips", "lambda: __import__('pytest').skip('me')", FP32, "error", "raised Skipped: me"),
]
LEAVES_NO_STACK = ("exits", "killed")


def source(faults: list[tuple[str, str, str, str, str]]) -> str:
    """Each kernel shows its fault in one of the four cases."""
    return "\n".join(
        f"add({name!r}, {act}, lambda weights, dtype: weights is not None and dtype.endswith"
        f"({'float32' if case == FP32 else 'bfloat16'!r}))"
        for name, act, case, _, _ in faults
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """All faults in one run on two workers."""
    return run_once(tmp_path_factory, "faults", source(FAULTS), "-n", "2", f"--case-timeout={LIMIT}")


@pytest.mark.parametrize(("name", "act", "case", "state", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_costs_its_own_case_only(ran: Ran, name: str, act: str, case: str, state: str, words: str) -> None:
    (bad,) = [result for result in ran.of(name) if result["state"] != "pass"]
    assert (bad["case"], bad["state"]) == (case, state)
    assert bad["kind"] == {"error": "exception"}.get(state, state)
    assert f"{case} on {name}: " in bad["message"]
    assert words in bad["message"]
    assert len(ran.of(name, "pass")) == 3


@pytest.mark.parametrize("name", [fault[0] for fault in FAULTS if fault[0] not in LEAVES_NO_STACK])
def test_the_stack_shows_the_kernel_and_not_the_test_runner(ran: Ran, name: str) -> None:
    trace = next(r["trace"] for r in ran.of(name) if r["state"] != "pass")
    assert "kernels_of_this_test.py" in trace
    assert "pluggy" not in trace
    assert len(trace.splitlines()) < 40


def test_workers_name_themselves_in_the_records(ran: Ran) -> None:
    crashed = [result["worker"] for result in ran.results if result["state"] in ("crash", "timeout")]
    assert len(set(crashed)) == len(crashed)
    assert all(worker.startswith("gw") for worker in crashed)


def test_the_run_as_a_whole_is_complete_and_failed(ran: Ran) -> None:
    bad = len(FAULTS)
    assert ran.code == 1
    assert len(ran.of("sound", "pass")) == len(CASES)
    assert len(ran.results) == sum(ran.plan["planned"].values()) == len(CASES) * (bad + 1)
    assert sum(ran.end["counts"].values()) == len(ran.results)
    assert (ran.end["problems"], ran.end["exit"]) == ([], 1)
    assert f"{bad} failed, {len(ran.results) - bad} passed" in ran.output
    assert "INTERNALERROR" not in ran.output


def test_a_page_is_written_of_such_a_run(ran: Ran) -> None:
    assert "segfault" in (ran.directory / "cpu.html").read_text(encoding="utf-8")
    assert "hangs_in_native_code" in (ran.directory / "cpu.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "code"), [("segfault", -11), ("endless_loop", 1)])
def test_without_workers_the_run_ends_but_names_the_case_and_keeps_what_was_done(
    tmp_path: Path, name: str, code: int
) -> None:
    (fault,) = [fault for fault in FAULTS if fault[0] == name]
    late = source([fault]).replace("float32", "bfloat16")  # after the group of fp32
    ran = run_kernels(tmp_path, late, f"--case-timeout={LIMIT}")
    assert ran.code == code
    assert f"{BF16} on {name}" in ran.output
    assert "kernels_of_this_test.py" in ran.output
    assert [line["type"] for line in ran.lines] == ["run", *["result"] * (len(ran.lines) - 1)]
    assert {result["case"] for result in ran.results} >= set(CASES[:2])


def test_a_kernel_that_crashes_often_is_not_started_again(tmp_path: Path) -> None:
    plugin = "from conformance.session import controller\ncontroller.QUARANTINE = 2\n"
    (tmp_path / "sooner.py").write_text(plugin, encoding="utf-8")
    ran = run_kernels(tmp_path, "add('dies', lambda: os._exit(9))", "-n", "1", "-p", "sooner")
    assert ran.code == 1
    assert (len(ran.of("dies", "crash")), len(ran.of("dies", "not-run"))) == (2, 2)
    assert len(ran.of("sound", "pass")) == 4
    assert all("dies crashed or hung too often" in result["message"] for result in ran.of("dies", "not-run"))
    assert "2 failed, 4 passed, 2 skipped" in ran.output
    assert len(list(ran.junit.iter("testcase"))) == len(ran.results) == 8
    assert sum(ran.end["counts"].values()) == 8


def test_a_crash_counts_for_maxfail(tmp_path: Path) -> None:
    ran = run_kernels(tmp_path, "add('dies', lambda: os._exit(9))", "-n", "1", "-x")
    assert ran.code == 2
    assert "stopping after 1 failures" in ran.output
    assert len(ran.of("dies", "crash")) == 1
    assert any("have no result" in problem for problem in ran.end["problems"])


def test_compiling_ahead_that_kills_its_worker_costs_no_case(tmp_path: Path) -> None:
    """It crashes one worker and hangs in the other. No case had begun, so none is to blame; but the run fails."""
    kernels = """
def compile(params, device):
    ctypes.string_at(0) if os.environ["PYTEST_XDIST_WORKER"] == "gw0" else time.sleep(600)
add("compiles", lambda: None, prepare=compile)
"""
    ran = run_kernels(tmp_path, kernels, "-n", "2", f"--case-timeout={LIMIT}")
    assert ran.end["counts"] == {"pass": 8}
    assert ran.code == 1
    crash, hang = sorted(ran.end["problems"])
    assert "worker gw0, in prepare of compiles for " in crash and "Segmentation fault" in crash
    assert "worker gw1, in prepare of compiles for " in hang and "still running" in hang


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    """A compiler, say, which would go on after its case's time limit, also one in a session of its own."""
    pids = tmp_path / "pids"
    kernels = f"""
import subprocess
def compile():
    for own in (False, True):
        child = subprocess.Popen(["sleep", "300"], start_new_session=own)
        open({str(pids)!r}, "a").write(f"{{child.pid}}\\n")
    time.sleep(600)
add("compiles", compile, lambda weights, dtype: weights is not None and dtype.endswith("float32"))
"""
    ran = run_kernels(tmp_path, kernels, "-n", "1", f"--case-timeout={LIMIT}")
    assert len(ran.of("compiles", "timeout")) == 1
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 2
    alive = [pid for pid in started if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert alive == []
