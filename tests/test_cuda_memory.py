"""C9 and C13 on the kernels: what is allocated, to the byte, and what follows if it cannot be."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from calls import DTYPES, Result, Sample, assert_same_bits, call, relaid, sample
from cuda_calls import cuda_kernel
from torch import Tensor

import rl_logp

pytestmark = cuda_kernel

V = 50257
SIZES = [1, 7, 64, 1000]


class Allocated(NamedTuple):
    """Of one call, freed or not: how often memory was asked for, and how many bytes in all."""

    times: int
    asked: int
    taken: int  # of the allocator, in steps of 512


def allocated(run: Callable[[], object]) -> Allocated:
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    kept = run()
    after = torch.cuda.memory_stats()
    del kept
    names = (
        "allocation.all.allocated",
        "requested_bytes.all.allocated",
        "allocated_bytes.all.allocated",
    )
    return Allocated(*(after[name] - before[name] for name in names))


def steps(size: int) -> int:
    """As the allocator rounds it."""
    return -(-size // 512) * 512


def arguments(rows: int, dtype: torch.dtype, form: str) -> Sample:
    case = sample((rows, V), dtype, "cuda")
    if form == "expanded":
        case = Sample(case.logits, *(t[:1].expand(rows) for t in case[1:]))
    elif form == "strided":
        apart = (torch.stack([t, t], -1)[..., 0] for t in case[1:])
        case = Sample(relaid(case.logits, "padded columns"), *apart)
    elif form == "int32":
        case = case._replace(target=case.target.int())
    return case


every_form = [
    pytest.mark.parametrize("rows", SIZES),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("form", ["contiguous", "expanded", "strided", "int32"]),
]


def forms(function: Callable) -> Callable:
    for mark in every_form:
        function = mark(function)
    return function


@forms
@pytest.mark.parametrize("all_rows", [False, True], ids=["targets' rows", "all rows"])
def test_the_forward_allocates_logp_and_lse(
    rows: int, dtype: torch.dtype, form: str, all_rows: bool
) -> None:
    case = arguments(rows, dtype, form)
    of_call = allocated(lambda: torch.ops.rl_logp.fused_logp_forward(*case[:3], all_rows))
    assert of_call == Allocated(2, 12 * rows, steps(4 * rows) + steps(8 * rows))


@forms
def test_the_backward_allocates_the_gradient(rows: int, dtype: torch.dtype, form: str) -> None:
    case = arguments(rows, dtype, form)
    _, lse = torch.ops.rl_logp.fused_logp_forward(*case[:3], True)
    of_call = allocated(
        lambda: torch.ops.rl_logp.fused_logp_backward(*case[3:], *case[:3], lse, 0, V)
    )
    size = rows * V * dtype.itemsize
    assert of_call[:2] == (1, size)
    # A block that is larger by less than 1 MiB is not split.
    assert 0 <= of_call.taken - steps(size) < 2**20


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training_allocates_no_more(dtype: torch.dtype) -> None:
    """Through autograd, from the sum of logp: scalars of torch's, and no copy of the gradient."""
    rows = 64
    case = sample((rows, V), dtype, "cuda")
    leaf = case.logits.requires_grad_()
    losses: list[Tensor] = []

    def forward() -> None:
        losses.append(rl_logp.fused_logp(leaf, case.target, temperature=case.temperature).sum())

    assert allocated(forward)[:2] == (3, 12 * rows + 4)
    assert allocated(losses.pop().backward)[:2] == (2, rows * V * dtype.itemsize + 4)


def test_the_measure_sees_what_is_gone_afterwards() -> None:
    x = torch.zeros(1000, device="cuda")
    assert allocated(lambda: (x + 1) + (x + 2)) == (3, 12000, 3 * 4096)


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """Call it to leave the process that many bytes of GPU memory, to the end of the test."""

    def leave(size: int) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        limit = torch.cuda.memory_reserved() + size
        torch.cuda.set_per_process_memory_fraction(limit / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_running_out_in_the_forward(little_memory: Callable[[int], None]) -> None:
    case = sample((64, V), torch.bfloat16, "cuda")
    expected = call(*case)
    logits = case.logits[:1, :7].expand(2**25, 7)  # whose logp takes 128 MiB
    target = case.target[:1].expand(2**25)
    little_memory(2**26)
    used = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        rl_logp.fused_logp(logits, target)
    assert torch.cuda.memory_allocated() == used, "something is still held"
    small = sample((3, 7), torch.bfloat16, "cuda", seed=1)
    assert not call(*small).lse.isnan().any(), "a small call, while memory is short"
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same_bits(call(*case), expected, "after running out of memory")


@pytest.mark.parametrize("through", ["autograd.grad", "backward"])
def test_running_out_in_the_backward(little_memory: Callable[[int], None], through: str) -> None:
    case = sample((1024, V), torch.bfloat16, "cuda")  # whose gradient takes 98 MiB
    expected = Result(*(t.cpu() for t in call(*case)))
    leaf = case.logits.detach().requires_grad_()
    outputs = rl_logp.fused_logp(leaf, case.target, temperature=case.temperature, return_lse=True)
    grads = case[3:]

    def backward() -> None:
        if through == "backward":
            torch.autograd.backward(outputs, grads, retain_graph=True)
        else:
            torch.autograd.grad(outputs, leaf, grads, retain_graph=True)

    little_memory(2**26)
    used = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        backward()
    assert torch.cuda.memory_allocated() == used, "something is still held"
    assert leaf.grad is None
    torch.cuda.set_per_process_memory_fraction(1.0)
    (dlogits,) = torch.autograd.grad(outputs, leaf, grads)
    actual = Result(*(t.detach().cpu() for t in (*outputs, dlogits)))
    assert_same_bits(actual, expected, "the same graph, when there is memory")
    assert_same_bits(Result(*(t.cpu() for t in call(*case))), expected, "another call")
