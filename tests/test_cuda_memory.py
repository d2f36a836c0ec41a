"""C9 and C13 on the kernels: what is allocated, to the byte, and what follows if it cannot be."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from calls import (
    DTYPES,
    Call,
    Result,
    Sample,
    assert_same_bits,
    call,
    call_with_entropy,
    relaid,
    sample,
)
from cuda_calls import cuda_kernel, every_kind, grad_entropy_of, run
from test_inplace_backward import computed
from torch import Tensor

import rl_logp

pytestmark = cuda_kernel

OPS = torch.ops.rl_logp
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
    of_call = allocated(lambda: OPS.fused_logp_forward(*case[:3], all_rows))
    assert of_call == Allocated(2, 12 * rows, steps(4 * rows) + steps(8 * rows))


@forms
def test_with_an_entropy_it_allocates_that_and_the_mean(
    rows: int, dtype: torch.dtype, form: str
) -> None:
    case = arguments(rows, dtype, form)
    of_call = allocated(lambda: OPS.fused_logp_entropy_forward(*case[:3]))
    assert of_call == Allocated(4, 24 * rows, 2 * (steps(4 * rows) + steps(8 * rows)))


@forms
def test_the_backward_allocates_the_gradient(rows: int, dtype: torch.dtype, form: str) -> None:
    case = arguments(rows, dtype, form)
    _, _, lse, mean = OPS.fused_logp_entropy_forward(*case[:3])
    grads = (case.grad_logp, grad_entropy_of(case), case.grad_lse)
    row, shard = case[:3], (0, V)
    backwards = {
        "logp": lambda: OPS.fused_logp_backward(*case[3:], *row, lse, *shard),
        "entropy": lambda: OPS.fused_logp_entropy_backward(*grads, *row, lse, mean, *shard),
    }
    size = rows * V * dtype.itemsize
    for name, backward in backwards.items():
        of_call = allocated(backward)
        assert of_call[:2] == (1, size), name
        # A block that is larger by less than 1 MiB is not split.
        assert 0 <= of_call.taken - steps(size) < 2**20, name


@forms
def test_the_backward_in_place_allocates_nothing(rows: int, dtype: torch.dtype, form: str) -> None:
    case = arguments(rows, dtype, form)
    _, lse = OPS.fused_logp_forward(*case[:3], True)
    of_call = allocated(lambda: OPS.fused_logp_backward_(*case[3:], *case[:3], lse, 0, V))
    assert of_call == Allocated(0, 0, 0)


class Loss(NamedTuple):
    of: Callable[..., Tensor]
    scalars: int  # of torch's, in the forward; the backward has one, its upstream gradient
    row_bytes: int = 12  # of what is saved and returned
    gradients: int = 1  # of the logits' size


def logp_and_entropy(*args: Any, **options: Any) -> Tensor:
    logp, entropy = rl_logp.fused_logp_entropy(*args, **options)
    return logp.sum() + entropy.sum()


LOSSES = {
    "logp": Loss(lambda *args, **options: rl_logp.fused_logp(*args, **options).sum(), 1),
    "logp and entropy": Loss(logp_and_entropy, 3, row_bytes=24),
    "in place": Loss(
        lambda *args, **options: rl_logp.fused_logp(*args, **options, inplace_backward=True).sum(),
        1,
        gradients=0,
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_training_allocates_no_more(loss: Loss, dtype: torch.dtype) -> None:
    """Through autograd, from a sum: scalars of torch's, and no copy of the gradient."""
    rows = 64
    case = sample((rows, V), dtype, "cuda")
    logits = computed(case.logits)
    losses: list[Tensor] = []
    gradients: list[Tensor] = []

    def forward() -> None:
        losses.append(loss.of(logits, case.target, temperature=case.temperature))

    def backward() -> None:
        gradients.extend(torch.autograd.grad(losses.pop(), logits))

    times = loss.row_bytes // 6 + loss.scalars  # tensors of 4 and of 8 bytes a row, in pairs
    assert allocated(forward)[:2] == (times, loss.row_bytes * rows + 4 * loss.scalars)
    size = rows * V * dtype.itemsize
    assert allocated(backward)[:2] == (1 + loss.gradients, size * loss.gradients + 4)
    assert gradients[0].shape == logits.shape


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


@every_kind
def test_running_out_in_the_forward(kind: type, little_memory: Callable[[int], None]) -> None:
    case = sample((64, V), torch.bfloat16, "cuda")
    expected = run(case, kind=kind)
    score = rl_logp.fused_logp if kind is Result else rl_logp.fused_logp_entropy
    logits = case.logits[:1, :7].expand(2**25, 7)  # whose logp takes 128 MiB
    target = case.target[:1].expand(2**25)
    little_memory(2**26)
    used = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        score(logits, target)
    assert torch.cuda.memory_allocated() == used, "something is still held"
    small = sample((3, 7), torch.bfloat16, "cuda", seed=1)
    assert not run(small, kind=kind).lse.isnan().any(), "a small call, while memory is short"
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same_bits(run(case, kind=kind), expected, "after running out of memory")


@pytest.mark.parametrize(
    "call", [call, call_with_entropy], ids=["fused_logp", "fused_logp_entropy"]
)
@pytest.mark.parametrize("through", ["autograd.grad", "backward"])
def test_running_out_in_the_backward(
    call: Call, little_memory: Callable[[int], None], through: str
) -> None:
    case = sample((1024, V), torch.bfloat16, "cuda")  # whose gradient takes 98 MiB
    first = call(*case)
    expected = type(first)(*(t.cpu() for t in first))
    del first
    leaf = case.logits.detach().requires_grad_()
    row = (leaf, case.target, case.temperature)
    grads: tuple[Tensor, ...] = case[3:]
    if isinstance(expected, Result):
        outputs = OPS.fused_logp_with_lse(*row)
    else:
        outputs = OPS.fused_logp_entropy_forward(*row)[:3]
        grads = (case.grad_logp, case.grad_lse.float(), case.grad_lse)

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
    actual = type(expected)(*(t.detach().cpu() for t in (*outputs, dlogits)))
    assert_same_bits(actual, expected, "the same graph, when there is memory")
    again = type(expected)(*(t.cpu() for t in call(*case)))
    assert_same_bits(again, expected, "another call")
