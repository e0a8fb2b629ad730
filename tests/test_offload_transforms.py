"""Offloaded tables in traces and in torch.func transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from offload_cases import (
    Case,
    TableCase,
    build,
    ids_of,
    limits,
    new_engine,
    raises,
    saved,
)
from offload_cases import train as train_case
from optim_cases import bits
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastemb
from fastemb.offload import OffloadEngine

pytestmark = limits


def test_traces_and_fake_tensors_are_refused_before_the_first_use() -> None:
    """Nothing of a table is made from what they make of its shape."""
    module = nn.Embedding(9, 4)
    expected = bits(module.weight[:8])
    fastemb.convert(module, offload=new_engine(cache=8))
    ids = torch.arange(8)
    refused = "'embedding' is offloaded and cannot be looked up in a trace"
    with raises(RuntimeError, refused):
        torch.jit.trace(module, ids)
    with raises(RuntimeError, refused):
        make_fx(module)(ids)
    with FakeTensorMode(allow_non_fake_inputs=True), raises(RuntimeError, refused):
        module(ids)
    assert bits(module(ids)) == expected


@pytest.mark.parametrize("cached", [False, True])
def test_transforms_of_a_table_that_trains_are_refused_before_anything_moves(cached: bool) -> None:
    case = Case((TableCase(),))
    batches = case.batches()

    def run(engine: OffloadEngine | None) -> Any:
        model, optimizer = build(case, engine)
        train_case(case, model, optimizer, batches)
        if engine is not None:
            last = batches[-1 if cached else 0]

            def loss(layer: Tensor) -> Tensor:
                named = {"layer.weight": layer}
                return torch.func.functional_call(model, named, (last["lookups"],)).sum()

            weight = model.layer.weight.detach()
            refused = "table 't0' is offloaded, which cannot be used within torch.func"
            for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd):
                with raises(NotImplementedError, refused):
                    transform(loss)(weight)
            with raises(NotImplementedError, refused):
                torch.func.functionalize(loss)(weight)
        train_case(case, model, optimizer, batches)
        return saved(model, optimizer)

    assert run(new_engine(cache=12)) == run(None)


def test_a_loop_and_a_checkpoint_within_a_transform() -> None:
    """What an engine does is no part of it."""
    case = Case((TableCase(),))
    batches = case.batches()
    engine = new_engine(cache=12)
    model, optimizer = build(case, engine)
    train_case(case, model, optimizer, batches)

    def loss(scale: Tensor) -> Tensor:
        for _ in engine.prefetch(batches, ids=ids_of):
            scale = scale * 2
        return scale * len(model.state_dict())

    assert torch.func.grad(loss)(torch.tensor(1.0)) == 2 ** len(batches) * 3
    train_case(case, model, optimizer, batches)
    want, want_optimizer = build(case, None)
    train_case(case, want, want_optimizer, batches * 2)
    assert saved(model, optimizer) == saved(want, want_optimizer)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_transforms_with_a_frozen_table(max_norm: float | None) -> None:
    case = Case((TableCase(weighted=True, max_norm=max_norm),))
    batch = case.batches()[0]
    ids, weights = batch["lookups"]["t0"].values()

    def run(engine: OffloadEngine | None) -> Any:
        model, _ = build(case, engine)
        model.requires_grad_(False)

        def loss(ids: Tensor, weights: Tensor) -> Tensor:
            return model({"t0": {"input": ids, "per_sample_weights": weights}}).square().sum()

        found = torch.func.grad(loss, argnums=1)(ids, weights)
        each = torch.func.vmap(loss, (None, 0))(ids, weights.expand(3, *weights.shape))
        return bits(found), bits(each), bits(model.state_dict()["t0.weight"])

    engine = new_engine(cache=12)
    assert run(engine) == run(None)
    with raises(NotImplementedError, "whose ids cannot be mapped over by vmap"):
        model, _ = build(case, new_engine(cache=12))
        model.requires_grad_(False)
        torch.func.vmap(model.t0)(ids.unsqueeze(1), weights.unsqueeze(1))
