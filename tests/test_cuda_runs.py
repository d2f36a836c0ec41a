"""C1 on the kernels: the stream, the way a call is run and the run itself do not reach the bits."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import (
    DTYPES,
    Call,
    EntropyResult,
    Result,
    Sample,
    assert_same_bits,
    call,
    call_with_entropy,
    rows_of,
)
from cuda_calls import (
    Tally,
    call_out,
    choice,
    cuda_kernel,
    each_row_alone,
    every_kind,
    poisoned,
    run,
    varied_rows,
)
from torch import Tensor

import rl_logp
from rl_logp.testing import bits

pytestmark = cuda_kernel

Run = Callable[[Sample], Any]
VOCAB_SIZE = 2051
REPEATS = 1000

# By autograd: what each way of running a call is to give.
every_call = pytest.mark.parametrize(
    "call", [call, call_with_entropy], ids=["fused_logp", "fused_logp_entropy"]
)
few_and_many = pytest.mark.parametrize("size", [64, 641], ids=["few rows", "many rows"])
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="inductor needs a C compiler"
)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(call: Call, mode: str) -> Run:
    weighted = call is call_with_entropy

    @torch.compile(mode=mode, fullgraph=True)
    def forward(logits: Tensor, target: Tensor, temperature: Tensor) -> tuple[Tensor, ...]:
        if weighted:
            args = (logits, target, temperature)
            return torch.ops.rl_logp.fused_logp_entropy_forward(*args)[:3]
        return rl_logp.fused_logp(logits, target, temperature=temperature, return_lse=True)

    def run(inputs: Sample) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        leaf = inputs.logits.detach().requires_grad_()
        outputs = forward(leaf, inputs.target, inputs.temperature)
        # A replay writes over what it returned.
        kept = [output.detach().clone() for output in outputs]
        grads = [inputs.grad_logp, inputs.grad_lse.float(), inputs.grad_lse]
        (dlogits,) = torch.autograd.grad(outputs, leaf, grads if weighted else inputs[3:])
        return (EntropyResult if weighted else Result)._make([*kept, dlogits.clone()])

    return run


def captured(call: Call, case: Sample) -> Run:
    static = Sample(*(t.clone() for t in case))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*static)  # what loads lazily is loaded
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*static)

    def run(inputs: Sample) -> Any:
        for tensor, values in zip(static, inputs, strict=True):
            tensor.copy_(values)
        for tensor in result:
            tensor.fill_(torch.nan)  # not the last replay's
        graph.replay()
        return result

    return run


def eager(call: Call, _: Sample) -> Run:
    return lambda inputs: call(*inputs)


def ways() -> Iterator:
    for dtype in DTYPES:
        yield pytest.param(eager, dtype, id=f"eager-{dtype}")
        yield pytest.param(captured, dtype, id=f"graph captured by hand-{dtype}")
    for mode in ("default", "reduce-overhead"):
        yield pytest.param(
            lambda call, _, mode=mode: compiled(call, mode),
            torch.bfloat16,
            id=f"torch.compile, {mode}",
            marks=needs_compiler,
        )


@every_call
@few_and_many
@pytest.mark.parametrize(("way", "dtype"), list(ways()))
@pytest.mark.usefixtures("fresh_compiler")
def test_no_way_of_running_reaches_the_bits(
    call: Call, way: Callable[[Call, Sample], Run], dtype: torch.dtype, size: int
) -> None:
    pool = varied_rows(VOCAB_SIZE, dtype)
    expected = each_row_alone(pool, lambda row: call(*row))
    run = way(call, pool.rows(choice(size)))
    tally = Tally()
    for seed in range(5):  # reduce-overhead warms up, records, and then replays
        rows = choice(size, seed)
        tally.add(run(pool.rows(rows)), rows_of(expected, rows), f"call {seed}")
    tally.check(5 * size)


@every_call
@few_and_many
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_stream_reaches_the_bits(call: Call, dtype: torch.dtype, size: int) -> None:
    pool = varied_rows(VOCAB_SIZE, dtype)
    rows = choice(size)
    expected = rows_of(each_row_alone(pool, lambda row: call(*row)), rows)
    case = pool.rows(rows)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    tally = Tally()
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            actual = call(*case)
        torch.cuda.current_stream().wait_stream(stream)
        tally.add(actual, expected, str(stream))
    tally.check(len(streams) * size)


class Load:
    """Streams kept busy with a matrix product, a copy and the op itself on other rows."""

    def __init__(self) -> None:
        self.streams = [torch.cuda.Stream() for _ in range(3)]
        self.square, self.product = (torch.randn(1024, 1024, device="cuda") for _ in range(2))
        self.source, self.copy = (torch.zeros(2**22, device="cuda") for _ in range(2))
        self.other = varied_rows(VOCAB_SIZE, torch.float16, seed=9)
        self.results = call(*self.other)
        torch.cuda.synchronize()

    def start(self) -> None:
        matrix, copy, op = self.streams
        with torch.cuda.stream(matrix):
            torch.mm(self.square, self.square, out=self.product)
        with torch.cuda.stream(copy):
            self.copy.copy_(self.source)
        with torch.cuda.stream(op):
            call_out(self.other, self.results)


@every_kind
@pytest.mark.parametrize(
    ("size", "vocab_size"), [(16, 50257), (641, VOCAB_SIZE)], ids=["few rows", "many rows"]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_thousand_runs_beside_other_work(
    kind: type, dtype: torch.dtype, size: int, vocab_size: int
) -> None:
    """Every second run writes the gradient where the logits are."""
    case = varied_rows(vocab_size, dtype).rows(choice(size))
    expected = run(case, kind=kind)
    expected_bits = [bits(t) for t in expected]
    results = poisoned(expected)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    load = Load()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    runs = 0
    for turn in range(REPEATS):
        load.start()
        with torch.cuda.stream(stream):
            for tensor in results:
                tensor.fill_(torch.nan)  # not the last run's
            inputs = case
            if turn % 2:
                inputs = case._replace(logits=results.dlogits.copy_(case.logits))
            call_out(inputs, results, temperature=case.temperature)
            for tensor, wanted in zip(results, expected_bits, strict=True):
                differing += (bits(tensor) != wanted).any()
        runs += 1
    torch.cuda.synchronize()
    assert runs == REPEATS
    assert int(differing) == 0, f"{int(differing)} of {len(results) * REPEATS} results differ"
    assert_same_bits(results, expected, "the last run")
