"""The entropy's share of the chunked fallback: a chunk's entropy, and what its gradient adds.

Elementwise operators and one tree of them, so that neither the rows of a chunk nor where they lie
can reach a row's bits; ``torch.sum`` may choose its order by the shape.
"""

from torch import Tensor

# A probability of 0 has a logarithm below this in either precision, or of -inf: 0 * log(0) is 0.
_LOG_OF_ZERO = -1000.0


def entropy_of(p: Tensor, logp: Tensor) -> Tensor:
    """The entropy of each row, in nats, from its softmax and log_softmax. Both are written to."""
    terms = p.mul_(logp.clamp_(min=_LOG_OF_ZERO))
    return _sum_tree(terms).neg_().clamp_(min=0) + 0.0  # never -0


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


def column_factor(y: Tensor, p: Tensor, mean: Tensor, grad_entropy: Tensor) -> Tensor:
    """What the gradient of the entropy, ``grad_entropy * p * (mean - y)``, multiplies p by.

    y is written to. ``mean`` is fp64; it and ``grad_entropy`` broadcast over the columns. Where p
    is 0, y may be infinitely far from the mean, and the factor is 0.
    """
    high = mean.to(y.dtype)
    low = (mean - high.double()).to(y.dtype)
    # The first difference is exact near the mean, where a rounded mean would show.
    return y.sub_(high).sub_(low).masked_fill_(p == 0, 0).mul_(-grad_entropy)
