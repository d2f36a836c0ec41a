"""The entropy beside logp, and its gradient: right, as accurate as torch, and what a metric costs.

What it shares with logp is in the files of C1 to C7 (the ``call`` fixture), and in test_partial.py.
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from calls import (
    DTYPES,
    LAYOUTS,
    EntropyResult,
    OperatorsSeen,
    Sample,
    assert_same_bits,
    call,
    call_with_entropy,
    kernel_serves,
    relaid,
    rows_of,
    sample,
)
from hypothesis import given, settings
from test_c06_ignored import waits
from test_c08_special_values import ROWS, row_of
from test_c09_memory import WORKSPACE, peak_bytes
from test_c10_inputs import whole_storage
from test_c15_chunked import CHUNK_ROWS
from test_fuzz import Arguments, all_arguments
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import rl_logp
from rl_logp import _library, _shard, chunked
from rl_logp.reference import entropy as exact_entropy
from rl_logp.reference import reference
from rl_logp.testing import assert_as_accurate, assert_bitwise_equal

OPS = torch.ops.rl_logp
INF = torch.inf
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def by_torch(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    grad_logp: Tensor,
    grad_entropy: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """logp, entropy and the gradient in fp32, as one would write them."""
    leaf = logits.detach().requires_grad_()
    y = leaf.float() if temperature is None else leaf.float() / temperature.unsqueeze(-1)
    log_p = torch.log_softmax(y, -1)
    p = log_p.exp()
    # A column of 0 adds nothing; without the mask, 0 * -inf would be NaN.
    entropy = -(p * log_p.masked_fill(p == 0, 0)).sum(-1)
    ignored = (target < 0) | (target >= logits.shape[-1])
    logp = log_p.gather(-1, target.long().masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    g = grad_logp.masked_fill(ignored, 0)
    (dlogits,) = torch.autograd.grad([logp, entropy], leaf, [g, grad_entropy])
    unreached = (g == 0) & (grad_entropy == 0)
    return (
        logp.detach().masked_fill(ignored, 0),
        entropy.detach(),
        dlogits.masked_fill(unreached.unsqueeze(-1), 0),
    )


def assert_accurate(
    logits: Tensor,
    target: Tensor,
    temperature: Tensor | None,
    grad_logp: Tensor,
    grad_entropy: Tensor,
) -> None:
    """Of each row, the entropy and the gradient are as accurate as torch's."""
    args = (logits, target, temperature, grad_logp)
    ours = call_with_entropy(*args, grad_entropy=grad_entropy)
    logp, entropy, dlogits = by_torch(*args, grad_entropy)
    exact = reference(
        logits, target, temperature=temperature, grad_logp=grad_logp, grad_entropy=grad_entropy
    )
    truth = exact_entropy(logits, temperature=temperature)
    for what, roundings, triple in (
        ("entropy", 1, [t.unsqueeze(-1) for t in (ours.entropy, entropy, truth)]),
        # The gradient of logp is rounded, then that of the entropy beside it, and their sum.
        ("dlogits", 3, [ours.dlogits, dlogits, exact.dlogits]),
    ):
        actual, torch_result, right = (t.flatten(0, -2) for t in triple)
        for row in range(target.numel()):
            assert_as_accurate(
                actual[row], torch_result[row], right[row], f"{what} of row {row}", roundings
            )
    assert_as_accurate(ours.logp, logp, exact.logp, "logp")


@every_dtype
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 257, 2051])
@pytest.mark.parametrize("scale", [0.25, 1, 25, 2000], ids=str)
@pytest.mark.parametrize("with_temperature", [False, True], ids=["no temperature", "temperature"])
def test_it_is_as_accurate_as_torch(
    device: str, dtype: torch.dtype, vocab_size: int, scale: float, with_temperature: bool
) -> None:
    case = sample((24, vocab_size), dtype, device)
    temperature = case.temperature if with_temperature else None
    assert_accurate(
        case.logits * scale, case.target, temperature, case.grad_logp, case.grad_lse.float()
    )


@settings(max_examples=200)
@given(arguments=all_arguments())
def test_any_call_is_as_accurate_as_torch(device: str, arguments: Arguments) -> None:
    logits, target, temperature, grad_logp, grad_lse = arguments.map(lambda t: t.to(device))
    grad_entropy = torch.zeros_like(grad_logp) if grad_lse is None else grad_lse.float()
    assert_accurate(logits, target, temperature, grad_logp, grad_entropy)


@settings(max_examples=100)
@given(arguments=all_arguments())
def test_logp_and_the_gradient_without_the_entropys_have_the_bits_of_fused_logp(
    device: str, arguments: Arguments
) -> None:
    args = arguments.map(lambda t: t.to(device))
    without = call(*args)
    zero = torch.zeros_like(args.grad_logp)
    for what, grad_entropy in (("none", None), ("0", zero), ("-0", -zero)):
        if grad_entropy is None and args.grad_lse is not None:
            continue  # lse's would stand for it
        ours = call_with_entropy(*args, grad_entropy)
        for name in without._fields:
            actual, expected = getattr(ours, name), getattr(without, name)
            # Of every row here; fused_logp leaves the lse of some rows to who asks for it.
            assert_bitwise_equal(actual, expected, f"{name}, {what}", any_nan=True)


@every_dtype
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("columns", [4, 515], ids=["alone", "within a long row"])
@pytest.mark.parametrize("temperature", [None, 0.5, 2.0], ids=str)
def test_special_rows_give_what_torch_gives(
    device: str, dtype: torch.dtype, name: str, columns: int, temperature: float | None
) -> None:
    row = row_of(name, dtype, device)
    fill = -INF if "all" in name else 0.0
    logits = torch.nn.functional.pad(row, (columns - 4, 0), value=fill).expand(5, -1)
    target = torch.tensor([*range(columns - 4, columns), -100], device=device)
    divisor = None if temperature is None else torch.tensor(temperature, device=device)
    g = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], device=device)
    assert_accurate(logits, target, divisor, g, g.flip(0))


@every_dtype
@pytest.mark.parametrize("masked", [-INF, torch.finfo(torch.float32).min], ids=str)
def test_masked_columns_add_nothing_and_get_nothing(
    device: str, dtype: torch.dtype, masked: float
) -> None:
    case = sample((12, 257), dtype, device)
    mask = torch.rand(257, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    value = max(masked, torch.finfo(dtype).min) if math.isfinite(masked) else masked
    if dtype == torch.float16 and math.isfinite(masked):
        case = case._replace(temperature=case.temperature / 8)  # exp(-65504 / T) is 0 as well
    logits = case.logits.masked_fill(mask, value)
    target = torch.where(mask[case.target.clamp(min=0)], -100, case.target)
    args = (target, case.temperature, case.grad_logp, None, case.grad_lse.float())
    result = call_with_entropy(logits, *args)
    assert bool((result.dlogits[:, mask] == 0).all())
    assert result.entropy.isfinite().all()
    truth = exact_entropy(case.logits[:, ~mask], temperature=case.temperature)
    by_torch_alone = by_torch(case.logits[:, ~mask], target * 0 - 1, *args[1:3], args[-1])[1]
    assert_as_accurate(result.entropy, by_torch_alone, truth, "entropy of the other columns")


@every_dtype
def test_rows_without_a_choice_have_an_entropy_of_exactly_zero(
    device: str, dtype: torch.dtype
) -> None:
    one = torch.tensor([[3.0], [-7.0], [0.0]], device=device).to(dtype)
    alone = torch.full((3, 300), -INF, dtype=dtype, device=device)
    alone[[0, 1, 2], [0, 17, 299]] = torch.tensor([5.0, -2.0, 0.0], device=device).to(dtype)
    for logits in (one, alone):
        leaf = logits.clone().requires_grad_()
        entropy = rl_logp.fused_entropy(leaf)
        assert_bitwise_equal(entropy.detach(), torch.zeros(3, device=device), "+0")
        (dlogits,) = torch.autograd.grad(entropy.sum(), leaf)
        assert bool((dlogits == 0).all())


@every_dtype
@pytest.mark.parametrize("vocab_size", [1, 2, 16, 33, 1000, 50257])
def test_equal_columns_have_the_logarithm_of_their_number(
    device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    logits = torch.full((2, vocab_size), 3.0, dtype=dtype, device=device)
    entropy = rl_logp.fused_entropy(logits, temperature=0.7)
    exact = torch.full((2,), vocab_size, dtype=torch.float64).log().to(device)
    y = logits.float() / 0.7
    log_p = torch.log_softmax(y, -1)
    assert_as_accurate(entropy, -(log_p.exp() * log_p).sum(-1), exact, "entropy")


@pytest.mark.parametrize("gap", [5.0, 20.0, 30.0, 38.0])  # up to 55 bits: docs/numerics.md
def test_a_confident_row_keeps_its_small_entropy(device: str, gap: float) -> None:
    """p and log(p) of the likely column are 1 and 0 in fp32, but the entropy is not 0."""
    if not kernel_serves(device, torch.float32):
        pytest.skip("the chunked fallback goes through torch's log_softmax, which loses it")
    logits = torch.zeros(1, 64, device=device)
    logits[0, 20] = gap
    others = 63 * math.exp(-gap)
    expected = math.log1p(others) + gap * others / (1 + others)
    assert rl_logp.fused_entropy(logits).item() == pytest.approx(expected, rel=3e-7, abs=0)


@every_dtype
@pytest.mark.parametrize("of_shards", [False, True], ids=["whole", "shards"])
def test_a_gradient_overflows_where_the_result_does(
    device: str, dtype: torch.dtype, of_shards: bool
) -> None:
    """grad_entropy * (mean - y) is beyond fp32, times p it is not."""
    row = torch.tensor([[1.0, 2.0, 3.0, 0.5]], device=device).to(dtype)
    upstream = torch.full((1,), 3e38, device=device)
    leaf = row.float().requires_grad_()  # fp16 could not hold it
    score = rl_logp.vocab_parallel_entropy if of_shards else rl_logp.fused_entropy
    (dlogits,) = torch.autograd.grad(score(leaf), leaf, upstream)
    exact = reference(
        row.float(), torch.tensor([-1], device=device), grad_entropy=upstream.double()
    ).dlogits
    assert bool(dlogits.isfinite().all())
    torch.testing.assert_close(dlogits.double(), exact.double(), rtol=2e-6, atol=0)


def test_an_ignored_row_has_its_entropy_and_the_entropys_gradient(device: str) -> None:
    case = sample((9, 33), torch.float32, device)
    target = torch.tensor([-100, 33, 2**32 + 5] * 3, device=device)
    upstream = case.grad_lse.float()
    assert_accurate(case.logits, target, None, case.grad_logp, upstream)
    result = call_with_entropy(case.logits, target, None, case.grad_logp, None, upstream)
    assert bool((result.logp == 0).all())
    assert bool((result.entropy > 0).all())
    assert torch.equal(result.dlogits.any(-1), upstream != 0)
    # A NaN that flows to logp alone does not reach it.
    nan = torch.full_like(case.grad_logp, torch.nan)
    other = call_with_entropy(case.logits, target, None, nan, None, upstream)
    assert_same_bits(other, result, "an upstream gradient of NaN for logp")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("of_shards", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("held", [0.0, torch.nan, INF, -INF], ids=str)
@pytest.mark.parametrize("upstream", [1.0, torch.nan, INF], ids=str)
def test_nothing_comes_of_ignored_rows_where_none_is_asked_for(
    device: str, dtype: torch.dtype, of_shards: bool, held: float, upstream: float
) -> None:
    if of_shards and dtype == torch.float64:
        pytest.skip("fp64 has no states")
    case = sample((9, 33), dtype, device)
    case.target[::3] = torch.tensor([-100, 33, 2**32 + 5], device=device)
    ignored = (case.target < 0) | (case.target >= 33)
    case.logits[ignored] += held
    leaf = case.logits.requires_grad_()
    grads = (case.grad_logp, case.grad_logp.flip(0), case.grad_lse)

    def score(all_rows: bool) -> list[Tensor]:
        if of_shards:
            rows = (leaf, case.target, case.temperature)
            results = _shard.score(*rows, None, 0, 33, all_rows, with_entropy=True)
        else:
            results = rl_logp.fused_logp_entropy(
                leaf,
                case.target,
                temperature=case.temperature,
                return_lse=True,
                entropy_of_ignored=all_rows,
            )
        given = [g.masked_fill(ignored, 0 if all_rows else upstream) for g in grads]
        return [*results, *torch.autograd.grad(results, leaf, given)]

    names = EntropyResult._fields
    for name, actual, expected in zip(names, score(False), score(True), strict=True):
        assert bool((actual[ignored] == 0).all()), name
        assert_bitwise_equal(actual[~ignored].detach(), expected[~ignored].detach(), name)


@every_dtype
def test_a_kernel_does_not_read_ignored_rows_where_none_is_asked_for(
    device: str, dtype: torch.dtype
) -> None:
    if not kernel_serves(device, dtype):
        pytest.skip("the chunked fallback reads every row")
    case = sample((9, 33), dtype, device)
    case.logits[4::5] = torch.nan
    for result in OPS.fused_logp_entropy_forward(*case[:3], False, False):
        assert bool((result[4::5] == 0).all())


def test_ignored_rows_are_left_out_over_the_logits_too(device: str) -> None:
    case = sample((9, 33), torch.float32, device)
    case.logits[4::5] = torch.nan
    dlogits = []
    for inplace_backward in (False, True):
        leaf = case.logits.detach().requires_grad_()
        _, entropy = rl_logp.fused_logp_entropy(
            leaf * 1, case.target, entropy_of_ignored=False, inplace_backward=inplace_backward
        )
        dlogits += torch.autograd.grad(entropy, leaf, case.grad_logp)
    assert bool((dlogits[0][4::5] == 0).all())
    assert_bitwise_equal(dlogits[1], dlogits[0], "over the logits")


@every_dtype
@pytest.mark.parametrize("form", ["none", "number", "0-dim", "per row"])
@pytest.mark.parametrize("shape", [(257,), (7, 257), (2, 0, 257), (3, 5, 33)], ids=str)
def test_fused_entropy_has_the_bits_of_fused_logp_entropy(
    device: str, dtype: torch.dtype, form: str, shape: tuple[int, ...]
) -> None:
    case = sample(shape, dtype, device)
    temperature: Any = {
        "none": 1.0,
        "number": 0.7,
        "0-dim": torch.tensor(0.7, device=device),
        "per row": case.temperature,
    }[form]
    leaf = case.logits.requires_grad_()
    upstream = case.grad_lse.float()
    ignored = torch.full_like(case.target, -100)
    logp, entropy = rl_logp.fused_logp_entropy(leaf, case.target, temperature=temperature)
    alone = rl_logp.fused_entropy(leaf, temperature=temperature)
    assert alone.dtype == torch.float32
    assert alone.shape == case.target.shape
    assert_bitwise_equal(alone.detach(), entropy.detach(), "entropy")
    _, of_ignored = rl_logp.fused_logp_entropy(leaf, ignored, temperature=temperature)
    assert_bitwise_equal(alone.detach(), of_ignored.detach(), "entropy of ignored rows")
    actual, expected = (torch.autograd.grad(out, leaf, upstream)[0] for out in (alone, of_ignored))
    assert_bitwise_equal(actual, expected, "dlogits")
    assert_bitwise_equal(
        logp.detach(), rl_logp.fused_logp(leaf, case.target, temperature=temperature).detach()
    )


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_lse_beside_them_has_the_bits_of_fused_logp(device: str, dtype: torch.dtype) -> None:
    case = sample((3, 5, 33), dtype, device)
    leaf = case.logits.requires_grad_()
    options: dict[str, Any] = {"temperature": case.temperature}
    results = rl_logp.fused_logp_entropy(leaf, case.target, return_lse=True, **options)
    logp, lse = rl_logp.fused_logp(leaf, case.target, return_lse=True, **options)
    _, entropy = rl_logp.fused_logp_entropy(leaf, case.target, **options)
    expected = {"logp": logp, "entropy": entropy, "lse": lse}
    for result, (name, right) in zip(results, expected.items(), strict=True):
        assert_bitwise_equal(result.detach(), right.detach(), name)
    # Its gradient alone is fused_logp's, and beside the others' it is that of the operator.
    actual, expected = (
        torch.autograd.grad(r, leaf, case.grad_lse, retain_graph=True)[0] for r in (results[2], lse)
    )
    assert_bitwise_equal(actual, expected, "dlogits of lse")
    grad_entropy = case.grad_lse.to(logp.dtype)
    (dlogits,) = torch.autograd.grad(results, leaf, [case.grad_logp, grad_entropy, case.grad_lse])
    assert_bitwise_equal(dlogits, call_with_entropy(*case).dlogits, "dlogits of all")


def test_an_entropy_that_is_only_looked_at_costs_nothing_in_the_backward(device: str) -> None:
    case = sample((9, 33), torch.bfloat16, device)
    leaf = case.logits.requires_grad_()
    with OperatorsSeen() as operators:
        logp, entropy = rl_logp.fused_logp_entropy(leaf, case.target)
        entropy.detach().mean()
        logp.sum().backward()
    assert OPS.fused_logp_backward.default in operators.seen
    assert OPS.fused_logp_entropy_backward.default not in operators.seen


def test_no_operator_looks_at_the_values_from_the_host(device: str) -> None:
    case = sample((9, 33), torch.bfloat16, device)
    leaf = case.logits.requires_grad_()
    with OperatorsSeen() as operators:
        logp, entropy = rl_logp.fused_logp_entropy(leaf, case.target)
        (logp.sum() + entropy.sum() + rl_logp.fused_entropy(leaf).sum()).backward()
    assert OPS.fused_logp_entropy_backward.default in operators.seen
    assert not [op for op in operators.seen if waits(op)]


# --- memory and inputs ----------------------------------------------------------------------------
def forward(case: Sample) -> tuple[Tensor, ...]:
    return OPS.fused_logp_entropy_forward(case.logits, case.target, case.temperature)


def backward(case: Sample, lse: Tensor, mean: Tensor) -> Tensor:
    g = case.grad_logp
    vocab_size = case.logits.shape[-1]
    return OPS.fused_logp_entropy_backward(g, g, None, *case[:3], lse, mean, 0, vocab_size)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(16, 32, 1024), (512, 1023), (2**16, 1), (2**16, 7)], ids=str)
def test_the_fallback_stays_within_its_workspace(
    device: str, dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel_serves(device, dtype):
        pytest.skip("a kernel serves it and has no workspace")
    monkeypatch.setattr(chunked, "WORKSPACE_ELEMENTS", WORKSPACE)
    case = sample(shape, dtype, device)
    results: list[tuple[Tensor, ...]] = []
    peak = peak_bytes(device, lambda: results.append(forward(case)))
    outputs = results.pop()
    assert peak <= 4 * WORKSPACE + sum(out.nbytes for out in outputs) + 4096
    peak = peak_bytes(device, lambda: backward(case, *outputs[2:]))
    assert peak <= 4 * WORKSPACE + case.logits.nbytes + 4096


@every_dtype
def test_a_kernel_allocates_its_results_alone(device: str, dtype: torch.dtype) -> None:
    if not kernel_serves(device, dtype):
        pytest.skip(f"the chunked fallback serves {dtype} on {device}")
    case = sample((64, 50257), dtype, device)
    results: list[tuple[Tensor, ...]] = []
    assert peak_bytes(device, lambda: results.append(forward(case))) <= 2**16, "O(N), whatever V"
    outputs = results.pop()
    dlogits_bytes = -(-case.logits.nbytes // 512) * 512  # the allocator's step
    assert peak_bytes(device, lambda: backward(case, *outputs[2:])) <= dlogits_bytes


@pytest.mark.parametrize("chunk_rows", CHUNK_ROWS)
@every_dtype
def test_the_chunks_of_the_fallback_do_not_reach_the_bits(
    device: str, dtype: torch.dtype, chunk_rows: int
) -> None:
    case = sample((2, 65, 259), dtype, device)
    rows = (case.target, case.temperature)
    whole: tuple[Tensor, ...] = ()
    for cut in (None, chunk_rows):
        logp, entropy = (torch.full_like(case.grad_logp, 7) for _ in range(2))
        lse, mean = (torch.full_like(case.grad_lse, 7) for _ in range(2))
        dlogits = torch.full_like(case.logits, 7)
        chunked.forward(case.logits, *rows, logp, lse, cut, entropy, mean)
        chunked.backward(
            *case[3:], case.logits, *rows, lse, 0, 259, dlogits, cut,
            grad_entropy=case.grad_logp, mean=mean,
        )  # fmt: skip
        results = (logp, entropy, lse, mean, dlogits)
        for actual, expected in zip(results, whole or results, strict=True):
            assert_bitwise_equal(actual, expected, f"chunks of {chunk_rows}")
        whole = results


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
def test_nothing_is_written_but_the_results(device: str, dtype: torch.dtype, layout: str) -> None:
    case = sample((3, 5, 33), dtype, device)
    case = case._replace(logits=relaid(case.logits, layout))
    before = [whole_storage(t).clone() for t in case]
    leaf = case.logits.requires_grad_()
    logp, entropy, lse, _ = OPS.fused_logp_entropy_forward(leaf, *case[1:3])
    outputs, grads = [logp, entropy, lse], [case.grad_logp, case.grad_logp, case.grad_lse]
    first, second = (
        torch.autograd.grad(outputs, leaf, grads, retain_graph=True)[0] for _ in range(2)
    )
    assert_bitwise_equal(first, second, "the second pass")
    assert first.data_ptr() != second.data_ptr()
    for name, tensor, copy in zip(Sample._fields, case, before, strict=True):
        assert_bitwise_equal(whole_storage(tensor), copy, name)


# --- gradients ------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(5,), (1, 1), (4, 7), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7, "per row"])
def test_the_gradients_in_fp64(device: str, shape: tuple[int, ...], temperature: Any) -> None:
    case = sample(shape, torch.float64, device)
    scale = case.temperature if temperature == "per row" else temperature
    leaf = case.logits.requires_grad_()

    def both(logits: Tensor) -> Any:
        return rl_logp.fused_logp_entropy(logits, case.target, temperature=scale)

    def alone(logits: Tensor) -> Tensor:
        return rl_logp.fused_entropy(logits, temperature=scale)

    def with_lse(logits: Tensor) -> Any:
        return OPS.fused_logp_entropy_forward(logits, case.target, None)[:3]

    for function in (both, alone, with_lse):
        assert torch.autograd.gradcheck(function, (leaf,))


def test_no_gradient_flows_towards_the_mean(device: str) -> None:
    case = sample((3, 5), device=device)
    *_, mean = OPS.fused_logp_entropy_forward(case.logits.requires_grad_(), case.target, None)
    message = (
        "fused_logp: expected no gradient towards mean, which is not differentiable, got one:"
        " detach it, or differentiate lse - entropy"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        mean.sum().backward()


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fused_logp_entropy": lambda x, t: torch.stack(rl_logp.fused_logp_entropy(x, t)),
    "fused_logp_entropy, return_lse": lambda x, t: torch.stack(
        [result.float() for result in rl_logp.fused_logp_entropy(x, t, return_lse=True)]
    ),
    "fused_logp_entropy, entropy_of_ignored": lambda x, t: torch.stack(
        rl_logp.fused_logp_entropy(x, t, entropy_of_ignored=False)
    ),
    "fused_entropy": lambda x, t: rl_logp.fused_entropy(x),
    "vocab_parallel_entropy": lambda x, t: rl_logp.vocab_parallel_entropy(x),
    "vocab_parallel_logp_entropy": (
        lambda x, t: torch.stack(rl_logp.vocab_parallel_logp_entropy(x, t))
    ),
}
every_function = pytest.mark.parametrize("score", SCORES.values(), ids=SCORES)


@every_function
def test_a_second_derivative_is_an_error(device: str, score: Callable) -> None:
    case = sample((3, 5), device=device)
    leaf = case.logits.requires_grad_()
    (grad,) = torch.autograd.grad(score(leaf, case.target).sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^fused_logp: expected to be differentiated once"):
        grad.square().sum().backward()


@every_function
def test_transforms_that_do_not_work_say_so(device: str, score: Callable) -> None:
    case = sample((3, 5), device=device)
    with pytest.raises(NotImplementedError, match=r"^fused_logp: .* got a torch\.func transform"):
        torch.func.grad(lambda x: score(x, case.target).sum())(case.logits)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(case.logits, torch.ones_like(case.logits))
        with pytest.raises(NotImplementedError, match=r"^fused_logp: .* got a dual tensor"):
            score(dual, case.target)


@every_function
def test_vmap(device: str, score: Callable) -> None:
    case = sample((4, 3, 5), device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # no batching rule for the pieces of shards
        actual = torch.vmap(score, out_dims=-2)(*case[:2])
    assert_bitwise_equal(actual, score(*case[:2]), "vmap")


@pytest.mark.parametrize("name", [name for name in SCORES if name.startswith("fused")])
def test_vmap_over_no_samples(device: str, name: str) -> None:
    """Of shards torch refuses it: their operators have no batching rule."""
    logits, target = torch.zeros(1, 3, 5, device=device), torch.zeros(1, 3, device=device).long()
    of_one = torch.vmap(SCORES[name])(logits, target)
    actual = torch.vmap(SCORES[name])(logits[:0], target[:0])
    assert actual.shape == (0, *of_one.shape[1:])


@pytest.mark.parametrize("logits_dim", [0, 1, -1, None], ids=str)
@pytest.mark.parametrize("temperature", ["none", "shared", "one a sample", "per row"])
def test_vmap_of_an_entropy_alone(device: str, logits_dim: int | None, temperature: str) -> None:
    case = sample((4, 3, 5), device=device)
    scale, dim = {
        "none": (None, None),
        "shared": (case.temperature[0], None),
        "one a sample": (case.temperature[:, 0], 0),
        "per row": (case.temperature.t(), 1),
    }[temperature]
    if logits_dim is None and dim is None:
        pytest.skip("vmap wants one batched argument")
    logits = case.logits[0] if logits_dim is None else case.logits.movedim(0, logits_dim)
    actual = torch.vmap(OPS.fused_entropy, in_dims=(logits_dim, dim))(logits, scale)
    one_by_one = [
        OPS.fused_entropy(
            case.logits[0 if logits_dim is None else i],
            None if scale is None else scale if dim is None else scale.select(dim, i),
        )
        for i in range(4)
    ]
    assert_bitwise_equal(actual, torch.stack(one_by_one), temperature)


# --- errors ---------------------------------------------------------------------------------------
def test_more_columns_than_a_kernel_counts(device: str) -> None:
    if not kernel_serves(device, torch.bfloat16):
        pytest.skip("the chunked fallback counts nothing")
    logits = torch.zeros(1, dtype=torch.bfloat16, device=device).expand(1, 2**30 + 1)
    with pytest.raises(ValueError, match=r"^fused_logp: expected at most 2\^30 columns for an"):
        rl_logp.fused_entropy(logits)


def test_a_vocabulary_of_more_columns_than_states_count(device: str) -> None:
    logits, target = torch.zeros(1, 16, device=device), torch.zeros(1, device=device).long()
    message = f"^fused_logp: expected at most 2\\^30 columns for an entropy, got {2**30 + 1}$"
    with pytest.raises(ValueError, match=message):
        OPS.fused_logp_entropy_partial(logits, target, None, 0, 2**30 + 1)
    states = OPS.fused_logp_entropy_partial(logits, target, None, 0, 2**30).unsqueeze(0)
    OPS.fused_logp_entropy_combine(states, target, 2**30)
    with pytest.raises(ValueError, match=message):
        OPS.fused_logp_entropy_combine(states, target, 2**30 + 1)
    with FakeTensorMode() as mode:  # a compiler is told so when it traces
        logits, target, states = map(mode.from_tensor, (logits, target, states))
        with pytest.raises(ValueError, match=message):
            OPS.fused_logp_entropy_partial(logits, target, None, 0, 2**30 + 1)
        with pytest.raises(ValueError, match=message):
            OPS.fused_logp_entropy_combine(states, target, 2**30 + 1)
        with pytest.raises(ValueError, match=message):
            OPS.fused_logp_entropy_shard(logits, target, None, states, 0, 2**30 + 1)


@pytest.mark.parametrize("name", ["grad_entropy", "mean"])
def test_what_the_backward_takes(device: str, name: str) -> None:
    case = sample((3, 5), device=device)
    *_, lse, mean = forward(case)
    right = {"grad_entropy": case.grad_logp, "mean": mean}

    def attempt(value: Tensor) -> None:
        given = {**right, name: value}
        OPS.fused_logp_entropy_backward(
            None, given["grad_entropy"], None, *case[:3], lse, given["mean"], 0, 5
        )

    attempt(right[name])
    expected, got = ("float32", "float64") if name == "grad_entropy" else ("float64", "float32")
    message = f"^fused_logp: expected {name} of dtype {expected}, got {got}$"
    with pytest.raises(TypeError, match=message):
        attempt(right[name].to(getattr(torch, got)))
    with pytest.raises(ValueError, match=f"^fused_logp: expected {name} of shape \\(3,\\), the"):
        attempt(right[name][:2])
    with pytest.raises(ValueError, match=f"^fused_logp: expected {name} on {case.logits.device}"):
        attempt(right[name].to("meta"))


@every_function
def test_a_kernel_that_is_required_and_not_there(
    score: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_library, "_loaded", {})
    logits, target = torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)
    score(logits, target)
    for require in (
        lambda: rl_logp.fused_logp_entropy(logits, target, require_kernel=True),
        lambda: rl_logp.fused_entropy(logits, require_kernel=True),
        lambda: rl_logp.vocab_parallel_logp_entropy(logits, target, require_kernel=True),
        lambda: rl_logp.vocab_parallel_entropy(logits, require_kernel=True),
    ):
        with pytest.raises(RuntimeError, match="expected a compiled kernel"):
            require()


def test_a_temperature_that_is_wrong(device: str) -> None:
    logits = torch.zeros(2, 5, device=device, requires_grad=True)
    with pytest.raises(ValueError, match="expected temperature > 0"):
        rl_logp.fused_entropy(logits, temperature=0.0)
    with pytest.raises(ValueError, match="expected a temperature that does not require grad"):
        rl_logp.fused_entropy(logits, temperature=torch.ones(2, device=device, requires_grad=True))
    with pytest.raises(ValueError, match="expected a 0-dim temperature or one of shape"):
        rl_logp.fused_entropy(logits, temperature=torch.ones(3, device=device))


# --- rows -----------------------------------------------------------------------------------------
@settings(max_examples=100)
@given(arguments=all_arguments())
def test_any_row_alone_has_its_bits(device: str, arguments: Arguments) -> None:
    """C1 at its widest: whatever a row and its neighbours hold."""
    args = arguments.map(lambda t: t.to(device))
    whole = call_with_entropy(*args)
    for row in range(args.target.shape[0]):
        one = call_with_entropy(*args.map(lambda t, row=row: t[row] if t.dim() else t))
        for name, alone, among in zip(one._fields, one, rows_of(whole, row), strict=True):
            # Which NaN an operation makes may depend on the instruction that made it.
            assert_bitwise_equal(alone, among, f"{name} of row {row}", any_nan=True)
