"""What differs between a TileLang kernel for CUDA and the same kernel for the C target.

On CUDA a block has threads, each thread holds ``span`` elements (one 16-byte vector), dtypes are native. On the C
target a block is one loop iteration that holds the whole tile (``threads`` is 1), and 8- and 16-bit floats are bit
patterns that `bits` converts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernels.reduce_fused import bits

_NATIVE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}


@dataclass(frozen=True)
class Dialect:
    """``target``: "cuda" or "c". The methods are called while a TileLang function is traced."""

    target: str

    @property
    def cuda(self) -> bool:
        return self.target == "cuda"

    def dtype(self, form: str) -> str:
        """TileLang dtype of a tensor that holds ``form``."""
        return (_NATIVE if self.cuda else bits.STORAGE)[form]

    def launch(self, *grid: Any, threads: int) -> Any:
        import tilelang.language as T

        return T.Kernel(*grid, threads=threads) if self.cuda else T.Kernel(*grid)

    def thread(self) -> Any:
        """Index of the running thread in its block."""
        import tilelang.language as T

        return T.get_thread_binding(0) if self.cuda else 0

    def vector(self, extent: int) -> Any:
        """Loop over elements that are moved: one 16-byte access on CUDA, left to the C compiler otherwise."""
        import tilelang.language as T

        return T.vectorized(extent) if self.cuda else T.serial(extent)

    def lanes(self, extent: int) -> Any:
        """Loop over elements that are computed with: registers on CUDA, left to the C compiler otherwise."""
        import tilelang.language as T

        return T.unroll(extent) if self.cuda else T.serial(extent)

    def fma(self, x: Any, scale: Any, acc: Any) -> Any:
        """``x * scale + acc`` with one rounding, whatever the compiler's contraction settings."""
        import tilelang.language as T

        if self.cuda:
            return T.ieee_fmaf(x, scale, acc)
        return T.call_extern("float32", "fmaf", x, scale, acc)

    def widen(self, form: str, raw: Any) -> Any:
        import tilelang.language as T

        return T.cast(raw, "float32") if self.cuda else bits.widen(form, raw)

    def narrow(self, form: str, value: Any) -> Any:
        """fp32 to a stored element, to nearest even; e4m3 saturates (__NV_SATFINITE on CUDA)."""
        import tilelang.language as T

        return T.cast(value, _NATIVE[form]) if self.cuda else bits.narrow(form, value)
