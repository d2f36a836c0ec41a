"""The CPU kernel's forms (scalar, AVX2, AVX-512) and its threads cannot be told from the bits."""

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from calls import DTYPES, LAYOUTS, Sample, assert_same_bits, kernel_serves, relaid, rows_of, sample
from cuda_calls import Tally, alone, choice, run, varied_rows
from torch import Tensor

import rl_logp
from rl_logp import _library
from rl_logp.testing import assert_bitwise_equal

pytestmark = pytest.mark.skipif(
    not kernel_serves("cpu", torch.bfloat16),
    reason="the CPU kernel is not built: make build-cpu",
)

SCALAR, AVX2, AVX512 = range(3)
VECTORS = [pytest.param(AVX2, id="AVX2"), pytest.param(AVX512, id="AVX-512")]
# A block is 16, 128 or 256 columns, and a tile four of them.
WIDTHS = [1, 7, 16, 17, 127, 128, 129, 257, 512, 1023, 1024, 1025, 2051, 5000]

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


def states(case: Sample) -> Tensor:
    columns = case.logits.shape[-1]
    return torch.ops.rl_logp.fused_logp_partial(
        case.logits, case.target, case.temperature, True, 0, columns
    )


def assert_form_is_scalar(case: Sample, temperature: bool, number: int) -> None:
    with form(SCALAR):
        expected, expected_states = run(case, temperature), states(case)
    with form(number):
        actual, actual_states = run(case, temperature), states(case)
    assert_same_bits(actual, expected, f"{case.logits.shape[-1]} columns")
    assert_bitwise_equal(actual_states, expected_states, "states")


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


@pytest.mark.parametrize("number", [pytest.param(SCALAR, id="scalar"), *VECTORS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_a_low_dtype_is_read_and_written_as_torch_does(
    dtype: torch.dtype, number: int
) -> None:
    """Its gradient is rounded as torch's cast rounds the gradient of the same numbers in fp32."""
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    logits = torch.stack([patterns, torch.zeros_like(patterns)], -1)
    target = torch.ones(2**16, dtype=torch.int64)
    scale = torch.linspace(-12, 12, 2**16).exp()
    case = Sample(logits, target, torch.ones(2**16), scale, torch.zeros(2**16).double())
    with form(number):
        low, high = run(case, False), run(case._replace(logits=logits.float()), False)
    assert_bitwise_equal(low.logp, high.logp, "logp")
    assert_bitwise_equal(low.lse, high.lse, "lse")
    assert_bitwise_equal(low.dlogits, high.dlogits.to(dtype), "dlogits", any_nan=True)


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
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    case = sample(shape, dtype)
    with threads(1):
        expected, expected_states = run(case), states(case)
    for count in (2, 3, 5, 8):
        with threads(count):
            assert_same_bits(run(case), expected, f"{count} threads")
            assert_bitwise_equal(states(case), expected_states, f"states by {count} threads")


@pytest.mark.parametrize("number", [pytest.param(SCALAR, id="scalar"), *VECTORS])
def test_a_row_of_millions_has_the_bits_of_its_pieces(number: int) -> None:
    """A lane's 32 bits would be full after 2^17 terms of random bits: 2^25 columns of AVX-512."""
    generator = torch.Generator().manual_seed(0)
    pattern = torch.randn(2**18, generator=generator).bfloat16()
    target = torch.zeros(1, dtype=torch.int64)
    repeats = 2**8 if number == AVX512 else 2**7 if number == AVX2 else 2**4
    columns = repeats * len(pattern)
    with form(number):
        whole = torch.ops.rl_logp.fused_logp_partial(
            pattern.repeat(repeats).unsqueeze(0), target, None, True, 0, columns
        )
        pieces = [
            torch.ops.rl_logp.fused_logp_partial(
                pattern.unsqueeze(0), target, None, True, piece * len(pattern), columns
            )
            for piece in range(repeats)
        ]
    combine = torch.ops.rl_logp.fused_logp_combine
    for name, actual, expected in zip(
        ("logp", "lse"),
        combine(whole.unsqueeze(0), target, columns),
        combine(torch.stack(pieces), target, columns),
        strict=True,
    ):
        assert_bitwise_equal(actual, expected, name)


@every_dtype
@with_and_without
@pytest.mark.parametrize("columns", [7, 2051, 20011])
def test_any_number_of_rows_in_any_place(
    dtype: torch.dtype, temperature: bool, columns: int
) -> None:
    """C1, as on a GPU but with fewer rows: each is compared with its results in a call alone."""
    case = varied_rows(columns, dtype, "cpu")
    expected = alone(case, temperature)
    sizes = [*range(1, 18), *(2**k + d for k in range(5, 10) for d in (-1, 0, 1))]
    sizes = sizes if columns < 10_000 else [size for size in sizes if size < 64]
    tally = Tally()
    with threads(2):
        for seed, size in enumerate(sizes):
            rows = choice(size, seed, "cpu")
            actual = run(case.rows(rows), temperature)
            tally.add(actual, rows_of(expected, rows), f"{size} rows")
    tally.check(sum(sizes))


@every_dtype
@with_and_without
def test_any_layout(dtype: torch.dtype, temperature: bool) -> None:
    case = varied_rows(2051, dtype, "cpu")
    expected = alone(case, temperature)
    rows = choice(2 * 5 * 7, 0, "cpu").view(2, 5, 7)
    tally = Tally()
    for layout in ["contiguous", *LAYOUTS]:
        strided = case.rows(rows)
        strided = strided._replace(logits=relaid(strided.logits, layout))
        tally.add(run(strided, temperature), rows_of(expected, rows), layout)
    tally.check((1 + len(LAYOUTS)) * rows.numel())


@every_dtype
@with_and_without
def test_columns_of_minus_infinity_change_nothing_at_any_width(
    dtype: torch.dtype, temperature: bool
) -> None:
    """C2, wherever the row ends within a block and a tile."""
    for columns in (1, 15, 16, 100, 255, 1023, 1030):
        case = varied_rows(columns, dtype, "cpu")
        expected = run(case, temperature)
        for padding in (1, 16, 250, 3000):
            padded = torch.nn.functional.pad(case.logits, (0, padding), value=-torch.inf)
            actual = run(case._replace(logits=padded), temperature)
            actual = actual._replace(dlogits=actual.dlogits[:, :columns].contiguous())
            assert_same_bits(actual, expected, f"{columns} columns and {padding}")


@every_dtype
def test_flushing_subnormal_numbers_changes_nothing(dtype: torch.dtype) -> None:
    """torch.set_flush_denormal is of one thread, and other threads take rows as well."""
    case = varied_rows(2051, dtype, "cpu")
    tiny = torch.finfo(dtype).smallest_normal
    case.logits[8::16] *= tiny  # subnormal logits, and gradients
    case = case._replace(grad_logp=case.grad_logp * 2.0**-120)
    with threads(2):
        expected = run(case)
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot flush subnormal numbers")
        try:
            actual = run(case)
        finally:
            torch.set_flush_denormal(False)
    assert_same_bits(actual, expected, "with subnormal numbers flushed")


def test_the_kernel_serves_a_cpu_and_says_from_where() -> None:
    for dtype in DTYPES:
        rl_logp.require_kernel("cpu", dtype)
    reasons = {b.reason for b in rl_logp.backends() if b.device_type == "cpu" and b.available}
    assert reasons == {f"loaded from {_library._loaded['cpu']}"}
