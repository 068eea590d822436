"""Value patterns: what stands in the rows that slots refer to.

Each pattern fills ``x`` [rows, width] in place, given the positions [tokens, topk] (-1 = padding) that refer to
its rows. "real" and "exact" are the two regimes every tier has; the others aim at one kind of fault each. Rows that
no slot refers to are left as they are by the patterns of ``SPARSE``, and filled by the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from conformance.data.generate import fill_rows, fill_some_rows, integers
from conformance.errors import unknown_name
from conformance.formats import FORMATS, format_of


def _real(x: Tensor, positions: Tensor, seed: int) -> None:
    fill_some_rows(x, "real", seed, _referenced(positions))


def _exact(x: Tensor, positions: Tensor, seed: int) -> None:
    fill_some_rows(x, "exact", seed, _referenced(positions))


def _referenced(positions: Tensor) -> Tensor:
    """Rows int64 [n] that slots refer to: of large expert-parallel inputs a tenth."""
    return positions[positions >= 0].long()


def _coded(x: Tensor, positions: Tensor, seed: int) -> None:
    """Small integers that tell row and column apart: a moved row, column or tile changes the sum."""
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    column = torch.arange(x.shape[1], device=x.device)[None, :]
    x.copy_((row * 7 + column * 3 + (column // 16) * 5) % 61 - 30)


def _cancel(x: Tensor, positions: Tensor, seed: int) -> None:
    """Slots come in pairs +v, -v (equal weights), so only the last odd slot, 2**-9 as large, is left."""
    fill_rows(x, "real", seed)
    pairs = positions.shape[1] // 2
    for slot in range(positions.shape[1]):
        here = positions[:, slot]
        if slot < 2 * pairs and slot % 2 == 1:
            before = positions[:, slot - 1]
            both = (here >= 0) & (before >= 0)
            x[here[both].long()] = -x[before[both].long()]
        elif slot >= 2 * pairs:
            x[here[here >= 0].long()] *= 2.0**-9


def _small_addends(x: Tensor, positions: Tensor, seed: int) -> None:
    """1 in the first slot, 2**-9 in the others: a 16-bit accumulator never moves from 1."""
    x.fill_(2.0**-9)
    first = positions[:, 0]
    x[first[first >= 0].long()] = 1.0


def _high(x: Tensor, positions: Tensor, seed: int) -> None:
    """Numbers near the end of x's format, of fp32 and bf16 up to 2**125: for scales that are as small."""
    fill_rows(x, "real", seed)
    x *= 2.0 ** (-_minimum_exponent(x) - 6)


def _low(x: Tensor, positions: Tensor, seed: int) -> None:
    """Numbers of a few times the smallest normal one, of fp32 and bf16 around 2**-111: for scales that are as large."""
    fill_rows(x, "real", seed)
    x *= 2.0 ** (_minimum_exponent(x) * 7 // 8)


def _minimum_exponent(x: Tensor) -> int:
    own = format_of(x.dtype)
    return own.minimum_exponent if own is not None else -126


def _zeros(x: Tensor, positions: Tensor, seed: int) -> None:
    x.zero_()


def _negative_zeros(x: Tensor, positions: Tensor, seed: int) -> None:
    x.fill_(-0.0)


def _nonfinite(x: Tensor, positions: Tensor, seed: int) -> None:
    """NaN, +inf and -inf in single elements of referenced rows; every other element is ordinary."""
    fill_rows(x, "real", seed)
    rows = torch.arange(x.shape[0], device=x.device)
    for number, value in enumerate((float("nan"), float("inf"), float("-inf"))):
        columns = integers((x.shape[0],), 0, x.shape[1], seed + number, x.device)
        chosen = rows % 4 == number
        x[rows[chosen], columns[chosen]] = value


def _overflow(x: Tensor, positions: Tensor, seed: int) -> None:
    """Magnitudes around the largest finite value of e4m3 (448, and 464 where rounding turns) and around four times
    that, for an output scale of 1/4; both signs; and columns of x's own largest values, whose sums overflow, also by
    a quarter and by three quarters of an ULP in x's format."""
    ladder = torch.tensor([400.0, 432.0, 447.0, 448.0, 456.0, 464.0, 465.0, 480.0, 512.0, 4096.0], device=x.device)
    ladder = torch.cat([ladder, ladder * 4])
    index = integers(tuple(x.shape), 0, 2 * len(ladder), seed, x.device)
    x.copy_(torch.where(index < len(ladder), ladder[index % len(ladder)], -ladder[index % len(ladder)]))
    own = format_of(x.dtype)
    if own is not None:
        x[:, ::97] = own.maximum
        x[:, 48::97] = -own.maximum
        ulp = own.maximum / (2.0**own.precision - 1)
        for column, part in ((24, 0.25), (72, 0.75)):
            x[::2, column::97] = own.maximum
            x[1::2, column::97] = ulp * part


def e4m3_decision_points(device: torch.device) -> Tensor:
    """fp32: every finite e4m3 value, every midpoint between neighbours, and both fp32 neighbours of each."""
    codes = torch.arange(0, 127, dtype=torch.uint8, device=device).view(FORMATS["e4m3"].dtype).float()
    points = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, codes.new_tensor([464.0, 480.0, 1000.0])])
    integer = points.view(torch.int32)
    points = torch.cat([points, (integer + 1).view(torch.float32), (integer - 1).clamp(min=0).view(torch.float32)])
    return torch.cat([points, -points])


def _codes(x: Tensor, positions: Tensor, seed: int) -> None:
    """Every e4m3 value and rounding midpoint, at every lane: row r starts the list at its r-th entry."""
    points = e4m3_decision_points(x.device)
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    column = torch.arange(x.shape[1], device=x.device)[None, :]
    x.copy_(points[(row * 5 + column + seed) % len(points)])


def _tiny(x: Tensor, positions: Tensor, seed: int) -> None:
    """Values whose sums are subnormal in the output or in x's own format."""
    fill_rows(x, "real", seed)
    exponent = _minimum_exponent(x)
    x[:, ::2] *= 2.0**-11  # below e4m3's smallest normal, 2**-6
    x[:, 1::4] *= 2.0 ** (exponent // 2)
    x[:, 1::4] *= 2.0 ** (exponent - exponent // 2)


PATTERNS: dict[str, Callable[[Tensor, Tensor, int], None]] = {
    "real": _real,
    "wide": _real,  # the operator moves rows and their scales apart
    "exact": _exact,
    "coded": _coded,
    "cancel": _cancel,
    "small_addends": _small_addends,
    "high": _high,
    "low": _low,
    "zeros": _zeros,
    "negative_zeros": _negative_zeros,
    "nonfinite": _nonfinite,
    "overflow": _overflow,
    "codes": _codes,
    "tiny": _tiny,
}
SPARSE = frozenset({"real", "wide", "exact"})
EXACT = frozenset({"exact", "coded", "codes", "small_addends", "zeros", "negative_zeros"})


def fill(x: Tensor, pattern: str, positions: Tensor, seed: int) -> None:
    """Fill ``x`` by a named pattern. Raises ConformanceError for an unknown one."""
    if pattern not in PATTERNS:
        raise unknown_name("data pattern", pattern, PATTERNS)
    PATTERNS[pattern](x, positions, seed)
