"""A small byte-level transformer, and the rollout that samples from it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from addition import ANSWER_BYTES, PROMPT_BYTES, completion_target
from torch import Tensor, nn

import rl_logp

VOCAB_SIZE = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        heads = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class ByteLM(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB_SIZE, width)
        self.position = nn.Embedding(PROMPT_BYTES + ANSWER_BYTES, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCAB_SIZE))
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        return self.head(self.blocks(x))


@dataclass
class Rollout:
    tokens: Tensor  # [n, PROMPT_BYTES + ANSWER_BYTES]
    target: Tensor  # [n, ANSWER_BYTES], IGNORED after the end
    logits: Tensor  # [n, ANSWER_BYTES, V]: the rows that were sampled from
    logp: Tensor  # [n, ANSWER_BYTES], 0 where ignored


@torch.no_grad()
def rollout(model: ByteLM, tokens: Tensor, temperature: Tensor) -> Rollout:
    """Samples a completion of every prompt, one byte at a time, and scores what it sampled.

    ``temperature`` is the very tensor that the trainer passes on: fp32 logits divided by it are the
    distribution that is sampled here and the one that fused_logp scores, here and there.
    """
    steps, scores = [], []
    for _ in range(ANSWER_BYTES):  # no key-value cache: a sequence is a handful of bytes long
        logits = model(tokens)[:, -1]
        sampled = torch.multinomial((logits.float() / temperature).softmax(-1), 1)
        scores.append(rl_logp.fused_logp(logits, sampled.squeeze(-1), temperature=temperature))
        steps.append(logits)
        tokens = torch.cat([tokens, sampled], dim=1)
    target = completion_target(tokens[:, PROMPT_BYTES:])
    logp = torch.stack(scores, 1).masked_fill(target < 0, 0.0)
    return Rollout(tokens, target, torch.stack(steps, 1), logp)
