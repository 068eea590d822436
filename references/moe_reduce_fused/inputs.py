"""The arguments of each case of moe_reduce_fused: routing, rows, scales, and where poison stands."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from conformance import routing, values
from conformance.case import Case
from conformance.errors import ConformanceError
from conformance.formats import FORMATS
from conformance.generate import integers, normal, uniform
from conformance.operator import Arguments, Call, Shared
from references.moe_reduce_fused.contract import SOURCES, output

_REDUCED_SEND, _REDUCED_TOKENS = 8, 61  # tokens in the tens, and no multiple of 32
_CHANGING_ROWS = 4096
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


def _routing(case: Case, sizes: str, device: torch.device, seed: int) -> tuple[Tensor, int]:
    topk = case.number("topk")
    if "tokens" in case.params:
        tokens = tokens_expected(case, sizes)
        return routing.pattern(case.get("routing", "shuffled"), tokens, topk, seed, device)
    reduced = sizes == "reduced"
    send = min(_REDUCED_SEND, case.number("send")) if reduced else case.number("send")
    most = _REDUCED_TOKENS if reduced else None
    ids = routing.expert_parallel(send, topk, case.number("experts"), case.number("ranks"), seed, device, most)
    if reduced and len(ids) % 32 == 0:
        ids = ids[:-1]
    return routing.expanded_positions(ids), len(ids) * topk


def _scales(regime: str, shape: tuple[int, ...], seed: int, device: torch.device, signed: bool) -> Tensor:
    """Real: uniform [0, 1) or, signed, near-normal. Exact: powers of two from 1/4 to 4, signed where asked."""
    if regime != "exact":
        return normal(shape, seed, device) if signed else uniform(shape, seed, device)
    power = torch.exp2(integers(shape, -2, 3, seed, device).float())
    return torch.where(integers(shape, 0, 2, seed + 1, device) == 1, -power, power) if signed else power


def inputs(case: Case, sizes: str, device: torch.device, shared: Shared) -> Call:
    """The arguments of a case. The seed leaves out weights, out dtype and x_sf, so that the cases which differ
    only in those share x, positions and scales. Raises ConformanceError for a parameter that does not fit."""
    topk, hidden = case.number("topk"), case.number("hidden")
    source, target = case.get("in"), case.get("out")
    if source not in SOURCES or target not in (source, "e4m3"):
        raise ConformanceError(f"case {case.id}: in:{source} out:{target} is no dtype combination of the contract")
    data = case.get("data", "real")
    regime = "exact" if data in values.EXACT else "real"
    skip = ("weights", "out", "xsf", "launch", "poison", "model", "sf")
    seed = Case(case.operator, {k: v for k, v in case.params.items() if k not in skip}, case.family).seed & 0x7FFFFFFF
    positions, rows = shared.get(("routing", seed, sizes), lambda: _routing(case, sizes, device, seed))

    def build_x() -> Tensor:
        layout = case.get("layout", "contiguous")
        if layout == "strided":
            x = torch.full((rows, hidden + 64), math.nan, dtype=SOURCES[source], device=device)[:, :hidden]
        elif layout == "offset":  # contiguous and 16-byte aligned, but not at the start of its storage
            x = torch.full(((rows + 1) * hidden + 512,), math.nan, dtype=SOURCES[source], device=device)
            x = x[512 : 512 + rows * hidden].view(rows, hidden)
        elif layout == "unaligned":
            x = torch.empty(rows * hidden + 1, dtype=SOURCES[source], device=device)[1:].view(rows, hidden)
        elif layout == "contiguous":
            x = _guarded((rows, hidden), SOURCES[source], device)
        else:
            raise ConformanceError(f"case {case.id}: unknown layout {layout!r}: contiguous, offset, strided, unaligned")
        values.fill(x, data, positions, seed)
        return x

    x = shared.get(("x", seed, sizes), build_x)
    unused = shared.get(("unused", seed, sizes), lambda: _unused_rows(positions, rows))
    # All unused rows hold NaN; the second poison goes to a spread of them, which costs far less at official sizes.
    changing = unused[:: max(1, len(unused) // _CHANGING_ROWS)]
    arguments: Arguments = {"x": x, "token_topk_to_pos": positions, "topk_weights": None, "x_sf": None, "sf": None}
    padding = positions < 0
    poison_weights = case.get("poison") == "weights"
    if case.get("weights") == "yes":
        weights = _guarded(tuple(positions.shape), torch.float32, device)
        weights.copy_(_scales(regime, tuple(positions.shape), seed + 2, device, signed=False))
        if data == "cancel":
            weights[:, 1 : topk // 2 * 2 : 2] = weights[:, 0 : topk // 2 * 2 : 2]
        elif data in ("codes", "small_addends", "overflow"):
            weights.fill_(1.0)
        arguments["topk_weights"] = weights
    if case.get("xsf") == "yes":
        x_sf = _guarded((rows,), torch.float32, device)
        x_sf.copy_(_scales(regime, (rows,), seed + 3, device, signed=True))
        if data in ("cancel", "codes", "small_addends", "overflow"):
            x_sf.fill_(1.0)
        arguments["x_sf"] = x_sf
    if target == "e4m3" and case.get("sf", "given") != "none":
        arguments["sf"] = _output_scale(case, regime, seed, device)

    in_x = shared.get(("poison", seed, sizes), dict[str, int])

    def set_poison(which: int) -> None:
        poison = _POISON[which]
        if "now" not in in_x:
            x[unused] = _POISON[0]
        if in_x.get("now") != which:
            x[changing] = poison
            in_x["now"] = which
        if arguments["x_sf"] is not None:
            arguments["x_sf"][unused] = poison
        if poison_weights and arguments["topk_weights"] is not None:
            arguments["topk_weights"].masked_fill_(padding, poison)

    sf = arguments["sf"]
    empty = padding.all(dim=1) if sf is None or float(sf) > 0 else None
    return Call(case, arguments, output(arguments, FORMATS[target].dtype), set_poison, regime, empty)


def _output_scale(case: Case, regime: str, seed: int, device: torch.device) -> Tensor:
    """sf: 0.75 to 2.75 of either sign; a power of two where sums are exact; 1 where output codes are aimed at.

    Positive wherever a token may hold only padding slots: +0 times a negative sf is a zero whose sign
    straightforward kernels do not agree on, and the contract's +0 is tested with positive sf only.
    """
    if case.get("data") in ("codes", "overflow", "tiny"):
        return torch.ones(1, device=device)
    if regime == "exact":
        return torch.full((1,), 0.5, device=device)
    scale = 0.75 + 2 * uniform((1,), seed + 4, device)
    negative = "routing" not in case.params and seed % 2 == 1
    return -scale if negative else scale


def _guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor with 4 KiB of NaN before and after it in its storage: a read outside meets NaN."""
    count, band = math.prod(shape), 4096 // dtype.itemsize
    flat = torch.empty(count + 2 * band, dtype=dtype, device=device)
    flat[:band] = math.nan
    flat[band + count :] = math.nan
    return flat[band : band + count].view(shape)


def _unused_rows(positions: Tensor, rows: int) -> Tensor:
    """Indices int64 of the rows of x that no slot refers to."""
    used = torch.zeros(rows, dtype=torch.bool, device=positions.device)
    used[positions[positions >= 0].long()] = True
    return (~used).nonzero().flatten()
