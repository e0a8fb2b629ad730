"""Files of tables that were not flushed: disks that fail, processes that were killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import offload_victim as victim
import pytest
import torch
from offload_file_cases import LAYOUT, NUM_ROWS, create, damage

from fastemb.offload import _mapping
from fastemb.offload._file import (
    HEADER_BYTES,
    DirtyFileError,
    FileHeader,
    FileInUseError,
)
from fastemb.offload._host import HostTable
from fastemb.offload._layout import RecordLayout
from fastemb.offload._mapping import Mapping
from fastemb.offload.errors import IntegrityError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "table.emb"


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
