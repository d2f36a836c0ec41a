"""The state of a row of a shard: where its fields lie.

Of ``RowState`` in row_state.h, and of ``WeightedRowState``, which is longer: it has the same fields
and what an entropy needs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 16  # columns of one term of the sum, the first of which is at a multiple of it
WORDS = 8  # int64
WEIGHTED_WORDS = 13

NO_GROUP = 2**32 - 1
# What TOP holds, in the order of which the larger wins (exact_sum.h).
EMPTY_TOP = -(2**31)
WIDE_TOP = 2**26
INF_TOP = 2**31 - 2
NAN_TOP = 2**31 - 1


class Field(NamedTuple):
    """What lies at this place in a state that is a row of elements of this dtype."""

    dtype: torch.dtype
    place: int

    def of(self, states: Tensor) -> Tensor:
        """A view of the field in contiguous states ``[..., 8]`` (or 13)."""
        return states.view(self.dtype)[..., self.place]


TOP = Field(torch.int32, 0)  # the highest bin of the sum
LARGEST_GROUP = Field(torch.int32, 1)  # of the largest column, its number in the vocabulary
COUNTERS = [Field(torch.int64, word) for word in (1, 2, 3)]  # of the bins from the top down
LARGEST = Field(torch.float32, 8)  # y
TARGET_Y = Field(torch.float32, 9)
TERM = Field(torch.float32, 10)  # of the largest column's group: TERM * 2^TERM_EXPONENT
TERM_EXPONENT = Field(torch.int32, 11)
OTHERS = Field(torch.float64, 6)  # sum(exp(y - largest)) over that group's other columns
HAS_TARGET = Field(torch.int64, 7)

WEIGHTED_COUNTERS = [Field(torch.int64, word) for word in (8, 9, 10)]
WEIGHTED_OTHERS = Field(torch.float64, 11)  # sum(exp(y - largest) * (y - largest)) as OTHERS
WEIGHT = Field(torch.float32, 24)  # of the largest column's group, as TERM


def are_weighted(states: Tensor) -> bool:
    return states.shape[-1] == WEIGHTED_WORDS


def write_empty(states: Tensor) -> None:
    """States of rows of which nothing is here."""
    states.zero_()
    TOP.of(states).fill_(EMPTY_TOP)  # an assignment might wait for the device
    LARGEST_GROUP.of(states).fill_(-1)  # NO_GROUP, as uint32
    LARGEST.of(states).fill_(-torch.inf)
