"""GRPO on a small byte-level transformer, with rl_logp.fused_logp in a compiled loss.

    python examples/grpo.py            # on a CPU, about 70 s of processor time

1. A transformer is warmed up, supervised, until it can add two numbers some of the time.
2. GRPO: sample a group of answers to each problem, reward those that are right, and raise the
   log-probability of the tokens that did better than their group. The loss runs under
   ``torch.compile(fullgraph=True)``.
3. The report: reward on problems that neither stage saw, before and after; the tokens whose
   log-probability the trainer sees in other bits than the rollout did; what the op costs.

Exits with 1 unless the reward rose clearly and no token differed.
"""

import argparse
import shutil
import sys
import sysconfig
from pathlib import Path

import report
import torch
from addition import PROMPT_BYTES, answers, problems, prompts, reward
from byte_lm import ByteLM, rollout
from same_bits import Bits
from torch import Tensor
from tqdm import tqdm

import rl_logp

HELD_OUT = 512
PROMPTS, GROUP, MINIBATCHES = 64, 8, 4  # a step: 64 problems, 8 answers each, 4 updates
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TEMPERATURE = 0.8
WARM_REWARD = 0.3
CLEAR_RISE = 0.15
COST_ROWS = {"cpu": 1024, "cuda": 2048}


# --- the two losses ------------------------------------------------------------------------------
def warmup_loss(model: ByteLM, tokens: Tensor, target: Tensor) -> Tensor:
    """Mean negative log-probability of the answer's bytes."""
    logits = model(tokens)[:, PROMPT_BYTES - 1 : -1]  # a view: what predicts the answer
    return -rl_logp.fused_logp(logits, target).sum() / (target >= 0).sum()


def grpo_loss(
    model: ByteLM,
    tokens: Tensor,
    target: Tensor,
    old_logp: Tensor,
    advantage: Tensor,
    temperature: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped objective over the completion's tokens; their logits and log-probabilities.

    Tokens after the end have an ignored target: logp is 0, as in ``old_logp``, and the gradient is
    exactly 0. So it is where a whole group is right, or wrong: its advantage is 0.
    """
    logits = model(tokens)[:, PROMPT_BYTES - 1 : -1]
    logp = rl_logp.fused_logp(logits, target, temperature=temperature)
    ratio, advantage = (logp - old_logp).exp(), advantage.unsqueeze(-1)
    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    return -gain.sum() / (target >= 0).sum(), logits.detach(), logp.detach()


def group_advantage(rewards: Tensor) -> Tensor:
    """How much better than its group each answer did, in standard deviations of the group."""
    groups = rewards.view(PROMPTS, GROUP)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + 1e-4)).flatten()


# --- the two stages ------------------------------------------------------------------------------
def evaluate(model: ByteLM, pairs: Tensor, temperature: Tensor) -> float:
    """Mean reward of one sampled answer to each of pairs."""
    return reward(rollout(model, prompts(pairs), temperature).target, pairs).mean().item()


def update(model: ByteLM, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def warm_up(model: ByteLM, train: Tensor, steps: int, temperature: Tensor) -> None:
    """Supervised steps, at most ``steps``, until the model is right about a third of the time.

    GRPO learns from groups that hold both right and wrong answers: it needs a start, and room.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    progress = tqdm(range(steps), desc=f"warm-up (to reward {WARM_REWARD})", unit="step")
    for step in progress:
        pairs = train[torch.randint(len(train), (256,), device=train.device)]
        if step % 10 == 0 and evaluate(model, pairs, temperature) > WARM_REWARD:
            break
        target = answers(pairs)
        tokens = torch.cat([prompts(pairs), target.clamp(min=0)], dim=1)
        loss = warmup_loss(model, tokens, target)
        update(model, optimizer, loss)
        progress.set_postfix(loss=f"{loss.item():.3f}")


def train_grpo(
    model: ByteLM, train: Tensor, steps: int, backend: str, temperature: Tensor, bits: Bits
) -> list[float]:
    """The mean reward of each step's rollout."""
    loss_fn = torch.compile(grpo_loss, fullgraph=True, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    curve = []
    progress = tqdm(range(steps), desc="GRPO", unit="step")
    for step in progress:
        chosen = train[torch.randint(len(train), (PROMPTS,), device=train.device)]
        pairs = chosen.repeat_interleave(GROUP, dim=0)
        roll = rollout(model, prompts(pairs), temperature)
        rewards = reward(roll.target, pairs)
        advantage = group_advantage(rewards)
        for minibatch, rows in enumerate(torch.randperm(len(pairs)).chunk(MINIBATCHES)):
            target, old_logp = roll.target[rows], roll.logp[rows]
            loss, logits, logp = loss_fn(
                model, roll.tokens[rows], target, old_logp, advantage[rows], temperature
            )
            if minibatch == 0:  # the weights are still those of the rollout
                bits.add_update(logits, logp, target, old_logp)
            update(model, optimizer, loss)
        if step % 10 == 0:
            bits.add_layouts(roll)
        curve.append(rewards.mean().item())
        progress.set_postfix(reward=f"{curve[-1]:.2f}")
    return curve


# --- the command ---------------------------------------------------------------------------------
def compile_backend() -> str:
    """Inductor where it can work; it needs a C++ compiler and Python's headers."""
    compiler = shutil.which("clang++" if sys.platform == "darwin" else "g++")
    if compiler and Path(sysconfig.get_path("include"), "Python.h").exists():
        return "inductor"
    return "aot_eager"  # the same graphs, run by torch's own kernels


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150, help="of GRPO (default 150)")
    parser.add_argument("--seed", type=int, default=0, help="default 0")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="default: cuda where there is one",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/grpo_reward.png"),
        help="where the reward curve goes (default build/grpo_reward.png)",
    )
    parser.add_argument("--quick", action="store_true", help="a third of the work, for a check")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    steps, clear_rise = (args.steps // 3, 0.05) if args.quick else (args.steps, CLEAR_RISE)
    torch.manual_seed(args.seed)
    # The model is so small that a second thread gains little, and costs much where other programs
    # keep the cores busy: threads wait for the slowest at the end of every operator.
    torch.set_num_threads(1)
    backend = compile_backend()
    temperature = torch.tensor(TEMPERATURE, device=args.device)
    train, held_out = problems(HELD_OUT, args.device)
    held_out = held_out.repeat(8, 1)  # 8 answers to each
    model = ByteLM().to(args.device)

    path = next(
        b for b in rl_logp.backends() if (b.device_type, b.dtype) == (args.device, torch.float32)
    )
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters} parameters on {args.device}, torch {torch.__version__}, compiled by"
        f" {backend}; fused_logp is served by the {path.path} path: {path.reason}"
    )

    warm_up(model, train, 500, temperature)
    before = evaluate(model, held_out, temperature)
    bits = Bits(temperature, backend)
    curve = train_grpo(model, train, steps, backend, temperature, bits)
    after = evaluate(model, held_out, temperature)

    report.reward_table(before, after, len(held_out))
    report.bits_table(bits)
    report.cost_table(args.device, COST_ROWS[args.device] // (2 if args.quick else 1))
    if path.path == "chunked":
        print("The chunked path bounds memory; speed is the business of the kernels.")
    report.reward_curve(args.output, curve, before, after)
    print(f"\nreward curve: {args.output}")

    failures = []
    if after - before < clear_rise:
        failures.append(f"expected the reward to rise by {clear_rise}, got {after - before:+.3f}")
    for layout, count in bits.op.items():
        if count.differing:
            failures.append(f"{layout}: expected 0 tokens to differ, got {count.differing}")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
