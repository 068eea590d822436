"""The pytest plugin: options, collection of matrices, workers and crashes, records, progress and the summary.

Roles: the *controller* writes records and reports (under ``-n`` it collects nothing); a *worker* judges cases.
Without ``-n`` one process is both.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.cases import options
from conformance.devices.gpus import bind_gpu, limit_threads, start_device
from conformance.errors import ConformanceError
from conformance.launching import exit_guard
from conformance.registry import ROOT, kernels, matrix_files, put_checkout_first
from conformance.runs.portion import Division, Portion, handed_on, read_portion, report_division
from conformance.session import run_options
from conformance.session.controller import Controller
from conformance.session.isolation import CrashLog
from conformance.session.items import RUN, CaseItem, MatrixFile, clipped
from conformance.session.preparing import prepare
from conformance.session.progress import category_of, few_listed, keep_one_of_many
from conformance.session.run import Run
from conformance.session.workers import CONTROLLER, XdistHooks, let_workers_be_replaced

PORTION: pytest.StashKey[Portion] = pytest.StashKey()
DIVISION: pytest.StashKey[Division] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance of GPU kernels")
    for option in options.OPTIONS:
        group.addoption(option.flag, dest=option.dest, metavar=option.metavar, help=option.help)
    run_options.add(group)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    if pluginmanager.hasplugin("xdist"):
        pluginmanager.register(XdistHooks(), "conformance-xdist")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: the covering subset of the matrices, for pull requests")
    if not _is_worker(config):
        exit_guard.guard()
    try:
        put_checkout_first()
        selection = replace(options.select(config.getoption), bench=config.getoption("conformance_bench"))
        limit, vacuity, memory = run_options.checked(config.getoption)
        if _is_worker(config):
            worker = config.workerinput  # type: ignore[attr-defined]
            index = int(worker["workerid"].removeprefix("gw"))
            gpus = bind_gpu(index)
            limit_threads(worker["workercount"])
            shared = Path(worker["conformance_dir"])
            log, place = CrashLog(shared / f"{worker['workerid']}.stack"), (index, worker["workercount"])
        else:
            shared, log, place, gpus = None, CrashLog(None), (0, 1), 1
        from conformance.environment import ABSENT, chosen_archs

        archs = chosen_archs(selection.archs)
        if _is_worker(config) and "cuda" in archs.values():
            start_device()
        chosen = {of.operator: kernels(of.operator, selection.kernels) for of in selection.matrices()}
        if chosen and selection.kernels and not any(chosen.values()):
            raise ConformanceError(f"--kernels {','.join(selection.kernels)}: none is a kernel of "
                                   f"{', '.join(chosen)}; 'python -m conformance list' prints the kernels of each")
        config.stash[RUN] = Run(selection, archs, limit, log, shared, place, vacuity, gpus, memory)
        if shared is not None:
            config.stash[PORTION] = handed_on(shared)
        else:
            shard, costs, resume, anyway = (
                config.getoption(f"conformance_{name}") for name in ("shard", "shard_costs", "resume", "resume_anyway"))
            timed = [arch for arch, device in archs.items() if selection.bench and device != ABSENT]
            config.stash[PORTION] = read_portion(shard, costs, resume, anyway, archs, timed)
        if not _is_worker(config):
            directory = config.getoption("conformance_report_dir")
            config.stash[CONTROLLER] = Controller(
                config.stash[RUN], Path(directory) if directory else None, config.stash[PORTION])
            if directory and not config.option.collectonly:
                config.stash[CONTROLLER].check_directory()
            let_workers_be_replaced(config, [*run_options.WITH_VALUE, *(option.flag for option in options.OPTIONS)])
    except ConformanceError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix == ".toml" and file_path.parent == ROOT / "matrices" and file_path in matrix_files():
        return MatrixFile.from_parent(parent, path=file_path)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Before matrices are collected, where an error would be one of many lines, they are expanded and -m is read."""
    if CONTROLLER in session.config.stash:
        try:
            run_options.check_markers(session.config.option.markexpr, session.config.getini("markers"))
            session.config.stash[CONTROLLER].opening.plan()
        except ConformanceError as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """However another plugin shuffles, cases that share data stay together: they take their own places in turn."""
    yield
    places = [number for number, item in enumerate(items) if isinstance(item, CaseItem)]
    cases = sorted((item for item in items if isinstance(item, CaseItem)), key=lambda item: (item.path, item.place))
    for number, item in zip(places, cases, strict=True):
        items[number] = item
    portion = config.stash[PORTION]
    if not portion.whole:
        _leave_out(portion, config, items)


def _leave_out(portion: Portion, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that other shards do and those that an earlier run did."""
    run = config.stash[RUN]
    cases = [item for item in items if isinstance(item, CaseItem)]
    kept, division = portion.divide([item.as_item(run) for item in cases], run.estimate)
    wanted = {cases[index] for index in kept}
    gone = [item for item in cases if item not in wanted]
    items[:] = [item for item in items if not isinstance(item, CaseItem) or item in wanted]
    config.stash[DIVISION] = division
    if _is_worker(config):
        report_division(division, run.shared_dir, config.workerinput["workerid"])  # type: ignore[attr-defined]
    if gone:
        config.hook.pytest_deselected(items=gone)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    config = session.config
    cases = [item for item in session.items if isinstance(item, CaseItem)]
    division = config.stash.get(DIVISION, Division())
    if (cases or division.recorded) and not config.option.collectonly:
        if CONTROLLER in config.stash:
            try:
                config.stash[CONTROLLER].start([item.nodeid for item in session.items], 0, division)
            except ConformanceError as error:
                pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
            config.stash[CONTROLLER].display.watch(config.stash[RUN].ahead.so_far)
        prepare(config.stash[RUN], ((item.case, item.kernel, item.arch) for item in cases))
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
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """The result travels with the report to the controller; what a kernel printed only where it may help."""
    report = yield
    if isinstance(item, CaseItem) and call.when == "call" and item.result is not None:
        report.conformance, item.result = item.result, None
        report.sections = [(name, clipped(text)) for name, text in report.sections] if report.failed else []
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> Generator[None, Any, Any]:
    if _controller is not None:
        _controller.record(report)
    result = yield
    if _controller is not None:
        keep_one_of_many(_controller.display.terminal, report)
    return result


def pytest_report_teststatus(report: Any, config: pytest.Config) -> tuple[str, str, str] | None:
    """No dot per case: the progress line says more in less."""
    if hasattr(report, "conformance") and report.when == "call":
        category = category_of(report)
        return category, "", "" if report.passed and config.get_verbosity() <= 0 else category.upper()
    return None


_controller: Controller | None = None


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    global _controller
    if CONTROLLER in session.config.stash:
        _controller = session.config.stash[CONTROLLER]
        _controller.display.terminal = session.config.pluginmanager.get_plugin("terminalreporter")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global _controller
    if RUN in session.config.stash:
        session.config.stash[RUN].close()
    if "hypothesis" not in sys.modules:  # its plugin imports all of it when a session ends, to print nothing
        session.config.pluginmanager.unregister(name="hypothesispytest")
    if _controller is not None:
        if _controller.carried and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # all was done before
            exitstatus = session.exitstatus = pytest.ExitCode.OK
        if _controller.finish(failed=bool(exitstatus)) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        _controller = None


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    exit_guard.unguard()
    session, restore = config.pluginmanager.get_plugin("session"), sys.modules.get("conformance.launching.restore")
    if session is not None and restore is not None:  # cases were run here
        restore.end_in_spite_of_threads(int(session.exitstatus), patience=1.0 if _is_worker(config) else 5.0)
    if _is_worker(config):
        exit_guard.end_without_teardown()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> Generator[None, Any, Any]:
    """Last of all sections, and the outermost wrapper: pytest lists failures both before and after the others'."""
    if CONTROLLER not in config.stash:
        return (yield)
    with few_listed(terminalreporter):
        result = yield
    controller = config.stash[CONTROLLER]
    controller.display.summary(controller.made, controller.timings)
    return result
