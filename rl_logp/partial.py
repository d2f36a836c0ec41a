"""The states of a shard's rows, in torch: for devices without a kernel (then _combined.py).

The arithmetic is that of ``row_state.h`` and ``group.h`` (docs/numerics.md): terms of 16
columns, added as integers. Only exp is another, so states of kernels and of this module do not mix.
Everything is a function of a group of columns, or a sum of integers: nothing sees where rows lie.
"""

from typing import Optional

import torch
from torch import Tensor

from rl_logp import _exact_sum, _state, chunked
from rl_logp._elementary import exp
from rl_logp._exact_sum import LN2, LOG2E, LOG2E_HIGH, LOG2E_LOW, WIDE_LIMIT, Term
from rl_logp._state import GROUP, NO_GROUP

# Differences to a group's largest value are clamped to it: exp of it is 0 in fp32, as of -inf.
_SMALLEST_DIFFERENCE = -128.0

# fp32 elements beside y that a column takes at most, and a row (whose largest group is in fp64).
_COLUMN_ELEMENTS = 7
_ROW_ELEMENTS = 256
# The CPU is fastest where a chunk stays in its caches.
_CPU_ELEMENTS = 2**21


def default_chunk_rows(columns: int, device: torch.device) -> int:
    """Rows a chunk may have, so that its temporaries stay within chunked.WORKSPACE_ELEMENTS."""
    elements = _CPU_ELEMENTS if device.type == "cpu" else chunked.WORKSPACE_ELEMENTS
    padded = -(-columns // GROUP) * GROUP
    return max(1, elements // (_COLUMN_ELEMENTS * padded + _ROW_ELEMENTS))


def partial(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    all_rows: bool,
    vocab_start: int,
    vocab_size: int,
    states: Tensor,
    chunk_rows: Optional[int] = None,
) -> None:
    """Writes the states of a shard's rows; the same bits for any ``chunk_rows``.

    Of ``states`` ``[..., 13]`` the first 8 words are those of ``[..., 8]``.
    """
    columns = logits.shape[-1]
    chunk_rows = chunk_rows or default_chunk_rows(columns, logits.device)
    for rows in chunked.row_chunks(tuple(target.shape), chunk_rows):
        y = chunked.scaled(logits, temperature, rows).reshape(-1, columns)
        column, here, ignored = (
            of_row.reshape(-1, 1)
            for of_row in chunked.local_target(target, rows, vocab_start, columns, vocab_size)
        )
        target_y = torch.where(here, y.gather(-1, column), 0)
        y = torch.nn.functional.pad(y, (0, -columns % GROUP), value=-torch.inf)
        y = y.unflatten(-1, (-1, GROUP))
        state = _states(y, vocab_start // GROUP, _state.are_weighted(states))
        _state.TARGET_Y.of(state).copy_(target_y.squeeze(-1))
        _state.HAS_TARGET.of(state).copy_(here.squeeze(-1))
        if not all_rows:
            empty = torch.empty_like(state[:1])
            _state.write_empty(empty)
            state = torch.where(ignored, empty, state)
        states[rows] = state.view(states[rows].shape)
        del y  # or it would live beside the temporaries of the next chunk


def _states(y: Tensor, first_group: int, weighted: bool) -> Tensor:
    """States of rows ``[R, groups, 16]`` without their targets."""
    largest_of_group = y.amax(-1) + 0.0  # -0 counts as 0
    terms = _terms(y, largest_of_group, weighted)
    total = _exact_sum.total(_exact_sum.of_term(terms, largest_of_group), -1)

    comparable = largest_of_group.masked_fill(largest_of_group.isnan(), -torch.inf)
    largest = comparable.amax(-1, keepdim=True)
    number = torch.arange(y.shape[-2], device=y.device)
    group = torch.where(comparable == largest, number, number.numel()).amin(-1, keepdim=True)
    of_largest = y.gather(1, group.unsqueeze(-1).expand(-1, 1, GROUP)).squeeze(1)
    infinite = largest.isinf()

    words = _state.WEIGHTED_WORDS if weighted else _state.WORDS
    state = torch.zeros(y.shape[0], words, dtype=torch.int64, device=y.device)
    others, weighted_others = _others(of_largest, largest, weighted)
    chosen = (
        (_state.TERM, terms.value.gather(-1, group)),
        (_state.TERM_EXPONENT, terms.exponent.gather(-1, group)),
        (_state.OTHERS, others),
    )
    if terms.weight is not None:
        chosen += (
            (_state.WEIGHT, terms.weight.gather(-1, group)),
            (_state.WEIGHTED_OTHERS, weighted_others),
        )
    for field, of_rows in (
        (_state.TOP, total.top),
        (_state.LARGEST_GROUP, torch.where(largest == -torch.inf, NO_GROUP, first_group + group)),
        (_state.LARGEST, largest),
        *zip(_state.COUNTERS, total.counters, strict=True),
        *zip(_state.WEIGHTED_COUNTERS, total.weighted, strict=False),
        *((field, of_rows.masked_fill(infinite, 0)) for field, of_rows in chosen),
    ):
        field.of(state).copy_(of_rows.flatten())
    return state


def _terms(y: Tensor, largest: Tensor, weighted: bool) -> Term:
    """The terms of groups: the sums of exp(y), in fp32; of a wide group, how many are largest."""
    finite = largest.abs() < WIDE_LIMIT
    wide = (largest.abs() >= WIDE_LIMIT) & ~largest.isinf()
    m = largest.masked_fill(~finite, 0)
    difference = (y - m.unsqueeze(-1)).clamp_(min=_SMALLEST_DIFFERENCE)
    powers = exp(difference)
    # exp(m) = 2^exponent * 2^fraction. Where fp64 rounds, it is far below what fp32 shows.
    m = m.double()
    high, low = m * LOG2E_HIGH, m * LOG2E_LOW
    exponent = (high + low).round_()
    fraction = (high - exponent) + low
    scale = exp(fraction * LN2)
    weight = None
    if weighted:
        # A column's exponent is (y - m) * log2(e) + fraction, counted from the group's.
        weight = _sum_tree(difference.mul_(powers)).double().mul_(LOG2E)
        weight.add_(_sum_tree(powers).double().mul_(fraction)).mul_(scale)
        weight = torch.where(finite, weight.float(), 0)
    count = (y == largest.unsqueeze(-1)).sum(-1)
    relative_sum = _sum_tree(powers).double().mul_(scale)
    value = torch.where(finite, relative_sum.float(), torch.where(wide, count, 0))
    return Term(value, exponent.long(), weight)


def _sum_tree(e: Tensor) -> Tensor:
    """The sum over the last dimension, of 16, in one fixed order."""
    while e.shape[-1] > 1:
        half = e.shape[-1] // 2
        e = e[..., :half] + e[..., half:]
    return e.squeeze(-1)


def _others(y: Tensor, largest: Tensor, weighted: bool) -> tuple[Tensor, Tensor]:
    """The sum of exp(y - largest) over a group's columns but the first largest one, in fp64.

    And that of exp(y - largest) * (y - largest).
    """
    difference = y.double() - largest.double()
    number = torch.arange(GROUP, device=y.device)
    first = torch.where(y == largest, number, GROUP).amin(-1, keepdim=True)
    powers = exp(difference).masked_fill_(number == first, 0)
    if weighted:  # 0 * -inf is 0
        difference = difference.masked_fill_(powers == 0, 0).mul_(powers)
    return _sum_tree(powers).unsqueeze(-1), _sum_tree(difference).unsqueeze(-1)
