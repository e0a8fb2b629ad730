"""Gradient scaling on every backend: the contract of ``csrc/ops.h``, from `GradCheck` on.

One suite for all backends (see the ``backend`` fixture), against NumPy (`grad_cases`). Interpreted
Triton has a process of its own, as for ``test_operators.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Backend, backend_params, interpreting_triton
from draws import drawn
from grad_cases import (
    DTYPES,
    EVERYTHING,
    SPECIAL,
    Boundary,
    Check,
    Found,
    Rows,
    Scales,
    Tensors,
    accumulation,
    boundaries,
    number,
    rows,
    scales,
    stats_before,
    tensors,
    terms,
    values,
)
from hypothesis import given
from lookups import assert_same_bits
from same_bits import digest_of, digests_of_levels, digests_of_threads
from torch import Tensor

from fastemb import _reference
from fastemb._grad_ops import GRAD_STATS, SCHEMAS

# Interpreted Triton is NumPy, which tells of every infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

LARGEST = 3_000 if interpreting_triton() else 20_000
examples = drawn(5 if interpreting_triton() else 40)
# Those that promise one order of the squares, whether terms are summed before or on the way.
ONE_ORDER = ("cpu", "cuda", "reference")


# ---- any call ----------------------------------------------------------------------------------


@examples
@given(case=tensors(LARGEST))
def test_tensors(backend: Backend, case: Tensors) -> None:
    case.run(backend.ops, backend.device).check(case.expected())


@examples
@given(case=rows(LARGEST))
def test_rows(backend: Backend, case: Rows) -> None:
    case.run(backend.ops, backend.device).check(case.expected())


@examples
@given(case=terms(LARGEST))
def test_sums_of_terms(backend: Backend, case: Rows) -> None:
    """As the rows that they are the sums of; on native backends to the last bit of the squares."""
    got = case.run(backend.ops, backend.device)
    sums = case.rows()
    if backend.name == "reference":  # which adds in an order of its own
        assert case.segments is not None
        assert case.sources is not None
        wide = case.grad.to(accumulation(case.grad.dtype))
        used = case.segments[: case.count + 1]
        sums = _reference.sum_terms(wide, used, case.sources, case.coefficients)
    got.check(case.check.expected_of([case.grad], [sums]))
    summed = case.summed(sums).run(backend.ops, backend.device)
    got.check(replace(summed, grads=[case.grad]))
    if backend.name in ONE_ORDER and got.square_sums is not None:
        assert summed.square_sums is not None
        assert_same_bits(got.square_sums, summed.square_sums)


@examples
@given(case=boundaries(LARGEST))
def test_boundaries(backend: Backend, case: Boundary) -> None:
    case.run(backend.ops, backend.device).check(case.expected())


@examples
@given(case=scales())
def test_scales(backend: Backend, case: Scales) -> None:
    for got, want in zip(case.run(backend.ops, backend.device), case.expected(), strict=True):
        assert_same_bits(got[0], want[0])
        assert torch.equal(got[1], want[1])


# ---- one thing at a time -----------------------------------------------------------------------


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_that_is_not_finite(backend: Backend, dtype: torch.dtype, special: float) -> None:
    """At every place of a word, and at both ends of a long gradient."""
    length = 2100
    for at in (*range(9), 1023, 1024, length - 1):
        grad = torch.ones(length, dtype=dtype)
        grad[at] = special
        for asked in (EVERYTHING, frozenset({"found_inf"})):
            found = Tensors([grad], Check(asked=asked)).run(backend.ops, backend.device)
            assert found.found_inf == 1, at
            if found.stats is not None:
                before = stats_before(1)[0]
                column = GRAD_STATS.nan if special != special else GRAD_STATS.infinite
                assert found.stats[0, column] == before[column] + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_value_out_of_the_ordinary(backend: Backend, dtype: torch.dtype) -> None:
    """Among so many that nobody counts singly."""
    length = 2600
    for index, special in enumerate(SPECIAL):
        grad = torch.full((length,), 3.0, dtype=dtype)
        grad[(0, 15, 1023, 1024, 2049, length - 1)[index % 6]] = torch.tensor(
            special, dtype=torch.float64
        )
        scales = (1.0, 2.0**-26)  # with which 3.0 is a tiny one
        if interpreting_triton():  # which takes half a second each time
            scales = scales[index // 2 % 2 :][:1]
        for inv_scale in scales:
            case = Tensors([grad], Check(inv_scale, unscale=bool(index % 2)))
            case.run(backend.ops, backend.device).check(case.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_overflow_in_the_product_alone(backend: Backend, dtype: torch.dtype) -> None:
    """A finite gradient that its own scale takes beyond the accumulator's range."""
    grad = torch.full((40,), 60000.0, dtype=dtype)
    found = Tensors([grad], Check(inv_scale=3e38)).run(backend.ops, backend.device)
    assert found.found_inf == 1
    found = Tensors([grad], Check(inv_scale=2.0**110)).run(backend.ops, backend.device)
    assert found.found_inf == 0
    # What only the store would make infinite is nobody's fault before it is stored.
    found = Tensors([grad], Check(inv_scale=2.0, unscale=True)).run(backend.ops, backend.device)
    assert found.found_inf == 0
    assert bool(found.grads[0].isinf().all()) == (dtype == torch.float16)


def test_more_tensors_than_a_launch_takes(backend: Backend) -> None:
    """Of all types, some empty; one of them is not finite."""
    count = 30 if interpreting_triton() else 400
    grads = [values((i % 7 * 5,), DTYPES[i % 4], i, 0) for i in range(count)]
    for bad in (None, 6, count - 1):
        if bad is not None:
            grads[bad] = torch.full((3,), torch.nan, dtype=grads[bad].dtype)
        case = Tensors(grads, Check(inv_scale=0.5, unscale=True))
        case.run(backend.ops, backend.device).check(case.expected())


def test_nothing_to_look_at(backend: Backend) -> None:
    backend.ops.grad_check_([], None, None, None, None, False)
    for case in (Tensors([torch.empty(0)]), Rows(torch.empty(0, 8)), Rows(torch.empty(3, 0))):
        found = case.run(backend.ops, backend.device)
        found.check(case.expected())
        assert found.square_sums is not None
        assert found.square_sums.tolist() == [0.0]


def test_nobody_asks(backend: Backend) -> None:
    case = Tensors([torch.ones(5), torch.full((9,), torch.nan)], Check(0.5, frozenset(), True))
    case.run(backend.ops, backend.device).check(case.expected())


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_that_begins_anywhere(backend: Backend, dtype: torch.dtype) -> None:
    """Views of one buffer, as those of DDP: neighbours stay as they are, squares the same bits."""
    length = 700 if interpreting_triton() else 20_000
    for offset in (1, 2, 3, 5):
        memory = values((length + 8,), dtype, offset, 0).to(backend.device)
        before = memory.cpu()
        grad = memory[offset : offset + length]
        check = Check(inv_scale=0.25, unscale=True)
        places = check.places(1, backend.device)
        want = Tensors([grad.cpu()], check).run(backend.ops, backend.device)
        backend.ops.grad_check_([grad], check.scale(backend.device), *places.values(), True)
        got = Found([grad.cpu()], *(x.cpu() for x in places.values() if x is not None))
        got.check(want)
        if backend.name in ("cpu", "cuda"):
            assert got.square_sums is not None
            assert want.square_sums is not None
            assert_same_bits(got.square_sums, want.square_sums)
        after = memory.cpu()
        for neighbours in (slice(0, offset), slice(offset + length, None)):
            assert_same_bits(after[neighbours], before[neighbours])


# ---- the CPU -----------------------------------------------------------------------------------


def _fixed_calls() -> list[Any]:
    check = Check(inv_scale=3e-4, unscale=True)
    calls: list[Any] = [
        Tensors([values((100_003,), dtype, 1, 20), values((300, 70), dtype, 2, 0)], check)
        for dtype in DTYPES
    ]
    for dtype in DTYPES:
        calls.append(Rows(values((700, 100), dtype, 3, 0), 650, check=check))
        acc = accumulation(dtype)
        generator = torch.Generator().manual_seed(5)
        sizes = torch.tensor([0, 1, 3, 700, 2, 4000, 1] + [1, 2] * 600)
        sources = torch.randint(50, (int(sizes.sum()),), generator=generator, dtype=torch.int32)
        calls.append(
            Rows(
                values((50, 40), dtype, 4, 0),
                segments=sizes.cumsum(0).to(torch.int32),
                sources=sources,
                coefficients=torch.randn(len(sources), generator=generator, dtype=acc),
                check=replace(check, unscale=False),
            )
        )
        calls.append(Boundary(values((90_001,), dtype, 6, 9), 3.0, 0.1))
    return calls


def digest(ops: Any) -> str:
    """Of all that fixed calls write."""
    results = [call.run(ops) for call in _fixed_calls()]
    written = [(*r.grads, r.found_inf, r.stats, r.square_sums) for r in results]
    return digest_of(x for some in written for x in some if x is not None)


def test_thread_counts() -> None:
    assert len(digests_of_threads(digest)) == 1


def test_instruction_sets() -> None:
    digests = digests_of_levels("test_grad_operators")
    assert len(set(digests.values())) == 1, digests


# ---- what is refused ---------------------------------------------------------------------------


def _call(op: str) -> dict[str, Any]:
    """A good call, by argument name. What it writes shows when it has run."""
    check: dict[str, Any] = {
        "inv_scale": number(0.5),
        "found_inf": number(0.0),
        "stats": torch.zeros(8, dtype=torch.int64),
    }
    bad = torch.full((4, 3), torch.inf)
    if op == "grad_check_":
        check["stats"] = torch.zeros(2, 8, dtype=torch.int64)
        sums = {"square_sums": torch.zeros(2, dtype=torch.float64), "unscale": True}
        return {"grads": [bad, torch.ones(5).half()], **check, **sums}
    if op == "row_grad_check_":
        return {
            "grad": bad,
            "used_rows": torch.tensor([2], dtype=torch.int32),
            "segments": torch.tensor([0, 1, 3], dtype=torch.int32),
            "sources": torch.tensor([0, 3, 1], dtype=torch.int32),
            "coefficients": torch.ones(3),
            **check,
            "square_sum": torch.zeros((), dtype=torch.float64),
            "unscale": False,
        }
    if op == "boundary_gradient":
        given = {"grad": bad, "ratio": number(2.0), "inv_scale": number(0.5)}
        return {**given, "flags": torch.zeros(2), "stats": check["stats"]}
    return {
        "scales": torch.ones(2),
        "states": torch.zeros(2, 2, dtype=torch.int32),
        "found_inf": torch.zeros(2),
        "configs": torch.ones(2, 6, dtype=torch.float64),
    }


def _wrong_calls() -> dict[str, tuple[str, dict[str, Any], str]]:
    """name -> (operator, changes to `_call`, the whole message behind the operator's name)"""
    half, wide = torch.float16, torch.float64
    dtype = "dtype must be float16, bfloat16, float32 or float64"
    strided = torch.ones(3, 4).t()
    matrix = "grad must be contiguous, [rows, columns]"
    together = "segments and sources go together, coefficients only with them"
    segments = "segments must be contiguous int32, one element more than rows"
    factors = "coefficients must be contiguous, float32, one for each of sources"
    used = "used_rows must be one int32 element"
    row = "row_grad_check_"
    wrong: dict[str, tuple[str, dict[str, Any], str]] = {
        "integers": ("grad_check_", {"grads": [torch.ones(4, dtype=torch.int32)] * 2}, dtype),
        "strided": (
            "grad_check_",
            {"grads": [torch.ones(4), strided]},
            "gradients must be contiguous",
        ),
        "rows of integers": (row, {"grad": torch.ones(4, 3, dtype=torch.int64)}, dtype),
        "rows strided": (row, {"grad": strided}, matrix),
        "rows flat": (row, {"grad": torch.ones(4)}, matrix),
        "used_rows long": (row, {"used_rows": torch.tensor([2])}, used),
        "used_rows two": (row, {"used_rows": torch.ones(2, dtype=torch.int32)}, used),
        "no sources": (row, {"sources": None}, together),
        "no segments": (row, {"segments": None}, together),
        "only coefficients": (row, {"segments": None, "sources": None}, together),
        "segments long": (row, {"segments": torch.tensor([0, 1, 3])}, segments),
        "segments empty": (row, {"segments": torch.ones(0, dtype=torch.int32)}, segments),
        "segments strided": (
            row,
            {"segments": torch.arange(6, dtype=torch.int32)[::2]},
            segments,
        ),
        "sources long": (
            row,
            {"sources": torch.tensor([0, 3, 1])},
            "sources must be contiguous int32",
        ),
        "coefficients double": (row, {"coefficients": torch.ones(3, dtype=wide)}, factors),
        "coefficients short": (row, {"coefficients": torch.ones(2)}, factors),
        "unscale of terms": (row, {"unscale": True}, "unscale must be False with segments"),
        "boundary of integers": ("boundary_gradient", {"grad": torch.ones(4).long()}, dtype),
        "ratio double": (
            "boundary_gradient",
            {"ratio": torch.ones((), dtype=wide)},
            "ratio must be one float32 element",
        ),
        "ratio two": (
            "boundary_gradient",
            {"ratio": torch.ones(2)},
            "ratio must be one float32 element",
        ),
    }
    flags = "flags must be contiguous float32 of 2 elements"
    for what, value in {
        "one": torch.ones(1),
        "half": torch.ones(2).to(half),
        "strided": torch.ones(4)[::2],
    }.items():
        wrong[f"flags {what}"] = ("boundary_gradient", {"flags": value}, flags)
    for op in ("grad_check_", row, "boundary_gradient"):
        count = 2 if op == "grad_check_" else 1
        for name in ("inv_scale", "found_inf"):
            if name not in _call(op):
                continue
            rule = f"{name} must be one float32 element"
            wrong[f"{op} {name} double"] = (op, {name: torch.ones((), dtype=wide)}, rule)
            wrong[f"{op} {name} two"] = (op, {name: torch.ones(2)}, rule)
        rule = f"stats must be contiguous int64 of {8 * count} elements"
        long = torch.int64
        wrong[f"{op} stats int32"] = (op, {"stats": torch.zeros(count, 8).int()}, rule)
        wrong[f"{op} stats short"] = (op, {"stats": torch.zeros(7, dtype=long)}, rule)
        strided_stats = torch.zeros(16 * count, dtype=long)[::2]
        wrong[f"{op} stats strided"] = (op, {"stats": strided_stats}, rule)
    for op, count in (("grad_check_", 2), (row, 1)):
        name = "square_sums" if op == "grad_check_" else "square_sum"
        # One name for the place, whichever operator.
        rule = f"square_sums must be contiguous float64 of {count} elements"
        wrong[f"{name} float"] = (op, {name: torch.zeros(count)}, rule)
        wrong[f"{name} long"] = (op, {name: torch.zeros(count + 1, dtype=wide)}, rule)
    for name, dtype_of, columns in (
        ("scales", torch.float32, 1),
        ("states", torch.int32, 2),
        ("found_inf", torch.float32, 1),
        ("configs", torch.float64, 6),
    ):
        word = str(dtype_of).removeprefix("torch.")
        rule = f"{name} must be contiguous {word} of {2 * columns} elements"
        wrong[f"{name} half"] = ("scale_update_", {name: torch.ones(2 * columns).half()}, rule)
        strided_places = torch.ones(4 * columns, dtype=dtype_of)[::2]
        wrong[f"{name} strided"] = ("scale_update_", {name: strided_places}, rule)
        if name != "scales":
            short = torch.ones(2 * columns - 1, dtype=dtype_of)
            wrong[f"{name} short"] = ("scale_update_", {name: short}, rule)
    return wrong


WRONG = _wrong_calls()


def _moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, list):
        return [move(x) for x in value]
    return move(value) if isinstance(value, Tensor) else value


def _tensors(call: dict[str, Any]) -> list[Tensor]:
    flat = [x for value in call.values() for x in (value if isinstance(value, list) else [value])]
    return [x for x in flat if isinstance(x, Tensor)]


def _memory(x: Tensor) -> Tensor:
    """All that a tensor is a view of, in a line."""
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


@pytest.mark.parametrize("name", WRONG)
def test_what_would_break_memory_is_refused(backend: Backend, name: str) -> None:
    """In the same words everywhere, and before anything is written."""
    op, changes, words = WRONG[name]
    device = backend.device

    def there(x: Tensor) -> Tensor:
        memory = _memory(x).to(device, copy=True)
        return memory.as_strided(x.shape, x.stride(), x.storage_offset())

    call = {key: _moved(value, there) for key, value in (_call(op) | changes).items()}
    assert list(call) == [a.name for a in getattr(torch.ops.fastemb, op).default._schema.arguments]
    before = [_memory(x).to("cpu", copy=True) for x in _tensors(call)]
    with pytest.raises(ValueError) as raised:
        getattr(backend.ops, op)(*call.values())
    assert str(raised.value).splitlines()[0] == f"{op}: {words}"
    for x, old in zip(_tensors(call), before, strict=True):
        assert torch.equal(_memory(x).cpu(), old)


@pytest.mark.parametrize("op", SCHEMAS)
def test_good_calls_are_good(backend: Backend, op: str) -> None:
    call = {key: _moved(value, lambda x: x.to(backend.device)) for key, value in _call(op).items()}
    getattr(backend.ops, op)(*call.values())


@pytest.mark.parametrize("backend", backend_params("reference", "triton"), indirect=True)
@pytest.mark.parametrize("op", SCHEMAS)
def test_tensors_of_other_devices_are_refused(backend: Backend, op: str) -> None:
    for name, value in _call(op).items():
        if not isinstance(value, Tensor) or name in ("grad", "scales"):
            continue
        call = {k: _moved(x, lambda x: x.to(backend.device)) for k, x in _call(op).items()}
        call[name] = value.to("meta")
        place = "device of scales" if op == "scale_update_" else "gradients' device"
        with pytest.raises(ValueError, match=f"{op}: {name}s? must be on the {place}"):
            getattr(backend.ops, op)(*call.values())


@pytest.mark.parametrize("op", SCHEMAS)
def test_opcheck(op: str) -> None:
    call = _call(op)
    torch.library.opcheck(getattr(torch.ops.fastemb, op).default, tuple(call.values()))
    if op == "row_grad_check_":
        call |= {"segments": None, "sources": None, "coefficients": None, "unscale": True}
    for name in ("inv_scale", "found_inf", "stats", "square_sums", "square_sum", "used_rows"):
        if name in call and op != "scale_update_":
            call[name] = None
    torch.library.opcheck(getattr(torch.ops.fastemb, op).default, tuple(call.values()))
