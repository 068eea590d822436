"""What both TileLang kernels do to a sum before it is an output element: SiLU, and one rounded store or addition."""
# No "from __future__ import annotations" here: TileLang reads the annotations of a traced function as values.

from typing import Any

from kernels.dialect import Dialect

_LOG2_E = 1.4426950408889634


def silu(x: Any) -> Any:
    """fp32 x * (1 / (1 + exp2(-log2(e) * x)))."""
    import tilelang.language as T

    return x * (T.float32(1.0) / (T.float32(1.0) + T.exp2(x * T.float32(-_LOG2_E))))


def writer(dialect: Dialect, result: str, how: str) -> Any:
    """The macro ``write(out, row, channel, rounded, wide)``: an element that is stored in, or added to, out
    [rows, tiles, 16]. ``rounded``: as ``result`` is stored. ``wide``: two elements of fp32, scratch on the C target.

    Values and conversions go through variables: nested as one expression, the conversions between patterns would
    repeat each other's many times over, and compile for minutes.
    """
    import tilelang.language as T

    @T.macro
    def write(out, row, channel, rounded, wide):
        if how == "store":
            out[row, channel // 16, channel % 16] = rounded
        elif dialect.gpu:
            T.atomic_add(out[row, channel // 16, channel % 16], rounded)
        else:
            wide[0] = dialect.widen(result, rounded)
            wide[1] = dialect.widen(result, out[row, channel // 16, channel % 16])
            wide[0] = wide[0] + wide[1]
            out[row, channel // 16, channel % 16] = dialect.narrow(result, wide[0])

    return write
