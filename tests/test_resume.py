"""``--resume``: what a killed run left undone is done, and nothing else; a run that differs is not gone on from."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from suite_runs import CASES, MODULE, ROOT, Ran, command, environment, read_lines, run, write_kernels

from conformance.environment import uncommitted
from conformance.errors import ConformanceError
from conformance.runs.earlier import Earlier, read_earlier
from conformance.runs.portion import read_portion
from conformance.runs.recorder import Recorder
from conformance.session.facts import resumed_facts

# The checkout may be edited while tests run, so the commit is pinned; `COUNT` counts what each kernel really did.
PINNED = """
from conformance import environment
_identity = environment.identity
environment.identity = lambda arch: _identity(arch) | {"commit": "c0ffee", "dirty": False, "changes": None}
HERE = os.path.dirname(__file__)

def note(name):
    with open(os.path.join(HERE, "done.txt"), "a") as done:
        done.write(name + "\\n")

def die_once():
    with open(os.path.join(HERE, "done.txt")) as done:
        if os.environ.get("DIES") and done.read().count("slow") == 1:
            os._exit(9)

add("slow", lambda: (note("slow"), time.sleep(float(os.environ.get("SLOW", "0"))), die_once()))
add("wrong", lambda: note("wrong"), lambda weights, dtype: weights is not None)
"""


def arguments(*more: str, cases: tuple[str, ...] = CASES) -> list[str]:
    return ["--kernels", MODULE, "--case", " ".join(cases), *more]


def ran(folder: Path, *more: str, out: str = "out", cases: tuple[str, ...] = CASES) -> Ran:
    done = run(folder, *arguments(f"--report-dir={folder / out}", *more, cases=cases))
    return Ran(done.code, done.output, folder / out)


def cut(path: Path, results: int, tail: bytes = b"") -> list[dict[str, Any]]:
    """Leave the run line, some results and a half line, as a kill does. The results that are left."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: 1 + results]) + tail)
    return [json.loads(line) for line in lines[1 : 1 + results]]


def names(results: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(line["case"], line["kernel"]) for line in results}


def test_a_killed_controller_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For real: SIGKILL while a case runs, then the rest into the same record file, and nothing twice. A worker of the
    second run dies: the one that replaces it must plan the same, though the record file has grown."""
    write_kernels(tmp_path, PINNED)
    records = tmp_path / "out" / "cpu.jsonl"
    process = subprocess.Popen(
        command(tmp_path, *arguments("-n", "1")), cwd=ROOT, env=environment(tmp_path, SLOW="1"), text=True,
        start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 120
        while not records.exists() or records.read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline, "the run did not get under way"
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        assert not psutil.wait_procs(workers, timeout=60)[1]  # they note what they do until they notice
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    before = read_earlier(records)
    assert before.end is None and 2 <= len(before.lines) < 12
    (tmp_path / "done.txt").write_text("", encoding="utf-8")

    slow_left = 4 - sum(name.endswith(" on slow") for name in before.lines)
    assert slow_left > 0
    monkeypatch.setenv("DIES", "1")
    again = run(tmp_path, *arguments("-n", "1", f"--resume={records}"))
    assert again.code == 1, again.output
    assert len(again.results) == len(names(again.results)) == 12
    assert again.end["counts"] == {"pass": 11, "crash": 1} and again.end["problems"] == []
    kept = records.read_bytes().splitlines()[1 : 1 + len(before.lines)]
    assert set(kept) == set(before.lines.values())  # byte by byte
    assert again.plan["resumed"] == [{
        "from": str(records), "started": before.run["started"], "results": len(before.lines),
        "truncated": before.truncated, "ended": False, "differs": {}}]
    assert f"1 failed, {11 - len(before.lines)} passed" in again.output
    calls = (tmp_path / "done.txt").read_text(encoding="utf-8").split().count("slow")
    assert 2 * slow_left - 1 <= calls <= 4 * slow_left  # a case runs its kernel a few times, the crashed one once
    assert f"resumed: {len(before.lines)} of 12 results" in (tmp_path / "out" / "cpu.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole run of two cases on three kernels, none of which failed."""
    folder = tmp_path_factory.mktemp("finished")
    write_kernels(folder, PINNED)
    assert ran(folder, "-p", "no:xdist", cases=CASES[:2]).code == 0
    return folder


def copied(finished: Path, folder: Path) -> Path:
    write_kernels(folder, PINNED)
    (folder / "old").mkdir()
    records = folder / "old" / "cpu.jsonl"
    records.write_bytes((finished / "out" / "cpu.jsonl").read_bytes())
    return records


def test_old_failures_count_and_a_cut_line_is_run_again(finished: Path, tmp_path: Path) -> None:
    records = copied(finished, tmp_path)
    left = cut(records, 2)
    crash = left[0] | {"state": "crash", "kind": "crash", "level": None, "message": "killed by SIGSEGV"}
    first = records.read_bytes().splitlines()[0]
    whole = [first, *(json.dumps(line).encode() for line in (crash, left[1]))]
    records.write_bytes(b"\n".join(whole) + b"\n" + json.dumps(left[1] | {"kernel": "cut"}).encode()[:-9])
    done = ran(tmp_path, f"--resume={records.parent}", cases=CASES[:2])  # the directory
    assert done.code == 1, done.output  # the crash is a result, and the run has failed
    assert "4 passed" in done.output
    assert done.end["counts"] == {"crash": 1, "pass": 5} and done.end["exit"] == 1
    assert done.plan["resumed"][0]["truncated"] is True
    assert not done.of("cut")


@pytest.mark.parametrize("workers", [("-n", "1"), ("-p", "no:xdist")], ids=["worker", "no worker"])
def test_nothing_is_left_to_do(finished: Path, tmp_path: Path, workers: tuple[str, ...]) -> None:
    records = copied(finished, tmp_path)
    done = ran(tmp_path, f"--resume={records}", *workers, cases=CASES[:2])
    assert done.code == 0, done.output
    assert done.end["counts"] == {"pass": 6}
    assert not (tmp_path / "done.txt").exists()


def test_a_run_that_differs_is_refused_unless_told_so(finished: Path, tmp_path: Path) -> None:
    records = copied(finished, tmp_path)
    cut(records, 5)
    lines = read_lines(records)
    lines[0] |= {"torch": "1.0", "commit": "other"}
    lines[0]["kernels"]["slow"]["promise"] = "bit-exact"
    records.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    refused = ran(tmp_path, f"--resume={records}", "-p", "no:xdist", cases=CASES[:2])
    assert refused.code == 4
    for words in ("commit (other there, c0ffee here)", "torch (1.0 there, ", "--resume-anyway",
                  "promise of kernel slow (bit-exact there, "):
        assert words in refused.output
    assert not (tmp_path / "out" / "cpu.jsonl").exists() and not (tmp_path / "done.txt").exists()

    taken = ran(tmp_path, f"--resume={records}", "--resume-anyway", "-p", "no:xdist", cases=CASES[:2])
    assert taken.code == 0, taken.output
    assert set(taken.plan["resumed"][0]["differs"]) == {"torch", "commit", "promise of kernel slow"}
    page = (tmp_path / "out" / "cpu.html").read_text(encoding="utf-8")
    assert "that run differs in commit (other there, c0ffee here), torch (1.0 there, " in page


@pytest.mark.parametrize(("now", "words"), [
    ({"plan": "p2"}, "differs from this one in plan (other cases or kernels are planned; give the options of that run"),
    ({"changes": "d1"}, "changes (none there, d1 here)"),
    ({"kernels": {"k": {"source": "s2"}}}, "source of kernel k (s1 there, s2 here)"),
    ({"kernels": {}}, "kernel k (planned there, not planned here)"),
    ({"shard": {"index": 1, "count": 2}}, "shard (none there, 1/2 here)"),
    ({"data": "exact"}, "data (real there, exact here)"),
])
def test_what_keeps_a_run_from_being_gone_on_from(now: dict[str, Any], words: str, tmp_path: Path) -> None:
    before = {"plan": "p1", "kernels": {"k": {"source": "s1"}}, "data": "real", "command": "pytest -q"}
    earlier = Earlier(tmp_path / "r.jsonl", before, {}, None, False)
    with pytest.raises(ConformanceError, match=re.escape(words)):
        resumed_facts(earlier, before | now, 0, anyway=False)
    assert resumed_facts(earlier, before | now, 0, anyway=True)[0]["differs"]
    assert resumed_facts(earlier, before, 3, anyway=False)[0]["results"] == 3


def test_uncommitted_changes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr("conformance.environment.ROOT", tmp_path)
    for folder in ("conformance", "references", "kernels", "matrices", "docs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("1", encoding="utf-8")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "all")
    assert uncommitted() is None
    (tmp_path / "docs" / "file").write_text("2", encoding="utf-8")
    assert uncommitted() is None  # no result depends on it
    (tmp_path / "kernels" / "file").write_text("2", encoding="utf-8")
    one = uncommitted()
    (tmp_path / "kernels" / "file").write_text("3", encoding="utf-8")
    other = uncommitted()
    (tmp_path / "kernels" / "new").write_text("", encoding="utf-8")
    third = uncommitted()
    (tmp_path / "kernels" / "file").unlink()
    assert len({None, one, other, third, uncommitted()}) == 5


def test_several_architectures_from_their_directory(tmp_path: Path) -> None:
    write_kernels(tmp_path, PINNED)
    both = ("--arch", "cpu,gfx942")
    assert ran(tmp_path, *both, "-p", "no:xdist", out="old", cases=CASES[:1]).code == 0
    (left,) = cut(tmp_path / "old" / "cpu.jsonl", 1)
    cut(tmp_path / "old" / "gfx942.jsonl", 2)
    done = ran(tmp_path, *both, "-n", "1", f"--resume={tmp_path / 'old'}", cases=CASES[:1])
    assert done.code == 0, done.output
    assert left in done.results and len(names(done.results)) == len(done.results) == 3
    other = [line for line in read_lines(tmp_path / "out" / "gfx942.jsonl") if line["type"] == "result"]
    assert len(names(other)) == len(other) == 3
    assert "2 passed, 1 skipped" in done.output


@pytest.mark.parametrize(("content", "words"), [
    (None, "cannot be read"), ("", "no 'run' line"), ("{}\n{}\n", "1: no line of a record file"),
    ("[1, 2]\n", r"r.jsonl:1: no line of a record file: it must be an object with a 'type', is \[1, 2\]"),
    ("3\n", "it must be an object with a 'type', is 3"), ("null", "with a 'type', is null"),
    ('{"type": [1]}\n', "it must be an object with a 'type'"),
    ('{"type":"run","schema":2,"archs":{}}\n', "r.jsonl:1: schema 2 is not the 1 that this version reads"),
    ('{"type":"run","schema":1}\n', "r.jsonl:1: no line of a record file: 'arch' is missing"),
    ('{"type":"run","schema":1,"arch":["cpu"]}\n', r"'arch' is \[\"cpu\"\], of a wrong type"),
    ('{"type":"run","schema":1,"arch":"cpu","planned":{"k":"x"}}\n', "'planned' must be numbers of results"),
    ('{"type":"run","schema":1,"arch":"cpu"}\n{"type":"result","case":"a"}\n', "r.jsonl:2: .*'kernel' is missing"),
    ('{"type":"run","schema":1,"arch":"cpu"}\n{"type":"result","case":"a","kernel":"k","state":"pass","lane":"route",'
     '"message":"","seconds":"x"}\n',
     "r.jsonl:2: .*'seconds' is \"x\", of a wrong type"),
    ('{"type":"run","schema":1,"arch":"cpu"}\n{"type":"result","case":"a","kernel":"k"}\n',
     "r.jsonl:2: .*'state' is missing"),
    ('{"type":"run","schema":1,"arch":"cpu"}\n{"type":"result","case":"a","kernel":"k","state":"pass","message":""}\n',
     "r.jsonl:2: .*'lane' is missing"),
    ('{"type":"run","schema":1,"arch":"cpu"}\n{"type":"result","case":"a","kernel":"k","state":"pass","lane":"route",'
     '"message":"","seconds":1' + "0" * 400 + '}\n', "r.jsonl:2: .*'seconds' is 1000.*, no number of seconds"),
    ('{"type":"run","schema":1,"arch":"sm_90"}\n', "holds results of sm_90, and this run is on cpu"),
])
def test_what_cannot_be_resumed_is_one_clear_error(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "r.jsonl"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    with pytest.raises(ConformanceError, match=words):
        read_portion(None, None, str(file), False, ["cpu"])
    with pytest.raises(ConformanceError, match=words):
        read_portion("1/2", str(file), None, False, ["cpu"])
    with pytest.raises(ConformanceError, match=r"are called|is called|no record file there"):
        (tmp_path / "none").mkdir()
        read_portion(None, None, str(tmp_path / "none"), False, ["cpu"])


def test_anyway_needs_something_to_resume() -> None:
    with pytest.raises(ConformanceError, match="give --resume=RECORDS"):
        read_portion(None, None, None, True, ["cpu"])


def test_carried_results_are_on_disk_before_the_old_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it starts, a resumed run has still cost no result."""
    path = tmp_path / "cpu.jsonl"
    path.write_text("old\n", encoding="utf-8")
    line = json.dumps({"type": "result", "case": "c", "kernel": "k", "state": "pass", "message": "", "lane": "execute"})

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        Recorder(path, {"planned": {"k": 1}}, [line.encode()])
    assert path.read_text(encoding="utf-8") == "old\n"
    monkeypatch.undo()
    recorder = Recorder(path, {"planned": {"k": 1}}, [line.encode()])
    recorder.close(False)
    assert [entry["type"] for entry in read_lines(path)] == ["run", "result", "end"]
    assert [file.name for file in tmp_path.iterdir()] == ["cpu.jsonl"]


def test_a_full_disk_at_the_start_leaves_the_old_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.jsonl"
    path.write_text("old\n", encoding="utf-8")
    line = json.dumps({"type": "result", "case": "c", "kernel": "k", "state": "pass", "message": "", "lane": "execute"})

    def full(self: Recorder, line: dict[str, Any]) -> None:
        self._lost += 1
        self._error = "No space left on device"

    monkeypatch.setattr(Recorder, "_write", full)
    with pytest.raises(ConformanceError, match="No space left on device; the earlier ones are untouched"):
        Recorder(path, {"planned": {"k": 1}}, [line.encode()])
    assert path.read_text(encoding="utf-8") == "old\n"
    assert [file.name for file in tmp_path.iterdir()] == ["cpu.jsonl"]
