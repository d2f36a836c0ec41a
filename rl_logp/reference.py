"""The fp64 oracle that tests and benchmarks measure against: plain torch, and nothing of ours.

``y = logits / temperature`` is rounded to fp32 exactly once, as the contract says, and promoted;
all that follows is fp64. It takes several times the memory of the logits in fp64: cut the rows.
"""

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor


class Reference(NamedTuple):
    """fp64 values of target's shape (``logp``, ``lse``) and of logits' shape (``dlogits``)."""

    logp: Tensor
    lse: Tensor
    dlogits: Tensor


def scaled(logits: Tensor, temperature: Union[float, Tensor, None] = None) -> Tensor:
    """y in fp64: logits over a temperature (number, 0-dim or per row), rounded once to fp32.

    fp64 logits stay fp64 throughout.
    """
    y = logits.detach()
    if y.dtype != torch.float64:
        y = y.float()
    if temperature is None:
        return y.double()
    return (y / _divisor(temperature, y.device).to(y.dtype)).double()


def _divisor(temperature: Union[float, Tensor], device: torch.device) -> Tensor:
    """The temperature in fp32, shaped to broadcast over the columns.

    A tensor, never a number: torch on CUDA multiplies by a number's rounded reciprocal.
    """
    return torch.as_tensor(temperature, dtype=torch.float32, device=device).unsqueeze(-1)


def entropy(logits: Tensor, *, temperature: Union[float, Tensor, None] = None) -> Tensor:
    """The entropy of each row of softmax(y), in nats, in fp64; a probability of 0 adds nothing.

    >>> import torch
    >>> entropy(torch.tensor([[0.0, 0.0, -torch.inf]]))
    tensor([0.6931], dtype=torch.float64)
    """
    log_p = torch.log_softmax(scaled(logits, temperature), -1)
    p = log_p.exp()
    return -p.mul_(log_p.masked_fill_(p == 0, 0)).sum(-1)


def ignored_rows(target: Tensor, vocab_size: int) -> Tensor:
    """Where a target is outside ``[0, vocab_size)``."""
    return (target < 0) | (target >= vocab_size)


def reference(
    logits: Tensor,
    target: Tensor,
    *,
    temperature: Union[float, Tensor, None] = None,
    grad_logp: Optional[Tensor] = None,
    grad_lse: Optional[Tensor] = None,
    grad_entropy: Optional[Tensor] = None,
) -> Reference:
    """logp, lse and dlogits in fp64, of the same upstream gradients an implementation got.

    ``grad_logp`` of None means 1 in every row, ``grad_lse`` and ``grad_entropy`` of None mean 0.
    Ignored rows have logp 0 and take nothing from ``grad_logp``; a row that no upstream gradient
    reaches has a gradient of 0 whatever its values.

    >>> import torch
    >>> reference(torch.tensor([[0.0, 2.0]]), torch.tensor([1]), temperature=0.5).logp
    tensor([-0.0181], dtype=torch.float64)
    """
    y = scaled(logits, temperature)
    lse = torch.logsumexp(y, -1)
    log_p = torch.log_softmax(y, -1)
    ignored = ignored_rows(target, logits.shape[-1])
    column = target.long().masked_fill(ignored, 0).unsqueeze(-1)
    logp = log_p.gather(-1, column).squeeze(-1).masked_fill(ignored, 0)

    g = torch.ones_like(lse) if grad_logp is None else grad_logp.detach().double()
    g = g.masked_fill(ignored, 0).unsqueeze(-1)
    g_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.detach().double()
    factor = g_lse = g_lse.unsqueeze(-1)  # of p, beside -g
    unreached = (g == 0) & (g_lse == 0)
    dlogits = log_p.exp_()  # p
    if grad_entropy is not None:
        g_entropy = grad_entropy.detach().double().unsqueeze(-1)
        unreached = unreached & (g_entropy == 0)
        y = y.masked_fill(dlogits == 0, 0)  # 0 * inf is 0
        mean = (dlogits * y).sum(-1, keepdim=True)
        factor = y.sub_(mean).mul_(-g_entropy).masked_fill_(dlogits == 0, 0).add_(g_lse)
    at_target = dlogits.gather(-1, column)
    at_target = (1 - at_target) * g + at_target * factor.expand_as(dlogits).gather(-1, column)
    dlogits.mul_(factor - g)
    here = ~ignored.unsqueeze(-1)
    dlogits.scatter_(-1, column, torch.where(here, at_target, dlogits.gather(-1, column)))
    if temperature is not None:
        dlogits.div_(_divisor(temperature, y.device).double())
    dlogits.masked_fill_(unreached, 0)
    return Reference(logp, lse, dlogits)
