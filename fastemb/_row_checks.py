"""What the arguments of a row optimizer must be for its kernels to stay inside their memory.

For the backends that are written in Python; ``csrc/torch/row_operators.h`` has the same rules and
words for the native ones. `fastemb.optim` makes arguments that keep them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastemb._grad_checks import check_terms

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def check(op: str, arguments: Mapping[str, Any]) -> None:
    """Check one call before anything is written.

    Args:
        op: name of the operator, as in ``fastemb/_row_ops.py`` or ``_lazy_ops.py``.
        arguments: its arguments by name.

    Raises:
        ValueError: an argument has the wrong shape, dtype, layout or device.
    """

    def require(good: bool, rule: str) -> None:
        if not good:
            raise ValueError(f"{op}: {rule}")

    param: Tensor = arguments["param"]
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            require(value.device == param.device, f"{name} must be on param's device")

    require(param.dim() == 2, f"param must be 2-D, got {param.dim()}-D")
    num_embeddings, dim = param.shape
    dtypes = "dtype must be float16, bfloat16, float32 or float64"
    require(param.dtype in _FLOATS, dtypes)
    require(dim <= 1 or param.stride(1) == 1, "the elements of a row of param must be neighbours")
    require(
        num_embeddings <= 1 or dim == 0 or param.stride(0) >= dim,
        "the rows of param must not overlap",
    )
    wide = param.dtype == torch.float64
    acc = torch.float64 if wide else torch.float32

    def require_state(name: str, elements: int) -> None:
        state = arguments.get(name)
        if state is None:
            return
        allowed = (acc, torch.bfloat16) if name in _MOMENTS and not wide else (acc,)
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        require(
            state.dtype in allowed and state.numel() == elements and state.is_contiguous(),
            f"{name} must be contiguous, {words}, of {elements} elements",
        )

    master: Tensor | None = arguments["master"]
    require_state("master", param.numel())
    require(
        master is None or param.dtype in (torch.float16, torch.bfloat16),
        "master must be None unless param is float16 or bfloat16",
    )
    for name in (*_MOMENTS, "momentum_buffer"):
        require_state(name, param.numel())
    require_state("sum", num_embeddings if op == "row_rowwise_adagrad_" else param.numel())
    moments = {arguments[name].dtype for name in _MOMENTS if arguments.get(name) is not None}
    require(len(moments) <= 1, "exp_avg, exp_avg_sq and max_exp_avg_sq must have one dtype")
    for name in ("row_step", "row_count"):
        counter = arguments.get(name)
        require(
            counter is None
            or (
                counter.dtype == torch.int32
                and counter.numel() == num_embeddings
                and counter.is_contiguous()
            ),
            f"{name} must be contiguous int32, one element for each row of param",
        )

    rows: Tensor | None = arguments["rows"]
    require(
        rows is None or (rows.dtype == torch.int64 and rows.dim() == 1 and rows.is_contiguous()),
        "rows must be contiguous int64, 1-D",
    )
    if op == "row_adam_catch_up_":
        history: Tensor = arguments["history"]
        require(
            history.dtype == torch.float64
            and history.dim() == 2
            and history.shape[0] > 0
            and history.shape[1] == 8
            and history.is_contiguous(),
            "history must be contiguous float64, [capacity, 8]",
        )
    else:
        grad: Tensor = arguments["grad"]
        segments: Tensor | None = arguments["segments"]
        require(
            grad.dim() == 2 and grad.shape[1] == dim and grad.is_contiguous(),
            "grad must be contiguous, [rows, columns of param]",
        )
        require(grad.dtype in _FLOATS, dtypes)
        require(
            (grad.dtype == torch.float64) == wide,
            "grad must be float64 when param is, and only then",
        )
        check_terms(op, grad, segments, arguments["sources"], arguments["coefficients"])
        if segments is not None:
            require(rows is not None, "rows must be given with segments")
            require(
                rows is not None and segments.numel() == rows.numel() + 1,
                "segments must be contiguous int32, one element more than rows",
            )
        elif rows is None:
            require(grad.shape[0] <= num_embeddings, "grad must not have more rows than param")
        else:
            require(
                rows.numel() == grad.shape[0], "rows must have one element for each row of grad"
            )

    for name, allowed in (
        ("used_rows", (torch.int32,)),
        ("step", (torch.float32,)),
        ("inv_scale", (torch.float32,)),
        ("found_inf", (torch.float32,)),
        ("lr_tensor", (torch.float32, torch.float64)),
    ):
        number: Tensor | None = arguments.get(name)
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        require(
            number is None or (number.numel() == 1 and number.dtype in allowed),
            f"{name} must be one {words} element",
        )
