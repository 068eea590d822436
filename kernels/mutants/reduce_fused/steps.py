"""The vectorised PyTorch kernel cut into steps, each of which a mutant can replace by a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conformance import report_path
from conformance.mutants import control, mutant

OPERATOR, TWIN = "moe_reduce_fused", "torch_control"
E4M3 = torch.float8_e4m3fn


@dataclass
class Work:
    """The arguments of one call, and what earlier steps found: ``index`` int64 [T, K], ``valid`` bool [T, K]."""

    x: Tensor
    positions: Tensor
    weights: Tensor | None
    x_sf: Tensor | None
    sf: Tensor | None
    out: Tensor
    config: str | None
    index: Tensor
    valid: Tensor

    @property
    def empty(self) -> Tensor:
        """[T, 1]: tokens without a valid slot."""
        return (self.positions < 0).all(dim=1, keepdim=True)


def locate(w: Work) -> tuple[Tensor, Tensor]:
    """Row of x per slot, and which slots count. Padding slots get row 0, which is never used."""
    return w.positions.clamp(min=0).long(), w.positions >= 0


def gather(w: Work) -> Tensor:
    """fp32 [T, K, H]: the rows of all slots."""
    return w.x.index_select(0, w.index.reshape(-1)).float().view(*w.index.shape, w.x.shape[1])


def factors(w: Work) -> Tensor | None:
    """fp32 [T, K]: the product of a slot's weight and its row's scale, None where neither is given."""
    if w.x_sf is None:
        return w.weights
    row_scale = w.x_sf.index_select(0, w.index.reshape(-1)).view(w.index.shape)
    return row_scale if w.weights is None else w.weights * row_scale


def combine(w: Work, rows: Tensor, scale: Tensor | None) -> Tensor:
    """fp32 [T, H]: the sum over the valid slots, by selection."""
    terms = rows if scale is None else rows * scale[..., None]
    return terms.masked_fill(~w.valid[..., None], 0.0).sum(dim=1)


def rescale(w: Work, total: Tensor) -> Tensor:
    """fp32 [T, H]: times sf; a token with only padding slots stays +0."""
    return total if w.sf is None else (total * w.sf).masked_fill(w.empty, 0.0)


def narrow(w: Work, total: Tensor) -> Tensor:
    """[T, H] in the output's dtype; e4m3 saturates."""
    return (total.clamp(-448.0, 448.0) if w.out.dtype == E4M3 else total).to(w.out.dtype)


def store(w: Work, result: Tensor) -> None:
    w.out.copy_(result)


@dataclass(frozen=True)
class Steps:
    """The kernel: ``begin`` sees the call first and may change it."""

    begin: Callable[[Work], None] = lambda w: None
    locate: Callable[[Work], tuple[Tensor, Tensor]] = locate
    gather: Callable[[Work], Tensor] = gather
    factors: Callable[[Work], Tensor | None] = factors
    combine: Callable[[Work, Tensor, Tensor | None], Tensor] = combine
    rescale: Callable[[Work, Tensor], Tensor] = rescale
    narrow: Callable[[Work, Tensor], Tensor] = narrow
    store: Callable[[Work, Tensor], None] = store

    def run(self, w: Work) -> None:
        self.begin(w)
        w.index, w.valid = self.locate(w)
        if len(w.x) == 0:  # no rows: every slot is padding
            total = torch.zeros(w.out.shape, device=w.out.device)
        else:
            total = self.combine(w, self.gather(w), self.factors(w))
        self.store(w, self.narrow(w, self.rescale(w, total)))


def as_function(name: str, steps: Steps, module: str) -> Callable[..., None]:
    """The kernel function that runs ``steps``, as if defined in ``module``."""

    def function(x: Tensor, token_topk_to_pos: Tensor, *, topk_weights: Tensor | None = None,
                 x_sf: Tensor | None = None, sf: Tensor | None = None, out: Tensor, config: str | None = None) -> None:
        report_path(name)
        steps.run(Work(x, token_topk_to_pos, topk_weights, x_sf, sf, out, config, token_topk_to_pos, out))

    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    return function


def wrong(module: str, name: str, fault: str, what: str, diagnosis: str, promise: str = "within-budget",
          configs: tuple[str, ...] = (), **steps: Any) -> None:
    """Register a mutant with these steps replaced; ``diagnosis`` holds one or more keys, separated by spaces."""
    changed = replace(Steps(), **steps)
    mutant(OPERATOR, name, as_function(name, changed, module), fault=fault, wrong=what, twin=TWIN,
           diagnosis=tuple(diagnosis.split()), promise=promise, configs=configs, strided=True)


control(OPERATOR, TWIN, as_function(TWIN, Steps(), __name__), "the unmutated twin of the PyTorch mutants",
        promise="within-budget", strided=True)
