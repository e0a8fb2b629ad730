"""``row_adam_catch_up_`` of every backend against the steps one by one (see `lazy_cases`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import Backend, backend_params, interpreting_triton
from draws import drawn
from hypothesis import given
from lazy_cases import BETAS, OP, LazyCase, lazy_cases, make
from row_cases import DTYPES, LOW_PRECISION, number, with_its_strides
from row_model import assert_same_bytes
from same_bits import THREADS, digest_of, digests_of_levels, use_threads
from torch import Tensor

from fastemb._lazy_ops import SCHEMAS
from fastemb.optim._history import CAPACITY

# NumPy, which interprets Triton, tells of every infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
# The reference is what they are compared with.
every_kernel = pytest.mark.parametrize(
    "backend", backend_params("cpu", "cuda", "triton"), indirect=True
)
on_cpu = pytest.mark.parametrize("backend", backend_params("cpu"), indirect=True)


def check(backend: Backend, case: LazyCase) -> dict[str, Tensor]:
    got = case.run(backend.ops, backend.device)
    case.check(got)
    return got


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert_same_bytes(tensor, want[name])


# ---- the numerics contract ------------------------------------------------------------------


@every_kernel
@drawn(5 if interpreting_triton() else 40)
@given(case=lazy_cases(wide=not interpreting_triton()))
def test_any_call(backend: Backend, case: LazyCase) -> None:
    check(backend, case)


@every_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(backend: Backend, dtype: torch.dtype) -> None:
    """One row of each kind, longer than a tile, in the table's own type and in a master."""
    case = make(dtype, (5, 270), steps=12, weight_decay=0.1, amsgrad=True, gap=3)
    check(backend, case)
    if dtype in LOW_PRECISION:
        check(backend, make(dtype, (5, 33), steps=12, master=True, moment_dtype=BF16))


@every_kernel
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("betas", BETAS.values(), ids=BETAS)
def test_betas(backend: Backend, betas: tuple[float, float], amsgrad: bool) -> None:
    check(backend, make(F32, (8, 16), betas=betas, amsgrad=amsgrad, weight_decay=0.03))


@every_kernel
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1.0])
def test_eps(backend: Backend, eps: float) -> None:
    """From nothing but the series to nothing but the replay."""
    check(backend, make(F32, (8, 16), eps=eps))


def test_the_pairs_of_betas_are_what_they_are_called() -> None:
    smallest = {name: make(F32, (1, 1), betas=b).history for name, b in BETAS.items()}
    assert {name for name, ring in smallest.items() if ring.smallest_root == torch.inf} == {
        "series diverges",
        "replay grows",
    }
    assert smallest["replay grows"].horizon == CAPACITY
    assert smallest["no momentum"].horizon == 1
    assert smallest["short horizon"].horizon < 40 < smallest["usual"].horizon


@every_kernel
@pytest.mark.parametrize("steps", [CAPACITY - 1, CAPACITY + 70])
@pytest.mark.parametrize("penalty", [False, True], ids=["", "penalty"])
def test_the_longest_sleep(backend: Backend, steps: int, penalty: bool) -> None:
    """As long as the ring remembers, around its end."""
    case = make(
        F32,
        (3, 4),
        steps=steps,
        last=[steps - CAPACITY + 1, steps - CAPACITY + 2, steps - 500],
        weight_decay=1e-3,
        decoupled=not penalty,
    )
    check(backend, case)


@every_kernel
@pytest.mark.parametrize("penalty", [False, True], ids=["", "penalty"])
def test_a_sleep_around_the_end_of_the_ring(backend: Backend, penalty: bool) -> None:
    steps = CAPACITY + 5
    last = [steps - 9, steps - 6, steps - 5, steps - 1]
    check(
        backend,
        make(F32, (4, 9), steps=steps, last=last, weight_decay=1e-3, decoupled=not penalty),
    )


@every_kernel
def test_rows_without_a_history_of_their_own_decay(backend: Backend) -> None:
    """No gradient yet: the moments are zero, and with eps = 0 there is nothing to divide."""
    for eps in (1e-8, 0.0):
        case = make(F32, (4, 5), last=[0, 0, 3, 7], weight_decay=0.1, eps=eps)
        zeros = {name: torch.zeros(4, 5) for name in ("exp_avg", "exp_avg_sq")}
        case = replace(case, states=case.states | zeros)
        got = case.run(backend.ops, backend.device)
        kept = case.history.table[[0, 0, 3, 7], 4].unsqueeze(1)
        torch.testing.assert_close(
            got["param"].double(), case.memory.double() * kept, rtol=2.0**-22, atol=0
        )
        for name, state in zeros.items():
            assert_same_bytes(got[name], state)


@every_kernel
def test_a_nan_stays_where_it_is(backend: Backend) -> None:
    case = make(F32, (4, 5), last=[3, 3, 3, 3])
    exp_avg, exp_avg_sq = (case.before()[name].clone() for name in ("exp_avg", "exp_avg_sq"))
    exp_avg[0, 1] = exp_avg_sq[2, 3] = torch.nan
    exp_avg[2, 3] = 1.0
    spoilt = replace(case, states=case.states | {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq})
    got, want = (x.run(backend.ops, backend.device)["param"] for x in (spoilt, case))
    assert got.isnan().nonzero().tolist() == [[0, 1], [2, 3]]
    assert_same_bytes(got[~got.isnan()], want[~got.isnan()])


# ---- what is left alone ---------------------------------------------------------------------


def some_calls() -> list[LazyCase]:
    """Each way of rounding, with and without a penalty."""
    return [
        make(F32, (9, 18), steps=12, weight_decay=0.03),
        make(F32, (9, 18), steps=12, weight_decay=0.03, decoupled=False, amsgrad=True),
        make(BF16, (9, 18), steps=6, master=True, moment_dtype=BF16),
        make(torch.float16, (9, 18), steps=6, seed=7, rows=[8, 4, 0, 6], used_rows=3),
        make(F64, (6, 9), steps=6, betas=BETAS["replay grows"]),
    ]


@every_kernel
def test_a_second_call_changes_nothing(backend: Backend) -> None:
    for case in some_calls():
        once, twice = (case.run(backend.ops, backend.device, calls) for calls in (1, 2))
        assert_same(twice, once)


@every_kernel
@pytest.mark.parametrize("found", [1.0, 2.0, float("inf"), float("nan")])
def test_a_skipped_step_writes_nothing(backend: Backend, found: float) -> None:
    for case in some_calls():
        skipped = replace(case, found_inf=number(found))
        assert_same(skipped.run(backend.ops, backend.device), case.before())


@every_kernel
def test_no_rows(backend: Backend) -> None:
    for changes in ({"rows": []}, {"used_rows": 0}, {"rows": [-1, 9, 2**40]}):
        case = make(F32, (9, 5), **changes)
        assert case.sleepers() == []
        assert_same(case.run(backend.ops, backend.device), case.before())


@every_kernel
def test_rows_do_not_depend_on_the_company(backend: Backend) -> None:
    """Not on who else sleeps, nor on the place in `rows`: not even rounding."""
    for case in some_calls():
        whole = replace(case, rows=None, used_rows=None).run(backend.ops, backend.device)
        for row in case.sleepers()[-1:]:
            alone = replace(case, rows=torch.tensor([row]), used_rows=None)
            got = alone.run(backend.ops, backend.device)
            for name, tensor in whole.items():
                assert_same_bytes(got[name][row], tensor[row])


# ---- the CPU's kernels ----------------------------------------------------------------------


def digest(ops: Any) -> str:
    """Of everything that some calls write."""
    wide = [make(dtype, (7, 83), weight_decay=0.01, data_seed=1) for dtype in DTYPES]
    return digest_of(x for case in (*some_calls(), *wide) for x in case.run(ops).values())


@on_cpu
def test_same_bits_for_any_number_of_threads(backend: Backend) -> None:
    for penalty in (False, True):
        case = make(F32, (700, 70), steps=12, weight_decay=0.01, decoupled=not penalty)
        with use_threads(1):
            first = case.run(backend.ops)
        for threads in THREADS:
            with use_threads(threads):
                assert_same(case.run(backend.ops), first)


@on_cpu
def test_same_bits_for_every_instruction_set(backend: Backend) -> None:
    digests = digests_of_levels("test_lazy_operators")
    assert len(set(digests.values())) == 1, digests


# ---- arguments ------------------------------------------------------------------------------


def wrong_arguments() -> dict[str, tuple[dict[str, Any], str]]:
    ones, half = torch.ones, torch.float16
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "param 1-D": ({"param": ones(12)}, "param must be 2-D"),
        "param int": ({"param": ones(4, 3, dtype=torch.int32)}, "dtype must be"),
        "param columns apart": ({"param": ones(4, 6)[:, ::2]}, "neighbours"),
        "param rows overlap": ({"param": ones(3).expand(4, 3)}, "must not overlap"),
        "master of float32": ({"master": ones(4, 3)}, "master must be None"),
        "master short": ({"param": ones(4, 3).half(), "master": ones(3, 3)}, "master must be"),
        "moments mixed": ({"exp_avg": ones(4, 3, dtype=BF16)}, "must have one dtype"),
        "row_step short": ({"row_step": ones(3).int()}, "row_step must be"),
        "row_step long": ({"row_step": ones(4).long()}, "row_step must be"),
        "row_step strided": ({"row_step": ones(8).int()[::2]}, "row_step must be"),
        "rows int32": ({"rows": ones(4).int()}, "rows must be"),
        "rows 2-D": ({"rows": ones(2, 2).long()}, "rows must be"),
        "rows strided": ({"rows": torch.arange(8)[::2]}, "rows must be"),
        "used_rows long": ({"used_rows": ones(1).long()}, "used_rows must be"),
        "used_rows two": ({"used_rows": ones(2).int()}, "used_rows must be"),
        "step double": ({"step": ones((), dtype=F64)}, "step must be"),
        "found_inf two": ({"found_inf": ones(2)}, "found_inf must be"),
        "history float": ({"history": ones(8, 8)}, "history must be"),
        "history 1-D": ({"history": ones(64, dtype=F64)}, "history must be"),
        "history narrow": ({"history": ones(8, 7, dtype=F64)}, "history must be"),
        "history empty": ({"history": ones(0, 8, dtype=F64)}, "history must be"),
        "history strided": ({"history": ones(8, 8, dtype=F64).t()}, "history must be"),
    }
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        wrong[f"{name} short"] = ({name: ones(4, 2)}, f"{name} must be")
        wrong[f"{name} strided"] = ({name: ones(3, 4).t()}, f"{name} must be")
        wrong[f"{name} half"] = ({name: ones(4, 3, dtype=half)}, f"{name} must be")
    return wrong


WRONG = wrong_arguments()


def call(backend: Backend, changes: dict[str, Any]) -> None:
    arguments = make(F32, (4, 3), amsgrad=True, steps=5).arguments() | changes
    names = [a.name for a in getattr(torch.ops.fastemb, OP).default._schema.arguments]
    assert list(arguments) == names
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.device.type == "cpu":
            arguments[name] = with_its_strides(value, backend.device)
    getattr(backend.ops, OP)(*arguments.values())


@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_that_would_break_memory_are_refused(backend: Backend, wrong: str) -> None:
    changes, words = WRONG[wrong]
    with pytest.raises(ValueError, match=f"^{OP}: .*{words}"):
        call(backend, changes)


@pytest.mark.parametrize("backend", backend_params("reference", "triton"), indirect=True)
@pytest.mark.parametrize("name", ["master", "exp_avg", "row_step", "rows", "step", "history"])
def test_tensors_of_other_devices_are_refused(backend: Backend, name: str) -> None:
    elsewhere = torch.ones(4, 3, device="meta")
    with pytest.raises(ValueError, match=f"^{OP}: {name} must be on param's device"):
        call(backend, {name: elsewhere})


def test_opcheck() -> None:
    assert list(SCHEMAS) == [OP]
    for case in some_calls()[:3:2]:
        arguments = tuple(case.arguments().values())
        torch.library.opcheck(getattr(torch.ops.fastemb, OP).default, arguments)
