"""What `fastemb.amp.GradScaler` counts, the alarm, and ``mode="guard"``."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from optim_cases import assert_same_bits, coo, snapshot
from torch import Tensor, nn

import fastemb
from fastemb import optim
from fastemb.amp import BoundaryLinear, GradScaler

INF, NAN = float("inf"), float("nan")


def model_of(**params: nn.Parameter) -> nn.Module:
    model = nn.Module()
    for name, param in params.items():
        model.register_parameter(name, param)
    return model


def iterate(
    scaler: GradScaler, optimizer: torch.optim.Optimizer, grads: list[Tensor | None]
) -> None:
    scaler.scale(torch.zeros(()))
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    scaler.step(optimizer)
    scaler.update()


# ---- numbers ----


@pytest.mark.parametrize("explicit", [False, True])
def test_numbers(explicit: bool) -> None:
    values = [0.0, -0.0, 2.0**-26, 2.0**-15, -3.0, 2.0**-25, INF, -INF, NAN]
    p, q = nn.Parameter(torch.zeros(9)), nn.Parameter(torch.zeros(4, 1))
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.register(model_of(dense=p, rows=q))
    assert scaler.stats() == {"step": 0, "groups": {}, "gradients": {}, "boundaries": {}}
    optimizer = optim.SGD([p, q])
    scaler.scale(torch.zeros(()))
    p.grad = torch.tensor(values)
    q.grad = coo([2, 2, 1], torch.tensor([[8.0], [8.0], [0.0]]), 4)
    if explicit:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    numbers = scaler.stats()
    assert numbers["step"] == 1
    assert numbers["groups"]["root"] == {
        "scale": 2.0**10, "found_inf": True, "skips": 1, "growth_tracker": 0,
        "elements": 11, "zeros": 3, "tiny": 3, "flushed": 2, "subnormal": 1,
        "infinite": 2, "nan": 1, "largest": 16.0 * 2.0**-10,
    }  # fmt: skip
    assert numbers["gradients"] == {
        "dense": {
            "group": "root", "elements": 9, "zeros": 2, "tiny": 3, "flushed": 2, "subnormal": 1,
            "infinite": 2, "nan": 1, "largest": 3.0 * 2.0**-10,
        },
        "rows": {
            "group": "root", "elements": 2, "zeros": 1, "tiny": 0, "flushed": 0, "subnormal": 0,
            "infinite": 0, "nan": 0, "largest": 16.0 * 2.0**-10,
        },
    }  # fmt: skip
    assert all(
        type(v) in (int, float, str, bool)
        for kind in ("groups", "gradients")
        for entry in numbers[kind].values()
        for v in entry.values()
    )


def test_numbers_are_those_of_one_iteration() -> None:
    p = nn.Parameter(torch.zeros(3))
    scaler = GradScaler("cpu")
    optimizer = optim.SGD([p])
    for number in range(3):
        iterate(scaler, optimizer, [torch.full((3,), float(number))])
        row = scaler.stats()["gradients"]["parameter 0 of shape (3,)"]
        assert (row["elements"], row["zeros"]) == (3, 0 if number else 3)
        assert row["largest"] == number / 2.0**16
        assert scaler.stats()["step"] == number + 1


def test_a_parameter_of_two_optimizers() -> None:
    p = nn.Parameter(torch.zeros(3))
    scaler = GradScaler("cpu", init_scale=1.0)
    scaler.register(model_of(p=p))
    scaler.scale(torch.zeros(()))
    p.grad = torch.ones(3)
    for optimizer in (optim.SGD([p]), optim.SGD([p])):
        scaler.step(optimizer)
    scaler.update()
    assert scaler.stats()["gradients"]["p"]["elements"] == 6
    assert scaler.stats()["gradients"]["p"]["largest"] == 1.0


def test_numbers_that_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: until they have arrived, those of an earlier iteration stand."""

    class Event:
        arrived = False

        def query(self) -> bool:
            return self.arrived

        def synchronize(self) -> None:
            self.arrived = True

    p = nn.Parameter(torch.zeros(1))
    scaler = GradScaler("cpu", init_scale=1.0)
    optimizer = optim.SGD([p])
    pending = scaler._statistics._pending
    record = scaler._statistics.record
    events = []

    def late(*args: Any) -> None:
        record(*args)
        events.append(Event())
        pending[-1].arrived = events[-1]

    monkeypatch.setattr(scaler._statistics, "record", late)
    for number in range(3):
        iterate(scaler, optimizer, [torch.full((1,), float(number))])
    assert scaler.stats()["step"] == 0
    events[0].arrived = True
    assert scaler.stats()["step"] == 1
    assert events[2].arrived is False
    for event in events[:2]:
        event.arrived = True
    assert scaler.stats(wait=True)["step"] == 3
    assert not pending


def test_nothing_is_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense gradients, groups, clipping: nothing that a GPU would have to be waited for."""
    scaler = GradScaler("cpu", groups={"embedding": {}})
    table = fastemb.nn.Embedding(5, 4)
    model = nn.Sequential(table, BoundaryLinear(4, 3), nn.Linear(3, 1))
    scaler.register(model)
    optimizer = optim.Adam(model.parameters())

    def iterate() -> None:
        scaler.scale(model(torch.tensor([1, 2])).sum()).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    iterate()
    optimizer.zero_grad()

    def fail(*_: Any) -> None:
        raise AssertionError("the host has read a tensor")

    monkeypatch.setattr(scaler._statistics, "read", lambda: None)
    with monkeypatch.context() as patch:
        for name in ("item", "__bool__", "__float__", "__int__", "tolist"):
            patch.setattr(Tensor, name, fail)
        iterate()
    monkeypatch.undo()
    assert scaler.stats()["step"] == 2


# ---- tables ----


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = fastemb.nn.Embedding(5, 4)
        self.item = fastemb.nn.EmbeddingBag(5, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        user = self.user(ids)
        user *= 2.0  # in place, as on the output of torch's module
        return self.head(user + self.item(ids.unsqueeze(1)))


def test_what_comes_into_tables() -> None:
    torch.manual_seed(0)
    scaler = GradScaler("cpu", init_scale=8.0)
    model = Towers()
    scaler.register(model)
    scaler.register(model)  # again: nothing counts twice
    optimizer = optim.SGD(model.parameters())
    ids = torch.tensor([1, 2, 2])
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(ids).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        numbers = scaler.stats()
        assert {n: row["elements"] for n, row in numbers["boundaries"].items()} == {
            "user": 12, "item": 12
        }  # fmt: skip
        largest = float(model.head.weight.detach().abs().max())
        assert numbers["boundaries"]["item"]["largest"] == pytest.approx(largest, rel=1e-2)
        assert numbers["gradients"]["user.weight"]["elements"] == 20
        assert numbers["gradients"]["item.weight"]["elements"] == 8


def test_a_backward_without_scale_is_not_counted() -> None:
    scaler = GradScaler("cpu")
    model = Towers()
    scaler.register(model)
    model(torch.tensor([1])).sum().backward()
    scaler.scale(torch.zeros(()))
    assert not scaler._iteration.boundary_stats


@pytest.mark.parametrize("how", ["compile", "fx", "func"])
def test_traced_tables_are_left_alone(how: str) -> None:
    scaler = GradScaler("cpu")
    model = nn.Sequential(fastemb.nn.Embedding(5, 4), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    scaler.register(compiled)
    ids = torch.tensor([1])
    if how == "func":
        loss = lambda p: scaler.scale(torch.func.functional_call(model, p, ids).sum())  # noqa: E731
        grads = torch.func.grad(loss)({"1.bias": model[1].bias})
        assert float(grads["1.bias"]) == 2.0**16
    else:
        traced = compiled if how == "compile" else torch.fx.symbolic_trace(model)
        scaler.scale(traced(ids).sum()).backward()
    assert not scaler._iteration.boundary_stats
    assert scaler._registry.name_of(model[0].weight) == "0.weight"


def test_copies_of_a_registered_model() -> None:
    scaler = GradScaler("cpu")
    model = Towers()
    scaler.register(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        scaler.scale(other(torch.tensor([1])).sum()).backward()
        assert not scaler._iteration.boundary_stats


def test_neither_is_kept_alive() -> None:
    scaler, model = GradScaler("cpu"), Towers()
    optimizer = optim.SGD(model.parameters())
    scaler.register(model, optimizer)
    scaler.scale(model(torch.tensor([1])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.stats()
    references = [weakref.ref(model), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [r() for r in references] == [None, None]
    assert list(scaler._registry.optimizers()) == []
    reference = weakref.ref(scaler)
    model = Towers()
    scaler.register(model)
    del scaler
    gc.collect()
    assert reference() is None
    model(torch.tensor([1])).sum().backward()


# ---- the alarm ----


def bad_batches(scaler: GradScaler, count: int, value: float = INF) -> nn.Parameter:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    scaler.register(model_of(good=p, bad=q))
    optimizer = optim.SGD([p, q], lr=0.5)
    for _ in range(count):
        iterate(scaler, optimizer, [torch.ones(2), torch.full((1,), value)])
    scale = scaler.get_scale()
    assert scale > 0
    iterate(scaler, optimizer, [torch.full((2,), scale), None])
    return p


@pytest.mark.parametrize(("value", "text"), [(NAN, "1 NaN and 0"), (INF, "0 NaN and 1")])
def test_alarm_warns_once(value: float, text: str) -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=20)
    with pytest.warns(RuntimeWarning) as caught:
        p = bad_batches(scaler, 200, value)
    (warning,) = caught
    message = str(warning.message)
    assert "group 'root' were not finite in 20 consecutive" in message
    assert f"the gradient of bad has {text} infinite elements of 1" in message
    assert ("no scale cures NaN" in message) == (value != value)
    assert p.tolist() == [0.5, 0.5]
    assert scaler.get_scale() == 2.0**-126
    with pytest.warns(RuntimeWarning):  # a new run of skips, a new alarm
        bad_batches(scaler, 20)


def test_alarm_raises() -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=3, alarm="raise")
    with pytest.raises(RuntimeError, match="group 'root' were not finite in 3 consecutive"):
        bad_batches(scaler, 10)
    # The scaler is as after any update.
    assert scaler.get_scale() == 2.0**13
    assert scaler.stats()["step"] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bad_batches(scaler, 0)


def test_alarm_raises_each_time_for_all_groups() -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=2, alarm="raise", groups={"aux": {}})
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([p, q])
    for skips in range(1, 6):
        optimizer.zero_grad()
        scaler.scale((scaler.boundary(p, "aux") + q).sum()).backward()
        p.grad.fill_(INF)
        q.grad.fill_(INF)
        scaler.step(optimizer)
        text = f"(?s)group 'root' .* {skips} consecutive.*group 'aux' .* {skips} consecutive"
        with pytest.raises(RuntimeError, match=text) if skips > 1 else nullcontext():
            scaler.update()


def test_a_new_scale_leaves_no_numbers() -> None:
    scaler = GradScaler("cpu")
    p = nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([p])
    iterate(scaler, optimizer, [torch.ones(1)])
    before = scaler.stats()
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update(4.0)
    assert scaler.stats() == before
    assert before["step"] == 1
    iterate(scaler, optimizer, [torch.ones(1)])
    assert (scaler.stats()["step"], scaler.stats()["groups"]["root"]["scale"]) == (2, 4.0)


# ---- hooks of tables ----


def test_tables_keep_no_hooks() -> None:
    """Those of scalers that are gone, and of copies, go when the next comes or with a lookup."""
    model = nn.Sequential(fastemb.nn.Embedding(4, 2))
    (table,) = model
    ids = torch.tensor([1])
    scaler = GradScaler("cpu")
    for _ in range(3):
        scaler.register(model)
        assert len(table._forward_hooks) == 1
    other = GradScaler("cpu")
    other.register(model)
    assert len(table._forward_hooks) == 2
    model(ids)
    assert len(table._forward_hooks) == 2
    del other
    model(ids)
    assert len(table._forward_hooks) == 1
    for _ in range(3):
        scaler = GradScaler("cpu")
        scaler.register(model)
        assert len(table._forward_hooks) == 1

    copied = copy.deepcopy(model)
    copied(ids)
    assert not copied[0]._forward_hooks

    fastemb.revert(model)
    model(ids)
    assert not table._forward_hooks
    fastemb.convert(model)
    scaler.register(model)
    scaler.scale(model(ids).sum()).backward()
    optimizer = optim.SGD(model.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert scaler.stats()["boundaries"]["0"]["elements"] == 2


def test_a_table_that_is_registered_again_has_its_new_name() -> None:
    table = fastemb.nn.Embedding(4, 2)
    scaler = GradScaler("cpu")
    scaler.register(nn.ModuleDict({"a": table}))
    scaler.register(nn.ModuleDict({"b": table}))
    scaler.scale(table(torch.tensor([1])).sum()).backward()
    optimizer = optim.SGD(table.parameters())
    scaler.step(optimizer)
    scaler.update()
    assert list(scaler.stats()["boundaries"]) == ["b"]


def test_alarm_names_the_group() -> None:
    scaler = GradScaler("cpu", max_consecutive_skips=2, alarm="raise", groups={"aux": {}})
    p = nn.Parameter(torch.ones(1))
    scaler.register(model_of(table=p))
    optimizer = optim.SGD([p])
    text = "group 'aux' .* its scale is 32768, and the gradient of table has 0 NaN and 1 infinite"
    for last in (False, True):
        optimizer.zero_grad()
        scaler.scale(scaler.boundary(p, "aux").sum()).backward()
        p.grad.fill_(INF)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=text) if last else nullcontext():
            scaler.update()


# ---- guard ----


@pytest.mark.parametrize("make", [optim.Adam, torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("how", ["step", "unscale_", "clip"])
def test_guard_only_skips(make: Any, how: str) -> None:
    """The same bits as without a scaler that leaves the bad batches out by hand."""
    runs = []
    for guarded in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(3, 1)
        optimizer = make(layer.parameters(), lr=0.1)
        scaler = GradScaler("cpu", mode="guard", enabled=guarded, groups={"aux": {}})
        for number in range(6):
            bad = number in (0, 3)
            x = torch.randn(4, 3)
            loss = layer(scaler.boundary(x.requires_grad_(), "aux")).square().sum()
            optimizer.zero_grad()
            if not guarded and bad:
                continue
            scaler.scale(loss * (NAN if bad else 1.0)).backward()
            if how == "unscale_":
                scaler.unscale_(optimizer)
            elif how == "clip":
                scaler.clip_grad_norm_(optimizer, 1e6)
            scaler.step(optimizer)
            if guarded:
                assert scaler.step_was_skipped(optimizer) == bad
            scaler.update()
            assert scaler.get_scale() == 1.0
        if guarded:
            numbers = scaler.stats()
            assert numbers["step"] == 6
            assert numbers["groups"]["aux"]["scale"] == 1.0
        runs.append(snapshot(optimizer))
    assert runs[0] == runs[1]


def test_guard_alarms_and_saves() -> None:
    scaler = GradScaler("cpu", mode="guard", max_consecutive_skips=3, alarm="raise")
    with pytest.raises(RuntimeError, match="its scale is 1, and the gradient of bad has 1 NaN"):
        bad_batches(scaler, 3, NAN)
    with pytest.raises(ValueError, match="takes no new_scale with mode='guard'"):
        scaler.update(2.0)
    state = scaler.state_dict()
    assert state["scale"] == 1.0
    again = pickle.loads(pickle.dumps(scaler))
    assert again.state_dict() == state
    other = GradScaler("cpu", mode="guard")
    other.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert_same_bits(other.scale(torch.tensor(3.0)), torch.tensor(3.0))
    assert other.get_scale() == 1.0
