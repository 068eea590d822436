"""Microscaled operands of two-stage MoE as fp32 numbers, in PyTorch: e2m1 and e4m3 elements, an e8m0 scale per 32.

Scales are shuffled, [rows/32, columns/8, 4, 16, 2, 2] in memory, and padded to 256 rows and 8 columns; those of
activations stand at the place of a route in the sorted list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Size, Tensor

ACTIVATIONS = ("fp4", "a8w4")  # dtypes whose activations have e8m0 scales
WEIGHTS = (*ACTIVATIONS, "a16w4")
_BLOCK, _BIAS, _NAN = 32, 127, 255
_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST = {"fp4": 6.0, "a8w4": 448.0}
_MANTISSA = {"fp4": 1, "a8w4": 3}  # bits after the leading one


def fp4_numbers(stored: Tensor) -> Tensor:
    """fp32 [..., K] of uint8 [..., K/2]: the low nibble is the even k, bit 3 of a nibble its sign."""
    import torch

    table = torch.tensor([*_HALVES, *(-value for value in _HALVES)], device=stored.device)
    pair = stored.int()
    return table[torch.stack((pair & 15, pair >> 4), dim=-1)].flatten(-2)


def powers(codes: Tensor) -> Tensor:
    """fp32 2^(code - 127), also where that is subnormal; 255 is NaN."""
    import torch

    found = torch.exp2(codes.double() - _BIAS).float()
    return found.masked_fill(codes == _NAN, torch.nan)


def plain_scales(stored: Tensor) -> Tensor:
    """uint8 [rows, columns], padding included, of shuffled scales."""
    rows, columns = stored.shape
    tiles = stored.view(rows // 32, columns // 8, 4, 16, 2, 2)  # column, row of 16, column's half, row's half
    return tiles.permute(0, 5, 3, 1, 4, 2).reshape(rows, columns)


def _scaled(elements: Tensor, codes: Tensor) -> Tensor:
    """fp32 [R, K] of elements [R, K] and e8m0 codes [R, K/32 or more]. Exact: a subnormal number is not cut to 0."""
    blocks = elements.shape[1] // _BLOCK
    factors = powers(codes[:, :blocks])
    return (elements.view(len(elements), blocks, _BLOCK) * factors[..., None]).view(elements.shape)


def row_matrix(stored: Tensor, scale: Tensor, ids: Tensor, valid: Tensor, shape: Size) -> Tensor:
    """fp32 [T k, K] of x [T, ...] or a2 [T, k, ...]; rows of slots without an expert are 0. ids, valid: the sorted
    list and the number of its rows in use; shape: (T, k)."""
    import torch

    tokens, topk = shape
    packed = ids[: int(valid)]
    token, slot = packed & 0xFFFFFF, packed >> 24
    row = (token < tokens).nonzero().flatten()
    token, slot = token[row].long(), slot[row].long()
    chosen = stored[token] if stored.dim() == 2 else stored[token, slot]
    elements = fp4_numbers(chosen) if stored.dtype == torch.uint8 else chosen.float()
    found = torch.zeros((tokens * topk, elements.shape[1]), device=stored.device)
    found[token * topk + slot] = _scaled(elements, plain_scales(scale)[row])
    return found


def channel_matrix(stored: Tensor, scale: Tensor, expert: int) -> Tensor:
    """fp32 [N, K] of one expert's weights: uint8 [N, K/2], packed and then preshuffled as bytes."""
    rows, half = stored.shape
    packed = stored.view(rows // 16, half // 16, 16, 16).transpose(1, 2).reshape(rows, half)
    return _scaled(fp4_numbers(packed), plain_scales(scale[expert * rows : (expert + 1) * rows]))


def product(left: Tensor, right: Tensor) -> Tensor:
    """fp32 [M, N] = left [M, K] x right [N, K], whose numbers may be at the ends of fp32's range."""
    return (left.double() @ right.double().T).float()


def requantised(out1: Tensor, in_dtype: str, rule: str) -> Tensor:
    """fp32 [T k, I]: out1 f16 in blocks of 32 with scales by ``rule`` (floor, even, up). A block that is not finite
    is NaN."""
    import torch

    blocks = out1.float().view(len(out1), out1.shape[1] // _BLOCK, _BLOCK)
    top, largest = blocks.abs().amax(dim=2, keepdim=True), _LARGEST[in_dtype]
    mantissa, exponent = torch.frexp(top)  # top = mantissa 2^exponent, mantissa in [0.5, 1)
    range_exponent = 2 if in_dtype == "fp4" else 8
    power = exponent - 1 - range_exponent
    if rule == "even":
        power = power + (mantissa >= 1 - 0.5 ** (_MANTISSA[in_dtype] + 2)).int()
    elif rule == "up":
        power = power + (mantissa * 2 > largest / 2.0**range_exponent).int()
    factor = torch.exp2(torch.where(top == 0, 0, power).double().clamp(-_BIAS, _BIAS))
    ratio = (blocks.double() / factor).clamp(-largest, largest)
    if in_dtype == "fp4":
        size = ratio.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        ratio = torch.round(size / step) * step * ratio.sign()  # half to even: codes and multiples have one parity
    else:
        ratio = ratio.float().to(torch.float8_e4m3fn).double()
    found = (ratio * factor).float().masked_fill(~top.isfinite(), torch.nan)
    return found.view(out1.shape)
