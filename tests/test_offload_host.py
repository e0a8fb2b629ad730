"""Records of offloaded tables in host memory: moved, checked, kept and given back."""

from __future__ import annotations

import gc
import mmap
import stat
import weakref
from pathlib import Path

import pytest
import torch

from fastemb.offload import _host, _mapping
from fastemb.offload._file import DirtyFileError
from fastemb.offload._host import HostTable
from fastemb.offload._layout import HEADER_BYTES, Field, RecordLayout
from fastemb.offload.errors import IntegrityError

NUM_ROWS = 23
SEED = 1 << 62
LAYOUT = RecordLayout(
    [
        Field("weight", torch.float16, 5),  # 10 bytes, 6 of padding
        Field("exp_avg", torch.float32, 5),
        Field("row_count", torch.int32, 1),
    ]
)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over a table take several chunks, the last of them not whole."""
    monkeypatch.setattr(_host, "_CHUNK_BYTES", 5 * LAYOUT.record_bytes + 1)


def create(storage: Path | None = None, **arguments: bool) -> HostTable:
    table = HostTable.create("t", NUM_ROWS, LAYOUT, seed=SEED, storage=storage, **arguments)
    torch.manual_seed(0)
    for field in table.fields.values():
        field.copy_(torch.randn(field.shape) * 100)
    table.seal()
    return table


def buffer(num_rows: int) -> torch.Tensor:
    return torch.full((num_rows, LAYOUT.record_bytes), 0xAA, dtype=torch.uint8)


def wrong_in(table: HostTable, records: torch.Tensor, rows: torch.Tensor) -> list[int]:
    return table.check(records, rows, table.versions[rows])


# ---------------------------------------------------------------------------------------------
# memory
# ---------------------------------------------------------------------------------------------


def test_memory_is_of_exactly_the_size_of_the_records() -> None:
    table = HostTable.create("t", NUM_ROWS, LAYOUT, seed=0)
    assert table.records.shape == (NUM_ROWS, LAYOUT.record_bytes)
    assert table.records.untyped_storage().nbytes() == NUM_ROWS * LAYOUT.record_bytes
    assert table.records.data_ptr() % mmap.PAGESIZE == 0
    assert not table.records.any()
    assert not table.pinned
    assert {name: field.shape for name, field in table.fields.items()} == {
        "weight": (NUM_ROWS, 5),
        "exp_avg": (NUM_ROWS, 5),
        "row_count": (NUM_ROWS, 1),
    }
    table.fields["weight"][3] = 1
    assert table.records[3].any()
    size = (1 << 50) * LAYOUT.record_bytes
    with pytest.raises(OSError, match=rf"'t' needs {size} bytes of memory \(Cannot allocate"):
        HostTable.create("t", 1 << 50, LAYOUT, seed=0)


@pytest.mark.parametrize(
    ("widths", "size"),
    [
        ([64, 64, 64], 832),  # 784 without padding
        ([128, 128, 128], 1600),  # 1552
        ([20, 20, 20], 256),
        ([32, 32, 32], 400),  # 448 would be too much longer
        ([4], 32),
    ],
)
def test_records_are_whole_cache_lines_where_that_costs_little(
    widths: list[int], size: int
) -> None:
    fields = [Field(f"field {k}", torch.float32, width) for k, width in enumerate(widths)]
    layout = RecordLayout(fields)
    assert layout.record_bytes == size
    used = HEADER_BYTES + sum(field.bytes for field in fields)
    assert sum(end - begin for begin, end in layout.gaps) == size - used


def test_large_tables_ask_for_huge_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("the kernel has no transparent huge pages")
    layout = RecordLayout([Field("weight", torch.float32, 1 << 20)])
    table = HostTable.create("t", 3, layout, seed=0)
    inside = table.records.data_ptr() + (6 << 20)
    flags = ""
    there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word and not word.endswith(":"):
            begin, end = (int(part, 16) for part in word.split("-"))
            there = begin <= inside < end
        elif there and word == "VmFlags:":
            flags = line
    assert "hg" in flags.split()


@pytest.mark.parametrize("in_file", [False, True])
def test_memory_lives_as_long_as_a_view(tmp_path: Path, in_file: bool) -> None:
    table = create(tmp_path / "t.emb" if in_file else None)
    memory = weakref.ref(table._memory)
    weight = table.fields["weight"]
    expected = weight.clone()
    table.flush(0)
    table.close()
    table.close()
    del table
    gc.collect()
    assert memory() is not None
    assert torch.equal(weight, expected)
    del weight
    assert memory() is None


def test_a_closed_table_says_so() -> None:
    table = create()
    rows = torch.tensor([1])
    table.close()
    for use in (
        lambda: table.gather(rows, buffer(1)),
        lambda: table.scatter(rows, buffer(1), rows),
        lambda: table.reset(rows, {"weight": torch.zeros(1, 5)}),
        lambda: table.rebuilt(LAYOUT),
        lambda: table.flush(1),
        table.seal,
        table.verify,
        table.mark_dirty,
    ):
        with pytest.raises(RuntimeError, match="table 't' is closed"):
            use()


def test_no_rows() -> None:
    with pytest.raises(ValueError, match="table 't': num_rows must be at least 1, got 0"):
        HostTable.create("t", 0, LAYOUT, seed=0)


# ---------------------------------------------------------------------------------------------
# pinning
# ---------------------------------------------------------------------------------------------


class Cudart:
    """Stands for the CUDA runtime: what was registered with it."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.registered[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_pinned_memory_is_registered_until_the_table_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    table = create(pin=True)
    assert table.pinned
    view = table.records
    size = NUM_ROWS * LAYOUT.record_bytes
    assert cudart.registered == {view.data_ptr(): size}
    table.close()
    assert cudart.registered == {}
    assert not table.pinned
    assert view.any()

    table = create(pin=True)
    view = table.records
    del table  # without close()
    assert cudart.registered == {view.data_ptr(): size}
    del view
    assert cudart.registered == {}  # before the pages went


@pytest.mark.parametrize("without", ["CUDA in torch", "a driver", "room"])
def test_memory_that_cannot_be_pinned_stays_pageable(
    monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    def cudart() -> Cudart:
        if without == "CUDA in torch":
            raise AssertionError("Torch not compiled with CUDA enabled")
        if without == "a driver":
            raise RuntimeError("Found no NVIDIA driver")
        return Cudart(error=2)

    cleared = []
    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    monkeypatch.setattr(_mapping, "_clear_cuda_error", lambda: cleared.append(1))
    reason = {
        "CUDA in torch": "not compiled with CUDA",
        "a driver": "no NVIDIA driver",
        "room": "CUDA error 2",
    }[without]
    with pytest.warns(
        RuntimeWarning, match=rf"table 't': \d+ bytes .* pageable, .*{reason}"
    ) as seen:
        table = HostTable.create("t", NUM_ROWS, LAYOUT, seed=SEED, pin=True)
    assert seen[0].filename == __file__
    assert len(cleared) == (without == "room")
    assert not table.pinned
    table.seal()
    assert table.verify() == []
    table.close()


def test_clearing_the_error_of_cuda_needs_no_cuda() -> None:
    _mapping._clear_cuda_error()


@pytest.mark.gpu
def test_registered_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    table = create(pin=True)
    assert table.pinned
    assert table.records.is_pinned()
    memory = table._memory
    assert memory is not None
    with pytest.warns(RuntimeWarning, match="CUDA error"):
        memory.pin("twice")  # which CUDA refuses
    assert (torch.ones(3, device="cuda") + 1).tolist() == [2, 2, 2]  # and nobody hears of it again
    view = table.records
    table.close()
    assert not view.is_pinned()


# ---------------------------------------------------------------------------------------------
# records
# ---------------------------------------------------------------------------------------------


def test_rows_are_wrong_until_they_are_sealed() -> None:
    table = HostTable.create("t", NUM_ROWS, LAYOUT, seed=SEED)
    assert table.verify() == list(range(NUM_ROWS))
    table.seal(torch.tensor([4, 20, 3]))
    assert table.verify() == [row for row in range(NUM_ROWS) if row not in (3, 4, 20)]
    assert table.verify(torch.tensor([20, 6, 3, 5])) == [6, 5]
    table.seal()
    assert table.verify() == []
    assert table.versions.tolist() == [1 + (row in (3, 4, 20)) for row in range(NUM_ROWS)]


def test_there_and_back() -> None:
    table = create()
    rows = torch.tensor([22, 0, 7])
    records = buffer(5)
    table.gather(rows, records)
    assert torch.equal(records[:3], table.records[rows])
    assert (records[3:] == 0xAA).all()
    assert wrong_in(table, records, rows) == []

    views = LAYOUT.views(records)
    views["weight"][:3] *= 2
    versions = table.versions[rows].long() + 1
    pieces = list(views.values())
    headers = LAYOUT.headers(records)
    torch.ops.fastemb.checksum_seal_(headers, pieces, None, rows, versions, SEED)
    expected = table.records.clone()
    expected[rows] = records[:3]
    table.scatter(rows, records, versions)
    assert torch.equal(table.records, expected)
    assert table.versions[rows].tolist() == [2, 2, 2]
    assert table.verify() == []


def test_rows_must_be_there() -> None:
    table = create()
    before = table.records.clone()
    for row in (-1, NUM_ROWS):
        rows = torch.tensor([1, row])
        with pytest.raises(IndexError):
            table.gather(rows, buffer(2))
        with pytest.raises(IndexError):
            table.scatter(rows, buffer(2), rows)
        with pytest.raises(IndexError):
            table.verify(rows)
        with pytest.raises(IndexError):
            table.reset(rows, {"weight": torch.zeros(2, 5)})
    assert torch.equal(table.records, before)
    assert table.versions.unique().tolist() == [1]


def test_checks_agree_with_those_of_the_device_cache() -> None:
    """There the fields lie in arrays of their own, without padding."""
    table = create()
    rows = torch.arange(NUM_ROWS)
    slots = LAYOUT.slots(NUM_ROWS, torch.device("cpu"))
    for name, slot in slots.items():
        slot.copy_(table.fields[name])
    headers = LAYOUT.headers(table.records).clone()
    found = torch.tensor([0, NUM_ROWS])
    torch.ops.fastemb.checksum_check_(
        headers, list(slots.values()), None, rows, table.versions.long(), SEED, found
    )
    assert found[0] == 0


def test_every_byte_of_a_record_counts() -> None:
    table = create()
    row = 11
    for byte in range(LAYOUT.record_bytes):
        table.records[row, byte] ^= 1 << byte % 8
        assert table.verify() == [row]
        table.records[row, byte] ^= 1 << byte % 8
    assert table.verify() == []


def test_swapped_misplaced_and_stale_records_are_wrong() -> None:
    table = create()
    rows = torch.tensor([5, 6, 7])
    records = buffer(3)
    table.gather(rows, records)
    assert wrong_in(table, records[[1, 0, 2]], rows) == [0, 1]
    assert wrong_in(table, records, torch.tensor([5, 8, 7])) == [1]
    table.seal(torch.tensor([7]))
    assert wrong_in(table, records, rows) == [2]
    assert table.check(records, rows, torch.full((3,), _host.UNKNOWN)) == []  # each by itself
    other = HostTable.create("u", NUM_ROWS, LAYOUT, seed=SEED + 1)
    other.seal()
    assert wrong_in(other, records, rows) == [0, 1, 2]


def test_reset_refuses_what_does_not_fit() -> None:
    table = create()
    rows = torch.tensor([2, 3])
    before = table.records.clone()
    one = torch.ones(2, 5)
    for values, text in (
        ({}, r"must have 'weight' .* weight, exp_avg, row_count, got nothing"),
        ({"exp_avg": one}, "must have 'weight'.* got exp_avg"),
        ({"weight": one, "momentum": one}, "got weight, momentum"),
        ({"weight": torch.ones(5)}, r"values\['weight'\] must have shape \[2, 5\], got \[5\]"),
        (
            {"weight": one, "row_count": one},
            r"'row_count'\] must have shape \[2, 1\], got \[2, 5\]",
        ),
    ):
        with pytest.raises(ValueError, match=rf"table 't': reset: .*{text}"):
            table.reset(rows, values)
    assert torch.equal(table.records, before)


# ---------------------------------------------------------------------------------------------
# another layout
# ---------------------------------------------------------------------------------------------

ADDED = RecordLayout(
    [
        LAYOUT.fields[0],
        Field("master", torch.float32, 5, None),
        Field("accumulator", torch.float32, 1, 0.25),
        LAYOUT.fields[2],
    ]
)


@pytest.mark.parametrize("in_file", [False, True])
def test_a_table_with_other_fields(tmp_path: Path, in_file: bool) -> None:
    path = tmp_path / "t.emb" if in_file else None
    old = create(path)
    old.optimizer_step = 3.0
    old.seal(torch.tensor([1]))
    old.flush(8)
    if path is not None:
        path.chmod(0o600)
    fields = {name: field.clone() for name, field in old.fields.items()}
    if path is not None:
        old.close()
        old = HostTable.open(path, name="t")  # versions are unknown
    new = old.rebuilt(ADDED)
    with pytest.raises(RuntimeError, match="is closed"):
        old.verify()
    for _ in range(2):
        assert new.layout == ADDED
        assert new.verify() == []
        assert (new.step, new.optimizer_step, new.seed) == (8, 3.0, SEED)
        assert torch.equal(new.fields["weight"], fields["weight"])
        assert torch.equal(new.fields["row_count"], fields["row_count"])
        assert torch.equal(new.fields["master"], fields["weight"].float())
        assert (new.fields["accumulator"] == 0.25).all()
        stored = LAYOUT.headers(new.records)[:, 1]
        assert stored.tolist() == [1 + (row == 1) for row in range(NUM_ROWS)]
        if path is None:
            break
        assert list(tmp_path.iterdir()) == [path]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        new.close()
        new = HostTable.open(path, name="t", layout=ADDED)
    new.close()


def test_fields_in_another_dtype_and_fields_anew() -> None:
    old = create()
    weight, exp_avg, _ = LAYOUT.fields
    layout = RecordLayout(
        (weight, Field(exp_avg.name, torch.bfloat16, 5), Field("row_count", torch.float32, 2, 0.5))
    )
    want = old.fields["exp_avg"].bfloat16()
    new = old.rebuilt(layout, anew=("row_count",))
    assert new.verify() == []
    assert torch.equal(new.fields["exp_avg"], want)
    assert (new.fields["row_count"] == 0.5).all()


def test_a_file_that_is_dirty_stays_dirty(tmp_path: Path) -> None:
    path = tmp_path / "t.emb"
    table = create(path)
    table.flush(8)
    table.mark_dirty()
    table = table.rebuilt(ADDED)
    table.close()
    with pytest.raises(DirtyFileError, match="step 8"):
        HostTable.open(path, name="t")
    with pytest.warns(RuntimeWarning, match="none is torn"):
        HostTable.open(path, name="t", layout=ADDED, recover=True).close()


def test_pinned_tables_stay_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    table = create(pin=True).rebuilt(ADDED)
    assert cudart.registered == {table.records.data_ptr(): NUM_ROWS * ADDED.record_bytes}
    table = table.rebuilt(LAYOUT, pin=False)
    assert not table.pinned
    assert cudart.registered == {}


@pytest.mark.parametrize("in_file", [False, True])
def test_a_table_that_cannot_be_rebuilt_stays_as_it_was(tmp_path: Path, in_file: bool) -> None:
    path = tmp_path / "t.emb" if in_file else None
    table = create(path)
    table.flush(1)
    weight, exp_avg, _ = LAYOUT.fields
    wide = Field("weight", torch.float16, 6)
    for fields, text in (
        ([wide, exp_avg], "'weight' is torch.float16 of width 5, .* torch.float16 of width 6"),
        (
            [Field("weight", torch.bfloat16, 5), exp_avg],
            "'weight' is torch.float16 .* torch.bfloat16",
        ),
        ([weight, Field("exp_avg", torch.float32, 6)], "'exp_avg' is torch.float32 of width 5"),
        ([weight, Field("sum", torch.float32, 1, None)], "'sum' begins as the weight, .*5, got 1"),
    ):
        with pytest.raises(ValueError, match=text):
            table.rebuilt(RecordLayout(fields))
    table.records[21, 20] ^= 1
    place = "in file" if in_file else "in host memory"
    with pytest.raises(IntegrityError, match=f"row 21 .*{place}: the records are wrong") as caught:
        table.rebuilt(ADDED)
    assert caught.value.rows == [21]
    assert table.verify() == [21]
    assert len(list(tmp_path.iterdir())) == in_file
    table.reset(torch.tensor([21]), {"weight": torch.ones(1, 5)})
    table.rebuilt(ADDED).close()
