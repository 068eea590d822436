"""Operands as the kernels get them, and back: preshuffled weights, packed int4, fp8 in the encoding of its dtype.

activation   x, a2                       scales
fp8          float8_e4m3fn | _e4m3fnuz   fp32, one per row
int8         int8                        fp32, one per row
f16, bf16    float16, bfloat16           none

weight       stored [E, N, K]            scales
fp8          fp8, preshuffled            fp32 [E, N]
int8         int8, preshuffled           fp32 [E, N]
int4         uint8 [E, N, K/2], packed after the preshuffle of one byte each; fp32 [E, N]
int4_g32     the same; fp32 [E, K/32, N]
f16, bf16    preshuffled                 none
"""

from __future__ import annotations

import torch
from torch import Tensor

from references.moe_gemm_2stage import fp8, layouts
from references.moe_gemm_2stage.dtypes import MODES, Mode
from references.moe_gemm_2stage.operands import GROUP, Operand

# The modes whose operands have a storage here; microscaled ones have references only.
STORED = tuple(name for name in MODES if name not in ("fp4", "a8w4", "a16w4", "a16wi4", "a16w16"))
_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}
ENCODINGS = {form.dtype: form for form in (fp8.OCP, fp8.FNUZ)}


def activation_dtypes(mode: Mode) -> tuple[torch.dtype, ...]:
    """The dtypes that x and a2 may have."""
    if mode.activation == "fp8":
        return tuple(ENCODINGS)
    return (_FLOATS.get(mode.activation, torch.int8),)


def weight_dtypes(mode: Mode) -> tuple[torch.dtype, ...]:
    """The dtypes that w1 and w2 may have."""
    if mode.weight == "fp8":
        return tuple(ENCODINGS)
    if mode.weight.startswith("int4"):
        return (torch.uint8,)
    return (_FLOATS.get(mode.weight, torch.int8),)


def weight_columns(mode: Mode, width: int) -> int:
    """Last extent of a stored weight whose rows have ``width`` elements."""
    return width // 2 if mode.weight.startswith("int4") else width


def weight_scale_shape(mode: Mode, experts: int, rows: int, width: int) -> tuple[int, ...] | None:
    """Shape of a weight's scales, None where there are none."""
    if mode.weight == "int4_g32":
        return (experts, width // GROUP, rows)
    return None if mode.weight in _FLOATS else (experts, rows)


def store_rows(of: Operand, mode: Mode, encoding: str) -> Tensor:
    """Payload [..., K] in the activation's dtype."""
    if mode.activation == "fp8":
        form = fp8.FORMS[encoding]
        return fp8.encode(of.payload, form).view(form.dtype)
    return of.payload.to(_FLOATS.get(mode.activation, torch.int8))


def read_rows(stored: Tensor, scale: Tensor | None) -> Operand:
    """Inverse of ``store_rows``; ``scale`` fp32 [...] or None."""
    form = ENCODINGS.get(stored.dtype)
    payload = stored.float() if form is None else fp8.decode(stored.view(torch.uint8), form)
    return Operand(payload, scale=scale)


def store_weight(of: Operand, mode: Mode, encoding: str) -> tuple[Tensor, Tensor | None]:
    """(stored weight, its scales) of payload [E, N, K]."""
    scale = of.scale
    if of.factors is not None:
        scale = of.factors[..., ::GROUP].transpose(1, 2).contiguous()
    if mode.weight == "fp8":
        form = fp8.FORMS[encoding]
        return layouts.preshuffle(fp8.encode(of.payload, form)).view(form.dtype), scale
    if mode.weight in _FLOATS:
        return layouts.preshuffle(of.payload.to(_FLOATS[mode.weight])), scale
    whole = layouts.preshuffle(of.payload.to(torch.int8))
    return (layouts.pack_int4(whole) if mode.weight.startswith("int4") else whole), scale


def read_weight(stored: Tensor, scale: Tensor | None, mode: Mode) -> Operand:
    """Inverse of ``store_weight``."""
    form = ENCODINGS.get(stored.dtype)
    if form is not None:
        return Operand(fp8.decode(layouts.unpreshuffle(stored.view(torch.uint8)), form), scale=scale)
    whole = layouts.unpack_int4(stored) if mode.weight.startswith("int4") else stored
    payload = layouts.unpreshuffle(whole).float()
    if mode.weight != "int4_g32":
        return Operand(payload, scale=scale)
    assert scale is not None
    return Operand(payload, factors=scale.transpose(1, 2).repeat_interleave(GROUP, dim=-1))
