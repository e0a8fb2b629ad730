"""Lookups to compare backends on: what they are, how hypothesis draws them, what equality means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Half a unit in the last place, relative, and the half spacing of subnormals.
ROUNDING = {
    torch.float16: (2.0**-11, 2.0**-25),
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float32: (2.0**-24, 2.0**-150),
    torch.float64: (2.0**-53, 0.0),
}


@dataclass(frozen=True)
class Case:
    """One lookup: everything that the operators take, in the order of their schemas."""

    weight: Tensor
    indices: Tensor
    offsets: Tensor | None
    per_sample_weights: Tensor | None
    mode: str
    padding_idx: int
    include_last_offset: bool
    scale_grad_by_freq: bool
    output_dtype: torch.dtype
    grad_output: Tensor

    @property
    def acc(self) -> torch.dtype:
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    def forward(self, backend: Any) -> tuple[Tensor, Tensor]:
        output, argmax = backend.embedding_bag(
            self.weight,
            self.indices,
            self.offsets,
            self.per_sample_weights,
            self.mode,
            self.padding_idx,
            self.include_last_offset,
            self.scale_grad_by_freq,
            False,
            self.output_dtype,
            "t",
        )
        return output, argmax

    def groups(self, backend: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        order, rows, segments, num_rows = backend.group_indices(
            self.indices,
            self.offsets,
            self.weight.shape[0],
            self.padding_idx,
            self.include_last_offset,
        )
        return order, rows, segments, num_rows

    def backward(self, backend: Any, dense: bool, argmax: Tensor | None) -> Tensor:
        groups = self.groups(backend)
        rows = self.weight.shape[0]
        grad: Tensor = backend.embedding_bag_backward(
            self.grad_output,
            self.indices,
            self.offsets,
            self.per_sample_weights,
            argmax,
            *groups,
            rows,
            rows if dense else int(groups[3]),
            self.mode,
            self.padding_idx,
            self.include_last_offset,
            self.scale_grad_by_freq,
            dense,
            self.acc,
        )
        return grad

    def terms(self, backend: Any, order: Tensor) -> tuple[Tensor, Tensor]:
        sources, coefficients = backend.bag_terms(
            self.indices,
            self.offsets,
            self.per_sample_weights,
            order,
            self.weight.shape[0],
            self.mode,
            self.padding_idx,
            self.include_last_offset,
            self.acc,
        )
        return sources, coefficients

    def per_sample_backward(self, backend: Any) -> Tensor:
        grad: Tensor = backend.embedding_bag_per_sample_weights_backward(
            self.grad_output.to(self.acc),
            self.weight,
            self.indices,
            self.offsets,
            self.mode,
            self.padding_idx,
            self.include_last_offset,
        )
        return grad

    def to(self, device: torch.device | str) -> Case:
        """The same lookup with its tensors on ``device``; strides and alignment stay."""

        def move(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            elements = x.untyped_storage().nbytes() // x.element_size()
            storage = x.as_strided((elements,), (1,), 0).to(device)
            return storage.as_strided(x.shape, x.stride(), x.storage_offset())

        tensors = {
            name: move(getattr(self, name))
            for name in ("weight", "indices", "offsets", "per_sample_weights", "grad_output")
        }
        return replace(self, **tensors)

    def exact(self) -> Case:
        """The same lookup in float64."""
        samples = self.per_sample_weights
        return replace(
            self,
            weight=self.weight.double(),
            per_sample_weights=None if samples is None else samples.double(),
            output_dtype=torch.float64,
            grad_output=self.grad_output.double(),
        )

    def sizes(self) -> Case:
        """The float64 lookup of magnitudes, whose sums bound the rounding errors."""
        exact = self.exact()
        samples = exact.per_sample_weights
        return replace(
            exact,
            weight=exact.weight.abs(),
            per_sample_weights=None if samples is None else samples.abs(),
            grad_output=exact.grad_output.abs(),
        )


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _table(rows: int, dim: int, dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    """A table whose rows are contiguous; ``padded`` and ``shifted`` ones defeat or keep vectors."""
    extra = {"plain": 0, "padded": 16, "odd": 1, "shifted": 0}[layout]
    shift = 1 if layout == "shifted" else 0
    storage = torch.full((rows * (dim + extra) + shift,), torch.nan, dtype=dtype)
    table = storage[shift:].as_strided((rows, dim), (dim + extra, 1), storage_offset=shift)
    return table.copy_(_values((rows, dim), dtype, seed))


@st.composite
def cases(draw: st.DrawFn, modes: tuple[str, ...] = ("sum", "mean", "max")) -> Case:
    dtype = draw(st.sampled_from(DTYPES))
    mode = draw(st.sampled_from(modes))
    rows = draw(st.sampled_from([1, 2, 7, 40]))
    dim = draw(st.sampled_from([1, 2, 3, 8, 16, 24, 33, 64, 129, 256, 264, 520]))
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    include_last_offset = False
    offsets = None
    if draw(st.booleans()):
        bags, length = draw(st.integers(0, 6)), draw(st.sampled_from([0, 1, 2, 5, 300]))
        shape: tuple[int, ...] = (bags, length)
    else:
        # Lengths around the kernels' steps (4, 8) and their chunk (256).
        length = st.sampled_from([0, 0, 1, 2, 3, 4, 5, 8, 9, 255, 256, 257, 600])
        lengths = draw(st.lists(length, max_size=6))
        include_last_offset = draw(st.booleans())
        behind = draw(st.integers(0, 3)) if include_last_offset else 0
        bounds = [0]
        for n in lengths:
            bounds.append(bounds[-1] + n)
        if not include_last_offset:
            bounds.pop()
            behind = 0
        shape = (sum(lengths) + behind,)
        offset_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
        offsets = torch.tensor(bounds, dtype=offset_dtype)
    # A skewed draw: one row gets most positions, so that its segment is long.
    indices = torch.randint(0, rows, shape, generator=generator)
    if draw(st.booleans()):
        hot = torch.rand(shape, generator=generator) < 0.8
        indices = torch.where(hot, rows // 2, indices)
    num_bags = shape[0] if offsets is None else offsets.numel() - include_last_offset
    samples = None
    if mode != "max" and draw(st.booleans()):
        samples = _values(shape, dtype, seed + 1)
    layout = draw(st.sampled_from(["plain", "plain", "padded", "odd", "shifted"]))
    output_dtype = draw(st.sampled_from(DTYPES)) if dtype != torch.float64 else torch.float64
    grad_dtype = torch.float64 if dtype == torch.float64 else draw(st.sampled_from(DTYPES[:3]))
    return Case(
        weight=_table(rows, dim, dtype, layout, seed + 2),
        indices=indices.to(index_dtype),
        offsets=offsets,
        per_sample_weights=samples,
        mode=mode,
        padding_idx=draw(st.sampled_from([-1, rows // 2, 0])),
        include_last_offset=include_last_offset,
        scale_grad_by_freq=mode != "max" and draw(st.booleans()),
        output_dtype=output_dtype,
        grad_output=_values((num_bags, dim), grad_dtype, seed + 3),
    )


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Equal bits, zeros' signs included; any NaN equals any NaN."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if not got.dtype.is_floating_point:
        assert torch.equal(got, want)
        return
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = (got.view(integer) == want.view(integer)) | (got.isnan() & want.isnan())
    assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} differ"


def assert_same_states(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Of the same names, the same bits."""
    assert got.keys() == want.keys()
    for name, value in got.items():
        try:
            assert_same_bits(value, want[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def assert_within(got: Tensor, exact: Tensor, size: Tensor, terms: int, acc: torch.dtype) -> None:
    """Error of one rounding to got's type and of a sum; ``size`` is the sum of magnitudes."""
    half_ulp, half_step = ROUNDING[got.dtype]
    unit = ROUNDING[acc][0]
    largest = torch.finfo(got.dtype).max
    sums = 2 * (terms + 4) * unit * size
    bound = sums + half_ulp * (exact.abs() + sums) + half_step
    error = (got.double() - exact.clamp(-largest, largest)).abs()
    assert bool((error <= bound).all()), f"largest excess {float((error - bound).max())}"


def one_bag(values: list[float], mode: str) -> Case:
    """A column table of ``values`` and one bag that names each of its rows."""
    n = len(values)
    return Case(
        weight=torch.tensor(values).reshape(n, 1),
        indices=torch.arange(n).reshape(1, n),
        offsets=None,
        per_sample_weights=None,
        mode=mode,
        padding_idx=-1,
        include_last_offset=False,
        scale_grad_by_freq=False,
        output_dtype=torch.float32,
        grad_output=torch.ones(1, 1),
    )
