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
    """Both in fp32 and from one pass. An entropy that is a metric costs no gradient."""
    target = index if row_mask is None else index.masked_fill(row_mask == 0, -100)
    logp, entropy = rl_logp.fused_logp_entropy(logits, target, temperature=temperature)
    if not entropy_requires_grad:
        entropy = entropy.detach()
    return logp, entropy if row_mask is None else entropy.masked_fill(row_mask == 0, 0.0)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """fp32. There are no chunks: nothing of logits' size is made but their gradient."""
    return rl_logp.fused_entropy(logits)


REPLACEMENTS = (selective_log_softmax, selective_log_softmax_and_entropy, entropy_from_logits)


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
