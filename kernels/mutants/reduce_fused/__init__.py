"""Mutants of moe_reduce_fused: of a step-by-step PyTorch kernel, and of a small TileLang template."""

from kernels.mutants.reduce_fused import (
    addressing,
    controls,
    memory,
    numerics,
    semantics,
    tilelang_mutants,
)

__all__ = ["addressing", "controls", "memory", "numerics", "semantics", "tilelang_mutants"]
