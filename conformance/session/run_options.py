"""The options that only pytest has: limits, where records go, and which part of the plan is run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from conformance.cases.options import VACUITY, empty
from conformance.devices.memory import parse_bytes
from conformance.errors import ConformanceError, unknown_name

CASE_TIMEOUT, REPORT_DIR, VACUITY_FLAG, BENCH = "--case-timeout", "--report-dir", "--vacuity", "--conformance-bench"
RESUME, ANYWAY, SHARD, COSTS = "--resume", "--resume-anyway", "--shard", "--shard-costs"
MEMORY = "--memory-limit"
WITH_VALUE = (CASE_TIMEOUT, REPORT_DIR, VACUITY_FLAG, RESUME, SHARD, COSTS, MEMORY)
_LONGEST_TIMEOUT = 30 * 24 * 3600.0


def add(group: Any) -> None:
    """Declare them in a group of pytest's parser."""
    group.addoption(CASE_TIMEOUT, dest="conformance_case_timeout", type=float, default=120.0, metavar="SECONDS",
                    help="time limit of one case on one kernel, 0 = none (default 120)")
    group.addoption(REPORT_DIR, dest="conformance_report_dir", default=None, metavar="DIR",
                    help=f"where records and pages go (default: reports/); outside the checkout: {REPORT_DIR}=DIR")
    group.addoption(VACUITY_FLAG, dest="conformance_vacuity", default="smoke", metavar="smoke|all|off",
                    help="cases that first prove that they reject wrong results (default: those of the smoke tier)")
    group.addoption(BENCH, dest="conformance_bench", action="store_true",
                    help="time every case that is found right (default tiers: those that a matrix declares for it)")
    group.addoption(RESUME, dest="conformance_resume", default=None, metavar="RECORDS",
                    help=f"run what a killed run left undone: its record file, or their directory ({RESUME}=RECORDS)")
    group.addoption(ANYWAY, dest="conformance_resume_anyway", action="store_true",
                    help="resume although commit, versions, device, plan or kernels differ; the report says so")
    group.addoption(SHARD, dest="conformance_shard", default=None, metavar="I/N",
                    help="only part I of N of the plan, for 'python -m conformance merge' to join")
    group.addoption(COSTS, dest="conformance_shard_costs", default=None, metavar="RECORDS",
                    help=f"balance shards by the seconds in these records; the same for all shards ({COSTS}=RECORDS)")
    group.addoption(MEMORY, dest="conformance_memory_limit", default=None, metavar="SIZE",
                    help="memory of the device that this run may use at most, as 24GB or 512MB (default: what is free)")


def check_markers(expression: str, declared: Iterable[str]) -> None:
    """Raises ConformanceError for a name in -m that no declared marker has: pytest runs nothing and says nothing."""
    known = {line.partition(":")[0].partition("(")[0].strip() for line in declared}
    for name in re.findall(r"[A-Za-z_]\w*", re.sub(r"\([^()]*=[^()]*\)", "", expression)):
        if name not in known | {"and", "or", "not", "True", "False"}:
            raise unknown_name("marker in -m", name, known)


def checked(get: Callable[[str], Any]) -> tuple[float, str, int | None]:
    """Time limit of a case in seconds, which cases prove themselves, and the memory limit in bytes, from parsed options
    (``get(dest)``). Raises ConformanceError for values that cannot be."""
    for flag in (REPORT_DIR, RESUME, COSTS):
        value = get("conformance_" + flag.strip("-").replace("-", "_"))
        if value is not None and not value.strip():
            raise empty(flag)
    seconds: float = get("conformance_case_timeout")
    if not 0 <= seconds <= _LONGEST_TIMEOUT:  # also false for nan
        raise ConformanceError(f"{CASE_TIMEOUT} {seconds:g}: give seconds from 0 (no limit) to {_LONGEST_TIMEOUT:g}")
    vacuity: str = get("conformance_vacuity")
    if vacuity not in VACUITY:
        raise unknown_name(f"value of {VACUITY_FLAG}", vacuity, VACUITY)
    limit = get("conformance_memory_limit")
    return seconds, vacuity, None if limit is None else parse_bytes(MEMORY, limit)
