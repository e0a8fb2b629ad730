"""The CUDA kernels as a backend on CPU tensors, run by ``cuda_emu.h``.

`load` builds the kernels as plain C++ and gives an object with one method per operator, the
signatures of `fastemb._native.backend`. Outputs are filled with NaN or a marker before the kernels
run, so what they leave unwritten shows.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
INDEX_TYPES = {torch.int32: 0, torch.int64: 1}
MODES = {"sum": 0, "mean": 1, "max": 2}
UNWRITTEN = -77
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")


def build(block: int, sanitize: bool, source: str = "kernels") -> Path:
    """The module of ``source``.cpp; ninja compiles it when something that it reads has changed."""
    import pybind11

    module = f"fastemb_emu_{source}.so"
    folder = HERE / "build" / f"{source}-{block}{'-sanitized' if sanitize else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(os.environ.get("CXX", "g++"), "-std=c++20", "-g1", "-fPIC", "-shared"),
        *("-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"),
        *("-Wno-unknown-pragmas", "-DFASTEMB_EMU", f"-DFASTEMB_BLOCK_THREADS={block}"),
        # Sanitized code takes three times as long to optimise, for a few examples.
        *((*SANITIZERS, "-O0") if sanitize else ("-O1",)),
        *(f"-I{ROOT / 'csrc'}", f"-I{HERE}"),
        *(f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_paths()['include']}"),
    ]
    rules = [
        "rule module",
        f"  command = {_escaped(shlex.join(command))} -MD -MF $out.d $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        f"build {module}: module {_escaped(str(HERE / source), path=True)}.cpp",
    ]
    # Not under a preloaded sanitizer, which is for what is built.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    # Other test processes that want the same module wait for it.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "build.ninja").write_text("\n".join([*rules, ""]))
        ninja = [sys.executable, "-m", "ninja", "--quiet", "-C", str(folder)]
        subprocess.run(ninja, env=environment, check=True)
    return folder / module


def _escaped(text: str, path: bool = False) -> str:
    """As ninja reads it: $ announces a variable, and in a list of files a space ends one."""
    text = text.replace("$", "$$")
    return text.replace(" ", "$ ").replace(":", "$:") if path else text


def missing_tools() -> str | None:
    """Why the kernels cannot be built here, or None."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no C++ compiler"
    for module in ("ninja", "pybind11"):
        if importlib.util.find_spec(module) is None:
            return f"no {module}"
    return None


def load_module(block: int, sanitize: bool, source: str = "kernels") -> Any:
    """The built module, imported."""
    path = build(block, sanitize, source)
    spec = importlib.util.spec_from_file_location(f"fastemb_emu_{source}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(block: int = 64, sanitize: bool = False) -> EmuBackend:
    return EmuBackend(load_module(block, sanitize))


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan if dtype.is_floating_point else UNWRITTEN, dtype=dtype)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class EmuBackend:
    """Operators over the emulated kernels. ``raises = False`` leaves device errors in ``error``."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.raises = True
        self.error: tuple[int, int, int, int] | None = None

    def set_order(self, order: str, seed: int = 0) -> None:
        """Order of blocks and threads: ``forward``, ``backward`` or ``shuffled``."""
        self.module.set_order(order, seed)

    def embedding(
        self,
        weight: Tensor,
        indices: Tensor,
        padding_idx: int,
        scale_grad_by_freq: bool,
        sparse: bool,
        output_dtype: torch.dtype,
        table: str,
    ) -> Tensor:
        flat = indices.reshape(-1).contiguous()
        output = _unwritten((flat.numel(), weight.shape[1]), output_dtype)
        report = torch.zeros(4, dtype=torch.int64)
        self.module.gather(
            **self._bags(flat.reshape(-1, 1), None, weight.shape[0], -1, False),
            **self._table(weight),
            output=output.data_ptr(),
            output_type=DTYPES[output_dtype],
            error=report.data_ptr(),
        )
        self._check("embedding", report)
        return output.reshape(*indices.shape, weight.shape[1])

    def embedding_bag(
        self,
        weight: Tensor,
        indices: Tensor,
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
        mode: str,
        padding_idx: int,
        include_last_offset: bool,
        scale_grad_by_freq: bool,
        sparse: bool,
        output_dtype: torch.dtype,
        table: str,
    ) -> tuple[Tensor, Tensor]:
        bags = self._bags(indices, offsets, weight.shape[0], padding_idx, include_last_offset)
        shape = (bags["num_bags"], weight.shape[1])
        output = _unwritten(shape, output_dtype)
        argmax = _unwritten(shape if mode == "max" else (0,), torch.int32)
        report = torch.zeros(4, dtype=torch.int64)
        self.module.bag_forward(
            **bags,
            **self._table(weight),
            **self._samples(per_sample_weights),
            mode=MODES[mode],
            output=output.data_ptr(),
            output_type=DTYPES[output_dtype],
            argmax=argmax.data_ptr() if mode == "max" else 0,
            error=report.data_ptr(),
        )
        self._check("embedding_bag", report)
        return output, argmax

    def group_indices(
        self,
        indices: Tensor,
        offsets: Tensor | None,
        num_embeddings: int,
        padding_idx: int,
        include_last_offset: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        n = indices.numel()
        order = _unwritten((n,), torch.int32)
        rows = _unwritten((n,), torch.int64)
        segments = _unwritten((n + 1,), torch.int32)
        num_rows = _unwritten((1,), torch.int32)
        self.module.group_indices(
            **self._bags(indices, offsets, num_embeddings, padding_idx, include_last_offset),
            **self._groups(order, rows, segments, num_rows),
        )
        return order, rows, segments, num_rows

    def embedding_bag_backward(
        self,
        grad_output: Tensor,
        indices: Tensor,
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
        argmax: Tensor | None,
        order: Tensor,
        rows: Tensor,
        segments: Tensor,
        num_rows: Tensor,
        num_embeddings: int,
        out_rows: int,
        mode: str,
        padding_idx: int,
        include_last_offset: bool,
        scale_grad_by_freq: bool,
        dense: bool,
        grad_dtype: torch.dtype,
    ) -> Tensor:
        bags = self._bags(indices, offsets, num_embeddings, padding_idx, include_last_offset)
        n, dim = indices.numel(), grad_output.shape[1]
        shape = (out_rows, dim)
        grad = torch.zeros(shape, dtype=grad_dtype) if dense else _unwritten(shape, grad_dtype)
        partials = self.module.bag_backward_partial_rows(n)
        scratch = {
            "bag_of": _unwritten((n,), torch.int32),
            "bag_count": _unwritten((bags["num_bags"],), grad_dtype),
            "partials": _unwritten((partials, dim), grad_dtype),
        }
        self.module.bag_backward(
            **bags,
            **self._groups(order, rows, segments, num_rows),
            **self._samples(per_sample_weights),
            **{name: x.data_ptr() for name, x in scratch.items()},
            mode=MODES[mode],
            scale_grad_by_freq=scale_grad_by_freq,
            dense=dense,
            grad_output=grad_output.data_ptr(),
            grad_type=DTYPES[grad_output.dtype],
            dim=dim,
            argmax=address(argmax),
            grad_rows=grad.data_ptr(),
        )
        return grad

    def bag_terms(
        self,
        indices: Tensor,
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
        order: Tensor,
        num_embeddings: int,
        mode: str,
        padding_idx: int,
        include_last_offset: bool,
        acc_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        bags = self._bags(indices, offsets, num_embeddings, padding_idx, include_last_offset)
        n = indices.numel()
        all_ones = mode == "sum" and per_sample_weights is None
        sources = _unwritten((n,), torch.int32)
        coefficients = _unwritten((0 if all_ones else n,), acc_dtype)
        bag_of = _unwritten((n,), torch.int32)
        bag_count = _unwritten((bags["num_bags"],), acc_dtype)
        self.module.bag_terms(
            **bags,
            **self._samples(per_sample_weights),
            order=order.data_ptr(),
            mode=MODES[mode],
            acc_type=DTYPES[acc_dtype],
            sources=sources.data_ptr(),
            coefficients=0 if all_ones else coefficients.data_ptr(),
            bag_of=bag_of.data_ptr(),
            bag_count=bag_count.data_ptr(),
        )
        return sources, coefficients

    def embedding_bag_per_sample_weights_backward(
        self,
        grad_output: Tensor,
        weight: Tensor,
        indices: Tensor,
        offsets: Tensor | None,
        mode: str,
        padding_idx: int,
        include_last_offset: bool,
    ) -> Tensor:
        acc = _accumulator(weight.dtype)
        grad_output = grad_output.to(acc)
        bags = self._bags(indices, offsets, weight.shape[0], padding_idx, include_last_offset)
        grad = torch.zeros(indices.shape, dtype=acc)
        bag_of = _unwritten((indices.numel(),), torch.int32)
        bag_count = _unwritten((bags["num_bags"],), acc)
        self.module.per_sample_backward(
            **bags,
            **self._table(weight),
            mode=MODES[mode],
            grad_output=grad_output.data_ptr(),
            grad_weights=grad.data_ptr(),
            bag_of=bag_of.data_ptr(),
            bag_count=bag_count.data_ptr(),
        )
        return grad

    def embedding_renorm_(
        self, weight: Tensor, indices: Tensor, max_norm: float, norm_type: float, table: str
    ) -> None:
        flat = indices.reshape(-1, 1)
        groups = self.group_indices(flat, None, weight.shape[0], -1, False)
        self.module.renorm(
            **self._groups(*groups),
            **self._table(weight),
            num_groups_capacity=flat.numel(),
            max_norm=max_norm,
            norm_type=norm_type,
        )

    def _bags(
        self,
        indices: Tensor,
        offsets: Tensor | None,
        num_embeddings: int,
        padding_idx: int,
        include_last_offset: bool,
    ) -> dict[str, int]:
        assert indices.is_contiguous()
        assert offsets is None or offsets.is_contiguous()
        num_offsets = 0 if offsets is None else offsets.numel()
        return {
            "indices": indices.data_ptr(),
            "offsets": address(offsets),
            "index_type": INDEX_TYPES[indices.dtype],
            "offset_type": 0 if offsets is None else INDEX_TYPES[offsets.dtype],
            "num_indices": indices.numel(),
            "num_offsets": num_offsets,
            "num_bags": indices.shape[0] if offsets is None else num_offsets - include_last_offset,
            "bag_length": indices.shape[1] if offsets is None else 0,
            "num_embeddings": num_embeddings,
            "padding_idx": padding_idx,
        }

    def _table(self, weight: Tensor) -> dict[str, int]:
        assert weight.stride(1) == 1 or weight.shape[1] <= 1
        return {
            "weight": weight.data_ptr(),
            "weight_type": DTYPES[weight.dtype],
            "weight_stride": weight.stride(0),
            "dim": weight.shape[1],
        }

    def _samples(self, samples: Tensor | None) -> dict[str, int]:
        return {
            "per_sample_weights": address(samples),
            "per_sample_type": 0 if samples is None else DTYPES[samples.dtype],
        }

    def _groups(
        self, order: Tensor, rows: Tensor, segments: Tensor, num_rows: Tensor
    ) -> dict[str, int]:
        return {
            "order": order.data_ptr(),
            "rows": rows.data_ptr(),
            "segments": segments.data_ptr(),
            "num_rows": num_rows.data_ptr(),
        }

    def _check(self, op: str, report: Tensor) -> None:
        code, position, value, limit = report.tolist()
        code &= 0xFFFFFFFF
        self.error = None if code == 0 else (code, position, value, limit)
        if self.error is None or not self.raises:
            return
        if code == 1:
            raise IndexError(f"{op}: index {value} at position {position}, {limit} rows")
        raise ValueError(f"{op}: offsets[{position}] = {value}, {limit} indices")
