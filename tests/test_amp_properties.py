"""Random graphs with boundaries: gradients have the scale of their group, or are refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optim_cases import assert_same_bits, snapshot
from torch import Tensor, nn

from fastemb import optim
from fastemb.amp import GradScaler

SCALES = {"root": 2.0**3, "a": 2.0**10, "b": 2.0**6}


@dataclass(eq=False)
class Node:
    """A parameter, a boundary, or what is computed from other nodes."""

    kind: str
    inputs: list[Node] = field(default_factory=list)
    group: str = ""
    number: int = 0

    def value(self, params: list[nn.Parameter], scaler: GradScaler | None) -> Tensor:
        known: dict[Node, Tensor] = {}

        def of(node: Node) -> Tensor:
            if node not in known:
                known[node] = compute(node)
            return known[node]

        def compute(node: Node) -> Tensor:
            if node.kind == "param":
                return params[node.number]
            first, *rest = (of(i) for i in node.inputs)
            if node.kind == "boundary":
                return first if scaler is None else scaler.boundary(first, node.group)
            return first + rest[0] if node.kind == "add" else first * rest[0] * 0.5

        return of(self)

    def groups(self, group: str, found: dict[object, set[str]]) -> None:
        """Enter, path by path, the groups that parameters and boundaries are reached in."""
        if self.kind in ("param", "boundary"):
            found.setdefault(self.number if self.kind == "param" else self, set()).add(group)
        for node in self.inputs:
            node.groups(self.group or group, found)


@st.composite
def graphs(draw: st.DrawFn) -> Node:
    nodes = [Node("param", number=n) for n in range(draw(st.integers(1, 4)))]
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["add", "multiply", "boundary"]))
        arity = 1 if kind == "boundary" else 2
        inputs = [draw(st.sampled_from(nodes)) for _ in range(arity)]
        group = draw(st.sampled_from(sorted(SCALES))) if kind == "boundary" else ""
        nodes.append(Node(kind, inputs, group))
    return nodes[-1]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(3, generator=generator)) for _ in range(4)]


@given(graphs(), st.sampled_from(["optimizer", "group", "all"]), st.booleans())
def test_scales_of_random_graphs(graph: Node, skip: str, explicit: bool) -> None:
    scaler = GradScaler(
        "cpu",
        init_scale=SCALES["root"],
        groups={name: {"init_scale": SCALES[name]} for name in ("a", "b")},
        skip=skip,
    )
    params, plain = parameters(), parameters()
    optimizers = [optim.SGD(p, lr=0.1, momentum=0.5) for p in (params, plain)]
    found: dict[object, set[str]] = {}
    graph.groups("root", found)
    for _ in range(2):
        loss = graph.value(params, scaler).sum()
        if any(len(groups) > 1 for groups in found.values()):
            with pytest.raises(RuntimeError, match="is reached through the groups"):
                scaler.scale(loss)
            return
        scaler.scale(loss).backward()
        graph.value(plain, None).sum().backward()
        for number, (p, q) in enumerate(zip(params, plain, strict=True)):
            if q.grad is None:
                assert p.grad is None
                continue
            (group,) = found[number]
            assert_same_bits(p.grad, q.grad * SCALES[group])
        if explicit:
            scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        optimizers[1].step()
        assert snapshot(optimizers[0]) == snapshot(optimizers[1])
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()


OVERFLOWS = st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=30)


@given(OVERFLOWS, st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_scales_over_time(
    overflows: list[tuple[bool, bool, bool]], interval: int, hysteresis: int, separate: bool
) -> None:
    """Against a model in plain Python: each group moves by its own overflows alone."""
    configs = {
        "a": {"init_scale": 2.0**10, "growth_interval": interval, "hysteresis": hysteresis},
        "b": {"init_scale": 2.0**6, "min_scale": 2.0**4, "max_scale": 2.0**8},
    }
    configs["b"] |= {"growth_interval": interval}
    scaler = GradScaler("cpu", init_scale=SCALES["root"], growth_interval=interval, groups=configs)
    params = parameters()[:3]
    if separate:
        optimizers = [optim.SGD([p], lr=0.0) for p in params]
    else:
        optimizers = [optim.SGD(params, lr=0.0)]
    names = ("root", "a", "b")
    scales = dict(SCALES)
    growth, bad = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    limits = {"root": (0.0, 2.0**127), "a": (1.0, 2.0**24), "b": (2.0**4, 2.0**8)}
    patience = {"root": 1, "a": hysteresis, "b": 1}
    for flags in overflows:
        parts = [params[0], *(scaler.boundary(p, n) for p, n in zip(params[1:], "ab", strict=True))]
        scaler.scale(sum(part.sum() for part in parts)).backward()
        for flag, param in zip(flags, params, strict=True):
            if flag:
                param.grad[1] = torch.inf
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for name, flag in zip(names, flags, strict=True):
            if flag:
                growth[name] = 0
                bad[name] += 1
                if bad[name] >= patience[name]:
                    scales[name] = max(scales[name] / 2, limits[name][0])
            else:
                bad[name] = 0
                growth[name] += 1
                if growth[name] == interval:
                    growth[name] = 0
                    scales[name] = min(scales[name] * 2, limits[name][1])
        state = scaler.state_dict()["fastemb"]["groups"]
        assert {name: group["scale"] for name, group in state.items()} == scales
