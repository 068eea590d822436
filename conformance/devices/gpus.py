"""How the processes of a run share cores and GPUs: how many there are, which GPU each gets, what a case takes of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from conformance.cases.plan import parse_nodeid
from conformance.devices.memory import workers_within
from conformance.environment import visible_gpus
from conformance.registry import operator

if TYPE_CHECKING:
    from conformance.session.run import Run

_WORKERS = 4  # per GPU, with -n auto


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers_for(devices: Iterable[str], memory_limit: int | None = None, timing: bool = False) -> int:
    """``-n auto``: all cores on the CPU, or as many as ``memory_limit`` leaves room for; on GPUs a few processes each,
    which admission keeps within memory. With ``timing`` one each: more would wait for their turns, and each would
    measure the ceilings of the card for itself."""
    if "cuda" not in devices:
        return cores() if memory_limit is None else min(cores(), workers_within(memory_limit))
    return max(1, min(cores(), (1 if timing else _WORKERS) * max(1, len(visible_gpus()))))


def limit_threads(workers: int) -> None:
    """Workers share the cores: one thread each unless there are more cores than workers."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def bind_gpu(index: int) -> int:
    """Give a worker one of the visible GPUs, by index *into* CUDA_VISIBLE_DEVICES; before torch starts CUDA. Returns
    how many the workers share."""
    names = visible_gpus()
    if len(names) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[index % len(names)]
    return len(names)


def start_device() -> None:
    """Let the GPU's context, which takes a second, be made while this process imports and plans. What goes wrong goes
    wrong again, and is reported, where the GPU is used."""
    import torch

    def first_use() -> None:
        with contextlib.suppress(Exception):
            torch.zeros(1, device="cuda")

    threading.Thread(target=first_use, name="first use of the GPU", daemon=True).start()


def device_bytes(run: Run, nodeid: str) -> float:
    """Peak bytes on the GPU of the case behind a node id; 0 where it runs on no GPU."""
    planned = parse_nodeid(nodeid)
    settings = run.settings(planned.arch or next(iter(run.archs))) if planned else None
    if planned is None or settings is None or settings.device != "cuda":
        return 0
    return operator(planned.case.operator).memory(planned.case, settings.sizes)
