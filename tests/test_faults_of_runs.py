"""A run that is interrupted, killed, or cannot write: what was done is kept, and nothing poses as a finished run."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from suite_runs import CASES, MODULE, ROOT, Ran, command, environment, read_lines, run, run_kernels, write_kernels

from conformance.session.pages import remove_pages


@contextmanager
def started(folder: Path, *arguments: str, seconds: float = 0.5) -> Iterator[subprocess.Popen[str]]:
    """A run on a kernel that takes ``seconds``, in a process group of its own, as soon as it has recorded a result."""
    write_kernels(folder, f"add('slow', lambda: time.sleep({seconds}))")
    line = command(folder, "--kernels", MODULE, "--case", " ".join(CASES), *arguments)
    process = subprocess.Popen(
        line, cwd=ROOT, env=environment(folder), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    try:
        records, deadline = folder / "out" / "cpu.jsonl", time.monotonic() + 120
        while not records.exists() or records.read_text(encoding="utf-8").count("\n") < 2:
            assert process.poll() is None and time.monotonic() < deadline, "the run did not get under way"
            time.sleep(0.02)
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_killed_controller_leaves_whole_records_and_no_process(tmp_path: Path) -> None:
    with started(tmp_path, "-n", "1") as process:
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    lines = read_lines(tmp_path / "out" / "cpu.jsonl")
    assert [line["type"] for line in lines] == ["run", *["result"] * (len(lines) - 1)]
    assert len(lines) >= 2

    made = subprocess.run(
        [sys.executable, "-m", "conformance", "report", str(tmp_path / "out" / "cpu.jsonl")],
        cwd=ROOT, env=environment(tmp_path), text=True, capture_output=True, check=False,
    )
    assert made.returncode == 1
    assert "no end line: the run was killed" in made.stderr
    for page in ("cpu.html", "cpu.md"):
        assert "did not finish" in (tmp_path / "out" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [("-n", "1"), ()], ids=["worker", "no worker"])
def test_an_interrupted_run_closes_its_records_and_writes_pages(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with started(tmp_path, *arguments) as process:
        os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does
        output, _ = process.communicate(timeout=60)
    ran = Ran(process.returncode, output, tmp_path / "out")
    assert ran.code == 2
    assert "KeyboardInterrupt" in output
    assert ran.end["exit"] == 1
    assert any("have no result" in problem for problem in ran.end["problems"])
    assert all(result["state"] == "pass" for result in ran.results)
    assert (ran.directory / "cpu.html").exists()


def test_a_full_disk_does_not_end_the_run_but_fails_it(tmp_path: Path) -> None:
    """A file size limit makes writing fail in the middle of a line, as a full disk does."""
    write_kernels(tmp_path, "")
    line = command(tmp_path, "-n", "1", "-p", "no:cacheprovider", "--kernels", MODULE, "--case", " ".join(CASES))
    subprocess.run(line, cwd=ROOT, env=environment(tmp_path), capture_output=True, timeout=120, check=True)
    records = (tmp_path / "out" / "cpu.jsonl").read_bytes().splitlines(keepends=True)
    # for the first line, one result, and in the place of the next one the end with its problems
    room = len(b"".join(records[:2])) + 800
    assert len(records[2]) > 800
    limited = (
        "import os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\n"
        f"os.execv({line[0]!r}, {line!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited], cwd=ROOT, env=environment(tmp_path, PYTHONDONTWRITEBYTECODE="1"), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "4 passed" in done.stdout
    assert "PROBLEM: records are incomplete: " in done.stdout
    assert "File too large" in done.stdout
    assert "no page was written" in done.stdout
    assert "Traceback" not in done.stdout
    ran = Ran(done.returncode, done.stdout, tmp_path / "out")  # whole lines only, or reading fails
    assert len(ran.results) < 4
    assert "records are incomplete" in ran.end["problems"][0]  # the end line is short enough to fit


def _may_mount() -> bool:
    script = "mount -t tmpfs -o size=12k tmpfs /mnt"
    return shutil.which("unshare") is not None and not subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, check=False).returncode


@pytest.mark.skipif(not _may_mount(), reason="a small disk of its own needs the right to mount one")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """Records and pages go to a disk of three pages, which no other process sees."""
    write_kernels(tmp_path, "add('other', lambda: None)\nadd('third', lambda: None)")
    (tmp_path / "out").mkdir()
    (tmp_path / "saved").mkdir()
    line = shlex.join(command(tmp_path, "-n", "1", "--kernels", MODULE, "--case", " ".join(CASES)))
    full, saved = tmp_path / "out", tmp_path / "saved"
    script = f"mount -t tmpfs -o size=12k tmpfs {full} && {line}; code=$?; cp {full}/* {saved}; exit $code"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], cwd=ROOT, env=environment(tmp_path), text=True, timeout=180,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "12 passed" in done.stdout
    assert "PROBLEM: records are incomplete: " in done.stdout and "No space left on device" in done.stdout
    assert "no page was written" in done.stdout and "Traceback" not in done.stdout
    found = read_lines(tmp_path / "saved" / "cpu.jsonl")  # whole lines only, or reading fails
    assert found[0]["type"] == "run" and 0 < len(found) < 14


def test_two_runs_do_not_write_one_record_file(tmp_path: Path) -> None:
    with started(tmp_path, seconds=60) as process:
        second = run(tmp_path, "--kernels", MODULE, "--case", CASES[0])
        assert process.poll() is None
    assert second.code == 4
    assert f"another run is writing {tmp_path / 'out' / 'cpu.jsonl'}" in second.output
    assert second.lines[0]["planned"] == {"sound": 4, "slow": 4}  # still the first run's


@pytest.mark.parametrize(
    ("act", "code", "words"),
    [
        ("raise ImportError('libcuda.so.1 is missing')", 4, "ImportError: libcuda.so.1 is missing"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 3, "workers in a row ended between cases: "),
    ],
    ids=["raises", "killed"],
)
def test_workers_that_cannot_start_end_the_run(tmp_path: Path, act: str, code: int, words: str) -> None:
    """xdist alone would replace them a thousand times."""
    ran = run_kernels(tmp_path, f"if 'PYTEST_XDIST_WORKER' in os.environ: {act}", "-n", "1")
    assert ran.code == code
    assert words in ran.output
    assert "Traceback" not in ran.output
    assert not (ran.directory / "cpu.jsonl").exists()


def test_a_worker_that_comes_later_finds_the_project_where_the_first_did(tmp_path: Path) -> None:
    """pytest takes an existing directory after an option it does not know yet for the root of the project."""
    write_kernels(tmp_path, "add('dies', lambda: os._exit(9), lambda weights, dtype: weights is not None)")
    line = command(tmp_path, "-n", "1", "--kernels", MODULE, "--case", " ".join(CASES[:2]))
    place = next(number for number, word in enumerate(line) if word.startswith("--report-dir="))
    line[place : place + 1] = line[place].split("=")
    done = subprocess.run(
        line, cwd=ROOT, env=environment(tmp_path), text=True, capture_output=True, timeout=120, check=False
    )
    ran = Ran(done.returncode, done.stdout, tmp_path / "out")
    assert ran.code == 1
    assert ran.end["counts"] == {"pass": 3, "crash": 1}


# A GPU whose context a kernel ends, without a GPU: nothing of it works from then on, in that process.
LOST = """
from conformance.devices.admitted import Gate
from conformance.judging.judge import Judge

ended, enter = [], Gate.enter
CUDA = "CUDA error: an illegal memory access was encountered\\nSearch for its number.\\n"

def ends():
    ended.append(1)
    raise RuntimeError(CUDA)

def refuses(gate, *arguments, **more):
    if ended:
        raise RuntimeError(CUDA)
    return enter(gate, *arguments, **more)

Judge._context_works = lambda judge: not ended
Gate.enter = refuses
add("ends", ends, lambda weights, dtype: weights is not None and dtype.endswith("float32"))
"""


@pytest.mark.parametrize("workers", ["2", "0"])
def test_a_lost_context_costs_its_culprit(tmp_path: Path, workers: str) -> None:
    """In a fresh process the others are run again; where there is none they are not run, and no admission fails."""
    ran = run_kernels(tmp_path, LOST, "-n", workers)
    (bad,) = [result for result in ran.results if result["state"] not in ("pass", "not-run")]
    assert (bad["case"], bad["kernel"]) == (CASES[0], "ends") and ran.code == 1
    first = "raised RuntimeError: CUDA error: an illegal memory access was encountered"
    states = [result["state"] for result in ran.results]
    if workers == "0":
        assert bad["state"] == "error" and first in bad["message"]
        at = states.index("error")
        assert set(states[:at]) <= {"pass"} and set(states[at + 1 :]) == {"not-run"}
        assert all("the GPU context was lost by" in result["message"] for result in ran.results[at + 1 :])
    else:
        assert bad["state"] == "crash" and bad["message"].endswith(
            f"{first} (the GPU context is lost; later cases run in a fresh worker)")
        assert states.count("pass") == len(states) - 1


def test_pages_of_an_earlier_run_do_not_stand_beside_new_records(tmp_path: Path) -> None:
    """A run that is killed makes no pages: those before it would speak for it."""
    old = ("cpu.html", "cpu.md", "cpu.bench.html", "cpu.bench.json", "index.html")
    others = ("sm_90.html", "cpu.jsonl", "cpu.bench.jsonl")
    for name in (*old, *others):
        (tmp_path / name).touch()
    remove_pages(tmp_path, [tmp_path / "cpu.jsonl"], [tmp_path / "cpu.bench.jsonl"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
