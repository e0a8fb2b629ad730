"""`EmbeddingBag`: sums, means and maxima of bags of rows."""

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
def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    mode: str,
    sparse: F.Sparse,
    per_sample_weights: Tensor | None,
    include_last_offset: bool,
    padding_idx: int | None,
    output_dtype: torch.dtype | None,
    table: str,
) -> Tensor:
    if not torch.compiler.is_compiling():
        keep_full_gradients(weight)
    return F.embedding_bag(
        input,
        weight,
        offsets,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        padding_idx,
        output_dtype=output_dtype,
        table=table,
    )


class EmbeddingBag(Table, nn.EmbeddingBag):
    """Sums, means or maxima of bags of rows, in place of `torch.nn.EmbeddingBag`.

    Same arguments in the same order, same ``state_dict``, same results. On top of torch's:

    - sums over fp16 and bf16 rows are kept in FP32 and rounded once; gradients of such tables are
      summed and kept in FP32 (``weight.grad`` is float32);
    - ``output_dtype``: an fp16 table can feed a model that computes in float32;
    - ``per_sample_weights`` also for ``mode="mean"``, in any float dtype;
    - int32 and int64 ``input`` and ``offsets`` in any mixture;
    - ``sparse=True`` in every mode, and its gradient is coalesced;
    - ``sparse="fused"`` has no gradient tensor: an optimizer of `fastemb.optim` sums the rows and
      applies them in one kernel; see `fastemb.functional.embedding`;
    - ids and offsets are checked: an error says which, where, in which table.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
            include_last_offset, padding_idx, device, dtype: as in `torch.nn.EmbeddingBag`.
            ``dtype`` is float16, bfloat16, float32 or float64.
        output_dtype: dtype of the result; that of the table by default.
        table: name of this table in error messages.

    Shape:
        input ``(num_bags, bag_length)``, or ``(N,)`` with offsets ``(num_bags,)``, or
        ``(num_bags + 1,)`` under ``include_last_offset``; output ``(num_bags, embedding_dim)``.

    Raises:
        TypeError: a dtype outside those above, an option of another type.
        ValueError: an option out of its range.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: F.Sparse = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        output_dtype: torch.dtype | None = None,
        table: str = "",
    ) -> None:
        name = type(self).__name__
        check_sizes(name, num_embeddings, embedding_dim)
        F.resolve_padding(name, padding_idx, num_embeddings)
        F.check_mode(name, mode, False)  # scale_grad_by_freq fails in use, as in torch
        if dtype is not None:
            check_table_dtype(name, dtype)
        check_initial_weight(name, _weight, num_embeddings, embedding_dim)
        super().__init__(
            num_embeddings,
            embedding_dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,  # type: ignore[arg-type]
            _weight,
            include_last_offset,
            padding_idx,
            device,
            dtype,
        )
        self._finish_init(output_dtype, table)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """One row per bag; see `fastemb.functional.embedding_bag`."""
        return _embedding_bag(
            input,
            self._awake_weight(),
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
            self.output_dtype,
            self.table,
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: Tensor,
        freeze: bool = True,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: F.Sparse = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        *,
        output_dtype: torch.dtype | None = None,
        table: str = "",
    ) -> "EmbeddingBag":
        """A module around the 2-D tensor ``embeddings``, which it shares memory with."""
        F.check_weight(cls.__name__, embeddings, "embeddings")
        rows, columns = embeddings.shape
        module = cls(
            num_embeddings=rows,
            embedding_dim=columns,
            max_norm=max_norm,
            norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            sparse=sparse,
            _weight=embeddings,
            include_last_offset=include_last_offset,
            padding_idx=padding_idx,
            **own_options(output_dtype, table),
        )
        module.weight.requires_grad = not freeze
        return module
