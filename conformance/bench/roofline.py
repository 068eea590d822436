"""What a time means: bandwidth and rate, and the fractions of the ceilings measured beside it."""

from __future__ import annotations

from dataclasses import dataclass

from conformance.operator import Cost


@dataclass(frozen=True)
class Roof:
    """copy: bytes per second of the best copy; copy_at_size: of one that moves as many bytes as the call; product:
    FLOP/s of a dense product, None where there is none."""

    copy: float
    copy_at_size: float
    product: float | None

    def attainable(self, cost: Cost) -> float:
        """Seconds below which no kernel with this cost can be, by these ceilings."""
        return max(cost.bytes / self.copy, cost.flops / self.product if self.product else 0.0)


@dataclass(frozen=True)
class Figures:
    """bandwidth in bytes per second, rate in FLOP/s, intensity in FLOPs per byte; bound: which ceiling is the nearer
    one ("memory", "arithmetic"); the others are fractions of the ceilings and of the roofline that they make."""

    bandwidth: float
    rate: float
    intensity: float
    bound: str
    of_copy: float
    of_copy_at_size: float
    of_product: float | None
    of_roof: float


def figures(seconds: float, cost: Cost, roof: Roof) -> Figures:
    """The figures of a call that took ``seconds`` (> 0)."""
    bandwidth, rate = cost.bytes / seconds, cost.flops / seconds
    arithmetic = bool(roof.product) and cost.flops / (roof.product or 1.0) > cost.bytes / roof.copy
    return Figures(
        bandwidth, rate, cost.flops / cost.bytes if cost.bytes else 0.0, "arithmetic" if arithmetic else "memory",
        bandwidth / roof.copy, bandwidth / roof.copy_at_size, rate / roof.product if roof.product else None,
        roof.attainable(cost) / seconds,
    )
