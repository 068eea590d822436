"""Where the elements of a mask lie, in words: whole rows or columns, the tail of an axis, one tile, one element."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Region:
    """The smallest box around a mask [rows, columns], bounds inclusive, and how much of it the mask fills."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    shape: tuple[int, int]
    count: int
    row_count: int
    column_count: int

    @property
    def box(self) -> int:
        return (self.rows[1] - self.rows[0] + 1) * (self.columns[1] - self.columns[0] + 1)

    @property
    def single(self) -> bool:
        return self.count == 1

    @property
    def compact(self) -> bool:
        """Whether the mask is one tile: most of its box, which is no more than half of the whole."""
        return self.count * 2 > self.box and self.box * 2 <= self.shape[0] * self.shape[1]

    @property
    def text(self) -> str:
        if self.count == self.shape[0] * self.shape[1]:
            return "everywhere"
        if self.single:
            last = (self.rows[0], self.columns[0]) == (self.shape[0] - 1, self.shape[1] - 1)
            return f"in the {'last ' if last else ''}element [{self.rows[0]}, {self.columns[0]}]"
        parts = [_range("row", self.rows, self.shape[0], self.row_count),
                 _range("column", self.columns, self.shape[1], self.column_count)]
        return "in " + text if (text := ", ".join(filter(None, parts))) else "all over the output"


def region(mask: Tensor) -> Region | None:
    """The region of a boolean mask [rows, columns], None where it is empty."""
    by_row, by_column = mask.any(dim=1).nonzero().flatten(), mask.any(dim=0).nonzero().flatten()
    if not len(by_row):
        return None
    rows, columns = mask.shape
    return Region((int(by_row[0]), int(by_row[-1])), (int(by_column[0]), int(by_column[-1])), (rows, columns),
                  int(mask.sum()), len(by_row), len(by_column))


def _range(axis: str, bounds: tuple[int, int], extent: int, count: int) -> str:
    """One axis: empty where all of it is meant."""
    first, last = bounds
    if count == extent:
        return ""
    if first == last:
        return f"the last {axis} ({first})" if first == extent - 1 else f"{axis} {first}"
    if count < last - first + 1:
        return f"{count} of the {axis}s {first} to {last}"
    return f"{axis}s >= {first} (of {extent})" if last == extent - 1 else f"{axis}s {first} to {last}"
