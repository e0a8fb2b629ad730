"""fastemb: embedding tables for recommenders on one GPU.

A drop-in for ``torch.nn.EmbeddingBag`` and ``torch.nn.Embedding`` whose fp16 and bf16 tables train
as well as fp32 ones. Environment report: ``python -m fastemb``.
"""

from __future__ import annotations

from importlib.metadata import version as _version

from fastemb import _dense_ops, _grad_ops, _lazy_ops, _native, _ops, _record_ops, _row_ops
from fastemb._library import IncompatibleLibraryError, NotBuiltError
from fastemb._native import report

# Before anything that calls an operator is imported.
_native.load(
    _ops.OPERATORS
    | _row_ops.OPERATORS
    | _lazy_ops.OPERATORS
    | _grad_ops.OPERATORS
    | _record_ops.OPERATORS
    | _dense_ops.OPERATORS,
    cpu_only=_dense_ops.OPERATORS.keys(),
)

from fastemb import amp, functional, nn, offload, optim  # noqa: E402
from fastemb._convert import convert, revert  # noqa: E402
from fastemb._runtime import check_errors, empty_cache  # noqa: E402

__version__ = _version("fastemb")

__all__ = [
    "IncompatibleLibraryError",
    "NotBuiltError",
    "__version__",
    "amp",
    "check_errors",
    "convert",
    "empty_cache",
    "functional",
    "nn",
    "offload",
    "optim",
    "report",
    "revert",
]
