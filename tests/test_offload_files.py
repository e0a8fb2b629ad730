"""Files of offloaded tables: how they come to be, who may open them, what is refused."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from offload_file_cases import LAYOUT, NUM_ROWS, create, damage

from fastemb.offload import _file
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.emb"


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
