"""Golden and oracle of moe_reduce_fused."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from conformance.arithmetic import fma
from conformance.formats import cast
from conformance.operator import Arguments, Call, OracleRows, Reference, Shared
from references.moe_reduce_fused.contract import validate

_U, _SMALLEST = 2.0**-24, 2.0**-149  # unit roundoff and smallest subnormal of fp32

_Slot = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]


def _slots(arguments: Arguments, start: int, stop: int) -> Iterator[_Slot]:
    """Per slot, for the tokens of [start, stop) that have it: token index from ``start`` [n] (None: all of them),
    row of x [n], and weight and x_sf fp32 [n, 1] or None. Nothing of a padding slot is ever read."""
    weights, x_sf = arguments["topk_weights"], arguments["x_sf"]
    positions = arguments["token_topk_to_pos"][start:stop]
    for slot, count in enumerate((positions >= 0).sum(dim=0).tolist()):
        if count == 0:
            continue
        position, weight = positions[:, slot], None if weights is None else weights[start:stop, slot, None]
        token = None
        if count < stop - start:
            token = (position >= 0).nonzero().flatten()
            position, weight = position[token], None if weight is None else weight[token]
        row = position.long()
        yield token, row, weight, None if x_sf is None else x_sf[row][:, None]


def _chunks(arguments: Arguments) -> Iterator[tuple[int, int]]:
    """Token ranges whose fp64 temporaries stay in cache on a CPU, and fill a GPU with few launches."""
    x, tokens = arguments["x"], arguments["token_topk_to_pos"].shape[0]
    step = max(1, (1 << 27 if x.is_cuda else 1 << 17) // x.shape[1])
    for start in range(0, tokens, step):
        yield start, min(tokens, start + step)


def accumulate(arguments: Arguments) -> Tensor:
    """fp32 [T, H]: the accumulator after the last slot, before sf and the cast."""
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    acc = torch.zeros((positions.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    one = torch.ones((1, 1), dtype=torch.float32, device=x.device)
    for start, stop in _chunks(arguments):
        part = acc[start:stop]
        for token, row, weight, x_sf in _slots(arguments, start, stop):
            scale = one if weight is None else weight
            scale = scale if x_sf is None else scale * x_sf
            before = part if token is None else part.index_select(0, token)
            after = fma(x.index_select(0, row).float(), scale, before)
            part.copy_(after) if token is None else part.index_copy_(0, token, after)
    return acc


def finish(acc: Tensor, arguments: Arguments, dtype: torch.dtype) -> Tensor:
    """The accumulator [T, H] times sf, cast to ``dtype``; a token with only padding slots is +0 for every sf."""
    if arguments["sf"] is not None:
        empty = (arguments["token_topk_to_pos"] < 0).all(dim=1, keepdim=True)
        acc = (acc * arguments["sf"]).masked_fill(empty, 0.0)
    return cast(acc, dtype)


def golden(
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None = None,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The reference result [T, H] in the documented order of roundings. Raises as ``validate`` does."""
    arguments = dict(x=x, token_topk_to_pos=token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf)
    validate(arguments, None, strided=True)
    dtype = out_dtype or x.dtype
    if dtype not in (x.dtype, torch.float8_e4m3fn):
        raise TypeError(f"out_dtype is {dtype}: x's dtype {x.dtype} or float8_e4m3fn is required")
    if sf is not None and dtype != torch.float8_e4m3fn:
        raise ValueError(f"sf is given but out_dtype is {dtype}: sf requires a float8_e4m3fn output")
    return finish(accumulate(arguments), arguments, dtype)


def oracle(arguments: Arguments) -> Iterator[OracleRows]:
    """The exact sum before sf in fp64 with its error bound, some tokens at a time.

    With n = valid slots + 2 (each product and each addition rounds once, s = w * x_sf once, acc * sf once; a
    fused kernel makes fewer) and S = sum of |terms|: |error| <= n u / (1 - n u) * S, u = 2**-24 (Higham, Accuracy
    and Stability of Numerical Algorithms, 3.1), plus n of the smallest fp32 subnormal for products that underflow.
    """
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    for start, stop in _chunks(arguments):
        total = torch.zeros((stop - start, x.shape[1]), dtype=torch.float64, device=x.device)
        magnitude = torch.zeros_like(total, dtype=torch.float32)
        for token, row, weight, x_sf in _slots(arguments, start, stop):
            scale = torch.ones((1, 1), dtype=torch.float64, device=x.device) if weight is None else weight.double()
            scale = scale if x_sf is None else scale * x_sf.double()  # exact: 24 + 24 bits
            value = x.index_select(0, row)
            term, size = value * scale, (value.float() * scale.float()).abs_()
            if token is None:
                total += term
                magnitude += size
            else:
                total.index_add_(0, token, term)
                magnitude.index_add_(0, token, size)
        roundings = (positions[start:stop] >= 0).sum(dim=1, keepdim=True).double() + 2
        relative = roundings * _U / (1 - roundings * _U) * (1 + 2.0**-16)  # S itself was summed in fp32
        error = magnitude.mul_(relative.float()).add_(roundings.float() * _SMALLEST)
        yield OracleRows(start, stop, total, error)


def _scaled(rows: OracleRows, sf: Tensor | None) -> OracleRows:
    """The rows times sf, exactly in value and upwards in error."""
    if sf is None:
        return rows
    factor = sf.abs() * (1 + 2.0**-20)
    return OracleRows(rows.start, rows.stop, rows.value * sf.double(), rows.error * factor + _SMALLEST)


def reference(call: Call, shared: Shared) -> Reference:
    """Golden and oracle of a call. Cases that differ only in the output share the accumulator and the
    oracle before sf."""
    case, arguments = call.case, call.arguments
    key = case.get("weights"), case.get("xsf")
    acc = shared.latest("acc", key, lambda: accumulate(arguments))

    def rows() -> Iterator[OracleRows]:
        unscaled = shared.latest("oracle", key, lambda: list(oracle(arguments)))
        return (_scaled(part, arguments["sf"]) for part in unscaled)

    return Reference(finish(acc, arguments, call.output.dtype), rows)
