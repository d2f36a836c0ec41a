"""Exact sums in torch: terms as integers in bins of 32 bits, with and without weights.

The arithmetic of ``exact_sum.h`` and ``weighted_sum.h`` (docs/numerics.md), of tensors of any
shape.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from rl_logp._state import EMPTY_TOP, INF_TOP, NAN_TOP, WIDE_TOP

# log2(e), of which the first part times an fp32 number is exact in fp64.
LOG2E_HIGH = 1.44269502162933349609375
LOG2E_LOW = 1.9259629911266175e-08
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453

WIDE_LIMIT = 2.0**29
WIDE_BITS = 0x4E000000  # of 2^29
BIN_BITS = 32
_BIN = 2**BIN_BITS - 1


class Term(NamedTuple):
    """``value * 2^exponent`` of a group of columns, exponent being int64.

    ``weight``, in the units of value, is the sum of its columns' powers of two times their
    exponents, counted from ``exponent``. Of a wide group, value says how many columns are largest.
    """

    value: Tensor
    exponent: Tensor
    weight: Optional[Tensor]


class Sum(NamedTuple):
    """Counters of the bins ``top``, ``top - 1`` (and ``top - 2``).

    Beside them, where sums are weighted, those of the terms times their exponents of two, counted
    from ``32 * top``.
    """

    top: Tensor
    counters: tuple[Tensor, ...]
    weighted: tuple[Tensor, ...]


def is_wide(top: Tensor) -> Tensor:
    return top.abs() >= WIDE_TOP


def of_term(term: Term, largest: Tensor) -> Sum:
    """A group's term as two pieces, where ``largest`` is the group's largest value (add_term)."""
    bits = term.value.view(torch.int32).long()
    mantissa = (bits & 0x7FFFFF) | 0x800000
    lowest = (bits >> 23) - 150 + term.exponent
    top = (lowest >> 5) + 1
    shifted = mantissa << (lowest & 31)
    wide = largest.abs() >= WIDE_LIMIT
    counters = (
        torch.where(wide, 0, shifted >> BIN_BITS),
        torch.where(wide, term.value.long(), shifted) & _BIN,
    )
    weighted = ()
    if term.weight is not None:
        # In units of the mantissa's last bit, and from this term's own top: below 2^31.
        unit = ((127 + term.exponent - lowest) << 23).int().view(torch.float32)
        whole = (term.exponent - BIN_BITS * top) * mantissa + (term.weight * unit).round_().long()
        whole = torch.where(wide | largest.isnan(), 0, whole << (lowest & 31))
        weighted = whole >> BIN_BITS, whole & _BIN

    above = (largest.view(torch.int32).long() & 0x7FFFFFFF) - WIDE_BITS
    top = torch.where(wide, torch.where(largest > 0, WIDE_TOP + above, -WIDE_TOP - above), top)
    top = top.masked_fill(largest == torch.inf, INF_TOP).masked_fill(largest.isnan(), NAN_TOP)
    return Sum(top.masked_fill(largest == -torch.inf, EMPTY_TOP), counters, weighted)


def moved(part: Sum, top: Tensor) -> Sum:
    """The same in the three bins of a higher ``top``: what falls below is dropped (raise_top)."""
    below = top - part.top
    below = torch.where((below != 0) & (is_wide(top) | is_wide(part.top)), 3, below)

    def in_bins(pieces: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not pieces:
            return ()
        bins = [torch.zeros_like(pieces[0]) for _ in range(3)]
        for place, piece in enumerate(pieces):
            for bin_below in range(place, 3):
                here = below + place == bin_below
                bins[bin_below] = torch.where(here, piece, bins[bin_below])
        return tuple(bins)

    # Weights are counted from the top, which is higher now.
    weighted = (
        weight - counter * (BIN_BITS * below)
        for weight, counter in zip(part.weighted, part.counters, strict=False)
    )
    return Sum(top, in_bins(part.counters), in_bins(tuple(weighted)))


def total(parts: Sum, dim: int) -> Sum:
    """The sum over a dimension, in any order."""
    top = parts.top.amax(dim, keepdim=True)
    _, counters, weighted = moved(parts, top)
    return Sum(
        top.squeeze(dim), tuple(c.sum(dim) for c in counters), tuple(w.sum(dim) for w in weighted)
    )


def without(whole: Sum, part: Sum) -> Sum:
    """A sum without what is a part of it."""
    part = moved(part, whole.top)
    return Sum(
        whole.top,
        tuple(a - b for a, b in zip(whole.counters, part.counters, strict=True)),
        tuple(a - b for a, b in zip(whole.weighted, part.weighted, strict=True)),
    )
