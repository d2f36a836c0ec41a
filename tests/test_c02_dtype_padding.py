"""C2: a row's bits do not change with the input dtype, nor with columns of -inf at the end."""

import pytest
import torch
from calls import DTYPES, LOW_DTYPES, call, kernel_serves, sample

from rl_logp.testing import assert_bitwise_equal


@pytest.mark.parametrize("vocab_size", [1, 7, 257, 2051])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_equal_values_in_another_dtype_have_the_same_bits(
    device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    """The fallback keeps this too: it computes in fp32 whatever comes."""
    case = sample((11, vocab_size), dtype, device)
    low, high = call(*case), call(case.logits.float(), *case[1:])
    assert_bitwise_equal(low.logp, high.logp, "logp")
    assert_bitwise_equal(low.lse, high.lse, "lse")
    assert_bitwise_equal(low.dlogits, high.dlogits.to(dtype), "dlogits, rounded once")


@pytest.mark.parametrize("padding", [1, 3, 16, 61])
@pytest.mark.parametrize("vocab_size", [1, 7, 257, 2051])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_minus_infinity_change_nothing(
    device: str, dtype: torch.dtype, vocab_size: int, padding: int
) -> None:
    if not kernel_serves(device, dtype):
        pytest.skip(
            f"the chunked fallback serves {dtype} on {device}: the order of torch's fp32 sum"
            " depends on the number of columns; only the kernels' exact sum promises this"
        )
    case = sample((11, vocab_size), dtype, device)
    padded = torch.nn.functional.pad(case.logits, (0, padding), value=-torch.inf)
    # A target of vocab_size is ignored without the padding and a column of -inf with it.
    expected, actual = call(*case), call(padded, *case[1:])
    assert_bitwise_equal(actual.logp, expected.logp, "logp")
    assert_bitwise_equal(actual.lse, expected.lse, "lse")
    assert_bitwise_equal(actual.dlogits[:, :vocab_size].contiguous(), expected.dlogits, "dlogits")
    assert not actual.dlogits[:, vocab_size:].any(), "the padding has a gradient"
