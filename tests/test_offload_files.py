"""Files of offloaded tables: what is refused, and what a process that was killed leaves."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import offload_victim as victim
import pytest
import torch

from fastemb.offload import _file, _mapping
from fastemb.offload._file import (
    HEADER_BYTES,
    DirtyFileError,
    FileFormatError,
    FileGoneError,
    FileHeader,
    FileInUseError,
)
from fastemb.offload._host import UNKNOWN, HostTable
from fastemb.offload._layout import Field, RecordLayout
from fastemb.offload._mapping import Mapping
from fastemb.offload.errors import IntegrityError

NUM_ROWS = 40
LAYOUT = RecordLayout(
    [
        Field("weight", torch.bfloat16, 3),
        Field("exp_avg", torch.float32, 3),
        Field("master", torch.float32, 3, None),
        Field("row_step", torch.int32, 1, 7),
    ]
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.emb"


def create(path: Path, layout: RecordLayout = LAYOUT) -> HostTable:
    """A table whose rows hold their numbers, flushed at step 5."""
    table = HostTable.create("users", NUM_ROWS, layout, seed=-3, storage=path)
    for field in table.fields.values():
        field.copy_(torch.arange(NUM_ROWS)[:, None].expand_as(field))
    table.optimizer_step = 12.5
    table.seal()
    table.flush(5)
    return table


def damage(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_flushed_file_opens_with_what_was_in_it(path: Path) -> None:
    table = create(path)
    records = table.records.clone()
    table.close()
    assert path.stat().st_size == HEADER_BYTES + NUM_ROWS * LAYOUT.record_bytes

    table = HostTable.open(path, name="users", num_rows=NUM_ROWS, layout=LAYOUT)
    assert torch.equal(table.records, records)
    assert (table.step, table.optimizer_step, table.seed) == (5, 12.5, -3)
    assert table.verify() == []
    assert (table.versions == UNKNOWN).all()  # nobody has read 200 GB to open them
    table.gather(torch.tensor([3, 1]), torch.empty(2, LAYOUT.record_bytes, dtype=torch.uint8))
    assert table.versions[:4].tolist() == [UNKNOWN, 1, UNKNOWN, 1]
    table.close()

    table = HostTable.open(path, name="users")
    assert table.layout.fields == LAYOUT.fields  # fills too
    table.close()


def test_a_stale_record_of_a_file_is_wrong_once_its_version_is_known(path: Path) -> None:
    create(path).close()
    table = HostTable.open(path, name="users")
    row = torch.tensor([7])
    stale = torch.empty(1, LAYOUT.record_bytes, dtype=torch.uint8)
    table.gather(row, stale)
    assert table.check(stale, row, table.versions[row]) == []
    table.seal(row)
    assert table.check(stale, row, table.versions[row]) == [0]
    table.records[7] = stale[0]
    assert table.verify() == [7]
    table.close()


def test_a_file_has_no_name_before_its_first_flush(path: Path) -> None:
    table = HostTable.create("users", NUM_ROWS, LAYOUT, seed=0, storage=path)
    assert not path.exists()
    with pytest.raises(FileInUseError, match="partial is open for writing"):
        HostTable.create("users", NUM_ROWS, LAYOUT, seed=0, storage=path)
    table.close()
    assert list(path.parent.iterdir()) == []
    HostTable.create("users", NUM_ROWS, LAYOUT, seed=0, storage=path)  # and let it go
    assert list(path.parent.iterdir()) == []

    path.with_name(path.name + ".partial").write_bytes(b"of a process that was killed" * 1000)
    create(path).close()
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(FileExistsError, match="exists: open it, or remove it first"):
        create(path)
    HostTable.open(path, name="users").close()


def test_a_file_that_appears_meanwhile_is_not_replaced(path: Path) -> None:
    table = HostTable.create("users", NUM_ROWS, LAYOUT, seed=0, storage=path)
    path.write_text("somebody else's")
    with pytest.raises(FileExistsError, match="exists"):
        table.flush(0)
    table.close()
    assert path.read_text() == "somebody else's"


def test_no_space_is_an_error_at_creation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_file.os, "posix_fallocate", full)
    size = HEADER_BYTES + NUM_ROWS * LAYOUT.record_bytes
    with pytest.raises(OSError, match=rf"'users' needs {size} bytes \(No space left.*table\.emb"):
        create(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "call", "text"),
    [
        (_file.fcntl, "flock", "its file system cannot lock a table"),
        (Mapping, "madvise", "a table cannot be mapped from there"),
    ],
)
def test_a_file_system_that_cannot_keep_tables(
    where: object, call: str, text: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    create(path).close()
    monkeypatch.setattr(where, call, missing)
    for action in (
        lambda: create(path.with_name("other.emb")),
        lambda: HostTable.open(path, name="users"),
    ):
        with pytest.raises(OSError, match=rf"{text} \(Function not.*\.emb") as caught:
            action()
        assert caught.value.errno == 38


def test_a_file_system_that_synchronises_no_directories(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(errors[0], "no fsync")

    monkeypatch.setattr(os, "fsync", fsync)
    errors = [22]
    create(path).close()
    HostTable.open(path, name="users").close()
    errors = [5]
    with pytest.raises(OSError, match=r"the name of a table .*\(no fsync\)"):
        create(path.with_name("other.emb"))


def test_a_copy_that_leaves_out_zeros_gets_its_space(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``cp --sparse=always`` makes it; there may be no space when the zeros are written to."""
    layout = RecordLayout([Field("weight", torch.float32, 8192)])
    table = HostTable.create("users", 4, layout, seed=0, storage=path)
    table.seal()
    table.flush(0)
    table.close()
    whole = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        for begin in range(0, len(whole), 4096):
            page = whole[begin : begin + 4096]
            if any(page):
                file.seek(begin)
                file.write(page)
        file.truncate(len(whole))
    assert path.stat().st_blocks * 512 < len(whole)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=rf"'users' needs {len(whole)} bytes .*table\.emb"):
            HostTable.open(path, name="users")
    table = HostTable.open(path, name="users")
    assert path.stat().st_blocks * 512 >= len(whole)
    assert table.verify() == []
    table.close()


def test_one_at_a_time(path: Path) -> None:
    table = create(path)
    view = table.fields["weight"]
    with pytest.raises(FileInUseError, match=r"table\.emb is open for writing"):
        HostTable.open(path, name="users")
    table.close()
    HostTable.open(path, name="users").close()
    assert float(view[9, 0]) == 9  # still there
    del view
    table = HostTable.open(path, name="users")
    del table  # without close()
    HostTable.open(path, name="users").close()


def test_a_file_that_is_replaced_while_it_is_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = path.with_name("other.emb")
    table = HostTable.create("items", 1, LAYOUT, seed=0, storage=other)
    table.flush(0)
    table.close()
    create(path).close()
    lock = _file.fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if other.exists():
            other.replace(path)
        lock(descriptor, how)

    monkeypatch.setattr(_file.fcntl, "flock", flock)
    table = HostTable.open(path, name="items")  # the one that has the name and the lock
    with pytest.raises(FileInUseError):
        HostTable.open(path, name="items")
    table.close()


def test_a_forked_process_writes_nothing(path: Path) -> None:
    """Its memory is that of the file, but it knows of the other's changes nothing."""
    table = create(path)
    before = path.read_bytes()
    row, record = torch.tensor([1]), table.records[2:3].clone()
    child = os.fork()
    if child == 0:
        refused = 0
        for write in (
            table.mark_dirty,
            table.seal,
            lambda: table.scatter(row, record, row),
            lambda: table.flush(6),
        ):
            try:
                write()
            except FileInUseError as error:
                refused += "in another process" in str(error)
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert path.read_bytes() == before
    table.seal(row)
    table.flush(6)
    table.close()


@pytest.mark.parametrize("closing", [True, False])
def test_a_forked_process_neither_keeps_nor_breaks_the_lock(path: Path, closing: bool) -> None:
    """Also that of a table which nobody closes, and which is collected."""
    table = create(path)
    done_read, done = os.pipe()
    child = os.fork()
    if child == 0:
        if closing:
            table.close()
        os.write(done, b"x")
        time.sleep(30)
        os._exit(0)
    try:
        os.read(done_read, 1)
        with pytest.raises(FileInUseError):
            HostTable.open(path, name="users")
        if closing:
            table.close()
        del table
        HostTable.open(path, name="users").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(done_read)
        os.close(done)


# ---------------------------------------------------------------------------------------------
# what is refused
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_goes_while_it_is_open(path: Path, replaced: bool) -> None:
    table = create(path)
    table.mark_dirty()
    kept = path.with_name("kept")
    path.rename(kept)
    if replaced:
        path.write_bytes(kept.read_bytes())
    for action in (lambda: table.flush(6), lambda: table.rebuilt(LAYOUT)):
        with pytest.raises(FileGoneError, match=r"table\.emb is no longer the file that is open"):
            action()
    assert sorted(path.parent.iterdir()) == [kept, path][: 1 + replaced]
    kept.replace(path)
    assert not FileHeader.unpack(path, path.read_bytes()).clean
    table.flush(6)
    table.close()
    HostTable.open(path, name="users").close()


def test_a_file_that_goes_before_its_first_flush(path: Path) -> None:
    table = HostTable.create("users", NUM_ROWS, LAYOUT, seed=0, storage=path)
    path.with_name(path.name + ".partial").unlink()
    with pytest.raises(FileGoneError, match=r"partial is no longer"):
        table.flush(0)
    table.close()


@pytest.mark.parametrize("part", ["records", "weight", "exp_avg"])
def test_records_that_were_moved_to_shared_memory(path: Path, part: str) -> None:
    """They no longer reach the file, which must not pass for up to date."""
    table = create(path)
    table.mark_dirty()
    before = path.read_bytes()
    (table.records if part == "records" else table.fields[part]).share_memory_()
    rows = torch.tensor([1])
    for action in (
        lambda: table.flush(6),
        lambda: table.seal(rows),
        lambda: table.scatter(rows, table.records[:1].clone()),
        table.verify,
        lambda: table.rebuilt(LAYOUT),
    ):
        with pytest.raises(RuntimeError, match=r"moved from .*table\.emb to shared memory"):
            action()
    assert path.read_bytes() == before
    table.close()
    with pytest.raises(DirtyFileError):
        HostTable.open(path, name="users")


def refused(path: Path, text: str, **asked: object) -> None:
    arguments = {"name": "users", "num_rows": NUM_ROWS, "layout": LAYOUT} | asked
    with pytest.raises(FileFormatError, match=text) as caught:
        HostTable.open(path, **arguments)  # type: ignore[arg-type]
    assert str(path) in str(caught.value)
    assert caught.value.expected in str(caught.value)
    assert caught.value.found in str(caught.value)


@pytest.mark.parametrize("recover", [False, True])
def test_files_that_are_not_whole(path: Path, recover: bool) -> None:
    create(path).close()
    whole = path.read_bytes()
    for size in (0, 7, 100, HEADER_BYTES - 1):
        path.write_bytes(whole[:size])
        refused(path, rf"header of 4096 bytes, found a file of {size} \(truncated\)")
    for size in (HEADER_BYTES, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, rf"bytes for 40 records, found {size} bytes \(truncated\)", recover=recover)
    path.write_bytes(whole + b"\0")
    refused(path, r"bytes \(too long\)", recover=recover)
    path.write_bytes(whole)
    HostTable.open(path, name="users").close()


def test_every_byte_of_the_header_counts(path: Path) -> None:
    create(path).close()
    whole = path.read_bytes()[:HEADER_BYTES]
    generator = random.Random(5)
    messages = set()
    for at in range(HEADER_BYTES):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << generator.randrange(8)
        damage(path, 0, flipped)
        with pytest.raises(FileFormatError) as caught:
            HostTable.open(path, name="users", recover=True)
        messages.add(caught.value.expected.split()[0])
    assert messages == {"a", "format", f"{sys.byteorder}-endian"}
    damage(path, 0, whole)
    HostTable.open(path, name="users").close()


def test_foreign_and_older_files(path: Path) -> None:
    create(path).close()
    whole = path.read_bytes()
    path.write_bytes(b"PK\x03\x04" + whole[4:])  # a zip, such as torch.save writes
    refused(path, r"expected a table, which begins with b.*, found b'PK\\x03\\x04")
    path.write_bytes(whole)
    damage(path, 8, (0).to_bytes(4, "little"))
    refused(path, "expected format version 1, found version 0")
    path.write_bytes(whole)
    damage(path, 12, whole[15:11:-1])
    refused(path, f"expected {sys.byteorder}-endian records, found another byte order")


def test_a_header_with_the_right_checksum_must_make_sense(path: Path) -> None:
    create(path).close()
    page = path.read_bytes()[:HEADER_BYTES]
    at = page.index(b"bfloat16")
    nonsense = [page[:at] + b"complex9" + page[at + 8 :]]
    at = page.index(b"exp_avg")
    nonsense.append(page[:at] + b"\xff" + page[at + 1 :])
    at = page.index(NUM_ROWS.to_bytes(8, "little"))
    nonsense.append(page[:at] + bytes(8) + page[at + 8 :])
    at = page.index(LAYOUT.record_bytes.to_bytes(8, "little"))
    nonsense.append(page[:at] + b"\x08" + page[at + 1 :])
    nonsense.append(page[: HEADER_BYTES // 30] + b"\xff" * (HEADER_BYTES - HEADER_BYTES // 30))
    for one in nonsense:
        body = one[_file._PREFIX.size :]
        damage(path, 0, _file._prefix(_file._checksum(body)) + body)
        refused(path, "expected a header that makes sense, found")


def test_other_tables_than_asked_for(path: Path) -> None:
    create(path).close()
    refused(path, "expected table 'items', found table 'users'", name="items")
    refused(path, "expected 41 rows, found 40 rows", num_rows=41)

    def other(*fields: Field) -> RecordLayout:
        return RecordLayout(fields)

    weight, exp_avg, *rest = LAYOUT.fields
    for layout in (
        other(replace(weight, dtype=torch.float16), exp_avg, *rest),
        other(weight, replace(exp_avg, width=4), *rest),
        other(weight, replace(exp_avg, name="momentum"), *rest),
        other(weight, *rest, exp_avg),
        other(weight, exp_avg),
    ):
        refused(
            path, r"expected records of .*, found records of weight bfloat16\[3\]", layout=layout
        )
    HostTable.open(path, name="users", layout=LAYOUT).close()


def test_names_must_fit(path: Path) -> None:
    for name in ("n" * 4000, "n" * 70000):
        with pytest.raises(ValueError, match=r"names of table|too long"):
            HostTable.create(name, 1, LAYOUT, seed=0, storage=path)
    assert list(path.parent.iterdir()) == []
    header = FileHeader("n" * 3000 + "ü", 1, LAYOUT, 0)
    assert FileHeader.unpack(path, header.pack()).name == header.name


# ---------------------------------------------------------------------------------------------
# files that were not flushed
# ---------------------------------------------------------------------------------------------


def test_the_disk_says_dirty_before_the_first_record_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the header said, and was synchronised, when records were written and flushed."""
    table = create(path)
    events: list[str] = []
    copy, sync = torch.ops.fastemb.row_copy_, os.fdatasync

    def said() -> str:
        clean = FileHeader.unpack(path, path.read_bytes()[:HEADER_BYTES]).clean
        return "clean" if clean else "dirty"

    class Ops:
        def row_copy_(self, *arguments: object) -> None:
            events.append(f"records, {said()}")
            copy(*arguments)

        def __getattr__(self, name: str) -> object:
            return getattr(torch.ops._fastemb, name)

    def fdatasync(descriptor: int) -> None:
        sync(descriptor)
        events.append(f"sync, {said()}")

    monkeypatch.setattr(torch.ops, "_fastemb", torch.ops.fastemb, raising=False)
    monkeypatch.setattr(torch.ops, "fastemb", Ops())
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    row, record = torch.tensor([2]), table.records[2:3].clone()
    for _ in range(2):
        table.scatter(row, record, torch.tensor([1]))
    assert events == ["sync, dirty", "records, dirty", "records, dirty"]
    events.clear()
    table.flush(6)
    assert events == ["sync, dirty", "sync, clean"]
    table.close()


def full_disk(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_what_a_disk_has_refused_is_written_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel does that for nobody: once it has said so, it takes the pages for written."""
    table = create(path)
    events: list[str] = []
    rewrite, sync = Mapping.rewrite, os.fdatasync

    def rewriting(mapping: Mapping, offset: int) -> None:
        before = table.records.clone()
        rewrite(mapping, offset)
        assert torch.equal(table.records, before)
        events.append(f"rewrite from {offset}")

    def fdatasync(descriptor: int) -> None:
        sync(descriptor)
        events.append("sync")

    monkeypatch.setattr(Mapping, "rewrite", rewriting)
    monkeypatch.setattr(_mapping, "_PORTION", 100)
    table.seal(torch.tensor([3]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full_disk)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                table.flush(6)
    assert events == [f"rewrite from {HEADER_BYTES}"]
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    for _ in range(2):
        table.flush(6)
    assert events[1:] == [events[0], *["sync"] * 4]
    table.close()
    table = HostTable.open(path, name="users")
    assert table.verify() == []
    table.close()


def test_records_that_a_disk_has_lost_are_no_checkpoint(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has refused them, they were read again, as they were before."""
    table = create(path)
    old = table.records[3].clone()
    table.fields["weight"][3] = 7
    table.seal(torch.tensor([3]))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            table.flush(6)
    table.records[3] = old
    with pytest.raises(IntegrityError, match=r"row 3 .*in file: the disk has lost records"):
        table.flush(6)
    assert not FileHeader.unpack(path, path.read_bytes()).clean
    table.seal(torch.tensor([3]))
    table.flush(6)
    table.close()
    HostTable.open(path, name="users").close()


def test_a_header_that_may_be_on_the_disk_is_taken_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records have been synchronised, and the header is written, but the disk then fails."""
    table = create(path)
    table.mark_dirty()
    with monkeypatch.context() as patch:
        errors: list[OSError | None] = [None, OSError(5, "Input/output error")]

        def fdatasync(_: int) -> None:
            error = errors.pop(0)
            if error is not None:
                raise error

        patch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(OSError, match="Input/output"):
            table.flush(6)
    assert FileHeader.unpack(path, path.read_bytes()).clean
    table.seal(torch.tensor([3]))
    assert not FileHeader.unpack(path, path.read_bytes()).clean
    table.flush(7)
    table.close()


def test_a_dirty_file_opens_only_to_recover(path: Path) -> None:
    table = create(path)
    table.mark_dirty()
    table.close()
    with pytest.raises(DirtyFileError, match=r"flush.*\(step 5\).*recover=True"):
        HostTable.open(path, name="users")
    with pytest.warns(RuntimeWarning, match=r"0 of its 40 .*none is torn.*no checkpoint"):
        table = HostTable.open(path, name="users", recover=True)
    assert table.torn == []
    assert (table.versions == 1).all()
    table.close()
    with pytest.raises(DirtyFileError):  # it has not become clean by itself
        HostTable.open(path, name="users")
    with pytest.warns(RuntimeWarning):
        table = HostTable.open(path, name="users", recover=True)
    table.flush(6)
    table.close()
    HostTable.open(path, name="users", recover=True).close()  # nothing to recover


def torn_file(path: Path, rows: list[int]) -> None:
    """A file that was being written to: ``rows`` are half the old, half the new record."""
    table = create(path)
    table.mark_dirty()
    for row in rows:
        old = table.records[row].clone()
        table.fields["weight"][row] += 1
        table.fields["row_step"][row] += 1
        table.seal(torch.tensor([row]))
        half = LAYOUT.record_bytes // 2
        table.records[row, half:] = old[half:]
    table.close()


def test_half_written_records_are_named_and_unusable(path: Path) -> None:
    rows = [0, 1, 5, 6, 7, 20, 21, 22, 30, 39]
    torn_file(path, rows)
    named = r"10 of its 40 records .*rows 0, 1, 5, 6, 7, 20, 21, 22, \.\.\. are torn"
    with pytest.warns(RuntimeWarning, match=named):
        table = HostTable.open(path, name="users", layout=LAYOUT, recover=True)
    assert table.torn == rows == table.verify()
    asked = torch.tensor([4, 5])
    records = torch.empty(2, LAYOUT.record_bytes, dtype=torch.uint8)
    table.gather(asked, records)
    assert table.check(records, asked, table.versions[asked]) == [1]
    with pytest.raises(IntegrityError, match=r"rows 0, 1, .*in file: torn, so.*not flushed"):
        table.flush(6)
    with pytest.raises(IntegrityError, match="cannot be rebuilt"):
        table.rebuilt(RecordLayout(LAYOUT.fields[:2]))

    # Rows from a checkpoint, new ones, some written in place, one as a record.
    table.reset(torch.tensor([0, 1]), {"weight": torch.ones(2, 3), "exp_avg": torch.ones(2, 3)})
    table.reset(torch.tensor([39, 30, 22, 21]), {"weight": torch.full((4, 3), 1.5)})
    assert table.torn == [5, 6, 7, 20]
    table.fields["weight"][5:8] = 2
    table.seal(torch.tensor([5, 6, 7]))
    assert table.torn == [20]
    table.reset(torch.tensor([20]), {"weight": torch.zeros(1, 3)})
    assert table.torn == [] == table.verify()
    assert table.fields["exp_avg"][[0, 39, 22]].tolist() == [[1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert table.fields["master"][[0, 22]].tolist() == [[1.0] * 3, [1.5] * 3]
    assert table.fields["row_step"][[0, 39, 4]].tolist() == [[7], [7], [4]]
    table.flush(6)
    table.close()
    table = HostTable.open(path, name="users")
    assert table.verify() == []
    table.close()


def test_torn_headers_count_from_the_start_again(path: Path) -> None:
    table = create(path)
    table.mark_dirty()
    LAYOUT.headers(table.records)[9, 1] = 2**31 - 1
    table.close()
    with pytest.warns(RuntimeWarning, match="row 9 is torn"):
        table = HostTable.open(path, name="users", recover=True)
    table.reset(torch.tensor([9]), {"weight": torch.zeros(1, 3)})
    assert table.versions[8:10].tolist() == [1, 1]
    assert table.verify() == []
    table.close()


@pytest.mark.parametrize("rows", [None, torch.tensor([3])])
def test_sealing_makes_a_file_dirty(path: Path, rows: torch.Tensor | None) -> None:
    table = create(path)
    table.seal(rows)
    table.close()
    with pytest.raises(DirtyFileError):
        HostTable.open(path, name="users")


def test_all_rows_written_anew_need_no_reset(path: Path) -> None:
    torn_file(path, [3, 4])
    with pytest.warns(RuntimeWarning, match="rows 3, 4 are torn"):
        table = HostTable.open(path, name="users", recover=True)
    for field in table.fields.values():
        field.fill_(1)
    table.seal()
    assert table.torn == [] == table.verify()
    table.close()


def test_damage_to_a_clean_file_is_found_in_its_row(path: Path) -> None:
    create(path).close()
    whole = path.read_bytes()
    places = [0, 7, 8, 15]  # of the header of the record
    for field in LAYOUT.fields:
        begin = LAYOUT.offsets[field.name]
        places += [begin, begin + field.bytes - 1]
    for number, place in enumerate(places):
        row = NUM_ROWS - 1 - number
        at = HEADER_BYTES + row * LAYOUT.record_bytes + place
        damage(path, at, bytes([whole[at] ^ 16]))
        table = HostTable.open(path, name="users")
        assert table.verify() == [row]
        table.close()
        damage(path, at, whole[at : at + 1])


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_processes_that_are_killed(tmp_path: Path) -> None:
    """Whatever the moment: clean files hold their step, and dirty ones name what is torn."""
    server = subprocess.Popen(
        [sys.executable, victim.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    assert server.stdout is not None
    generator = random.Random(11)
    outcomes = []
    try:
        for number, mode in enumerate(["flush"] * 12 + ["never"] * 8 + ["idle"] * 3):
            path = tmp_path / f"{number}.emb"
            print(path, mode, file=server.stdin, flush=True)
            child = int(server.stdout.readline())
            assert child > 0, "the child failed"
            time.sleep(0.3 if mode == "idle" else generator.uniform(0, 0.12))
            with pytest.raises(FileInUseError):
                HostTable.open(path, name="victim")
            os.kill(child, signal.SIGKILL)
            assert server.stdout.readline() == "dead\n"
            outcomes.append((mode, *after_a_kill(path)))
            path.unlink()
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()
    assert {clean for mode, clean, _ in outcomes if mode == "idle"} == {True}
    assert any(not clean for _, clean, _ in outcomes)
    print(f"killed: {outcomes}")


def after_a_kill(path: Path) -> tuple[bool, int]:
    """Whether the file is clean, and how many rows are torn; compares with the bytes themselves."""
    rows = torch.arange(victim.NUM_ROWS)
    records = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)[HEADER_BYTES:]
    records = records.view(victim.NUM_ROWS, victim.LAYOUT.record_bytes)
    versions = victim.LAYOUT.headers(records)[:, 1]
    payload = torch.cat(list(victim.LAYOUT.views(records).values()), 1)
    whole = (payload == victim.value(rows, versions)).all(1)
    clean = FileHeader.unpack(path, path.read_bytes()[:HEADER_BYTES]).clean
    if clean:
        table = HostTable.open(path, name="victim", layout=victim.LAYOUT)
        # In step v the rows with the parity of v were written.
        step = torch.full_like(rows, table.step)
        expected = (step - (step - rows) % 2).clamp(min=0)
        assert torch.equal(table.fields["weight"][:, :1], victim.value(rows, expected))
        assert whole.all()
        assert table.verify() == []
        table.close()
        return True, 0
    with pytest.raises(DirtyFileError):
        HostTable.open(path, name="victim")
    with pytest.warns(RuntimeWarning, match="no checkpoint"):
        table = HostTable.open(path, name="victim", recover=True)
    assert table.torn == torch.where(~whole)[0].tolist()
    table.close()
    return False, len(table.torn)
