"""A Transformers causal LM, compiled, with rl_logp in its loss, and sharded by FSDP2.

    pip install -r examples/requirements.txt
    python examples/transformers_sft.py

A tiny random model learns made sequences three times from the same weights: with Transformers'
loss, with rl_logp's (one line: `model.loss_function = causal_lm_loss`) under torch.compile, and
that in two processes. Prints losses, time, peak memory, and which tokens the losses score apart.
"""

import sys
import tempfile
import time
from typing import Any, NamedTuple, Optional

import torch
import torch._inductor.config
import torch.distributed as dist
import torch.nn.functional as F
import transformers  # pyright: ignore[reportMissingImports]
from grpo import compile_backend
from op_cost import peak_bytes
from scoring import compare, served_by
from tabulate import tabulate
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn

import rl_logp

VOCAB_SIZE = 32000
SEQUENCES, TOKENS, STEPS = 8, 64, 8
IGNORED = -100


class Way(NamedTuple):
    ours: bool
    compiled: bool
    processes: int


WAYS = {
    "Transformers' loss": Way(ours=False, compiled=False, processes=1),
    "rl_logp, compiled": Way(ours=True, compiled=True, processes=1),
    "rl_logp, compiled, FSDP2 over 2 processes": Way(ours=True, compiled=True, processes=2),
}


def causal_lm_loss(
    logits: Tensor,
    labels: Optional[Tensor],
    vocab_size: int,
    num_items_in_batch: Any = None,
    shift_labels: Optional[Tensor] = None,
    **_: Any,
) -> Tensor:
    """For `model.loss_function`, with its arguments. Labels outside the vocabulary don't count."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]  # no row of logits is copied
    total = -rl_logp.fused_logp(logits, shift_labels).sum()
    if num_items_in_batch is None:
        num_items_in_batch = (shift_labels != IGNORED).sum()
    return total / num_items_in_batch


def new_model() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
        use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(config)


def made() -> tuple[Tensor, Tensor]:
    """Sequences that count upwards from anywhere; the first half of each is a prompt."""
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(VOCAB_SIZE - TOKENS, (SEQUENCES, 1), generator=generator)
    tokens = first + torch.arange(TOKENS)
    return tokens, tokens.masked_fill(torch.arange(TOKENS) < TOKENS // 2, IGNORED)


def train(rank: int, name: str, folder: str) -> None:
    """Saves the loss of each step, seconds of the median step, and its peak memory in bytes."""
    way = WAYS[name]
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1  # a pool would start slower than it compiles
    model = new_model()
    if way.ours:
        model.loss_function = causal_lm_loss
    if way.processes > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=way.processes
        )
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)

    def loss_of(tokens: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=labels, num_items_in_batch=count).loss

    # The loss alone is compiled code's result: were the logits one too, autograd would make a
    # gradient of zeros for them. So it does with FSDP2, which breaks the graph where it gathers
    # parameters: the last piece is the head, the loss, and what the model returns.
    if way.compiled:
        whole = way.processes == 1
        loss_of = torch.compile(loss_of, fullgraph=whole, backend=compile_backend())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens, labels = (t.chunk(way.processes)[rank] for t in made())
    # FSDP2 averages gradients over processes, and each has its part of the sum.
    count = (made()[1][:, 1:] != IGNORED).sum() / way.processes

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(tokens, labels, count)
        loss.backward()
        optimizer.step()
        return loss.detach() / way.processes

    losses, times = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - start)
        if way.processes > 1:
            dist.all_reduce(loss)
        losses.append(loss.item())
    peak = peak_bytes(step, "cpu")
    torch.save((losses, sorted(times)[STEPS // 2], peak), f"{folder}/{rank}")
    if way.processes > 1:
        dist.destroy_process_group()


def transformers_logp(logits: Tensor, target: Tensor) -> Tensor:
    """What its loss is the mean of."""
    return -F.cross_entropy(logits.float(), target, reduction="none")


def main() -> int:
    torch.set_num_threads(1)
    versions = f"Transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"{versions}; {served_by('cpu', torch.float32)}")
    logits_bytes = SEQUENCES * TOKENS * VOCAB_SIZE * 4
    lines, first = [], None
    for name, way in WAYS.items():
        with tempfile.TemporaryDirectory() as folder:
            spawn(train, (name, folder), nprocs=way.processes)
            losses, elapsed, peak = torch.load(f"{folder}/0")
        first = first or losses
        apart = max(abs(a - b) for a, b in zip(losses, first, strict=True))
        line = [name, f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{apart:.1e}"]
        lines.append([*line, f"{elapsed * 1e3:.4g}", f"{peak * way.processes / logits_bytes:.2f}"])
    headers = [
        f"{STEPS} steps", "first loss", "last", "apart at most", "a step (ms)",
        "peak memory of a step, x its logits",
    ]  # fmt: skip
    align = ["left"] + ["right"] * (len(headers) - 1)
    print(f"\n{tabulate(lines, headers, colalign=align, disable_numparse=True)}")

    tokens, labels = made()
    with torch.no_grad():
        logits = new_model()(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    scored = labels[:, 1:].flatten() != IGNORED
    logits, target = logits[scored], labels[:, 1:].flatten()[scored]
    ways = {"Transformers": transformers_logp, "rl_logp": rl_logp.fused_logp}
    for dtype in (torch.float32, torch.bfloat16):
        title = f"The model's logits {tuple(logits.shape)} in {dtype}, scored outside of it"
        compare(title, ways, logits.to(dtype), target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
