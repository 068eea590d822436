"""TileLang mutants and their twin. Each compiles one program of its own, for x in bf16 and one kind of output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from conformance.arch import Arch
from conformance.mutants import Shown, control, mutant
from conformance.route import Lowered, Route
from kernels import tilelang_build, tilelang_lower
from kernels.dialect import form_of, fp8_here, fp8_of, target_of
from kernels.mutants.reduce_fused.steps import OPERATOR
from kernels.mutants.reduce_fused.tilelang_template import Places, build
from kernels.reduce_fused.launch import launch, prepare
from kernels.reduce_fused.template import Spec

if TYPE_CHECKING:
    from torch import Tensor

TWIN = "tl_control"
_PLACES: dict[str, Places] = {TWIN: Places()}
SPAN = 128  # columns of one chunk; divides every hidden size of the contract


def _only(*out: str) -> Shown:
    """x in bf16 and these outputs: what is wrong is wrong for every dtype, and one program per mutant to compile is
    enough. The twin has both."""
    return lambda params: params["in"] == "bf16" and params["out"] in out


def program(name: str, target: str, source: str, result: str) -> Any:
    """The traced TileLang program of a mutant or the twin."""
    return build(_PLACES[name], Spec(name, target, source, result, SPAN, 1))


def _spec(name: str, device_type: str, source: str, result: str) -> Spec:
    return Spec(name, target_of(device_type), source, result, SPAN, 1, fp8=fp8_here(device_type))


def _function(name: str, places: Places) -> Callable[..., None]:
    def function(x: Tensor, token_topk_to_pos: Tensor, *, topk_weights: Tensor | None = None,
                 x_sf: Tensor | None = None, sf: Tensor | None = None, out: Tensor) -> None:
        spec = _spec(name, x.device.type, form_of(x), form_of(out))
        launch(spec, partial(build, places), x, token_topk_to_pos, topk_weights, x_sf, sf, out)

    function.__name__ = function.__qualname__ = name
    return function


def _ahead(name: str, places: Places) -> Callable[[Mapping[str, str], str], None]:
    def ahead(params: Mapping[str, str], device_type: str) -> None:
        prepare(_spec(name, device_type, params["in"], params["out"]), partial(build, places))

    return ahead


def _for_arch(name: str, params: Mapping[str, str], arch: Arch) -> Spec:
    return Spec(name, arch.language, params["in"], params["out"], SPAN, 1, fp8=fp8_of(arch))


def _route(name: str, params: Mapping[str, str], arch: Arch) -> Route:
    spec = _for_arch(name, params, arch)
    return Route(spec.path, str(spec))


def _lower(name: str, places: Places, params: Mapping[str, str], arch: Arch) -> Lowered:
    return tilelang_lower.lower(partial(build, places, _for_arch(name, params, arch)), arch)


def _options(name: str, places: Places) -> dict[str, Any]:
    return {"promise": "bit-exact", "requires": tilelang_build.missing, "prepare": _ahead(name, places),
            "native": (name, f"{name}/bits"), "route": partial(_route, name), "lower": partial(_lower, name, places)}


def _wrong(name: str, fault: str, what: str, diagnosis: str, out: str = "bf16", **places: Any) -> None:
    changed = _PLACES[name] = Places(**places)
    mutant(OPERATOR, name, _function(name, changed), fault=fault, wrong=what, twin=TWIN,
           diagnosis=tuple(diagnosis.split()), shown_on=_only(out), **_options(name, changed))


control(OPERATOR, TWIN, _function(TWIN, Places()), "the unmutated twin of the TileLang mutants",
        shown_on=_only("bf16", "e4m3"), **_options(TWIN, Places()))

_wrong("tl_row_0", "SENTINEL", "A padding slot reads row 0 and counts.", "padding-row-0", padding_row=0)
_wrong("tl_zero", "SENTINEL", "Position 0 is taken for padding.", "row-0-as-padding", first_valid=1)
_wrong("tl_stop", "SENTINEL", "The loop over slots ends at the first padding slot.", "stops-at-padding",
       stop_at_padding=True)
_wrong("tl_empty", "EMPTY", "A token without valid slots is not written.", "unwritten", write_empty=False)
_wrong("tl_added", "STALE", "The accumulator starts from what stands in the output.", "stale-added",
       start_from_out=True)
_wrong("tl_last_chunk", "TAIL", "The last 128 columns are not computed.", "unwritten", fewer_chunks=1)
_wrong("tl_last_slot", "TAIL", "The last slot is left out.", "last-slot-dropped last-valid-dropped", fewer_slots=1)
_wrong("tl_first_slot", "TAIL", "The first slot is left out.", "first-slot-dropped", first_slot=1)
_wrong("tl_chunk_shift", "LAYOUT", "Columns are read 128 places further on.", "columns-shifted", chunk_shift=1)
_wrong("tl_slot_0", "MAP", "Every slot reads the position of slot 0.", "slot-0-everywhere", position_slot=0)
_wrong("tl_weight_0", "MAP", "Every slot gets the weight of slot 0.", "weights-of-slot-0", weight_slot=0)
_wrong("tl_weight_before", "MAP", "A slot gets the weight of the slot before it.", "weights-of-previous-slot",
       weight_offset=-1)
_wrong("tl_scale_token", "MAP", "x_sf is indexed by token.", "x_sf-of-token", x_sf_by_token=True)
_wrong("tl_token_shift", "MAP", "Each result goes to the row of the next token.", "rows-shifted", token_shift=1)
_wrong("tl_no_weight", "SEMANTIC", "The weights are left out.", "weights-missing", weight_power=0)
_wrong("tl_no_x_sf", "SCALE", "x_sf is left out.", "x_sf-missing", x_sf_power=0)
_wrong("tl_x_sf_twice", "SCALE", "x_sf is applied twice.", "x_sf-twice", x_sf_power=2)
_wrong("tl_sf_twice", "SCALE", "sf is applied twice.", "sf-twice", "e4m3", sf_power=2)
_wrong("tl_bf16_sum", "PRECISION", "The accumulator is bf16.", "acc-bf16", acc="bf16")
_wrong("tl_fp16_sum", "PRECISION", "The accumulator is fp16.", "acc-fp16", acc="fp16")
_wrong("tl_truncated", "CASTROUND", "The cast to bf16 truncates.", "cast-truncates", truncate=True)
_wrong("tl_overflow", "OVERFLOW", "e4m3 saturates at 240.", "overflow-240", "e4m3",
       overflow=240.0)
