"""The chunked torch fallback: every device and dtype without a compiled kernel.

It works on chunks of whole rows, with torch's per-row kernels (``log_softmax``, ``softmax``) and
elementwise operators only, so that a row's bits cannot depend on how many rows share its chunk.
"""

from collections.abc import Iterator
from math import prod
from typing import Optional

import torch
from torch import Tensor

from rl_logp._elementary import exp
from rl_logp.chunked_entropy import gradient, mean_below

# Elements of workspace, in fp32 (twice the bytes each, half the number, in fp64): a chunk of y and
# one of its (log_)softmax, and for an entropy a third. A single row is never cut, so a longer row
# takes as many of itself.
WORKSPACE_ELEMENTS = 2**27
# What a row's target, masks and lse take beside them, which counts where rows are short.
ROW_ELEMENTS = 16
_WIDE_LSE_MASK = 2**29 - 1


def default_chunk_rows(vocab_size: int, dtype: torch.dtype, with_entropy: bool = False) -> int:
    """Rows a chunk may have, so that its temporaries stay within WORKSPACE_ELEMENTS."""
    buffers = 3 if with_entropy else 2
    buffers *= 2 if dtype == torch.float64 else 1
    return max(1, WORKSPACE_ELEMENTS // (buffers * (vocab_size + ROW_ELEMENTS)))


def row_chunks(shape: tuple[int, ...], chunk_rows: int) -> Iterator[tuple]:
    """Indices that cut a leading shape into pieces of at most chunk_rows rows, without a copy.

    >>> list(row_chunks((5,), 2))
    [(slice(0, 2, None),), (slice(2, 4, None),), (slice(4, 5, None),)]
    >>> list(row_chunks((2, 3), 2))  # doctest: +NORMALIZE_WHITESPACE
    [(0, slice(0, 2, None)), (0, slice(2, 3, None)),
     (1, slice(0, 2, None)), (1, slice(2, 3, None))]
    >>> list(row_chunks((), 2))
    [()]
    """
    if not shape:
        yield ()
        return
    inner_rows = prod(shape[1:])
    if inner_rows > chunk_rows:
        for index in range(shape[0]):
            for rest in row_chunks(shape[1:], chunk_rows):
                yield (index, *rest)
    elif inner_rows:
        step = chunk_rows // inner_rows
        for start in range(0, shape[0], step):
            yield (slice(start, min(start + step, shape[0])),)


def scaled(
    logits: Tensor, temperature: Optional[Tensor], rows: tuple, first_row: int = 0
) -> Tensor:
    """y of the chunk that starts at row ``first_row``: fp32 (or fp64) logits over the temperature.

    torch's CUDA softmax sums a long row in an order that depends on the row's alignment. So that no
    chunk can change it, y's rows lie as they would in one tensor of all rows.
    """
    chunk = logits[rows]
    dtype = torch.float64 if chunk.dtype == torch.float64 else torch.float32
    skip = first_row * chunk.shape[-1] % 4  # at most 16 bytes are moved at once
    y = torch.empty(skip + chunk.numel(), dtype=dtype, device=chunk.device)[skip:]
    y = y.view(chunk.shape).copy_(chunk)
    return y if temperature is None else y.div_(_columns(temperature, rows).to(dtype))


def _columns(per_row: Tensor, rows: tuple) -> Tensor:
    """A per-row tensor's chunk (or a 0-dim tensor), shaped to broadcast over the columns."""
    return (per_row[rows] if per_row.dim() else per_row).unsqueeze(-1)


def local_target(
    target: Tensor, rows: tuple, vocab_start: int, columns: int, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """For one chunk: the target's column (0 where elsewhere), whether it is here, and ignored."""
    label = target[rows].long().unsqueeze(-1)
    ignored = (label < 0) | (label >= vocab_size)
    here = (label >= vocab_start) & (label < vocab_start + columns) & ~ignored
    return torch.where(here, label - vocab_start, 0), here, ignored


def forward(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    logp: Tensor,
    lse: Tensor,
    chunk_rows: Optional[int] = None,
    entropy: Optional[Tensor] = None,
    mean: Optional[Tensor] = None,
) -> None:
    """Writes logp and lse, both of target's shape; and, where given, entropy and mean, E[y].

    Bitwise: ``logp`` is ``log_softmax(y).gather(target)``, for any ``chunk_rows``.
    """
    vocab_size = logits.shape[-1]
    chunk_rows = chunk_rows or default_chunk_rows(
        vocab_size, logits.dtype, with_entropy=entropy is not None
    )
    first_row = 0
    for rows in row_chunks(tuple(target.shape), chunk_rows):
        y = scaled(logits, temperature, rows, first_row)
        first_row += y[..., 0].numel()
        largest = y.amax(-1).double()
        log_p = torch.log_softmax(y, -1)
        # At its largest column log_softmax is -log(sum(exp(y - largest))).
        # An infinite maximum is the lse itself; subtracting would make it NaN.
        log_rest = -log_p.amax(-1).double()
        lse[rows] = torch.where(largest.isinf(), largest, largest + log_rest)
        column, here, _ = local_target(target, rows, 0, vocab_size, vocab_size)
        logp[rows] = torch.where(here, log_p.gather(-1, column), 0).squeeze(-1)
        del log_p
        if entropy is not None and mean is not None:
            below = mean_below(y, largest.to(y.dtype)).double()
            entropy[rows] = (log_rest - below).clamp_(min=0) + 0.0  # never -0
            mean[rows] = largest + below
        del y  # or it would live beside the temporaries of the next chunk


def backward(
    grad_logp: Optional[Tensor],
    grad_lse: Optional[Tensor],
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    lse: Tensor,
    vocab_start: int,
    vocab_size: int,
    dlogits: Tensor,
    chunk_rows: Optional[int] = None,
    sharded: bool = False,
    grad_entropy: Optional[Tensor] = None,
    mean: Optional[Tensor] = None,
) -> None:
    """Writes dlogits, of logits' shape.

    Bitwise, for any ``chunk_rows``: ``softmax(y)`` minus one-hot, times ``-grad_logp``, cast. Where
    ``grad_lse`` is not 0 the row is ``p * (grad_lse - grad_logp)``, and at the target that of
    ``grad_logp`` plus ``p * grad_lse``. A ``grad_entropy``, which takes the rows' ``mean``, adds
    ``grad_entropy * (p * (mean - y))``.

    ``sharded`` takes the softmax from ``lse`` even where the shard is the whole row, so that the
    bits do not tell how the vocabulary was cut.
    """
    columns = logits.shape[-1]
    chunk_rows = chunk_rows or default_chunk_rows(
        columns, logits.dtype, with_entropy=grad_entropy is not None
    )
    whole_row = vocab_start == 0 and columns == vocab_size and not sharded
    first_row = 0
    for rows in row_chunks(tuple(target.shape), chunk_rows):
        y = scaled(logits, temperature, rows, first_row)
        first_row += y[..., 0].numel()
        p = torch.softmax(y, -1) if whole_row else _shard_softmax(y, _columns(lse, rows))
        of_entropy = None
        if grad_entropy is not None and mean is not None:
            of_entropy = gradient(y, p, _columns(mean, rows), _columns(grad_entropy, rows))
        del y
        column, here, ignored = local_target(target, rows, vocab_start, columns, vocab_size)
        zero = torch.zeros((), dtype=p.dtype, device=p.device)
        g = zero if grad_logp is None else _columns(grad_logp, rows).masked_fill(ignored, 0)
        g_lse = zero if grad_lse is None else _columns(grad_lse, rows).to(p.dtype)
        unreached = (g == 0) & (g_lse == 0)
        if grad_entropy is not None:
            unreached = unreached & (_columns(grad_entropy, rows) == 0)
        if grad_lse is None:
            p.scatter_(-1, column, p.gather(-1, column) - here.to(p.dtype)).mul_(-g)
        else:
            at_target = p.gather(-1, column)
            # As with grad_logp alone, so that a row without the other has the bits of that.
            from_logp = (at_target - 1) * -g
            from_both = torch.where(g_lse == 0, from_logp, from_logp + at_target * g_lse)
            p.mul_(g_lse - g)
            p.scatter_(-1, column, torch.where(here, from_both, p.gather(-1, column)))
        if of_entropy is not None:
            p.add_(of_entropy)
        del of_entropy
        if temperature is not None:
            p.div_(_columns(temperature, rows).to(p.dtype))
        # A row without an upstream gradient is exactly zero, whatever its logits: not 0 * inf.
        dlogits[rows] = p.masked_fill_(unreached, 0)
        del p  # or it would live beside the temporaries of the next chunk


def _shard_softmax(y: Tensor, lse: Tensor) -> Tensor:
    """exp(y - lse) for a shard of the vocabulary, with the fp64 lse of the whole row."""
    high, low = split_lse(lse, y.dtype)
    return exp((y - high).sub_(low))


def split_lse(lse: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """lse as the sum of two numbers of ``dtype``.

    From 2^29 on, an fp64 lse is the row's largest value, and in the bits that this leaves empty the
    log of how often it occurs (``wide_lse`` in arithmetic.h).
    """
    wide = (lse.abs() >= 2.0**29) & ~lse.isinf()
    bits = lse.contiguous().view(torch.int64)
    value = (bits & ~_WIDE_LSE_MASK).view(torch.float64)
    log_count = (bits & _WIDE_LSE_MASK).double() * 2.0**-23
    high = torch.where(wide, value, lse).to(dtype)
    return high, torch.where(wide, log_count, lse - high.double()).to(dtype)
