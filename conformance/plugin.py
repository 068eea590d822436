"""The pytest plugin: options, collection of matrices, workers and crashes, records, progress and the summary.

Roles: the *controller* writes records and reports (under ``-n`` it collects nothing); a *worker* judges cases.
Without ``-n`` one process is both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance import options
from conformance.errors import ConformanceError
from conformance.isolation import CrashLog
from conformance.items import RUN, CaseItem, MatrixFile
from conformance.plan import group_of, parse_nodeid
from conformance.registry import ROOT, kernels, matrix_files, put_checkout_first
from conformance.run import Run, bind_gpu
from conformance.session import Controller

CONTROLLER: pytest.StashKey[Controller] = pytest.StashKey()
_RESTARTS = 1000


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance of GPU kernels")
    for option in options.OPTIONS:
        group.addoption(option.flag, dest=option.dest, metavar=option.metavar, help=option.help)
    group.addoption("--case-timeout", dest="conformance_case_timeout", type=float, default=120.0, metavar="SECONDS",
                    help="time limit of one case on one kernel, 0 = none (default 120)")
    group.addoption("--report-dir", dest="conformance_report_dir", default=None, metavar="DIR",
                    help="where records and pages go (default: reports/)")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    if pluginmanager.hasplugin("xdist"):
        pluginmanager.register(_WithXdist(), "conformance-xdist")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: the covering subset of the matrices, for pull requests")
    try:
        put_checkout_first()
        selection = options.select(config.getoption)
        if _is_worker(config):
            worker = config.workerinput  # type: ignore[attr-defined]
            index = int(worker["workerid"].removeprefix("gw"))
            bind_gpu(index)
            _limit_threads(worker["workercount"])
            shared = Path(worker["conformance_dir"])
            log, place = CrashLog(shared / f"{worker['workerid']}.stack"), (index, worker["workercount"])
        else:
            shared, log, place = None, CrashLog(None), (0, 1)
        from conformance.environment import chosen_archs

        archs = chosen_archs(selection.archs)
        for of in selection.matrices():
            kernels(of.operator, selection.kernels)
        config.stash[RUN] = Run(selection, archs, config.getoption("conformance_case_timeout"), log, shared, place)
        if not _is_worker(config):
            directory = config.getoption("conformance_report_dir")
            config.stash[CONTROLLER] = Controller(config.stash[RUN], Path(directory) if directory else None)
            if getattr(config.option, "maxworkerrestart", "") is None:
                config.option.maxworkerrestart = str(_RESTARTS)
    except ConformanceError as error:
        raise pytest.UsageError(str(error)) from None


def _limit_threads(workers: int) -> None:
    """Workers share the cores: one thread each unless there are more cores than workers."""
    import os

    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix == ".toml" and file_path.parent == ROOT / "matrices" and file_path in matrix_files():
        return MatrixFile.from_parent(parent, path=file_path)
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Whatever another plugin shuffles, cases that share data stay together."""
    order = {id(item): number for number, item in enumerate(items)}
    yield
    if any(isinstance(item, CaseItem) for item in items):
        items.sort(key=lambda item: order[id(item)])


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    config = session.config
    cases = [item for item in session.items if isinstance(item, CaseItem)]
    if cases and not config.option.collectonly:
        config.stash[RUN].prepare((item.case, item.kernel, item.arch) for item in cases)
        if CONTROLLER in config.stash:
            config.stash[CONTROLLER].start([item.nodeid for item in session.items], workers=0)
    return (yield)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """A case has no fixtures: one report instead of three keeps 20 000 items cheap."""
    if not isinstance(item, CaseItem):
        return None
    from _pytest.runner import runtestprotocol

    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        if report.when == "call" or not report.passed:
            hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if isinstance(item, CaseItem) and call.when == "call" and item.result is not None:
        report.conformance = item.result
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _controller is not None:
        _controller.record(report)


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """No dot per case: the progress line says more in less."""
    if hasattr(report, "conformance") and report.when == "call":
        category = report.outcome
        return category, "", category.upper()
    return None


_controller: Controller | None = None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    global _controller
    if CONTROLLER in session.config.stash:
        _controller = session.config.stash[CONTROLLER]
        _controller.terminal = session.config.pluginmanager.get_plugin("terminalreporter")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global _controller
    if RUN in session.config.stash:
        session.config.stash[RUN].close()
    if _controller is not None:
        if _controller.finish(failed=bool(exitstatus)) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        _controller = None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if CONTROLLER in config.stash:
        config.stash[CONTROLLER].summary(terminalreporter)


class _WithXdist:
    """Hooks that exist only when xdist is installed."""

    def pytest_configure_node(self, node: Any) -> None:
        config = node.config
        if "conformance_tmp" not in config.__dict__:
            config.conformance_tmp = tempfile.TemporaryDirectory(prefix="conformance-")
        node.workerinput["conformance_dir"] = config.conformance_tmp.name

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        if config.getoption("dist") != "load" or CONTROLLER not in config.stash:
            return None
        from conformance.scheduling import GroupScheduling

        controller = config.stash[CONTROLLER]
        workers = len(config.getoption("tx"))
        scheduler = GroupScheduling(workers, group_of, lambda ids: controller.start(ids, workers), log)
        controller.scheduler = scheduler
        return scheduler

    def pytest_xdist_auto_num_workers(self, config: pytest.Config) -> int | None:
        from conformance.session import workers_for

        return workers_for(config.stash[RUN]) if RUN in config.stash else None

    def pytest_handlecrashitem(self, crashitem: str, report: Any, sched: Any) -> None:
        planned = parse_nodeid(crashitem)
        if planned is not None and _controller is not None:
            folder = Path(report.node.config.conformance_tmp.name)
            _controller.crashed(planned, report, folder / f"{report.node.gateway.id}.stack")
