"""The examples that put the op into other libraries run, and take their functions' places.

Those that need TRL or Transformers (examples/requirements.txt) are skipped where these are missing.
Nothing of the kind is imported or replaced by `import rl_logp`.
"""

import importlib
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from calls import kernel_serves

import rl_logp
from rl_logp.testing import assert_bitwise_equal

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("trl", "transformers", "verl", "megatron", "accelerate", "datasets")


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module(name)


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("trl", reason="needs TRL: examples/requirements.txt")
    return example("trl_patch", monkeypatch)


def test_the_package_imports_none_of_them() -> None:
    code = f"import sys, rl_logp; print([m for m in {LIBRARIES} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "[]", done.stderr


# --- verl -----------------------------------------------------------------------------------------
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_verl_runs_and_two_processes_change_no_bit() -> None:
    output = run("verl_logprobs.py", "--rows", "64")
    assert re.search(r"^rl_logp +0 of 64 +0\.0e\+00 ", output, re.MULTILINE), output


@pytest.mark.parametrize("divided", [False, True], ids=["temperature=", "divided in place"])
def test_verl_has_its_gradient_in_place(monkeypatch: pytest.MonkeyPatch, divided: bool) -> None:
    """What a step holds is what docs/integration.md says, and its gradient has the same bits."""
    if not kernel_serves("cpu", torch.bfloat16):
        pytest.skip("the chunked fallback serves bfloat16 on a CPU, and has a workspace")
    score = example("verl_logprobs", monkeypatch).logprobs_from_logits
    peak_bytes = example("op_cost", monkeypatch).peak_bytes
    hidden = torch.randn(1, 64, 4).bfloat16().requires_grad_()
    weight = torch.randn(8192, 4).bfloat16()
    labels = torch.randint(8192, (64,))

    def step(**option: bool) -> None:
        hidden.grad = None
        logits = F.linear(hidden, weight).squeeze(0)
        temperature = 0.7
        if divided:
            logits.div_(temperature)
            temperature = 1.0
        score(logits, labels, temperature=temperature, **option).sum().backward()

    peaks, grads = [], []
    for option in ({"inplace_backward": False}, {}):  # in place by default, as verl's own
        step(**option)
        hidden.grad = None
        peaks.append(round(peak_bytes(partial(step, **option), "cpu") / (64 * 8192 * 2)))
        grads.append(hidden.grad)
    assert peaks == ([5, 5] if divided else [2, 1])
    assert_bitwise_equal(grads[1], grads[0], "the gradient of the hidden states")


# --- TRL ------------------------------------------------------------------------------------------
def test_trl_trains_with_the_op() -> None:
    pytest.importorskip("trl", reason="needs TRL: examples/requirements.txt")
    output = run("trl_grpo.py", "--steps", "2")
    apart = re.findall(r"(\S+) apart at most", output)
    assert len(apart) == 2, output
    assert all(float(number) < 1e-5 for number in apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_token_of_a_row_or_several_score_alike(dtype: torch.dtype, patch: Any) -> None:
    logits = torch.randn(3, 5, 1000, dtype=dtype)
    index = torch.randint(1000, (3, 5, 4))
    several = patch.selective_log_softmax(logits, index, temperature=0.7)
    for k in range(4):
        one = patch.selective_log_softmax(logits, index[..., k], temperature=0.7)
        # The same lse in fp64; the difference from the target's logit is rounded once to fp32.
        assert_bitwise_equal(several[..., k], one)


def test_rows_masked_are_zero_and_get_no_gradient(patch: Any) -> None:
    logits = torch.randn(2, 3, 100, requires_grad=True)
    index, mask = torch.randint(100, (2, 3)), torch.tensor([[1, 0, 1], [0, 1, 1]])
    logp, entropy = patch.selective_log_softmax_and_entropy(logits, index, row_mask=mask)
    assert not logp[mask == 0].any()
    assert not entropy[mask == 0].any()
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad is not None
    assert not logits.grad[mask == 0].any()
    assert logits.grad[mask == 1].any(-1).all()


@pytest.mark.parametrize("wanted", [True, False], ids=["a loss", "a metric"])
def test_an_entropy_is_that_of_the_package(wanted: bool, patch: Any) -> None:
    logits = torch.randn(2, 3, 100, dtype=torch.bfloat16, requires_grad=True)
    index = torch.randint(100, (2, 3))
    logp, entropy = patch.selective_log_softmax_and_entropy(
        logits, index, entropy_requires_grad=wanted, temperature=0.7
    )
    assert_bitwise_equal(entropy.detach(), rl_logp.fused_entropy(logits, temperature=0.7).detach())
    assert_bitwise_equal(logp.detach(), patch.selective_log_softmax(logits, index, 0.7).detach())
    assert entropy.requires_grad == wanted
    alone = patch.entropy_from_logits(logits / 0.5)
    assert_bitwise_equal(alone.detach(), rl_logp.fused_entropy(logits, temperature=0.5).detach())


def test_a_module_is_as_before_after_the_patch(patch: Any) -> None:
    grpo = importlib.import_module("trl.trainer.grpo_trainer")
    own = grpo.selective_log_softmax

    def train() -> None:
        with patch.patched(grpo):
            assert grpo.selective_log_softmax is patch.selective_log_softmax
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert grpo.selective_log_softmax is own


def test_a_module_that_scores_no_logits_is_refused(patch: Any) -> None:
    with (
        pytest.raises(ValueError, match="scores logits, got json"),
        patch.patched(importlib.import_module("json")),
    ):
        pass


# --- Transformers ---------------------------------------------------------------------------------
def test_transformers_trains_with_the_op() -> None:
    pytest.importorskip("transformers", reason="needs Transformers: examples/requirements.txt")
    output = run("transformers_sft.py")
    lines = re.findall(r"^rl_logp, compiled.*? \S+ +\S+ +(\S+) +\S+ +\S+$", output, re.MULTILINE)
    assert len(lines) == 2, output
    assert all(float(apart) < 1e-4 for apart in lines)


@pytest.mark.parametrize("shifted", [False, True], ids=["labels", "shift-labels"])
@pytest.mark.parametrize("count", [None, 17], ids=["mean", "items-in-batch"])
def test_the_loss_is_that_of_transformers(
    shifted: bool, count: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("transformers", reason="needs Transformers")
    theirs = importlib.import_module("transformers.loss.loss_utils").ForCausalLMLoss
    assert library is not None
    ours = example("transformers_sft", monkeypatch).causal_lm_loss
    logits = torch.randn(2, 6, 50)
    labels = torch.randint(50, (2, 6))
    labels[0, :3] = -100
    given: dict[str, Any] = {"num_items_in_batch": count}
    if shifted:
        given["shift_labels"] = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    expected = theirs(logits, labels, 50, **given)
    torch.testing.assert_close(ours(logits, labels, 50, **given), expected, rtol=1e-6, atol=0.0)
