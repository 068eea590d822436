"""Drawings of timings: the roofline with every kernel on it, and bars of what share of it is reached. Inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import median

from reports.bench import spelling
from reports.bench.records import Timing

# Okabe and Ito's colours that can be told apart on light and dark ground; the shape tells kernels apart as well
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 860, 380, 74, 44, 16, 150
_BAR, _GAP, _LABEL = 13, 9, 230
_LONGEST = 42  # characters that the room for labels has
_Scale = Callable[[float], float]


def roofline(timings: Sequence[Timing]) -> str:
    """FLOPs per byte against FLOP/s, both logarithmic: ceilings as lines, one mark per timing. Empty without one."""
    shown = [timing for timing in timings if timing.rate > 0 and timing.intensity > 0]
    if not shown:
        return ""
    copy = max(timing.copy for timing in shown)
    products: dict[str, float] = {}
    for timing in shown:
        if timing.product:
            products[timing.arithmetic] = max(timing.product, products.get(timing.arithmetic, 0.0))
    right = max([timing.intensity for timing in shown] + [rate / copy for rate in products.values()]) * 2
    left = min(timing.intensity for timing in shown) / 2
    top = max([timing.rate for timing in shown] + list(products.values()) + [copy * left]) * 1.6
    bottom = min(timing.rate for timing in shown) / 2

    def x(intensity: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * _share(intensity, left, right)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * _share(rate, bottom, top)

    parts = [*_grid(left, right, bottom, top, x, y), *_roofs(left, right, bottom, copy, products, x, y)]
    names = list(dict.fromkeys(timing.kernel for timing in shown))
    for timing in shown:
        place = names.index(timing.kernel)
        title = (f"{timing.kernel} {timing.case}: {spelling.seconds(timing.seconds)}, "
                 f"{spelling.per_second(timing.bandwidth, 'B')}, {spelling.per_second(timing.rate, 'FLOP')}, "
                 f"{spelling.percent(timing.of_roof)} of the roofline")
        parts.append(_mark(place, x(timing.intensity), y(timing.rate), title))
    for place, name in enumerate(names):
        height = _HEIGHT - _BOTTOM - 18 * (len(names) - place) + 10
        parts.append(_mark(place, _WIDTH - _RIGHT + 18, height, name))
        parts.append(_text(_WIDTH - _RIGHT + 30, height + 4, name))
    label = f"Roofline of {len(shown)} timings; the table below has the figures"
    return _svg(_WIDTH, _HEIGHT, label, parts)


def bars(timings: Sequence[Timing]) -> str:
    """One bar for each variant, named workload and kernel: the median share of the roofline. Empty without timings."""
    groups: dict[str, dict[str, list[Timing]]] = {}
    for timing in timings:
        label = " ".join(filter(None, (timing.variant, timing.workload)))
        groups.setdefault(label, {}).setdefault(timing.kernel, []).append(timing)
    if not groups:
        return ""
    names = list(dict.fromkeys(timing.kernel for timing in timings))
    width = _WIDTH - _LABEL - 70
    parts: list[str] = []
    top = 22.0
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_text(_LABEL + width * share, 12, f"{100 * share:.0f} %", "middle"))
    for label, by_kernel in groups.items():
        parts.append(_text(_LABEL - 8, top + _BAR * len(by_kernel) / 2 + 4, label, "end"))
        for name, members in by_kernel.items():
            share = median(timing.of_roof for timing in members)
            colour = COLOURS[names.index(name) % len(COLOURS)]
            title = f"{label}, {name}: median {spelling.percent(share)} of the roofline over {len(members)} cases"
            parts.append(f'<rect x="{_LABEL}" y="{top:.1f}" width="{width * min(share, 1.1):.1f}" height="{_BAR - 2}" '
                         f'fill="{colour}"><title>{escape(title)}</title></rect>')
            parts.append(_text(_LABEL + width * min(share, 1.1) + 5, top + _BAR - 4, spelling.percent(share)))
            top += _BAR
        top += _GAP
    parts.append(f'<line x1="{_LABEL + width}" y1="16" x2="{_LABEL + width}" y2="{top:.0f}" stroke="currentColor" '
                 'stroke-dasharray="4 3"/>')
    return _svg(_WIDTH, math.ceil(top), "Median share of the roofline by variant, workload and kernel", parts)


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _grid(left: float, right: float, bottom: float, top: float, x: _Scale, y: _Scale) -> Iterable[str]:
    base = _HEIGHT - _BOTTOM
    for power in _powers(left, right):
        yield _line(x(power), _TOP, x(power), base, 0.12)
        yield _text(x(power), base + 16, f"{power:g}", "middle")
    for power in _powers(bottom, top):
        yield _line(_LEFT, y(power), _WIDTH - _RIGHT, y(power), 0.12)
        yield _text(_LEFT - 6, y(power) + 4, spelling.per_second(power, "FLOP"), "end")
    yield _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, "FLOPs per byte", "middle")


def _roofs(left: float, right: float, bottom: float, copy: float, products: dict[str, float], x: _Scale, y: _Scale
           ) -> Iterable[str]:
    """The slope of the copy up to the highest product, and a level line for each product from there on."""
    end = min(right, max(products.values(), default=copy * right) / copy)
    start = max(left, bottom / copy)
    if start < end:
        yield _line(x(start), y(copy * start), x(end), y(copy * end), 0.9)
    middle = math.sqrt(start * end) if start < end else left
    yield _text(x(middle) - 8, y(copy * middle) - 8, f"copy {spelling.per_second(copy, 'B')}", "end")
    for name, rate in products.items():
        yield _line(x(max(left, rate / copy)), y(rate), x(right), y(rate), 0.9)
        yield _text(x(right) + 4, y(rate) + 4, f"{name} {spelling.per_second(rate, 'FLOP')}")


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten within a range; of two where there is none."""
    for base in (10.0, 2.0):
        first, last = math.ceil(math.log(low, base)), math.floor(math.log(high, base))
        if first <= last:
            return [base**power for power in range(first, last + 1)]
    return []


def _mark(place: int, x: float, y: float, title: str) -> str:
    """A mark whose colour and shape tell the kernel."""
    shapes = (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"',
        f'<rect x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"',
        f'<path d="M{x:.1f} {y - 5:.1f} l5 9 h-10 z"',
        f'<path d="M{x:.1f} {y - 5:.1f} l5 5 l-5 5 l-5 -5 z"',
    )
    colour = COLOURS[place % len(COLOURS)]
    return f'{shapes[place % len(shapes)]} fill="{colour}" fill-opacity="0.75"><title>{escape(title)}</title>' + (
        "</circle>", "</rect>", "</path>", "</path>")[place % len(shapes)]


def _line(x1: float, y1: float, x2: float, y2: float, strength: float) -> str:
    return (f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" '
            f'stroke-opacity="{strength}"/>')


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    words = words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…"  # titles have the whole names
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{escape(words)}</text>'


def _svg(width: int, height: int, label: str, parts: Sequence[str]) -> str:
    return (f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" font-size="11" '
            f'font-family="inherit" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>')
