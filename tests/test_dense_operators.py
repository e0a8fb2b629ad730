"""Dense Adam in one pass: the bits of torch's fused kernel, and a way round where they differ."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import assert_same_bits, bits
from row_cases import number
from same_bits import digest_of, digests_of_levels, digests_of_threads
from torch import Tensor, nn

from fastemb import _dense_reference, _native, optim
from fastemb._dense_reference import ELEMENTS
from fastemb.optim import _dense
from fastemb.optim._dense_adam import agrees

SPECIAL = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 1e-30, 3e38, -3e38, torch.inf, -torch.inf, torch.nan]
)
NAMES = ("param", "grad", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")

# What torch chooses its instructions by; without fma its bits are others.
CAPABILITY = torch.backends.cpu.get_cpu_capability()
has_fma = pytest.mark.skipif(
    platform.machine() != "x86_64" or CAPABILITY not in ("AVX2", "AVX512"),
    reason=f"torch computes with {CAPABILITY} on {platform.machine()}",
)
cpu = pytest.mark.skipif(
    "dense_adam_" not in _native._loaded().serves["cpu"].get("cpu", ()),
    reason="the CPU library is not loaded",
)


def call(seed: int, blocks: int, **other: Any) -> dict[str, Any]:
    """Arguments of the operator by name; magnitudes from all binades that occur."""
    generator = torch.Generator().manual_seed(seed)
    numel = blocks * ELEMENTS

    def values(low: float, high: float) -> Tensor:
        sizes = torch.empty(numel).uniform_(low, high, generator=generator).exp()
        return torch.randn(numel, generator=generator) * sizes

    arguments = {
        "param": values(-10, 3),
        "grad": values(-20, 10),
        "exp_avg": values(-20, 3),
        "exp_avg_sq": values(-40, 6).abs(),
        "max_exp_avg_sq": values(-40, 6).abs(),
        "step": number(1.0),
        "factor": number(0.37),
        "divide": False,
        "found_inf": None,
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.0,
        "decoupled": False,
        "maximize": False,
    }
    assert not other.keys() - arguments.keys()
    return arguments | other


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}


def run(arguments: dict[str, Any], ops: Any = torch.ops.fastemb) -> None:
    ops.dense_adam_(*arguments.values())


def by_torch(arguments: dict[str, Any]) -> None:
    """The same by torch's kernel, of a gradient that is unscaled before."""
    a = arguments
    grad = a["grad"] / a["factor"] if a["divide"] else a["grad"] * a["factor"]
    (torch._fused_adamw_ if a["decoupled"] else torch._fused_adam_)(
        [a["param"]],
        [grad],
        [a["exp_avg"]],
        [a["exp_avg_sq"]],
        [] if a["max_exp_avg_sq"] is None else [a["max_exp_avg_sq"]],
        [a["step"]],
        **{k: a[k] for k in ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize")},
        amsgrad=a["max_exp_avg_sq"] is not None,
    )


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """The same bits; a NaN may be another one."""
    for name in NAMES:
        if want[name] is not None:
            g, w = got[name].nan_to_num(7.7, 8.8, 9.9), want[name].nan_to_num(7.7, 8.8, 9.9)
            assert_same_bits(g, w)


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    arguments = call(
        draw(st.integers(0, 10_000)),
        draw(st.sampled_from([0, 1, 2, 5, 1030])),
        step=number(float(draw(st.sampled_from([1, 2, 3, 17, 1000, 10**6, 2**24])))),
        factor=number(draw(st.sampled_from([1.0, 0.37, 2.0**-16, 3000.0, 0.0, float("inf")]))),
        divide=draw(st.booleans()),
        lr=draw(st.sampled_from([1e-3, 0.1, 0.0, 7.0])),
        beta1=draw(st.sampled_from([0.9, 0.5, 0.49, 0.1, 0.0])),
        beta2=draw(st.sampled_from([0.999, 0.9, 0.3, 0.0])),
        eps=draw(st.sampled_from([1e-8, 1e-3, 0.0])),
        weight_decay=draw(st.sampled_from([0.0, 0.1, 2.0])),
        decoupled=draw(st.booleans()),
        maximize=draw(st.booleans()),
    )
    if draw(st.booleans()):
        arguments["max_exp_avg_sq"] = None
    for name in draw(st.sets(st.sampled_from(NAMES))):
        if arguments[name] is not None:
            arguments[name][: len(SPECIAL)] = SPECIAL[: len(arguments[name])]
    return arguments


@cpu
@has_fma
@given(arguments=calls())
@drawn(150)
def test_bits_of_torch(arguments: dict[str, Any]) -> None:
    want = copied(arguments)
    by_torch(want)
    gradient = bits(arguments["grad"])
    run(arguments)
    assert_same(arguments, want)
    assert bits(arguments["grad"]) == gradient  # is only read
    assert agrees()


@given(arguments=calls())
@drawn(30)
def test_reference_is_torch(arguments: dict[str, Any]) -> None:
    want = copied(arguments)
    by_torch(want)
    run(arguments, _native.backend("reference"))
    assert_same(arguments, want)


@pytest.mark.parametrize("ops", [torch.ops.fastemb, _dense_reference])
@pytest.mark.parametrize("found_inf", [1.0, 2.0, float("nan"), float("inf")])
def test_skipped(ops: Any, found_inf: float) -> None:
    arguments = call(0, 3, found_inf=number(found_inf))
    before = copied(arguments)
    run(arguments, ops)
    for name in NAMES:
        assert_same_bits(arguments[name], before[name])
    arguments["found_inf"] = number(0.0)
    run(arguments, ops)
    assert bits(arguments["param"]) != bits(before["param"])


@pytest.mark.parametrize("ops", [torch.ops.fastemb, _dense_reference])
def test_refusals(ops: Any) -> None:
    """Each before anything is written."""
    wrong = {name: torch.zeros(2 * ELEMENTS) for name in NAMES[1:]}
    cases = [({name: value}, f"{name} must be contiguous float32") for name, value in wrong.items()]
    if ops is _dense_reference:  # what has a meta tensor goes to the fake kernel
        meta = torch.zeros(192, device="meta")
        cases += [({name: meta}, f"{name} must be") for name in NAMES[1:]]
    cases += [({name: torch.zeros(192).double()}, f"{name} must be") for name in NAMES]
    cases += [({name: torch.zeros(384)[::2]}, f"{name} must be") for name in NAMES]
    for name in ("step", "factor", "found_inf"):
        cases += [({name: torch.zeros(2)}, f"{name} must be one float32 element")]
        cases += [({name: torch.zeros(()).double()}, f"{name} must be one float32 element")]
    for other, message in cases:
        arguments = call(0, 3) | other
        before = copied(arguments)
        with pytest.raises(ValueError, match=message):
            run(arguments, ops)
        for name in NAMES:
            if name not in other:
                assert_same_bits(arguments[name], before[name])
    few = {name: torch.zeros(ELEMENTS + 1) for name in NAMES}
    with pytest.raises(ValueError, match=f"must be a multiple of {ELEMENTS}"):
        run(call(0, 1) | few, ops)


def test_opcheck() -> None:
    operator = torch.ops.fastemb.dense_adam_.default
    torch.library.opcheck(operator, tuple(call(0, 2, found_inf=number(0.0)).values()))
    torch.library.opcheck(operator, tuple(call(0, 2, max_exp_avg_sq=None).values()))


def digest(ops: Any) -> str:
    arguments = call(3, 5000, weight_decay=0.1)
    run(arguments, ops)
    return digest_of(arguments[name] for name in NAMES)


@cpu
def test_thread_counts() -> None:
    assert len(digests_of_threads(digest)) == 1


@cpu
def test_instruction_sets() -> None:
    digests = digests_of_levels("test_dense_operators")
    assert len(set(digests.values())) == 1, digests


# ---- in the optimizer --------------------------------------------------------------------------


def trained(cls: Any, sizes: list[int], scale: float, **options: Any) -> list[Tensor]:
    """Parameters after some steps under `torch.amp.GradScaler`."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator)) for n in sizes]
    optimizer = cls(params, lr=0.01, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    scaler.scale(torch.zeros(()))
    for step in range(4):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator) * scaler.get_scale()
        if step == 2:
            params[0].grad[1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
    return [param.detach() for param in params]


SIZES = [5, _dense._ALIGNMENT, _dense._ALIGNMENT + 13, 3 * _dense._ALIGNMENT + 65]


@cpu
@has_fma
@pytest.mark.parametrize("scale", [2.0**10, 1000.0])
def test_large_parameters_take_one_pass(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """All but what torch's vectorised loop leaves over."""
    operator = torch.ops.fastemb.dense_adam_
    sizes = []

    def listening(param: Tensor, *rest: Any) -> None:
        sizes.append(len(param))
        operator(param, *rest)

    monkeypatch.setattr(torch.ops.fastemb, "dense_adam_", listening)
    ours = trained(optim.Adam, SIZES, scale)
    assert sizes == [n - n % ELEMENTS for n in SIZES[1:]] * 4
    for got, want in zip(ours, trained(torch.optim.Adam, SIZES, scale, fused=True), strict=True):
        assert_same_bits(got, want)


def prints_whether_bits_are_those_of_torch() -> None:
    ours, theirs = (
        trained(cls, SIZES, 1000.0, weight_decay=0.1, amsgrad=True, **extra)
        for cls, extra in ((optim.AdamW, {}), (torch.optim.AdamW, {"fused": True}))
    )
    same = all(bits(x) == bits(y) for x, y in zip(ours, theirs, strict=True))
    print(torch.backends.cpu.get_cpu_capability(), agrees(), same)


@cpu
@has_fma
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_where_torch_computes_otherwise(capability: str) -> None:
    """Its bits are ours, whether there is one pass or not."""
    done = subprocess.run(
        [sys.executable, "-c", "import test_dense_operators as t\n"
         "t.prints_whether_bits_are_those_of_torch()"],
        cwd=Path(__file__).parent,
        env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [capability.upper(), str(capability == "avx2"), "True"]


def test_defaults_of_torch_do_not_matter() -> None:
    agrees.cache_clear()
    before = agrees()
    default = torch.get_default_dtype()
    state = torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            agrees.cache_clear()
            assert agrees() == before
    finally:
        torch.set_default_dtype(default)
    assert torch.equal(torch.get_rng_state(), state)
