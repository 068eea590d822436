"""Kernels that are wrong on purpose, a package per operator; loaded only by ``--kernels kernels.mutants``."""

from kernels.mutants import reduce_fused

__all__ = ["reduce_fused"]
