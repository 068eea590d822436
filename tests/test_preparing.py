"""Compiling ahead in several threads: all of them at work, failures contained, routes as what tells entries apart."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.arch import Arch
from conformance.registry import kernels, matrix
from conformance.route import Route
from conformance.session import preparing
from conformance.session.ahead import Ahead
from conformance.session.isolation import CrashLog

(VECTORISED,) = kernels("moe_reduce_fused", ["vectorised"])
CASES = matrix("moe_reduce_fused").cases("smoke")


@contextlib.contextmanager
def _judging(_: str) -> Iterator[None]:
    yield


def run_of(archs: Mapping[str, str], worker: tuple[int, int] = (0, 1)) -> Any:
    return SimpleNamespace(archs=archs, worker=worker, judging=_judging, case_timeout=60.0, in_worker=True,
                           crash_log=CrashLog(None), ahead=Ahead(None, 0))


def test_threads_prepare_together_and_failures_stay_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "cores", lambda: 3)
    together, seen = threading.Barrier(3, timeout=30), []

    def prepare(params: Mapping[str, str], device: str) -> None:
        seen.append((params["hidden"], device))
        together.wait()
        if params["hidden"] == "2048":
            raise SystemExit(3)

    def route(params: Mapping[str, str], arch: Arch) -> Route:
        return Route("k", params["hidden"])

    one = dataclasses.replace(VECTORISED, prepare=prepare, route=route, requires=None)
    run = run_of({"sm_90": "cuda"})
    hidden = ("2048", "2560", "3072", "4096", "6144", "7168")  # two turns of three threads
    preparing.prepare(run, [(case, one, None) for case in CASES if case.params["hidden"] in hidden])
    assert sorted(seen) == [(size, "cuda") for size in hidden]
    assert run.ahead.so_far() == (6, 6)


def test_one_thread_where_workers_have_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "cores", lambda: 8)
    threads = set()

    def prepare(params: Mapping[str, str], device: str) -> None:
        threads.add(threading.current_thread())

    one = dataclasses.replace(VECTORISED, prepare=prepare, requires=None)
    for archs, worker in (({"cpu": "cpu"}, (0, 1)), ({"sm_90": "cuda"}, (3, 8))):
        preparing.prepare(run_of(archs, worker), [(case, one, None) for case in CASES])
    assert threads == {threading.main_thread()}
