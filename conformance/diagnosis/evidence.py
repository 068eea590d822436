"""What one wrong result shows: which elements are wrong, and samples small enough to test many explanations on."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.formats import BY_DTYPE, Format, bits, cast
from conformance.launching.guards import unwritten
from conformance.operator import Call, Reference
from conformance.verdicts.measurement import element_errors, nan_disagrees

SAMPLED = 64  # columns that explanations are recomputed for
_MOST_ELEMENTS = 1 << 24  # of slots times columns, at any size of the case


@dataclass(frozen=True)
class Measured:
    """hits: wrong elements that a prediction predicts; equal: those of them whose bits it has. false: right elements
    that it calls wrong. unexplained: mask of wrong ones that it does not predict."""

    hits: int
    false: int
    unexplained: Tensor
    equal: int


@dataclass(frozen=True)
class Evidence:
    """A result [T, H] with its golden, and a sample of its columns.

    wrong: mask [T, H]. left: mask of elements that still hold the output's poison. columns int64 [C]. The other
    tensors are [T, C]: exact value fp64 and its error fp32, both before the cast. kept: the result holds every rule but
    that its bits are the golden's, which was promised; what differs from those counts as wrong.
    """

    call: Call
    result: Tensor
    golden: Tensor
    wrong: Tensor
    left: Tensor
    poison: int
    columns: Tensor
    exact: Tensor
    error: Tensor
    kept: bool = False

    @property
    def form(self) -> Format:
        return BY_DTYPE[self.result.dtype]

    def sampled(self, tensor: Tensor) -> Tensor:
        """The sampled columns of a tensor [T, H] of the output's dtype."""
        raw = bits(tensor)  # e4m3 cannot be indexed everywhere
        return raw[:, self.columns].view(tensor.dtype)

    def sampled_mask(self, mask: Tensor) -> Tensor:
        return mask[:, self.columns]

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """The sampled columns as numbers."""
        return tuple(self.columns.tolist())

    @functools.cached_property
    def sampled_wrong(self) -> Tensor:
        return self.sampled_mask(self.wrong)

    @functools.cached_property
    def _found(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the sampled columns: the result, as fp64, how far it is from the golden, and the error allowed to sums."""
        result = self.sampled(self.result)
        value = result.double()
        off = (value - self.sampled(self.golden).double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        error = self.error.nan_to_num(nan=0.0, posinf=0.0)  # where the sum is not finite
        return result, value, off, 4 * error.amax(dim=1, keepdim=True).double()

    @functools.cached_property
    def _like_exact(self) -> int:
        """How many wrong elements are the exact sums, rounded once."""
        rounded = cast(self.exact.float(), self.result.dtype)
        return int((self.sampled_wrong & (bits(self.sampled(self.result)) == bits(rounded))).sum())

    def measure(self, predicted: Tensor) -> Measured:
        """How well a prediction [T, C] fits.

        An element is predicted when its bits are, or nearly its value: within the roundings of a sum, and far
        nearer than the golden is. Zeros of the wrong sign are predicted by their bits alone, and so are results that
        are right but for their bits, by what predicts more of them than the exact sum does.
        """
        result, value, off, allowed = self._found
        equal = (bits(result) == bits(predicted)) | (value.isnan() & predicted.double().isnan())
        distance = (value - predicted.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
        near = distance <= allowed + 4 * self.form.half_ulp(value.abs().nan_to_num(nan=0.0, posinf=0.0))
        near &= distance.isfinite() & (not self.kept)
        hit = equal | (near & (distance <= off / 4) & (off > 0))
        wrong = self.sampled_wrong
        if self.kept and int((wrong & equal).sum()) <= self._like_exact:
            equal = hit = torch.zeros_like(equal)
        return Measured(int((wrong & hit).sum()), int((~wrong & ~(equal | near)).sum()), wrong & ~hit,
                        int((wrong & equal).sum()))


def gather(result: Tensor, call: Call, reference: Reference, poison: int) -> Evidence:
    """The evidence of a result whose form is right. Nothing of the result's size is held in fp64."""
    golden = reference.golden
    wrong = torch.zeros(result.shape, dtype=torch.bool, device=result.device)
    chunks = list(reference.oracle())
    for rows in chunks:
        here = slice(rows.start, rows.stop)
        error, budget, settled = element_errors(result[here], golden[here], rows)
        wrong[here] = ~(error <= budget) & ~settled
    if (disagree := nan_disagrees(result, reference)) is not None:
        wrong |= disagree
    differs = (bits(result) != bits(golden)) & ~(result.float().isnan() & golden.float().isnan())
    both_zero = (result.float() == 0) & (golden.float() == 0)
    if call.regime == "exact":
        wrong |= differs & ~both_zero
    if call.bitwise_rows is not None:
        wrong |= differs & call.bitwise_rows[:, None]
    kept = not bool(wrong.any())
    if kept:  # promised bit-exact: what differs at all is wrong
        wrong = differs
    columns = _sample(wrong, call)
    exact = torch.cat([rows.value[:, columns] for rows in chunks])
    error = torch.cat([rows.error[:, columns].float() for rows in chunks])
    return Evidence(call, result, golden, wrong, unwritten(result, poison), poison, columns, exact, error, kept)


def _sample(wrong: Tensor, call: Call) -> Tensor:
    """Columns to look at: half from the wrong ones, half from all, evenly spread."""
    tokens, hidden = wrong.shape
    slots = max((value.numel() for value in call.arguments.values()
                 if isinstance(value, Tensor) and value.shape[:1] == wrong.shape[:1]), default=tokens)
    most = max(8, min(SAMPLED, _MOST_ELEMENTS // max(1, slots)))
    bad = wrong.any(dim=0).nonzero().flatten()
    everywhere = torch.arange(hidden, device=wrong.device)
    parts = [part[torch.linspace(0, len(part) - 1, min(len(part), most // 2)).long().to(part.device)]
             for part in (bad, everywhere) if len(part)]
    return torch.cat(parts).unique()
