"""The CPU kernel's forms (scalar, AVX2, AVX-512) and its threads cannot be told from the bits."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

import pytest
import torch
from calls import (
    DTYPES,
    LAYOUTS,
    Result,
    Sample,
    assert_same_bits,
    kernel_serves,
    relaid,
    rows_of,
    sample,
)
from cuda_calls import (
    KINDS,
    Tally,
    alone,
    call_out,
    choice,
    every_kind,
    grad_entropy_of,
    poisoned,
    run,
    varied_rows,
)
from torch import Tensor

import rl_logp
from rl_logp import _library
from rl_logp.testing import assert_bitwise_equal

pytestmark = pytest.mark.skipif(
    not kernel_serves("cpu", torch.bfloat16),
    reason="the CPU kernel is not built: make build-cpu",
)

OPS = torch.ops.rl_logp
SCALAR, AVX2, AVX512 = range(3)
VECTORS = [pytest.param(AVX2, id="AVX2"), pytest.param(AVX512, id="AVX-512")]
# A block is 16, 128 or 256 columns, and a tile four of them.
WIDTHS = [1, 7, 16, 17, 127, 128, 129, 257, 512, 1023, 1024, 1025, 2051, 5000]

every_form = pytest.mark.parametrize("number", [pytest.param(SCALAR, id="scalar"), *VECTORS])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_and_without = pytest.mark.parametrize(
    "temperature", [False, True], ids=["no temperature", "temperature"]
)


@contextmanager
def form(number: int) -> Iterator[None]:
    """One form of the kernel, instead of the fastest; skips where the processor cannot run it."""
    before = torch.ops.rl_logp._cpu_form(number)
    if before < 0:
        pytest.skip("this processor, or the compiler, has no such vectors")
    try:
        yield
    finally:
        torch.ops.rl_logp._cpu_form(before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def partial(
    kind: type, logits: Tensor, target: Tensor, temperature: Optional[Tensor], start: int, size: int
) -> Tensor:
    row = (logits, target, temperature)
    if kind is Result:
        return OPS.fused_logp_partial(*row, True, start, size)
    return OPS.fused_logp_entropy_partial(*row, start, size)


def states(case: Sample, kind: type) -> Tensor:
    columns = case.logits.shape[-1]
    return partial(kind, case.logits, case.target, case.temperature, 0, columns)


def assert_form_is_scalar(case: Sample, temperature: bool, number: int) -> None:
    for name, kind in KINDS.items():
        with form(SCALAR):
            expected, expected_states = run(case, temperature, kind), states(case, kind)
        with form(number):
            actual, actual_states = run(case, temperature, kind), states(case, kind)
        what = f"{name} of {case.logits.shape[-1]} columns"
        assert_same_bits(actual, expected, what)
        assert_bitwise_equal(actual_states, expected_states, f"{what}: states")


# --- forms ----------------------------------------------------------------------------------------
@every_dtype
@with_and_without
@pytest.mark.parametrize("number", VECTORS)
def test_forms_have_the_bits_of_the_scalar_one(
    dtype: torch.dtype, temperature: bool, number: int
) -> None:
    for columns in WIDTHS:
        assert_form_is_scalar(varied_rows(columns, dtype, "cpu"), temperature, number)


@pytest.mark.parametrize("number", VECTORS)
@pytest.mark.parametrize("value", [-0.3465735912, -1.039720774, -3.119162321, -3.812309504])
def test_an_exponent_halfway_between_two_integers_is_rounded_alike(
    value: float, number: int
) -> None:
    """The value times log2(e) is one, beside a largest of 0."""
    case = sample((3, 33), torch.float32)
    case.logits[:] = value
    case.logits[:, ::16] = 0
    assert_form_is_scalar(case, False, number)


@pytest.mark.parametrize("number", VECTORS)
@pytest.mark.parametrize("value", [-0.451427221, -0.910448432, -1.60359561])
@pytest.mark.parametrize("beside", [-torch.inf, -1e30, -88.5, -95.0, -103.0])
def test_a_power_of_nothing_does_not_decide_a_halfway_case(
    beside: float, value: float, number: int
) -> None:
    """A power of two below 2^-126, which not every form has, next to one whose product with its
    exponent is halfway between two fp32 numbers; weighted sums alone multiply them."""
    case = sample((1, 16), torch.float32)
    case.logits[:] = beside
    case.logits[0, 0], case.logits[0, 3] = 0, value
    assert_form_is_scalar(case, False, number)


@every_dtype
@pytest.mark.parametrize("number", VECTORS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "4097", "6e8", "-3e38"])
def test_a_rare_value_takes_no_form_by_surprise(
    dtype: torch.dtype, number: int, value: str
) -> None:
    """Wherever it stands, also beside another kind, which the vectors' maximum may see instead."""
    columns, places = 1100, torch.arange(0, 1100, 9)
    case = sample((len(places), columns), torch.float32)
    rows = torch.arange(len(places))
    limit = torch.finfo(dtype).max
    case.logits[rows, places] = min(max(float(value), -limit), limit)
    if value in ("nan", "inf", "-inf"):
        case.logits[rows, places] = float(value)
    case.logits[::3, 500] = torch.inf
    case.logits[1::5, 700:] = -torch.inf
    assert_form_is_scalar(case._replace(logits=case.logits.to(dtype)), True, number)


@every_dtype
@every_kind
@with_and_without
@pytest.mark.parametrize("number", VECTORS)
def test_vectors_add_what_a_group_by_itself_adds(
    dtype: torch.dtype, kind: type, temperature: bool, number: int
) -> None:
    """A group that adds nothing, but is beyond the fast range, has its whole block taken apart."""
    for columns in (256, 1100, 5000):
        case = varied_rows(columns, dtype, "cpu")
        by_vectors = case.logits.clamp(-4000, 4000)
        by_itself = by_vectors.clone()
        for start in range(16, columns - 15, 64):
            by_vectors[:, start : start + 16] = -torch.inf
            by_itself[:, start : start + 16] = torch.finfo(dtype).min
        case = case._replace(target=case.target.clamp(max=0), logits=by_vectors)
        other = case._replace(logits=by_itself)
        with form(number):
            expected, actual = (run(c, temperature, kind) for c in (case, other))
            expected_states, actual_states = (states(c, kind) for c in (case, other))
        assert_same_bits(actual, expected, f"{columns} columns")
        assert_bitwise_equal(actual_states, expected_states, f"states of {columns} columns")


@every_form
@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_a_low_dtype_is_read_and_written_as_torch_does(
    dtype: torch.dtype, kind: type, number: int
) -> None:
    """Its gradient is rounded as torch's cast rounds the gradient of the same numbers in fp32."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    logits = torch.stack([patterns, torch.zeros_like(patterns)], -1)
    target = torch.ones(2**16, dtype=torch.int64)
    scale = torch.linspace(-12, 12, 2**16).exp()
    case = Sample(logits, target, torch.ones(2**16), scale, torch.zeros(2**16).double())
    with form(number):
        low = run(case, False, kind)
        high = run(case._replace(logits=logits.float()), False, kind)
    for name, of_low, of_high in zip(low._fields, low, high, strict=True):
        assert_bitwise_equal(of_low, of_high.to(of_low.dtype), name, any_nan=name == "dlogits")


def test_the_fastest_form_is_taken_and_another_number_changes_nothing() -> None:
    fastest = torch.ops.rl_logp._cpu_form(SCALAR)
    assert torch.ops.rl_logp._cpu_form(17) == torch.ops.rl_logp._cpu_form(-1) == -1
    assert torch.ops.rl_logp._cpu_form(fastest) == SCALAR
    runs = {"DEFAULT": SCALAR, "NO AVX": SCALAR, "AVX2": AVX2, "AVX512": AVX512}
    expected = runs.get(torch.backends.cpu.get_cpu_capability())
    if expected is not None:  # as torch finds it, on x86
        assert fastest == expected


def test_wide_registers_are_used_by_code_for_them_alone() -> None:
    """The linker keeps one copy of a shared inline function, which any processor must run."""
    objdump = shutil.which("objdump")
    if objdump is None or platform.machine() != "x86_64":
        pytest.skip("needs objdump, on x86-64")
    command = [
        objdump,
        "--disassemble",
        "--demangle",
        "--no-show-raw-insn",
        _library._loaded["cpu"],
    ]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.split(r"\n[0-9a-f]+ <", code)
    # Instructions of AVX begin with a v, those on scalars too.
    allowed = {r"%zmm": r"Avx512", r"%ymm": r"Avx512|Avx2", r"\tv[a-z0-9]+ ": r"Avx512|Avx2"}
    for instruction, forms in allowed.items():
        users = [f.split("\n", 1)[0] for f in functions if re.search(instruction, f)]
        assert users, f"nothing uses {instruction}"
        assert not [user for user in users if not re.search(forms, user)]


# --- threads and rows -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shape",
    [(1, 400_000), (3, 100_003), (17, 33_000), (100, 5000), (2000, 33)],
    ids=["a row in pieces", "rows in pieces", "few rows", "rows", "many short rows"],
)
@every_dtype
@every_kind
def test_the_number_of_threads_changes_nothing(
    dtype: torch.dtype, kind: type, shape: tuple[int, int]
) -> None:
    case = sample(shape, dtype)
    with threads(1):
        expected, expected_states = run(case, True, kind), states(case, kind)
    for count in (2, 3, 5, 8):
        with threads(count):
            assert_same_bits(run(case, True, kind), expected, f"{count} threads")
            actual_states = states(case, kind)
        assert_bitwise_equal(actual_states, expected_states, f"states by {count} threads")


@every_form
@every_dtype
@with_and_without
def test_an_entropy_changes_nothing_beside_it(
    dtype: torch.dtype, temperature: bool, number: int
) -> None:
    """Nor its gradient where its upstream gradient is 0, whatever that of other rows."""
    for columns in WIDTHS:
        case = varied_rows(columns, dtype, "cpu")
        unreached = grad_entropy_of(case) == 0
        with form(number):
            plain, weighted = (run(case, temperature, kind) for kind in KINDS.values())
        for name in ("logp", "lse"):
            assert_bitwise_equal(getattr(weighted, name), getattr(plain, name), name)
        assert_bitwise_equal(weighted.dlogits[unreached], plain.dlogits[unreached], "dlogits")


@every_form
@every_kind
@every_dtype
@pytest.mark.parametrize("scale", [1, 2000], ids=["fast arithmetic", "slow arithmetic"])
def test_the_gradient_may_take_the_place_of_the_logits(
    scale: float, dtype: torch.dtype, kind: type, number: int
) -> None:
    """Also where threads share a row, and wherever the target is."""
    for shape in ((100, 100), (2, 50_003)):
        case = sample(shape, torch.float32)
        limit = torch.finfo(dtype).max
        logits = case.logits.mul_(scale).clamp_(-limit, limit).to(dtype)
        case = case._replace(logits=logits, target=torch.arange(shape[0]))
        with form(number), threads(3):
            expected = run(case, False, kind)
            case = case._replace(logits=logits.clone())
            actual = poisoned(expected)._replace(dlogits=case.logits)
            call_out(case, actual)
        assert_same_bits(actual, expected, f"{shape}")


@every_form
@every_kind
def test_a_row_of_millions_has_the_bits_of_its_pieces(kind: type, number: int) -> None:
    """A lane's 32 bits would be full after 2^17 terms of random bits: 2^25 columns of AVX-512."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(2**18, generator=generator).bfloat16()
    target = torch.zeros(1, dtype=torch.int64)
    repeats = 2**8 if number == AVX512 else 2**7 if number == AVX2 else 2**4
    columns = repeats * len(pattern)
    row = pattern.unsqueeze(0)
    with form(number):
        whole = partial(kind, row.repeat(1, repeats), target, None, 0, columns)
        pieces = [
            partial(kind, row, target, None, piece * len(pattern), columns)
            for piece in range(repeats)
        ]
    combine = OPS.fused_logp_combine if kind is Result else OPS.fused_logp_entropy_combine
    actual = combine(whole.unsqueeze(0), target, columns)
    expected = combine(torch.stack(pieces), target, columns)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise_equal(a, e, f"result {index}")


@every_dtype
@every_kind
@with_and_without
@pytest.mark.parametrize("columns", [7, 2051, 20011])
def test_any_number_of_rows_in_any_place(
    dtype: torch.dtype, kind: type, temperature: bool, columns: int
) -> None:
    """C1, as on a GPU but with fewer rows: each is compared with its results in a call alone."""
    case = varied_rows(columns, dtype, "cpu")
    expected = alone(case, temperature, kind)
    sizes = [*range(1, 18), *(2**k + d for k in range(5, 10) for d in (-1, 0, 1))]
    sizes = sizes if columns < 10_000 else [size for size in sizes if size < 64]
    tally = Tally()
    with threads(2):
        for seed, size in enumerate(sizes):
            rows = choice(size, seed, "cpu")
            actual = run(case.rows(rows), temperature, kind)
            tally.add(actual, rows_of(expected, rows), f"{size} rows")
    tally.check(sum(sizes))


@every_dtype
@every_kind
@with_and_without
def test_any_layout(dtype: torch.dtype, kind: type, temperature: bool) -> None:
    case = varied_rows(2051, dtype, "cpu")
    expected = alone(case, temperature, kind)
    rows = choice(2 * 5 * 7, 0, "cpu").view(2, 5, 7)
    tally = Tally()
    for layout in ["contiguous", *LAYOUTS]:
        strided = case.rows(rows)
        strided = strided._replace(logits=relaid(strided.logits, layout))
        tally.add(run(strided, temperature, kind), rows_of(expected, rows), layout)
    tally.check((1 + len(LAYOUTS)) * rows.numel())


@every_dtype
@every_kind
@with_and_without
def test_columns_of_minus_infinity_change_nothing_at_any_width(
    dtype: torch.dtype, kind: type, temperature: bool
) -> None:
    """C2, wherever the row ends within a block and a tile."""
    for columns in (1, 15, 16, 100, 255, 1023, 1030):
        case = varied_rows(columns, dtype, "cpu")
        expected = run(case, temperature, kind)
        for padding in (1, 16, 250, 3000):
            padded = torch.nn.functional.pad(case.logits, (0, padding), value=-torch.inf)
            actual = run(case._replace(logits=padded), temperature, kind)
            actual = actual._replace(dlogits=actual.dlogits[:, :columns].contiguous())
            assert_same_bits(actual, expected, f"{columns} columns and {padding}")


@every_dtype
@every_kind
def test_flushing_subnormal_numbers_changes_nothing(dtype: torch.dtype, kind: type) -> None:
    """torch.set_flush_denormal is of one thread, and other threads take rows as well."""
    case = varied_rows(2051, dtype, "cpu")
    tiny = torch.finfo(dtype).smallest_normal
    case.logits[8::16] *= tiny  # subnormal logits, and gradients
    case = case._replace(grad_logp=case.grad_logp * 2.0**-120)
    with threads(2):
        expected = run(case, True, kind)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormal numbers")
        try:
            actual = run(case, True, kind)
        finally:
            torch.set_flush_denormal(False)
    assert_same_bits(actual, expected, "with subnormal numbers flushed")


def test_the_kernel_serves_a_cpu_and_says_from_where() -> None:
    for dtype in DTYPES:
        rl_logp.require_kernel("cpu", dtype)
    reasons = {b.reason for b in rl_logp.backends() if b.device_type == "cpu" and b.available}
    assert reasons == {f"loaded from {_library._loaded['cpu']}"}


def test_an_entropy_without_its_mean_is_refused() -> None:
    """The operators of rl_logp never do that; these are in the same namespace."""
    ops = torch.ops.rl_logp
    logits, target = torch.zeros(2, 5), torch.zeros(2, dtype=torch.long)
    row, double = torch.empty(2), torch.empty(2, dtype=torch.double)
    states = torch.zeros(1, 2, 13, dtype=torch.int64)
    together = "expected an entropy, a mean and weighted states together"
    with pytest.raises(RuntimeError, match=together):
        ops._fused_logp_forward_out(logits, target, None, True, row, double, row.clone())
    with pytest.raises(RuntimeError, match=together):
        ops._fused_logp_combine_out(states, target, 5, row, double)
    backward = (logits, target, None, double, 0, 5, torch.empty_like(logits))
    with pytest.raises(RuntimeError, match="expected a mean with grad_entropy"):
        ops._fused_logp_backward_out(row, None, *backward, row.clone())
