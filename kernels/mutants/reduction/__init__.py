"""Mutants of moe_reduction: the kernels of `kernels.moe_reduction` with one passage edited."""

from kernels.mutants.reduction import memory, sums, tilelang_mutants

__all__ = ["memory", "sums", "tilelang_mutants"]
