"""A model with two scale groups, for the tests of `fastemb.amp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastemb.amp import GradScaler


class TwoHeads(nn.Module):
    """A main head, and an auxiliary one behind a boundary, with a table and a layer each."""

    def __init__(self, scaler: GradScaler | None, group: str = "aux") -> None:
        super().__init__()
        self.scaler, self.group = scaler, group
        self.main_table, self.aux_table = nn.Embedding(6, 3), nn.Embedding(6, 3)
        self.main, self.aux = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, ids: Tensor, weight: float = 2.0**-10) -> Tensor:
        main = self.main(self.main_table(ids))
        aux = self.aux(self.aux_table(ids))
        if self.scaler is not None:
            aux = self.scaler.boundary(aux, self.group)
        return main.square().sum() + weight * aux.square().sum()

    def __deepcopy__(self, memo: Any) -> TwoHeads:
        other = TwoHeads(None)
        other.load_state_dict(self.state_dict())
        return other


MAIN = ("main_table.weight", "main.weight", "main.bias")
AUX = ("aux_table.weight", "aux.weight", "aux.bias")
IDS = torch.tensor([1, 4, 1])


def scaled(**options: Any) -> tuple[GradScaler, TwoHeads]:
    torch.manual_seed(0)
    scaler = GradScaler("cpu", init_scale=2.0**4, **options)
    model = TwoHeads(scaler)
    scaler.register(model)
    return scaler, model


def backward(scaler: GradScaler, model: nn.Module, **bad: float) -> None:
    """A step's backward; ``bad`` puts values into gradients of parameters, by name."""
    model.zero_grad()
    scaler.scale(model(IDS)).backward()
    for name, value in bad.items():
        model.get_parameter(name.replace("__", ".")).grad.view(-1)[0] = value


def group_scales(scaler: GradScaler) -> dict[str, float]:
    return {name: scaler.get_scale(name) for name in scaler.group_names}
