"""Kernels of moe_reduction: one in TileLang, one in plain PyTorch."""

from kernels.moe_reduction import reduction_tiled, reduction_torch

__all__ = ["reduction_tiled", "reduction_torch"]
