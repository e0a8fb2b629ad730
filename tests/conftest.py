"""What all tests share: hypothesis profiles, the ``gpu`` marker, backends as a parameter, and what
goes to which process where pytest-xdist runs several.

A test that takes the ``backend`` fixture runs once for each backend that this process can have::

    def test_sum(backend):
        out, _ = backend.ops.embedding_bag(weight.to(backend.device), ...)

``cpu`` and ``reference`` are never skipped: an installation without its CPU library fails here.
Interpreted Triton needs a process of its own (TRITON_INTERPRET=1 must be set before Triton is
imported); without it, and without a GPU, the triton parameter is skipped.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from draws import drawn
from same_bits import use_threads

from fastemb import _native

USUAL = drawn(50)  # of tests that do not say how many
hypothesis.settings.register_profile("dev", USUAL)
hypothesis.settings.register_profile("ci", USUAL, derandomize=True, print_blob=True)
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


# Of these, each test may go to another process; all other files stay whole, for what their tests
# share is made once.
SCATTERED = ("test_build.py", "test_triton.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file.endswith(SCATTERED) else file

    config.option.loadscopereorder = False  # in the order of collection
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with slow tests come first: none keeps a process busy at the end, while the others wait.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measures coverage without the slow tests and those that draw their inputs.

    Before Python 3.12 coverage traces every line of torch and hypothesis too: they would take two
    to three times as long, and reach what the others reach.
    """
    drawn_inputs = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    coverage = sys.modules.get("coverage")  # pytest-cov's, if it is there
    measured = coverage.Coverage.current() if coverage else None
    if measured is None or not (drawn_inputs or item.get_closest_marker("slow")):
        return (yield)
    measured.stop()
    try:
        return (yield)
    finally:
        measured.start()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For many tiny operators: on a busy machine threads would mostly wait for each other."""
    with use_threads(1):
        yield


@pytest.fixture(scope="module")
def cpu() -> Any:
    """The native CPU backend, for comparison."""
    from fastemb import _native

    try:
        return _native.backend("cpu")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no native CPU backend: {error}")
