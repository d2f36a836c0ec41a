"""TRL's functions that score tokens, by rl_logp. Nothing is replaced until `patched` is entered.

    with patched(trl.trainer.grpo_trainer):
        trainer.train()

TRL's trainers import these functions by name, so it is the trainer's module that is patched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Optional

import torch
from torch import Tensor
from trl.trainer import utils  # pyright: ignore[reportMissingImports]

import rl_logp


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Optional[Tensor] = None
) -> Tensor:
    """fp32, of index's shape ``[...]`` or, for several tokens of each row, ``[..., K]``.

    Rows where row_mask is 0 get exactly 0, and no gradient.
    """
    if index.ndim == logits.ndim:
        _, lse = rl_logp.fused_logp(logits, index[..., 0], temperature=temperature, return_lse=True)
        chosen = logits.gather(-1, index)
        chosen = chosen if chosen.dtype == torch.float64 else chosen.float()
        logp = (chosen / chosen.new_tensor(temperature) - lse.unsqueeze(-1)).to(chosen.dtype)
        return logp if row_mask is None else logp.masked_fill(row_mask == 0, 0.0)
    target = index if row_mask is None else index.masked_fill(row_mask == 0, -100)
    return rl_logp.fused_logp(logits, target, temperature=temperature)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """The log-probability is rl_logp's, the entropy TRL's own: rl_logp has none."""
    _, entropy = utils.selective_log_softmax_and_entropy(
        logits if entropy_requires_grad else logits.detach(),
        index,
        entropy_requires_grad=entropy_requires_grad,
        temperature=temperature,
        row_mask=row_mask,
    )
    return selective_log_softmax(logits, index, temperature, row_mask), entropy


REPLACEMENTS = (selective_log_softmax, selective_log_softmax_and_entropy)


@contextmanager
def patched(module: ModuleType) -> Iterator[None]:
    """A module of TRL scores with rl_logp inside; after it, as before.

    Raises ValueError where the module imports none of the functions: from TRL 1.15 its main
    trainers score hidden states, and have no logits to hand over.
    """
    own = {f.__name__: f for f in REPLACEMENTS if hasattr(module, f.__name__)}
    if not own:
        raise ValueError(f"expected a module of TRL that scores logits, got {module.__name__}")
    before = {name: getattr(module, name) for name in own}
    for name, function in own.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)
