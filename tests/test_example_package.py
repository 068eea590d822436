"""Kernels from outside the checkout: the example package through its entry point, README's module by name.

Each test runs pytest in a process of its own on a few smoke cases, as a user would.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "own_kernel"
GROUP = "conformance.kernels"


def install_example(site: Path) -> None:
    """What installing the example leaves behind: its module, and metadata with its entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    metadata = site / "own_kernel-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(EXAMPLE / f"{module}.py", site)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['project']['name']}\nVersion: 0.1.0\n")
    points = project["project"]["entry-points"][GROUP]
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))


def run_suite(site: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """pytest in the checkout with ``site`` importable, and the results that it recorded. On the CPU everywhere."""
    pages = site / "pages"
    options = ["-p", "no:cacheprovider", "--arch", "cpu", f"--report-dir={pages}", *arguments]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(site)}, capture_output=True, text=True, timeout=300, check=False,
    )
    records = pages / "cpu.jsonl"
    lines = [json.loads(line) for line in records.read_text().splitlines()] if records.exists() else []
    return done, [line for line in lines if line["type"] == "result"]


def test_the_example_passes_the_smoke_tier_through_its_entry_point(tmp_path: Path) -> None:
    install_example(tmp_path)
    done, results = run_suite(tmp_path, "--kernels", "reduce_of_a_package", "--tier", "smoke")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert len(results) == 48
    found = {(r["kernel"], r["state"], r["promised"]) for r in results}
    assert found == {("reduce_of_a_package", "pass", "within-budget")}
    assert (tmp_path / "pages" / "cpu.html").exists()


def test_a_kernel_that_drops_the_last_slot_fails_and_the_message_names_it(tmp_path: Path) -> None:
    install_example(tmp_path)
    module = tmp_path / "own_kernel.py"
    right = module.read_text()
    assert right.count(".sum(dim=1)") == 1
    module.write_text(right.replace(".sum(dim=1)", "[:, :-1].sum(dim=1)"))
    done, results = run_suite(tmp_path, "--kernels", "reduce_of_a_package", "--tier", "smoke", "-x")
    assert done.returncode == 1
    bad = [r for r in results if r["state"] == "fail"]
    assert len(bad) == 1
    for part in (bad[0]["case"], "reduce_of_a_package"):
        assert part in bad[0]["message"] and part in done.stdout
    assert bad[0]["case"].startswith("moe_reduce_fused/")
    assert bad[0]["rerun"] in done.stdout
    assert "\n  diagnosed: 1 of reduce_of_a_package: the last slot is left out\n" in done.stdout


def test_readmes_kernel_passes_when_named_by_module(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (code,) = [block for block in blocks if "@kernel" in block]
    (tmp_path / "my_kernels.py").write_text(code)
    done, results = run_suite(tmp_path, "--kernels", "my_kernels", "--tier", "smoke")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert len(results) == 48 and {r["state"] for r in results} == {"pass"}


def test_a_module_without_a_kernel_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "my_kernels.py").write_text("x = 1\n")
    done, _ = run_suite(tmp_path, "--kernels", "my_kernels", "--tier", "smoke")
    assert done.returncode == 4
    assert "module my_kernels defines no kernel" in done.stderr
