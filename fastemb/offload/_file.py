"""The file of a table larger than RAM: a header of one page, then the records.

Header, little-endian, `HEADER_BYTES` long, zeros after its end::

    8 s   magic
    u32   format version
    4 s   byte order of the records: 0x01020304 as they would hold it
    u64   BLAKE2b-64 of the header with zeros here
    u8    clean: 1 when the records are those of `step`, 0 when they were written to since
    7     zeros
    i64   step of the last flush
    f64   step of the optimizer at the last flush
    u64, i64, u64   rows, seed of the checksums, bytes of a record
    text  name of the table                 (text: u16 bytes, then UTF-8)
    u16   number of fields, for each of them
        text, text          name, dtype
        u64, u64, u8, f64   width, offset in the record, whether new rows get the weight, fill

What changes lies within the first sector of a disk, so that a header is never half of one flush and
half of another. Nothing is unpickled.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
import weakref
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from fastemb.offload._interrupts import uninterrupted
from fastemb.offload._layout import Field, RecordLayout
from fastemb.offload._mapping import Mapping

MAGIC = b"\x89fastemb"
FORMAT_VERSION = 1
HEADER_BYTES = 4096

_BYTE_ORDER = struct.pack("=I", 0x01020304)
_PREFIX = struct.Struct("<8sI4sQ")
_STATE = struct.Struct("<B7xqd")
_SHAPE = struct.Struct("<QqQ")
_FIELD = struct.Struct("<QQBd")
_COUNT = struct.Struct("<H")
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}


class FileFormatError(ValueError):
    """A file is not what was asked for.

    Attributes:
        path: of the file.
        expected: what should be there.
        found: what is there.
    """

    def __init__(self, path: Path, expected: str, found: str) -> None:
        self.path = path
        self.expected = expected
        self.found = found
        super().__init__(f"{path}: expected {expected}, found {found}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.expected, self.found)


class FileInUseError(RuntimeError):
    """A file is open elsewhere: in another process, or in this one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} is open for writing, in another process or in this one; only one may have it "
            "open: close the table there first"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)


class FileGoneError(RuntimeError):
    """A file that is open was removed, or another one took its place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(
            f"{path} is no longer the file that is open: it was removed, or replaced by another "
            "one, so nobody would find what is flushed; bring it back, or save the state_dict() of "
            "the model and of the optimizer"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path,)


class DirtyFileError(RuntimeError):
    """The process that wrote a file ended before it had flushed it.

    Attributes:
        path: of the file.
        step: of its last flush.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step
        super().__init__(
            f"{path}: the process that wrote to it ended before flush(), so records may be half "
            f"written, or newer than the last flush (step {step}). Go back to a checkpoint, or "
            "open it with recover=True, which looks for half-written records"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.path, self.step)


# ---------------------------------------------------------------------------------------------
# header
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileHeader:
    """What the first page says."""

    name: str
    num_rows: int
    layout: RecordLayout
    seed: int
    clean: bool = False
    step: int = 0
    optimizer_step: float = 0.0

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.num_rows * self.layout.record_bytes

    def pack(self) -> bytes:
        """`HEADER_BYTES` bytes.

        Raises:
            ValueError: names are too long for a page.
        """
        parts = [
            _STATE.pack(self.clean, self.step, self.optimizer_step),
            _SHAPE.pack(self.num_rows, self.seed, self.layout.record_bytes),
            _text(self.name),
            _COUNT.pack(len(self.layout.fields)),
        ]
        for field in self.layout.fields:
            parts += [_text(field.name), _text(str(field.dtype).removeprefix("torch."))]
            offset = self.layout.offsets[field.name]
            parts += [_FIELD.pack(field.width, offset, field.fill is None, field.fill or 0.0)]
        body = b"".join(parts)
        room = HEADER_BYTES - _PREFIX.size
        if len(body) > room:
            raise ValueError(
                f"the names of table {self.name[:40]!r} and its fields need {len(body)} bytes in "
                f"the header of a file, which has {room}"
            )
        body = body.ljust(room, b"\0")
        return _prefix(_checksum(body)) + body

    @classmethod
    def unpack(cls, path: Path, page: bytes) -> FileHeader:
        """The header in the first ``page`` of the file at ``path``.

        Raises:
            FileFormatError: it is not one, or not whole.
        """
        if len(page) < HEADER_BYTES:
            raise FileFormatError(
                path, f"a header of {HEADER_BYTES} bytes", f"a file of {len(page)} (truncated)"
            )
        magic, version, byte_order, checksum = _PREFIX.unpack_from(page)
        body = page[_PREFIX.size : HEADER_BYTES]
        if magic != MAGIC:
            raise FileFormatError(path, f"a table, which begins with {MAGIC!r}", repr(magic))
        if version != FORMAT_VERSION:
            raise FileFormatError(path, f"format version {FORMAT_VERSION}", f"version {version}")
        if byte_order != _BYTE_ORDER:
            raise FileFormatError(path, f"{sys.byteorder}-endian records", "another byte order")
        if checksum != _checksum(body):
            raise FileFormatError(
                path,
                f"a header with checksum {_checksum(body):#018x}",
                f"{checksum:#018x}: the header is damaged",
            )
        try:
            return cls._unpack(body)
        except (ValueError, KeyError, struct.error) as error:
            raise FileFormatError(path, "a header that makes sense", str(error)) from error

    @classmethod
    def _unpack(cls, body: bytes) -> FileHeader:
        at = _STATE.size + _SHAPE.size
        clean, step, optimizer_step = _STATE.unpack_from(body)
        num_rows, seed, record_bytes = _SHAPE.unpack_from(body, _STATE.size)
        name, at = _read_text(body, at)
        (count,) = _COUNT.unpack_from(body, at)
        at += _COUNT.size
        fields, offsets = [], {}
        for _ in range(count):
            field, at = _read_text(body, at)
            dtype, at = _read_text(body, at)
            width, offset, of_weight, fill = _FIELD.unpack_from(body, at)
            at += _FIELD.size
            fields.append(Field(field, _DTYPES[dtype], width, None if of_weight else fill))
            offsets[field] = offset
        layout = RecordLayout(fields)
        if num_rows < 1 or count < 1:
            raise ValueError(f"{num_rows} rows with {count} fields")
        if layout.offsets != offsets or layout.record_bytes != record_bytes:
            raise ValueError(f"fields at {offsets} in records of {record_bytes} bytes")
        return cls(name, num_rows, layout, seed, bool(clean), step, optimizer_step)

    def require(
        self, path: Path, name: str, num_rows: int | None, layout: RecordLayout | None
    ) -> None:
        """Compare with what was asked for; None is not compared.

        Raises:
            FileFormatError: they differ.
        """
        if name != self.name:
            raise FileFormatError(path, f"table {name!r}", f"table {self.name!r}")
        if num_rows is not None and num_rows != self.num_rows:
            raise FileFormatError(path, f"{num_rows} rows", f"{self.num_rows} rows")
        if layout is not None and layout != self.layout:
            raise FileFormatError(path, f"records of {layout}", f"records of {self.layout}")


def _prefix(checksum: int) -> bytes:
    return _PREFIX.pack(MAGIC, FORMAT_VERSION, _BYTE_ORDER, checksum)


def _checksum(body: bytes) -> int:
    return int.from_bytes(blake2b(_prefix(0) + body, digest_size=8).digest(), "little")


def _text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) > HEADER_BYTES:
        raise ValueError(f"the name {text[:40]!r}... is too long for the header of a file")
    return _COUNT.pack(len(encoded)) + encoded


def _read_text(body: bytes, at: int) -> tuple[str, int]:
    (size,) = _COUNT.unpack_from(body, at)
    begin = at + _COUNT.size
    return body[begin : begin + size].decode(), begin + size


# ---------------------------------------------------------------------------------------------
# file
# ---------------------------------------------------------------------------------------------


class TableFile:
    """An open file, locked against other processes (``flock``) until it is closed.

    Attributes:
        path: where it is, or will be after the first `flush`; absolute, without symbolic links,
            which stay where they are when another file takes its place.
        header: as it stands in the file; clean also where only the disk may say so.
        mapping: the whole file.
        doubtful: whether the disk has refused records, and no flush has gone well since. The kernel
            says so once: it then takes them for written, and they are again what the disk has
            where it has needed their memory for something else.
    """

    def __init__(self, path: Path, descriptor: int, header: FileHeader, partial: bool) -> None:
        self.path = path
        self.header = header
        try:
            self.mapping = Mapping.of_file(descriptor, header.file_bytes)
        except OSError as error:
            raise _named(error, "a table cannot be mapped from there", path) from error
        self.doubtful = False
        self._partial = partial
        self._replace = False
        self._owner = os.getpid()
        self._descriptor = descriptor
        self._release = weakref.finalize(self, _release, descriptor, _partial(path), self._owner)

    @classmethod
    def create(cls, path: Path, header: FileHeader, *, replace: bool = False) -> TableFile:
        """Zeros, with all of its space reserved, under a temporary name until the first `flush`.

        Args:
            path: where it will be.
            header: what it will be; not clean.
            replace: whether it may take the place of a file that is there, with its mode.

        Raises:
            FileExistsError: ``path`` is there.
            FileInUseError: another process is creating it.
            OSError: no space, no permission, ...
        """
        path = path.resolve()
        if not replace:
            _require_absent(path)
        page = header.pack()
        partial = _partial(path)
        descriptor = _open_locked(partial, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(descriptor, 0)  # what a process that was killed has left
            _reserve(descriptor, path, header)
            if replace and path.exists():
                os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode))
            os.pwrite(descriptor, page, 0)
            file = cls(path, descriptor, header, True)
        except BaseException:
            partial.unlink()
            os.close(descriptor)
            raise
        file._replace = replace
        return file

    @classmethod
    def open(cls, path: Path) -> TableFile:
        """A file that is there, clean or not, once its header and its size are right.

        Raises:
            FileNotFoundError: it is not there.
            FileInUseError: another process has it open, or this one.
            FileFormatError: it is not the file of a table, or not whole.
            OSError: there is no space for what it leaves out, no permission, ...
        """
        path = path.resolve()
        descriptor = _open_locked(path, os.O_RDWR)
        try:
            header = FileHeader.unpack(path, os.pread(descriptor, HEADER_BYTES, 0))
            size = os.fstat(descriptor).st_size
            if size != header.file_bytes:
                kind = "truncated" if size < header.file_bytes else "too long"
                wanted = f"{header.file_bytes} bytes for {header.num_rows} records"
                raise FileFormatError(path, wanted, f"{size} bytes ({kind})")
            if os.lseek(descriptor, 0, os.SEEK_HOLE) < size:  # a copy that leaves out zeros
                _reserve(descriptor, path, header)
            return cls(path, descriptor, header, False)
        except BaseException:
            os.close(descriptor)
            raise

    def records(self) -> Tensor:
        """[num_rows, record_bytes] uint8 in the file."""
        shape = self.header.num_rows, self.header.layout.record_bytes
        return self.mapping.tensor(HEADER_BYTES).view(shape)

    def copy(self) -> Tensor:
        """As `records`, but what is written there does not reach the file."""
        mapping = Mapping.copy_of_file(self._descriptor, self.header.file_bytes)
        return mapping.tensor(HEADER_BYTES).view(self.header.num_rows, -1)

    def rewrite(self) -> None:
        """Have the next flush bring all records to the disk, also those that count as written."""
        self.mapping.rewrite(HEADER_BYTES)

    def mark_dirty(self) -> None:
        """Return once the disk has a header that says that records are being written.

        Raises:
            FileInUseError: this is a process that was forked from the one that has opened it.
            OSError: the disk does not take it.
        """
        self._require_owner()
        if self.header.clean:
            try:
                self._write_header(replace(self.header, clean=False))
            except OSError as error:
                what = f"table {self.header.name!r} cannot be called dirty on the disk"
                raise _named(error, what, self.path) from error

    def flush(self, *, clean: bool, step: int, optimizer_step: float) -> None:
        """Bring records, then the header to the disk; the first time, give the file its name.

        Raises:
            FileGoneError: see `require_named`; the header stays as it was.
            FileInUseError: as `mark_dirty`.
            OSError: the disk does not take it; the file stays dirty.
        """
        self._require_owner()
        self.require_named()
        header = replace(self.header, clean=clean, step=step, optimizer_step=optimizer_step)
        try:
            os.fdatasync(self._descriptor)  # most of the work, and without the GIL
            self.mapping.flush()
            self._write_header(header)
        except OSError as error:
            self.doubtful = True
            what = f"table {header.name!r} does not come to the disk"
            raise _named(error, what, self.path) from error
        self.doubtful = False
        if self._partial:
            if not self._replace:
                _require_absent(self.path)
            with uninterrupted:
                os.replace(_partial(self.path), self.path)
                self._partial = False
            _sync_directory(self.path.parent)

    def require_named(self) -> None:
        """Raise `FileGoneError` where another file, or none, is at the path of this one."""
        path = _partial(self.path) if self._partial else self.path
        if not _names(path, self._descriptor):
            raise FileGoneError(path)

    def close(self) -> None:
        """Unlock the file; one that was never flushed is removed. Idempotent.

        The memory stays while tensors show it, but nobody keeps others from the file any more. The
        same happens when this object is collected.
        """
        self._release()

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:  # whose memory of the file this is, too
            raise FileInUseError(self.path)

    def _write_header(self, header: FileHeader) -> None:
        if header.clean:
            self.header = header  # or nothing would call the records dirty again where this fails
        # One system call, not a copy into the mapping, which a signal could end half way.
        os.pwrite(self._descriptor, header.pack(), 0)
        os.fdatasync(self._descriptor)
        self.header = header


def partial_name(path: Path) -> str:
    """What the file at ``path`` is called until it is whole."""
    return path.name + ".partial"


def _partial(path: Path) -> Path:
    return path.with_name(partial_name(path))


def _require_absent(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists: open it, or remove it first")


def _reserve(descriptor: int, path: Path, header: FileHeader) -> None:
    """A hole in the file would end the process with SIGBUS when the disk is full later."""
    try:
        os.posix_fallocate(descriptor, 0, header.file_bytes)
    except OSError as error:
        what = f"table {header.name!r} needs {header.file_bytes} bytes"
        raise _named(error, what, path) from error


def _open_locked(path: Path, flags: int) -> int:
    """Descriptor of the locked file that ``path`` names."""
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            _lock(descriptor, path)
            if _names(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # renamed or replaced before it was locked


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileInUseError(path) from None
    except OSError as error:  # such as those of Lustre without "flock"
        raise _named(error, "its file system cannot lock a table", path) from error


def _named(error: OSError, what: str, path: Path) -> OSError:
    """The error of a call that knows of no path."""
    return OSError(error.errno, f"{what} ({error.strerror})", str(path))


def _release(descriptor: int, partial: Path, owner: int) -> None:
    """Close a file that process ``owner`` has locked, and remove it if it is called ``partial``."""
    try:
        if os.getpid() == owner:  # a forked process shares the lock, which is not its own
            if _names(partial, descriptor):
                partial.unlink()
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # or those that were forked would keep it
    finally:
        os.close(descriptor)


def _names(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL):  # where there is no such thing
            raise _named(error, "the name of a table does not come to the disk", path) from error
    finally:
        os.close(descriptor)
