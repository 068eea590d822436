"""How xdist hands out items: whole groups of cases that share data, to one worker at a time.

The stock "loadscope" mode keeps scopes together too, but looks items up in linear time and may hang when a worker
is replaced (pytest-xdist#1323). Here a crashed worker's unfinished items go back to the front of the queue, and
an item is blamed for the crash only when it had started.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

_LOW_WATER = 2  # a worker runs an item only when it knows the next one
_NEAR = 64  # groups among which a worker finds one like those it has had


class GroupScheduling:
    """xdist's scheduler protocol over groups of item indices. ``group_of`` maps a node id to its group; groups start
    in the order of ``cost_of`` their first item, the largest first, so that none of the long ones is left over for the
    end. Of the next groups a worker gets one of the kind that it had last, as ``kind_of`` the first item tells, so that
    not every worker loads every program."""

    def __init__(self, workers: int, group_of: Callable[[str], str],
                 cost_of: Callable[[str], float] = lambda nodeid: 0.0,
                 kind_of: Callable[[str], str] = lambda nodeid: "") -> None:
        self._workers = workers
        self._group_of = group_of
        self._cost_of = cost_of
        self._kind_of = functools.cache(kind_of)
        self._last: dict[WorkerController, str] = {}
        self.collection: list[str] | None = None
        self._started: set[str] = set()
        self._collections: dict[WorkerController, list[str]] = {}
        self._assigned: dict[WorkerController, deque[int]] = {}
        self._queue: deque[list[int]] = deque()

    @property
    def nodes(self) -> list[WorkerController]:
        return list(self._assigned)

    @property
    def collection_is_completed(self) -> bool:
        return self.collection is not None or len(self._collections) >= self._workers

    @property
    def tests_finished(self) -> bool:
        return (
            self.collection_is_completed
            and not self._queue
            and all(len(pending) < _LOW_WATER for pending in self._assigned.values())
        )

    @property
    def has_pending(self) -> bool:
        return bool(self._queue) or any(self._assigned.values())

    def add_node(self, node: WorkerController) -> None:
        self._assigned[node] = deque()

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        """Take note of what a worker collected; when it differs from what the others did, the run ends."""
        first = self.collection or next(iter(self._collections.values()), None)
        if first is not None and list(collection) != first:
            pytest.exit(
                f"worker {node.gateway.id} planned other items than the first worker "
                f"({_difference(first, collection)}); were files changed while the run went on?",
                returncode=pytest.ExitCode.INTERNAL_ERROR,
            )
        self._collections[node] = list(collection) if first is None else first  # of 100 000 ids one copy is enough

    def mark_test_started(self, nodeid: str) -> None:
        self._started.add(nodeid)

    def at_work(self, node: WorkerController) -> bool:
        """Whether a worker has started the first of its items and not finished it."""
        pending = self._assigned.get(node)
        if not pending or self.collection is None:
            return False
        return self.collection[pending[0]] in self._started

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        self._assigned[node].remove(item_index)
        if self.collection is not None:
            self._started.discard(self.collection[item_index])
        self._feed(node)

    def mark_test_pending(self, item: str) -> None:
        assert self.collection is not None
        self._queue.appendleft([self.collection.index(item)])
        for node in self.nodes:
            self._feed(node)

    def remove_pending_tests_from_node(self, node: WorkerController, indices: Sequence[int]) -> None:
        for index in indices:
            self._assigned[node].remove(index)

    def remove_node(self, node: WorkerController) -> str | None:
        """Forget a worker. When it died at work, return the node id it was running; requeue what it had not begun."""
        died_at_work = self.at_work(node)
        pending = self._assigned.pop(node)
        self._collections.pop(node, None)
        self._last.pop(node, None)
        crashed = pending.popleft() if died_at_work else None
        if pending:
            self._queue.appendleft(list(pending))
        return None if crashed is None or self.collection is None else self.collection[crashed]

    def drop(self, unwanted: Callable[[str], bool]) -> list[str]:
        """Take the items that no worker has yet and that are ``unwanted`` out of the queue; return their ids."""
        assert self.collection is not None
        dropped: list[str] = []
        kept: deque[list[int]] = deque()
        for group in self._queue:
            gone = {index for index in group if unwanted(self.collection[index])}
            dropped += [self.collection[index] for index in group if index in gone]
            if rest := [index for index in group if index not in gone]:
                kept.append(rest)
        self._queue = kept
        return dropped

    def schedule(self) -> None:
        """Start handing out items; called again when a replaced worker has collected."""
        if self.collection is None:
            self.collection = next(iter(self._collections.values()))
            groups: dict[str, list[int]] = {}
            for index, nodeid in enumerate(self.collection):
                groups.setdefault(self._group_of(nodeid), []).append(index)
            first = {name: self.collection[group[0]] for name, group in groups.items()}
            self._queue.extend(groups[name] for name in sorted(groups, key=lambda name: -self._cost_of(first[name])))
        for node in self.nodes:
            self._feed(node)

    def _feed(self, node: WorkerController) -> None:
        if node.shutting_down or node not in self._collections:
            return
        pending = self._assigned[node]
        while self._queue and len(pending) < _LOW_WATER:
            group = self._next(node)
            pending.extend(group)
            with contextlib.suppress(OSError):  # it has just died: remove_node, which follows, puts the group back
                node.send_runtest_some(group)
        if not self._queue:
            node.shutdown()


    def _next(self, node: WorkerController) -> list[int]:
        """Take a group out of the queue for a worker: one of its own kind, else of a kind that no other worker is at,
        else the first."""
        assert self.collection is not None
        near = [self._kind_of(self.collection[group[0]]) for group in itertools.islice(self._queue, _NEAR)]
        own = self._last.pop(node, None)
        others = set(self._last.values())
        place = near.index(own) if own in near else next((at for at, kind in enumerate(near) if kind not in others), 0)
        group, self._last[node] = self._queue[place], near[place]
        del self._queue[place]
        return group


def _difference(one: Sequence[str], other: Sequence[str]) -> str:
    """The first place at which two different collections part."""
    for left, right in zip(one, other, strict=False):
        if left != right:
            return f"{right} where that has {left}"
    return f"{len(other)} items where that has {len(one)}"
