"""Asking the device that is really here for what its architecture's table states."""

from __future__ import annotations

from typing import Any

from conformance.arch import Arch

# fact -> torch's name of it among a device's properties
_ASKED = {"shared_bytes": "shared_memory_per_block_optin", "wave": "warp_size", "threads": "max_threads_per_block"}


def probe(arch: Arch, device: str) -> dict[str, dict[str, Any]]:
    """Fact -> what the table says and what the device says, for every fact that torch can be asked for on it.

    The CPU has none of these; a property that this torch does not know is left out.
    """
    if device != "cuda":
        return {}
    import torch

    properties = torch.cuda.get_device_properties(0)
    answers = {fact: getattr(properties, name, None) for fact, name in _ASKED.items()}
    return {
        fact: {"table": arch.fact(fact), "device": answer} for fact, answer in answers.items() if answer is not None
    }


def disagreements(arch: Arch, found: dict[str, dict[str, Any]]) -> list[str]:
    """One sentence for each fact in which table and device differ; a fact that the table lacks is no disagreement."""
    return [
        f"matrices/archs/{arch.name}.toml says {fact} = {pair['table']}, the device says {pair['device']}: mend the "
        "table, or the device is not what it seems"
        for fact, pair in found.items()
        if pair["table"] is not None and pair["table"] != pair["device"]
    ]
