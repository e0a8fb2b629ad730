"""The records of a table in host memory: in RAM, or in a file that is mapped into memory."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fastemb.offload import _mapping
from fastemb.offload._file import DirtyFileError, FileHeader, TableFile
from fastemb.offload._layout import Field, RecordLayout
from fastemb.offload.errors import Direction, IntegrityError

# In `HostTable.versions`: nobody has looked at the record since its file was opened.
UNKNOWN = -1

_CHUNK_BYTES = 32 << 20  # of records at a time, in passes over all of them
_NAMED = 8  # rows in a message


class HostTable:
    """One record per row, in memory of exactly the size of all records, allocated once.

    A record is right when its checksum is, and its version is the one in ``versions``. What writes
    a record in place must call `mark_dirty` before and `seal` after it. Rows of a new table are
    wrong until they are sealed.

    Attributes:
        name: of the table.
        num_rows: of the table.
        layout: of its records.
        seed: of their checksums.
        records: [num_rows, record_bytes] uint8.
        versions: [num_rows] int32, what each record must have; `UNKNOWN` after a clean file was
            opened, until `gather` or `seal` comes to the row.
        fields: name -> [num_rows, width], strided views of ``records``.
        torn: rows that were half written when the process that had the file open ended. They stay
            wrong until they are written, by `reset`, `scatter`, or in place with `seal`.
        step: of the last flush.
        optimizer_step: kept in the file as well, for the engine.
    """

    def __init__(
        self,
        header: FileHeader,
        memory: _mapping.Mapping,
        records: Tensor,
        file: TableFile | None,
        version: int,
    ) -> None:
        self.name = header.name
        self.num_rows = header.num_rows
        self.layout = header.layout
        self.seed = header.seed
        self.step = header.step
        self.optimizer_step = header.optimizer_step
        self.records = records
        self.fields = self.layout.views(records)
        self.versions = torch.full((self.num_rows,), version, dtype=torch.int32, device="cpu")
        self.torn: list[int] = []
        self._headers = self.layout.headers(records)
        self._memory: _mapping.Mapping | None = memory
        self._file = file
        self._address = records.data_ptr()

    @classmethod
    def create(
        cls,
        name: str,
        num_rows: int,
        layout: RecordLayout,
        *,
        seed: int,
        storage: Path | None = None,
        pin: bool = False,
    ) -> HostTable:
        """Zeros, which are not sealed.

        Args:
            name: of the table.
            num_rows: at least 1.
            layout: of its records.
            seed: of their checksums, of 64 bits with a sign.
            storage: file to create; None: RAM. The file gets this name at the first `flush`, so
                that a file by that name is never half initialised.
            pin: register the memory with CUDA, for copies that do not wait; where that fails, warn
                and leave it pageable. Not for files.

        Raises:
            ValueError: ``num_rows`` is less than 1; names are too long for a file.
            FileExistsError: ``storage`` is there.
            FileInUseError: another process is creating ``storage``.
            OSError: no memory, no space on the disk, ...
        """
        if num_rows < 1:
            raise ValueError(f"table {name!r}: num_rows must be at least 1, got {num_rows}")
        header = FileHeader(name, num_rows, layout, seed)
        if storage is not None:
            return cls._of_file(TableFile.create(storage, header), 0)
        size = num_rows * layout.record_bytes
        try:
            memory = _mapping.Mapping.anonymous(size)
        except OSError as error:
            what = f"table {name!r} needs {size} bytes of memory ({error.strerror})"
            raise OSError(error.errno, what) from error
        if pin:
            memory.pin(f"table {name!r}")
        records = memory.tensor().view(num_rows, layout.record_bytes)
        return cls(header, memory, records, None, 0)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        name: str,
        num_rows: int | None = None,
        layout: RecordLayout | None = None,
        recover: bool = False,
    ) -> HostTable:
        """The table in a file.

        A file that was flushed opens at once, whatever its size: its records are checked as they
        are gathered. One that was not is read as a whole, if ``recover`` allows it, and a warning
        names the rows that are wrong, which are then in ``torn``. `reset` them to values of a
        checkpoint or to new ones. The other rows are whole, but of different steps.

        Args:
            path: of the file.
            name: of the table that must be in it.
            num_rows: that it must have; None: as many as there are.
            layout: that its records must have; None: whatever is there.
            recover: open it although it was not flushed.

        Raises:
            FileNotFoundError: it is not there, or was never flushed.
            FileFormatError: it is not the file of a table, not whole, or not what was asked for.
            FileInUseError: it is open in another process, or in this one.
            DirtyFileError: it was not flushed, and ``recover`` is False.
        """
        file = TableFile.open(path)
        try:
            file.header.require(path, name, num_rows, layout)
            if not file.header.clean and not recover:
                raise DirtyFileError(path, file.header.step)
            table = cls._of_file(file, UNKNOWN)
            if layout is not None:
                table.layout = layout  # which may fill new rows with something else
            if not file.header.clean:
                table._find_torn(path)
        except BaseException:
            file.close()
            raise
        return table

    @classmethod
    def _of_file(cls, file: TableFile, version: int) -> HostTable:
        return cls(file.header, file.mapping, file.records(), file, version)

    @property
    def pinned(self) -> bool:
        return self._memory is not None and self._memory.pinned

    def copy_of_weight(self) -> Tensor:
        """The weight of a table in a file, which what is written there does not reach."""
        assert self._file is not None
        return self.layout.views(self._file.copy())["weight"]

    # -- records from and to buffers ----------------------------------------------------------

    def gather(self, rows: Tensor, records: Tensor) -> None:
        """Copy the records of ``rows`` [n] int64 to the first n of ``records``, unchecked.

        From then on ``versions`` has what they say where it had `UNKNOWN`.
        """
        self._require_open()
        torch.ops.fastemb.row_copy_([records], None, [self.records], rows)
        self.expected(rows)

    def expected(self, rows: Tensor) -> Tensor:
        """``versions`` of ``rows`` [n] int64, as int64.

        `UNKNOWN` is first replaced there by what the records themselves say.
        """
        versions = self.versions[rows].long()
        unknown = versions == UNKNOWN
        if unknown.any():
            # A number that does not fit is damaged: it wraps, and the record is found wrong.
            stored = self._headers[rows, 1].int()
            self.versions[rows[unknown]] = stored[unknown]
            versions = torch.where(unknown, stored.long(), versions)
        return versions

    def check(self, records: Tensor, rows: Tensor, versions: Tensor) -> list[int]:
        """Positions of ``records`` that are not ``rows`` [n] int64 in ``versions`` [n].

        `UNKNOWN` among the versions: any version will do.
        """
        return self._wrong(records, None, rows, versions.long()).tolist()

    def scatter(self, rows: Tensor, records: Tensor, versions: Tensor | None = None) -> None:
        """Copy the first n of ``records``, sealed with ``versions`` [n], to ``rows`` [n] int64.

        The rows must be distinct. None: `versions` says already what the records have.
        """
        self._require_open()
        self.mark_dirty()
        torch.ops.fastemb.row_copy_([self.records], rows, [records], None)
        if versions is not None:
            self.versions[rows] = versions.int()
        self._mended(rows)

    # -- records in place ---------------------------------------------------------------------

    def seal(self, rows: Tensor | None = None) -> None:
        """New checksums and the next versions for ``rows`` [n] int64, which were written in place.

        None: for all rows. Whatever is in the records is right from then on, torn or not.
        """
        self._require_open()
        self.mark_dirty()
        for chunk in self._chunks(rows):
            versions = self.expected(chunk) + 1
            self._seal(chunk, versions)
        if rows is None:
            self.torn = []
        else:
            self._mended(rows)

    def verify(self, rows: Tensor | None = None) -> list[int]:
        """Those of ``rows`` [n] int64, or of all, whose record is wrong."""
        self._require_open()
        wrong: list[int] = []
        for chunk in self._chunks(rows):
            at = self._wrong(self.records, chunk, chunk, self.versions[chunk].long())
            wrong += chunk[at].tolist()
        return wrong

    def reset(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Give ``rows`` [n] int64, which may be wrong, new contents, and seal them.

        Args:
            rows: distinct.
            values: name of a field -> [n, width] on the host; "weight" must be there. A field that
                is not there begins as in a new table.

        Raises:
            IndexError: a row is out of range.
            ValueError: ``values`` lacks "weight", has an unknown field or another shape.
        """
        self._require_open()
        where = f"table {self.name!r}: reset"
        widths = {field.name: field.width for field in self.layout.fields}
        if "weight" not in values or not values.keys() <= widths.keys():
            raise ValueError(
                f"{where}: values must have 'weight' and may have {', '.join(widths)}, "
                f"got {', '.join(values) or 'nothing'}"
            )
        for name, value in values.items():
            if value.shape != (len(rows), widths[name]):
                wanted = [len(rows), widths[name]]
                raise ValueError(
                    f"{where}: values[{name!r}] must have shape {wanted}, got {list(value.shape)}"
                )
        size = len(rows), self.layout.record_bytes
        buffer = torch.zeros(size, dtype=torch.uint8, device="cpu")
        views = self.layout.views(buffer)
        for name, value in values.items():
            views[name].copy_(value)
        fill(views, (field for field in self.layout.fields if field.name not in values))
        versions = self.versions[rows].long().clamp(min=0) + 1
        headers, payload = self.layout.headers(buffer), self.layout.payload(buffer)
        torch.ops.fastemb.checksum_seal_(headers, [payload], None, rows, versions, self.seed)
        self.scatter(rows, buffer, versions)

    # -- files --------------------------------------------------------------------------------

    def mark_dirty(self) -> None:
        """Before records are written: from now on the file on the disk says that they are.

        Returns once it does; cheap when it did already. Nothing for tables in RAM.

        Raises:
            FileInUseError: this process was forked from the one that has opened the file.
            OSError: the disk does not take it.
        """
        self._require_open()
        if self._file is not None:
            self._file.mark_dirty()

    def flush(self, step: int) -> None:
        """Bring a file to the disk, where it is clean from then on, at ``step``.

        Nothing else may write meanwhile.

        Raises:
            IntegrityError: rows are torn, or were lost by a disk that has failed before.
            FileGoneError: the file is no longer at its path; it stays dirty.
            OSError: the disk does not take it.
        """
        self._require_open()
        if self.torn:
            raise IntegrityError(
                *(self.name, self.torn, step, self.place),
                "torn, so the file is not flushed: reset() them, with values of a checkpoint or "
                "with new ones",
            )
        self.step = step
        self._save(clean=True)

    def rebuilt(
        self, layout: RecordLayout, *, anew: Collection[str] = (), pin: bool | None = None
    ) -> HostTable:
        """The table with other fields, for an optimizer that adds its state; closes this one.

        Fields of both layouts keep their values, in another dtype if need be; others begin as their
        `Field.fill` says. Versions stay. A file is written beside the old one, which it then
        replaces, in the same state: clean or not, at the same step. RAM is needed for both tables.

        Args:
            layout: of the new table.
            anew: fields of both that do not keep their values.
            pin: as in `create`; None: as this one is.

        Raises:
            ValueError: a field that keeps its values has another width than before, or is the
                weight and has another dtype.
            IntegrityError: a record is wrong; this table stays open, as it was.
            FileGoneError: the file is no longer at its path.
            OSError: no memory, no space on the disk, ...
        """
        self._require_open()
        was = {field.name: field for field in self.layout.fields if field.name not in anew}
        for field in layout.fields:
            old = was.get(field.name, field)
            same_dtype = old.dtype == field.dtype or field.name != "weight"
            if not same_dtype or old.width != field.width:
                raise ValueError(
                    f"table {self.name!r}: field {field.name!r} is {old.dtype} of width "
                    f"{old.width}, which cannot become {field.dtype} of width {field.width}"
                )
        header = FileHeader(self.name, self.num_rows, layout, self.seed)
        if self._file is None:
            pin = self.pinned if pin is None else pin
            new = HostTable.create(self.name, self.num_rows, layout, seed=self.seed, pin=pin)
        else:
            self._file.require_named()
            new = HostTable._of_file(TableFile.create(self._file.path, header, replace=True), 0)
        try:
            for chunk in self._chunks(None):
                self._copy_chunk(new, chunk, was.keys())
            new.step, new.optimizer_step = self.step, self.optimizer_step
            new._save(clean=self._file is not None and self._file.header.clean)
        except BaseException:
            new.close()
            raise
        self.close()
        return new

    def close(self) -> None:
        """Give memory and file back; a file that is dirty stays so. Idempotent.

        Tensors that show records may be read after it. The memory goes with the last of them.
        """
        if self._memory is None:
            return
        self._memory.unpin()
        self._memory = None
        self.records = self.records.new_empty(0, self.layout.record_bytes)
        self._headers = self.layout.headers(self.records)
        self.fields = self.layout.views(self.records)
        if self._file is not None:
            self._file.close()
            self._file = None

    # -- parts --------------------------------------------------------------------------------

    @property
    def place(self) -> Direction:
        """Where records are, for errors."""
        return "in host memory" if self._file is None else "in file"

    def _require_open(self) -> None:
        if self._memory is None:
            raise RuntimeError(f"table {self.name!r} is closed")
        self.require_in_place()

    def require_in_place(self) -> None:
        """Raise `RuntimeError` where what is written to the records would not reach the file."""
        if self._file is not None and self.records.data_ptr() != self._address:
            raise RuntimeError(
                f"table {self.name!r}: its weight or a state of it was moved from {self._file.path}"
                " to shared memory, by share_memory_() or by a queue of torch.multiprocessing, so "
                "nothing reaches the file any more, which stays as it was; share a clone() instead"
            )

    def _chunks(self, rows: Tensor | None) -> Iterator[Tensor]:
        """``rows``, or all of them, in portions of some megabytes."""
        assert self._memory is not None
        size = max(1, _CHUNK_BYTES // self.layout.record_bytes)
        if rows is not None:
            yield from rows.split(size)
            return
        self._memory.read_ahead(True)
        try:
            for begin in range(0, self.num_rows, size):
                yield torch.arange(begin, min(begin + size, self.num_rows), device="cpu")
        finally:
            self._memory.read_ahead(False)

    def _wrong(self, records: Tensor, at: Tensor | None, rows: Tensor, versions: Tensor) -> Tensor:
        """Positions k where record ``at[k]`` (None: k) is not row ``rows[k]`` in its version."""
        headers, pieces = self.layout.headers(records), [self.layout.payload(records)]
        stored = headers[: len(rows)] if at is None else headers[at]
        versions = torch.where(versions == UNKNOWN, stored[:, 1], versions)
        found = torch.tensor([0, len(rows)], device="cpu")
        torch.ops.fastemb.checksum_check_(headers, pieces, at, rows, versions, self.seed, found)
        if not found[0]:
            return rows.new_empty(0)
        checksums = torch.ops.fastemb.checksum(pieces, at, rows, versions, self.seed)
        right = torch.stack((checksums, versions), 1)
        return torch.where((stored != right).any(1))[0]

    def _seal(self, rows: Tensor, versions: Tensor) -> None:
        # What was damaged may be in a gap, which nobody writes and checksums of slots do not have.
        for begin, end in self.layout.gaps:
            self.records[rows, begin:end] = 0
        torch.ops.fastemb.checksum_seal_(
            self._headers, [self.layout.payload(self.records)], rows, rows, versions, self.seed
        )
        self.versions[rows] = versions.int()

    def _mended(self, rows: Tensor) -> None:
        if self.torn:
            self.torn = sorted(set(self.torn).difference(rows.tolist()))

    def _find_torn(self, path: Path) -> None:
        for chunk in self._chunks(None):
            at = self._wrong(self.records, chunk, chunk, self.expected(chunk))
            self.torn += chunk[at].tolist()
        # Their versions may be anything: they count from 0 again.
        self.versions[torch.tensor(self.torn, dtype=torch.int64, device="cpu")] = 0
        shown = ", ".join(map(str, self.torn[:_NAMED])) + (", ..." * (len(self.torn) > _NAMED))
        named = f"rows {shown} are" if len(self.torn) > 1 else f"row {shown} is"
        found = named if self.torn else "none is"
        warnings.warn(
            f"table {self.name!r} in {path} was not flushed before its process ended; "
            f"{len(self.torn)} of its {self.num_rows} records are half written and cannot be used "
            f"until they are reset(): {found} torn. The others are whole, but may be of different "
            f"steps after the last flush (step {self.step}): this is no checkpoint",
            RuntimeWarning,
            stacklevel=3,
        )

    def _save(self, *, clean: bool) -> None:
        if self._file is not None:
            if self._file.doubtful:
                self._file.rewrite()  # first: what is to be written is not lost any more
                self._require_right()
            self._file.flush(clean=clean, step=self.step, optimizer_step=self.optimizer_step)

    def _require_right(self) -> None:
        wrong = self.verify()
        if wrong:
            what = "the disk has lost records, so the file is not flushed: reset() them"
            raise IntegrityError(self.name, wrong, self.step, self.place, what)

    def _copy_chunk(self, new: HostTable, chunk: Tensor, kept: Collection[str]) -> None:
        versions = self.expected(chunk)
        wrong = chunk[self._wrong(self.records, chunk, chunk, versions)].tolist()
        if wrong:
            what = "the records are wrong, so the table cannot be rebuilt: reset() them first"
            raise IntegrityError(self.name, wrong, self.step, self.place, what)
        begin, end = int(chunk[0]), int(chunk[-1]) + 1
        views = {name: field[begin:end] for name, field in new.fields.items()}
        for name in views.keys() & kept:
            views[name].copy_(self.fields[name][begin:end])
        fill(views, (field for field in new.layout.fields if field.name not in kept))
        new._seal(chunk, versions)


def fill(views: Mapping[str, Tensor], fields: Iterable[Field]) -> dict[str, float | None]:
    """Write what ``fields`` of new rows are at first into ``views``, after their weight is there.

    Returns:
        By name, as `Field.fill` says.

    Raises:
        ValueError: a field that begins as the weight has another width.
    """
    filled = {}
    for field in fields:
        target = views[field.name]
        filled[field.name] = field.fill
        if field.fill is not None:
            target.fill_(field.fill)
        elif target.shape == views["weight"].shape:
            target.copy_(views["weight"])
        else:
            raise ValueError(
                f"field {field.name!r} begins as the weight, so its width must be "
                f"{views['weight'].shape[1]}, got {field.width}"
            )
    return filled
