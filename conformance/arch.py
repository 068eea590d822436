"""Architectures as data: what hardware can do, each fact with its source, and the target that compilers know it by.

A fact that nobody could source is absent: ``fact()`` then answers None, which means "unknown", never "no".
Capabilities are asked for by name; version numbers are never compared, because some chips imitate another vendor's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.errors import ConformanceError, unknown_name
from conformance.expectations.rule import Expectation

# name -> (type of the value, what it says)
FACTS: Mapping[str, tuple[type, str]] = {
    "shared_bytes": (int, "bytes of shared memory (LDS) that one block may use"),
    "wave": (int, "lanes of one warp or wave"),
    "threads": (int, "threads that one block may have"),
    "vector_bytes": (int, "bytes of the widest global memory access of one lane"),
    "fp8": (str, "8-bit floats in hardware: none, ocp (e4m3fn, max 448) or fnuz (max 240, 0x80 = NaN)"),
    "fp4": (bool, "4-bit floats (e2m1) in matrix instructions"),
    "mma": (dict, "matrix instructions by 'inputs MxNxK accumulator': mma.sync or MFMA, any other kind by its name, as "
            "'bf16 wgmma 64xNx16 f32' or 'bf16 wmma 16x16x16 f32'"),
    "atomics": (dict, "atomic additions in memory, by name"),
    "async_copies": (dict, "copies from global to shared memory that pass no register, by name"),
}
FP8_FORMATS = ("none", "ocp", "fnuz")


def kind_of(name: str, where: str) -> type:
    """Type of the value that a fact has, by the name that rules use: an entry of a table is true or false. Raises
    ConformanceError for no name of one."""
    table, dot, entry = name.partition(".")
    if table not in FACTS:
        raise unknown_name(f"fact in {where}", name, FACTS)
    kind = FACTS[table][0]
    if (kind is dict) != bool(dot and entry):
        form = f"{table}.NAME, an entry of a table" if kind is dict else table
        raise ConformanceError(f"{where}: {name!r} must be written {form}")
    return bool if kind is dict else kind


@dataclass(frozen=True)
class Fact:
    """``value`` is an int, a bool, a string, or a table of booleans by name; ``source`` says where it is written."""

    value: Any
    source: str


@dataclass(frozen=True)
class Arch:
    """One architecture, read from ``matrices/archs/NAME.toml``.

    device: the kind of torch device it is ("cpu" or "cuda", which is also ROCm's). language: what kernels are
    generated in ("c", "cuda", "hip"). target: TileLang's target, empty when TileLang has none for it. rules: what is
    expected of kernels on it. skips: which cases are not meant for it, of which only ``match``, ``facts`` and
    ``reason`` count.
    """

    name: str
    about: str = "not in matrices/archs: nothing is known of it"
    device: str = "cuda"
    language: str = ""
    target: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Fact] = field(default_factory=dict)
    rules: tuple[Expectation, ...] = ()
    skips: tuple[Expectation, ...] = ()

    def fact(self, name: str) -> Any:
        """The value of a fact, None when it is unknown. ``atomics.red_add_bf16x2`` asks for one entry of a table."""
        table, _, entry = name.partition(".")
        if table not in FACTS:
            raise KeyError(f"no fact is called {table!r}; known: {', '.join(FACTS)}")
        known = self.facts.get(table)
        if known is None:
            return None
        return known.value.get(entry) if entry else known.value

    def limit(self, name: str) -> int | None:
        """A fact that is a number, None when it is unknown."""
        value = self.fact(name)
        return value if isinstance(value, int) else None
