"""What the processes of test_vocab_parallel.py run, and what one process gets."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import rl_logp
from compile_tests import dtensor_training, fsdp_tp
from compile_tests.common import HAS_COMPILER, fresh_compiler, gradients
from compile_tests.graphs import calls

# Compiled, for each kind of case, once: compiling is what takes the time. By how many processes.
COMPILED = ["aot_eager", *(["inductor"] if HAS_COMPILER else [])]
COMPILED_CASES = {
    2: ("two unequal shards", "vocabulary over 2", "rows over 2, unevenly"),
    4: ("four unequal shards", "rows and vocabulary", "rows over 4, unevenly"),
}
ROWS = (3, 4)
TEMPERATURE = 0.7

# Where shards begin and end: as many as there are processes in a group.
CUTS = {
    "two halves": (0, 48, 96),
    "two unequal shards": (0, 16, 91),
    "four quarters": (0, 16, 32, 48, 64),
    "four unequal shards": (0, 16, 48, 80, 91),
    "four shards, two of them empty": (0, 0, 32, 32, 50),
}

NOT_ALIGNED = (
    "vocabulary over 2, not aligned",
    "vocabulary over 4, not aligned",
    "vocabulary over 4, of which one has none",
)

# Shape of the mesh, placements of logits on it, and the size of the vocabulary.
Layout = tuple[tuple[int, ...], list[Placement], int]
LAYOUTS: dict[str, Layout] = {
    "vocabulary over 2": ((2,), [Shard(2)], 96),
    "vocabulary over 2, not aligned": ((2,), [Shard(2)], 100),
    "rows over 2, unevenly": ((2,), [Shard(0)], 96),
    "rows over 1 and vocabulary over 2": ((1, 2), [Shard(0), Shard(2)], 96),
    "vocabulary over 4": ((4,), [Shard(2)], 128),
    "vocabulary over 4, unevenly": ((4,), [Shard(2)], 125),
    "vocabulary over 4, not aligned": ((4,), [Shard(2)], 100),
    "vocabulary over 4, of which one has none": ((4,), [Shard(2)], 33),
    "vocabulary over both dimensions": ((2, 2), [Shard(2), Shard(2)], 128),
    "rows and vocabulary": ((2, 2), [Shard(0), Shard(2)], 96),
    "vocabulary and rows": ((2, 2), [Shard(2), Shard(1)], 96),
    "copies and vocabulary": ((2, 2), [Replicate(), Shard(2)], 96),
    "rows over 2": ((2, 2), [Shard(0), Replicate()], 96),
    "rows over 4, unevenly": ((2, 2), [Shard(0), Shard(1)], 96),
    "no shards": ((2, 2), [Replicate(), Replicate()], 96),
}


def arguments(vocab_size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """The same logits and targets in every process; each second row's target is ignored."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(*ROWS, vocab_size, generator=generator).mul_(4).bfloat16()
    target = torch.randint(vocab_size, ROWS, generator=generator)
    target[:, ::2] = -100
    return logits.to(device), target.to(device)


def cuts_of(size: int) -> dict[str, tuple[int, ...]]:
    """Those with a shard for each process of a group that as many have room for."""
    return {name: cuts for name, cuts in CUTS.items() if len(cuts) - 1 <= size}


def layouts(size: int) -> dict[str, Layout]:
    """Those whose mesh has as many processes."""
    return {name: layout for name, layout in LAYOUTS.items() if math.prod(layout[0]) == size}


def score_shard(logits: Tensor, target: Tensor, of: str, **layout: Any) -> tuple[Tensor, Tensor]:
    """(logp, lse), or (logp, entropy)."""
    if of == "entropy":
        return rl_logp.vocab_parallel_logp_entropy(
            logits, target, temperature=TEMPERATURE, **layout
        )
    return rl_logp.vocab_parallel_logp(
        logits, target, temperature=TEMPERATURE, return_lse=True, **layout
    )


def score_rows(logits: Tensor, target: Tensor, of: str) -> tuple[Tensor, Tensor]:
    """The same of logits that may be a DTensor."""
    if of == "entropy":
        return rl_logp.fused_logp_entropy(logits, target, temperature=TEMPERATURE)
    return rl_logp.fused_logp(logits, target, temperature=TEMPERATURE, return_lse=True)


def one_process(
    vocab_size: int, device: str = "cpu", of: str = "logp", score: Callable = score_shard
) -> tuple[Tensor, ...]:
    """logp, lse (or entropy) and dlogits of the whole vocabulary, in one process."""
    logits, target = arguments(vocab_size, device)
    logits.requires_grad_()
    outputs = score(logits, target, of)
    return (*(out.detach() for out in outputs), *gradients(outputs, logits))


def backends(name: str, size: int, of: str = "logp") -> list[str]:
    compiled = COMPILED if of == "logp" else COMPILED[:1]
    return ["eager", *(compiled if name in COMPILED_CASES[size] else [])]


def each_backend(
    name: str, size: int, function: Callable, of: str
) -> Iterator[tuple[str, Callable, list]]:
    """The function as it is, and compiled whole; with the graphs that the compiler was given."""
    yield "eager", function, []
    for backend in backends(name, size, of)[1:]:
        with fresh_compiler():
            compiler = CompileCounterWithBackend(backend)
            run = torch.compile(function, backend=compiler, fullgraph=True)
            yield backend, run, compiler.graphs


def plain_shards(rank: int, size: int, device: str, of: str = "logp") -> dict[Any, Any]:
    """This rank's results for all CUTS among as many processes; the other groups do the same."""
    found: dict[Any, Any] = {}
    for shards in {len(cuts) - 1 for cuts in cuts_of(size).values()}:
        groups = [dist.new_group(list(range(i, i + shards))) for i in range(0, size, shards)]
        group, index = groups[rank // shards], rank % shards
        for name, cuts in CUTS.items():
            if len(cuts) - 1 != shards:
                continue
            start, end = list(pairwise(cuts))[index]
            logits, target = arguments(cuts[-1], device)

            def score(shard: Tensor, target: Tensor, start=start, end=cuts[-1], group=group):
                return score_shard(
                    shard, target, of, group=group, vocab_start=start, vocab_size=end
                )

            for backend, run, graphs in each_backend(name, size, score, of):
                shard = logits[..., start:end].clone().requires_grad_()
                outputs = run(shard, target)
                results = (*(out.detach() for out in outputs), *gradients(outputs, shard))
                if of == "entropy" and backend == "eager":
                    alone = rl_logp.vocab_parallel_entropy(
                        shard,
                        group=group,
                        vocab_start=start,
                        vocab_size=cuts[-1],
                        temperature=TEMPERATURE,
                    )
                    assert torch.equal(alone, outputs[1])
                gathers = sum(
                    calls(graph, torch.ops._c10d_functional.all_gather_into_tensor)
                    for graph in graphs
                )
                found[name, backend] = [result.cpu() for result in results], gathers
    return found


def dtensors(rank: int, size: int, device: str, of: str = "logp") -> dict[Any, Any]:
    """Results for the LAYOUTS of this size, whole; how this rank had them, and what was sent."""
    found: dict[Any, Any] = {}
    for name, (shape, placements, vocab_size) in layouts(size).items():
        mesh = init_device_mesh(device, shape)
        logits, target = arguments(vocab_size, device)
        rows = [Replicate() if p.is_shard(2) else p for p in placements]

        def score(logits: Tensor, target: Tensor):
            return score_rows(logits, target, of)

        for backend, run, _ in each_backend(name, size, score, of):
            leaf = distribute_tensor(logits, mesh, placements).requires_grad_()
            sharded_target = distribute_tensor(target, mesh, rows)
            upstream = [
                distribute_tensor(
                    torch.linspace(-1, 2, target.numel(), dtype=dtype, device=device).view(ROWS),
                    mesh,
                    rows,
                )
                for dtype in (torch.float32, torch.float32 if of == "entropy" else torch.float64)
            ]
            if backend == "eager":
                with CommDebugMode() as communication:
                    outputs = run(leaf, sharded_target)
                    (dlogits,) = torch.autograd.grad(outputs, leaf, upstream)
                counts = {str(op): n for op, n in communication.get_comm_counts().items()}
            else:
                outputs = run(leaf, sharded_target)
                (dlogits,) = torch.autograd.grad(outputs, leaf, upstream)
                counts = None
            results: list[Any] = [*outputs, dlogits]
            if of == "entropy" and backend == "eager":
                alone: Any = rl_logp.fused_entropy(leaf, temperature=TEMPERATURE)
                assert torch.equal(alone.to_local(), outputs[1].to_local())
            assert all(isinstance(result, DTensor) for result in results)
            found[name, backend] = (
                [result.full_tensor().detach().cpu() for result in results],
                [str(result.placements) for result in results],
                counts,
            )
    return found


def refusals(rank: int, size: int, device: str) -> dict[str, str]:
    """What is said of DTensors that cannot be scored as they are."""
    mesh = init_device_mesh(device, (size,))
    logits, target = arguments(96, device)
    by_vocabulary = distribute_tensor(logits, mesh, [Shard(2)])
    unevenly = distribute_tensor(logits[..., :70], mesh, [Shard(2)])
    by_rows = distribute_tensor(logits, init_device_mesh(device, (2, 2)), [Shard(0), Shard(2)])
    whole_target = distribute_tensor(target, mesh, [Replicate()])
    order = [_StridedShard(2, split_factor=2)]
    out_of_order = DTensor.from_local(by_vocabulary.to_local(), mesh, order, run_check=False)
    attempts: dict[str, Callable] = {
        "operator": lambda: torch.ops.rl_logp.fused_logp(by_vocabulary, whole_target),
        "layout": lambda: rl_logp.vocab_parallel_logp(by_vocabulary, target, vocab_start=0),
        "alignment": lambda: rl_logp.vocab_parallel_logp(unevenly, target, require_aligned=True),
        "target": lambda: rl_logp.fused_logp(by_rows, target),
        "order": lambda: rl_logp.fused_logp(out_of_order, whole_target),
        "operator, order": lambda: torch.ops.rl_logp.fused_logp(out_of_order, whole_target),
    }
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises((ValueError, RuntimeError)) as error:
            attempt()
        found[name] = str(error.value)
    # Plain tensors are taken where each process has all rows.
    plain: Any = rl_logp.fused_logp(
        by_vocabulary, target, temperature=torch.ones(ROWS, device=device)
    )
    sharded: Any = rl_logp.fused_logp(by_vocabulary, whole_target)
    found["plain"] = str(torch.equal(plain.to_local(), sharded.to_local()))
    return found


SCENARIOS: dict[str, Callable[[int, int, str], dict]] = {
    "plain shards": plain_shards,
    "dtensors": dtensors,
    "plain shards, entropy": partial(plain_shards, of="entropy"),
    "dtensors, entropy": partial(dtensors, of="entropy"),
    "refusals": refusals,
    "fsdp and tp": fsdp_tp.train,
    "training": dtensor_training.train,
}


def run(rank: int, size: int, device: str, scenarios: list[str]) -> dict[str, dict]:
    """What one process finds, by scenario."""
    return {name: SCENARIOS[name](rank, size, device) for name in scenarios}
