"""`OffloadEngine`: embedding tables in host memory, the rows of the next batches on the device."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fastemb import _offloaded
from fastemb.offload._file import FileGoneError, partial_name
from fastemb.offload._host import HostTable
from fastemb.offload._lanes import Lane
from fastemb.offload._layout import Field, RecordLayout, why_unfit
from fastemb.offload._modes import outside_modes
from fastemb.offload._prefetch import Batch, Ids, LookAhead, Prefetcher
from fastemb.offload._slots import Policy
from fastemb.offload._stored import StoredTable, require_weight
from fastemb.offload._table import Table
from fastemb.offload._transfers import LaneFactory, Transfers
from fastemb.offload.errors import VERIFY, IntegrityError, Verify, again, together

__all__ = ["OffloadEngine", "OffloadStats"]

_SUFFIX = ".fetab"


class OffloadStats(NamedTuple):
    """What an engine has done so far.

    Attributes:
        batches: handed out by `OffloadEngine.prefetch`.
        hits, misses: distinct rows of batches that were in the cache, and that were not; those
            that gave way to others count again.
        fetched, written_back: records.
        bytes_to_device, bytes_to_host: of these records.
        checks: checksums that were recomputed and compared.
        transfer_seconds: time that the lanes have worked, one after the other.
        waited_seconds: time that the training loop has waited for them.
    """

    batches: int
    hits: int
    misses: int
    fetched: int
    written_back: int
    bytes_to_device: int
    bytes_to_host: int
    checks: int
    transfer_seconds: float
    waited_seconds: float

    @property
    def hit_rate(self) -> float:
        """Share of the distinct rows that were in the cache when their batch was seen."""
        looked_up = self.hits + self.misses
        return self.hits / looked_up if looked_up else 1.0

    @property
    def hidden_share(self) -> float:
        """Share of the transfers that the training loop did not wait for."""
        if self.transfer_seconds == 0:
            return 1.0
        return max(0.0, 1.0 - self.waited_seconds / self.transfer_seconds)


class OffloadEngine:
    """Keeps embedding tables in host memory, and a cache of their rows on the device.

    A row, its optimizer state, a version and a checksum are one record. Records of the rows that a
    batch needs are brought into the cache while earlier batches compute, and changed ones go back
    when their place is needed. Every record is verified where it arrives. Training ends with the
    bits that it has without the engine.

    .. code-block:: python

        engine = fastemb.offload.OffloadEngine(device="cuda", cache=0.1)
        fastemb.convert(model, offload=engine)
        optimizer = fastemb.optim.Adam(model.parameters())
        for batch in engine.prefetch(loader, ids=lambda batch: {"embedding": batch["ids"]}):
            ...  # the loop as it was

    The loop also works without `prefetch`; then every lookup waits for its rows. An offloaded
    ``weight`` is the host table: it is up to date after `flush`, which ``state_dict`` calls by
    itself, and may be written in place (``with torch.no_grad()``) after one. Its gradient is that
    of ``sparse="fused"``. One thread trains, lookups of others wait for it; not within
    `torch.compile` graphs.

    Args:
        device: of the cache and the lookups; default: the current CUDA device, else the CPU.
        cache: size of the cache: a share of each table's rows (float, at most 1) or a number of
            rows (int), or either by name of the table. It has to hold the distinct rows of the
            batches in flight, of one batch at least.
        policy: which row leaves: "lfu", the one used least, or "lru", the one used longest ago.
        depth: batches that `prefetch` looks ahead.
        verify: "all" records, a "sample" of one in 16, or "off".
        storage: directory for tables larger than RAM: each is a file that is mapped into memory.
            Its weight cannot go to shared memory (``share_memory_``, a queue of
            torch.multiprocessing), a clone can. None: they are in RAM, pinned where there is CUDA.
        resume: take the tables, and their optimizer state, from the files in ``storage``. Their
            values win over what is written to a weight before its first use or `flush`, such as
            what a model begins with.
        recover: open files that were not flushed before their process ended; see `torn`.
        staging_bytes: size of each of the two buffers for either direction.
        seed: of the checksums.
        make_lane: name and device -> lane, for simulations.

    Raises:
        ValueError: an argument outside the values above.

    Errors of transfers are raised in the training loop, before anything uses what has arrived:
    `IntegrityError` names table, rows, step and direction. A record that was damaged on its way to
    the device is fetched again when it is needed next. One that is damaged in host memory stays so
    until `reset_rows` or `load_state_dict` of the engine writes it; until then no checkpoint is
    made, nor the table partly overwritten. When one is lost on its way to the host nothing but
    `load_state_dict` of the engine goes on.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | int | None = None,
        cache: float | int | Mapping[str, float | int] = 0.1,
        policy: Policy = "lfu",
        depth: int = 2,
        verify: Verify = "all",
        storage: str | Path | None = None,
        resume: bool = False,
        recover: bool = False,
        staging_bytes: int = 4 << 20,
        seed: int = 0,
        make_lane: LaneFactory | None = None,
    ) -> None:
        for name, value, allowed in (
            ("policy", policy, ("lfu", "lru")),
            ("verify", verify, VERIFY),
        ):
            if value not in allowed:
                raise ValueError(f"OffloadEngine: {name} must be one of {allowed}, got {value!r}")
        for name, number, least in (
            ("depth", depth, 0),
            ("staging_bytes", staging_bytes, 1),
            ("seed", seed, 0),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ValueError(
                    f"OffloadEngine: {name} must be an int of at least {least}, got {number!r}"
                )
        if storage is None and (resume or recover):
            raise ValueError("OffloadEngine: resume and recover need storage, got storage=None")
        for size in cache.values() if isinstance(cache, Mapping) else (cache,):
            _check_cache_size(size)
        if make_lane is not None and not callable(make_lane):
            raise ValueError(f"OffloadEngine: make_lane must be callable, got {make_lane!r}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(device)
        if self.device.type == "cpu":
            self.device = torch.device("cpu")  # which tensors are on, whatever its number was
        elif self.device == torch.device("cuda"):  # without a number
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"OffloadEngine: device must be of cpu or cuda, got {self.device}")
        self.depth = depth
        self.step = 0  # goes on from that of files
        self.batches = self.hits = self.misses = 0  # for `stats`
        self.lock = RLock()
        self.tables: dict[str, Table] = {}
        self.loops: WeakSet[LookAhead[Any]] = WeakSet()
        self._cache = cache
        self._policy: Policy = policy
        self._storage = None if storage is None else _directory(storage)
        self._resume, self._recover = resume, recover
        self._seed = seed
        self._seeds = count()
        # Of modules that are being made, and whether they are sealed.
        self._hosts: dict[str, tuple[HostTable, bool]] = {}
        self._waited = 0.0
        self._broken: BaseException | None = None
        self._closed = False
        if make_lane is None:
            # Where the training itself runs on these processors, one thread is a lane's share.
            make_lane = partial(Lane, threads=1 if self.device.type == "cpu" else None)
        self.transfers = Transfers(self.device, staging_bytes, verify, make_lane)

    # ---- tables ----

    @outside_modes
    def adopt(self, weight: nn.Parameter, name: str, dtype: torch.dtype) -> Table:
        """Take over a table; `fastemb.convert` and the modules of `fastemb.offload` call it.

        Args:
            weight: (num_embeddings, embedding_dim); stays the same object, its values are moved
                when the table is first used.
            name: of the table, unique in this engine.
            dtype: that the weight will have then.

        Raises:
            TypeError: the name is no string, or empty.
            ValueError: the name is taken, or too long for a file; the table has no rows or no
                columns, or its weight is on meta or an inference tensor; the file is of another
                one.
            FileExistsError: there is a file of this name, and the engine does not resume.
        """
        self.check()
        known = _offloaded.TABLES.get(id(weight))
        if isinstance(known, Table):
            if known._engine() is not self:
                raise ValueError(f"OffloadEngine: table {name!r} belongs to another engine")
            return known
        self._check_new(name)
        if weight.numel() == 0:
            raise ValueError(
                f"OffloadEngine: table {name!r} must have rows and columns, "
                f"got shape {tuple(weight.shape)}"
            )
        if weight.is_meta or weight.is_inference():
            raise ValueError(
                f"OffloadEngine: table {name!r} must have values that can be trained, got a weight "
                + ("on meta" if weight.is_meta else "that was made in torch.inference_mode()")
            )
        slots = self._slots_of(name, len(weight))
        table = Table(self, name, weight, slots, self._policy, self._next_seed(name))
        if name in self._hosts:
            table.take(*self._hosts.pop(name), dtype)
        elif (host := self._existing(name)) is not None:
            table.take(host, True, dtype)
        self.tables[name] = table
        table.register()
        return table

    def forget(self, table: StoredTable) -> None:
        """Undo `adopt`; the table was not used yet, or has been given back."""
        self.tables.pop(table.name, None)
        table.unregister()
        table.close()

    @outside_modes
    def make_weight(
        self, name: str, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, bool]:
        """Memory for the weight of a new module, where tables are in files.

        Returns:
            The weight in its file, or None: it is made as any other. Whether it has values; then
            it is a copy of them.
        """
        if self._storage is None:
            return None, False
        self.check()
        self._check_new(name)
        left = self._hosts.pop(name, None)  # by a module whose construction has failed
        if left is not None:
            left[0].close()
        host = self._existing(name)
        resumed = host is not None
        if host is not None:
            require_weight(host, dtype, (num_embeddings, embedding_dim))
            weight = host.copy_of_weight()  # models write what they begin with into it
        else:
            layout = RecordLayout((Field("weight", dtype, embedding_dim),))
            host = HostTable.create(
                name, num_embeddings, layout, seed=self._next_seed(name), storage=self._path(name)
            )
            weight = host.fields["weight"]
        self._hosts[name] = (host, resumed)
        return weight, resumed

    def _check_new(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"OffloadEngine: a table must have a str as its name, got {name!r}")
        path = self._path(name)
        if path is not None:
            size, most = len(partial_name(path)), os.pathconf(path.parent, "PC_NAME_MAX")
            if size > most:
                raise ValueError(
                    f"OffloadEngine: the name of a table must be shorter with storage, where it is "
                    f"that of a file (at most {most} bytes, here {size}), got {name!r}"
                )
        known = self.tables.get(name)
        if known is None:
            return
        if known.readable or self._storage is not None:
            raise ValueError(f"OffloadEngine: there is a table {name!r} already")
        # Its module is gone and nobody can read it any more. What is under way still has it.
        del self.tables[name]

    def _existing(self, name: str) -> HostTable | None:
        path = self._path(name)
        if path is None:
            return None
        if not path.exists():
            if self._resume:
                warnings.warn(
                    f"OffloadEngine: there is no {path} to resume table {name!r} from, "
                    "which begins anew",
                    RuntimeWarning,
                    stacklevel=5,
                )
            return None
        if not self._resume:
            raise FileExistsError(
                f"OffloadEngine: {path} is there; resume=True takes table {name!r} from it"
            )
        host = HostTable.open(path, name=name, recover=self._recover)
        self.step = max(self.step, host.step)
        return host

    def _next_seed(self, name: str) -> int:
        """Tables have checksums of their own: records of one are none of another.

        Also of one from a file, to which another engine has given the same number.
        """
        said = f"{self._seed} {next(self._seeds)} {name}".encode("utf-8", "surrogatepass")
        return int.from_bytes(blake2b(said, digest_size=8).digest(), "little") >> 1

    def _slots_of(self, name: str, rows: int) -> int:
        size = self._cache
        if isinstance(size, Mapping):
            if name not in size:
                raise ValueError(
                    f"OffloadEngine: cache must have a size for table {name!r}, got {dict(size)}"
                )
            size = size[name]
        slots = -(-rows * size // 1) if isinstance(size, float) else size
        return max(1, min(rows, int(slots)))

    def _path(self, name: str) -> Path | None:
        if self._storage is None:
            return None
        return self._storage / (quote(name, safe="") + _SUFFIX)

    # ---- the loop ----

    def prefetch(
        self,
        loader: Iterable[Batch],
        ids: Callable[[Batch], Mapping[str, Ids] | Ids] | None = None,
    ) -> Prefetcher[Batch]:
        """The batches of ``loader``, each when its rows are in the cache.

        Args:
            loader: any iterable, of batches on the host. It is asked for batches before their
                turn, so what it draws of the global generators of random numbers is drawn earlier.
            ids: batch -> name of a table -> the ids (int32 or int64, any shape, or several such
                tensors) that lookups will use; with one table in the engine the ids alone. What is
                not announced is fetched in the lookup, on CUDA it is an error there. None: a batch
                is a mapping, and its keys that are names of tables hold their ids.

        Returns:
            An iterable with the length of the loader. It may be iterated again, as the loader may;
            of a loader that is its own iterator, such as a generator, no batch is lost then. But
            another call of `prefetch` does not get what this one has looked ahead for: make one
            for all loops over it. When a lookup or another loop needs their place, rows that are
            only looked ahead for give way and are fetched again.

        Raises:
            When iterated: `CacheTooSmallError`, `IntegrityError`, IndexError, TypeError,
            ValueError, and what the loader raises, in place of the batch that it concerns. The
            iterator then goes on: with the same batch after an `IntegrityError`, and where there
            was no room beside others, else with the next one.
        """
        if ids is not None and not callable(ids):
            raise TypeError(f"prefetch: ids must be a function of a batch, got {ids!r}")
        return Prefetcher(self, loader, ids)

    def give_way(self) -> bool:
        """Let rows leave that loops only look ahead for; whether there were any."""
        some = False
        for loop in self.loops:
            some = loop.let_go() or some
        return some

    def flush(self) -> None:
        """Bring all host tables up to date, and files to the disk, where they are then clean.

        Raises:
            FileGoneError, OSError: a file was removed, or its disk fails; it stays dirty, the
                others do not. All tables are up to date in memory.
            IntegrityError: the same for a file with torn rows, or such as its disk has lost.
        """
        self._update()
        self._save()

    def _update(self) -> None:
        self.check()
        for table in self.tables.values():
            table.update()

    def _save(self) -> None:
        """All files; that one cannot be clean is raised after the others."""
        errors: list[BaseException] = []
        for table in self.tables.values():
            try:
                table.save()
            except (FileGoneError, IntegrityError, OSError) as error:
                errors.append(error)
        if errors:
            raise together(errors)

    def verify(self) -> dict[str, list[int]]:
        """Name of each table -> rows whose record on the host is wrong, after `flush`."""
        self.flush()
        return {name: table.host.verify() for name, table in self._stored().items()}

    # ---- states ----

    def _stored(self) -> dict[str, Table]:
        """The tables that have records, or will."""
        return {name: table for name, table in self.tables.items() if not table.abandoned}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Name of each table -> "weight" and the states of its rows, as copies, after `flush`.

        With states, or after a step, there is also "step" [] of the optimizer.

        Raises:
            IntegrityError: a record on the host is wrong.
        """
        self.check()
        tables = self._stored()
        for table in tables.values():
            table.flush(reading=True)
        result = {}
        for name, table in tables.items():
            result[name] = {
                field: view.clone(memory_format=torch.contiguous_format)
                for field, view in table.host.fields.items()
            }
            if len(table.host.fields) > 1 or table.optimizer_step:
                result[name]["step"] = torch.tensor(
                    table.optimizer_step, dtype=torch.float32, device="cpu"
                )
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Tensor] | Tensor]) -> None:
        """Load what `state_dict` has returned, or weights alone, also after an `IntegrityError`.

        Args:
            state_dict: name of each table -> its fields, or its weight. States that are not there
                begin anew. The step count begins anew with a weight alone; beside states without a
                "step" it stays.

        Raises:
            KeyError: a table is missing, or is none of the engine.
            TypeError: something is no tensor.
            ValueError: a shape that does not fit, a tensor that is sparse, quantized, on meta,
                complex or bool, a step that is no number of
                steps, or a state that the records have no room for: its optimizer has to be there.
                Nothing is changed then.
        """
        self._require_open()
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"load_state_dict: state_dict must be a mapping, got {type(state_dict).__name__}"
            )
        unknown = [name for name in state_dict if name not in self.tables]
        if unknown:
            raise KeyError(
                f"load_state_dict: there are no tables {unknown} in the engine, "
                f"only {', '.join(self.tables)}"
            )
        # Of modules that are gone those that are given; nobody reads the others any more.
        tables = {n: t for n, t in self._stored().items() if t.readable or n in state_dict}
        fields = {}
        for name, table in tables.items():
            table.open()
            if name not in state_dict:
                raise KeyError(f"load_state_dict: there must be a table {name!r}")
            fields[name] = table.loadable(state_dict[name])
        self.transfers.drain()
        self.transfers.failures.clear()
        self._broken = None
        for name, table in tables.items():
            table.load(fields[name])

    def reset_rows(self, name: str, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Give rows whose records are wrong new contents; see `torn`.

        Args:
            name: of the table.
            rows: [n] int64, distinct.
            values: "weight", and states -> [n, width]; states that are not there begin anew.

        Raises:
            KeyError: there is no such table.
            TypeError: ``rows`` is not int64; ``values`` is no mapping of dense, real tensors.
            IndexError: a row is out of range.
            ValueError: ``values`` lacks "weight", or has another shape; a row comes twice.
        """
        self._require_open()
        if name not in self.tables:
            raise KeyError(f"reset_rows: there is no table {name!r}, only {', '.join(self.tables)}")
        if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.dim() != 1:
            got = f"{rows.dim()}-D {rows.dtype}" if isinstance(rows, Tensor) else repr(rows)
            raise TypeError(f"reset_rows: rows must be 1-D int64, got {got}")
        if len(rows.unique()) != len(rows):
            raise ValueError(f"reset_rows: rows must be distinct, got {rows.tolist()}")
        if not isinstance(values, Mapping):
            raise TypeError(f"reset_rows: values must be a mapping, got {type(values).__name__}")
        for field, value in values.items():
            unfit = why_unfit(value) if isinstance(value, Tensor) else type(value).__name__
            if unfit is not None:
                raise TypeError(
                    f"reset_rows: values[{field!r}] must be a dense, real tensor, got {unfit}"
                )
        table = self.tables[name]
        table.open()
        num_rows = table.host.num_rows
        outside = torch.where((rows < 0) | (rows >= num_rows))[0]
        if len(outside):
            position = int(outside[0])
            raise IndexError(
                f"reset_rows: row {int(rows[position])} at position {position} is outside table "
                f"{name!r} with {num_rows} rows"
            )
        table.reset(rows, values)

    def torn(self) -> dict[str, list[int]]:
        """Rows, by table, that were half written when the process that had a file open ended."""
        return {
            name: list(table.host.torn)
            for name, table in self.tables.items()
            if hasattr(table, "host")
        }

    @property
    def stats(self) -> OffloadStats:
        """What was done so far."""
        traffic = self.transfers.traffic()
        return OffloadStats(
            self.batches,
            self.hits,
            self.misses,
            traffic.fetched,
            traffic.written_back,
            traffic.bytes_to_device,
            traffic.bytes_to_host,
            traffic.checks,
            traffic.busy_seconds,
            self._waited,
        )

    def close(self) -> None:
        """`flush`, end the lanes and close the files, as a ``with`` block does. Idempotent.

        Weights and states may be read and saved after it, and `fastemb.revert` works.
        """
        if self._closed:
            return
        try:
            if self._broken is None:
                try:
                    self._update()
                except BaseException as error:
                    self._broken = self._broken or error  # what is on the host is not up to date
                    raise
                self._save()
        finally:
            self._closed = True
            self.transfers.close()
            for table in self.tables.values():
                table.close()
            for host, _ in self._hosts.values():
                host.close()
            self.tables, self._hosts = {}, {}

    def __enter__(self) -> OffloadEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "OffloadEngine: its lanes and tables cannot be copied or pickled, nor can what refers "
            "to it, such as a loop of prefetch(); use state_dict()"
        )

    # ---- waiting ----

    def check(self) -> None:
        """Raise what has been lost on the way to the host, or that there is no engine any more."""
        self._require_open()
        self.check_lost()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the OffloadEngine is closed")

    def check_lost(self) -> None:
        self._take_failures()
        if self._broken is not None:
            raise again(self._broken)

    def lose(self, error: IntegrityError) -> None:
        """Raise an error that nothing but `load_state_dict` goes on after."""
        self._broken = self._broken or error
        raise again(error)

    def wait(self, event: Any) -> None:
        """The training loop waits for a transfer; failures of any are raised."""
        failed: BaseException | None = None
        if event is not None:
            start = None if event.done() else time.perf_counter()
            try:
                event.wait()
            except BaseException:
                failed = event.failure()
                if failed is None:  # an interrupt, or the worker is gone
                    raise
            finally:
                if start is not None:
                    self._waited += time.perf_counter() - start
        self._take_failures()
        if failed is not None:  # not in a job, or somebody was told already
            raise again(failed)

    def drain(self, *, raising: bool = True) -> None:
        """Wait until nothing is under way."""
        start = time.perf_counter()
        self.transfers.drain()
        self._waited += time.perf_counter() - start
        self._take_failures(raising=raising)

    def _take_failures(self, *, raising: bool = True) -> None:
        errors: list[BaseException] = []
        failures = self.transfers.failures
        while failures:
            failure = failures.popleft()
            assert isinstance(failure.table, Table)
            if failure.lost:
                self._broken = self._broken or failure.error
            else:
                failure.table.spoiled.append(failure.rows)
            errors.append(failure.error)
        if raising and errors:
            raise again(together(errors))
        if raising and self.transfers.reported:
            raise again(self.transfers.reported.popleft())


def _directory(storage: str | Path) -> Path:
    """It, made and absolute: the process may change its directory (as Hydra does)."""
    if not isinstance(storage, (str, Path)):
        raise ValueError(f"OffloadEngine: storage must be a str or a Path, got {storage!r}")
    path = Path(storage).absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(f"OffloadEngine: storage must be a directory, got the file {path}")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _check_cache_size(size: float | int) -> None:
    share = isinstance(size, float) and 0.0 < size <= 1.0
    rows = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    if not share and not rows:
        raise ValueError(
            "OffloadEngine: cache must be a share of the rows in (0, 1] as a float, or a number of "
            f"rows of at least 1 as an int, got {size!r}"
        )
