"""C13: running out of memory surfaces as torch says it, and the next call works."""

import pytest
import torch
from calls import Call, assert_same_bits, call_with_entropy, sample

OPS = torch.ops.rl_logp


def test_too_many_rows_for_any_machine(call: Call, device: str) -> None:
    case = sample((3, 5), torch.bfloat16, device)
    before = call(*case)
    # 2^50 rows in ten bytes of memory; their results would take more than can be addressed.
    logits = case.logits[:1].expand(2**50, 5)
    target = case.target[:1].expand(2**50)
    # The CPU's allocator raises a plain RuntimeError.
    error = torch.OutOfMemoryError if device == "cuda" else RuntimeError
    with pytest.raises(error, match="memory"):
        call(logits, target)
    assert_same_bits(call(*case), before, "after running out of memory")


@pytest.mark.parametrize("with_entropy", [False, True], ids=["logp", "logp and entropy"])
def test_too_large_a_gradient_for_any_machine(device: str, with_entropy: bool) -> None:
    """The forward's results are small; the gradient of a few long rows is not."""
    case = sample((3, 5), torch.bfloat16, device)
    before = call_with_entropy(*case)
    logits = torch.zeros(1, device=device, dtype=torch.bfloat16).expand(1, 2**55)
    one = torch.ones(1, device=device)
    error = torch.OutOfMemoryError if device == "cuda" else RuntimeError
    args = (logits, one.long(), None, one.double())

    def backward() -> None:
        if with_entropy:
            OPS.fused_logp_entropy_backward(one, one, None, *args, one.double(), 0, 2**55)
        else:
            OPS.fused_logp_backward(one, None, *args, 0, 2**55)

    with pytest.raises(error, match="memory"):
        backward()
    assert_same_bits(call_with_entropy(*case), before, "after running out of memory")
