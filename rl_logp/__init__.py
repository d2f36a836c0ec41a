"""The log-probability of the sampled token, and its gradient, for reinforcement learning."""

import torch.distributed as _distributed

from rl_logp import entropy_ops as _entropy_ops  # noqa: F401 (the same, with entropies)
from rl_logp import entropy_shard_ops as _entropy_shard_ops  # noqa: F401 (the same, of shards)
from rl_logp import inplace_ops as _inplace_ops  # noqa: F401 (the same, over the logits)
from rl_logp import ops as _ops  # noqa: F401 (registers torch.ops.rl_logp)
from rl_logp import shard_ops as _shard_ops  # noqa: F401 (the same, on shards of the vocabulary)
from rl_logp._library import Backend, backends, require_kernel
from rl_logp.functional import FusedLogp, fused_entropy, fused_logp, fused_logp_entropy
from rl_logp.vocab_parallel import (
    vocab_parallel_entropy,
    vocab_parallel_logp,
    vocab_parallel_logp_entropy,
)

if _distributed.is_available():
    from rl_logp import _dtensor as _dtensor  # registers the sharding rules

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "FusedLogp",
    "backends",
    "fused_entropy",
    "fused_logp",
    "fused_logp_entropy",
    "require_kernel",
    "vocab_parallel_entropy",
    "vocab_parallel_logp",
    "vocab_parallel_logp_entropy",
]
