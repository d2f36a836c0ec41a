"""What the states of a row's shards combine to, in torch: for devices without a kernel.

The arithmetic is that of ``merge`` and ``result_of`` in ``row_state.h`` (docs/numerics.md).
"""

from typing import Optional

import torch
from torch import Tensor

from rl_logp import _exact_sum, _state
from rl_logp._elementary import exp, log1p
from rl_logp._exact_sum import LN2, LOG2E_HIGH, LOG2E_LOW, WIDE_LIMIT, Sum, Term
from rl_logp._state import EMPTY_TOP, INF_TOP, NAN_TOP, NO_GROUP


def combine(
    states: Tensor,
    target: Tensor,
    vocab_size: int,
    logp: Tensor,
    lse: Tensor,
    entropy: Optional[Tensor] = None,
    mean: Optional[Tensor] = None,
) -> None:
    """Writes logp and lse, of target's shape, from the states ``[S, ..., 8]`` of S shards.

    And, where given, entropy and mean, from ``[S, ..., 13]``.
    """
    states = states.contiguous()
    whole = _exact_sum.total(_sum_of(states), 0)
    chosen = _of_largest_group(states)
    # Views of a row's words are no tensors that could be viewed as another dtype.
    largest, value = (f.of(chosen).contiguous() for f in (_state.LARGEST, _state.TERM))
    weight = _state.WEIGHT.of(chosen) if _state.are_weighted(states) else None
    term = Term(value, _state.TERM_EXPONENT.of(chosen).long(), weight)
    rest = _exact_sum.without(whole, _exact_sum.of_term(term, largest))
    relative, relative_weighted = _relative(rest, largest)
    others = _state.OTHERS.of(chosen) + relative
    log_rest = log1p(others)

    m, row_top = largest.double(), whole.top
    log_sum = torch.where(m.abs() >= WIDE_LIMIT, _wide_lse(m, log_rest), m + log_rest)
    log_sum = torch.where(row_top == EMPTY_TOP, -torch.inf, log_sum)
    log_sum = torch.where(row_top == INF_TOP, torch.inf, log_sum)
    lse.copy_(torch.where(row_top == NAN_TOP, torch.nan, log_sum))

    here = _state.HAS_TARGET.of(states)
    target_y = torch.where(here != 0, _state.TARGET_Y.of(states), 0).sum(0)
    result = ((target_y.double() - m) - log_rest).clamp_(max=0)
    finite = (row_top > EMPTY_TOP) & (row_top < INF_TOP)
    ignored = (target < 0) | (target >= vocab_size)
    defined = (here.sum(0) == 1) & finite
    logp.copy_(torch.where(defined, result, torch.nan).masked_fill_(ignored, 0))
    if entropy is not None and mean is not None:
        below = (_state.WEIGHTED_OTHERS.of(chosen) + relative_weighted) / (1 + others)
        entropy.copy_(torch.where(finite, (log_rest - below).clamp_(min=0), torch.nan))
        mean.copy_(torch.where(finite, m + below, torch.nan))


def _sum_of(states: Tensor) -> Sum:
    fields = _state.WEIGHTED_COUNTERS if _state.are_weighted(states) else ()
    return Sum(
        _state.TOP.of(states).long(),
        tuple(field.of(states) for field in _state.COUNTERS),
        tuple(field.of(states) for field in fields),
    )


def _of_largest_group(states: Tensor) -> Tensor:
    """Of each row, the state that holds the largest value, in the first group if several do."""
    largest = _state.LARGEST.of(states)
    group = _state.LARGEST_GROUP.of(states).long() & NO_GROUP
    group = torch.where(largest == largest.amax(0), group, NO_GROUP + 1)
    shard = group.argmin(0, keepdim=True).unsqueeze(-1)
    return states.gather(0, shard.expand(1, *states.shape[1:])).squeeze(0)


def _relative(rest: Sum, largest: Tensor) -> tuple[Tensor, Tensor]:
    """A sum of exp(y), as that of exp(y - largest) (RelativeRest); and times (y - largest)."""
    wide = _exact_sum.is_wide(rest.top)
    m = largest.double()
    # The exponents cancel before they are rounded.
    exponent = (32.0 * (rest.top.double() - 1) - m * LOG2E_HIGH) - m * LOG2E_LOW
    power = exp(exponent * LN2)
    scaled = _scaled(rest.counters)
    relative = torch.where(wide, rest.counters[1].double(), scaled * power)
    if not rest.weighted:
        return relative, relative
    from_top = _scaled(rest.weighted)
    weighted = ((exponent + 32.0) * scaled + from_top) * LN2 * power
    return relative, torch.where(wide, 0, weighted)


def _scaled(counters: tuple[Tensor, ...]) -> Tensor:
    high, middle, low = (counter.double() for counter in counters)
    return (high * 2.0**32 + middle) + low * 2.0**-32


def _wide_lse(m: Tensor, log_count: Tensor) -> Tensor:
    """A value of 2^29 or more, with the log of how often it occurs in its double's empty bits."""
    fraction = (log_count * 2.0**23).round_().long()
    return (m.view(torch.int64) | fraction).view(torch.float64)
