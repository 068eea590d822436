"""Where a tensor lies in memory: contiguous, at an offset, strided, column-major, or off its alignment.

Every tensor is a view into a larger storage that holds NaN (integers: 0) everywhere else, 4 KiB before and after it
included: what is read outside is seen in the result, what is written outside in the storage's checksum.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from conformance.errors import unknown_name

BAND = 4096  # bytes before and after
GAP = 64  # elements between the rows of a strided tensor
LAYOUTS = ("contiguous", "offset", "strided", "column_major", "unaligned")
MAY_REFUSE = frozenset({"strided", "strided_all", "column_major", "unaligned"})  # by kernels that do not take them


def place(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, layout: str = "contiguous") -> Tensor:
    """An uninitialised view of ``shape`` with the layout asked for. Raises ConformanceError for an unknown one.

    "offset" is contiguous and 16-byte aligned at another place of its storage; "unaligned" begins one element late.
    """
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    band = BAND // dtype.itemsize + {"offset": 512, "unaligned": 1}.get(layout, 0)
    width = shape[-1] + (GAP if layout == "strided" else 0)
    count = math.prod(shape[:-1]) * width
    fill = math.nan if dtype.is_floating_point else 0
    storage = torch.full((count + 2 * band,), fill, dtype=dtype, device=device)
    if layout == "column_major":
        return storage[band : band + count].view(*reversed(shape)).permute(*reversed(range(len(shape))))
    return storage[band : band + count].view(*shape[:-1], width)[..., : shape[-1]]
