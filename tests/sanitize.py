"""Every kernel on small inputs, for `make sanitize`: compute-sanitizer runs this file.

No pytest and few launches, for the tools slow each of them down. Tensors are made on the CPU and
copied, so that the launches are the project's own, and each has an allocation of its own, so that a
read past its end is one past the end of the allocation.
"""

import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # before torch is imported

from collections.abc import Iterator

import torch
from torch import Tensor

import rl_logp

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FEW, MANY = (
    5,
    270,
)  # rows: clusters and 8 warps a row, or a block of 4 warps (264 on 132 processors)


def layouts(rows: int, vocab_size: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Logits that are contiguous, start an odd number of elements on, and have a padded stride."""
    logits = 3 * torch.randn(rows, vocab_size)
    logits[::7, 1:] = -torch.inf
    logits[1::7] *= 1e5 if dtype != torch.float16 else 1e3  # beyond the fast arithmetic
    yield logits.to(dtype).cuda()
    for before in (1, 6):
        base = torch.zeros(before + rows * vocab_size, dtype=dtype)
        base[before:] = logits.to(dtype).flatten()
        yield base.cuda()[before:].view(rows, vocab_size)
    base = torch.zeros(rows, vocab_size + 5, dtype=dtype)
    base[:, :vocab_size] = logits.to(dtype)
    yield base.cuda()[:, :vocab_size]


def run(logits: Tensor, temperature: bool, target_dtype: torch.dtype) -> None:
    rows, vocab_size = logits.shape
    target = (torch.arange(rows) * 7 % (vocab_size + 2) - 1).to(target_dtype)  # some ignored
    grad_logp = torch.randn(rows)
    grad_logp[::3] = 0
    divisor = torch.linspace(0.5, 2.0, rows).cuda() if temperature else None
    target, grad_logp = target.cuda(), grad_logp.cuda()
    for all_rows in (False, True):
        logp, lse = torch.ops.rl_logp.fused_logp_forward(logits, target, divisor, all_rows)
    grad_lse = torch.randn(rows, dtype=torch.float64).cuda()
    for grad in (None, grad_lse):
        torch.ops.rl_logp.fused_logp_backward(
            grad_logp, grad, logits, target, divisor, lse, 0, vocab_size
        )
    logp.cpu()


def main() -> None:
    torch.manual_seed(0)
    rl_logp.require_kernel("cuda", torch.bfloat16)
    launches = 0
    for dtype in DTYPES:
        for rows, vocab_size in ((FEW, 7), (FEW, 9001), (MANY, 130), (MANY, 1027)):
            for index, logits in enumerate(layouts(rows, vocab_size, dtype)):
                run(logits, index % 2 == 0, (torch.int32, torch.int64)[index // 2])
                launches += 4
    print(f"{launches} launches")


if __name__ == "__main__":
    main()
