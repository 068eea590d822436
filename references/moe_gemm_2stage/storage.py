"""Operands as the kernels get them, and back: preshuffled weights, packed 4 bits, fp8 in the encoding of its dtype.

activation   x, a2                       scales
fp8          float8_e4m3fn | _e4m3fnuz   fp32, one per row
int8         int8                        fp32, one per row
f16, bf16    float16, bfloat16           none
mxfp8        float8_e4m3fn               e8m0, see `scales`
mxfp4        uint8 [..., K/2], the even k in the low nibble; e8m0

weight       stored [E, N, K]            scales
fp8          fp8, preshuffled            fp32 [E, N]
int8         int8, preshuffled           fp32 [E, N]
int4         uint8 [E, N, K/2], packed after the preshuffle of one byte each; fp32 [E, N]
int4_g32     the same; fp32 [E, K/32, N]
f16, bf16    preshuffled                 none
mxfp4        uint8 [E, N, K/2], the even k in the low nibble, preshuffled as bytes afterwards; e8m0

Preshuffled: the shape stays [E, N, K], the order in memory is [E, N/16, K/V, 16, V], V elements being 16 bytes. Packed:
eight neighbours v0..v7 of that order become four bytes, byte j = v[j + 4] << 4 | v[j] & 15. (`layouts`)
"""

from __future__ import annotations

import torch
from torch import Tensor

from references.moe_gemm_2stage import fp8, layouts, mx, scales
from references.moe_gemm_2stage.dtypes import MODES, Mode
from references.moe_gemm_2stage.operands import GROUP, Operand

# The modes whose operands have a storage here. a16wi4 has references only; a16w16 is bf16 with fewer outputs.
STORED = tuple(name for name in MODES if name not in ("a16wi4", "a16w16"))
_FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}
ENCODINGS = {form.dtype: form for form in (fp8.OCP, fp8.FNUZ)}


def activation_dtypes(mode: Mode) -> tuple[torch.dtype, ...]:
    """The dtypes that x and a2 may have."""
    if mode.activation == "fp8":
        return tuple(ENCODINGS)
    if mode.microscaled:
        return (torch.uint8 if mode.activation == "mxfp4" else fp8.OCP.dtype,)
    return (_FLOATS.get(mode.activation, torch.int8),)


def row_columns(mode: Mode, width: int) -> int:
    """Last extent of stored activations whose rows have ``width`` elements."""
    return width // 2 if mode.activation == "mxfp4" else width


def weight_dtypes(mode: Mode) -> tuple[torch.dtype, ...]:
    """The dtypes that w1 and w2 may have."""
    if mode.weight == "fp8":
        return tuple(ENCODINGS)
    if _packed(mode):
        return (torch.uint8,)
    return (_FLOATS.get(mode.weight, torch.int8),)


def weight_columns(mode: Mode, width: int) -> int:
    """Last extent of a stored weight whose rows have ``width`` elements."""
    return width // 2 if _packed(mode) else width


def _packed(mode: Mode) -> bool:
    return mode.weight.startswith("int4") or mode.weight in mx.ELEMENTS


def weight_scale_shape(mode: Mode, experts: int, rows: int, width: int) -> tuple[int, ...] | None:
    """Shape of a weight's scales, None where there are none."""
    if mode.weight == "int4_g32":
        return (experts, width // GROUP, rows)
    if mode.weight in mx.ELEMENTS:
        return scales.shape_of(experts * rows, width)
    return None if mode.weight in _FLOATS else (experts, rows)


def store_rows(of: Operand, mode: Mode, encoding: str) -> Tensor:
    """Payload [..., K] in the activation's dtype."""
    if mode.activation == "fp8":
        form = fp8.FORMS[encoding]
        return fp8.encode(of.payload, form).view(form.dtype)
    if mode.activation == "mxfp4":
        return layouts.pack_nibbles(mx.encode_e2m1(of.payload))
    if mode.activation == "mxfp8":
        return fp8.encode(of.payload, fp8.OCP).view(fp8.OCP.dtype)
    return of.payload.to(_FLOATS.get(mode.activation, torch.int8))


def store_scales(of: Operand) -> Tensor:
    """uint8 [..., K/32]: e8m0 codes of an operand's factors."""
    assert of.factors is not None
    return mx.encode_e8m0(of.factors[..., ::GROUP])


def read_rows(stored: Tensor, scale: Tensor | None) -> Operand:
    """Inverse of ``store_rows``; ``scale`` fp32 [...] or None, or e8m0 codes, uint8 [..., K/32]."""
    if scale is not None and scale.dtype == torch.uint8:
        codes = layouts.unpack_nibbles(stored) if stored.dtype == torch.uint8 else None
        payload = read_rows(stored, None).payload if codes is None else mx.decode_e2m1(codes)
        return Operand(payload, factors=mx.decode_e8m0(scale).repeat_interleave(GROUP, dim=-1))
    form = ENCODINGS.get(stored.dtype)
    payload = stored.float() if form is None else fp8.decode(stored.view(torch.uint8), form)
    return Operand(payload, scale=scale)


def store_weight(of: Operand, mode: Mode, encoding: str) -> tuple[Tensor, Tensor | None]:
    """(stored weight, its scales) of payload [E, N, K]."""
    if mode.weight in mx.ELEMENTS:
        packed = layouts.pack_nibbles(mx.encode_e2m1(of.payload))
        return layouts.preshuffle(packed), scales.store_channels(store_scales(of))
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
    if mode.weight in mx.ELEMENTS:
        assert scale is not None
        packed = layouts.unpreshuffle(stored)
        experts, rows, half = packed.shape
        return read_rows(packed, scales.read_channels(scale, experts, rows, 2 * half))
    form = ENCODINGS.get(stored.dtype)
    if form is not None:
        return Operand(fp8.decode(layouts.unpreshuffle(stored.view(torch.uint8)), form), scale=scale)
    whole = layouts.unpack_int4(stored) if mode.weight.startswith("int4") else stored
    payload = layouts.unpreshuffle(whole).float()
    if mode.weight != "int4_g32":
        return Operand(payload, scale=scale)
    assert scale is not None
    return Operand(payload, factors=scale.transpose(1, 2).repeat_interleave(GROUP, dim=-1))


def of_expert(scale: Tensor, expert: int, rows: int, mode: Mode) -> Tensor:
    """The view of one expert's scales of a weight with ``rows`` rows an expert."""
    return scale[expert * rows : (expert + 1) * rows] if mode.weight in mx.ELEMENTS else scale[expert : expert + 1]
