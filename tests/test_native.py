"""Loading of the libraries and choice of backends, each in a fresh process with its own package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fresh_process
import pytest
import torch

import fastemb
from fastemb import (
    _dense_ops,
    _grad_ops,
    _lazy_ops,
    _library,
    _native,
    _ops,
    _record_ops,
    _row_ops,
)

PACKAGE = Path(fastemb.__file__).parent
OPERATORS = {
    *(*_ops.SCHEMAS, *_row_ops.SCHEMAS, *_lazy_ops.SCHEMAS),
    *(*_grad_ops.SCHEMAS, *_record_ops.SCHEMAS, *_dense_ops.SCHEMAS),
}
LOOKUP = """
import torch, fastemb
out, _ = torch.ops.fastemb.embedding_bag(
    torch.arange(6.0).reshape(3, 2), torch.tensor([[0, 2]]), None, None, "sum", -1, False, False,
    False, torch.float32, "")
assert out.tolist() == [[4.0, 6.0]], out
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that a test may damage."""
    copy = tmp_path / "fastemb"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def environment(package: Path, **env: str) -> dict[str, str]:
    """With the copied package first on the path; FASTEMB_* only as given."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FASTEMB_", "TRITON_"))}
    return {**clean, "PYTHONPATH": str(package.parent), **env}


def run(package: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(package, **env),
        cwd=package.parent,
        capture_output=True,
        text=True,
    )


def execute(package: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A script in a process that has imported torch and not fastemb."""
    return fresh_process.execute(script, package.parent, environment(package, **env))


def failure(package: Path, **env: str) -> str:
    """The last exception of ``import fastemb``, which must fail."""
    done = execute(package, "import fastemb", **env)
    assert done.returncode == 1, (done.returncode, done.stderr)
    return done.stderr


def assert_one_clear_message(text: str, cause: str) -> None:
    assert "IncompatibleLibraryError: fastemb cannot use its native library" in text
    assert re.search(rf"cause: .*{cause}", text), text
    assert f"running: torch {torch.__version__}" in text
    assert "built:   fastemb" in text
    assert "pip install --force-reinstall" in text
    assert "FASTEMB_BACKEND=reference" in text
    assert "OSError" not in text, "the loader's own traceback must not come along"


# ---- versions and report ------------------------------------------------------------------------


def test_version_has_one_source() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert re.findall(r'(?m)^version = "(.+)"$', project) == [fastemb.__version__]


def test_report_names_versions_libraries_and_operators(package: Path) -> None:
    done = run(package, "-m", "fastemb")
    assert done.returncode == 0, done.stderr
    assert re.search(rf"(?m)^torch +{re.escape(torch.__version__)}$", done.stdout)
    assert re.search(rf"(?m)^fastemb +{re.escape(fastemb.__version__)}$", done.stdout)
    assert re.search(r"(?m)^  cpu +loaded$", done.stdout)
    assert re.search(r"(?m)^  compiler +\S+", done.stdout)
    for op in OPERATORS:
        assert re.search(rf"(?m)^{op} +cpu ", done.stdout), op


def test_report_runs_where_the_import_fails(package: Path) -> None:
    (package / "_C.so").write_bytes(b"\x7fELF")
    done = run(package, "-m", "fastemb")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "truncated" in done.stdout
    assert re.search(r"(?m)^  cpu +failed to load$", done.stdout)
    assert re.search(r"(?m)^embedding_bag +reference ", done.stdout)


def test_only_the_report_survives_a_failed_import(package: Path) -> None:
    setting = {"FASTEMB_BACKEND": "fast"}
    for arguments in (["-mfastemb"], ["-Bm", "fastemb"]):
        done = run(package, *arguments, **setting)
        assert "Traceback" not in done.stderr
        assert "ERROR: import fastemb fails" in done.stdout
    # A program with an option -m of its own.
    program = package.parent / "program.py"
    program.write_text("import fastemb\n")
    done = run(package, str(program), "-m", "fastemb", **setting)
    assert "FASTEMB_BACKEND must be one of" in done.stderr
    assert done.returncode == 1


def test_report_survives_wrong_settings(package: Path) -> None:
    for setting, value, fails in (
        ("FASTEMB_BACKEND", "fast", "import fastemb"),
        ("FASTEMB_CPU_ISA", "sse9", "every operator on CPU tensors"),
    ):
        done = run(package, "-m", "fastemb", **{setting: value})
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        lines = done.stdout.splitlines()
        assert lines[-2] == f"ERROR: {fails} fails"
        assert re.match(rf"{setting} must be one of .* got '{value}'$", lines[-1])


def test_active_instruction_set_can_be_forced(package: Path) -> None:
    script = "from fastemb import _native; print(_native.cpu_isa()['active'])"
    available = _native.cpu_isa()["available"]
    assert "baseline" in available
    for level in available:
        assert execute(package, script, FASTEMB_CPU_ISA=level).stdout.strip() == level


# ---- libraries that cannot be used --------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.999])
def test_truncated_library(package: Path, keep: float) -> None:
    library = package / "_C.so"
    data = library.read_bytes()
    library.write_bytes(data[: int(len(data) * keep)])
    assert_one_clear_message(failure(package), "truncated")


def test_library_that_is_no_library(package: Path) -> None:
    (package / "_C.so").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert_one_clear_message(failure(package), "not a shared library")


def test_library_of_another_architecture(package: Path) -> None:
    library = package / "_C.so"
    data = bytearray(library.read_bytes())
    other = 183 if data[18] == 62 else 62
    data[18:20] = other.to_bytes(2, "little")
    library.write_bytes(data)
    name = "aarch64" if other == 183 else "x86_64"
    assert_one_clear_message(failure(package), f"is for {name}")


def build_library(source: str, target: Path, *flags: str) -> None:
    subprocess.run(
        ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(target), *flags],
        input=source,
        text=True,
        check=True,
    )


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@needs_compiler
def test_undefined_symbol(package: Path) -> None:
    source = 'extern "C" int torch_not_there(); int x = torch_not_there();'
    build_library(source, package / "_C.so", "-Wl,-z,now")
    assert_one_clear_message(failure(package), "has the symbol torch_not_there")


@needs_compiler
def test_needed_library_is_missing(package: Path, tmp_path: Path) -> None:
    build_library("", tmp_path / "libcudart_gone.so", "-Wl,-soname,libcudart_gone.so.13")
    flags = (f"-L{tmp_path}", "-Wl,--no-as-needed", "-lcudart_gone")
    build_library("", package / "_C.so", *flags)
    assert_one_clear_message(failure(package), r"it needs libcudart_gone\.so\.13")


@needs_compiler
def test_library_of_other_sources_lacks_kernels(package: Path) -> None:
    build_library("", package / "_C.so")
    assert_one_clear_message(
        failure(package), "no kernel for embedding, embedding_bag.*dense_adam_:"
    )


def test_message_without_build_info(package: Path) -> None:
    (package / "build_info.json").unlink()
    (package / "_C.so").write_bytes(b"")
    text = failure(package)
    assert "unknown (no build_info.json beside it)" in text
    assert "cause:   the file is damaged" in text


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        (None, "fastemb"),
        ({"url": "file:///a%20b/fastemb", "dir_info": {}}, "file:///a%20b/fastemb"),
        (
            {"url": "https://h/f.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "git+https://h/f.git@abc",
        ),
        ({"url": "https://h/fastemb-1.tar.gz", "archive_info": {}}, "https://h/fastemb-1.tar.gz"),
        ({"url": "https://h/fastemb-1-py3-none-linux_x86_64.whl", "archive_info": {}}, "fastemb"),
    ],
)
def test_the_cure_builds_from_where_the_package_came(
    package: Path, origin: dict[str, object] | None, source: str
) -> None:
    (package / "_C.so").write_bytes(b"")
    info = package.parent / "fastemb-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fastemb\nVersion: 1\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    assert f" --no-binary fastemb {source}\n" in failure(package)


def test_the_cure_of_a_source_tree_with_a_space_in_its_path(tmp_path: Path, package: Path) -> None:
    tree = tmp_path / "a b"
    tree.mkdir()
    (tree / "setup.py").touch()
    package = package.rename(tree / "fastemb")
    (package / "_C.so").write_bytes(b"")
    assert f" -e '{tree}'\n" in failure(package)


def test_broken_library_is_not_touched_when_reference_is_forced(package: Path) -> None:
    (package / "_C.so").write_bytes(b"\x7fELF")
    done = execute(package, LOOKUP, FASTEMB_BACKEND="reference")
    assert done.returncode == 0, done.stderr


# ---- choice of the backend ----------------------------------------------------------------------


def test_without_library_the_reference_serves_in_silence(package: Path) -> None:
    (package / "_C.so").unlink()
    done = run(package, "-W", "error", "-c", LOOKUP)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_forced_cpu_must_be_built(package: Path) -> None:
    (package / "_C.so").unlink()
    text = failure(package, FASTEMB_BACKEND="cpu")
    assert "NotBuiltError: FASTEMB_BACKEND=cpu cannot be had: _C.so was not built" in text
    assert "FASTEMB_BUILD=cpu pip install" in text


def test_forced_cuda_must_be_built(package: Path) -> None:
    (package / "_C_cuda.so").unlink(missing_ok=True)
    text = failure(package, FASTEMB_BACKEND="cuda")
    assert "NotBuiltError: FASTEMB_BACKEND=cuda cannot be had: _C_cuda.so was not built" in text


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a CPU build of torch")
def test_cuda_library_beside_a_cpu_torch(package: Path) -> None:
    (package / "_C_cuda.so").write_bytes(b"never opened")
    done = run(package, "-m", "fastemb")
    assert done.returncode == 0, done.stderr
    assert re.search(r"(?m)^  cuda +not loaded: torch \S+ is a CPU build$", done.stdout)
    assert "is a CPU build" in failure(package, FASTEMB_BACKEND="cuda")


@pytest.mark.skipif(torch.version.cuda is not None, reason="for a CPU build of torch")
def test_forced_triton_needs_a_gpu_build_or_the_interpreter(package: Path) -> None:
    assert "NotBuiltError: FASTEMB_BACKEND=triton" in failure(package, FASTEMB_BACKEND="triton")


def test_unknown_backend(package: Path) -> None:
    text = failure(package, FASTEMB_BACKEND="fast")
    assert "ValueError: FASTEMB_BACKEND must be one of cpu, cuda, triton, reference" in text


def test_forced_reference_loads_nothing(package: Path) -> None:
    script = (
        LOOKUP
        + """
from fastemb import _native
libraries = _native.report()["libraries"]
assert all("FASTEMB_BACKEND=reference" in status for status in libraries.values()), libraries
try:
    _native.backend("cpu")
except fastemb.NotBuiltError as error:
    assert "FASTEMB_BACKEND=reference" in str(error)
else:
    raise AssertionError("the cpu backend must not be there")
"""
    )
    done = execute(package, script, FASTEMB_BACKEND="reference")
    assert done.returncode == 0, done.stderr


# Kernels stand in for the real ones here: what is tested is that the dispatcher gets them.
TRITON_STAND_IN = """
from fastemb import _reference
calls = []
def embedding_bag(*args):
    calls.append(args)
    return _reference.embedding_bag(*args)
KERNELS = {"embedding_bag": embedding_bag}
"""


def test_interpreted_triton_serves_cpu_tensors(package: Path) -> None:
    pytest.importorskip("triton")
    (package / "triton").mkdir(exist_ok=True)
    (package / "triton" / "__init__.py").touch()
    (package / "triton" / "kernels.py").write_text(TRITON_STAND_IN)
    script = (
        LOOKUP
        + """
from fastemb import _native
from fastemb.triton import kernels
assert len(kernels.calls) == 1
report = _native.report()
assert report["operators"]["embedding_bag"] == {"cpu": "triton", "cuda": "triton"}
assert report["operators"]["embedding"] == {"cpu": "reference", "cuda": "reference"}
assert _native.backend("triton").embedding_bag is kernels.embedding_bag
"""
    )
    done = execute(package, script, FASTEMB_BACKEND="triton", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr


def test_unfit_triton_is_reported_and_not_fatal(package: Path) -> None:
    pytest.importorskip("triton")
    (package / "_C_cuda.so").unlink(missing_ok=True)
    (package / "triton").mkdir(exist_ok=True)
    (package / "triton" / "__init__.py").touch()
    (package / "triton" / "kernels.py").write_text("raise AttributeError('no such builtin')")
    done = execute(package, LOOKUP, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning: fastemb: the Triton kernels cannot be used" in done.stderr
    forced = failure(package, FASTEMB_BACKEND="triton", TRITON_INTERPRET="1")
    assert "NotBuiltError: FASTEMB_BACKEND=triton cannot be had: AttributeError" in forced


def test_backend_offers_every_operator() -> None:
    for name in ("cpu", "reference"):
        assert set(vars(_native.backend(name))) == OPERATORS
    with pytest.raises(ValueError, match="must be one of cpu, cuda, triton, reference"):
        _native.backend("tpu")


def test_loading_twice_changes_nothing() -> None:
    before = _native.report()
    _native.load({"something_else": print})
    assert _native.report() == before


def test_names_that_operators_are_given_are_freed() -> None:
    """torch before 2.14 leaves one behind for each that it makes a std::string of."""
    ops = _native.backend("cpu")
    weight, ids, grad = torch.zeros(3, 2), torch.tensor([[0, 2]]), torch.zeros(1, 2)
    text = "x" * (1 << 20)
    order, rows, segments, num_rows = ops.group_indices(ids, None, 3, -1, False)

    def give_names() -> None:
        ops.embedding(weight, ids, -1, False, False, torch.float32, text)
        ops.embedding_bag(
            weight, ids, None, None, "sum", -1, False, False, False, torch.float32, text
        )
        ops.embedding_renorm_(weight, ids, 1.0, 2.0, text)
        bags = (order, rows, segments, num_rows, 3, 2, text, -1, False, False, False)
        for refused in (
            lambda: ops.embedding_bag(
                weight, ids, None, None, text, -1, False, False, False, torch.float32, ""
            ),
            lambda: ops.embedding_bag_backward(grad, ids, None, None, None, *bags, torch.float32),
            lambda: ops.bag_terms(ids, None, None, order, 3, text, -1, False, torch.float32),
            lambda: ops.embedding_bag_per_sample_weights_backward(
                grad, weight, ids, None, text, -1, False
            ),
        ):
            with pytest.raises(ValueError, match="mode must be"):
                refused()

    for _ in range(5):
        give_names()
    before = _resident_bytes()
    for _ in range(50):
        give_names()
    assert _resident_bytes() - before < 20 * len(text)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_has_the_buffers() -> None:
    """Nobody would unlock them in the child, whose lookups are as any others."""
    script = """
import os, signal, threading, torch, fastemb
from fastemb.functional import embedding_bag
torch.set_num_threads(1)
weight = torch.ones(1 << 16, 16, requires_grad=True)
ids = torch.arange(4).view(2, 2)
full, done = threading.Event(), threading.Event()
def fill_and_empty():
    while not done.is_set():
        outputs = [embedding_bag(ids, weight).sum() for _ in range(24)]
        gradients = [torch.autograd.grad(output, weight) for output in outputs]
        del gradients
        full.set()
        fastemb.empty_cache()  # long enough for a fork in between
thread = threading.Thread(target=fill_and_empty)
thread.start()
failed = 0
for _ in range(8):
    full.wait()
    full.clear()
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        with torch.no_grad():
            embedding_bag(ids, weight, max_norm=1e9)
        os._exit(0)
    failed = os.waitpid(child, 0)[1]
    if failed:
        break
done.set()
thread.join()
raise SystemExit(failed != 0)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


def test_old_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1")
    with pytest.raises(fastemb.IncompatibleLibraryError, match=r"needs torch >= 2\.11"):
        _library.load(PACKAGE / "_C.so")
