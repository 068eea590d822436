"""The ceilings that a figure is held against, measured in the same process, by the same clock and protocol."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from conformance.bench.clock import CPU, Clock, Step
from conformance.bench.protocol import Protocol

_MIB = 1 << 20
_COPIES = {"cpu": (4 * _MIB, 64 * _MIB), "cuda": (4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB, 1024 * _MIB)}
_SIDES = {"cpu": 512, "cuda": 8192}
_SLOW_SIDE = 4096  # of fp32 products on a GPU
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8,
           "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Copy:
    """The fastest way found to copy within the device: bytes read and written -> bytes per second, and how. A copy
    that moves less than ``least`` bytes may owe its rate to a cache."""

    rates: Mapping[int, float]
    way: str
    least: int = 0

    @property
    def best(self) -> float:
        """Bytes per second of the size that goes fastest, of those that no cache holds."""
        return max(rate for size, rate in self.rates.items() if size >= min(self.least, max(self.rates)))

    def at(self, moved: int) -> float:
        """Bytes per second of a copy that moves as many bytes; between measured sizes by interpolation."""
        sizes = sorted(self.rates)
        right = bisect.bisect_left(sizes, moved)
        if right == 0 or right == len(sizes):
            return self.rates[sizes[min(right, len(sizes) - 1)]]
        low, high = sizes[right - 1], sizes[right]
        share = math.log(moved / low) / math.log(high / low)
        return self.rates[low] + share * (self.rates[high] - self.rates[low])


@dataclass
class Ceilings:
    """Of one device and process; each is measured when it is first asked for."""

    device: torch.device
    clock: Clock
    protocol: Protocol
    _copy: Copy | None = None
    _products: dict[str, float | str] = field(default_factory=dict)

    def copy(self) -> Copy:
        """Device copy: the better of the driver's copy and of an elementwise kernel."""
        if self._copy is None:
            found: dict[int, tuple[float, str]] = {}
            for size in _COPIES[self.device.type]:
                source = torch.ones(size // 4, dtype=torch.float32, device=self.device)
                target = torch.empty_like(source)
                for way, act in _copy_ways(source, target).items():
                    found[2 * size] = max(found.get(2 * size, (0.0, "")), (2 * size / self._seconds(act), way))
            copy = Copy({size: rate for size, (rate, _) in found.items()}, "", self.protocol.flush_bytes)
            self._copy = replace(copy, way=next(way for rate, way in found.values() if rate == copy.best))
        return self._copy

    def product(self, dtype: str) -> float | str:
        """FLOP/s of a dense square matrix product of a dtype ("fp32", "bf16", ...; TF32 off), or why there is none."""
        if dtype not in self._products:
            self._products[dtype] = self._product(dtype)
        return self._products[dtype]

    def _product(self, dtype: str) -> float | str:
        if dtype not in _DTYPES:
            return f"no product of {dtype} is known"
        side = min(_SIDES[self.device.type], _SLOW_SIDE if dtype == "fp32" else 1 << 30)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            act = _product_of(_DTYPES[dtype], side, self.device)
            act()
            return 2 * side**3 / self._seconds(act)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return f"torch has no product of {dtype} here: {str(error).splitlines()[0][:120]}"
        finally:
            torch.set_float32_matmul_precision(before)

    def _seconds(self, act: Callable[[], Any]) -> float:
        """One run of the protocol."""
        protocol = replace(self.protocol, runs=1)
        steps = [Step(_nothing, act, _ignored)]
        seconds = self.clock.times(steps)[0]
        for _ in range(protocol.warmup_of(seconds)):
            act()
        repeats = protocol.repeats_of(self.clock.times(steps)[0])
        return median(fmean(self.clock.times(steps * repeats)) for _ in range(protocol.trials))

    @property
    def kind(self) -> str:
        """Kind of time that the ceilings were measured in."""
        return CPU if self.device.type == "cpu" else self.clock.kind


def _copy_ways(source: Tensor, target: Tensor) -> dict[str, Callable[[], Any]]:
    return {"copy": lambda: target.copy_(source), "elementwise": lambda: torch.neg(source, out=target)}


def _product_of(dtype: torch.dtype, side: int, device: torch.device) -> Callable[[], Tensor]:
    """One product [side, side] of random values. Raises what torch raises where it has none of this dtype."""
    generator = torch.Generator(device).manual_seed(1)
    one, other = (torch.randn((side, side), generator=generator, device=device) for _ in range(2))
    if dtype == torch.int8:
        left, right = (value.mul(30).clamp(-127, 127).to(dtype) for value in (one, other.T))
        return lambda: torch._int_mm(left, right.T)
    left, right = one.to(dtype), other.to(dtype)
    if dtype == torch.float8_e4m3fn:
        unit = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right.T, unit, unit, out_dtype=torch.bfloat16, use_fast_accum=True)
    out = torch.empty((side, side), dtype=dtype, device=device)
    return lambda: torch.mm(left, right, out=out)


def _nothing() -> None:
    pass


def _ignored(_: Any) -> None:
    pass
