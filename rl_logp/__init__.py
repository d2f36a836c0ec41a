"""The log-probability of the sampled token, and its gradient, for reinforcement learning."""

from rl_logp import ops as _ops  # noqa: F401 (registers torch.ops.rl_logp)
from rl_logp import shard_ops as _shard_ops  # noqa: F401 (the same, on shards of the vocabulary)
from rl_logp._library import Backend, backends, require_kernel
from rl_logp.functional import FusedLogp, fused_logp

__version__ = "0.1.0"
__all__ = ["Backend", "FusedLogp", "backends", "fused_logp", "require_kernel"]
