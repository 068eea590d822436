"""Mutants of moe_gemm1, moe_gemm2 and moe_gemm_2stage: kernels of `kernels.gemm_2stage` with one passage edited."""

from kernels.mutants.gemm_2stage import memory, microscaled, numbers, semantics, tilelang_mutants

__all__ = ["memory", "microscaled", "numbers", "semantics", "tilelang_mutants"]
