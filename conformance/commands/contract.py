"""``conformance show OPERATOR``: the contract of an operator, as somebody needs it who writes a kernel for it."""

from __future__ import annotations

import textwrap

from conformance.registry import kernels, matrix, operator


def print_contract(name: str) -> None:
    """Print what is computed and of what, policies and budget, and which cases and kernels the operator has. Raises
    ConformanceError for an unknown operator."""
    contract, of = operator(name), matrix(name)
    print(contract.contract.strip())
    print()
    tiers = ", ".join(f"{tier} {len(of.cases(tier))}" for tier in of.tier_names)
    for title, text in (
        ("arguments", ", ".join(contract.arguments)),
        ("outputs", ", ".join(contract.outputs)),
        ("variants", ", ".join(contract.variants)),
        *contract.policies.items(),
        ("budget", contract.budget or "none: every bit is fixed, but for what is left open above"),
        ("cases", f"{tiers}; 'python -m conformance list --operator {name} --tier NAME' prints them"),
        ("kernels", ", ".join(kernel.name for kernel in kernels(name))),
    ):
        print(textwrap.fill(f"{title}: {text}", width=118, subsequent_indent="    ", break_on_hyphens=False))
