"""``--shard I/N`` and ``conformance merge``: each item in one shard, and one run out of all shards or a clear error."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from suite_runs import CASES, MODULE, Ran, read_lines, run, write_kernels
from test_resume import PINNED

from conformance.cases.options import Selection
from conformance.cases.plan import group_of, plan
from conformance.commands import cli
from conformance.errors import ConformanceError
from conformance.registry import matrix
from conformance.runs.earlier import key
from conformance.runs.portion import Portion, hand_on, handed_on, read_portion
from conformance.runs.recorder import Recorder
from conformance.runs.same_run import plan_digest
from conformance.runs.sharding import Item, Shard, parse_shard, recorded_costs, split


def smoke() -> list[Item]:
    of = matrix("moe_reduce_fused")
    chosen = Selection(tiers=("smoke", "edge"), kernels=("h_tiled", "vectorised"))
    return [Item(f"m/{of.path.name}::{p.name}", p.case, p.kernel, p.arch or "", group_of(f"m/{of.path.name}::{p.name}"))
            for p in plan(of, chosen, ("cpu", "gfx942"))]


# ---- the split ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 7, 60])
def test_every_item_is_in_one_shard_and_groups_stay_together(count: int) -> None:
    items = smoke()
    portions = [Portion(Shard(index, count)).divide(items, lambda item: 1.0) for index in range(1, count + 1)]
    identity = set(portions[0][1].identity)
    kept = Counter(items[index].nodeid for mine, _ in portions for index in mine)
    assert set(kept) == {item.nodeid for item in items}
    assert {nodeid for nodeid, times in kept.items() if times == count} >= identity
    assert all(times == 1 for nodeid, times in kept.items() if nodeid not in identity)
    assert len({item.case.id for item in items if item.nodeid in identity}) == 2
    assert len(identity) == 2 * 2 * 2  # cases x kernels x architectures
    homes = split(items, [1.0] * len(items), count).home
    by_group: dict[str, set[int]] = {}
    for item, home in zip(items, homes, strict=True):
        by_group.setdefault(item.group, set()).add(home)
    assert all(len(found) == 1 for found in by_group.values())
    assert all(division.identity == portions[0][1].identity for _, division in portions)


def test_shards_are_balanced_by_recorded_cost() -> None:
    items = smoke()
    costs = {key(item.case.id, item.kernel): 5.0 if item.case.get("hidden") == "7168" else 0.01 for item in items}
    spread = []
    for given in ({}, {"cpu": costs, "gfx942": costs}):
        homes = split(items, Portion(costs=given)._costs(items, lambda item: 1.0), 4).home
        loads = Counter[int]()
        for item, home in zip(items, homes, strict=True):
            loads[home] += costs[key(item.case.id, item.kernel)]  # type: ignore[assignment]
        spread.append(max(loads.values()) / (sum(loads.values()) / 4))
    assert spread[1] < 1.1 < spread[0]


def test_an_item_without_a_record_costs_what_its_kernel_does() -> None:
    assert recorded_costs({"a": 4.0, "b": 2.0}, ["a", "b", "c", "d"], ["k", "k", "k", "other"], [9.0] * 4) == [
        4.0, 2.0, 3.0, 9.0]


def test_the_split_is_the_same_in_a_worker(tmp_path: Path) -> None:
    items = smoke()
    costs = {"cpu": {key(item.case.id, item.kernel): index * 0.1 for index, item in enumerate(items)}}
    portion = Portion(Shard(2, 3), {"cpu": frozenset({key(items[0].case.id, items[0].kernel)})}, costs)
    hand_on(portion, tmp_path)
    assert handed_on(tmp_path).divide(items, lambda item: 1.0) == portion.divide(items, lambda item: 1.0)


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/2/3", "-1/2", "a/b", "1/0", ""])
def test_a_malformed_shard(text: str) -> None:
    with pytest.raises(ConformanceError, match="give I/N with 1 <= I <= N"):
        parse_shard(text)


def test_costs_without_a_shard() -> None:
    with pytest.raises(ConformanceError, match="give --shard I/N as well"):
        read_portion(None, "x.jsonl", None, False, ["cpu"])


# ---- joining made-up shards -----------------------------------------------------------------------------------------

IDENTITY = [["o/i:1", "k"], ["o/i:2", "k"]]
OWN = {1: ["o/a:1", "o/a:2"], 2: ["o/b:1"], 3: []}
PLAN = [*(pair for pair in IDENTITY), *([case, "k"] for cases in OWN.values() for case in cases)]


def shard(folder: Path, index: int, change: Any = None, ended: bool = True, note: str = "", **facts: Any) -> Path:
    """One of three made-up shards. ``change`` may edit its result lines, ``note`` is what made it unsound."""
    pairs = [*IDENTITY, *([case, "k"] for case in OWN[index])]
    line = {
        "arch": "cpu", "here": True, "device": "x", "commit": "c", "dirty": False, "torch": "2", "sizes": "reduced",
        "data": "real", "kernels": {"k": {"operator": "o", "promise": "bit-exact", "module": "m"}}, "workers": 2,
        "planned": {"k": len(pairs)}, "plan": plan_digest(map(tuple, pairs)),  # type: ignore[arg-type]
        "shard": {"index": index, "count": 3, "identity": IDENTITY, "loose": [], "seconds": [1, 1, 1], "costs": None,
                  "whole": {"planned": {"k": len(PLAN)}, "plan": plan_digest(map(tuple, PLAN))}},  # type: ignore[arg-type]
        **facts,
    }
    recorder = Recorder(folder / f"s{index}" / "cpu.jsonl", line)
    for case, kernel in pairs:
        result = {"type": "result", "case": case, "kernel": kernel, "state": "pass", "level": "bit-exact",
                  "message": "", "lane": "execute", "budget_fraction": 0.25, "max_error": 0.0, "seconds": 1.0}
        if change:
            change(result)
        if result:
            recorder.add(result)
    if note:
        recorder.note(note)
    if ended:
        recorder.close(False, seconds=float(index))
    return recorder.path


def shards(folder: Path, **changed: Any) -> list[Path]:
    return [shard(folder, index, **changed.get(f"s{index}", {})) for index in OWN]


def merged(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str]:
    code = cli.main(["merge", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_shards_become_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = merged(capsys, *reversed(shards(tmp_path)), "--out", tmp_path / "all")
    assert code == 0, said
    lines = read_lines(tmp_path / "all" / "cpu.jsonl")
    assert [[line["case"], line["kernel"]] for line in lines[1:-1]] == PLAN
    assert lines[0]["planned"] == {"k": 5} and lines[0]["workers"] == 6 and "shard" not in lines[0]
    assert lines[-1]["seconds"] == 3 and lines[-1]["exit"] == 0
    page = (tmp_path / "all" / "cpu.html").read_text(encoding="utf-8")
    assert "joined from 3 shards, whose union is the plan; the 2 results that each of them repeated agree" in page


def test_directories_stand_for_the_shards_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merged(capsys, *(path.parent for path in shards(tmp_path)), "--out", tmp_path / "all")[0] == 0


def edit(member: str, value: Any, case: str = "o/i:2") -> Any:
    def change(line: dict[str, Any]) -> None:
        if line["case"] == case:
            line[member] = value
    return change


@pytest.mark.parametrize(("member", "value"), [
    ("state", "timeout"), ("level", "published"), ("budget_fraction", 0.2500001), ("wrong", 3),
])
def test_machines_that_do_not_agree(
    member: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = shards(tmp_path, s3={"change": edit(member, value), "device": "y"})
    code, said = merged(capsys, *paths, "--out", tmp_path / "all", "--allow", "device")
    assert code == 1
    assert f"the machines do not agree: o/i:2 on k: shard 1 (x) says {member} " in said
    assert f"shard 3 (y) says {member} {value}" in said
    page = (tmp_path / "all" / "cpu.html").read_text(encoding="utf-8")
    assert "do NOT agree" in page and "they differ in device (x there, y here)" in page


def test_a_kernel_that_does_not_repeat_need_only_agree_in_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = shards(tmp_path, s3={"change": edit("max_error", 0.5)})
    content = read_lines(paths[0])
    content[0]["shard"]["loose"] = [IDENTITY[1]]
    paths[0].write_text("".join(json.dumps(line) + "\n" for line in content), encoding="utf-8")
    assert merged(capsys, *paths, "--out", tmp_path / "all")[0] == 0


def test_a_failure_in_one_shard_fails_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = merged(capsys, *shards(tmp_path, s2={"change": edit("state", "fail", "o/b:1")}), "--out", tmp_path)
    assert code == 1
    assert "1 of 5 results failed" in said


def test_what_made_a_shard_unsound_is_told_of_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = {"note": "worker gw0 was killed"}
    code, said = merged(capsys, *shards(tmp_path, s2=lost), "--out", tmp_path / "one")
    assert code == 1 and "shard 2: worker gw0 was killed" in said
    code, said = merged(capsys, *shards(tmp_path, s1=lost, s2=lost, s3=lost), "--out", tmp_path / "all")
    assert code == 1 and said.count("worker gw0 was killed") == 1 and "shard 2:" not in said


def test_a_kernel_that_executed_nothing_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In one shard it may have nothing that it takes; in all of them together it has not passed."""
    def idle(line: dict[str, Any]) -> None:
        line.update(state="not-run", level=None, message="no compiler")

    paths = shards(tmp_path, **{f"s{index}": {"change": idle} for index in OWN})
    assert [read_lines(path)[-1]["problems"] for path in paths] == [[], [], []]
    code, said = merged(capsys, *paths, "--out", tmp_path / "all")
    assert code == 1 and "k executed nothing: no compiler" in said


@pytest.mark.parametrize(("changed", "words"), [
    ({"s2": {"shard": {"index": 2, "count": 3}}}, "its 'shard' lacks costs, identity, loose, whole"),
    ({"s2": {"ended": False}}, "s2/cpu.jsonl: the run was killed, planned results without a line: none; run the rest"),
    ({"s2": {"change": lambda line: line.clear() if line["case"] == "o/b:1" else None}},
     "the run ended early, planned results without a line: 1 of k; run the rest with its options, --shard 2/3 and "),
    ({"s3": {"commit": "d"}}, "differ: commit: c there, d here (--allow commit joins them all the same)"),
    ({"s3": {"device": "y", "torch": "3"}}, "torch: 2 there, 3 here; device: x there, y here"),
    ({"s2": {"sizes": "official"}}, "sizes: reduced there, official here"),
    ({"s2": {"kernels": {}}}, "kernel k: planned there, not planned here"),
    ({"s3": {"change": edit("case", "o/a:1", "o/i:1")}}, "s3/cpu.jsonl: lacks 1 results that every shard repeats"),
    ({"s2": {"change": edit("case", "o/a:1", "o/b:1")}}, "1 results are in "),
    ({"s2": {"change": edit("case", "o/z:1", "o/b:1")}}, "together they hold 5 results, which are not the 5"),
])
def test_what_is_no_whole_run_is_not_joined(
    changed: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = merged(capsys, *shards(tmp_path, **changed), "--out", tmp_path / "all")
    assert code == 2
    assert words in said
    assert not (tmp_path / "all").exists()


def test_missing_doubled_and_foreign_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = shards(tmp_path)
    code, said = merged(capsys, one, three)
    assert code == 2 and "shard 2/3 is missing: run it with the options of the others and --shard 2/3" in said
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(two.read_bytes())
    code, said = merged(capsys, one, two, three, copy)
    assert code == 2 and f"shard 2/3 is there twice: {two} and {copy}" in said
    whole = tmp_path / "whole.jsonl"
    whole.write_text('{"type":"run","schema":1,"arch":"cpu"}\n', encoding="utf-8")
    code, said = merged(capsys, one, whole)
    assert code == 2 and "whole.jsonl: is no shard" in said
    for content, words in (
        ("[1]\n", "whole.jsonl:1: no line of a record file: it must be an object with a 'type', is [1]"),
        ("", "no 'run' line"), ("\0\1\n", "whole.jsonl:1: no line of a record file"),
        ('{"type":"run","schema":1,"arch":"cpu","shard":3}\n', "'shard' is 3, of a wrong type"),
        (one.read_text(encoding="utf-8").replace('"planned"', '"planed"', 1), "first line is not as a run writes it"),
    ):
        whole.write_text(content, encoding="utf-8")
        code, said = merged(capsys, two, whole)
        assert code == 2 and words in said
    (tmp_path / "empty").mkdir()
    code, said = merged(capsys, one, tmp_path / "empty")
    assert code == 2 and "empty: a directory without record files" in said
    code, said = merged(capsys, one, two, three, "--out", one.parent)
    assert code == 2 and "would be overwritten" in said
    code, said = merged(capsys, one, two, three, "--allow", "devise")
    assert code == 2 and "Did you mean 'device'?" in said


@pytest.mark.parametrize("edited", [
    {"index": 4}, {"count": 0}, {"index": True}, {"identity": [3]}, {"identity": [["o/i:1"]]}, {"loose": [[1, 2]]},
    {"whole": {"planned": ["k"]}}, {"whole": {"planned": {"k": "2"}}}, {"whole": {"kernels": {"k": 1}}},
])
def test_an_edited_shard_is_one_line(
    edited: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = shards(tmp_path)
    line, *others = read_lines(paths[0])
    line["shard"] |= edited
    paths[0].write_text("".join(json.dumps(one) + "\n" for one in (line, *others)), encoding="utf-8")
    assert merged(capsys, *paths, "--out", tmp_path / "all") == (
        2, f"error: {paths[0]}: its first line is not as a run writes it; was the file edited?\n")
    assert not (tmp_path / "all").exists()


# ---- for real -------------------------------------------------------------------------------------------------------


def test_two_shards_of_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = (*CASES, *(case.replace("hidden:2048", "hidden:7168") for case in CASES))  # 4 groups
    write_kernels(tmp_path, PINNED)
    done: dict[int, Ran] = {}
    for index, workers in ((1, ("-n", "1")), (2, ("-p", "no:xdist"))):
        out = tmp_path / str(index)
        found = run(tmp_path, "--kernels", MODULE, "--case", " ".join(cases), f"--report-dir={out}",
                    "--shard", f"{index}/2", *workers)
        assert found.code == 0, found.output
        done[index] = Ran(found.code, found.output, out)
        assert f"shard {index} of 2 only: " in (out / "cpu.html").read_text(encoding="utf-8")
    both = [{key(r["case"], r["kernel"]) for r in ran.results} for ran in done.values()]
    assert len(both[0] | both[1]) == 24 and len(both[0] & both[1]) == 6  # 2 identity cases x 3 kernels
    code, said = merged(capsys, tmp_path / "1" / "cpu.jsonl", tmp_path / "2" / "cpu.jsonl", "--out", tmp_path / "all")
    assert code == 0, said
    whole = read_lines(tmp_path / "all" / "cpu.jsonl")
    assert whole[0]["planned"] == {"sound": 8, "slow": 8, "wrong": 8} and whole[0]["cases"] == 8
    assert whole[-1]["counts"] == {"pass": 24} and whole[-1]["problems"] == []
