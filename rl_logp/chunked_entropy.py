"""The entropy's share of the chunked fallback: a chunk's mean of y, and what its gradient adds.

Elementwise operators and one tree of them, so that neither the rows of a chunk nor where they lie
can reach a row's bits; ``torch.sum`` may choose its order by the shape.
"""

import torch
from torch import Tensor

# So far below the largest y, or at -inf, its probability is 0 in either precision: 0 * -inf is 0.
_OF_ZERO = -1000.0


def mean_below(y: Tensor, largest: Tensor) -> Tensor:
    """sum(p * (y - largest)) of each row, p = softmax(y). y is written to.

    Relative to the largest y, it and the entropy are as small as they can be, and so is what is
    rounded.
    """
    terms = torch.softmax(y, -1)
    return _sum_tree(terms.mul_(y.sub_(largest.unsqueeze(-1)).clamp_(min=_OF_ZERO)))


def _sum_tree(terms: Tensor) -> Tensor:
    """The sum of the last dimension, neighbours first: columns of 0 at the end change nothing."""
    while terms.shape[-1] > 1:
        left, right = terms[..., ::2], terms[..., 1::2]
        if left.shape[-1] == right.shape[-1]:
            terms = left + right
        else:
            terms = left.clone()
            terms[..., :-1] += right
    return terms.squeeze(-1)


def gradient(y: Tensor, p: Tensor, mean: Tensor, grad_entropy: Tensor) -> Tensor:
    """``grad_entropy * (p * (mean - y))``, in that order, which overflows where the result does.

    y is written to. ``mean`` is fp64; it and ``grad_entropy`` broadcast over the columns. Where p
    is 0, y may be infinitely far from the mean, and the gradient is 0. Where ``grad_entropy`` is 0
    it is -0, which changes no bit of what it is added to.
    """
    high = mean.to(y.dtype)
    low = (mean - high.double()).to(y.dtype)
    # The first difference is exact near the mean, where a rounded mean would show.
    y.sub_(high).sub_(low).masked_fill_(p == 0, 0).mul_(p).mul_(-grad_entropy)
    return y.masked_fill_(grad_entropy == 0, -0.0)
