"""Random shapes, strides, masks, infinities, targets and temperatures against the fp64 oracle.

A failure prints the line that reproduces it. The inputs, not the tests, are random: the examples
are the same in every run.
"""

from collections.abc import Callable
from typing import NamedTuple, Optional

import torch
from calls import DTYPES, LAYOUTS, call, kernel_serves, relaid
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_logp.reference import reference
from rl_logp.testing import assert_as_accurate, assert_bitwise_equal

LOWEST = torch.finfo(torch.float32).min
ANY_TARGET = st.one_of(st.integers(0, 40), st.sampled_from([-100, -1, 2**31 - 1, -(2**31), 300, 3]))
SPECIAL = st.sampled_from([torch.inf, -torch.inf, torch.nan, LOWEST, 3e38, -3e38, 0.0, -0.0, 1e-40])
SCALES = [0.0, 1e-3, 1.0, 4.0, 30.0, 1e3, 1e6]


class Arguments(NamedTuple):
    """Those of ``call``."""

    logits: Tensor
    target: Tensor
    temperature: Optional[Tensor]
    grad_logp: Tensor
    grad_lse: Optional[Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Arguments":
        return Arguments(*(None if t is None else function(t) for t in self))  # type: ignore


@st.composite
def all_arguments(draw) -> Arguments:
    rows = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    vocab_size = draw(st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 2051])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    dtype = draw(st.sampled_from(DTYPES))
    logits = torch.randn(*rows, vocab_size, generator=generator)
    logits = logits.mul_(draw(st.sampled_from(SCALES))).to(dtype)
    count = logits[..., 0].numel()
    if count:
        flat = logits.view(count, vocab_size)
        if draw(st.booleans()):  # a mask, as top-k or a grammar leaves it
            masked = torch.rand(flat.shape, generator=generator) < 0.5
            flat.masked_fill_(masked, draw(st.sampled_from([-torch.inf, torch.finfo(dtype).min])))
        for _ in range(draw(st.integers(0, 4))):
            place = draw(st.integers(0, count - 1)), draw(st.integers(0, vocab_size - 1))
            flat[place] = draw(SPECIAL)
    values = draw(st.lists(ANY_TARGET, min_size=count, max_size=count))
    target = torch.tensor(values, dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    temperature = draw(
        st.one_of(
            st.none(),
            st.floats(0.0625, 16, width=32).map(lambda t: torch.tensor(t)),
            st.lists(st.floats(0.0625, 16, width=32), min_size=count, max_size=count).map(
                lambda t: torch.tensor(t, dtype=torch.float32).view(rows)
            ),
        )
    )
    grads = [torch.randn(*rows, generator=generator) for _ in range(2)]
    for grad in grads:
        grad[torch.rand(rows, generator=generator) < 0.3] = 0
    grad_lse = grads[1].double() if draw(st.booleans()) else None
    layouts = ["contiguous", *LAYOUTS] if count else ["contiguous"]
    logits = relaid(logits, draw(st.sampled_from(layouts)))
    return Arguments(logits, target.view(rows), temperature, grads[0], grad_lse)


def by_torch(
    logits: Tensor,
    target: Tensor,
    temperature: Optional[Tensor],
    grad_logp: Tensor,
    grad_lse: Optional[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's autograd in fp32, row masks put on by hand."""
    leaf = logits.detach().requires_grad_()
    y = leaf.float() if temperature is None else leaf.float() / temperature.unsqueeze(-1)
    ignored = (target < 0) | (target >= logits.shape[-1])
    column = target.long().masked_fill(ignored, 0).unsqueeze(-1)
    logp = torch.log_softmax(y, -1).gather(-1, column).squeeze(-1)
    lse = torch.logsumexp(y, -1)
    g_lse = torch.zeros_like(grad_logp) if grad_lse is None else grad_lse.float()
    g = grad_logp.masked_fill(ignored, 0)
    outputs, grads = [logp], [g]
    if grad_lse is not None:
        outputs, grads = [logp, lse], [g, g_lse]
    (dlogits,) = torch.autograd.grad(outputs, leaf, grads)
    dlogits = dlogits.masked_fill(((g == 0) & (g_lse == 0)).unsqueeze(-1), 0)
    return logp.detach().masked_fill(ignored, 0), lse.detach(), dlogits


@settings(max_examples=400)
@given(arguments=all_arguments())
def test_any_call_is_as_accurate_as_torch(device: str, arguments: Arguments) -> None:
    args = arguments.map(lambda t: t.to(device))
    logits, target, temperature, grad_logp, grad_lse = args
    ours, theirs = call(*args), by_torch(*args)
    exact = reference(
        logits, target, temperature=temperature, grad_logp=grad_logp, grad_lse=grad_lse
    )
    for what, actual, torch_result, truth in zip(ours._fields, ours, theirs, exact, strict=True):
        rows = truth.flatten(0, target.dim() - 1)
        # Row by row: one row's huge values must not hide another's error.
        for row in range(rows.shape[0]):
            assert_as_accurate(
                actual.flatten(0, target.dim() - 1)[row].to(torch_result.dtype),
                torch_result.flatten(0, target.dim() - 1)[row],
                rows[row],
                f"{what} of row {row}",
            )


@settings(max_examples=100)
@given(arguments=all_arguments(), data=st.data())
def test_any_row_alone_has_its_bits(device: str, arguments: Arguments, data: st.DataObject) -> None:
    """C1 at its widest: whatever a row and its neighbours hold."""
    if not arguments.target.numel():
        return
    args = arguments.map(lambda t: t.to(device))
    index = tuple(data.draw(st.integers(0, size - 1)) for size in args.target.shape)
    whole = call(*args)
    alone = call(*args.map(lambda t: t[index] if t.dim() else t))
    for what, one, all_rows in zip(whole._fields, alone, whole, strict=True):
        # Which NaN an operation makes may depend on the instruction that made it.
        assert_bitwise_equal(one, all_rows[index], f"{what} of row {index}", any_nan=True)


@settings(max_examples=100)
@given(arguments=all_arguments())
def test_any_temperature_has_the_bits_of_the_division(device: str, arguments: Arguments) -> None:
    logits, target, temperature, *_ = arguments.map(lambda t: t.to(device))
    if temperature is None:
        return
    y = logits.float() / temperature.unsqueeze(-1)
    actual, expected = call(logits, target, temperature), call(y, target)
    for what in ("logp", "lse"):
        assert_bitwise_equal(getattr(actual, what), getattr(expected, what), what, any_nan=True)


@settings(max_examples=100)
@given(arguments=all_arguments())
def test_the_fallback_has_the_bits_of_torch(device: str, arguments: Arguments) -> None:
    """C15 for logp, whose arithmetic torch's own autograd shares."""
    args = arguments.map(lambda t: t.to(device))
    if kernel_serves(device, args.logits.dtype):
        return
    logp, _, _ = by_torch(*args)
    assert_bitwise_equal(call(*args).logp, logp, "logp", any_nan=True)
