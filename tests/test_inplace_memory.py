"""inplace_backward=True: the backward takes no memory of the logits' size, and what a whole step
then holds (docs/memory.md)."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from calls import DTYPES, kernel_serves, sample
from test_c09_memory import WORKSPACE, peak_bytes
from test_inplace_backward import WRITABLE, computed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rl_logp
from rl_logp import chunked


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", WRITABLE)
def test_the_backward_allocates_nothing(device: str, dtype: torch.dtype, layout: str) -> None:
    if not kernel_serves(device, dtype):
        pytest.skip(f"the chunked fallback serves {dtype} on {device}")
    case = sample((8, 8, 8193), dtype, device)
    logits = computed(case.logits, layout)
    logp = rl_logp.fused_logp(logits, case.target, inplace_backward=True)
    peak = peak_bytes(device, lambda: torch.autograd.grad(logp, logits, case.grad_logp))
    assert peak <= 512, "O(N), whatever V"
    logits = computed(case.logits, layout)
    logp = rl_logp.fused_logp(logits, case.target)
    peak = peak_bytes(device, lambda: torch.autograd.grad(logp, logits, case.grad_logp))
    assert peak >= logits.numel() * logits.element_size(), "else the bound above says nothing"


def test_the_fallback_allocates_its_workspace_alone(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", WORKSPACE)
    case = sample((16, 32, 1024), torch.float64, device)
    logits = computed(case.logits)
    logp = rl_logp.fused_logp(logits, case.target, inplace_backward=True)
    peak = peak_bytes(device, lambda: torch.autograd.grad(logp, logits, case.grad_logp))
    assert peak <= 4 * WORKSPACE + 4096 < logits.nbytes


Score = Callable[[Tensor, Tensor], Tensor]
V = 16000
ROWS = 256


def head(hidden: Tensor) -> Tensor:
    """Logits; the weight is so narrow, and asks for no gradient, that it counts for nothing."""
    return hidden @ torch.ones(hidden.shape[-1], V, device=hidden.device, dtype=hidden.dtype)


def the_caller_holds_logits(hidden: Tensor, target: Tensor, score: Score) -> Tensor:
    logits = head(hidden)

    def hold(_: Tensor) -> None:  # for as long as the backward runs
        logits.size()

    hidden.register_hook(hold)
    return score(logits, target)


def checkpointed(hidden: Tensor, target: Tensor, score: Score, reentrant: bool) -> Tensor:
    out = checkpoint(lambda h: score(head(h), target), hidden, use_reentrant=reentrant)
    assert isinstance(out, Tensor)
    return out


# docs/memory.md has this table: what a step holds at most, in units of its bf16 logits.
STEPS: list[tuple[str, Callable[[Tensor, Tensor, Score], Tensor], int, int]] = [
    ("as it is", lambda h, t, score: score(head(h), t), 2, 1),
    ("logits are held", the_caller_holds_logits, 2, 1),
    ("reentrant checkpoint", partial(checkpointed, reentrant=True), 2, 1),
    ("hidden states are sliced", lambda h, t, score: score(head(h[:-1]), t[1:]), 2, 1),
    ("to fp32", lambda h, t, score: score(head(h).float(), t), 4, 3),
    ("logits are sliced", lambda h, t, score: score(head(h)[:-1], t[1:]), 2, 2),
    ("padding is cut off", lambda h, t, score: score(head(h)[:, :-8], t), 2, 2),
    ("divided", lambda h, t, score: score(head(h) / 0.7, t), 2, 2),
    ("capped", lambda h, t, score: score(9 * torch.tanh(head(h) / 9), t), 3, 3),
    ("checkpoint", partial(checkpointed, reentrant=False), 2, 2),
]


@pytest.mark.parametrize(("name", "step", "new", "inplace"), STEPS, ids=[s[0] for s in STEPS])
def test_what_a_step_holds_at_most(
    device: str,
    name: str,
    step: Callable[[Tensor, Tensor, Score], Tensor],
    new: int,
    inplace: int,
) -> None:
    """From hidden states to their gradient, forward and backward."""
    if not kernel_serves(device, torch.bfloat16):
        pytest.skip(f"the chunked fallback serves bfloat16 on {device}")
    hidden = torch.randn(ROWS, 2, device=device).bfloat16().requires_grad_()
    target = torch.randint(V - 8, (ROWS,), device=device)
    for overwrites, expected in ((False, new), (True, inplace)):

        def run(overwrites: bool = overwrites) -> None:
            score = partial(rl_logp.fused_logp, inplace_backward=overwrites)
            step(hidden.clone(), target, score).sum().backward()

        run()  # what a library keeps from its first call on is not counted
        peak = peak_bytes(device, run) / (2 * ROWS * V)
        assert abs(peak - expected) < 0.1, f"{peak:.2f} with inplace_backward={overwrites}"
