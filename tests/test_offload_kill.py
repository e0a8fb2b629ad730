"""Processes that are killed while they train a table in a file, and others that go on with it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import offload_trainee as trainee
import pytest
import torch
from optim_cases import bits
from torch import Tensor

from fastemb.offload import IntegrityError, OffloadEngine
from fastemb.offload._file import HEADER_BYTES, DirtyFileError, FileHeader

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

FILE = "table.fetab"


Fields = dict[str, Tensor]


@pytest.fixture(scope="module")
def right() -> list[Fields]:
    """Weights and states after each step of the training that nobody disturbs."""
    model, optimizer = trainee.new_model(None)
    after = [_fields(model, optimizer)]
    for ids in trainee.batches():
        trainee.step(model, optimizer, ids)
        after.append(_fields(model, optimizer))
    return after


def _fields(model: torch.nn.EmbeddingBag, optimizer: torch.optim.Optimizer) -> Fields:
    zeros = torch.zeros_like(model.weight)
    state = optimizer.state.get(model.weight, {"exp_avg": zeros, "exp_avg_sq": zeros})
    fields = {"weight": model.weight, **{n: v for n, v in state.items() if n != "step"}}
    return {name: value.detach().clone() for name, value in fields.items()}


@pytest.fixture(scope="module")
def spawner() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, trainee.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    yield process
    process.communicate(timeout=30)


def run_and_kill(
    spawner: subprocess.Popen[str], directory: Path, mode: str, seconds: float
) -> FileHeader:
    """The header of the file that is left."""
    assert spawner.stdin is not None
    assert spawner.stdout is not None
    spawner.stdin.write(f"{directory} {mode}\n")
    spawner.stdin.flush()
    child = int(spawner.stdout.readline())
    assert child > 0
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    assert spawner.stdout.readline() == "dead\n"
    path = directory / FILE
    with path.open("rb") as file:
        return FileHeader.unpack(path, file.read(HEADER_BYTES))


def rows_as_of(fields: Fields, right: list[Fields]) -> list[set[int]]:
    """For each row the steps after which it is as it is here."""
    steps: list[set[int]] = []
    for row in range(trainee.NUM_ROWS):
        here = {name: bits(value[row]) for name, value in fields.items()}
        steps.append(
            {
                number
                for number, after in enumerate(right)
                if all(bits(after[name][row]) == here[name] for name in here)
            }
        )
    return steps


def fields_of(engine: OffloadEngine) -> Fields:
    state = engine.state_dict()["table"]
    state.pop("step")
    return state


def check_clean(directory: Path, step: int, right: list[Fields], goes_on: int) -> None:
    """It opens with the bits of its step, and the training goes on as if nothing had been."""
    engine = trainee.new_engine(directory, resume=True)
    model, optimizer = trainee.new_model(engine)
    assert engine.torn() == {"table": []}
    state = fields_of(engine)
    assert {n: bits(v) for n, v in state.items()} == {n: bits(v) for n, v in right[step].items()}
    end = min(step + goes_on, trainee.STEPS)
    for ids in engine.prefetch(trainee.batches()[step:end], ids=lambda ids: ids):
        trainee.step(model, optimizer, ids)
    state = fields_of(engine)
    assert {n: bits(v) for n, v in state.items()} == {n: bits(v) for n, v in right[end].items()}
    if end > step:
        assert float(optimizer.state[model.weight]["step"]) == end
    assert engine.verify() == {"table": []}
    engine.close()


def check_dirty(directory: Path, right: list[Fields]) -> int:
    """It opens only with recover=True, which names the torn rows; their number."""
    with pytest.raises(DirtyFileError, match="recover=True"):
        trainee.new_model(trainee.new_engine(directory, resume=True))
    engine = trainee.new_engine(directory, resume=True, recover=True)
    with pytest.warns(RuntimeWarning, match="no checkpoint") as warned:
        model, optimizer = trainee.new_model(engine)
    torn = engine.torn()["table"]
    assert all(str(row) in str(warned[0].message) for row in torn[:8])
    table = engine.tables["table"]
    table.open()
    assert table.host.verify(torch.tensor([r for r in range(40) if r not in torn])) == []
    # All others are those of one step each: weight and states belong together.
    as_of = rows_as_of(table.host.fields, right)
    assert {row for row, steps in enumerate(as_of) if not steps} <= set(torn)

    if torn:
        for use in (engine.flush, engine.state_dict, lambda: model(torch.tensor([torn]))):
            with pytest.raises(IntegrityError) as caught:
                use()
            assert set(caught.value.rows) <= set(torn)
        rows = torch.tensor(torn)
        engine.reset_rows("table", rows, {name: v[rows] for name, v in right[0].items()})
        assert engine.torn() == {"table": []}
    trainee.step(model, optimizer, trainee.batches()[0])
    assert engine.verify() == {"table": []}
    engine.close()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = trainee.new_engine(directory, resume=True)
        model, optimizer = trainee.new_model(engine)
    assert engine.verify() == {"table": []}
    engine.close()
    return len(torn)


def test_trainings_that_are_killed(
    tmp_path: Path, spawner: subprocess.Popen[str], right: list[Fields]
) -> None:
    generator = random.Random(0)
    torn, dirty = 0, 0
    for number in range(21):
        directory = tmp_path / str(number)
        mode = ("flush", "never", "slowly")[number % 3]
        header = run_and_kill(spawner, directory, mode, generator.uniform(0, 0.15))
        assert header.step % 4 == 0
        if header.clean:
            check_clean(directory, header.step, right, 5)
        else:
            dirty += 1
            torn += check_dirty(directory, right)
    assert dirty >= 6
    assert torn


def test_a_training_that_is_killed_after_a_flush_goes_on(
    tmp_path: Path, spawner: subprocess.Popen[str], right: list[Fields]
) -> None:
    header = run_and_kill(spawner, tmp_path, "idle", 1.5)
    assert (header.clean, header.step, header.optimizer_step) == (True, 10, 10.0)
    check_clean(tmp_path, 10, right, trainee.STEPS)


def test_a_row_torn_for_certain(tmp_path: Path, right: list[Fields]) -> None:
    """As `kill -9` leaves it, without luck."""
    engine = trainee.new_engine(tmp_path)
    model, optimizer = trainee.new_model(engine)
    for ids in engine.prefetch(trainee.batches()[:6], ids=lambda ids: ids):
        trainee.step(model, optimizer, ids)
    engine.flush()
    trainee.step(model, optimizer, trainee.batches()[6])
    table = engine.tables["table"]
    table.host.mark_dirty()
    table.host.fields["exp_avg"][[7, 21], 700:] = 3.0
    engine.transfers.close()  # and no flush
    table.close()
    assert check_dirty(tmp_path, right) == 2


def test_steps_go_on_in_the_file(tmp_path: Path, right: list[Fields]) -> None:
    """Sessions that each make some steps end with the bits of one that makes them all."""
    begin = 0
    for end in (5, 6, 17, trainee.STEPS):
        engine: OffloadEngine = trainee.new_engine(tmp_path, resume=True)
        model, optimizer = trainee.new_model(engine)
        assert engine.step == begin
        for ids in engine.prefetch(trainee.batches()[begin:end], ids=lambda ids: ids):
            trainee.step(model, optimizer, ids)
        assert engine.step == end
        assert float(optimizer.state[model.weight]["step"]) == end
        engine.close()
        begin = end
    check_clean(tmp_path, trainee.STEPS, right, 0)
