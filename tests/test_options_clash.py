"""The suite's options must be free in every environment: none may be an option of a plugin that is often beside it.

The lists were read from the plugins' own ``pytest_addoption`` in the versions named, so that no test needs them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import plugin

OPTIONS = {
    "pytest-benchmark 5.3.1": """
        --benchmark-min-time --benchmark-max-time --benchmark-min-rounds --benchmark-precision --benchmark-confidence
        --benchmark-timer --benchmark-calibration-precision --benchmark-warmup --benchmark-warmup-iterations
        --benchmark-disable-gc --benchmark-skip --benchmark-disable --benchmark-enable --benchmark-only
        --benchmark-save --benchmark-autosave --benchmark-save-data --benchmark-json --benchmark-compare
        --benchmark-compare-fail --benchmark-cprofile --benchmark-cprofile-loops --benchmark-cprofile-top
        --benchmark-cprofile-dump --benchmark-storage --benchmark-netrc --benchmark-verbose --benchmark-quiet
        --benchmark-sort --benchmark-group-by --benchmark-columns --benchmark-name --benchmark-time-unit
        --benchmark-histogram""",
    "pytest-cov 7.1.0": """
        --cov --cov-reset --cov-report --cov-config --no-cov-on-fail --no-cov --cov-fail-under --cov-append
        --cov-branch --cov-precision --cov-context""",
    "pytest-timeout 2.4.0": """
        --timeout --timeout_method --timeout-method --timeout-disable-debugger-detection --session-timeout""",
    "pytest-html 4.2.0": "--html --self-contained-html --css",
    "pytest-metadata 3.1.1": "--metadata --metadata-from-json --metadata-from-json-file",
    "pytest-randomly 5.1.0": "--randomly-seed --randomly-dont-reset-seed --randomly-dont-reorganize",
}


class _Recorder:
    """Stands in for pytest's parser and its group; keeps option strings and destinations."""

    def __init__(self) -> None:
        self.flags: list[str] = []
        self.destinations: list[str] = []

    def getgroup(self, *_: str) -> _Recorder:
        return self

    def addoption(self, *flags: str, dest: str, **_: object) -> None:
        self.flags += flags
        self.destinations.append(dest)


@pytest.fixture
def ours() -> _Recorder:
    recorder = _Recorder()
    plugin.pytest_addoption(recorder)  # type: ignore[arg-type]
    assert {"--kernels", "--tier", "--case"} <= set(recorder.flags)
    return recorder


@pytest.mark.parametrize("other", OPTIONS)
def test_no_option_of_ours_is_one_of(other: str, ours: _Recorder) -> None:
    assert not set(ours.flags) & set(OPTIONS[other].split())


def test_our_values_cannot_overwrite_another_plugins(ours: _Recorder) -> None:
    assert all(name.startswith("conformance_") for name in ours.destinations)
    assert not any(flag.startswith("-") and not flag.startswith("--") for flag in ours.flags)


def test_every_option_is_explained(ours: _Recorder) -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "options.md").read_text(encoding="utf-8")
    assert [flag for flag in ours.flags if f"`{flag}" not in page] == []
