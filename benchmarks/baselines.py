"""Ways to do without a fused kernel: what torch and the chunked fallback offer."""

import torch
from torch import Tensor

from rl_logp import chunked


def selected_logp(logits: Tensor, target: Tensor) -> Tensor:
    """The textbook: log_softmax in fp32, then a gather."""
    return torch.log_softmax(logits.float(), -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


class Chunked(torch.autograd.Function):
    """The fallback, called directly, so that it serves where a kernel would."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, chunk_rows: int | None) -> Tensor:
        logp = logits.new_empty(target.shape, dtype=torch.float32)
        lse = logits.new_empty(target.shape, dtype=torch.float64)
        chunked.forward(logits, target, None, logp, lse, chunk_rows)
        ctx.save_for_backward(logits, target, lse)
        ctx.chunk_rows = chunk_rows
        return logp

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, target, lse = ctx.saved_tensors
        dlogits, columns = torch.empty_like(logits), logits.shape[-1]
        chunked.backward(
            grads[0], None, logits, target, None, lse, 0, columns, dlogits, ctx.chunk_rows
        )
        return dlogits, None, None


class Fp32Vjp(torch.autograd.Function):
    """The gradient written out in fp32, over all rows at once; saves the logits alone."""

    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(logits, target)
        return selected_logp(logits, target)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        logits, target = ctx.saved_tensors
        column = target.unsqueeze(-1)
        p = torch.softmax(logits.float(), -1)
        p.scatter_(-1, column, p.gather(-1, column) - 1).mul_(-grads[0].unsqueeze(-1))
        return p.to(logits.dtype), None
