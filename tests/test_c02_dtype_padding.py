"""C2: a row's bits do not change with the input dtype, nor with columns of -inf at the end."""

import pytest
import torch
from calls import DTYPES, LOW_DTYPES, Call, assert_same_bits, kernel_serves, sample


@pytest.mark.parametrize("vocab_size", [1, 7, 257, 2051])
@pytest.mark.parametrize("dtype", LOW_DTYPES, ids=str)
def test_equal_values_in_another_dtype_have_the_same_bits(
    call: Call, device: str, dtype: torch.dtype, vocab_size: int
) -> None:
    """The fallback keeps this too: it computes in fp32 whatever comes."""
    case = sample((11, vocab_size), dtype, device)
    low, high = call(*case), call(case.logits.float(), *case[1:])
    rounded_once = high._replace(dlogits=high.dlogits.to(dtype))
    assert_same_bits(low, rounded_once, "upcast")


@pytest.mark.parametrize("padding", [1, 3, 16, 61])
@pytest.mark.parametrize("vocab_size", [1, 7, 257, 2051])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_of_minus_infinity_change_nothing(
    call: Call, device: str, dtype: torch.dtype, vocab_size: int, padding: int
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
    trimmed = actual._replace(dlogits=actual.dlogits[:, :vocab_size])
    assert_same_bits(trimmed, expected, "padded")
    assert not actual.dlogits[:, vocab_size:].any(), "the padding has a gradient"
