"""The arguments of each case of moe_reduce_fused: routing, rows, scales, and where poison stands."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from conformance.case import Case, data_seed
from conformance.data import routing, values
from conformance.data.generate import integers, normal, uniform
from conformance.data.layouts import GAP, place
from conformance.errors import ConformanceError
from conformance.formats import FORMATS
from conformance.operator import Arguments, Call, Shared
from references.moe_reduce_fused.contract import SOURCES, output

_WIDE = {"fp32": 40, "bf16": 40, "fp16": 8}  # exponents that rows and their scales are moved apart by
_PLAIN = ("codes", "small_addends", "overflow")  # data whose scales are all 1
_SPECIAL_SF = {"zero": 0.0, "negative": -1.5, "tiny": 2.0**-120, "subnormal": 1.5 * 2.0**-130, "huge": 2.0**90,
               "greatest": -1.75 * 2.0**110, "infinite": math.inf, "nan": math.nan}
_SCALES = ("usual", "subnormal")  # of weights and x_sf
_REDUCED_SEND, _REDUCED_TOKENS = 8, 61  # tokens in the tens, and no multiple of 32
_CHANGING_ROWS = 1024
_NO_DATA = ("weights", "out", "xsf", "launch", "poison", "model", "sf", "scales")  # change neither x nor positions
# Takes scales of about 1 below fp32's normal range: far enough that reciprocals overflow, less far, and some not quite.
_SUBNORMAL = (2.0**-130, 2.0**-126, 2.0**-124)
_POISON = (float("nan"), 30000.0)  # one that spreads and one that is finite in every input format


def tokens_expected(case: Case, sizes: str) -> int:
    """T of a case, estimated without drawing its routing."""
    if "tokens" in case.params:
        tokens = case.number("tokens")
        return min(tokens, _REDUCED_TOKENS) if sizes == "reduced" and "model" in case.params else tokens
    send = min(_REDUCED_SEND, case.number("send")) if sizes == "reduced" else case.number("send")
    topk, experts, ranks = (case.number(key) for key in ("topk", "experts", "ranks"))
    remote = experts - experts // ranks
    dropped = math.comb(remote, topk) / math.comb(experts, topk)
    expected = math.ceil(send * ranks * (1 - dropped) * 1.05)
    return min(expected, _REDUCED_TOKENS) if sizes == "reduced" else expected


def memory(case: Case, sizes: str) -> int:
    """Peak bytes of one case and its group: x; per output element the accumulator (4), the oracle (8 + 4), golden,
    two outputs and a copy (up to 16); and the temporaries of chunks and of a PyTorch kernel."""
    tokens, topk, hidden = tokens_expected(case, sizes), case.number("topk"), case.number("hidden")
    x = (tokens * topk + 2) * hidden * SOURCES[case.get("in")].itemsize
    return x + tokens * hidden * 40 + (6 << 30 if tokens * hidden > 1 << 24 else 64 << 20)


@functools.lru_cache(maxsize=16)
def _expert_parallel(
    send: int, topk: int, experts: int, ranks: int, draw: str, reduced: bool, device: torch.device
) -> tuple[Tensor, int]:
    """Positions as upstream's routing gives them, and the number of rows. Drawn once for all cases of a routing row."""
    routed = {"send": str(send), "topk": str(topk), "experts": str(experts), "ranks": str(ranks), "draw": draw}
    seed = Case("moe_reduce_fused", routed).seed & 0x7FFFFFFF
    ids = routing.expert_parallel(
        min(_REDUCED_SEND, send) if reduced else send, topk, experts, ranks, seed, device,
        _REDUCED_TOKENS if reduced else None)
    if reduced and len(ids) % 32 == 0:
        ids = ids[:-1]
    return routing.expanded_positions(ids), len(ids) * topk


def _routing(case: Case, sizes: str, device: torch.device, seed: int) -> tuple[Tensor, int]:
    if "tokens" in case.params:
        tokens = tokens_expected(case, sizes)
        return routing.pattern(case.get("routing", "shuffled"), tokens, case.number("topk"), seed, device)
    send, topk, experts, ranks = (case.number(key) for key in ("send", "topk", "experts", "ranks"))
    return _expert_parallel(send, topk, experts, ranks, case.get("draw"), sizes == "reduced", device)


def _scales(regime: str, shape: tuple[int, ...], seed: int, device: torch.device, signed: bool) -> Tensor:
    """Real: near-normal where signed, else uniform [0, 1). Exact: powers of two from 1/4 to 4 of either sign."""
    if regime != "exact":
        return normal(shape, seed, device) if signed else uniform(shape, seed, device)
    power = torch.exp2(integers(shape, -2, 3, seed, device).float())
    return torch.where(integers(shape, 0, 2, seed + 1, device) == 1, -power, power)


def inputs(case: Case, sizes: str, device: torch.device, shared: Shared) -> Call:
    """The arguments of a case. The seed leaves out weights, out dtype and x_sf, so that the cases which differ
    only in those share x, positions and scales. Raises ConformanceError for a parameter that does not fit."""
    hidden, source, target = case.number("hidden"), case.get("in"), case.get("out")
    if source not in SOURCES or target not in (source, "e4m3"):
        raise ConformanceError(f"case {case.id}: in:{source} out:{target} is no dtype combination of the contract")
    data, layout = case.get("data", "real"), case.get("layout", "contiguous")
    regime = "exact" if data in values.EXACT else "real"
    all_strided = layout == "strided_all"
    seed = data_seed(case, _NO_DATA)

    def placed(value: Tensor) -> Tensor:
        return place(tuple(value.shape), value.dtype, device, "strided" if all_strided else "contiguous").copy_(value)

    def build_routing() -> tuple[Tensor, int]:
        positions, rows = _routing(case, sizes, device, seed)
        return placed(positions), rows

    positions, rows = shared.get(("routing", seed, sizes), build_routing)
    if (scales := case.get("scales", "usual")) not in _SCALES:
        raise ConformanceError(f"case {case.id}: scales:{scales} is none of {', '.join(_SCALES)}")
    small = scales == "subnormal"
    wide = integers((rows,), -_WIDE[source], _WIDE[source] + 1, seed + 7, device) if data == "wide" else None

    def build_x() -> Tensor:
        x = place((rows, hidden), SOURCES[source], device, "strided" if all_strided else layout)
        values.fill(x, data, positions, seed)
        if data not in values.SPARSE:
            x[unused] = _POISON[0]
        if wide is not None:
            x *= torch.exp2(-wide.float()).to(x.dtype)[:, None]
        return x

    unused = shared.get(("unused", seed, sizes), lambda: _unused_rows(positions, rows))
    x = shared.get(("x", seed, sizes), build_x)
    arguments: Arguments = {"x": x, "token_topk_to_pos": positions, "topk_weights": None, "x_sf": None, "sf": None}

    def build_weights() -> Tensor:
        weights = _weights(data, _scales(regime, tuple(positions.shape), seed + 2, device, signed=False))
        if small and case.get("xsf") == "yes":  # a product of both that is subnormal would be rounded coarsely
            weights = torch.exp2(integers(tuple(positions.shape), 0, 3, seed + 2, device).float())
        elif small:
            weights = _small(weights)
        if wide is not None and case.get("xsf") != "yes":
            weights *= torch.exp2(wide.float())[positions.clamp(min=0).long()]
        return placed(weights)

    def build_x_sf() -> Tensor:
        x_sf = _row_scales(data, _scales(regime, (rows,), seed + 3, device, signed=True))
        if small:
            x_sf = _small(x_sf)
        if wide is not None:
            x_sf *= torch.exp2(wide.float())
        return placed(x_sf[:, None])[:, 0] if all_strided else placed(x_sf)

    if case.get("weights") == "yes":
        key = ("weights", seed, sizes, case.get("poison"), scales, (wide is not None or small) and case.get("xsf"))
        arguments["topk_weights"] = shared.get(key, build_weights)
    if case.get("xsf") == "yes":
        arguments["x_sf"] = shared.get(("x_sf", seed, sizes, scales), build_x_sf)
    sf = _output_scale(case, regime, seed) if target == "e4m3" and case.get("sf", "given") != "none" else None
    arguments["sf"] = None if sf is None else placed(torch.full((1,), sf, device=device))
    padding = positions < 0
    form = replace(output(arguments, FORMATS[target].dtype), gap=GAP if all_strided else 0)
    empty = padding.all(dim=1) if sf is None or 0 < sf < math.inf else None
    places: dict[str, Tensor] = {"x": unused[:: max(1, len(unused) // _CHANGING_ROWS)]}
    if arguments["x_sf"] is not None:
        places["x_sf"] = unused
    if case.get("poison") == "weights" and arguments["topk_weights"] is not None:
        places["topk_weights"] = padding
    poison = _poison(arguments, places, shared.get(("poison", seed, sizes), dict[int, int]))
    return Call(case, arguments, form, poison, regime, empty, {"x": places["x"]})


def _weights(data: str, drawn: Tensor) -> Tensor:
    """Weights [T, K] that fit the data: equal in pairs that cancel, 1 where output codes are aimed at, single NaN and
    infinity where non-finite values are; elsewhere some are exactly 0."""
    if data in ("real", "exact", "coded"):
        drawn[2::5, -1] = 0.0
    elif data == "cancel":
        even = drawn.shape[1] // 2 * 2
        drawn[:, 1:even:2] = drawn[:, 0:even:2]
    elif data in _PLAIN:
        drawn.fill_(1.0)
    elif data == "nonfinite":
        drawn[3::7, 0], drawn[5::7, -1] = math.nan, math.inf
        drawn[1::7] = 0.0  # 0 times NaN or infinity is NaN
    return drawn


def _row_scales(data: str, drawn: Tensor) -> Tensor:
    """x_sf [E] that fit the data, as ``_weights``."""
    if data == "cancel" or data in _PLAIN:
        drawn.fill_(1.0)
    elif data == "nonfinite":
        drawn[5::23], drawn[7::23] = -math.inf, math.nan
        drawn[2::5] = 0.0
    return drawn


def _small(drawn: Tensor) -> Tensor:
    """Scales times each of ``_SUBNORMAL`` in turn."""
    turn = torch.arange(drawn.numel(), device=drawn.device) % len(_SUBNORMAL)
    return drawn * torch.tensor(_SUBNORMAL, device=drawn.device)[turn].view(drawn.shape)


def _poison(arguments: Arguments, places: Mapping[str, Tensor], standing: dict[int, int]) -> Callable[[int], None]:
    """The call's ``set_poison``. ``places``: rows of x and x_sf that no slot refers to, padding slots of the weights.

    All unused rows of x hold NaN from the start; the second poison goes to a spread of them, which costs far less at
    official sizes. ``standing`` tells, over all calls that share tensors, which poison stands in a tensor, by its id.
    What stands already is not written again, so that a kernel's own writes to these places show in the checksum.
    """

    def stands(tensor: Tensor, which: int) -> bool:
        before, standing[id(tensor)] = standing.get(id(tensor)), which
        return before == which

    def set_poison(which: int) -> None:
        known = which < len(_POISON)  # of the third one each row has its own
        for name, where in places.items():
            tensor = arguments[name]
            if stands(tensor, which):
                continue
            if where.dtype == torch.bool:
                tensor.masked_fill_(where, _POISON[which] if known else 5.0)
            elif known:
                tensor.index_fill_(0, where, _POISON[which])  # waits for no device, unlike an assignment
            else:
                tensor[where] = (where % 61 + 3).to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))

    return set_poison


def _output_scale(case: Case, regime: str, seed: int) -> float:
    """sf, a number of fp32: 0.75 to 2.75 of either sign; a power of two where sums are exact; what output codes need
    where those are aimed at; or the special value that the case's parameter sf names.

    Positive wherever a token may hold only padding slots: +0 times a negative sf is a zero whose sign
    straightforward kernels do not agree on, and the contract's +0 is tested with positive sf only.
    """
    named, data = case.get("sf", "given"), case.get("data")
    if named in _SPECIAL_SF:
        return _SPECIAL_SF[named]
    if named != "given":
        raise ConformanceError(f"case {case.id}: sf:{named} is none of given, none, {', '.join(_SPECIAL_SF)}")
    if data in _PLAIN or data == "tiny":
        return 0.25 if data == "overflow" else 1.0
    if regime == "exact":
        return 0.5
    scale = float(0.75 + 2 * uniform((1,), seed + 4, torch.device("cpu")))  # not on a GPU, which would be waited for
    negative = "routing" not in case.params and seed % 2 == 1
    return -scale if negative else scale


def _unused_rows(positions: Tensor, rows: int) -> Tensor:
    """Indices int64 of the rows of x that no slot refers to."""
    used = torch.zeros(rows, dtype=torch.bool, device=positions.device)
    used[positions[positions >= 0].long()] = True
    return (~used).nonzero().flatten()
