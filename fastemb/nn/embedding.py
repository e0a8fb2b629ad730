"""`Embedding`: rows of a table by id."""

# No postponed annotations: torch.fx saves those of forward as what they are, and a string cannot
# be imported again.

import torch
from torch import Tensor, nn

from fastemb import functional as F
from fastemb.nn._table import (
    Table,
    check_initial_weight,
    check_sizes,
    check_table_dtype,
    keep_full_gradients,
    own_options,
)


@torch.fx.wrap  # one node in a traced graph: a proxy cannot be validated
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: F.Sparse,
    output_dtype: torch.dtype | None,
    table: str,
) -> Tensor:
    if not torch.compiler.is_compiling():
        keep_full_gradients(weight)
    return F.embedding(
        input,
        weight,
        padding_idx,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        sparse,
        output_dtype=output_dtype,
        table=table,
    )


class Embedding(Table, nn.Embedding):
    """A lookup table, in place of `torch.nn.Embedding`.

    Same arguments in the same order, same ``state_dict``, same results. On top of torch's:

    - gradients of fp16 and bf16 tables are summed and kept in FP32 (``weight.grad`` is float32);
    - ``output_dtype``: an fp16 table can feed a model that computes in float32;
    - a gradient with ``sparse=True`` is coalesced: each row once, in ascending order;
    - ``sparse="fused"`` has no gradient tensor: an optimizer of `fastemb.optim` sums the rows and
      applies them in one kernel; see `fastemb.functional.embedding`;
    - an id out of range is an `IndexError` that says which id, where, in which table.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse,
            device, dtype: as in `torch.nn.Embedding`. ``dtype`` is float16, bfloat16, float32 or
            float64.
        output_dtype: dtype of the result; that of the table by default.
        table: name of this table in error messages.

    Shape:
        input ``(*)``, int32 or int64; output ``(*, embedding_dim)``.

    Raises:
        TypeError: a dtype outside those above, an option of another type.
        ValueError: an option out of its range.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: F.Sparse = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        output_dtype: torch.dtype | None = None,
        table: str = "",
    ) -> None:
        name = type(self).__name__
        check_sizes(name, num_embeddings, embedding_dim)
        F.resolve_padding(name, padding_idx, num_embeddings)
        if dtype is not None:
            check_table_dtype(name, dtype)
        check_initial_weight(name, _weight, num_embeddings, embedding_dim)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,  # type: ignore[arg-type]
            _weight,
            _freeze,
            device,
            dtype,
        )
        self._finish_init(output_dtype, table)

    def forward(self, input: Tensor) -> Tensor:
        """Rows named by ``input``; see `fastemb.functional.embedding`."""
        return _embedding(
            input,
            self._awake_weight(),
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
            self.output_dtype,
            self.table,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: F.Sparse = False,
        *,
        output_dtype: torch.dtype | None = None,
        table: str = "",
    ) -> "Embedding":
        """A module around the 2-D tensor ``embeddings``, which it shares memory with."""
        F.check_weight(cls.__name__, embeddings, "embeddings")
        rows, columns = embeddings.shape
        return cls(
            num_embeddings=rows,
            embedding_dim=columns,
            padding_idx=padding_idx,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            _weight=embeddings,
            _freeze=freeze,
            **own_options(output_dtype, table),
        )
