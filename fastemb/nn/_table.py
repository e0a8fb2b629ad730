"""What `Embedding` and `EmbeddingBag` share: the parameter that holds the table."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from fastemb._memory import advise_huge_pages
from fastemb._reference import accumulation_dtype
from fastemb._row_queue import drop, queue_of, refuse_waiting
from fastemb._sleeping import TABLES, wake_all, wake_all_outside_graph
from fastemb.functional import TABLE_DTYPES, check_options, check_sparse, check_weight


def check_table_dtype(op: str, dtype: torch.dtype) -> None:
    """Raise `TypeError` for a dtype that no table can have."""
    if dtype not in TABLE_DTYPES:
        raise TypeError(f"{op}: dtype must be float16, bfloat16, float32 or float64, got {dtype}")


def check_sizes(op: str, rows: int, columns: int) -> None:
    """Raise `TypeError` or `ValueError` for a ``num_embeddings`` or ``embedding_dim`` that is none.

    A tensor of one integer will do.
    """
    sizes: dict[str, Any] = {"num_embeddings": rows, "embedding_dim": columns}
    for name, size in sizes.items():
        try:
            known = size if isinstance(size, torch.SymInt) else operator.index(size)
        except TypeError:
            raise TypeError(f"{op}: {name} must be an integer, got {size!r}") from None
        if known < 0:
            raise ValueError(f"{op}: {name} must not be negative, got {size}")


def check_initial_weight(op: str, weight: Tensor | None, rows: int, columns: int) -> None:
    """Raise `TypeError` or `ValueError` for a ``_weight`` that cannot be the table."""
    if weight is None:
        return
    check_weight(op, weight, "_weight")
    if tuple(weight.shape) != (rows, columns):
        raise ValueError(
            f"{op}: _weight must have the shape ({rows}, {columns}), got {tuple(weight.shape)}"
        )


def own_options(output_dtype: torch.dtype | None, table: str) -> dict[str, Any]:
    """What torch's constructors do not know, where it is given: a subclass need not take it."""
    options = {"output_dtype": (output_dtype, None), "table": (table, "")}
    return {name: value for name, (value, default) in options.items() if value != default}


def keep_full_gradients(weight: Tensor) -> None:
    """Give a leaf parameter the ``grad_dtype`` of its row gradients, FP32 for fp16 and bf16.

    torch rounds a gradient to the dtype of its parameter unless ``grad_dtype`` says otherwise, and
    loses that attribute in ``deepcopy``, pickle, ``to_empty`` and ``load_state_dict(assign=True)``.
    A gradient that is there already is converted, also where another module that has the same
    parameter has changed it. Anything but a leaf parameter is left alone.
    """
    if not isinstance(weight, nn.Parameter) or not weight.is_leaf:
        return
    wanted = _gradient_dtype(weight)
    grad = weight.grad
    if weight.grad_dtype == wanted and (grad is None or grad.dtype == wanted):
        return
    weight.grad = None  # torch refuses to change grad_dtype under a gradient
    weight.grad_dtype = wanted
    if grad is not None:
        weight.grad = grad.to(wanted)


def _gradient_dtype(weight: Tensor) -> torch.dtype:
    """That of a parameter's gradient; where no lookup takes it (complex numbers), as in torch."""
    return accumulation_dtype(weight.dtype) if weight.dtype in TABLE_DTYPES else weight.dtype


@contextmanager
def _swappable(module: nn.Module) -> Iterator[None]:
    """Let `torch.utils.swap_tensors` take parameters, none of which may have a weak reference.

    Modules use it after ``torch.__future__.set_swap_module_params_on_conversion(True)``. A
    parameter remains the same object, and so keeps what is known of it by its id.
    """
    with ExitStack() as stack:
        for param in module.parameters():
            for known in (TABLES.get(id(param)), queue_of(param)):
                if known is not None:
                    stack.enter_context(known.unreferenced())
        yield


class Table(nn.Module):
    """Mixin before `nn.Embedding` or `nn.EmbeddingBag`; both keep their table in ``weight``.

    Attributes:
        output_dtype: dtype of the result, that of ``weight`` when None.
        table: the table's name in error messages.
        sparse: whether its gradient is; "fused": there is none, see `fastemb.functional.embedding`.
    """

    # Class attributes, so that a module which `fastemb.convert` made from torch's has them too.
    output_dtype: torch.dtype | None = None
    table: str = ""
    sparse: Any  # Sparse; torch's classes say bool
    scale_grad_by_freq: bool

    def _finish_init(self, output_dtype: torch.dtype | None, table: str) -> None:
        op = type(self).__name__
        check_table_dtype(op, self._parameter().dtype)
        if output_dtype is not None and output_dtype not in TABLE_DTYPES:
            raise TypeError(
                f"{op}: output_dtype must be float16, bfloat16, float32 or float64, "
                f"got {output_dtype}"
            )
        check_sparse(op, self.sparse)
        last: Any = getattr(self, "include_last_offset", False)
        check_options(op, self.scale_grad_by_freq, last, table)
        self.output_dtype = output_dtype
        self.table = table
        keep_full_gradients(self._parameter())

    def _parameter(self) -> nn.Parameter:
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    def _awake_weight(self) -> Tensor:
        """``weight`` for a lookup, which wakes rows of a parameter and not what it came from.

        A parametrized module computes it from other parameters.
        """
        if TABLES and "weight" not in self._parameters:
            wake_all_outside_graph(*self.parameters())
        return cast(Tensor, self.weight)

    def reset_parameters(self) -> None:
        wake_all(*self.parameters())  # what sleeps is owed to the old values
        weight = self._parameters.get("weight")  # None where it is computed, by pruning, say
        if weight is not None:
            # First touch decides the page size, so the advice comes before the initialisation.
            advise_huge_pages(weight)
        super().reset_parameters()  # type: ignore[misc]

    def extra_repr(self) -> str:
        text = super().extra_repr()
        if self.sparse == "fused":
            # torch's Embedding takes whatever is not False for True; its EmbeddingBag is silent.
            text = text.replace(", sparse=True", "") + ", sparse='fused'"
        if self.output_dtype is not None:
            text += f", output_dtype={self.output_dtype}"
        return text

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, and with ``sparse="fused"`` forget the gradients that wait for a step.

        `zero_grad` of a module that contains this one does not come by here.
        """
        super().zero_grad(set_to_none)
        drop(self._parameters.get("weight"))

    # ---- wherever torch loses grad_dtype ----

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Table:
        """`.to()`, `.half()`, `.cuda()` and the like.

        A dtype conversion is for the table; its gradient is converted to what goes with the new
        table, straight from what it was, and never through the low precision.

        Raises:
            RuntimeError: gradients of ``sparse="fused"`` wait for a step.
        """
        weight = self._parameters.get("weight")
        refuse_waiting(type(self).__name__, weight, "cannot be moved or converted with the table")
        wake_all(*self.parameters())
        grad = None if weight is None else weight.grad
        if weight is None or grad is None:
            with _swappable(self):
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            self._restore_grad_dtype()
            return self
        with torch.no_grad():
            moved = fn(grad)  # first, for where that fails nothing has changed
        weight.grad = None
        try:
            with _swappable(self):
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        except BaseException:
            self._give_back(grad, grad)
            raise
        self._give_back(grad, moved)
        return self

    def _give_back(self, grad: Tensor, moved: Tensor) -> None:
        """Set the gradient to ``moved``, or to ``grad`` as it fits the weight."""
        self._restore_grad_dtype()
        weight = self._parameter()  # not always the one from before
        wanted = _gradient_dtype(weight)
        if moved.dtype != wanted or moved.device != weight.device:
            moved = grad.to(device=weight.device, dtype=wanted)
        weight.grad = moved

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._restore_grad_dtype()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # Steps made before do not concern the new values; momentum does, from now on.
        wake_all(*self.parameters())
        with _swappable(self):
            super()._load_from_state_dict(*args, **kwargs)
        self._restore_grad_dtype()

    # ---- wherever the table is handed on, with rows that may sleep ----

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        wake_all(*self.parameters())
        super()._save_to_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wake_all(*self.parameters())  # copy, deepcopy and pickle
        return super().__reduce_ex__(protocol)

    def _restore_grad_dtype(self) -> None:
        weight = self._parameters.get("weight")
        if weight is not None:
            keep_full_gradients(weight)
