"""C4: a temperature has the bits of an fp32 division of the logits by it, correctly rounded."""

import pytest
import torch
from calls import DTYPES, Call, call, exact, kernel_serves, sample
from torch import Tensor

import rl_logp
from rl_logp.testing import assert_as_accurate, assert_bitwise_equal

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def divided(logits: Tensor, temperature: Tensor) -> Tensor:
    """What a sampler does: by a tensor, since torch on CUDA multiplies by a number's reciprocal."""
    return logits.float() / (temperature.unsqueeze(-1) if temperature.dim() else temperature)


@every_dtype
@pytest.mark.parametrize("form", ["per row", "0-dim"])
def test_logp_and_lse_have_the_bits_of_divided_logits(
    call: Call, device: str, dtype: torch.dtype, form: str
) -> None:
    case = sample((64, 257), dtype, device)
    temperature = case.temperature if form == "per row" else case.temperature[0]
    actual = call(case.logits, case.target, temperature)
    expected = call(divided(case.logits, temperature), case.target)
    for name in expected._fields[:-1]:  # all but dlogits
        assert_bitwise_equal(getattr(actual, name), getattr(expected, name), name)
    # These values can tell a division from a multiplication by the reciprocal.
    scaled = case.logits.float() * (1 / temperature).reshape(-1, 1)
    assert not torch.equal(call(scaled, case.target).logp, expected.logp)


@every_dtype
@pytest.mark.parametrize("temperature", [0.7, 0.1, 1.3, 3, 1e-3])
def test_a_number_has_the_bits_of_its_tensor(
    device: str, dtype: torch.dtype, temperature: float
) -> None:
    case = sample((64, 257), dtype, device)
    tensor = torch.tensor(temperature, dtype=torch.float32, device=device)
    expected = call(divided(case.logits, tensor), case.target).logp
    actual = rl_logp.fused_logp(case.logits, case.target, temperature=temperature)
    assert_bitwise_equal(actual, expected, "logp")


@every_dtype
def test_a_temperature_of_one_changes_no_bit(call: Call, device: str, dtype: torch.dtype) -> None:
    case = sample((64, 257), dtype, device)
    expected = call(case.logits, case.target, None, *case[3:])
    for temperature in (torch.ones((), device=device), torch.ones(64, device=device)):
        actual = call(case.logits, case.target, temperature, *case[3:])
        for name, a, e in zip(actual._fields, actual, expected, strict=True):
            assert_bitwise_equal(a, e, name)


@pytest.mark.parametrize(
    ("value", "temperature"),
    [("0x1.4p-126", 0.7), ("0x1.0cp-126", 0.9), ("0x1.12p-126", 1.3), ("-0x1.4p-126", 0.7)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 40])
def test_a_largest_value_whose_quotient_is_subnormal(
    device: str, dtype: torch.dtype, value: str, temperature: float, vocab_size: int
) -> None:
    """Its quotient must be the same number wherever it is computed, or it counts twice."""
    logits = torch.full((3, vocab_size), -torch.inf, dtype=dtype, device=device)
    logits[:, vocab_size // 2] = float.fromhex(value)
    target = torch.full((3,), vocab_size // 2, device=device)
    tensor = torch.tensor(temperature, dtype=torch.float32, device=device)
    actual = call(logits, target, tensor)
    assert torch.equal(actual.logp, torch.zeros_like(actual.logp))
    assert actual.lse.abs().max() < 1e-37
    assert not actual.dlogits.any()


@every_dtype
def test_the_gradient_is_that_of_the_divided_logits_over_the_temperature(
    device: str, dtype: torch.dtype
) -> None:
    case = sample((64, 257), dtype, device)
    actual = call(*case)
    of_y = call(divided(case.logits, case.temperature), case.target, None, *case[3:])
    chained = (of_y.dlogits / case.temperature.unsqueeze(-1)).to(dtype)
    if not kernel_serves(device, dtype):
        assert_bitwise_equal(actual.dlogits, chained, "the fallback's dlogits")
    assert_as_accurate(actual.dlogits, chained, exact(case).dlogits, "dlogits")


def test_none_is_a_temperature_of_1(device: str) -> None:
    logits, target, *_ = sample((9, 33), device=device)
    for score in (rl_logp.fused_logp, rl_logp.vocab_parallel_logp):
        actual = score(logits, target, temperature=None)
        assert_bitwise_equal(actual, score(logits, target), "logp")
    actual = rl_logp.FusedLogp(temperature=None)(logits, target)
    assert_bitwise_equal(actual, rl_logp.fused_logp(logits, target), "of a module")
    actual = rl_logp.fused_entropy(logits, temperature=None)
    assert_bitwise_equal(actual, rl_logp.fused_entropy(logits), "entropy")
