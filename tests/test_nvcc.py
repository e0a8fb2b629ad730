"""The CUDA sources under nvcc: every architecture, no torch, no warning, no register spill.

No GPU is needed. What the compiler says about each kernel is read by ``bench/static_report.py``.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("80", "90", "100")
KERNELS = (
    *("bag_forward_kernel", "gather_kernel", "short_segments_kernel", "per_sample_kernel"),
    *("row_step_kernel", "rowwise_adagrad_kernel", "adam_catch_up_kernel"),
    *("bag_terms_kernel", "term_chunks_kernel"),
    *("grad_check_kernel", "row_grad_check_kernel", "term_grad_check_kernel"),
    *("boundary_gradient_kernel", "scale_update_kernel"),
    *("row_copy_kernel", "checksum_kernel"),
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH"),
]


@pytest.fixture(scope="module")
def static_report() -> ModuleType:
    path = ROOT / "bench" / "static_report.py"
    spec = importlib.util.spec_from_file_location("static_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernels(static_report: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list:
    return list(static_report.measure(ARCHS, tmp_path_factory.mktemp("nvcc")))


@pytest.mark.timeout(600)
def test_no_spills_and_wide_loads(static_report: ModuleType, kernels: list) -> None:
    assert {k.arch for k in kernels} == set(ARCHS)
    for name in KERNELS:
        assert any(k.name.startswith(name) for k in kernels), name
    assert static_report.faults(kernels) == []


def test_one_build_has_one_copy_of_each_kernel(kernels: list) -> None:
    """A kernel that two translation units define would fail to link."""
    seen = [(k.arch, k.symbol) for k in kernels]
    assert len(seen) == len(set(seen))


def test_faults_are_found(static_report: ModuleType, kernels: list) -> None:
    """The report refuses a spill and a narrow vector kernel."""
    vector = next(k for k in kernels if k.vector)
    spilled = static_report.replace(vector, spills=8)
    narrow = static_report.replace(vector, widest_load=4)
    assert len(static_report.faults([spilled])) == 1
    assert len(static_report.faults([narrow])) == 1


def test_only_primitives_name_intrinsics() -> None:
    keywords = "global__|launch_bounds__"
    intrinsic = re.compile(rf"\b(__(?!{keywords})\w+|atomic[A-Z]\w+|asm)\b\s*\(")
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu*")):
        if source.name != "primitives.cuh":
            assert not intrinsic.findall(source.read_text()), source.name
