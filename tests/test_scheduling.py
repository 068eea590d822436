"""Handing out groups to workers, with made-up workers that run, die and are replaced as xdist's do."""

from __future__ import annotations

from collections import Counter

import pytest

from conformance.session.scheduling import GroupScheduling

ITEMS = [f"{group}::{number}" for group in "abcdef" for number in range(4)]


def group_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


class Node:
    """A worker: runs an item only when it knows the next one, or that there is none."""

    def __init__(self, name: str) -> None:
        self.gateway = type("Gateway", (), {"id": name})()
        self.shutting_down = False
        self.dead = False
        self.sent: list[list[int]] = []
        self.todo: list[int] = []
        self.done: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        if self.dead:
            raise OSError("cannot send (already closed?)")
        assert not self.shutting_down, "items were sent to a worker that was told to end"
        self.sent.append(list(indices))
        self.todo += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def can_run(self) -> bool:
        return not self.dead and (len(self.todo) > 1 or (self.shutting_down and bool(self.todo)))


class Run:
    """The part of xdist's controller that a scheduler sees."""

    def __init__(self, workers: int, items: list[str] = ITEMS) -> None:
        self.items = items
        self.scheduler = GroupScheduling(workers, group_of)
        self.nodes: list[Node] = []
        for _ in range(workers):
            self.add()

    def add(self) -> Node:
        node = Node(f"gw{len(self.nodes)}")
        self.nodes.append(node)
        self.scheduler.add_node(node)  # type: ignore[arg-type]
        return node

    def collect(self, *nodes: Node) -> None:
        for node in nodes or self.nodes:
            self.scheduler.add_node_collection(node, self.items)  # type: ignore[arg-type]
        if self.scheduler.collection_is_completed:
            self.scheduler.schedule()

    def start(self, node: Node) -> None:
        self.scheduler.mark_test_started(self.items[node.todo[0]])

    def step(self, node: Node) -> bool:
        """Let a worker run one item."""
        if not node.can_run:
            return False
        self.start(node)
        index = node.todo.pop(0)
        node.done.append(index)
        self.scheduler.mark_test_complete(node, index)  # type: ignore[arg-type]
        return True

    def kill(self, node: Node) -> str | None:
        node.dead = True
        return self.scheduler.remove_node(node)  # type: ignore[arg-type]

    def finish(self) -> list[str]:
        """Let all run to the end; what was run, in the order of the items."""
        while any([self.step(node) for node in self.nodes]):
            pass
        return [self.items[index] for index in sorted(index for node in self.nodes for index in node.done)]


def started(workers: int, items: list[str] = ITEMS) -> Run:
    run = Run(workers, items)
    run.collect()
    return run


# ---- the ordinary course --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_every_item_runs_once_and_groups_stay_together(workers: int) -> None:
    run = started(workers)
    assert run.finish() == ITEMS
    for node in run.nodes:
        seen = [group_of(ITEMS[index]) for index in node.done]
        assert Counter(seen) == {group: 4 for group in seen}  # whole groups
        assert all(len({group_of(ITEMS[index]) for index in sent}) == 1 for sent in node.sent)
        assert node.done == sorted(node.done)
        assert node.shutting_down
    assert run.scheduler.tests_finished
    assert not run.scheduler.has_pending


def test_groups_are_joined_even_where_their_items_lie_apart() -> None:
    items = ["a::0", "b::0", "a::1", "c::0", "b::1", "a::2"]
    run = started(1, items)
    assert run.nodes[0].sent[0] == [0, 2, 5]
    assert run.finish() == sorted(items, key=items.index)
    assert run.nodes[0].sent == [[0, 2, 5], [1, 4], [3]]


def test_a_worker_stays_with_what_it_has_loaded() -> None:
    """The first groups go to workers by kind, the largest first; then each stays with its own as long as there is any,
    and helps with the others' after it."""
    items = [f"{kind}{number}::0" for number in range(4) for kind in "abc"]
    run = Run(2, items)
    run.scheduler._kind_of = lambda nodeid: nodeid[0]
    run.collect()
    one, other = run.nodes
    for _ in range(3):
        assert run.step(one) and run.step(other)
    assert [[items[index][0] for index in node.done] for node in run.nodes] == [["a"] * 3, ["b"] * 3]
    assert run.finish() == items
    assert {items[index][0] for index in one.done} == {"a", "c"}


def test_groups_are_handed_out_as_workers_become_free() -> None:
    run = started(2)
    fast, _ = run.nodes
    assert [len(node.sent) for node in run.nodes] == [1, 1]
    for _ in range(12):
        assert run.step(fast)
    assert [len(node.sent) for node in run.nodes] == [4, 1]
    assert run.finish() == ITEMS


def test_single_items_are_sent_until_a_worker_can_begin() -> None:
    """A worker runs an item only when it knows the next one."""
    run = started(2, ["a::0", "b::0", "c::0", "d::0", "e::0"])
    assert [node.sent for node in run.nodes] == [[[0], [1]], [[2], [3]]]
    assert run.finish() == run.items


def test_more_workers_than_groups() -> None:
    run = started(3, ["a::0", "a::1"])
    assert [node.sent for node in run.nodes] == [[[0, 1]], [], []]
    assert all(node.shutting_down for node in run.nodes)
    assert run.finish() == run.items


def test_nothing_to_run() -> None:
    run = started(2, [])
    assert all(node.shutting_down for node in run.nodes)
    assert run.scheduler.tests_finished


def test_nothing_is_handed_out_before_all_have_collected() -> None:
    run = Run(2)
    scheduler = run.scheduler
    assert not scheduler.collection_is_completed
    run.collect(run.nodes[0])
    assert not scheduler.collection_is_completed
    assert not scheduler.tests_finished
    assert run.nodes[0].sent == []
    run.collect(run.nodes[1])
    assert scheduler.collection_is_completed
    assert scheduler.collection == ITEMS
    assert scheduler.nodes == run.nodes
    assert scheduler.has_pending


@pytest.mark.parametrize(("other", "difference"), [
    ([*ITEMS[:5], "z::0", *ITEMS[6:]], f"z::0 where that has {ITEMS[5]}"), (ITEMS[:-1], "23 items where that has 24"),
    ([*ITEMS, "z::0"], "25 items where that has 24"), (ITEMS[::-1], "f::3 where that has a::0"),
])
def test_workers_that_planned_differently_end_the_run(other: list[str], difference: str) -> None:
    run = Run(2)
    run.collect(run.nodes[0])
    run.items = other
    with pytest.raises(pytest.exit.Exception) as raised:
        run.collect(run.nodes[1])
    assert "worker gw1 planned other items than the first worker" in str(raised.value)
    assert difference in str(raised.value)


def test_a_replacement_that_planned_differently_ends_the_run() -> None:
    run = started(2)
    run.kill(run.nodes[0])
    run.items = ITEMS[1:]
    with pytest.raises(pytest.exit.Exception, match="worker gw2 planned other items"):
        run.collect(run.add())


# ---- workers that die -----------------------------------------------------------------------------------------------


def test_a_crash_costs_the_item_that_was_running_and_no_other() -> None:
    run = started(2)
    victim = run.nodes[0]
    assert run.step(victim)
    run.start(victim)
    assert run.kill(victim) == "a::1"
    run.collect(run.add())
    assert run.finish() == [item for item in ITEMS if item != "a::1"]


def test_the_rest_of_the_group_comes_first_and_stays_together() -> None:
    run = started(2)
    run.start(run.nodes[0])
    assert run.kill(run.nodes[0]) == "a::0"
    replacement = run.add()
    run.collect(replacement)
    assert replacement.sent[0] == [1, 2, 3]


def test_a_worker_that_dies_between_items_costs_nothing() -> None:
    run = started(2)
    victim = run.nodes[0]
    assert run.step(victim)
    assert not run.scheduler.at_work(victim)  # type: ignore[arg-type]
    assert run.kill(victim) is None
    run.collect(run.add())
    assert run.finish() == ITEMS


def test_a_worker_that_dies_before_its_first_item_or_while_collecting() -> None:
    run = started(2)
    assert run.kill(run.nodes[0]) is None
    run.collect(run.add())
    assert run.finish() == ITEMS
    early = Run(2)
    early.collect(early.nodes[0])
    assert early.kill(early.nodes[1]) is None
    assert early.nodes[0].sent == []
    early.collect(early.add())
    assert early.finish() == ITEMS


def test_a_worker_that_dies_at_its_last_item() -> None:
    run = started(1, ["a::0", "a::1"])
    assert run.step(run.nodes[0])
    run.start(run.nodes[0])
    assert run.scheduler.at_work(run.nodes[0])  # type: ignore[arg-type]
    assert run.kill(run.nodes[0]) == "a::1"
    assert run.scheduler.tests_finished
    assert not run.scheduler.has_pending


def test_a_worker_that_dies_when_it_has_nothing_left() -> None:
    run = started(2)
    run.finish()
    assert run.kill(run.nodes[0]) is None
    assert run.scheduler.tests_finished


def test_crash_after_crash() -> None:
    """Every replacement dies at once at its first item; the other worker lives on."""
    run = started(2, ITEMS[:12])
    lost = []
    victim = run.nodes[0]
    for _ in range(3):
        run.start(victim)
        lost.append(run.kill(victim))
        victim = run.add()
        run.collect(victim)
    assert lost == ["a::0", "a::1", "a::2"]
    assert run.finish() == [item for item in ITEMS[:12] if item not in lost]


def test_a_group_sent_to_a_worker_that_has_just_died_is_not_lost() -> None:
    """The pipe breaks before xdist reports the death."""
    run = started(2)
    victim = run.nodes[0]
    for _ in range(2):
        assert run.step(victim)
    victim.dead = True
    self_report = victim.todo.pop(0)  # finished just before it died: the next group is sent into the void
    run.scheduler.mark_test_started(ITEMS[self_report])
    victim.done.append(self_report)
    run.scheduler.mark_test_complete(victim, self_report)  # type: ignore[arg-type]
    assert run.scheduler.remove_node(victim) is None  # type: ignore[arg-type]
    run.collect(run.add())
    assert run.finish() == ITEMS


def test_the_last_group_of_a_dead_worker_waits_for_its_replacement() -> None:
    """The other worker was told to end when the queue was empty, and takes nothing any more."""
    run = started(2, ITEMS[:8])
    first, second = run.nodes
    assert second.shutting_down
    run.start(first)
    assert run.kill(first) == "a::0"
    assert not run.scheduler.tests_finished
    assert run.scheduler.has_pending
    run.collect(run.add())
    assert run.finish() == ITEMS[1:8]


# ---- what else xdist asks for ---------------------------------------------------------------------------------------


def test_dropping_items_that_no_worker_has() -> None:
    run = started(1)
    dropped = run.scheduler.drop(lambda nodeid: nodeid.endswith("::1") or nodeid.startswith("c"))
    assert dropped == ["b::1", "c::0", "c::1", "c::2", "c::3", "d::1", "e::1", "f::1"]  # a is already at work
    assert run.finish() == [item for item in ITEMS if item not in dropped]
    assert run.scheduler.drop(lambda nodeid: True) == []


def test_an_item_that_must_run_again_comes_first() -> None:
    run = started(1)
    for _ in range(3):
        run.step(run.nodes[0])
    run.scheduler.mark_test_pending("a::0")
    assert run.nodes[0].sent[1] == [4, 5, 6, 7]
    run.step(run.nodes[0])
    assert run.finish() == sorted([*ITEMS, "a::0"])


def test_items_can_be_taken_from_a_worker() -> None:
    run = started(1)
    run.scheduler.remove_pending_tests_from_node(run.nodes[0], [1, 2])  # type: ignore[arg-type]
    run.nodes[0].todo = [0, 3]
    assert run.finish() == [item for item in ITEMS if item not in ("a::1", "a::2")]


def test_the_largest_groups_are_handed_out_first() -> None:
    """None of the long ones is left over for the end; equal ones stay in the order of the plan."""
    run = Run(1, ["a::1", "b::1", "c::1", "c::2", "d::1"])
    run.scheduler = GroupScheduling(1, group_of, {"a::1": 1, "b::1": 5, "c::1": 9, "c::2": 0, "d::1": 5}.__getitem__)
    node = run.add()
    run.collect(node)
    while run.step(node):
        pass
    assert [run.items[index] for index in node.done] == ["c::1", "c::2", "b::1", "d::1", "a::1"]
