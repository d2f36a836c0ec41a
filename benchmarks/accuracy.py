"""How often a provider's logp and dlogits are the correctly rounded ones, against fp64."""

import torch
from torch import Tensor

from benchmarks.providers import Provider
from benchmarks.workloads import Inputs
from rl_logp.reference import reference
from rl_logp.testing import correctly_rounded_percent

ORACLE_ROWS = 256  # at a time: the oracle takes several times their size in fp64


def ulp(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours in ``dtype`` at fp64 values. Right rounding errs by half.

    >>> ulp(torch.tensor([1.0, 1.99, 0.99], dtype=torch.float64), torch.bfloat16).tolist()
    [0.0078125, 0.0078125, 0.00390625]
    """
    info = torch.finfo(dtype)
    power = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 1)
    return power.clamp(min=info.smallest_normal) * info.eps


class Score:
    """Correctly rounded values and the largest error in ulps, over pieces of a tensor."""

    def __init__(self) -> None:
        self._values = self._right = self.largest_ulps = 0.0

    def add(self, actual: Tensor, exact: Tensor) -> None:
        self._values += actual.numel()
        self._right += actual.numel() * correctly_rounded_percent(actual, exact) / 100
        ulps = (actual.double() - exact).abs() / ulp(exact, actual.dtype)
        self.largest_ulps = max(self.largest_ulps, ulps.max().item())

    @property
    def percent(self) -> float:
        return 100 * self._right / self._values


def score(provider: Provider, inputs: Inputs) -> dict[str, float]:
    """One forward and backward of all rows, then the oracle, some rows at a time.

    The upstream gradient is the same for everyone: fp32, every value exact in bf16, so that a
    provider whose loss is bf16 gets it unchanged. logp is compared as fp32.
    """
    logits = inputs.logits.clone() if provider.overwrites else inputs.logits
    logits = logits.detach().requires_grad_(provider.has_backward)
    out = provider.load(False)(logits, inputs.target)
    dlogits = None
    if provider.has_backward:
        grad = (provider.sign * inputs.grad_logp).to(out.dtype)
        dlogits = torch.autograd.grad(out, logits, grad)[0]
    logp = provider.sign * out.detach().float()
    of_logp, of_dlogits = Score(), Score()
    for start in range(0, len(logp), ORACLE_ROWS):
        rows = slice(start, start + ORACLE_ROWS)
        exact = reference(
            inputs.logits[rows], inputs.target[rows], grad_logp=inputs.grad_logp[rows]
        )
        of_logp.add(logp[rows], exact.logp)
        if dlogits is not None:
            of_dlogits.add(dlogits[rows], exact.dlogits)
    figures = {"logp_cr_pct": of_logp.percent, "logp_max_ulps": of_logp.largest_ulps}
    if dlogits is not None:
        figures["dlogits_cr_pct"] = of_dlogits.percent
        figures["dlogits_max_ulps"] = of_dlogits.largest_ulps
    return figures
