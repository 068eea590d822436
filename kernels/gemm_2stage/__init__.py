"""Kernels of moe_gemm1, moe_gemm2 and moe_gemm_2stage: one in plain PyTorch, two in TileLang."""

from kernels.gemm_2stage import legacy, per_expert, pipelined

__all__ = ["legacy", "per_expert", "pipelined"]
