"""When a rule of expectation ends: on a date, with a version of a package, or once an architecture has a fact."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping

from conformance.arch import FP8_FORMATS, Arch, kind_of
from conformance.errors import ConformanceError, unknown_name
from conformance.expectations.rule import Expectation

PACKAGES = ("tilelang", "torch")  # whose versions an "until" may name
_UNTIL = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)|(?P<package>[\w-]+)\s*>=\s*(?P<version>[\w.]+)|(?P<fact>[\w.]+)=(?P<value>\w+)"
)


def check_dates(since: str, until: str, where: str) -> None:
    """Check when a rule begins and ends. Raises ConformanceError for what is no date and no end that can come."""
    begins = _date("since", since, where)
    end = _UNTIL.fullmatch(until)
    if end is None:
        raise ConformanceError(
            f"{where}: until = {until!r} must be a date (2027-06-30), a version (tilelang>=0.1.16) or a fact (fp8=ocp)"
        )
    if end["date"] and _date("until", until, where) <= begins:
        raise ConformanceError(f"{where}: until = {until!r} must be later than since = {since!r}")
    if end["package"]:
        _check_version(end["package"], end["version"], where)
    if end["fact"]:
        kind = kind_of(end["fact"], f"{where}: until")
        known = {bool: ("true", "false"), str: FP8_FORMATS}.get(kind)
        if (known and end["value"].lower() not in known) or (kind is int and not end["value"].isdecimal()):
            raise ConformanceError(f"{where}: until = {until!r}: {end['fact']} never has this value")


def _date(key: str, text: str, where: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise ConformanceError(f"{where}: {key} = {text!r} is no date such as 2026-11-29") from None


def _check_version(package: str, text: str, where: str) -> None:
    from packaging.version import InvalidVersion, Version

    if package not in PACKAGES:  # of another one it could never come
        raise unknown_name(f"package in {where}: until", package, PACKAGES)
    try:
        Version(text)
    except InvalidVersion:
        raise ConformanceError(f"{where}: until: {text!r} is no version") from None


def over(rule: Expectation, arch: Arch, today: datetime.date, versions: Mapping[str, str]) -> str | None:
    """Why the rule's ``until`` has come, or None. ``versions``: installed packages."""
    from packaging.version import Version

    until = _UNTIL.fullmatch(rule.until)
    if until is None:
        return None
    if until["date"]:
        return f"{until['date']} has come" if today >= datetime.date.fromisoformat(until["date"]) else None
    if until["package"]:
        here = versions.get(until["package"])
        reached = here is not None and Version(here) >= Version(until["version"])
        return f"{until['package']} {here} is installed" if reached else None
    value = arch.fact(until["fact"])
    return f"{until['fact']} is {until['value']} now" if str(value).lower() == until["value"].lower() else None
