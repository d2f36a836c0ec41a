"""inplace_backward=True: the backward takes no memory of the logits' size, and what a whole step
then holds (docs/memory.md)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from calls import DTYPES, Sample, kernel_serves, sample
from cuda_calls import grad_entropy_of
from test_c09_memory import WORKSPACE, peak_bytes
from test_inplace_backward import WRITABLE, computed
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import rl_logp
from rl_logp import chunked

Score = Callable[[Tensor, Tensor], Tensor]
SCORES: dict[str, Callable[..., Any]] = {
    "fused_logp": rl_logp.fused_logp,
    "fused_logp_entropy": rl_logp.fused_logp_entropy,
}
every_score = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)


def peak_of_backward(
    device: str, score: Callable[..., Any], case: Sample, logits: Tensor, inplace: bool
) -> int:
    outputs = score(logits, case.target, inplace_backward=inplace)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [case.grad_logp, grad_entropy_of(case).to(case.grad_logp.dtype)][: len(outputs)]
    return peak_bytes(device, lambda: torch.autograd.grad(outputs, logits, grads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", WRITABLE)
@every_score
def test_the_backward_allocates_nothing(
    device: str, dtype: torch.dtype, layout: str, score: Callable[..., Any]
) -> None:
    if not kernel_serves(device, dtype):
        pytest.skip(f"the chunked fallback serves {dtype} on {device}")
    case = sample((8, 8, 8193), dtype, device)
    logits = computed(case.logits, layout)
    assert peak_of_backward(device, score, case, logits, True) <= 512, "O(N), whatever V"
    logits = computed(case.logits, layout)
    peak = peak_of_backward(device, score, case, logits, False)
    assert peak >= logits.numel() * logits.element_size(), "else the bound above says nothing"


@every_score
def test_the_fallback_allocates_its_workspace_alone(
    device: str, score: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", WORKSPACE)
    case = sample((16, 32, 1024), torch.float64, device)
    logits = computed(case.logits)
    peak = peak_of_backward(device, score, case, logits, True)
    assert peak <= 4 * WORKSPACE + 4096 < logits.nbytes


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


@every_score
@pytest.mark.parametrize(("name", "step", "new", "inplace"), STEPS, ids=[s[0] for s in STEPS])
def test_what_a_step_holds_at_most(
    device: str,
    name: str,
    step: Callable[[Tensor, Tensor, Score], Tensor],
    new: int,
    inplace: int,
    score: Callable[..., Any],
) -> None:
    """From hidden states to their gradient, forward and backward."""
    if not kernel_serves(device, torch.bfloat16):
        pytest.skip(f"the chunked fallback serves bfloat16 on {device}")
    hidden = torch.randn(ROWS, 2, device=device).bfloat16().requires_grad_()
    target = torch.randint(V - 8, (ROWS,), device=device)
    for overwrites, expected in ((False, new), (True, inplace)):

        def run(overwrites: bool = overwrites) -> None:
            def of_rows(logits: Tensor, target: Tensor) -> Tensor:
                outputs = score(logits, target, inplace_backward=overwrites)
                return outputs[0] + outputs[1] if isinstance(outputs, tuple) else outputs

            step(hidden.clone(), target, of_rows).sum().backward()

        run()  # what a library keeps from its first call on is not counted
        peak = peak_bytes(device, run) / (2 * ROWS * V)
        assert abs(peak - expected) < 0.1, f"{peak:.2f} with inplace_backward={overwrites}"


def with_gather(logits: Tensor, target: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def with_entropy(logits: Tensor, target: Tensor) -> Tensor:
    log_p = torch.log_softmax(logits.float(), -1)
    logp = log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return logp - (log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("held", [0, 1], ids=["logits are let go", "logits are held"])
@pytest.mark.parametrize(("of_torch", "expected"), [(with_gather, 6), (with_entropy, 10)])
def test_what_torch_holds_instead(device: str, of_torch: Score, expected: int, held: int) -> None:
    """The same page compares with it."""
    step = the_caller_holds_logits if held else lambda h, t, score: score(head(h), t)
    hidden = torch.randn(ROWS, 2, device=device).bfloat16().requires_grad_()
    target = torch.randint(V - 8, (ROWS,), device=device)

    def run() -> None:
        step(hidden.clone(), target, of_torch).sum().backward()

    run()
    peak = peak_bytes(device, run) / (2 * ROWS * V)
    # On a GPU torch's allocator may give each tensor a block that is a little larger.
    assert abs(peak - expected - held) < 0.3, f"{peak:.2f}"
