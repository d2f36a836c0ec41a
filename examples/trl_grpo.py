"""TRL's GRPOTrainer, scoring with rl_logp: the real trainer, a tiny random model, made data.

    pip install -r examples/requirements.txt
    python examples/trl_grpo.py

Trains twice from one seed, by TRL's functions and by rl_logp's, then scores the trainer's own
logits both ways, and prints which tokens differ, by how much, and what each way costs.
"""

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import transformers  # pyright: ignore[reportMissingImports]
import trl  # pyright: ignore[reportMissingImports]
import trl_patch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from scoring import compare, served_by
from tokenizers import Tokenizer, models, pre_tokenizers  # pyright: ignore[reportMissingImports]
from torch import Tensor
from trl.trainer import grpo_trainer, utils  # pyright: ignore[reportMissingImports]

VOCAB_SIZE = 32000
TEMPERATURE = 0.7
PROMPTS, GROUP, COMPLETION = 4, 4, 16  # a step: 4 prompts, 4 completions each, of 16 tokens


class Scored(NamedTuple):
    logits: Tensor  # [completions, COMPLETION, VOCAB_SIZE]
    target: Tensor


def new_tokenizer() -> Any:
    """A word for each token, ``w0 w1 ...``."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def new_model() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config)


def small_numbers(completions: list[str], **_: Any) -> list[float]:
    """The reward: the share of words whose number is in the lower half."""
    words = [[word for word in text.split() if word[1:].isdigit()] for text in completions]
    numbers = [[int(word[1:]) for word in row] for row in words]
    return [sum(n < VOCAB_SIZE // 2 for n in row) / max(len(row), 1) for row in numbers]


def train(steps: int, by_rl_logp: bool, folder: str) -> tuple[list[dict[str, float]], float, Any]:
    """What the trainer logged at each step, seconds, and the trainer."""
    arguments = trl.GRPOConfig(
        output_dir=folder, max_steps=steps, logging_steps=1, learning_rate=1e-3, seed=0,
        per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        max_completion_length=COMPLETION, temperature=TEMPERATURE, beta=0.0,
        use_cpu=not torch.cuda.is_available(), bf16=False, report_to=[], save_strategy="no",
        disable_tqdm=True, num_iterations=2,
    )  # fmt: skip
    prompts = [{"prompt": f"w{i} w{i + 7} w{3 * i + 2}"} for i in range(2, 66)]
    trainer = trl.GRPOTrainer(
        model=new_model(), reward_funcs=small_numbers, args=arguments,
        train_dataset=Dataset.from_list(prompts), processing_class=new_tokenizer(),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)  # it prints every step's metrics
    start = time.perf_counter()
    with trl_patch.patched(grpo_trainer) if by_rl_logp else nullcontext():
        trainer.train()
    elapsed = time.perf_counter() - start
    return [line for line in trainer.state.log_history if "loss" in line], elapsed, trainer


def scored_by(trainer: Any) -> Scored:
    """The logits of completions to the first prompts, as the trainer hands them to be scored."""
    caught: list[Scored] = []

    def catch(logits: Tensor, index: Tensor, *_: Any, **__: Any) -> Tensor:
        caught.append(Scored(logits.detach().clone(), index.clone()))
        return torch.zeros(index.shape, device=index.device)

    own, grpo_trainer.selective_log_softmax = grpo_trainer.selective_log_softmax, catch
    try:
        device = trainer.model.device
        tokens = torch.randint(2, VOCAB_SIZE, (PROMPTS * GROUP, 3 + COMPLETION), device=device)
        with torch.no_grad():
            trainer._get_per_token_logps_and_entropies(
                trainer.model, tokens, torch.ones_like(tokens), COMPLETION
            )
    finally:
        grpo_trainer.selective_log_softmax = own
    return caught[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=6, help="of GRPO (default 6)")
    steps = parser.parse_args().steps
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    versions = f"TRL {trl.__version__}, Transformers {transformers.__version__}"
    print(f"{versions}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        before, own_seconds, _ = train(steps, False, folder)
        after, our_seconds, trainer = train(steps, True, folder)
    logits, target = scored_by(trainer)
    print(served_by(logits.device.type, logits.dtype))

    print(f"\n{steps} steps of GRPO, the model's and the sampling's time included")
    print(f"  TRL's functions {own_seconds:.1f} s, rl_logp's {our_seconds:.1f} s")
    for name in ("loss", "grad_norm"):
        pairs = [(line[name], other[name]) for line, other in zip(before, after, strict=True)]
        largest = max(abs(a - b) for a, b in pairs)
        a, b = pairs[-1]
        print(
            f"  {name}: {a:.6g} and {b:.6g} at the last step; at any, {largest:.1e} apart at most"
        )

    ways = {
        "TRL": lambda x, t: utils.selective_log_softmax(x, t, temperature=TEMPERATURE),
        "rl_logp": lambda x, t: trl_patch.selective_log_softmax(x, t, temperature=TEMPERATURE),
    }
    shape = tuple(logits.shape)
    for dtype in (torch.float32, torch.bfloat16):
        title = f"The trainer's logits {shape} in {dtype}, scored outside of it"
        compare(title, ways, logits.to(dtype), target, TEMPERATURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
