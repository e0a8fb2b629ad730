"""Groups and states of the optimizers: what there is, in which dtype, and how it is loaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy

from fastemb import _offloaded
from fastemb._inference import lasting
from fastemb._memory import advise_huge_pages
from fastemb._offloaded import RowState
from fastemb._reference import accumulation_dtype
from fastemb._row_queue import drop
from fastemb.optim._dense import is_dense, same_layout
from fastemb.optim._options import Options, at_hand, check_options, option_error, require_number

if TYPE_CHECKING:
    from fastemb.offload._dense import DenseOffload, HostStates

LOW_PRECISION = (torch.float16, torch.bfloat16)
DTYPES = (*LOW_PRECISION, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)

# States with one int32 number per row.
ROW_COUNTERS = ("row_step", "row_count")

# As torch.optim's.
ParamsT = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
State = dict[str, Any]


class StatefulOptimizer(torch.optim.Optimizer):
    """The part of an optimizer that is not its step.

    The state of a parameter holds, as far as they are needed (for an offloaded table views of its
    records, which are up to date after its engine's ``flush``):

    - ``step``: [] float32 where the step is made, and there read without waiting;
    - moments: FP32 (FP64 for float64 parameters) in the parameter's shape, unless the subclass
      says otherwise;
    - ``master``: the FP32 copy of a float16 or bfloat16 parameter;
    - ``row_step``, ``row_count``: [num_embeddings] int32.

    Each is made when a step first needs it, so that a checkpoint may lack what torch's has not.
    """

    # All moments there can be; `_moments` says which there are.
    _moment_names: tuple[str, ...] = ()
    # States that a parameter has all of, or none.
    _whole_state: tuple[str, ...] = ()
    # What `decay` may be.
    _decays: tuple[str, ...] = ("touched", "all")
    # Whether 0 is no learning rate to begin with.
    _positive_lr = False
    # Whether also a dense step works on rows, so that states have to be contiguous.
    _row_wise = False
    # Whether torch has a step for complex parameters.
    _takes_complex = False

    # What keeps dense parameters and their states on the host: option ``offload``.
    _offload: DenseOffload | None = None

    # `id` of the optimizer that it was set for; see `_is_wrapper`.
    _own_id = 0

    def __init__(
        self, params: ParamsT, defaults: Options, offload: str | HostStates | None = None
    ) -> None:
        self._own_id = id(self)
        if offload is not None:
            self._offload = self._new_offload(offload)
        self._check_options(defaults)
        super().__init__(params, defaults)

    def _is_wrapper(self) -> bool:
        """Whether this is not an optimizer, but only imitates the class of the one that it wraps.

        Lightning has such. Attributes that are set on one do not reach the step of the other.
        """
        return self._own_id != id(self)

    def _new_offload(self, offload: object) -> DenseOffload:
        from fastemb.offload._dense import DenseOffload, HostStates  # which need this package

        if offload == "cpu":
            offload = HostStates()
        if not isinstance(offload, HostStates):
            raise self._error(
                "offload must be 'cpu', a fastemb.offload.HostStates or None, the default", offload
            )
        return DenseOffload(type(self).__name__, offload)

    # ---- groups ----

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as `torch.optim.Optimizer.add_param_group`; its options are checked.

        Raises:
            ValueError: an option outside its values, or a parameter that cannot be optimized: not
                dense, or of another dtype than float16, bfloat16, float32 and float64 (for some
                optimizers also complex64 and complex128). Those that require no gradient, such as
                integers, may be there.
            TypeError: an option that is not a number where one is expected.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
            for index, param in enumerate(group["params"]):
                if param.layout != torch.strided:
                    raise self._error(f"params[{index}] must be a dense tensor", param.layout)
                if param.dtype in _COMPLEX and self._takes_complex:
                    self._check_complex(group, index)
                elif not is_trainable(param) and (param.requires_grad or param.is_complex()):
                    raise self._error(
                        f"params[{index}] must be float16, bfloat16, float32 or float64",
                        param.dtype,
                    )
                if param.dtype == torch.float64 and group.get("state_dtype") == torch.bfloat16:
                    raise self._error(
                        f"params[{index}] must not be float64 with state_dtype=torch.bfloat16",
                        param.dtype,
                    )
        except BaseException:
            self.param_groups.pop()
            raise
        self._name_params()

    def _check_complex(self, group: Options, index: int) -> None:
        """Raise for options that a group with a complex parameter cannot have."""
        for name in ("fused", "state_dtype"):
            if group.get(name):
                raise self._error(
                    f"params[{index}] must not be complex with {name}={group[name]!r}",
                    group["params"][index].dtype,
                )
        if self._offload is not None:
            raise self._error(
                f"params[{index}] must not be complex with offload=", group["params"][index].dtype
            )

    def _name_params(self) -> None:
        if self._offload is not None:
            self._offload.follow(self.param_groups)

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets what lookups with ``sparse="fused"`` have queued."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for param in group["params"]:
                drop(param)

    def _check_options(self, options: Options) -> None:
        """Raise for options, of the constructor or of a group, outside their values."""
        check_options(type(self).__name__, options, self._decays, positive_lr=self._positive_lr)
        if self._offload is not None:
            for name in ("capturable", "differentiable"):
                if options.get(name):
                    raise self._error(f"{name} must be False with offload=", options[name])

    def _check_group(self, group: Options) -> None:
        """Raise for options that were edited, or loaded, and that the constructor would refuse.

        Nothing on a device is waited for. A schedule may pass through learning rates that are none
        to begin with, such as 0.
        """
        options = {name: at_hand(group[name]) for name in self.defaults}
        self._require_number(options, "lr", float("-inf"))
        lr = options["lr"]
        options["lr"] = torch.ones_like(lr) if isinstance(lr, Tensor) else 1.0
        self._check_options(options)

    def _require_number(
        self, options: Options, name: str, low: float = 0.0, *, open_low: bool = False
    ) -> None:
        require_number(type(self).__name__, name, options[name], low, open_low=open_low)

    def _error(self, expected: str, got: object) -> ValueError:
        return option_error(type(self).__name__, expected, got)

    # ---- states ----

    def _moments(self, group: Options) -> dict[str, float]:
        """Moments that a step with these options needs, and what they are filled with first."""
        raise NotImplementedError

    def _moment_dtype(self, param: Tensor, group: Options) -> torch.dtype:
        return param.dtype if param.is_complex() else accumulation_dtype(param.dtype)

    def _state_shape(self, param: Tensor, name: str) -> torch.Size | None:
        """What a state of this name has to look like; None: it is none of ours."""
        if name in ROW_COUNTERS:
            return param.shape[:1]
        return param.shape if self._is_own(name) else None

    def _is_own(self, name: str) -> bool:
        return name in ("master", *ROW_COUNTERS, *self._moment_names)

    def _counters(self, param: Tensor, group: Options) -> tuple[str, ...]:
        """Those of `ROW_COUNTERS` that a sparse step with these options keeps."""
        return ()

    def _row_states(self, param: Tensor, group: Options) -> list[RowState]:
        """What the records of an offloaded table have to hold for a step."""
        states = []
        for name, fill in self._moments(group).items():
            shape = self._state_shape(param, name)
            assert shape is not None
            width = shape.numel() // max(len(param), 1)
            dtype = self._moment_dtype(param, group)
            states.append(RowState(name, dtype, width, len(shape) == 1, float(fill)))
        if has_master(param, group):
            states.append(RowState("master", torch.float32, param.shape[1], False, None))
        for name in self._counters(param, group):
            states.append(RowState(name, torch.int32, 1, True, 0.0))
        return states

    def _device_of(self, param: Tensor) -> torch.device:
        """Where the states of a parameter are; those of an offloaded table are beside its rows."""
        if self._offload is None or id(param) in _offloaded.TABLES:
            return param.device
        return self._offload.device_of(param)

    def _step_device_of(self, param: Tensor) -> torch.device:
        """Where its step count is: torch's optimizers read that of a parameter on "meta"."""
        table = _offloaded.TABLES.get(id(param))
        device = self._device_of(param) if table is None else table.device
        return torch.device("cpu") if device.type == "meta" else device

    def _steps_of(self, state: State) -> float:
        """That were made with a state which does not count them."""
        return 0.0

    def _add_step(self, param: Tensor, group: Options, state: State) -> None:
        step = state.get("step")
        device = self._step_device_of(param)
        if isinstance(step, Tensor):
            if step.dtype != torch.float32 or step.device != device:
                state["step"] = step.to(device, torch.float32)
        else:  # those who edit states of torch's SparseAdam set a number
            steps = self._steps_of(state) if step is None else float(step)
            with lasting():
                state["step"] = torch.full((), steps, dtype=torch.float32, device=device)

    def _add_moments(self, param: Tensor, group: Options, state: State) -> None:
        dtype = self._moment_dtype(param, group)
        for name, initial in self._moments(group).items():
            if state.get(name) is None:
                state[name] = new = self._new_state(param, name, dtype)
                (torch.view_as_real(new) if new.is_complex() else new).fill_(float(initial))
            else:
                self._fit(param, name, dtype, state)

    def _add_master(self, param: Tensor, group: Options, state: State) -> None:
        if not has_master(param, group):
            state.pop("master", None)  # not kept up from here on
        elif "master" not in state:
            state["master"] = self._new_state(param, "master", torch.float32).copy_(param)
        else:
            self._fit(param, "master", torch.float32, state)

    def _add_counter(self, param: Tensor, state: State, name: str) -> None:
        """Rows are taken to have been part of all steps so far: those were dense."""
        if name not in state:
            state[name] = self._new_state(param, name, torch.int32).copy_(state["step"])
        else:
            self._fit(param, name, torch.int32, state)

    def _fit(self, param: Tensor, name: str, dtype: torch.dtype, state: State) -> None:
        """Have a state as the kernels read it, which take the memory of all tensors in one order.

        Since it was made, the parameter may have got another dtype or memory format, as by
        ``model.to(memory_format=torch.channels_last)``, or the state was edited.
        """
        value = state[name]
        if value.dtype != dtype or not self._is_laid_out(param, value):
            state[name] = self._new_state(param, name, dtype).copy_(value)

    def _is_laid_out(self, param: Tensor, state: Tensor) -> bool:
        if state.is_contiguous() and param.is_contiguous():
            return True  # at once, as nearly always
        if self._row_wise or state.shape != param.shape:
            return state.is_contiguous()
        return same_layout(
            state, param if is_dense(param) else torch.empty_like(param, device="meta")
        )

    @lasting()
    def _new_state(
        self, param: Tensor, name: str, dtype: torch.dtype, like: Tensor | None = None
    ) -> Tensor:
        """Memory for a state. ``like`` has its shape for a lazy parameter, which has none yet."""
        shaped = like if like is not None and is_lazy(param) else param
        shape = self._state_shape(shaped, name)
        assert shape is not None
        if shaped is param and shape == param.shape:
            return self._empty_like(param, dtype)
        state = torch.empty(shape, dtype=dtype, device=self._device_of(param))
        advise_huge_pages(state)
        return state

    def _empty_like(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the parameter's shape, laid out as the kernels want it, on huge pages."""
        layout = torch.contiguous_format if self._row_wise else torch.preserve_format
        device = self._device_of(param)
        state = torch.empty_like(
            param, dtype=dtype, device=device, memory_format=layout, requires_grad=False
        )
        advise_huge_pages(state)
        return state

    # ---- state_dict ----

    @_disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """As torch's; states of offloaded tables are brought up to date, and copied.

        Raises:
            RuntimeError: a parameter with a state is in no group any more; another optimizer has
                taken over an offloaded table.
            IntegrityError: records of one are wrong.
        """
        grouped = set(map(id, chain.from_iterable(group["params"] for group in self.param_groups)))
        for param in self.state:
            if isinstance(param, Tensor) and id(param) not in grouped:
                raise RuntimeError(
                    f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} has a state "
                    "and must be in a group, but was removed or replaced; delete its entry in "
                    "optimizer.state, or give it to the parameter in its place"
                )
        offloaded = self._offloaded_states()

        def complete(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            saved = state_dict["state"]
            params = chain.from_iterable(group["params"] for group in self.param_groups)
            for index, param in enumerate(params):
                if param in offloaded:
                    saved[index] = offloaded.pop(param)
                if index in saved:
                    saved[index] = self._saved(saved[index])

        # Before the hooks of the user, which may return something else.
        handle = self.register_state_dict_post_hook(complete, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _saved(self, state: State) -> State:
        """The state of a parameter as `state_dict` has it."""
        return state

    def _offloaded_states(self) -> dict[Tensor, State]:
        """Copies of the states of offloaded tables, which are brought up to date."""
        offloaded = {}
        for group in self.param_groups:
            for param in group["params"]:
                table = _offloaded.TABLES.get(id(param))
                if table is None or param in offloaded:
                    continue
                table.check_served(self)
                table.flush(reading=True)
                state = self._state_of(table, param, group)
                if state:
                    offloaded[param] = _copied(state)
                elif param in self.state:
                    offloaded[param] = self._first_state(param, group)
        return offloaded

    def _first_state(self, param: Tensor, group: Options) -> State:
        """What the state of a parameter is before its first step, if it is there already."""
        return {}

    def _state_of(self, table: _offloaded.OffloadedTable, param: Tensor, group: Options) -> State:
        """The state of an offloaded table; before the first step what the table came with.

        That is of a file or of `OffloadEngine.load_state_dict`, and of no use where an optimizer of
        another kind has made it. A state of step 0, such as Adagrad's, has seen none.
        """
        state = table.restored(self)
        own = self.state.get(param, {})
        if own and not (state and own.get("step") == 0):
            return own
        moments = state.keys() - {"step", "master", *ROW_COUNTERS}
        if moments.isdisjoint(self._moment_names) if moments else self._moments(group):
            return {}
        for name, value in state.items():
            shape = self._state_shape(param, name)
            if shape is None:  # the step, or somebody else's
                continue
            if value.numel() != shape.numel():
                return {}
            state[name] = value.view(shape)
        return state

    @_disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` of this or of the same-named torch optimizer has returned.

        States keep their dtype, where torch would cast them to that of the parameter: a master or
        a moment in FP32 comes back bit for bit. What a torch checkpoint does not have (masters,
        row counters) is rebuilt from the parameters and the step count; options that it does not
        have stay. All states are copies.

        Raises:
            ValueError: a state of another shape than its parameter needs (of a lazy parameter the
                first step looks at that), a part of a state or that of another kind of optimizer,
                or other groups.
            RuntimeError: another optimizer has taken over an offloaded table.
            IntegrityError: records of one are wrong.

            Nothing is changed then, nor by an error of a hook or one for lack of memory. Only of
            several offloaded tables, which come last, those before the one that fails are loaded.
        """
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            table = _offloaded.TABLES.get(id(param))
            if table is not None:
                table.check_usable(self)
                table.flush()
        # After the hooks of the user; __setstate__ comes before those that run after loading.
        handle = self.register_load_state_dict_pre_hook(lambda _, loaded: self._hide(loaded))
        state, groups = self.state, self.param_groups
        try:
            super().load_state_dict(state_dict)
        except BaseException:
            done = {p: s for p, s in self.state.items() if self._has_records(p) and _is_loaded(s)}
            self.state, self.param_groups = state, groups
            self.state.update(done)
            raise
        finally:
            handle.remove()
        if self._offload is not None:
            self._offload.reset()

    def _hide(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """``state_dict`` with its states, which are checked, out of sight of torch's cast."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        states = dict(state_dict["state"])
        for key, param in zip(saved, params, strict=False):  # torch checks the lengths
            if key not in states:
                continue
            there = [name for name, value in states[key].items() if value is not None]
            if there and not set(self._whole_state).issubset(there):
                # Moments of zero at a late step, say, would make steps that are far too long.
                wanted = ", ".join(map(repr, self._whole_state))
                raise self._error(f"the state of parameter {key} must have {wanted}", there)
            step = states[key].get("step")
            if isinstance(step, Tensor) and step.numel() != 1:
                raise self._error(
                    f"state 'step' of parameter {key} must have 1 element", tuple(step.shape)
                )
            for name, value in states[key].items():
                # Those of a parameter that has no shape yet are looked at before its first step.
                shape = None if is_lazy(param) else self._state_shape(param, name)
                if isinstance(value, Tensor) and shape is not None and value.shape != shape:
                    raise self._error(
                        f"state {name!r} of parameter {key} must have shape {tuple(shape)}",
                        tuple(value.shape),
                    )
            states[key] = {name: _Hidden(value) for name, value in states[key].items()}
        groups = state_dict["param_groups"]
        if len(groups) == len(self.param_groups):  # else torch says so
            groups = list(map(self._loaded_group, self.param_groups, groups))
        return {**state_dict, "state": states, "param_groups": groups}

    def _loaded_group(self, own: Options, saved: Options) -> Options:
        """A group of a checkpoint, completed by the options of the one that it replaces."""
        return {**{name: own[name] for name in self.defaults if name in own}, **saved}

    def __getstate__(self) -> dict[str, Any]:
        offloaded = self._offloaded_states()
        state = super().__getstate__()
        if offloaded:  # a copy has states of its own, as its parameters are others
            state = {**state, "state": defaultdict(dict, {**self.state, **offloaded})}
        return state if self._offload is None else {**state, "_offload": self._offload.config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = state.get("defaults", vars(self).get("defaults", {}))
        names = set(known)
        super().__setstate__(state)
        if "defaults" in state:  # a copy, or one from a pickle; not what load_state_dict hands over
            self._own_id = id(self)
        for name in self.defaults.keys() - names:
            del self.defaults[name]  # torch gives all optimizers differentiable=False
        if "_offload" in state:
            self._offload = self._new_offload(state["_offload"])
            self._name_params()
        params = []
        for group in self.param_groups:
            for name, default in self.defaults.items():
                group.setdefault(name, default)
            params += [(param, group) for param in group["params"] if param in self.state]
        # What cannot be undone comes last.
        params.sort(key=lambda each: self._has_records(each[0]))
        with lasting():
            for param, group in params:
                load = self._loaded_records if self._has_records(param) else self._loaded
                self.state[param] = load(param, group, self.state[param])

    def _has_records(self, param: object) -> bool:
        return id(param) in _offloaded.TABLES

    def _loaded(self, param: Tensor, group: Options, state: State) -> State:
        """``state`` with what `_hide` has hidden in the dtype, device and layout of a step."""
        result: State = {}
        for name, value in state.items():
            if not isinstance(value, _Hidden):
                result[name] = value
                continue
            value = value.value
            if name == "step":  # a number in torch's SparseAdam
                device = self._step_device_of(param)
                step = torch.as_tensor(value, dtype=torch.float32, device=device)
                result[name] = step.detach().clone()
            elif not isinstance(value, Tensor):
                if value is not None:  # torch's SGD without momentum
                    result[name] = value
            elif not self._is_own(name):  # somebody else's
                result[name] = value.detach().to(self._device_of(param), copy=True)
            elif name in self._moment_names:
                dtype = self._moment_dtype(param, group)
                result[name] = self._new_state(param, name, dtype, value).copy_(value)
            elif value.dtype == (torch.float32 if name == "master" else torch.int32):
                result[name] = self._new_state(param, name, value.dtype, value).copy_(value)
            # Else a master or a row counter has been through torch's optimizer, which casts it
            # and does not keep it up: it is made again when a step needs it.
        return result

    def _loaded_records(self, param: Tensor, group: Options, state: State) -> State:
        """The same for an offloaded table, whose records take what a step needs."""
        table = _offloaded.TABLES[id(param)]
        wanted = self._row_states(param, group)
        values = {n: v.value if isinstance(v, _Hidden) else v for n, v in state.items()}
        given: State = {}
        for row_state in wanted:  # without another copy of so much
            value = values.get(row_state.name)
            if isinstance(value, Tensor) and value.dtype == row_state.dtype:
                given[row_state.name] = values.pop(row_state.name)
        given |= self._loaded(param, group, {name: _Hidden(v) for name, v in values.items()})
        result = dict(given)
        self._add_step(param, group, given)
        views = table.bind(self, wanted, given)
        return result | {name: views[name] for name in views.keys() & result.keys()}


def _copied(state: State) -> State:
    """Views of records as tensors of their own."""
    return {
        name: value.clone(memory_format=torch.contiguous_format)
        if isinstance(value, Tensor)
        else value
        for name, value in state.items()
    }


def _is_loaded(state: State) -> bool:
    return not any(isinstance(value, _Hidden) for value in state.values())


class _Hidden:
    """A loaded state, out of the sight of torch's `load_state_dict`, which would cast it."""

    def __init__(self, value: Any) -> None:
        self.value = value


def is_trainable(param: Tensor) -> bool:
    """Whether all optimizers have a step for parameters of this dtype."""
    return param.dtype in DTYPES


def has_master(param: Tensor, group: Options) -> bool:
    return param.dtype in LOW_PRECISION and group["rounding"] == "nearest"
