"""Mutants of moe_sorting: the kernels of `kernels.sorting` with one passage edited."""

from kernels.mutants.sorting import lists, memory, routes, tilelang_mutants

__all__ = ["lists", "memory", "routes", "tilelang_mutants"]
