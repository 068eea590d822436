"""scripts/conformance.sh and scripts/test.sh: what they set up, and what they say when something is missing.

A fake python3 stands in for the real one, so that no test needs a network: it "makes" environments, "installs" and
"runs" pytest by writing what it was asked to do into a log, and fails where the test tells it to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
TOOLS = (
    "bash", "cat", "cmp", "cp", "dirname", "env", "find", "flock", "grep", "head", "mkdir", "mktemp", "mv", "rm",
    "rmdir", "sleep", "sort", "tail",
)
FAKE_PYTHON = r"""#!/usr/bin/env bash
echo "${0##*/} $*" >>"$FAKE_LOG"
case "$*" in
    *version_info*find_spec*) echo "${FAKE_MISSING:-}" ;;
    *version_info*) [ -z "${FAKE_OLD:-}" ] ;;
    *is_available*) [ -n "${FAKE_GPU:-}" ] ;;
    *ensurepip*) [ -z "${FAKE_NO_VENV:-}" ] ;;
    *_base_executable*) echo "$0" ;;
    --version) echo "Python 3.11.0" ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install"*)
        if [ "${FAKE_PIP:-}" = kill ]; then kill -9 "$PPID"; fi
        if [ "${FAKE_PIP:-}" = slow ]; then sleep 0.5; fi
        if [ "${FAKE_PIP:-}" = full ]; then echo "ERROR: [Errno 28] No space left on device" >&2; exit 1; fi
        if [ "${FAKE_PIP:-}" = fail ]; then echo "ERROR: No matching distribution found" >&2; exit 1; fi ;;
    "-m pytest"*)
        all=$* page=reports/cpu.html
        if [[ $all == *--report-dir=* ]]; then page=${all##*--report-dir=}/cpu.html; fi
        sleep 0.05 # longer than a file system's clock tick: the page is newer than the script's own mark
        mkdir -p "$(dirname "$page")" && echo page >"$page"
        exit "${FAKE_PYTEST:-0}" ;;
esac
"""


class Checkout:
    """A checkout whose path holds a space, on a machine that has ``TOOLS`` and a fake python3, and nothing else."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "a checkout"
        self.log = tmp_path / "log"
        self.path = tmp_path / "bin"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        (self.root / "constraints.txt").write_text("pytest==1\n")
        self.path.mkdir()
        for tool in TOOLS:
            found = shutil.which(tool)
            if found:
                (self.path / tool).symlink_to(found)
        self.python = self.path / "python3"
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)
        self.elsewhere = tmp_path / "elsewhere"
        self.elsewhere.mkdir()

    def command(self, script: str, *arguments: str) -> list[str]:
        return ["bash", str(self.root / "scripts" / script), *arguments]

    def environment(self, **more: str) -> Mapping[str, str]:
        return {"PATH": str(self.path), "FAKE_LOG": str(self.log), "HOME": str(self.elsewhere), **more}

    def run(self, script: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(script, *arguments), env=self.environment(**more), cwd=self.elsewhere,
            capture_output=True, text=True, timeout=60, check=False,
        )

    def calls(self, start: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(start)]

    @property
    def installs(self) -> int:
        return len(self.calls("python -m pip install"))


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def one_line(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The script could not set up, said so in one line with ``parts``, and did not run pytest."""
    assert done.returncode == 10
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    for part in parts:
        assert part in done.stderr


def test_first_run_installs_the_pins_and_the_second_installs_nothing(checkout: Checkout) -> None:
    done = checkout.run("conformance.sh", "--tier", "smoke")
    assert done.returncode == 0, done.stderr
    assert f"-r {checkout.root}/constraints.txt" in checkout.calls("python -m pip install")[0]
    assert checkout.calls("python -m pytest") == ["python -m pytest -n auto --tier smoke"]
    assert done.stdout.splitlines()[-1] == f"HTML report: {checkout.root}/reports/cpu.html"
    again = checkout.run("test.sh", "-k", "cases")
    assert again.returncode == 0 and checkout.installs == 1
    assert checkout.calls("python -m pytest")[1:] == ["python -m pytest tests -n auto -k cases"]


def test_changed_pins_are_installed_into_a_new_environment(checkout: Checkout) -> None:
    checkout.run("test.sh")
    (checkout.root / ".venv" / "left-over").touch()
    (checkout.root / "constraints.txt").write_text("pytest==2\n")
    assert checkout.run("test.sh").returncode == 0
    assert checkout.installs == 2 and not (checkout.root / ".venv" / "left-over").exists()
    assert not (checkout.root / ".venv-old").exists()


@pytest.mark.parametrize("how", ["fail", "full", "kill"])
def test_an_interrupted_installation_is_made_anew(checkout: Checkout, how: str) -> None:
    done = checkout.run("conformance.sh", FAKE_PIP=how)
    assert done.returncode and not checkout.calls("python -m pytest")
    (checkout.root / ".venv" / "left-over").touch()
    assert checkout.run("conformance.sh").returncode == 0
    assert checkout.installs == 2 and not (checkout.root / ".venv" / "left-over").exists()


def test_one_line_says_what_pip_met(checkout: Checkout) -> None:
    one_line(checkout.run("conformance.sh", FAKE_PIP="fail"), "No matching distribution found", "install.log")
    one_line(checkout.run("test.sh", FAKE_PIP="full"), "no disk space")


def test_one_line_says_what_python_lacks(checkout: Checkout) -> None:
    one_line(checkout.run("conformance.sh", FAKE_OLD="1"), "no Python 3.10 or newer")
    one_line(checkout.run("conformance.sh", FAKE_NO_VENV="1"), "no venv module", "python3-venv")
    checkout.python.unlink()
    one_line(checkout.run("test.sh"), "no Python 3.10 or newer")
    assert not (checkout.root / ".venv").exists()


def test_an_environment_of_the_users_own_is_left_alone(checkout: Checkout) -> None:
    own = checkout.root / ".venv" / "own"
    own.mkdir(parents=True)
    one_line(checkout.run("conformance.sh"), ".venv was not made by this script", "CONFORMANCE_PYTHON")
    assert own.exists() and checkout.installs == 0


def test_python_whose_torch_sees_a_gpu_is_used_as_it_is(checkout: Checkout) -> None:
    done = checkout.run("conformance.sh", FAKE_GPU="1")
    assert done.returncode == 0 and "as it is" in done.stdout
    assert checkout.calls("python3 -m pytest") == ["python3 -m pytest -n auto"]
    assert not (checkout.root / ".venv").exists()
    one_line(checkout.run("test.sh", FAKE_GPU="1", FAKE_MISSING="pytest-xdist jinja2"), "lacks: pytest-xdist jinja2")


def test_conformance_python_is_used_as_it_is(checkout: Checkout) -> None:
    python = checkout.elsewhere / "my python"
    shutil.copy(checkout.python, python)
    assert checkout.run("test.sh", CONFORMANCE_PYTHON=str(python)).returncode == 0
    assert checkout.calls("my python -m pytest") and not (checkout.root / ".venv").exists()
    one_line(checkout.run("test.sh", CONFORMANCE_PYTHON="/no/such/python"), "/no/such/python does not run")
    one_line(checkout.run("test.sh", CONFORMANCE_PYTHON=str(python), FAKE_OLD="1"), "older than Python 3.10")


def test_exit_status_and_report_directory_are_passed_on(checkout: Checkout, tmp_path: Path) -> None:
    pages = tmp_path / "my pages"
    pages.mkdir()  # pytest would take an existing one for its root if it came as a word of its own
    done = checkout.run("conformance.sh", "--report-dir", str(pages), FAKE_PYTEST="1")
    assert done.returncode == 1
    assert checkout.calls("python -m pytest") == [f"python -m pytest -n auto --report-dir={pages}"]
    assert done.stdout.splitlines()[-1] == f"HTML report: {pages}/cpu.html"


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is what makes two runs wait for each other")
def test_two_runs_at_once_make_one_environment(checkout: Checkout) -> None:
    env = checkout.environment(FAKE_PIP="slow")
    runs = [subprocess.Popen(checkout.command("test.sh"), env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    assert checkout.installs == 1 and len(checkout.calls("python -m pytest")) == 2


def test_a_missing_compiler_is_a_note(checkout: Checkout) -> None:
    script = 'source "$1/scripts/lib.sh"; python=$2; cd "$root"; note_compiler'
    done = subprocess.run(
        ["bash", "-euc", script, "-", str(ROOT), sys.executable],
        env={"PATH": str(checkout.path)}, capture_output=True, text=True, timeout=60, check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the TileLang CPU kernels will be reported as not run" in done.stdout


def test_it_runs_from_a_bare_checkout_in_any_directory(tmp_path: Path) -> None:
    checkout = tmp_path / "bare checkout"
    for name in ("conformance", "references", "kernels", "matrices", "reports", "scripts"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl", "*.html"))
    for name in ("conftest.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout)
    done = subprocess.run(
        ["bash", str(checkout / "scripts" / "conformance.sh"), "--collect-only", "-q", "-n0", "--tier", "smoke",
         "--kernels", "vectorised", "--report-dir", str(tmp_path)],
        env={**os.environ, "CONFORMANCE_PYTHON": sys.executable}, cwd=tmp_path,
        capture_output=True, text=True, timeout=120, check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "48 tests collected" in done.stdout and not (checkout / ".venv").exists()


def test_every_dependency_is_pinned_for_every_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = [Requirement(line) for line in lines]
    for python in ("3.10", "3.11", "3.12", "3.13"):
        environment = {"python_version": python}
        here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
        versions = {pin.name.lower(): str(pin.specifier).removeprefix("==") for pin in here}
        assert len(versions) == len(here), f"two pins of one package on Python {python}"
        for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate(environment):
                assert wanted.specifier.contains(versions[wanted.name]), f"{text} on Python {python}"


def test_scripts_have_no_syntax_errors_and_ci_runs_readmes_command() -> None:
    for script in (*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"):
        subprocess.run(["bash", "-n", str(script)], check=True)
    for command in ("bash scripts/conformance.sh", "bash scripts/test.sh"):
        assert command in (ROOT / "README.md").read_text() and command in (ROOT / ".ci" / "run").read_text()
