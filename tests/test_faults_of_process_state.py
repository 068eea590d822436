"""Kernels that change their whole process, or raise where none should: the cases after them see nothing of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from suite_runs import CASES, Ran, run_kernels, run_once

from conformance.launching.restore import import_meanwhile, imports_meanwhile, process_kept

PAIR = CASES[:2]
# Each runs after `right` and before a witness in the same process.
CULPRITS = {
    "changes_directory": "os.chdir('/')",
    "closes_streams": "sys.stdout.close(); sys.stderr.close()",
    "replaces_streams": "sys.stdout = open(os.devnull, 'w'); sys.stderr = None",
    "prints_much": "print('x' * 3_000_000); os.write(1, b'y' * 3_000_000)",
    "changes_environment": "os.environ['LEAKED'] = '1'; os.environ.pop('PATH', None)",
    "takes_threads": "torch.set_num_threads(16)",
    "sets_dtype": "torch.set_default_dtype(torch.float64)",
    "sets_device": "torch.set_default_device('meta')",
    "sets_determinism": "torch.use_deterministic_algorithms(True)",
    "warns_of_determinism": "torch.use_deterministic_algorithms(True, warn_only=True)",
    "sets_precision": "torch.set_float32_matmul_precision('medium')",
    "sets_precision_anew": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "sets_every_precision": "torch.backends.fp32_precision = 'tf32'",
    "sets_cudnn": "torch.backends.cudnn.benchmark = True; torch.backends.cudnn.deterministic = True",
    "sets_reductions": "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "sets_autocast": "torch.set_autocast_enabled('cpu', True)",
    "sets_anomaly": "torch.autograd.set_detect_anomaly(True)",
    "seeds": "torch.manual_seed(99); random.seed(99); numpy.random.seed(99)",
    "draws": "torch.rand(7); random.random(); numpy.random.rand(7)",
    "sets_grad": "torch.set_grad_enabled(True)",
    "takes_signals": "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "disables_faulthandler": "import faulthandler; faulthandler.disable(); faulthandler.cancel_dump_traceback_later()",
}
WITNESS = """
import random
import numpy
HERE = os.getcwd()

def drawn():
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()

FLAGS = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
REDUCED = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
DRAWN = drawn()

def look():
    print("a line")
    print("an error", file=sys.stderr)
    seen = {
        "directory": os.getcwd() == HERE,
        "streams": not sys.stdout.closed and not sys.stderr.closed,
        "environment": "LEAKED" not in os.environ and "PATH" in os.environ,
        "threads": torch.get_num_threads() == 1,  # of tensors so small
        "dtype": torch.get_default_dtype() == torch.float32,
        "device": torch.get_default_device() == torch.device("cpu"),
        "determinism": not torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision() == "highest" and torch.backends.fp32_precision != "tf32",
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == FLAGS,
        "reductions": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction == REDUCED,
        "autocast": not torch.is_autocast_enabled("cpu"),
        "anomaly": not torch.is_anomaly_enabled(),
        "generators": drawn() == DRAWN,
        "grad": not torch.is_grad_enabled(),
        "warned": not torch.is_deterministic_algorithms_warn_only_enabled(),
        "signals": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
    }
    if not all(seen.values()):
        raise RuntimeError("changed: " + ", ".join(name for name, kept in seen.items() if not kept))
"""


@pytest.fixture(scope="module", params=[("-n", "1"), ()], ids=["worker", "no worker"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    kernels = "\n".join(
        f"def {name}():\n    {act}\nadd({name!r}, {name})\nadd('after_{name}', look)" for name, act in CULPRITS.items()
    )
    name = f"state-{request.param_index}"
    return run_once(tmp_path_factory, name, WITNESS + kernels, *request.param, cases=PAIR)


@pytest.mark.parametrize("name", CULPRITS)
def test_what_a_kernel_changes_does_not_reach_the_next_case(ran: Ran, name: str) -> None:
    assert [result["message"] for result in ran.of(f"after_{name}")] == [""] * len(PAIR)
    assert len(ran.of(name)) == len(PAIR)


def test_nothing_else_suffers(ran: Ran) -> None:
    assert ran.code == 0, ran.output
    assert ran.end["counts"] == {"pass": len(ran.results)}
    assert len(ran.output) < 100_000  # what passing kernels print is not shown


def test_the_number_of_torchs_threads_is_put_back() -> None:
    before = torch.get_num_threads()
    with process_kept():
        torch.set_num_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_what_an_import_beside_the_cases_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is imported in a thread sets variables for itself while some case runs that imports nothing."""
    begin, done = threading.Event(), threading.Event()
    monkeypatch.delenv("CONFORMANCE_TEST_IMPORT", raising=False)

    def imports() -> None:
        begin.wait(30)
        os.environ["CONFORMANCE_TEST_IMPORT"] = "1"
        done.set()
        raise ImportError("told where it is needed")

    import_meanwhile(imports)
    with process_kept():
        begin.set()
        assert done.wait(30)
    assert os.environ.pop("CONFORMANCE_TEST_IMPORT") == "1"
    while imports_meanwhile():
        time.sleep(0.01)
    with process_kept():
        os.environ["CONFORMANCE_TEST_IMPORT"] = "2"
    assert "CONFORMANCE_TEST_IMPORT" not in os.environ


def test_threads_that_never_end_do_not_keep_the_run_from_ending(tmp_path: Path) -> None:
    act = "lambda: threading.Thread(target=time.sleep, args=(3600,)).start()"
    ran = run_kernels(tmp_path, f"add('leaves_threads', {act})", cases=CASES[:1])
    assert ran.code == 0
    assert ran.end["counts"] == {"pass": 2}
    assert "kernels left 2 threads that do not end" in ran.output


# name: how it is added, state of all its cases, words of the message
RAISERS = {
    "supports": ("lambda: None, supports=lambda params: params['nothing']", "error",
                 "supports= of supports asks for parameter 'nothing'"),
    "requires": ("lambda: None, requires=lambda device: 1 / 0", "error", "raised ZeroDivisionError"),
    "prepare": ("lambda: None, prepare=lambda params, device: sys.exit(4)", "pass", ""),
    "missing": ("lambda: None, requires=lambda device: 'no such library'", "not-run", "no such library"),
    "no_text": ("lambda: throw(NoText())", "error", "without a text: its __str__ raised ValueError"),
    "odd_text": ("lambda: throw(ValueError('\\udc80 \\x00 \\x1b[31m'))", "error", "\\udc80 \\x00 \\x1b[31m"),
    "long_text": ("lambda: throw(ValueError('x' * 5_000_000))", "error", "characters ..."),
    "exits": ("lambda: sys.exit(5)", "error", "raised SystemExit: 5"),
    "recursion": ("deep", "error", "raised RecursionError"),
}
THROW = """
class NoText(Exception):
    def __str__(self):
        raise ValueError("no text")

def throw(error):
    raise error

def deep():
    deep()
"""


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    kernels = THROW + "\n".join(f"add({name!r}, {added})" for name, (added, _, _) in RAISERS.items())
    return run_once(tmp_path_factory, "raised", kernels, cases=PAIR)


@pytest.mark.parametrize("name", RAISERS)
def test_a_kernel_that_raises_in_odd_places_or_odd_ways(raised: Ran, name: str) -> None:
    _, state, words = RAISERS[name]
    results = raised.of(name)
    assert [result["state"] for result in results] == [state] * len(PAIR)
    for result in results:
        assert words in result["message"]
        assert result["kind"] == ("exception" if state == "error" else None)
        assert len(result["message"]) + len(result["trace"] or "") < 20_000


def test_a_run_of_such_kernels_fails_for_those_that_failed_or_never_ran(raised: Ran) -> None:
    assert raised.code == 1
    assert raised.end["problems"] == ["missing executed nothing: no such library"]
    assert len(raised.of("sound", "pass")) == len(PAIR)
    assert "INTERNALERROR" not in raised.output
    assert "\x1b" not in raised.output
