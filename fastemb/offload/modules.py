"""`Embedding` and `EmbeddingBag` whose tables an `OffloadEngine` keeps in host memory."""

# No postponed annotations, as in fastemb.nn: torch.fx imports those of forward.

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import _functorch
from torch._compile import _disable_dynamo
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import Parameter, init

from fastemb import _fused, nn
from fastemb import functional as F
from fastemb.nn._table import Table as TableModule
from fastemb.offload._table import Lookup, Table
from fastemb.offload.engine import OffloadEngine

__all__ = ["Embedding", "EmbeddingBag"]

_RESET_ELEMENTS = 1 << 20  # a sixteenth of those that are drawn at a time


class OffloadedModule(TableModule):
    """Mixin before the modules of `fastemb.nn`: lookups go to the cache of an engine.

    Attributes:
        engine: the engine.
    """

    engine: OffloadEngine
    _table: Table
    embedding_dim: int

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> NoReturn:
        """Not for a table whose memory is that of its engine."""
        raise NotImplementedError(
            f"{cls.__name__}.from_pretrained: a table cannot be offloaded where it is; give "
            f"fastemb.nn.{cls.__name__}.from_pretrained(...) to fastemb.convert(offload=...), or "
            f"make a fastemb.offload.{cls.__name__} and copy into its weight under no_grad()"
        )

    def _offload(self, engine: OffloadEngine, name: str) -> None:
        """Give the table to the engine; `fastemb.convert` does it for a module that it converts."""
        weight = self._parameter()
        self._table = engine.adopt(weight, name, weight.dtype)
        self.engine = engine
        self.table = self._table.name  # of modules that share a weight the first gives the name
        self.sparse = "fused"

    def _look_up(self, op: str, input: Tensor) -> Lookup:
        weight = self._own_weight()
        if _fused.has_hooks(weight):
            raise RuntimeError(
                f"{op}: the weight of table {self.table!r} has hooks, but an offloaded table has "
                "no gradient to call them with; remove them"
            )
        if _is_traced():
            raise RuntimeError(
                f"{op}: table {self.table!r} is offloaded and cannot be looked up in a trace, an "
                "export or with fake tensors; fastemb.revert(model) first"
            )
        if not isinstance(input, Tensor):
            raise TypeError(f"{op}: input must be a tensor, got {type(input).__name__}")
        if input.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{op}: input must be int32 or int64, got {input.dtype}")
        if input.device != self._table.device:
            raise ValueError(
                f"{op}: input must be on the engine's device {self._table.device}, "
                f"got {input.device}"
            )
        padding: Any = self.padding_idx
        transformed = _functorch.peek_interpreter_stack() is not None
        if transformed and weight.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{op}: table {self.table!r} is offloaded, which cannot be used within torch.func "
                "(grad, vmap, ...) while its weight requires grad; freeze it, or "
                "fastemb.revert(model) first"
            )
        return self._table.lookup(op, self._unwrapped(op, input), padding)

    def _unwrapped(self, op: str, ids: Tensor) -> Tensor:
        while _functorch.is_functorch_wrapped_tensor(ids):  # once for each transform
            if not _functorch.is_gradtrackingtensor(ids):
                raise NotImplementedError(
                    f"{op}: table {self.table!r} is offloaded, whose ids cannot be mapped over by "
                    "vmap, nor functionalized; fastemb.revert(model) first"
                )
            ids = _functorch.get_unwrapped(ids)
        return ids

    def _parameter(self) -> Parameter:
        if self._parameters.get("weight") is None:
            raise RuntimeError(
                f"{type(self).__name__}: table {self.table!r} is offloaded, so its weight must "
                "stay the parameter, but it is computed (a parametrization, pruning, a norm); "
                "undo that, and apply it after fastemb.revert(model)"
            )
        return super()._parameter()

    def _own_weight(self) -> Parameter:
        """The parameter that the engine knows.

        Raises:
            RuntimeError: the module was given another one.
        """
        weight = self._parameter()
        if weight is not self._table.weight:
            raise RuntimeError(
                f"{type(self).__name__}: the weight of table {self.table!r} was replaced by "
                "another parameter, which its engine does not know; load_state_dict() takes "
                "other values"
            )
        return weight

    def _done(self, lookup: Lookup, output: Tensor) -> Tensor:
        if self.max_norm is not None:
            self._table.touched(lookup)
        _fused.hold(output, lookup.held)
        return output

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As torch's, with its values, in portions: the table need not fit into memory twice."""
        weight = self._parameter()
        if "_table" in vars(self):
            self._table.flush()
        # torch fills memory in blocks of 16 values, which may not be cut.
        rows = max(1, _RESET_ELEMENTS // max(1, weight.shape[1])) * 16
        for part in weight.split(rows):
            values = part.new_empty(part.shape)
            part.copy_(init.normal_(values))
        self._fill_padding_idx_with_zero()  # type: ignore[operator]
        if "_table" in vars(self):
            self._table.replaced()

    def extra_repr(self) -> str:
        return super().extra_repr() + ", offloaded"

    # ---- the weight stays where it is ----

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        """The engine's device is that of the lookups, so moving the model leaves the table alone.

        Raises:
            RuntimeError: ``fn`` would change the dtype, which is that of the records.
        """
        weight = self._parameter()
        with torch.no_grad():
            probe = fn(torch.zeros(1, dtype=weight.dtype, device="cpu"))
        if probe.dtype != weight.dtype:
            raise RuntimeError(
                f"{type(self).__name__}: table {self.table!r} is offloaded and stays "
                f"{weight.dtype}, got a conversion to {probe.dtype}; convert the model before "
                "fastemb.convert(model, offload=...)"
            )
        return self

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        self._table.open()
        self._table.flush()  # the states of the rows stay what they are
        before = self._parameter()._version
        # The weight stays the host table, so values are copied into it also with assign=True.
        metadata = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)
        if self._parameter()._version != before:  # the rest of the model may be loaded alone
            self._table.replaced()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._own_weight()
        self._table.flush(reading=True)
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:  # as any other checkpoint: weights one after the other, and no records
            key = prefix + "weight"
            destination[key] = destination[key].clone(memory_format=torch.contiguous_format)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            f"{type(self).__name__}: table {self.table!r} is offloaded, and its records cannot be "
            "copied or pickled with the module; use state_dict(), or fastemb.revert(model) first"
        )


def _is_traced() -> bool:
    """Whether operators make a graph, or tensors without values, of what a lookup would do."""
    return (
        torch._C._get_tracing_state() is not None
        or get_proxy_mode() is not None
        or type(torch.empty(0)) is not Tensor
    )


def _check_engine(op: str, engine: object) -> None:
    if not isinstance(engine, OffloadEngine):
        raise TypeError(f"{op}: engine must be an OffloadEngine, got {type(engine).__name__}")


class Embedding(OffloadedModule, nn.Embedding):
    """`fastemb.nn.Embedding` with its table in host memory.

    Args:
        num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq,
            dtype, output_dtype: as in `fastemb.nn.Embedding`; the device is that of the engine.
        engine: keeps the table.
        table: its name in the engine.

    Raises:
        As `fastemb.nn.Embedding` and `OffloadEngine.adopt`; TypeError: ``engine`` is none.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        dtype: torch.dtype | None = None,
        *,
        engine: OffloadEngine,
        table: str,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        _check_engine(type(self).__name__, engine)
        dtype = dtype or torch.get_default_dtype()
        weight, filled = engine.make_weight(table, num_embeddings, embedding_dim, dtype)
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            "fused",
            weight,
            device="cpu",
            dtype=dtype,
            output_dtype=output_dtype,
            table=table,
        )
        if weight is not None and not filled:
            self.reset_parameters()
        self._offload(engine, table)

    @_disable_dynamo
    def forward(self, input: Tensor) -> Tensor:
        """Rows of the table; see `fastemb.functional.embedding`."""
        lookup = self._look_up("embedding", input)
        return self._done(
            lookup,
            F.embedding(
                lookup.slots,
                self._table.leaf,
                lookup.padding,
                self.max_norm,
                self.norm_type,
                self.scale_grad_by_freq,
                "fused",
                output_dtype=self.output_dtype,
                table=self.table,
            ),
        )


class EmbeddingBag(OffloadedModule, nn.EmbeddingBag):
    """`fastemb.nn.EmbeddingBag` with its table in host memory.

    Args:
        num_embeddings, embedding_dim, max_norm, norm_type, scale_grad_by_freq, mode,
            include_last_offset, padding_idx, dtype, output_dtype: as in
            `fastemb.nn.EmbeddingBag`; the device is that of the engine.
        engine: keeps the table.
        table: its name in the engine.

    Raises:
        As `fastemb.nn.EmbeddingBag` and `OffloadEngine.adopt`; TypeError: ``engine`` is none.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        dtype: torch.dtype | None = None,
        *,
        engine: OffloadEngine,
        table: str,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        _check_engine(type(self).__name__, engine)
        dtype = dtype or torch.get_default_dtype()
        weight, filled = engine.make_weight(table, num_embeddings, embedding_dim, dtype)
        super().__init__(
            num_embeddings,
            embedding_dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            "fused",
            weight,
            include_last_offset,
            padding_idx,
            "cpu",
            dtype,
            output_dtype=output_dtype,
            table=table,
        )
        if weight is not None and not filled:
            self.reset_parameters()
        self._offload(engine, table)

    @_disable_dynamo
    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """One row per bag; see `fastemb.functional.embedding_bag`."""
        input, per_sample_weights = self._in_bags(input, offsets, per_sample_weights)
        lookup = self._look_up("embedding_bag", input)
        return self._done(
            lookup,
            F.embedding_bag(
                lookup.slots,
                self._table.leaf,
                offsets,
                self.max_norm,
                self.norm_type,
                self.scale_grad_by_freq,
                self.mode,
                "fused",
                per_sample_weights,
                self.include_last_offset,
                lookup.padding,
                output_dtype=self.output_dtype,
                table=self.table,
            ),
        )

    def _in_bags(
        self, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Without the ids behind the last bag, which need be none of the table.

        On CUDA that would wait for the offsets; there a kernel says what is out of range, and only
        of ids that are in a bag. ``max_norm`` reads all of them.
        """
        if (
            not (self.include_last_offset and isinstance(input, Tensor) and input.dim() == 1)
            or not (isinstance(offsets, Tensor) and offsets.dim() == 1 and len(offsets))
            or offsets.device.type != "cpu"
            or offsets.is_floating_point()
            or self.max_norm is not None
            or (weights is not None and weights.shape != input.shape)
        ):
            return input, weights
        end = max(0, int(offsets[-1]))  # offsets that are wrong are found so by the lookup
        return input[:end], None if weights is None else weights[:end]
