"""Kernels that are wrong on purpose, a package per operator; loaded only by ``--kernels kernels.mutants``."""

from kernels.mutants import gemm_2stage, reduce_fused, reduction, sorting

__all__ = ["gemm_2stage", "reduce_fused", "reduction", "sorting"]
