"""Random calls of the CPU kernel: its forms, threads and cuts against the scalar one, and fp64.

    python tests/fuzz_cpu.py [--cases 5000] [--seed 0]

A failure prints the line that repeats it. ``make sanitize-cpu`` runs this under ASan and UBSan; the
buffers that the kernel writes end where their allocations end, and the sanitizer sees every step
beyond.
"""

import argparse
import math
import multiprocessing
import random
import sys
from typing import Any, NamedTuple, Optional

import torch
from calls import DTYPES, LAYOUTS, relaid
from test_entropy import assert_accurate as assert_entropy_accurate
from test_fuzz import by_torch
from torch import Tensor
from tqdm import tqdm

import rl_logp
from rl_logp.reference import reference
from rl_logp.testing import assert_as_accurate, assert_bitwise_equal

OP = torch.ops.rl_logp
FORMS = ("scalar", "AVX2", "AVX-512")
WIDTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024)
SPECIAL = (math.inf, -math.inf, math.nan, 3e38, -3e38, 0.0, -0.0, 1e-40, 5000.0, -5000.0, 7e8, -7e8)
SCALES = (0.0, 1e-40, 1e-3, 1.0, 4.0, 30.0, 1e3, 1e6, 1e12)
TEMPERATURES = (1.0, 0.7, 1e-6, 1e6, 1e-30, 1e30, 1e38)
TARGETS = {
    torch.int32: (-100, -1, 2**31 - 1, -(2**31)),
    torch.int64: (-100, -1, 2**32 + 5, -(2**63), 2**63 - 1),
}


class Call(NamedTuple):
    logits: Tensor
    target: Tensor
    temperature: Optional[Tensor]
    grad_logp: Optional[Tensor]
    grad_lse: Optional[Tensor]
    grad_entropy: Optional[Tensor]
    all_rows: bool
    threads: int

    @property
    def row(self) -> tuple[Tensor, Tensor, Optional[Tensor]]:
        return self.logits, self.target, self.temperature


class Results(NamedTuple):
    logp: Tensor
    lse: Tensor
    dlogits: Tensor
    states: Tensor
    # With an entropy: of all rows, and of all upstream gradients.
    entropy_logp: Tensor
    entropy_lse: Tensor
    entropy: Tensor
    mean: Tensor
    entropy_dlogits: Tensor
    entropy_states: Tensor


def draw(seed: int) -> Call:
    """The arguments of one call, a function of the seed alone."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = [rng.choice((1, 1, 2, 3, 5, 0)) for _ in range(rng.choice((0, 1, 1, 2, 3)))]
    columns = rng.choice(WIDTHS) if rng.random() < 0.5 else rng.randint(1, 1300)
    if rng.random() < 0.02:
        columns = rng.randint(30_000, 70_000)  # cut over threads
    dtype = rng.choice(DTYPES)
    count = math.prod(rows)
    flat = torch.randn(count, columns, generator=generator).mul_(rng.choice(SCALES))
    flat += rng.choice((0.0, 0.0, 100.0, -4090.0))
    if rng.random() < 0.4:
        masked = torch.rand(flat.shape, generator=generator) < rng.choice((0.02, 0.5, 0.98))
        flat.masked_fill_(masked, rng.choice((-math.inf, torch.finfo(dtype).min)))
    if rng.random() < 0.3:
        flat[:, rng.randrange(columns) :] = -math.inf
    if rng.random() < 0.3:
        for _ in range(count and rng.randrange(4)):
            flat[rng.randrange(count), rng.randrange(columns)] = rng.choice(SPECIAL)
    logits = flat.to(dtype).view(*rows, columns)
    if rows and count:
        logits = relaid(logits, rng.choice(["contiguous", *LAYOUTS]))
    integer = rng.choice((torch.int32, torch.int64))
    targets = [
        rng.choice((*TARGETS[integer], columns)) if rng.random() < 0.2 else rng.randrange(columns)
        for _ in range(count)
    ]
    target = torch.tensor(targets, dtype=integer).view(rows)
    temperature = None
    if rng.random() < 0.6:
        temperature = torch.tensor(rng.choice(TEMPERATURES) * rng.uniform(0.5, 2))
        if rng.random() < 0.5:
            temperature = torch.rand(rows, generator=generator) * 3 + 0.1
    grads: list[Optional[Tensor]] = []
    for grad_dtype in (torch.float32, torch.float64, torch.float32):
        scale = rng.choice((0.0, 1e-42, 1e-30, 1.0, 1.0, 1e30))
        grad = (torch.randn(rows, generator=generator) * scale).to(grad_dtype)
        if rng.random() < 0.3:
            grad = grad.flatten()[:1].sum().expand(rows)
        if rng.random() < 0.3:
            grad = grad.masked_fill(torch.rand(rows, generator=generator) < 0.5, 0)
        grads.append(None if rng.random() < 0.2 else grad)
    all_rows = grads[1] is not None or rng.random() < 0.5  # as the public functions have it
    threads = rng.choice((1, 2, 3, 5))
    return Call(logits, target, temperature, grads[0], grads[1], grads[2], all_rows, threads)


def garbage(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full(shape, 7, dtype=dtype)


def run(call: Call) -> Results:
    """What the kernel writes into buffers of garbage, through the operators that fill them."""
    logits, rows = call.logits, call.target.shape
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        logits = logits.contiguous()
    columns = logits.shape[-1]
    row, grads = (logits, call.target, call.temperature), (call.grad_logp, call.grad_lse)
    logp, lse = garbage(*rows, dtype=torch.float32), garbage(*rows)
    states = garbage(*rows, 8, dtype=torch.int64)
    dlogits = garbage(*logits.shape, dtype=logits.dtype)
    OP._fused_logp_forward_out(*row, call.all_rows, logp, lse)
    OP._fused_logp_partial_out(*row, call.all_rows, 0, columns, states)
    OP._fused_logp_backward_out(*grads, *row, lse, 0, columns, dlogits)
    results = (logp, lse, dlogits, states)

    logp, lse = garbage(*rows, dtype=torch.float32), garbage(*rows)
    entropy, mean = garbage(*rows, dtype=torch.float32), garbage(*rows)
    states = garbage(*rows, 13, dtype=torch.int64)
    dlogits = garbage(*logits.shape, dtype=logits.dtype)
    OP._fused_logp_forward_out(*row, True, logp, lse, entropy, mean)
    OP._fused_logp_partial_out(*row, True, 0, columns, states)
    entropies = (call.grad_entropy, mean)
    OP._fused_logp_backward_out(*grads, *row, lse, 0, columns, dlogits, *entropies)
    return Results(*results, logp, lse, entropy, mean, dlogits, states)


def unreached(call: Call) -> Tensor:
    """The rows whose entropy has no upstream gradient."""
    if call.grad_entropy is None:
        return torch.ones(call.target.shape, dtype=torch.bool)
    return call.grad_entropy == 0


def assert_an_entropy_changes_nothing(call: Call, whole: Results) -> None:
    columns = call.logits.shape[-1]
    read = (call.target >= 0) & (call.target < columns) | call.all_rows
    assert_bitwise_equal(whole.entropy_logp, whole.logp, "logp beside an entropy")
    assert_bitwise_equal(whole.entropy_lse[read], whole.lse[read], "lse beside an entropy")
    states = read & ~whole.entropy_lse.isnan()  # of a NaN, the largest column means nothing
    assert_bitwise_equal(whole.entropy_states[states, :8], whole.states[states], "states beside it")
    unreached = torch.ones(call.target.shape, dtype=torch.bool)
    if call.grad_entropy is not None:
        unreached = call.grad_entropy == 0
    dlogits = whole.entropy_dlogits[unreached]
    assert_bitwise_equal(dlogits, whole.dlogits[unreached], "dlogits without the entropy's")


def assert_the_place_of_the_logits_changes_nothing(call: Call, whole: Results) -> None:
    grads, columns = (call.grad_logp, call.grad_lse), call.logits.shape[-1]
    of_entropy = (call.grad_entropy, whole.mean)
    for expected, entropies in ((whole.dlogits, ()), (whole.entropy_dlogits, of_entropy)):
        logits = call.logits.clone(memory_format=torch.contiguous_format)
        row = (logits, call.target, call.temperature, whole.entropy_lse)
        OP._fused_logp_backward_out(*grads, *row, 0, columns, logits, *entropies)
        assert_bitwise_equal(logits, expected, "dlogits in the place of the logits")


def assert_cuts_change_nothing(call: Call, whole: Results, rng: random.Random) -> None:
    """The vocabulary in shards, each starting at a multiple of 16, in any order."""
    columns = call.logits.shape[-1]
    starts = sorted({0, *(rng.randrange(0, columns, 16) for _ in range(rng.randrange(4)))})
    shards, gradients = [], []
    entropy_shards, entropy_gradients = [], []
    for start, end in zip(starts, [*starts[1:], columns], strict=True):
        shard = call.logits[..., start:end]
        row = (shard, call.target, call.temperature)
        shards.append(OP.fused_logp_partial(*row, call.all_rows, start, columns))
        gradients.append(
            OP.fused_logp_backward(call.grad_logp, call.grad_lse, *row, whole.lse, start, columns)
        )
        entropy_shards.append(OP.fused_logp_entropy_partial(*row, start, columns))
        grads = (call.grad_logp, call.grad_entropy, call.grad_lse)
        saved = (whole.entropy_lse, whole.mean)
        entropy_gradients.append(
            OP.fused_logp_entropy_backward(*grads, *row, *saved, start, columns)
        )
    rng.shuffle(shards)
    rng.shuffle(entropy_shards)
    logp, lse = OP.fused_logp_combine(torch.stack(shards), call.target, columns)
    ignored = (call.target < 0) | (call.target >= columns)
    assert_bitwise_equal(logp, whole.logp, "logp of shards")
    if call.all_rows:
        assert_bitwise_equal(lse, whole.lse, "lse of shards")
    else:
        assert_bitwise_equal(lse[~ignored], whole.lse[~ignored], "lse of shards")
    assert_bitwise_equal(torch.cat(gradients, -1), whole.dlogits, "dlogits of shards")
    combined = OP.fused_logp_entropy_combine(torch.stack(entropy_shards), call.target, columns)
    expected = (whole.entropy_logp, whole.entropy, whole.entropy_lse, whole.mean)
    for name, a, e in zip(("logp", "entropy", "lse", "mean"), combined, expected, strict=True):
        assert_bitwise_equal(a, e, f"{name} of shards with weights")
    dlogits = torch.cat(entropy_gradients, -1)
    assert_bitwise_equal(dlogits, whole.entropy_dlogits, "dlogits of shards, with an entropy's")


def assert_accurate(call: Call, whole: Results) -> None:
    """Row by row, as torch is, where torch's own fp32 arithmetic has no trouble."""
    grad_logp = torch.zeros(call.target.shape) if call.grad_logp is None else call.grad_logp
    temperature = call.temperature
    if temperature is not None and not bool(((temperature > 0.05) & (temperature < 20)).all()):
        return
    if call.grad_lse is not None and call.grad_lse.abs().max().item() > 1e20:
        return
    if grad_logp.numel() and grad_logp.abs().max().item() > 1e20:
        return
    arguments = (call.logits, call.target, temperature, grad_logp, call.grad_lse)
    torch_results = by_torch(*arguments)
    exact = reference(
        call.logits,
        call.target,
        temperature=temperature,
        grad_logp=grad_logp,
        grad_lse=call.grad_lse,
    )
    dims = call.target.dim()
    for what, ours, theirs, truth in zip(
        Results._fields, whole, torch_results, exact, strict=False
    ):
        if what == "lse" and not call.all_rows:
            continue
        per_row = (t.reshape(call.target.numel(), *t.shape[dims:]) for t in (ours, theirs, truth))
        for row, (a, t, e) in enumerate(zip(*per_row, strict=True)):
            assert_as_accurate(a.to(t.dtype), t, e, f"{what} of row {row}")
    grad_entropy = call.grad_entropy
    if grad_entropy is None or grad_entropy.abs().max().item() > 1e20:
        return
    if temperature is not None:
        temperature = temperature.expand(call.target.shape).flatten()
    assert_entropy_accurate(
        call.logits.reshape(-1, call.logits.shape[-1]),
        call.target.flatten(),
        temperature,
        grad_logp.flatten(),
        grad_entropy.flatten(),
    )


def check(seed: int) -> None:
    call, rng = draw(seed), random.Random(~seed)
    torch.set_num_threads(1)
    fastest = OP._cpu_form(0)
    try:
        expected = run(call)
        for number in range(1, fastest + 1):
            OP._cpu_form(number)
            torch.set_num_threads(call.threads)
            for name, a, e in zip(Results._fields, run(call), expected, strict=True):
                assert_bitwise_equal(a, e, f"{name} by {FORMS[number]}")
    finally:
        OP._cpu_form(fastest)
    assert_an_entropy_changes_nothing(call, expected)
    assert_the_place_of_the_logits_changes_nothing(call, expected)
    assert_cuts_change_nothing(call, expected, rng)
    if call.target.numel() and call.logits.shape[-1] < 2000:
        assert_accurate(call, expected)


def check_all(seeds: range, current: Any) -> None:
    for seed in tqdm(seeds, mininterval=2):
        current.value = seed
        check(seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; default: 0")
    options = parser.parse_args()
    rl_logp.require_kernel("cpu", torch.bfloat16)
    # In a process of its own, which a sanitizer may end at any step.
    context = multiprocessing.get_context("fork")
    current = context.Value("q", options.seed)
    seeds = range(options.seed, options.seed + options.cases)
    process = context.Process(target=check_all, args=(seeds, current))
    process.start()
    process.join()
    if process.exitcode:
        print(f"repeat with: python tests/fuzz_cpu.py --cases 1 --seed {current.value}")
        return 1
    print(f"{options.cases} cases from seed {options.seed}: no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
