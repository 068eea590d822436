"""xdist's workers as the controller sees them: how they are started, what each is given, and how they end.

These hooks exist only where xdist is installed and not switched off.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import options
from conformance.cases.plan import group_of, parse_nodeid
from conformance.devices.gpus import device_bytes, workers_for
from conformance.environment import chosen_archs
from conformance.errors import ConformanceError
from conformance.runs.portion import hand_on, reported_division
from conformance.session import ahead, run_options
from conformance.session.controller import Controller
from conformance.session.isolation import Death, end_leftovers, exit_status, read_death
from conformance.session.preparing import programs_of

CONTROLLER: pytest.StashKey[Controller] = pytest.StashKey()
_RESTARTS = 1000  # xdist's own limit on replaced workers; quarantine and _IDLE_DEATHS end a bad run much earlier
_IDLE_DEATHS = 3  # more of these in a row than workers: none will ever run a case


def let_workers_be_replaced(config: pytest.Config, flags: Sequence[str]) -> None:
    """Prepare the controller's options for workers that come and go.

    Workers parse the command line again. Before the conftest is loaded pytest takes the value of ``--report-dir DIR``
    for a path to test and, once it exists, for the root of the project; so workers get ``--report-dir=DIR``.
    """
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = str(_RESTARTS)
    given = config.invocation_params
    arguments: list[str] = []
    for word in map(str, given.args):
        if arguments and arguments[-1] in flags:
            arguments[-1] += f"={word}"
        else:
            arguments.append(word)
    config.invocation_params = pytest.Config.InvocationParams(args=arguments, plugins=given.plugins, dir=given.dir)


class XdistHooks:
    """The controller's hooks; in a worker none of them is called."""

    def __init__(self) -> None:
        self._controller: Controller | None = None
        self._collected: set[str] = set()
        self._idle_deaths = 0

    def pytest_xdist_auto_num_workers(self, config: pytest.Config) -> int | None:
        """xdist asks before pytest_configure. What is wrong with the options is told there."""
        try:
            devices = chosen_archs(options.select(config.getoption).archs).values()
            return workers_for(devices, run_options.checked(config.getoption)[2],
                               config.getoption("conformance_bench"))
        except ConformanceError:
            return None

    def pytest_configure_node(self, node: Any) -> None:
        config = node.config
        if "conformance_tmp" not in config.__dict__:
            config.conformance_tmp = tempfile.TemporaryDirectory(prefix="conformance-")
            if CONTROLLER in config.stash:
                hand_on(config.stash[CONTROLLER].portion, Path(config.conformance_tmp.name))
        node.workerinput["conformance_dir"] = config.conformance_tmp.name

    def pytest_xdist_make_scheduler(self, config: pytest.Config) -> Any:
        self._controller = config.stash.get(CONTROLLER, None)
        if config.getoption("dist") != "load" or self._controller is None:
            return None
        from conformance.session.scheduling import GroupScheduling

        try:
            self._controller.opening.get_ready()  # while the workers do the same
        except ConformanceError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
        self._controller.scheduler = GroupScheduling(
            len(config.getoption("tx")), group_of, functools.partial(device_bytes, self._controller.run),
            functools.partial(programs_of, self._controller.run))
        return self._controller.scheduler

    def pytest_xdist_node_collection_finished(self, node: Any, ids: Sequence[str]) -> None:
        """Before anything runs, the first worker's collection tells what will run."""
        self._collected.add(node.gateway.id)
        if self._controller is None or self._controller.recorders:
            return
        try:
            division = reported_division(Path(node.config.conformance_tmp.name), node.gateway.id)
            self._controller.start(ids, len(node.config.getoption("tx")), division)
            folder = Path(node.config.conformance_tmp.name)
            self._controller.display.watch(functools.partial(ahead.so_far, folder))
        except ConformanceError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._idle_deaths = 0
        if self._controller is not None and self._controller.scheduler is not None:
            self._controller.scheduler.mark_test_started(nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Notice workers that end without running a case: xdist would replace them for ever."""
        scheduler = self._controller.scheduler if self._controller is not None else None
        name = node.gateway.id
        if not error and getattr(node, "workeroutput", {}).get("exitstatus") == pytest.ExitCode.USAGE_ERROR:
            missing = [word for word in node.config.args if not Path(word.partition("::")[0]).exists()]
            why = f"no file or folder {', '.join(missing)}" if missing else "without -n pytest says why"
            pytest.exit(f"worker {name} could not collect anything: {why}", returncode=pytest.ExitCode.USAGE_ERROR)
        if not error or scheduler is None or scheduler.at_work(node):
            return
        if name not in self._collected and "Traceback" in str(error):
            pytest.exit(f"worker {name} could not start: {str(error).strip().splitlines()[-1]}",
                        returncode=pytest.ExitCode.USAGE_ERROR)
        death = self._death(node)
        assert self._controller is not None
        self._controller.worker_lost(death)
        self._idle_deaths += 1
        if self._idle_deaths > len(node.config.getoption("tx")) + _IDLE_DEATHS:
            pytest.exit(f"{self._idle_deaths} workers in a row ended between cases: {name} {death.sentence}",
                        returncode=pytest.ExitCode.INTERNAL_ERROR)

    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        planned = parse_nodeid(crashitem)
        if planned is None or self._controller is None:
            return
        self._controller.crashed(planned, report, self._death(report.node))
        for other in self._controller.quarantined(planned.kernel):
            other.node = report.node  # type: ignore[attr-defined]
            report.node.config.hook.pytest_runtest_logreport(report=other)
        if report.outcome == "failed":
            _stop_at_maxfail(report.node.config)

    def _death(self, node: Any) -> Death:
        assert self._controller is not None
        name = node.gateway.id
        process = getattr(getattr(node.gateway, "_io", None), "popen", None)
        stack = Path(node.config.conformance_tmp.name) / f"{name}.stack"
        death = read_death(name, stack, self._controller.run.case_timeout, exit_status(process))
        end_leftovers({"PYTEST_XDIST_TESTRUNUID": node.workerinput["testrunuid"], "PYTEST_XDIST_WORKER": name})
        return death


def _stop_at_maxfail(config: pytest.Config) -> None:
    """``-x`` and ``--maxfail`` count a crash, too: xdist counts only what workers report. (Called before it counts.)"""
    limit = config.getoption("maxfail")
    session: Any = config.pluginmanager.get_plugin("session")
    distributed: Any = config.pluginmanager.get_plugin("dsession")
    if limit and session.testsfailed + 1 >= limit:
        distributed.shouldstop = f"stopping after {session.testsfailed + 1} failures"
