"""Training with an `OffloadEngine` ends with the bits of ``sparse="fused"`` without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from draws import drawn
from hypothesis import given
from hypothesis import strategies as st
from offload_cases import (
    DTYPES,
    OPTIMIZERS,
    Case,
    TableCase,
    assert_same_training,
    build,
    delayed,
    ids_of,
    limits,
    loss_of,
    new_engine,
    saved,
    train,
    trained,
)
from optim_cases import bits

import fastemb

pytestmark = limits


@st.composite
def table_cases(draw: st.DrawFn) -> TableCase:
    rows = draw(st.integers(1, 30))
    bag = draw(st.booleans())
    mode = draw(st.sampled_from(["sum", "mean", "max"])) if bag else "sum"
    layout = draw(st.sampled_from(["matrix", "bags", "closed"])) if bag else "matrix"
    return TableCase(
        rows=rows,
        dim=draw(st.integers(1, 9)),
        bag=bag,
        mode=mode,
        layout=layout,
        weighted=bag and mode != "max" and draw(st.booleans()),
        padding_idx=draw(st.none() | st.integers(-rows, rows - 1)),
        max_norm=draw(st.none() | st.just(0.8)),
        by_freq=mode != "max" and draw(st.booleans()),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )


def _possible(case: Case) -> bool:
    return not (case.optimizer == "Adam bf16 states" and case.dtype == torch.float64)


cases = st.builds(
    Case,
    tables=st.lists(table_cases(), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    steps=st.integers(1, 8),
    size=st.integers(1, 6),
    seed=st.integers(0, 2**31),
    accumulate=st.sampled_from([1, 1, 1, 3]),
    clip=st.sampled_from([None, None, 0.01]),
    schedule=st.booleans(),
).filter(_possible)

engines = st.fixed_dictionaries(
    {
        "cache": st.integers(0, 12),
        "policy": st.sampled_from(["lfu", "lru"]),
        "depth": st.integers(0, 4),
        # One record, a few of them, or all at once.
        "staging_bytes": st.sampled_from([1, 300, 1 << 14]),
        "verify": st.sampled_from(["all", "all", "sample", "off"]),
        "prefetch": st.booleans(),
    }
)


@drawn(60)
@given(cases, engines)
def test_any_training(case: Case, engine: dict[str, Any]) -> None:
    assert_same_training(case, **engine)


@drawn(12)
@given(cases, engines, st.integers(0, 999))
def test_any_training_with_lanes_that_are_late(
    case: Case, engine: dict[str, Any], seed: int
) -> None:
    assert_same_training(case, make_lane=delayed(seed), **engine)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str, dtype: torch.dtype) -> None:
    case = Case((TableCase(), TableCase(bag=False)), dtype, optimizer, steps=8)
    if _possible(case):
        assert_same_training(case, staging_bytes=256)


@pytest.mark.parametrize("prefetch", [True, False])
def test_200_steps_under_a_scaler_with_overflows(prefetch: bool) -> None:
    case = Case((TableCase(rows=80), TableCase(rows=40, mode="mean")), torch.float16, steps=200)
    batches = case.batches()

    def run(offloaded: bool) -> tuple[Any, ...]:
        engine = new_engine(cache=16, staging_bytes=512) if offloaded else None
        model, optimizer = build(case, engine)
        scaler = fastemb.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=20)
        loader: Any = batches
        if engine is not None and prefetch:
            loader = engine.prefetch(batches, ids=ids_of)
        scales = []
        for number, batch in enumerate(loader):
            loss, _ = loss_of(model, batch)
            if number % 17 == 5:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if number % 2:
                scaler.unscale_(optimizer)
                fastemb.optim.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        if engine is not None:
            stats = engine.stats
            assert stats.written_back > 200, stats
            assert stats.checks >= stats.fetched + stats.written_back
        return (scales, *saved(model, optimizer))

    want, got = run(False), run(True)
    assert len(set(want[0])) > 2
    assert got == want


def test_the_cache_may_be_exactly_the_largest_batch() -> None:
    case = Case((TableCase(rows=200),), steps=30, size=8)
    for depth in (0, 1, 4):
        assert_same_training(case, cache=0, depth=depth)


def test_a_cache_as_large_as_the_table() -> None:
    case = Case((TableCase(rows=20),), steps=10)
    assert_same_training(case, cache=100)


def test_clipping_adds_up_rows_in_the_order_of_the_table() -> None:
    """The norm is one sum over all rows, and slots are in another order than rows."""
    table = TableCase(rows=500, dim=9, bag=False)
    case = Case((table,), torch.float64, "SGD", steps=12, size=40, clip=1e-3)
    assert_same_training(case, cache=30)


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_the_norm_of_a_scaler_is_that_of_the_rows_in_their_order(mode: str) -> None:
    """Of which 32 bits are shown, so what they are taken from is looked at."""
    case = Case((TableCase(rows=500, dim=9, mode=mode),), steps=6, size=40)
    batches = case.batches()

    def run(engine: Any) -> Any:
        model, optimizer = build(case, engine)
        scaler = fastemb.amp.GradScaler("cpu", init_scale=3 * 2.0**8)
        loader: Any = batches if engine is None else engine.prefetch(batches, ids=ids_of)
        sums = []
        for batch in loader:
            scaler.scale(loss_of(model, batch)[0]).backward()
            norm = scaler.clip_grad_norm_(optimizer, 1e-3)
            found = scaler._iteration.passes[id(optimizer)].square_sums
            sums += [bits(norm), *(bits(squares) for _, squares in found)]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return (sums, *saved(model, optimizer))

    assert run(new_engine(cache=300)) == run(None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scale_groups(dtype: torch.dtype) -> None:
    """A scaler has to find the tables behind a boundary, or their scale is not taken out."""
    case = Case((TableCase(rows=80), TableCase(rows=40, mode="mean")), dtype, steps=12)
    batches = case.batches()

    def run(engine: Any) -> Any:
        model, optimizer = build(case, engine)
        scaler = fastemb.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        scaler.register(model, optimizer)
        loader: Any = batches if engine is None else engine.prefetch(batches, ids=ids_of)
        scales = []
        for number, batch in enumerate(loader):
            output = scaler.boundary(model(batch["lookups"]), group="tables")
            loss = (output - batch["target"]).square().mean()
            if number == 5:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update(65536.0 if number == 1 else None)
            scales.append(scaler.stats(wait=True)["groups"])
            optimizer.zero_grad()
        return (repr(scales), *saved(model, optimizer))

    assert run(new_engine(cache=16)) == run(None)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("depth", [0, 3])
def test_accumulation_over_many_batches(prefetch: bool, depth: int) -> None:
    """More batches than wait unmerged."""
    case = Case((TableCase(), TableCase(bag=False)), steps=40, accumulate=20)
    assert_same_training(case, depth=depth, prefetch=prefetch)


def test_every_gradient_is_that_of_a_plain_training_with_a_changing_batch_size() -> None:
    case = Case(steps=0)
    sizes = [1, 7, 2, 30, 0, 3]
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "lookups": {"t0": {"input": torch.randint(0, 20, (size, 2), generator=generator)}},
            "target": torch.ones(size),
        }
        for size in sizes
    ]
    results = []
    for offloaded in (False, True):
        engine = new_engine(cache=20, depth=3) if offloaded else None
        model, optimizer = build(case, engine)
        loader: Any = batches if engine is None else engine.prefetch(batches, ids=ids_of)
        losses = []
        for batch in loader:
            loss = (model(batch["lookups"]) - batch["target"]).square().sum()
            loss.backward()
            losses.append(bits(loss))
            optimizer.step()
            optimizer.zero_grad()
        results.append((losses, *saved(model, optimizer)))
    assert results[0] == results[1]


def test_weights_of_samples_find_their_rows_after_the_next_batch_was_fetched() -> None:
    """The gradient of per_sample_weights reads the table in the backward."""
    case = Case((TableCase(rows=60, weighted=True),), steps=6)
    batches = case.batches()

    def run(late: bool, engine: Any) -> list[Any]:
        model, optimizer = build(case, engine)
        loader: Any = batches if engine is None else engine.prefetch(batches, ids=ids_of)
        waiting = None
        seen = []
        for batch in loader:
            if late and waiting is not None:
                loss, leaves = waiting
                loss.backward()
                seen += [bits(leaf.grad) for leaf in leaves]
                optimizer.step()
                optimizer.zero_grad()
            waiting = loss_of(model, batch)
        return [seen, *saved(model, optimizer)]

    # Two batches and those ahead hold their rows.
    want = run(True, None)
    for prefetched in (1, 3):
        engine = new_engine(cache=50, depth=prefetched)
        assert run(True, engine) == want


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("prefetch", [True, False])
def test_ids_behind_the_last_bag_may_be_anything(mode: str, prefetch: bool) -> None:
    """Such as what fills batches up to one length."""
    table = TableCase(rows=20, mode=mode, layout="closed", weighted=mode != "max")
    case = Case((table,))
    batches = case.batches()
    for batch in batches:
        given = batch["lookups"]["t0"]
        given["input"] = torch.cat([given["input"], torch.tensor([-1, 3, 1 << 40])])
        if "per_sample_weights" in given:
            given["per_sample_weights"] = torch.cat([given["per_sample_weights"], torch.ones(3)])

    def in_bags(batch: dict[str, Any]) -> torch.Tensor:
        given = batch["lookups"]["t0"]
        return given["input"][: given["offsets"][-1]]

    want = trained(case, None, batches=batches)
    engine = new_engine(cache=20)
    model, optimizer = build(case, engine)
    loader: Any = engine.prefetch(batches, ids=in_bags) if prefetch else batches
    assert (train(case, model, optimizer, loader), *saved(model, optimizer)) == want


def test_options_that_change_in_training() -> None:
    """Momentum that is switched on later makes a state later, and so another record."""
    case = Case((TableCase(rows=50),), optimizer="SGD", steps=6)
    batches = case.batches()

    def run(engine: Any) -> Any:
        model, optimizer = build(case, engine)
        loader: Any = batches if engine is None else engine.prefetch(batches, ids=ids_of)
        for number, batch in enumerate(loader):
            if number == 3:
                optimizer.param_groups[0]["momentum"] = 0.9
            loss, _ = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return saved(model, optimizer)

    assert run(new_engine(cache=24)) == run(None)


def test_rows_renormalised_by_evaluation_are_written_back() -> None:
    case = Case((TableCase(rows=60, max_norm=0.1),), optimizer="SGD", steps=8)
    batches = case.batches()

    def run(engine: Any, grad: bool) -> Any:
        model, _ = build(case, engine)
        loader: Any = batches if engine is None else engine.prefetch(batches, ids=ids_of)
        outputs = []
        with torch.set_grad_enabled(grad):
            for batch in loader:
                outputs.append(bits(model(batch["lookups"]).detach()))
        return outputs, bits(model.state_dict()["t0.weight"])

    assert run(new_engine(cache=12), False) == run(None, False)
    assert run(new_engine(cache=12, depth=0), True) == run(None, True)


def test_file_tables(tmp_path: Any) -> None:
    case = Case((TableCase(rows=40), TableCase(bag=False)), steps=8)
    assert_same_training(case, storage=tmp_path)
    assert_same_training(replace(case, dtype=torch.float16), storage=tmp_path / "half")


@pytest.mark.parametrize("prefetch", [False, True])
def test_the_default_device_does_not_matter(prefetch: bool) -> None:
    case = Case()
    data = case.batches()
    engine = new_engine(cache=18)
    model, optimizer = build(case, engine)
    with torch.device("meta"):
        seen = train(case, model, optimizer, engine.prefetch(data, ids_of) if prefetch else data)
        engine.flush()
        found = (seen, *saved(model, optimizer))
    assert found == trained(case, None, batches=data)
