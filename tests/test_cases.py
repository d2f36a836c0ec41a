"""CASES: the ways in which other ops that do this job were seen to break, one test or more each."""

import pytest
import torch
from calls import OperatorsSeen, assert_same_bits, call, kernel_serves, rows_of, sample
from torch import Tensor

import rl_logp
from rl_logp import chunked
from rl_logp.testing import assert_bitwise_equal

INF = torch.inf


def gradient(logits: Tensor, target: Tensor, grad: list[float] | None = None) -> Tensor:
    g = None if grad is None else torch.tensor(grad, device=logits.device)
    return call(logits, target, None, g).dlogits


def close(actual: Tensor, expected: list, digits: int = 6) -> None:
    """Equal to the printed value, to the digits that are printed."""
    printed = torch.tensor(expected, dtype=torch.float64, device=actual.device)
    torch.testing.assert_close(actual.double(), printed, rtol=0, atol=0.51 * 10.0**-digits)


def test_case_01_a_whole_tile_of_minus_infinity(device: str) -> None:
    logits = torch.full((1, 100_000), -INF, device=device)
    logits[0, 50_000] = 10
    result = call(logits, torch.tensor([50_000], device=device))
    assert result.logp.tolist() == [0]
    assert result.lse.tolist() == [10]
    assert not result.dlogits.any()


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("rows", "vocab_size", "logp"), [(16400, 131072, -11.783502), (65536, 50257, None)]
)
def test_case_02_offsets_past_two_to_the_31(rows: int, vocab_size: int, logp: float | None) -> None:
    free, _ = torch.cuda.mem_get_info()
    needed = 2 * 2 * rows * vocab_size + 2**31  # logits, gradient, and the fallback's workspace
    if free < needed:
        pytest.skip(f"needs {needed} bytes of GPU memory, {free} are free")
    logits = torch.zeros(rows, vocab_size, dtype=torch.bfloat16, device="cuda")
    target = torch.full((rows,), vocab_size - 1, device="cuda")
    result = call(logits, target)
    expected = -torch.tensor(float(vocab_size), dtype=torch.float64).log().item()
    assert logp is None or abs(expected - logp) < 1e-6
    torch.testing.assert_close(
        result.logp, torch.full_like(result.logp, expected), rtol=1e-7, atol=0
    )
    one_over_v = torch.tensor(-1 / vocab_size, dtype=torch.bfloat16).item()
    for row in (0, rows // 2, -1):
        assert result.dlogits[row, 0].item() == one_over_v
        assert result.dlogits[row, -1].item() == 1
    if vocab_size == 131072:
        assert one_over_v == -(2.0**-17)


def test_case_03_a_slice_of_a_padded_vocabulary(device: str) -> None:
    base = torch.arange(16.0).mul(torch.arange(1.0, 4.0).unsqueeze(-1)).div(10)
    base[:, 10:] = 1e4
    base = base.to(device).requires_grad_()
    logp = rl_logp.fused_logp(base[:, :10], torch.full((3,), 9, device=device))
    close(logp, [-1.893493, -1.562358, -1.299156])
    logp.sum().backward()
    assert base.grad is not None
    assert not base.grad[:, 10:].any()
    assert bool(base.grad[:, :10].all())


def test_case_04_an_expanded_upstream_gradient(device: str) -> None:
    leaf = torch.zeros(64, 7, device=device).requires_grad_()
    rl_logp.fused_logp(leaf, torch.zeros(64, dtype=torch.long, device=device)).sum().backward()
    assert leaf.grad is not None
    close(leaf.grad, [[6 / 7, *[-1 / 7] * 6]] * 64)
    # Other strides of an upstream gradient too.
    case = sample((9, 7), device=device)
    expected = call(*case)
    interleaved = torch.stack([case.grad_logp, torch.full_like(case.grad_logp, 7)], -1)[:, 0]
    assert_same_bits(call(*case._replace(grad_logp=interleaved)), expected, "stride 2")


@pytest.mark.parametrize("before", ["leaf", "tanh"])
def test_case_05_the_backward_leaves_the_logits_alone(device: str, before: str) -> None:
    leaf = torch.randn(7, 11, generator=torch.Generator().manual_seed(0)).to(device)
    leaf.requires_grad_()
    logits = leaf if before == "leaf" else 30 * torch.tanh(leaf / 30)
    logp = rl_logp.fused_logp(logits, torch.arange(7, device=device))
    versions = leaf._version, logits._version
    grads = [torch.autograd.grad(logp.sum(), leaf, retain_graph=True)[0] for _ in range(2)]
    assert_bitwise_equal(grads[1], grads[0], "the second gradient")
    assert (leaf._version, logits._version) == versions


def test_case_06_a_sampled_token_that_is_masked(device: str) -> None:
    logits, target = torch.tensor([[0, 0, -INF]], device=device), torch.tensor([2], device=device)
    assert call(logits, target).logp.tolist() == [-INF]
    close(gradient(logits, target, [1.0]), [[-0.5, -0.5, 1]])
    assert gradient(logits, target, [0.0]).tolist() == [[0, 0, 0]]


def test_case_07_targets_outside_the_vocabulary(device: str) -> None:
    target = torch.tensor([-100, 200], device=device)
    result = call(torch.zeros(2, 200, device=device), target)
    assert result.logp.tolist() == [0, 0]
    assert not result.dlogits.any()
    result = call(torch.full((2, 200), -INF, device=device), target)
    assert result.logp.tolist() == [0, 0]
    assert not result.dlogits.any()


def test_case_08_every_row_has_its_own_upstream_gradient(device: str) -> None:
    target = torch.arange(4, device=device)
    actual = gradient(torch.zeros(4, 4, device=device), target, [1.0, -2.0, 0.0, 0.5])
    g = torch.tensor([1, -2, 0, 0.5], dtype=torch.float64)
    close(actual, (g.unsqueeze(-1) * (torch.eye(4, dtype=torch.float64) - 0.25)).tolist())


@pytest.mark.parametrize("form", ["number", "0-dim", "per row"])
def test_case_09_the_temperature_is_applied_once(device: str, form: str) -> None:
    leaf = torch.tensor([[0.0, 2.0]], device=device).requires_grad_()
    half = torch.tensor([0.5], device=device)
    temperature = {"number": 0.5, "0-dim": half[0], "per row": half}[form]
    logp = rl_logp.fused_logp(leaf, torch.tensor([1], device=device), temperature=temperature)
    close(logp, [-0.018150])
    logp.sum().backward()
    assert leaf.grad is not None
    close(leaf.grad, [[-0.035972, 0.035972]])
    assert leaf.tolist() == [[0, 2]]


def test_case_10_the_temperature_is_not_applied_in_bf16(device: str) -> None:
    logits = torch.tensor([[30, 29.75]], dtype=torch.bfloat16, device=device)
    target = torch.zeros(1, dtype=torch.long, device=device)
    # The contract rounds y = 30 / 0.7 to fp32, which may move it by 2e-6.
    close(rl_logp.fused_logp(logits, target, temperature=0.7), [-0.530436], digits=5)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_case_11_the_sign_on_every_backend(device: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 2, dtype=dtype, device=device)
    logp = rl_logp.fused_logp(logits, torch.zeros(1, dtype=torch.long, device=device))
    close(logp, [-0.693147])
    assert logp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("vocab_size", [1, 7, 151936])
def test_case_12_no_rows(device: str, vocab_size: int) -> None:
    for rows in ((0,), (3, 0), (0, 3)):
        logits = torch.empty(*rows, vocab_size, device=device)
        target = torch.empty(rows, dtype=torch.long, device=device)
        result = call(logits, target, torch.ones(rows, device=device))
        assert result.logp.shape == result.lse.shape == torch.Size(rows)
        assert result.dlogits.shape == torch.Size((*rows, vocab_size))
    later = call(torch.zeros(1, 2, device=device), torch.zeros(1, dtype=torch.long, device=device))
    close(later.logp, [-0.693147])


@pytest.mark.cuda
def test_case_13_nothing_waits_for_the_device() -> None:
    """On a CPU, test_c06_ignored.py shows that no operator looks at a value."""
    case = sample((9, 515), torch.bfloat16, "cuda")
    case = case._replace(target=torch.full_like(case.target, -100))
    call(*case)  # what loads lazily is loaded
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = call(*case._replace(grad_lse=torch.zeros_like(case.grad_lse)))
    finally:
        torch.cuda.set_sync_debug_mode(previous)
    assert not result.logp.any()
    assert not result.dlogits.any()


def test_case_14_no_loop_over_rows(device: str) -> None:
    """In test_c09_memory.py the fallback's operators are counted over several chunks."""
    counts = []
    for rows in (1, 4096):
        assert rows <= chunked.default_chunk_rows(5, torch.float32)  # one chunk
        case = sample((rows, 5), device=device)
        with OperatorsSeen() as operators:
            call(*case)
        counts.append(len(operators.seen))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "vocab_size",
    [257, pytest.param(248320, marks=pytest.mark.cuda)],
)
def test_case_15_recompiles_under_dynamic_shapes(device: str, vocab_size: int) -> None:
    """The graphs themselves are tested in compile_tests."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs):
        graphs.append(graph)
        return graph.forward

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return rl_logp.fused_logp(logits, target).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend=count)
    for rows in (1, 7, 128, 1000):
        if device == "cpu" and vocab_size > 257:
            pytest.skip("248320 columns are for a GPU")
        case = sample((rows, vocab_size), torch.bfloat16, device)
        leaf = case.logits.requires_grad_()
        (actual,) = torch.autograd.grad(compiled(leaf, case.target), leaf)
        assert_bitwise_equal(actual, call(leaf, case.target).dlogits, f"dlogits of {rows} rows")
    assert len(graphs) <= 3


SIZES = sorted({*range(1, 10), *(2**k + d for k in range(4, 8) for d in (-1, 0, 1))})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_case_16_the_micro_batch_does_not_reach_the_bits(device: str, dtype: torch.dtype) -> None:
    alone = sample((1, 2051), dtype, device, seed=1)
    expected = call(*alone)
    for size in SIZES:
        others = sample((size, 2051), dtype, device, seed=2)
        for place in {0, size // 2, size - 1}:
            for tensor, row in zip(others, alone, strict=True):
                tensor[place] = row[0]
            result = call(*others)
            at = rows_of(result, slice(place, place + 1))
            assert_same_bits(at, expected, f"row {place} of {size}")


def test_case_17_columns_that_are_not_adjacent(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(33, 5, generator=generator).to(device).requires_grad_()
    target = torch.tensor([0, 8, 16, 24, 32], device=device)
    rl_logp.fused_logp(leaf.t(), target).sum().backward()
    expected = call(leaf.detach().t().contiguous(), target)
    assert leaf.grad is not None
    assert_bitwise_equal(leaf.grad.t(), expected.dlogits, "dlogits")
    assert_same_bits(call(leaf.detach().t(), target), expected, "transposed")
    one = leaf.detach()[:, :1].expand(33, 7)  # a last dimension of stride 0
    copied = call(one.contiguous(), torch.zeros(33, dtype=torch.long, device=device))
    assert_same_bits(
        call(one, torch.zeros(33, dtype=torch.long, device=device)), copied, "stride 0"
    )


@pytest.mark.parametrize("value", ["3e38", "finfo.min everywhere", "finfo.min mask"])
def test_case_18_the_widest_values(device: str, value: str) -> None:
    smallest = torch.finfo(torch.float32).min
    row = {
        "3e38": [3e38, 0.0],
        "finfo.min everywhere": [smallest] * 4,
        "finfo.min mask": [0.0, smallest],
    }[value]
    logits = torch.tensor([row] * len(row), device=device)
    target = torch.arange(len(row), device=device)
    result = call(logits, target)
    leaf = logits.clone().requires_grad_()
    logp = torch.log_softmax(leaf, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    (dlogits,) = torch.autograd.grad(logp.sum(), leaf)
    torch.testing.assert_close(result.logp, logp.detach(), rtol=1e-7, atol=0)
    torch.testing.assert_close(result.dlogits, dlogits, rtol=1e-6, atol=0)
    if not kernel_serves(device, torch.float32):
        assert_bitwise_equal(result.logp, logp.detach(), "the fallback's logp")
