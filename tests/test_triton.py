"""The Triton backend on a machine without a GPU: interpreted, and compiled ahead of time.

Compilation needs no driver: Triton brings its own ptxas. What is compiled here, for each
architecture, is what a launch would compile for tensors of these types, 16-byte aligned.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parent
ARCHITECTURES = (80, 90, 100)

pytest.importorskip("triton")


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FASTEMB_", "TRITON_IN"))}
    return subprocess.run(
        [sys.executable, *arguments],
        env={**clean, **env},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
    )


# ---- interpreted ----------------------------------------------------------------------------


# What of the suites that all backends share is run on interpreted kernels. One of the many sizes
# of test_operators is enough at their speed.
SHARED = {
    "test_operators.py": "triton and (not (test_dims or test_long) or triton-129 or triton-257)",
    "test_errors.py": "(out_of_range or offsets) and not freed",  # which the libraries look at
    "test_row_operators.py": "triton and (any_step or documented or found_inf or 2_31)",
    "test_row_fused.py": (
        # Adam's kernel is that of two others.
        "triton and not ((bags or one_row or long or found_inf) and (row_adagrad_ or row_sgd_))"
    ),
    "test_row_arguments.py": "triton",
    "test_lazy_operators.py": "triton and not (longest or test_eps)",
    "test_grad_operators.py": "triton",
}


def interpreted(file: str, *arguments: str) -> None:
    done = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", str(TESTS / file), *arguments),
        TRITON_INTERPRET="1",
        FASTEMB_BACKEND="triton",
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", ["triton_interpreted.py", "triton_interpreted_rows.py"])
def test_interpreted(file: str) -> None:
    interpreted(file)


@pytest.mark.slow
@pytest.mark.parametrize("file", SHARED)
def test_interpreted_in_shared_suites(file: str) -> None:
    interpreted(file, "-k", SHARED[file])


def test_fastemb_alone_does_not_load_the_kernels() -> None:
    done = run("-c", "import sys, fastemb; print('fastemb.triton.kernels' in sys.modules)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"]


# ---- compiled -------------------------------------------------------------------------------

POINTERS = {
    "offsets": "*i64",
    "status": "*i64",
    "argmax": "*i32",
    "bag_of": "*i32",
    "order": "*i32",
    "rows": "*i64",
    "segments": "*i32",
    "num_rows": "*i32",
    "sources": "*i32",
}


@dataclass(frozen=True)
class Variant:
    """One compilation of a kernel.

    ``types`` are those of arguments that may have several, None for one that is left out.
    ``loads`` and ``stores`` are instructions that the PTX must have: the widest for rows.
    ``exact``: every operation is rounded by itself.
    """

    kernel: str
    types: dict[str, str | None] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    dim: int | None = None
    wide: bool = False  # accumulates in float64
    elements: int | None = None
    loads: str = r"ld\.global\.v4\.b32"
    stores: str = r"st\.global"
    num_warps: int = 1
    exact: bool = False
    aligned: tuple[str, ...] = ()  # integers that are multiples of 16
    note: str = ""

    def __str__(self) -> str:
        return "-".join(part for part in (self.kernel.removesuffix("_kernel"), self.note) if part)


BF16, F16, F32, F64 = "*bf16", "*fp16", "*fp32", "*fp64"
NO_BAGS = {"offsets": None, "bag_of": None}
SUM = {"samples": None, "indices": "*i64"}
BACK: dict[str, str | None] = {
    **{"grad": F32, "grad_rows": F32, "partials": F32, "used_rows": "*i32"},
    **dict.fromkeys(("coefficients", "argmax", "within", "found_inf")),
}
SUMS: dict[str, Any] = {"elements": 256, "exact": True}
DENSE = {"BY_FREQUENCY": False, "DENSE": True}

STEP: dict[str, str | None] = {
    **dict.fromkeys(("master", "state2", "state3", "row_step", "row_count", "lr_tensor")),
    **dict.fromkeys(("segments", "sources", "coefficients", "partials")),
    **{"grad": F32, "used_rows": "*i32", "seed": "i64"},
    **dict.fromkeys(("step", "inv_scale", "found_inf"), F32),
}
RULES = {
    **{"RULE": 0, "MAXIMIZE": False, "DECAY": True, "DECOUPLED": False},
    **{"CORRECTED_DENOMINATOR": True, "NESTEROV": False, "STOCHASTIC": False},
}
ADAM = {"state1": F32, "state2": F32}
FUSED = {"segments": "*i32", "sources": "*i32", "coefficients": F32, "partials": F32}
CATCH_UP: dict[str, str | None] = {
    **dict.fromkeys(("master", "max_exp_avg_sq")),
    **dict.fromkeys(("exp_avg", "exp_avg_sq", "step", "found_inf"), F32),
    **{"row_step": "*i32", "used_rows": "*i32", "history": F64, "seed": "i64"},
}
WIDE = {"DIM": None, "STRIDE": 0, "ROWS": 1, "COLUMNS": 256}


LOOK: dict[str, str | None] = {
    **dict.fromkeys(("used_rows", "segments", "sources", "coefficients", "partials")),
    **{"inv_scale": F32, "found_inf": F32, "stats": "*i64", "chunk_sums": F64},
}


def look(
    note: str,
    types: dict[str, str | None],
    dim: int | None = None,
    *,
    unscale: bool = False,
    wide: bool = False,
    **options: Any,
) -> Variant:
    line = {"DIM": dim, "ROWS": 1, "COLUMNS": 128 if wide else 256}
    fused = types.get("segments") is not None
    return Variant(
        "grad_check_kernel",
        {**LOOK, **types},
        {"UNSCALE": unscale, **({} if fused else line)},
        dim if fused else None,
        wide=wide,
        elements=128,
        exact=True,
        note=note,
        **options,
    )


def catch_up(
    note: str,
    types: dict[str, str | None],
    constants: dict[str, Any],
    dim: int | None,
    stores: str = r"st\.global\.v4\.b32",
    **options: Any,
) -> Variant:
    return Variant(
        "adam_catch_up_kernel",
        {**CATCH_UP, **types},
        {"PENALTY": False, "STOCHASTIC": False, **constants},
        dim,
        elements=256,
        stores=stores,
        exact=True,
        note=note,
        **options,
    )


def elementwise(
    note: str,
    types: dict[str, str | None],
    constants: dict[str, Any],
    dim: int | None,
    stores: str = r"st\.global\.v4\.b32",
    **options: Any,
) -> Variant:
    return Variant(
        "elementwise_step_kernel",
        {**STEP, **types},
        {**RULES, **constants},
        dim,
        elements=256,
        stores=stores,
        exact=True,
        note=note,
        **options,
    )


def rowwise(
    note: str,
    types: dict[str, str | None],
    constants: dict[str, Any],
    dim: int,
    **options: Any,
) -> Variant:
    return Variant(
        "rowwise_adagrad_kernel",
        {**STEP, "sums": F32, **types},
        {**RULES, **constants},
        dim,
        elements=256,
        exact=True,
        note=note,
        **options,
    )


VARIANTS = [
    Variant(
        "bag_sum_kernel",
        {**SUM, "weight": F32, "output": F32},
        {"MEAN": False},
        128,
        note="f32",
        elements=1024,
    ),
    # 100 is no multiple of 16: vectors because the number of columns is a constant.
    Variant(
        "bag_sum_kernel",
        {**SUM, "weight": F32, "output": F32},
        {"MEAN": True},
        100,
        note="f32-100",
        elements=1024,
    ),
    Variant(
        "bag_sum_kernel",
        {**SUM, "weight": BF16, "output": BF16, "samples": BF16},
        {"MEAN": True},
        64,
        note="bf16-weighted",
        elements=1024,
    ),
    Variant(
        "bag_sum_kernel",
        {**SUM, "weight": F16, "output": F32, "offsets": None, "indices": "*i32"},
        {"MEAN": False},
        512,
        note="f16-fixed-length",
        elements=1024,
    ),
    Variant(
        "bag_sum_kernel",
        {**SUM, "weight": F64, "output": BF16},
        {"MEAN": True},
        32,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
        note="f64-bf16",
        elements=1024,
    ),
    Variant(
        "bag_sum_kernel",
        {**SUM, "weight": F32, "output": F32},
        {"MEAN": False},
        33,
        loads=r"ld\.global\.b32",
        note="f32-33",
        elements=1024,
    ),
    Variant(
        "bag_max_kernel",
        {"weight": F16, "output": F16, "indices": "*i32"},
        {},
        128,
        note="f16",
        elements=512,
    ),
    Variant(
        "bag_max_kernel",
        {"weight": F64, "output": F64, "indices": "*i64"},
        {},
        16,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
        note="f64",
        elements=512,
    ),
    Variant(
        "gather_kernel",
        {"weight": F16, "output": F16, "indices": "*i64"},
        {},
        128,
        stores=r"st\.global\.v4\.b32",
        note="f16",
        elements=1024,
    ),
    Variant(
        "gather_kernel",
        {"weight": F32, "output": BF16, "indices": "*i32"},
        {},
        64,
        note="f32-bf16",
        elements=1024,
    ),
    Variant("row_gradients_kernel", {**BACK, "partials": None}, DENSE, 128, note="f32", **SUMS),
    Variant(
        "row_gradients_kernel",
        {**BACK, "grad": BF16, "coefficients": F32},
        {"BY_FREQUENCY": True, "DENSE": False},
        64,
        note="bf16-factors",
        **SUMS,
    ),
    Variant(
        "row_gradients_kernel",
        {**BACK, "grad": F16, "argmax": "*i32", "within": "*i32"},
        DENSE,
        128,
        note="f16-max",
        **SUMS,
    ),
    Variant("long_chunks_kernel", {**BACK}, {}, 128, note="f32", **SUMS),
    Variant(
        "long_chunks_kernel",
        {**BACK, "grad": F16, "coefficients": F32, "found_inf": F32},
        {"DIM": None, "ROWS": 1, "COLUMNS": 256},
        aligned=("width",),
        note="f16-step-wide",
        **SUMS,
    ),
    Variant(
        "long_chunks_kernel",
        {**BACK, "grad": F64, "partials": F64, "coefficients": F64},
        {},
        32,
        wide=True,
        note="f64",
        **SUMS | {"loads": r"ld\.global\.v2\.b64"},
    ),
    Variant(
        "bag_terms_kernel",
        {"coefficients": None, "within": "*i32", "samples": None},
        {"ROWS": 256},
        loads=r"ld\.global",
        num_warps=4,
        note="max",
    ),
    Variant(
        "bag_terms_kernel",
        {"coefficients": F32, "within": None, "samples": BF16, "counts": F32, **NO_BAGS},
        {"ROWS": 256},
        loads=r"ld\.global",
        num_warps=4,
        note="mean-weighted",
    ),
    Variant(
        "per_sample_kernel",
        {"grad_output": F32, "grad_weights": F32, "weight": BF16, "counts": F32, "indices": "*i64"},
        {},
        128,
        note="bf16-mean",
        elements=1024,
    ),
    Variant(
        "per_sample_kernel",
        {"grad_output": F64, "grad_weights": F64, "weight": F64, "indices": "*i32", **NO_BAGS},
        {},
        32,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
        note="f64",
        elements=1024,
    ),
    Variant(
        "renorm_kernel",
        {"weight": F32},
        {"MAX_NORM": 1.5, "NORM_TYPE": 2.0},
        128,
        stores=r"st\.global\.v4\.b32",
        note="f32",
    ),
    Variant(
        "renorm_kernel",
        {"weight": BF16},
        {"MAX_NORM": 1.5, "NORM_TYPE": 3.0},
        128,
        loads=r"ld\.global\.v2\.b32",
        note="bf16-cubes",
    ),
    Variant(
        "renorm_kernel",
        {"weight": F64},
        {"MAX_NORM": 1.5, "NORM_TYPE": 0.0},
        64,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
        note="f64-largest",
    ),
    elementwise("adam-f32", {**ADAM, "param": F32}, {}, 128),
    elementwise("adam-f32-100", {**ADAM, "param": F32}, {}, 100),
    elementwise(
        "adam-bf16-master-amsgrad-counted",
        {**ADAM, "param": BF16, "master": F32, "state3": F32}
        | {"row_step": "*i32", "row_count": "*i32"},
        {"DECAY": False, "DECOUPLED": True},
        64,
    ),
    elementwise(
        "adam-bf16-stochastic-wide",
        {**ADAM, "param": BF16, "state1": BF16, "state2": BF16, "rows": None, "used_rows": None},
        {**WIDE, "STOCHASTIC": True},
        None,
        aligned=("width",),
    ),
    elementwise(
        "adam-f64",
        {"param": F64, "grad": F64, "state1": F64, "state2": F64, "state3": F64},
        {},
        32,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
        stores=r"st\.global\.v2\.b64",
    ),
    elementwise("adam-f32-fused", {**ADAM, **FUSED, "param": F32}, {}, 128),
    elementwise(
        "adam-bf16-master-amsgrad-counted-fused",
        {**ADAM, **FUSED, "param": BF16, "grad": BF16, "master": F32, "state3": F32}
        | {"row_step": "*i32", "row_count": "*i32"},
        {"DECAY": False, "DECOUPLED": True},
        64,
    ),
    elementwise(
        "adam-f16-stochastic-wide-fused",
        {**ADAM, **FUSED, "param": F16, "grad": F16},
        {**WIDE, "STOCHASTIC": True},
        None,
        aligned=("width",),
    ),
    elementwise(
        "adam-f64-fused",
        {"param": F64, "grad": F64, "state1": F64, "state2": F64, "state3": F64, "inv_scale": F32}
        | {**FUSED, "coefficients": F64, "partials": F64},
        {},
        32,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
        stores=r"st\.global\.v2\.b64",
    ),
    elementwise("sgd-f32-fused", {**FUSED, "param": F32, "state1": F32}, {"RULE": 2}, 128),
    elementwise("adagrad-f16", {"param": F16, "state1": F32, "lr_tensor": F64}, {"RULE": 1}, 128),
    elementwise("sgd-f32", {"param": F32, "state1": F32}, {"RULE": 2, "NESTEROV": True}, 128),
    catch_up("f32", {"param": F32}, {}, 128),
    catch_up("f32-penalty", {"param": F32, "max_exp_avg_sq": F32}, {"PENALTY": True}, 64),
    catch_up("bf16-master-amsgrad", {"param": BF16, "master": F32, "max_exp_avg_sq": F32}, {}, 64),
    catch_up(
        "bf16-stochastic-wide",
        {"param": BF16, "exp_avg": BF16, "exp_avg_sq": BF16, "rows": None, "used_rows": None},
        {**WIDE, "STOCHASTIC": True},
        None,
        aligned=("width",),
    ),
    catch_up(
        "f64",
        {"param": F64, "exp_avg": F64, "exp_avg_sq": F64},
        {},
        32,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
        stores=r"st\.global\.v2\.b64",
    ),
    Variant("mark_current_kernel", CATCH_UP, {"ROWS": 256}, loads=r"ld\.global", num_warps=4),
    rowwise("f16-stochastic", {"param": F16}, {"STOCHASTIC": True}, 64),
    rowwise("bf16-master-300", {"param": BF16, "master": F32}, {}, 300),
    rowwise("f32-fused", {**FUSED, "param": F32}, {}, 128),
    rowwise("bf16-master-fused", {**FUSED, "param": BF16, "master": F32, "grad": BF16}, {}, 512),
    rowwise(
        "f64-fused",
        {"param": F64, "grad": F64, "sums": F64} | {**FUSED, "coefficients": F64, "partials": F64},
        {},
        64,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
    ),
    Variant(
        "update_counters_kernel",
        {**STEP, "row_step": "*i32", "row_count": "*i32"},
        {"ROWS": 256},
        loads=r"ld\.global",
        num_warps=4,
    ),
    look("f32", {"grad": F32}, aligned=("width",)),
    look("f16-flag-alone", {"grad": F16, "stats": None, "chunk_sums": None}, aligned=("width",)),
    look(
        "bf16-unscale",
        {"grad": BF16},
        unscale=True,
        stores=r"st\.global\.v4\.b32",
        aligned=("width",),
    ),
    look("f32-rows", {"grad": F32, "used_rows": "*i32"}, 128),
    look(
        "f64-rows",
        {"grad": F64, "used_rows": "*i32"},
        32,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
        unscale=True,
    ),
    look("f32-fused", {**FUSED, "grad": F32, "used_rows": "*i32"}, 128),
    look("f16-fused", {**FUSED, "grad": F16, "used_rows": "*i32"}, 64),
    look(
        "f64-fused",
        {**FUSED, "grad": F64, "used_rows": "*i32", "coefficients": F64, "partials": F64},
        32,
        wide=True,
        loads=r"ld\.global\.v2\.b64",
    ),
    Variant(
        "boundary_gradient_kernel",
        {**LOOK, "grad": F16, "output": F16, "ratio": F32, "flags": F32},
        {"ROWS": 1, "COLUMNS": 256},
        stores=r"st\.global\.v4\.b32",
        exact=True,
        aligned=("width",),
        note="f16",
    ),
    Variant(
        "boundary_gradient_kernel",
        {**LOOK, "grad": F32, "output": F32, "ratio": F32, "flags": F32, "stats": None},
        {"ROWS": 1, "COLUMNS": 256},
        stores=r"st\.global\.v4\.b32",
        exact=True,
        aligned=("width",),
        note="f32-no-stats",
    ),
    Variant(
        "scale_update_kernel",
        {"scales": F32, "states": "*i32", "found_inf": F32, "configs": F64},
        {"ROWS": 32},
        loads=r"ld\.global",
        exact=True,
    ),
    Variant(
        "check_indices_kernel", {"indices": "*i64"}, {"ROWS": 256}, loads=r"ld\.global", num_warps=4
    ),
    Variant("find_bags_kernel", {}, {"ROWS": 256}, loads=r"ld\.global", num_warps=4),
    Variant(
        "count_bags_kernel", {"counts": F32, "indices": "*i64"}, {"ROWS": 32}, loads=r"ld\.global"
    ),
]


def kernel_of(variant: Variant) -> Any:
    from fastemb.triton import (
        adam_catch_up,
        bags,
        embedding_bag,
        embedding_bag_backward,
        grad_check,
        renorm,
        row_steps,
        rowwise_adagrad,
        segments,
        terms,
    )

    tables = (embedding_bag, embedding_bag_backward, terms, segments, renorm, bags)
    modules = (*tables, row_steps, rowwise_adagrad, adam_catch_up, grad_check)
    (kernel,) = {vars(m)[variant.kernel] for m in modules if variant.kernel in vars(m)}
    return kernel


def compiled(variant: Variant, architecture: int) -> Any:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fastemb.triton import bags

    kernel = kernel_of(variant)
    acc = torch.float64 if variant.wide else torch.float32
    constants: dict[str, Any] = {"ACC": bags.TRITON_DTYPES[acc], **variant.constants}
    if variant.dim is not None:
        constants |= {"DIM": variant.dim, "STRIDE": variant.dim}
        tile = bags.tile(variant.dim, acc, elements=variant.elements or 1024)
        constants |= {"ROWS": tile["ROWS"], "COLUMNS": tile["COLUMNS"]}
    assert isinstance(constants["ACC"], tl.dtype)

    signature, constexprs, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        kind = variant.types.get(name, POINTERS.get(name))
        if name.isupper():
            constexprs[(place,)] = constants[name]
        elif kind is None and (name in variant.types or name == "counts"):
            constexprs[(place,)] = None
        # A parameter's annotation, where it has one, is the type that a launch passes.
        kind = kind or kernel.params[place].annotation_type or "i32"
        signature[name] = "constexpr" if (place,) in constexprs else kind
        if signature[name].startswith("*") or name in variant.aligned:
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=aligned)
    target = GPUTarget("cuda", architecture, 32)
    options = {"num_warps": variant.num_warps, "enable_fp_fusion": not variant.exact}
    return triton.compile(source, target=target, options=options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_compiled(variant: Variant, architecture: int, tmp_path: Path) -> None:
    binary = compiled(variant, architecture)
    assert binary.asm["cubin"].startswith(b"\x7fELF")
    ptx = binary.asm["ptx"]
    assert re.search(rf"\.target sm_{architecture}", ptx)
    assert re.search(variant.loads + r"\b", ptx)
    assert re.search(variant.stores + r"\b", ptx)
    if variant.exact:
        assert not re.search(r"\b(fma|mad)\.rn\.f|\.approx|\.full\.f|\.ftz", ptx)
    # Results are written, never added atomically. Atomic are the claim of an error report, and
    # counters: whole numbers, the same whoever comes first.
    atomics = set(re.findall(r"\b(?:atom|red)\.[\w.]+", ptx))
    counters = variant.types.get("stats") is not None
    allowed = r"\.(add\.[us]64|max\.s64)$" if counters else r"\.cas\.b64$"
    assert all(re.search(allowed, instruction) for instruction in atomics), atomics
    assert bool(atomics) == (counters or "status" in kernel_of(variant).arg_names)

    usage = _resource_usage(binary.asm["cubin"], tmp_path)
    assert usage["STACK"] == usage["LOCAL"] == 0, "registers spill"
    # Sixteen one-warp programs on a multiprocessor (65536 registers) need no more than this.
    assert usage["REG"] * 32 * variant.num_warps * 16 <= 65536


def _resource_usage(cubin: bytes, directory: Path) -> dict[str, int]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    file = directory / "kernel.cubin"
    file.write_bytes(cubin)
    text = subprocess.run(
        [tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
