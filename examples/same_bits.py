"""Does the trainer see the rollout's log-probabilities? Counted in bits, not within a tolerance."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from byte_lm import Rollout
from torch import Tensor

import rl_logp


@dataclass
class Count:
    compared: int = 0
    differing: int = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        """Counts the fp32 values of which any bit differs."""
        self.compared += a.numel()
        self.differing += int((a.view(torch.int32) != b.view(torch.int32)).sum())


def op_logp(logits: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
    return rl_logp.fused_logp(logits, target, temperature=temperature)


def log_softmax_logp(logits: Tensor, target: Tensor, temperature: Tensor) -> Tensor:
    """What one writes without the op (ignored rows get a value of no meaning)."""
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)


class Bits:
    """Compares the rollout's scoring, ``[n, V]`` at each byte it samples, with the trainer's.

    A question about the op needs equal inputs, so ``op`` compares scores of the same logits rows.
    Running the model again in other batches changes the logits themselves, because the bits of a
    matrix product depend on its shape: ``model`` counts that, and is no promise of the op.
    """

    def __init__(self, temperature: Tensor, backend: str) -> None:
        self.temperature = temperature
        self.op: defaultdict[str, Count] = defaultdict(Count)
        self.log_softmax = Count()  # eager against compiled, for contrast
        self.model = Count()
        self.model_largest = 0.0
        self.compiled = torch.compile(op_logp, fullgraph=True, backend=backend)
        self.compiled_log_softmax = torch.compile(log_softmax_logp, fullgraph=True, backend=backend)

    def add_layouts(self, roll: Rollout) -> None:
        """Scores the rows that the rollout sampled from again, laid out as trainers do."""
        sampled = roll.target >= 0
        rows, target = roll.logits[sampled], roll.target[sampled]
        # model(tokens) also has rows for the prompt; a loss takes a view of it, without a copy.
        whole = torch.cat([torch.zeros_like(roll.logits), roll.logits], dim=1)
        batch = whole[:, roll.logits.shape[1] :], roll.target, self.temperature

        def pieces(size: int) -> Tensor:
            pairs = zip(rows.split(size), target.split(size), strict=True)
            return torch.cat([op_logp(*pair, self.temperature) for pair in pairs])

        scores = {
            "padded batch [n, answer, V], a view": op_logp(*batch)[sampled],
            "the same, compiled": self.compiled(*batch)[sampled],
            "packed rows [tokens, V]": op_logp(rows, target, self.temperature),
            "micro-batches of 7 rows": pieces(7),
            "one row at a time": pieces(1),
        }
        for layout, logp in scores.items():
            self.op[layout].add(logp, roll.logp[sampled])
        self.log_softmax.add(
            self.compiled_log_softmax(*batch)[sampled], log_softmax_logp(*batch)[sampled]
        )

    def add_update(self, logits: Tensor, logp: Tensor, target: Tensor, old_logp: Tensor) -> None:
        """Takes what the compiled loss computed while the weights were still the rollout's.

        Its logits, scored as the rollout scores, must give its logp; the rollout's own logp came
        from another run of the model.
        """
        sampled = target >= 0
        columns = zip(logits.unbind(1), target.unbind(1), strict=True)
        scored = torch.stack([op_logp(*column, self.temperature) for column in columns], dim=1)
        self.op["in the compiled loss"].add(logp[sampled], scored[sampled])
        self.model.add(logp[sampled], old_logp[sampled])
        self.model_largest = max(self.model_largest, (logp - old_logp).abs().max().item())
