"""What all tests share: hypothesis profiles, the ``gpu`` marker, backends as a parameter.

A test that takes the ``backend`` fixture runs once for each backend that this process can have::

    def test_sum(backend):
        out, _ = backend.ops.embedding_bag(weight.to(backend.device), ...)

``cpu`` and ``reference`` are never skipped: an installation without its CPU library fails here.
Interpreted Triton needs a process of its own (TRITON_INTERPRET=1 must be set before Triton is
imported); without it, and without a GPU, the triton parameter is skipped.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch

from fastemb import _native

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")


@dataclass(frozen=True)
class Backend:
    """One backend: its operators, and the device whose tensors they take."""

    name: str
    ops: SimpleNamespace
    device: torch.device


def interpreting_triton() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def backend_params(*names: str) -> list[object]:
    """Parameters for ``pytest.mark.parametrize("backend", ..., indirect=True)``; all when empty."""
    gpu_only = {"cuda"} if interpreting_triton() else {"cuda", "triton"}
    return [
        pytest.param(name, marks=[pytest.mark.gpu] if name in gpu_only else [], id=name)
        for name in names or _native.BACKENDS
    ]


@pytest.fixture(params=backend_params())
def backend(request: pytest.FixtureRequest) -> Backend:
    name = request.param
    on_gpu = name == "cuda" or (name == "triton" and not interpreting_triton())
    return Backend(name, _native.backend(name), torch.device("cuda" if on_gpu else "cpu"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def cpu() -> Any:
    """The native CPU backend, for comparison."""
    from fastemb import _native

    try:
        return _native.backend("cpu")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no native CPU backend: {error}")
