"""Lowers TileLang programs for architectures that need not be here; needs neither a GPU nor a vendor's toolkit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conformance.arch import Arch
from conformance.route import Lowered
from kernels.tilelang_build import PASSES, tilelang_module

_STATIC = re.compile(r"^\s*__shared__\s+(?:__align__\(\d+\)\s+)?(\w+)\s+\w+\[(\d+)\]", re.MULTILINE)
_SIZES = {"uchar": 1, "char": 1, "uint64_t": 8, "int64_t": 8, "double": 8, "half_t": 2, "bfloat16_t": 2, "fp8_e4_t": 1,
          "fp8_e5_t": 1, "uint8_t": 1, "int8_t": 1, "ushort": 2, "short": 2, "uint16_t": 2, "int16_t": 2}


def lower(trace: Callable[[], Any], arch: Arch, passes: Mapping[str, bool] = PASSES) -> Lowered:
    """The source that TileLang generates for ``arch``, and what one block of it uses.

    ``trace`` builds the program; it is called inside the target's context, on which some of TileLang's operators
    depend. ``passes`` are settings of TileLang's passes. Raises what TileLang raises; the process may also abort.
    """
    tilelang = tilelang_module()
    target = dict(arch.target)
    with tilelang.tvm.transform.PassContext(opt_level=3, config=dict(passes)), tilelang.tvm.target.Target(target):
        artifact = tilelang.lower(trace(), target=target)
    functions = [function.attrs for _, function in artifact.device_mod.functions.items()]
    source = str(artifact.kernel_source)
    root = Path(tilelang.__file__).parent
    return Lowered(
        language=arch.language,
        target=target.get("arch") or target["mcpu"],
        source=source,
        dynamic_shared=max((int(attrs.get("dyn_shared_memory_buf", 0)) for attrs in functions), default=0),
        static_shared=sum(_SIZES.get(kind, 4) * int(count) for kind, count in _STATIC.findall(source)),
        threads=max((_threads(attrs) for attrs in functions), default=0),
        includes=(str(root / "src"), str(root / "3rdparty" / "cutlass" / "include")),
        nvrtc_header="tl_templates/cuda/nvrtc_std.h" if arch.language == "cuda" else "",
    )


def _threads(attrs: Any) -> int:
    extents = dict(attrs["thread_extent"].items())
    threads = 1
    for axis in ("threadIdx.x", "threadIdx.y", "threadIdx.z"):
        threads *= int(extents.get(axis, 1))
    return threads
