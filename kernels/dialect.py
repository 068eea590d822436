"""What differs between a TileLang kernel for CUDA, the same for HIP (ROCm), and for the C target.

On GPUs a block has threads, each thread holds ``span`` elements (one 16-byte vector), dtypes are native. On the C
target a block is one loop iteration that holds the whole tile (``threads`` is 1), and 8- and 16-bit floats are bit
patterns that `bits` converts.

e4m3 is native only where the hardware's 8-bit floats are OCP's: TileLang's HIP code for gfx942 writes FNUZ patterns
into a tensor declared float8_e4m3fn, which every reader then takes for twice the value. There, and where there are no
8-bit floats at all, `bits` converts as on the C target.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.arch import Arch
from conformance.registry import arch
from kernels import bits
from kernels.tilelang_build import gpu_arch

if TYPE_CHECKING:
    from torch import Tensor

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "e4m3": 1}
_NATIVE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}


def form_of(tensor: Tensor) -> str:
    """Name of a float tensor's format, as case parameters spell it."""
    import torch

    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
            torch.float8_e4m3fn: "e4m3"}[tensor.dtype]


def target_of(device_type: str) -> str:
    """TileLang's target kind for a torch device: ROCm's torch calls its devices cuda as well."""
    import torch

    if device_type != "cuda":
        return "c"
    return "hip" if torch.version.hip else "cuda"


def fp8_of(arch: Arch) -> str:
    """How e4m3 is converted on an architecture: "native", or in integer arithmetic ("bits") where its 8-bit floats
    are known to be another format or to be missing."""
    return "native" if arch.fact("fp8") in (None, "ocp") or arch.language == "c" else "bits"


def arch_here(target: str) -> Arch:
    """What a TileLang target ("c", "cuda", "hip") stands for on this machine: the CPU, or the current GPU."""
    return arch("cpu" if target == "c" else gpu_arch())


@functools.cache
def fp8_here(device_type: str) -> str:
    return fp8_of(arch_here(target_of(device_type)))


def options(config: str | None, known: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Parse "name:value-name:value". ValueError names what is not known and what is."""
    found: dict[str, str] = {}
    for part in config.split("-") if config else ():
        name, _, value = part.partition(":")
        if name not in known:
            raise ValueError(f"config {config!r} sets {name!r}; known: {', '.join(known)}")
        if value not in known[name]:
            raise ValueError(f"config {config!r} sets {name} to {value!r}; known: {', '.join(known[name])}")
        found[name] = value
    return found


@dataclass(frozen=True)
class Dialect:
    """``target``: "cuda", "hip" or "c"; ``fp8``: "native" or "bits". The methods are called while a TileLang function
    is traced."""

    target: str
    fp8: str = "native"

    @property
    def gpu(self) -> bool:
        return self.target != "c"

    def native(self, form: str) -> bool:
        """Whether the target's own type holds ``form``; otherwise its bit patterns are stored as unsigned integers."""
        return form == "fp32" or (self.gpu and (form != "e4m3" or self.fp8 == "native"))

    def dtype(self, form: str) -> str:
        """TileLang dtype of a tensor that holds ``form``."""
        return (_NATIVE if self.native(form) else bits.STORAGE)[form]

    def launch(self, *grid: Any, threads: int) -> Any:
        import tilelang.language as T

        return T.Kernel(*grid, threads=threads) if self.gpu else T.Kernel(*grid)

    def board(self, extent: int, dtype: str) -> Any:
        """Memory that all threads of a block share, and the one thread of a block on the C target."""
        import tilelang.language as T

        return T.alloc_shared((extent,), dtype) if self.gpu else T.alloc_local((extent,), dtype)

    def barrier(self) -> Any:
        """Every thread of the block gets here before any goes on."""
        import tilelang.language as T

        return T.sync_threads() if self.gpu else None

    def thread(self) -> Any:
        """Index of the running thread in its block."""
        import tilelang.language as T

        return T.get_thread_binding(0) if self.gpu else 0

    def vector(self, extent: int) -> Any:
        """Loop over elements that are moved: one 16-byte access on GPUs, left to the C compiler otherwise."""
        import tilelang.language as T

        return T.vectorized(extent) if self.gpu else T.serial(extent)

    def lanes(self, extent: int) -> Any:
        """Loop over elements that are computed with: registers on GPUs, left to the C compiler otherwise."""
        import tilelang.language as T

        return T.unroll(extent) if self.gpu else T.serial(extent)

    def fma(self, x: Any, scale: Any, acc: Any) -> Any:
        """``x * scale + acc`` with one rounding, whatever the compiler's contraction settings."""
        import tilelang.language as T

        if self.target == "cuda":  # TileLang 0.1.15 has no ieee_fmaf for HIP: "Unresolved call"
            return T.ieee_fmaf(x, scale, acc)
        return T.call_extern("float32", "fmaf", x, scale, acc)

    def widen(self, form: str, raw: Any) -> Any:
        import tilelang.language as T

        return T.cast(raw, "float32") if self.native(form) else bits.widen(form, raw)

    def narrow(self, form: str, value: Any) -> Any:
        """fp32 to a stored element, to nearest even; e4m3 saturates (__NV_SATFINITE on CUDA)."""
        import tilelang.language as T

        return T.cast(value, _NATIVE[form]) if self.native(form) else bits.narrow(form, value)

    def shared(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A buffer of the thread block."""
        import tilelang.language as T

        return T.alloc_shared(shape, dtype) if self.gpu else T.alloc_local(shape, dtype)

    def fragment(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A matrix in the registers of the thread block."""
        import tilelang.language as T

        return T.alloc_fragment(shape, dtype) if self.gpu else T.alloc_local(shape, dtype)

    def parallel(self, *extents: int) -> Any:
        """Loops over the elements of a tile, in the order of memory, distributed over the threads of a block."""
        import tilelang.language as T

        return T.Parallel(*extents) if self.gpu else T.grid(*extents)

    def steps(self, extent: Any, overlapped: bool) -> Any:
        """Loop of two statements: copies into shared memory, and what uses them. Overlapped, on GPUs, the copies of the
        next turn come first and, with CUDA, run meanwhile. TileLang 0.1.15 refuses more turns ahead in a loop whose
        extent is known at the call only ("Downcast from tirx.Sub to ir.IntImm failed")."""
        import tilelang.language as T

        return T.Pipelined(extent, order=[0, 1], stage=[0, 1]) if self.gpu and overlapped else T.serial(extent)

    def factor(self, form: str) -> str:
        """TileLang dtype of a matrix that is multiplied: fp32 in the place of 16-bit floats on the C target."""
        return form if form == "int8" else (_NATIVE[form] if self.gpu else "float32")

    def widen_e4m3(self, raw: Any) -> Any:
        """A stored e4m3 as a factor: exactly, in fp16 on GPUs."""
        import tilelang.language as T

        value = raw if self.native("e4m3") else bits.widen("e4m3", raw)
        return T.cast(value, "float16") if self.gpu else value

    def clear(self, matrix: Any, rows: int, columns: int) -> None:
        """Set a matrix to zero."""
        import tilelang.language as T

        @T.macro
        def statement(matrix: Any) -> None:
            if self.gpu:
                T.clear(matrix)
            else:
                for i, j in T.grid(rows, columns):
                    matrix[i, j] = T.cast(0, matrix.dtype)

        statement(matrix)

    def gemm(self, left: Any, right: Any, total: Any, rows: int, columns: int, depth: int) -> None:
        """total [rows, columns] += left [rows, depth] x right [columns, depth]; fp32, or int32 of int8."""
        import tilelang.language as T

        @T.macro
        def statement(left: Any, right: Any, total: Any) -> None:
            if self.gpu:
                T.gemm(left, right, total, transpose_B=True)
            else:
                for i, j, k in T.grid(rows, columns, depth):
                    total[i, j] = total[i, j] + T.cast(left[i, k], total.dtype) * T.cast(right[j, k], total.dtype)

        statement(left, right, total)
