"""Kernels of moe_reduce_fused. Two TileLang kernels share one template; the third is plain PyTorch."""

from kernels.reduce_fused import h_tiled, per_token, vectorised

__all__ = ["h_tiled", "per_token", "vectorised"]
