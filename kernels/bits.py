"""Number formats inside a TileLang C kernel, where bf16, fp16 and e4m3 exist only as unsigned bit patterns.

The functions build TileLang expressions: `widen` maps a stored element to fp32, `narrow` an fp32 value to a stored
element, rounding to nearest even. Everything is branch-free (selects and integer arithmetic), so that the C compiler
can vectorise the loop around it. Policies: bf16 and fp16 overflow to infinity, e4m3 saturates at +-448 (infinities
too), every NaN becomes the positive quiet NaN of the format. Results below the normal range rely on the default
rounding mode and on subnormals not being flushed.
"""

from __future__ import annotations

from typing import Any

STORAGE = {"fp32": "float32", "bf16": "uint16", "fp16": "uint16", "e4m3": "uint8"}

# form: (mantissa bits, exponent bias, first fp32 pattern that does not stay finite, result there, NaN)
_NARROW = {
    "fp16": (10, 15, 0x477FF000, 0x7C00, 0x7E00),  # 65520 is halfway between 65504 and the next step: infinity
    "e4m3": (3, 7, 0x43E00000, 0x7E, 0x7F),  # 448 and everything above: the largest finite code
}


def widen(form: str, raw: Any) -> Any:
    """The fp32 value of one stored element. Exact for every pattern."""
    import tilelang.language as T

    if form == "fp32":
        return raw
    wide = T.cast(raw, "uint32")
    if form == "bf16":
        return T.reinterpret(wide << T.uint32(16), "float32")
    if form == "e4m3":
        # As below: the bias moves from 7 to 127. 0x7F and 0xFF are NaN, and there is no infinity.
        rebias = T.reinterpret(T.uint32((127 + 120) << 23), "float32")
        magnitude = (wide & T.uint32(0x7F)) << T.uint32(20)
        finite = T.reinterpret(T.reinterpret(magnitude, "float32") * rebias, "uint32")
        is_nan = (wide & T.uint32(0x7F)) == T.uint32(0x7F)
        sign = (wide & T.uint32(0x80)) << T.uint32(24)
        return T.reinterpret(T.Select(is_nan, T.uint32(0x7FC00000), finite) | sign, "float32")
    if form != "fp16":
        raise ValueError(f"no widening from {form!r}; known: fp32, bf16, fp16, e4m3")
    magnitude = (wide & T.uint32(0x7FFF)) << T.uint32(13)
    # Times 2^112, the exponent bias moves from 15 to 127; the product is exact, also for subnormals. The factor is
    # given as a pattern because the C code generator prints seven digits of a number.
    rebias = T.reinterpret(T.uint32((127 + 112) << 23), "float32")
    finite = T.reinterpret(T.reinterpret(magnitude, "float32") * rebias, "uint32")
    special = magnitude | T.uint32(0x7F800000)
    sign = (wide & T.uint32(0x8000)) << T.uint32(16)
    return T.reinterpret(T.Select(magnitude >= T.uint32(0x0F800000), special, finite) | sign, "float32")


def narrow(form: str, value: Any) -> Any:
    """The stored element nearest to an fp32 value, ties to even."""
    import tilelang.language as T

    if form == "fp32":
        return value
    pattern = T.reinterpret(value, "uint32")
    magnitude = pattern & T.uint32(0x7FFFFFFF)
    is_nan = magnitude > T.uint32(0x7F800000)
    if form == "bf16":
        rounded = (pattern + T.uint32(0x7FFF) + ((pattern >> T.uint32(16)) & T.uint32(1))) >> T.uint32(16)
        return T.cast(T.Select(is_nan, T.uint32(0x7FC0), rounded), "uint16")
    mantissa, bias, limit, overflow, nan = _NARROW[form]
    shift = 23 - mantissa
    half_below = (1 << (shift - 1)) - 1
    odd = (magnitude >> T.uint32(shift)) & T.uint32(1)
    normal = ((magnitude + T.uint32(half_below) + odd) >> T.uint32(shift)) - T.uint32((127 - bias) << mantissa)
    # Adding a number whose last place is the format's smallest step lets the adder round a subnormal result.
    magic = T.uint32((127 + 1 - bias - mantissa + 23) << 23)
    aligned = T.reinterpret(magnitude, "float32") + T.reinterpret(magic, "float32")
    subnormal = T.reinterpret(aligned, "uint32") - magic
    finite = T.Select(magnitude < T.uint32((128 - bias) << 23), subnormal, normal)
    bounded = T.Select(magnitude >= T.uint32(limit), T.uint32(overflow), finite)
    width = 8 if form == "e4m3" else 16
    sign = (pattern >> T.uint32(32 - width)) & T.uint32(1 << (width - 1))
    return T.cast(T.Select(is_nan, T.uint32(nan), bounded | sign), STORAGE[form])
