"""Kernels of moe_sorting: one in TileLang, one in plain PyTorch."""

from kernels.sorting import sort_block, sort_torch

__all__ = ["sort_block", "sort_torch"]
