"""Gradients for the tests of `fastemb.optim`, and the formulae of its row steps in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastemb import optim

CLASSES = (
    optim.Adam,
    optim.AdamW,
    optim.SparseAdam,
    optim.Adagrad,
    optim.RowWiseAdagrad,
    optim.SGD,
)


def coo(rows: list[int], values: Tensor, num_embeddings: int, coalesced: bool = False) -> Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64),
        values,
        (num_embeddings, *values.shape[1:]),
        is_coalesced=coalesced,
        check_invariants=False,
    )


def random_rows(
    generator: torch.Generator, num_embeddings: int, dim: int, count: int, dtype: torch.dtype
) -> Tensor:
    """A gradient of ``count`` entries, rows repeated and in no order."""
    rows = torch.randint(0, num_embeddings, (count,), generator=generator).tolist()
    values = torch.randn(count, dim, generator=generator, dtype=torch.float64).to(dtype)
    return coo(rows, values, num_embeddings)


def bits(value: Any) -> Any:
    """What two states have to share to be the same, -0.0 and NaN included."""
    if not isinstance(value, Tensor):
        return value
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return (value.dtype, tuple(value.shape), raw.numpy().tobytes())


def snapshot(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The bits of all parameters and states."""
    taken = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param, {})
            taken.append((bits(param), {name: bits(value) for name, value in state.items()}))
    return taken


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert bits(got) == bits(want), (got, want)


class Model64:
    """One row optimizer in float64, on {row: gradient} of a table."""

    def __init__(self, name: str, weight: Tensor, **options: Any) -> None:
        self.name = name
        self.weight = weight.detach().double().clone()
        self.options: dict[str, Any] = {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "amsgrad": False,
            "maximize": False,
            "momentum": 0.0,
            "dampening": 0.0,
            "nesterov": False,
            "lr_decay": 0.0,
            "initial_accumulator_value": 0.0,
            "catch_up": False,
            "row_bias_correction": False,
            **options,
        }
        zeros = torch.zeros_like(self.weight)
        self.first, self.second, self.largest = zeros.clone(), zeros.clone(), zeros.clone()
        self.sum = torch.full_like(zeros, self.options["initial_accumulator_value"])
        self.last = [0] * len(zeros)
        self.count = [0] * len(zeros)
        self.step_number = 0

    def step(self, gradient: Tensor) -> None:
        """A dense gradient, or a sparse one: the rows it names are updated."""
        o = self.options
        self.step_number += 1
        dense = gradient.layout == torch.strided
        total = gradient.double() if dense else gradient.double().to_dense()
        rows = range(len(total)) if dense else sorted(set(gradient._indices()[0].tolist()))
        for row in rows:
            self.count[row] += 1
            slept = self.step_number - self.last[row]
            self.last[row] = self.step_number
            g = -total[row] if o["maximize"] else total[row]
            decoupled = self.name == "AdamW"
            p = self.weight[row]
            if decoupled:
                p = p * (1 - o["lr"] * o["weight_decay"]) ** (slept if o["catch_up"] else 1)
            else:
                g = g + o["weight_decay"] * p
            self.weight[row] = self._updated(row, p, g, dense)

    def _updated(self, row: int, p: Tensor, g: Tensor, dense: bool) -> Tensor:
        o, t = self.options, self.step_number
        if self.name in ("Adam", "AdamW", "SparseAdam"):
            beta1, beta2 = o["betas"]
            t = self.count[row] if o["row_bias_correction"] else t
            m = self.first[row] = beta1 * self.first[row] + (1 - beta1) * g
            v = self.second[row] = beta2 * self.second[row] + (1 - beta2) * g * g
            if o["amsgrad"]:
                v = self.largest[row] = torch.maximum(self.largest[row], v)
            bc1, bc2 = 1 - beta1**t, 1 - beta2**t
            if dense and self.name != "SparseAdam":
                return p - o["lr"] / bc1 * m / ((v / bc2).sqrt() + o["eps"])
            return p - o["lr"] * bc2**0.5 / bc1 * m / (v.sqrt() + o["eps"])
        if self.name == "SGD":
            if o["momentum"] == 0:
                return p - o["lr"] * g
            b = g if t == 1 else o["momentum"] * self.first[row] + (1 - o["dampening"]) * g
            self.first[row] = b
            return p - o["lr"] * (g + o["momentum"] * b if o["nesterov"] else b)
        rate = o["lr"] / (1 + (t - 1) * o["lr_decay"])
        self.sum[row] += g * g if self.name == "Adagrad" else (g * g).mean()
        return p - rate * g / (self.sum[row].sqrt() + o["eps"])


def train(optimizer: torch.optim.Optimizer, seed: int, steps: int = 2) -> None:
    """Sparse gradients for SparseAdam, dense ones for the others."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                sparse = type(optimizer).__name__ == "SparseAdam"
                param.grad = grad.to_sparse(1) if sparse else grad
        optimizer.step()
