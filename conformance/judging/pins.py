"""Pinned references: digests of golden outputs, kept in the repository, so that a changed oracle is called that.

A golden may change by an edit of its module, of the inputs' generators, or by another torch; every kernel would then
fail, or, where kernel and golden changed alike, none. The smoke cases are pinned, at reduced sizes, which every machine
can compute, by their goldens on a CPU: on a GPU sums of products and exponentials may come out otherwise in a last bit.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conformance.case import Case
from conformance.errors import ConformanceError
from conformance.formats import bits
from conformance.operator import ONLY, References, Shared
from conformance.registry import ROOT, matrix, operator

TIER, SIZES = "smoke", "reduced"
_LENGTH = 12  # hexadecimal digits of a digest


def path_of(operator_name: str) -> Path:
    return ROOT / "references" / "pins" / f"{operator_name}.json"


def digest(golden: Tensor | References) -> str:
    """Digest of an output's dtype, shape and bits; all NaNs count as one. Of several outputs, of all their digests."""
    if isinstance(golden, References):
        known = {name: digest(reference.golden) for name, reference in golden.of.items()}
        return known[ONLY] if set(known) == {ONLY} else hashlib.sha256(repr(known).encode()).hexdigest()[:_LENGTH]
    raw = bits(golden).masked_fill(golden.float().isnan(), -1 if golden.element_size() > 1 else 0xFF).cpu()
    head = f"{golden.dtype} {tuple(golden.shape)} ".encode()
    return hashlib.sha256(head + raw.contiguous().numpy().tobytes()).hexdigest()[:_LENGTH]


def changed(case: Case, sizes: str, golden: Tensor | References) -> str | None:
    """That the golden of a pinned case is not what it was, in words; None where it is, or is not pinned, or is on a
    GPU."""
    goldens = [one.golden for one in golden.of.values()] if isinstance(golden, References) else [golden]
    if sizes != SIZES or TIER not in case.tiers or any(one.device.type != "cpu" for one in goldens):
        return None
    pinned = _pinned(case.operator)
    known = pinned.get("goldens", {}).get(_key(case))
    found = digest(golden) if known is not None else None
    if found == known:
        return None
    return (f"the oracle changed: the reference output has digest {found}, {known} is pinned (by torch "
            f"{pinned['torch']}, here is {torch.__version__}); no kernel is to blame. If the change is meant: "
            f"python -m conformance pin --operator {case.operator}")


def pin(operator_name: str) -> tuple[Path, int, int]:
    """Write the digests of one operator: the path, how many cases are pinned, and how many of them changed."""
    contract, of = operator(operator_name), matrix(operator_name)
    device, shared, found = torch.device("cpu"), Shared(), {}
    for case in of.grouped(of.plan((TIER, "edge"))):
        if TIER in case.tiers and not of.devices(case):
            shared.enter(of.group_of(case))
            call = contract.inputs(case, SIZES, device, shared)
            call.set_poison(0)
            found[_key(case)] = digest(References.made_of(contract.reference(call, shared)))
    before = _pinned(operator_name).get("goldens", {})
    path = path_of(operator_name)
    path.parent.mkdir(exist_ok=True)
    content = {"torch": torch.__version__, "goldens": dict(sorted(found.items()))}
    path.write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")
    _pinned.cache_clear()
    return path, len(found), sum(before.get(key, value) != value for key, value in found.items())


def _key(case: Case) -> str:
    """A short name of the case, so that the file stays small."""
    return hashlib.sha256(case.id.encode()).hexdigest()[:_LENGTH]


@functools.cache
def _pinned(operator_name: str) -> dict[str, Any]:
    """The content of the operator's file, empty where it has none. Raises ConformanceError for a malformed one."""
    path = path_of(operator_name)
    if not path.exists():
        return {}
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        content["torch"], content["goldens"].keys()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConformanceError(f"{path}: no file of pinned references: {type(error).__name__}: {error}") from None
    return content
