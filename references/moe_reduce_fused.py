"""moe_reduce_fused: the weighted reduction of expert outputs.

    out[t] = cast(sf * sum_j x[p(t, j)] * w(t, j) * x_sf[p(t, j)])      over slots j with p(t, j) >= 0

x [E, H] fp32 | bf16 | fp16, token_topk_to_pos int32 [T, K] (-1 = padding slot), topk_weights fp32 [T, K] or none
(= 1), x_sf fp32 [E] or none, sf fp32 [1] or none. Output [T, H] in x's dtype, or e4m3. H % 256 == 0.

Golden: fp32 accumulator from +0, slots ascending, s = weight * x_sf[p] (one fp32 product), acc = fma(x, s, acc),
then acc * sf, then one cast. Source of the semantics: TileKernels' reduce_fused (commit 36d9e45).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from conformance import routing, values
from conformance.arithmetic import fma
from conformance.case import Case
from conformance.errors import ConformanceError
from conformance.formats import FORMATS, cast
from conformance.generate import integers, normal, uniform
from conformance.operator import Arguments, Call, Cost, Operator, OracleRows, Output, Reference, Shared

VARIANTS = ("base", "with_x_sf", "fp8", "quantized")
_IN = {name: FORMATS[name].dtype for name in ("fp32", "bf16", "fp16")}
_REDUCED_SEND, _REDUCED_TOKENS = 8, 61  # tokens in the tens, and no multiple of 32
_U, _SMALLEST = 2.0**-24, 2.0**-149
_POISON = (float("nan"), 30000.0)  # one that spreads and one that is finite in every input format


# ---- contract -------------------------------------------------------------------------------------------------


def variant(case: Case) -> str:
    return VARIANTS[(case.get("xsf") == "yes") + 2 * (case.get("out") == "e4m3")]


def validate(arguments: Arguments, out: Tensor | None, strided: bool = False) -> None:
    """Check a call. ValueError or TypeError name argument, value and rule; nothing has been launched then.

    ``strided``: the kernel takes row-strided and unaligned tensors.
    """
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    weights, x_sf, sf = (arguments.get(name) for name in ("topk_weights", "x_sf", "sf"))
    given = {"x": x, "token_topk_to_pos": positions, "topk_weights": weights, "x_sf": x_sf, "sf": sf, "out": out}
    for name, value in given.items():
        if value is None and name in ("x", "token_topk_to_pos"):
            raise TypeError(f"{name} is None: a tensor is required")
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}: a tensor or None is required")
        if value is not None and value.device != x.device:
            raise ValueError(f"{name} is on {value.device}: all tensors must be on x's device, {x.device}")
    if x.dtype not in _IN.values():
        raise TypeError(f"x has dtype {x.dtype}: float32, bfloat16 or float16 is required")
    for name, value, dtype in (
        ("token_topk_to_pos", positions, torch.int32),
        ("topk_weights", weights, torch.float32),
        ("x_sf", x_sf, torch.float32),
        ("sf", sf, torch.float32),
    ):
        if value is not None and value.dtype != dtype:
            raise TypeError(f"{name} has dtype {value.dtype}: {dtype} is required")
    if x.dim() != 2 or x.shape[1] == 0 or x.shape[1] % 256:
        raise ValueError(f"x has shape {tuple(x.shape)}: [E, H] with H a positive multiple of 256 is required")
    if positions.dim() != 2 or positions.shape[1] == 0:
        raise ValueError(f"token_topk_to_pos has shape {tuple(positions.shape)}: [T, K] with K >= 1 is required")
    for name, value, shape in (
        ("topk_weights", weights, tuple(positions.shape)),
        ("x_sf", x_sf, (x.shape[0],)),
        ("sf", sf, (1,)),
        ("out", out, (positions.shape[0], x.shape[1])),
    ):
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}: {shape} is required")
    if out is not None and out.dtype not in (x.dtype, torch.float8_e4m3fn):
        raise TypeError(f"out has dtype {out.dtype}: x's dtype {x.dtype} or float8_e4m3fn is required")
    if sf is not None and out is not None and out.dtype != torch.float8_e4m3fn:
        raise ValueError(f"sf is given but out has dtype {out.dtype}: sf requires a float8_e4m3fn output")
    if not strided:
        for name, value in given.items():
            if value is not None and not value.is_contiguous():
                raise ValueError(f"{name} has strides {value.stride()}: this kernel requires contiguous tensors")
            if value is not None and name in ("x", "out") and value.data_ptr() % 16:
                raise ValueError(f"{name} starts at {value.data_ptr():#x}: this kernel requires 16-byte alignment")


def output(arguments: Arguments, dtype: torch.dtype | None) -> Output:
    """Form of the result: ``dtype``, or x's own."""
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    return Output((positions.shape[0], x.shape[1]), dtype or x.dtype)


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
    x = (tokens * topk + 2) * hidden * _IN[case.get("in")].itemsize
    return x + tokens * hidden * 40 + (6 << 30 if tokens * hidden > 1 << 24 else 64 << 20)


# ---- inputs ---------------------------------------------------------------------------------------------------


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
    if source not in _IN or target not in (source, "e4m3"):
        raise ConformanceError(f"case {case.id}: in:{source} out:{target} is no dtype combination of the contract")
    data = case.get("data", "real")
    regime = "exact" if data in values.EXACT else "real"
    skip = ("weights", "out", "xsf", "launch", "poison", "model", "sf")
    seed = Case(case.operator, {k: v for k, v in case.params.items() if k not in skip}, case.family).seed & 0x7FFFFFFF
    positions, rows = shared.get(("routing", seed, sizes), lambda: _routing(case, sizes, device, seed))

    def build_x() -> Tensor:
        layout = case.get("layout", "contiguous")
        if layout == "strided":
            x = torch.full((rows, hidden + 64), math.nan, dtype=_IN[source], device=device)[:, :hidden]
        elif layout == "offset":  # contiguous and 16-byte aligned, but not at the start of its storage
            x = torch.full(((rows + 1) * hidden + 512,), math.nan, dtype=_IN[source], device=device)
            x = x[512 : 512 + rows * hidden].view(rows, hidden)
        elif layout == "unaligned":
            x = torch.empty(rows * hidden + 1, dtype=_IN[source], device=device)[1:].view(rows, hidden)
        elif layout == "contiguous":
            x = _guarded((rows, hidden), _IN[source], device)
        else:
            raise ConformanceError(f"case {case.id}: unknown layout {layout!r}: contiguous, offset, strided, unaligned")
        values.fill(x, data, positions, seed)
        return x

    x = shared.get(("x", seed, sizes), build_x)
    unused = shared.get(("unused", seed, sizes), lambda: _unused_rows(positions, rows))
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
        if in_x.get("now") != which:
            x[unused] = poison
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


def _unused_rows(positions: Tensor, rows: int) -> Tensor | slice:
    """Rows of x that no slot refers to; a slice where they are the tail, as in upstream's layout."""
    used = torch.zeros(rows, dtype=torch.bool, device=positions.device)
    used[positions[positions >= 0].long()] = True
    count = int(used.sum())
    return slice(count, rows) if bool(used[:count].all()) else (~used).nonzero().flatten()


# ---- reference ------------------------------------------------------------------------------------------------


_Slot = tuple[Tensor | None, Tensor, Tensor | None, Tensor | None]


def _slots(arguments: Arguments, start: int, stop: int) -> Iterator[_Slot]:
    """Per slot, for the tokens of [start, stop) that have it: token index from ``start`` [n] (None: all of them),
    row of x [n], and weight and x_sf fp32 [n, 1] or None. Nothing of a padding slot is ever read."""
    weights, x_sf = arguments["topk_weights"], arguments["x_sf"]
    positions = arguments["token_topk_to_pos"][start:stop]
    for slot, count in enumerate((positions >= 0).sum(dim=0).tolist()):
        if count == 0:
            continue
        position, weight = positions[:, slot], None if weights is None else weights[start:stop, slot, None]
        token = None
        if count < stop - start:
            token = (position >= 0).nonzero().flatten()
            position, weight = position[token], None if weight is None else weight[token]
        row = position.long()
        yield token, row, weight, None if x_sf is None else x_sf[row][:, None]


def _chunks(arguments: Arguments) -> Iterator[tuple[int, int]]:
    """Token ranges whose fp64 temporaries stay in cache on a CPU, and fill a GPU with few launches."""
    x, tokens = arguments["x"], arguments["token_topk_to_pos"].shape[0]
    step = max(1, (1 << 27 if x.is_cuda else 1 << 17) // x.shape[1])
    for start in range(0, tokens, step):
        yield start, min(tokens, start + step)


def accumulate(arguments: Arguments) -> Tensor:
    """fp32 [T, H]: the accumulator after the last slot, before sf and the cast."""
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    acc = torch.zeros((positions.shape[0], x.shape[1]), dtype=torch.float32, device=x.device)
    one = torch.ones((1, 1), dtype=torch.float32, device=x.device)
    for start, stop in _chunks(arguments):
        part = acc[start:stop]
        for token, row, weight, x_sf in _slots(arguments, start, stop):
            scale = one if weight is None else weight
            scale = scale if x_sf is None else scale * x_sf
            before = part if token is None else part.index_select(0, token)
            after = fma(x.index_select(0, row).float(), scale, before)
            part.copy_(after) if token is None else part.index_copy_(0, token, after)
    return acc


def finish(acc: Tensor, arguments: Arguments, dtype: torch.dtype) -> Tensor:
    """The accumulator [T, H] times sf, cast to ``dtype``; a token with only padding slots is +0 for every sf."""
    if arguments["sf"] is not None:
        empty = (arguments["token_topk_to_pos"] < 0).all(dim=1, keepdim=True)
        acc = (acc * arguments["sf"]).masked_fill(empty, 0.0)
    return cast(acc, dtype)


def golden(
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None = None,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The reference result [T, H] in the documented order of roundings. Raises as ``validate`` does."""
    arguments = dict(x=x, token_topk_to_pos=token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf)
    validate(arguments, None, strided=True)
    dtype = out_dtype or x.dtype
    if dtype not in (x.dtype, torch.float8_e4m3fn):
        raise TypeError(f"out_dtype is {dtype}: x's dtype {x.dtype} or float8_e4m3fn is required")
    if sf is not None and dtype != torch.float8_e4m3fn:
        raise ValueError(f"sf is given but out_dtype is {dtype}: sf requires a float8_e4m3fn output")
    return finish(accumulate(arguments), arguments, dtype)


def oracle(arguments: Arguments) -> Iterator[OracleRows]:
    """The exact sum before sf in fp64 with its error bound, some tokens at a time.

    With n = valid slots + 2 (each product and each addition rounds once, s = w * x_sf once, acc * sf once; a
    fused kernel makes fewer) and S = sum of |terms|: |error| <= n u / (1 - n u) * S, u = 2**-24 (Higham, Accuracy
    and Stability of Numerical Algorithms, 3.1), plus n of the smallest fp32 subnormal for products that underflow.
    """
    x, positions = arguments["x"], arguments["token_topk_to_pos"]
    for start, stop in _chunks(arguments):
        total = torch.zeros((stop - start, x.shape[1]), dtype=torch.float64, device=x.device)
        magnitude = torch.zeros_like(total, dtype=torch.float32)
        for token, row, weight, x_sf in _slots(arguments, start, stop):
            scale = torch.ones((1, 1), dtype=torch.float64, device=x.device) if weight is None else weight.double()
            scale = scale if x_sf is None else scale * x_sf.double()  # exact: 24 + 24 bits
            term = x.index_select(0, row) * scale
            if token is None:
                total += term
                magnitude += term.abs_()
            else:
                total.index_add_(0, token, term)
                magnitude.index_add_(0, token, term.abs_().float())
        roundings = (positions[start:stop] >= 0).sum(dim=1, keepdim=True).double() + 2
        relative = roundings * _U / (1 - roundings * _U) * (1 + 2.0**-16)  # S itself was summed in fp32
        error = magnitude.mul_(relative.float()).add_(roundings.float() * _SMALLEST)
        yield OracleRows(start, stop, total, error)


def _scaled(rows: OracleRows, sf: Tensor | None) -> OracleRows:
    """The rows times sf, exactly in value and upwards in error."""
    if sf is None:
        return rows
    factor = sf.abs() * (1 + 2.0**-20)
    return OracleRows(rows.start, rows.stop, rows.value * sf.double(), rows.error * factor + _SMALLEST)


def reference(call: Call, shared: Shared) -> Reference:
    """Golden and oracle of a call. Cases that differ only in the output share the accumulator and the
    oracle before sf."""
    case, arguments = call.case, call.arguments
    key = case.get("weights"), case.get("xsf")
    acc = shared.latest("acc", key, lambda: accumulate(arguments))

    def rows() -> Iterator[OracleRows]:
        unscaled = shared.latest("oracle", key, lambda: list(oracle(arguments)))
        return (_scaled(part, arguments["sf"]) for part in unscaled)

    return Reference(finish(acc, arguments, call.output.dtype), rows)


def cost(call: Call) -> Cost:
    """Roofline: FLOPs 2TKH, + TK with x_sf, + TH with sf; bytes (TKH + TH) x element + 8TK, 12TK with x_sf, with
    the valid slots in place of TK."""
    positions = call.arguments["token_topk_to_pos"]
    (tokens, hidden), x_sf = call.output.shape, call.arguments["x_sf"] is not None
    slots = int((positions >= 0).sum())
    flops = 2 * slots * hidden + slots * x_sf + tokens * hidden * (call.arguments["sf"] is not None)
    moved = slots * hidden * call.arguments["x"].element_size() + call.output.nbytes + slots * (12 if x_sf else 8)
    return Cost(flops, moved)


OPERATOR = Operator(
    name="moe_reduce_fused",
    about="weighted reduction of expert outputs over each token's slots",
    arguments=("x", "token_topk_to_pos", "topk_weights", "x_sf", "sf"),
    variants=VARIANTS,
    variant=variant,
    validate=validate,
    output=output,
    inputs=inputs,
    reference=reference,
    memory=memory,
    cost=cost,
    policies={
        "e4m3 overflow": "saturates to +-448 (byte 0x7e), infinity too. Upstream's kernel does the same; upstream's "
        "PyTorch reference gives NaN (0x7f) under torch 2.11 and saturates in newer ones. Clamped explicitly here.",
        "NaN": "stays NaN; compared by position, not by payload or sign.",
        "zero": "a token with only padding slots is +0. Elsewhere the sign of a zero counts for bit-exactness only.",
        "padding slot": "adds nothing, by selection: rows, scales and weights of a padding slot may hold NaN.",
        "order": "slots ascending; another order may promise 'within-budget'. On exact data every order must agree.",
    },
    budget="n u S / (1 - n u) + half an ULP of the output format; n = valid slots + 2, u = 2^-24, S = sum |terms|",
    workloads={
        "deepseek_v3_decode": (512, 8, 7168),
        "deepseek_v3_prefill": (4096, 8, 7168),
        "qwen3_235b": (512, 8, 7168),
        "qwen3_30b": (512, 8, 3072),
        "kimi_k2": (512, 8, 7168),
        "tiny": (32, 2, 256),
    },
)
