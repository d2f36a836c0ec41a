"""The states of a shard's rows, and what they combine to, in torch: for devices without a kernel.

The arithmetic is that of ``row_state.h`` and ``exact_sum.h`` (docs/numerics.md): terms of 16
columns, added as integers. Only exp is another, so states of kernels and of this module do not mix.
Everything is a function of a group of columns, or a sum of integers: nothing sees where rows lie.
"""

from typing import Optional

import torch
from torch import Tensor

from rl_logp import _state, chunked
from rl_logp._elementary import exp, log1p
from rl_logp._state import EMPTY_TOP, GROUP, INF_TOP, NAN_TOP, NO_GROUP, WIDE_TOP

WIDE_LIMIT = 2.0**29
WIDE_BITS = 0x4E000000  # of 2^29

# log2(e), of which the first part times an fp32 number is exact in fp64.
LOG2E_HIGH = 1.44269502162933349609375
LOG2E_LOW = 1.9259629911266175e-08
LN2 = 0.6931471805599453

# fp32 elements beside y that a column takes at most, and a row (whose largest group is in fp64).
_COLUMN_ELEMENTS = 6
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
    """Writes the states of a shard's rows, ``[..., 8]``; the same bits for any ``chunk_rows``."""
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
        state = _states(y.unflatten(-1, (-1, GROUP)), vocab_start // GROUP)
        _state.TARGET_Y.of(state).copy_(target_y.squeeze(-1))
        _state.HAS_TARGET.of(state).copy_(here.squeeze(-1))
        if not all_rows:
            empty = torch.empty_like(state[:1])
            _state.write_empty(empty)
            state = torch.where(ignored, empty, state)
        states[rows] = state.view(states[rows].shape)
        del y  # or it would live beside the temporaries of the next chunk


def _states(y: Tensor, first_group: int) -> Tensor:
    """States of rows ``[R, groups, 16]`` without their targets."""
    largest_of_group = y.amax(-1) + 0.0  # -0 counts as 0
    value, exponent = _terms(y, largest_of_group)
    pieces = _pieces(value, exponent, largest_of_group)
    top = pieces[0].amax(-1)
    counters = [counter.sum(-1) for counter in _counters(top.unsqueeze(-1), *pieces)]

    comparable = largest_of_group.masked_fill(largest_of_group.isnan(), -torch.inf)
    largest = comparable.amax(-1, keepdim=True)
    number = torch.arange(y.shape[-2], device=y.device)
    group = torch.where(comparable == largest, number, number.numel()).amin(-1, keepdim=True)
    of_largest = y.gather(1, group.unsqueeze(-1).expand(-1, 1, GROUP)).squeeze(1)
    infinite = largest.isinf()

    group_number = torch.where(largest == -torch.inf, NO_GROUP, first_group + group)
    state = torch.empty(y.shape[0], _state.WORDS, dtype=torch.int64, device=y.device)
    for field, of_rows in (
        (_state.TOP, top),
        (_state.LARGEST_GROUP, group_number),
        *zip(_state.COUNTERS, counters, strict=True),
        (_state.LARGEST, largest),
        (_state.TERM, value.gather(-1, group).masked_fill(infinite, 0)),
        (_state.TERM_EXPONENT, exponent.gather(-1, group).masked_fill(infinite, 0)),
        (_state.OTHERS, _others(of_largest, largest).masked_fill(infinite, 0)),
    ):
        field.of(state).copy_(of_rows.flatten())
    return state


def _terms(y: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Of each group: sum(exp(y)) is value * 2^exponent; how many are largest, of a wide group."""
    finite = largest.abs() < WIDE_LIMIT
    wide = (largest.abs() >= WIDE_LIMIT) & ~largest.isinf()
    m = largest.masked_fill(~finite, 0)
    relative_sum = _sum_tree(exp(y - m.unsqueeze(-1))).double()
    # exp(m) = 2^exponent * 2^fraction. Where fp64 rounds, it is far below what fp32 shows.
    m = m.double()
    high, low = m * LOG2E_HIGH, m * LOG2E_LOW
    exponent = (high + low).round_()
    relative_sum.mul_(exp(((high - exponent) + low).mul_(LN2)))
    count = (y == largest.unsqueeze(-1)).sum(-1)
    value = torch.where(finite, relative_sum.float(), torch.where(wide, count, 0))
    return value, exponent.long()


def _sum_tree(e: Tensor) -> Tensor:
    """The sum over the last dimension, of 16, in one fixed order."""
    while e.shape[-1] > 1:
        half = e.shape[-1] // 2
        e = e[..., :half] + e[..., half:]
    return e.squeeze(-1)


def _pieces(value: Tensor, exponent: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A term's top, and what it adds to the bins ``top`` and ``top - 1`` (add_term)."""
    bits = value.view(torch.int32).long()
    lowest = (bits >> 23) - 150 + exponent
    shifted = ((bits & 0x7FFFFF) | 0x800000) << (lowest & 31)
    above = (largest.view(torch.int32).long() & 0x7FFFFFFF) - WIDE_BITS
    wide_top = torch.where(largest > 0, WIDE_TOP + above, -WIDE_TOP - above)

    wide = largest.abs() >= WIDE_LIMIT
    top = torch.where(wide, wide_top, (lowest >> 5) + 1)
    top = top.masked_fill(largest == torch.inf, INF_TOP).masked_fill(largest.isnan(), NAN_TOP)
    top = top.masked_fill(largest == -torch.inf, EMPTY_TOP)
    return (
        top,
        torch.where(wide, 0, shifted >> 32),
        torch.where(wide, value.long(), shifted) & (2**32 - 1),
    )


def _is_wide(top: Tensor) -> Tensor:
    return top.abs() >= WIDE_TOP


def _counters(row_top: Tensor, top: Tensor, *pieces: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pieces for the bins ``top``, ``top - 1`` (and ``top - 2``), moved to those of ``row_top``.

    What falls below the third bin is dropped (raise_top).
    """
    below = row_top - top
    below = torch.where((below != 0) & (_is_wide(row_top) | _is_wide(top)), 3, below)
    moved = []
    for bin_below in range(3):
        counter = torch.zeros_like(pieces[0])
        for piece_below, piece in enumerate(pieces):
            counter = torch.where(below + piece_below == bin_below, piece, counter)
        moved.append(counter)
    return moved[0], moved[1], moved[2]


def _others(y: Tensor, largest: Tensor) -> Tensor:
    """The sum of exp(y - largest) over a group's columns but the first largest one, in fp64."""
    powers = exp(y.double() - largest.double())
    number = torch.arange(GROUP, device=y.device)
    first = torch.where(y == largest, number, GROUP).amin(-1, keepdim=True)
    return _sum_tree(powers.masked_fill_(number == first, 0)).unsqueeze(-1)


def combine(states: Tensor, target: Tensor, vocab_size: int, logp: Tensor, lse: Tensor) -> None:
    """Writes logp and lse, of target's shape, from the states ``[S, ..., 8]`` of S shards."""
    states = states.contiguous()
    top = _state.TOP.of(states).long()
    row_top = top.amax(0)
    moved = _counters(row_top, top, *(counter.of(states) for counter in _state.COUNTERS))
    counters = [counter.sum(0) for counter in moved]

    chosen = _of_largest_group(states)
    largest, value = (f.of(chosen).contiguous() for f in (_state.LARGEST, _state.TERM))
    term = _pieces(value, _state.TERM_EXPONENT.of(chosen).long(), largest)
    rest = [a - b for a, b in zip(counters, _counters(row_top, *term), strict=True)]
    log_rest = log1p(_state.OTHERS.of(chosen) + _relative(rest, row_top, largest))

    m = largest.double()
    log_sum = torch.where(m.abs() >= WIDE_LIMIT, _wide_lse(m, log_rest), m + log_rest)
    log_sum = torch.where(row_top == EMPTY_TOP, -torch.inf, log_sum)
    log_sum = torch.where(row_top == INF_TOP, torch.inf, log_sum)
    lse.copy_(torch.where(row_top == NAN_TOP, torch.nan, log_sum))

    here = _state.HAS_TARGET.of(states)
    target_y = torch.where(here != 0, _state.TARGET_Y.of(states), 0).sum(0)
    result = ((target_y.double() - m) - log_rest).clamp_(max=0)
    defined = (here.sum(0) == 1) & (row_top > EMPTY_TOP) & (row_top < INF_TOP)
    ignored = (target < 0) | (target >= vocab_size)
    logp.copy_(torch.where(defined, result, torch.nan).masked_fill_(ignored, 0))


def _of_largest_group(states: Tensor) -> Tensor:
    """Of each row, the state that holds the largest value, in the first group if several do."""
    largest = _state.LARGEST.of(states)
    group = _state.LARGEST_GROUP.of(states).long() & NO_GROUP
    group = torch.where(largest == largest.amax(0), group, NO_GROUP + 1)
    shard = group.argmin(0, keepdim=True).unsqueeze(-1)
    return states.gather(0, shard.expand(1, *states.shape[1:])).squeeze(0)


def _relative(counters: list[Tensor], top: Tensor, largest: Tensor) -> Tensor:
    """A sum times exp(-largest) (RelativeRest)."""
    high, middle, low = (counter.double() for counter in counters)
    m = largest.double()
    # The exponents cancel before they are rounded.
    exponent = (32.0 * (top.double() - 1) - m * LOG2E_HIGH) - m * LOG2E_LOW
    scaled = (high * 2.0**32 + middle) + low * 2.0**-32
    return torch.where(_is_wide(top), middle, scaled * exp(exponent * LN2))


def _wide_lse(m: Tensor, log_count: Tensor) -> Tensor:
    """A value of 2^29 or more, with the log of how often it occurs in its double's empty bits."""
    fraction = (log_count * 2.0**23).round_().long()
    return (m.view(torch.int64) | fraction).view(torch.float64)
