"""Real builds and installs, each of a copy of the source tree, plus the parts of setup.py alone.

A copy takes the objects of ``build/native`` along, so that what is unchanged is not compiled again.
pip runs as users run it: isolated builds fetch setuptools.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fresh_process import execute

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("csrc", "fastemb", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
SITE = Path(torch.__file__).parent.parent
IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "build_info.json")
LOOKUP = """
import torch, fastemb
from fastemb import _native
out, _ = torch.ops.fastemb.embedding_bag(
    torch.arange(6.0).reshape(3, 2), torch.tensor([[0, 2]]), None, None, "sum", -1, False, False,
    False, torch.float32, "")
assert out.tolist() == [[4.0, 6.0]], out
print(fastemb.__file__, _native.report()["operators"]["embedding_bag"]["cpu"], fastemb.__version__)
"""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def copy_tree(target: Path) -> Path:
    target.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=IGNORED)
        else:
            shutil.copy2(source, target / name)
    if (ROOT / "build" / "native").is_dir():
        shutil.copytree(ROOT / "build" / "native", target / "build" / "native")
    return target


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return copy_tree(tmp_path / "tree")


def environment(**env: str) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("FASTEMB_", "PYTHONPATH"))}
    return {**clean, "MAX_JOBS": "2", **env}


def pip(*arguments: str | Path, ok: bool = True, **env: str) -> str:
    """Runs pip, returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


def install(tree: Path, *options: str, **env: str) -> Path:
    """Installs the tree, without dependencies, into a folder of its own."""
    target = tree.parent / "installed"
    pip("install", "-v", "--no-deps", "--target", target, *options, tree, **env)
    return target


def lookup(target: Path, **env: str) -> str:
    """Backend of a bag on the CPU, by the package in the folder."""
    done = execute(LOOKUP, target, environment(PYTHONPATH=str(target), **env))
    assert done.returncode == 0, done.stderr
    file, backend, version = done.stdout.split()
    assert Path(file) == target / "fastemb" / "__init__.py"
    assert version == build_info(target)["version"]
    return backend


def build_info(target: Path) -> dict[str, object]:
    return json.loads((target / "fastemb" / "build_info.json").read_text())


def wheel_tag(target: Path) -> str:
    (file,) = target.glob("fastemb-*.dist-info/WHEEL")
    return re.search(r"(?m)^Tag: (.+)$", file.read_text())[1]


def needed(library: Path) -> list[str]:
    dump = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True)
    return re.findall(r"\(NEEDED\).*\[(.+)\]", dump.stdout)


def undefined(library: Path) -> list[str]:
    command = ["nm", "-D", "--undefined-only", "--format=posix", library]
    dump = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line.split()[0] for line in dump.stdout.splitlines()]


# ---- installs -----------------------------------------------------------------------------------


@pytest.mark.slow
@needs_compiler
def test_isolated_install(tree: Path) -> None:
    target = install(tree, FASTEMB_BUILD="cpu")
    assert wheel_tag(target).startswith("py3-none-linux_")
    assert lookup(target) == "cpu"

    library = target / "fastemb" / "_C.so"
    assert "libtorch_cpu.so" in needed(library)
    assert not [name for name in needed(library) if "python" in name or "libc10" in name]
    symbols = undefined(library)
    assert any(name.startswith("torch_") for name in symbols), "nm shows torch's stable ABI"
    assert not [name for name in symbols if name.startswith(("Py", "_Py"))]
    # _ZN2at, _ZN3c10, _ZN5torch: C++ symbols of torch, which change between versions
    assert not [name for name in symbols if re.match(r"_ZNK?(2at|3c10|5torch)", name)]

    info = build_info(target)
    flags = " ".join(info["cxx_flags"])
    assert "-ffp-contract=off" in flags
    assert "-march=native" not in flags
    assert "-ffast-math" not in flags
    assert info["torch"] == torch.__version__
    assert info["libraries"] == ["_C.so"]

    # Code of one instruction set must not be shared with the others: the linker keeps any copy.
    for objects in (tree / "build" / "native" / "cpu").glob("*.*.o"):
        level = objects.name.split(".")[1]
        if level in ("baseline", "once"):
            continue
        command = ["nm", "-C", "--defined-only", objects]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        weak = re.findall(r"(?m)^\S+ [WVu] (.+)$", dump)
        leaked = [s for s in weak if f"cpu::{level}::" not in s and not s.startswith("DW.ref.")]
        assert not leaked, f"{objects.name} exports {leaked} compiled for {level}"


@pytest.mark.slow
@needs_compiler
def test_sdist_builds_elsewhere(tree: Path, tmp_path: Path) -> None:
    (tree / "fastemb" / "_C.so").write_bytes(b"of the machine that made the sdist")
    script = "from setuptools import build_meta; print(build_meta.build_sdist('out'))"
    env = environment(FASTEMB_TORCH="/nowhere")  # an sdist needs no torch
    subprocess.run([sys.executable, "-c", script], cwd=tree, env=env, check=True)
    (archive,) = (tree / "out").glob("fastemb-*.tar.gz")
    elsewhere = tmp_path / "elsewhere"
    with tarfile.open(archive) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
        file.extractall(elsewhere)
    assert not [name for name in names if name.endswith((".so", ".o", "build_info.json"))]
    csrc = {str(path.relative_to(tree)) for path in (tree / "csrc").rglob("*.*")}
    assert csrc <= set(names)

    (unpacked,) = elsewhere.iterdir()
    if (tree / "build").exists():
        shutil.copytree(tree / "build" / "native", unpacked / "build" / "native")
    target = install(unpacked, "--no-build-isolation", FASTEMB_BUILD="cpu")
    assert lookup(target) == "cpu"


@pytest.mark.slow
@needs_compiler
def test_isolated_editable_install_under_another_prefix(tree: Path, tmp_path: Path) -> None:
    """First as it fails there: the environment has no torch; then with FASTEMB_TORCH."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = ("--python", str(home / "bin" / "python"))
    text = pip(*python, "install", "--no-deps", "-e", tree, ok=False)
    assert "torch was not found" in text
    for way_out in ("FASTEMB_TORCH=DIR", "--no-build-isolation", "FASTEMB_BUILD=none"):
        assert way_out in text
    assert "Traceback" not in text.partition("torch was not found")[2]

    (tree / "fastemb" / "_C_cuda.so").write_bytes(b"of an earlier build")
    pip(*python, "install", "--no-deps", "-e", tree, FASTEMB_TORCH=str(SITE), FASTEMB_BUILD="cpu")
    assert (tree / "fastemb" / "_C.so").is_file()
    assert not (tree / "fastemb" / "_C_cuda.so").exists(), "a stale library must go"
    (site,) = home.glob("lib/python*/site-packages")
    assert list(site.glob("fastemb-*.dist-info"))
    (site / "torch.pth").write_text(f"{SITE}\n")
    done = subprocess.run(
        [home / "bin" / "python", "-c", LOOKUP],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [str(tree / "fastemb" / "__init__.py"), "cpu"]


@pytest.mark.slow
def test_none_is_pure_python_and_works(tree: Path) -> None:
    target = install(tree, FASTEMB_BUILD="none")
    assert wheel_tag(target) == "py3-none-any"
    assert not list((target / "fastemb").glob("*.so"))
    assert lookup(target) == "reference"


@pytest.mark.slow
def test_without_a_compiler_auto_degrades_with_a_warning(tree: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    env = {"PATH": str(bare), "CXX": ""}
    options = ("-v", "--no-deps", "--no-build-isolation", "--target", tmp_path / "installed")
    text = pip("install", *options, tree, FASTEMB_BUILD="auto", **env)
    assert "WARNING: fastemb: no C++ compiler was found" in text
    assert "apt-get install g++" in text
    target = tmp_path / "installed"
    assert wheel_tag(target) == "py3-none-any"
    assert "no C++ compiler" in build_info(target)["why_pure"]
    assert lookup(target) == "reference"

    text = pip("wheel", *options[:3], tree, ok=False, FASTEMB_BUILD="cpu", **env)
    assert "FASTEMB_BUILD=cpu, but no C++ compiler was found" in text


@pytest.mark.slow
@needs_compiler
def test_compile_error_is_an_error(tree: Path) -> None:
    with (tree / "csrc" / "cpu" / "dispatch.cpp").open("a") as file:
        file.write("\n#error the message of the compiler\n")
    options = ("--no-deps", "--no-build-isolation", "-w", tree.parent / "wheels")
    text = pip("wheel", *options, tree, ok=False)
    assert "error: #error the message of the compiler" in text
    assert not list(tree.parent.glob("wheels/*.whl"))


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.timeout(600)
def test_cuda_library_beside_any_torch(tree: Path) -> None:
    # Nothing of what is linked here runs; test_nvcc.py compiles it as an installation does.
    quick = "-Xcicc -O0 -Xptxas -O0"
    env = {"FASTEMB_BUILD": "cuda", "TORCH_CUDA_ARCH_LIST": "8.0", "NVCC_APPEND_FLAGS": quick}
    target = install(tree, "--no-build-isolation", **env)
    library = target / "fastemb" / "_C_cuda.so"
    names = needed(library)
    assert {"libtorch_cuda.so", "libtorch_cpu.so"} <= set(names)
    assert [name for name in names if name.startswith("libcudart.so.")]
    assert not [name for name in undefined(library) if name.startswith(("Py", "_Py"))]
    info = build_info(target)
    assert info["cuda_archs"] == ["8.0"]
    assert "--fmad=false" in info["nvcc_flags"]
    assert "fast" not in " ".join(info["nvcc_flags"])
    assert lookup(target) == "cpu"


# ---- parts of setup.py --------------------------------------------------------------------------


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module, on an empty source tree, in an empty environment."""
    spec = importlib.util.spec_from_file_location("fastemb_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    # dataclasses look their module up by name
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "build" / "native")
    (tmp_path / "csrc").mkdir()
    for name in list(os.environ):
        if name.startswith(("FASTEMB_", "CUDA", "TORCH_", "CXX", "NVCC_")):
            monkeypatch.delenv(name)
    return module


def fake_torch(folder: Path, version: str = "2.13.0", cuda: str | None = None) -> Path:
    root = folder / "torch"
    for part in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so"):
        (root / part).parent.mkdir(parents=True)
        (root / part).touch()
    (root / "version.py").write_text(
        f"from typing import Optional\n__version__ = '{version}'\n"
        f"cuda: Optional[str] = {cuda!r}\nhip: Optional[str] = None\n"
    )
    return root


@needs_compiler
def test_objects_follow_headers_and_flags(setup: ModuleType, tmp_path: Path) -> None:
    header, source = tmp_path / "csrc" / "a b.h", tmp_path / "csrc" / "a.cpp"
    header.write_text("#define VALUE 1\n")
    source.write_text('#include "a b.h"\nint value = VALUE;\n')
    unit = setup.Compile(source, "test", ["g++", "-O0"])
    assert not unit.fresh()
    setup.compile_all([unit])
    assert unit.fresh()
    assert not setup.Compile(source, "test", ["g++", "-O1"]).fresh()
    assert not setup.Compile(source, "test", ["g++", "-O0"], salt="another torch").fresh()
    for age in (0, 10**9):  # what is unpacked or copied over a file may be older than it
        header.write_text(f"#define VALUE {2 + age}\n")
        os.utime(header, ns=(time.time_ns() - age,) * 2)
        assert not unit.fresh()
        setup.compile_all([unit])
        assert unit.fresh()
    header.unlink()
    assert not unit.fresh()
    with pytest.raises(SystemExit, match=r"a b\.h"):
        setup.compile_all([unit])


@needs_compiler
def test_fast_math_of_the_user_stops_at_the_kernels(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes infinities and NaN for impossible, and sums in any order."""
    monkeypatch.setenv("CXXFLAGS", "-march=native -ffast-math")
    native = setup.Native()
    defined = setup.output_of([*native.cxx, *native.flags, "-dM", "-E", "-xc++", os.devnull])
    assert "__FAST_MATH__" not in defined
    assert "__FINITE_MATH_ONLY__ 0" in defined


@needs_compiler
def test_kernels_compile_before_torch_is_there(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "csrc" / "cpu"
    sources.mkdir()
    for name in ("dispatch", "kernel"):
        (sources / f"{name}.cpp").write_text("int value;\n")
    monkeypatch.setenv("FASTEMB_TORCH", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match="torch was not found"):
        setup.Native().build(tmp_path)
    setup.BuildKernels(setup.Distribution()).run()
    units = setup.Native().cpu_kernels()
    assert len(units) >= 2
    assert all(unit.fresh() for unit in units)


def test_torch_is_found_by_folder_or_package(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake_torch(tmp_path, cuda="13.0")
    for given in (tmp_path, root):
        monkeypatch.setenv("FASTEMB_TORCH", str(given))
        assert setup.find_torch() == setup.Torch(root, "2.13.0", "13.0")


@pytest.mark.parametrize("version", ["2.10.2", "1.13.1", "2.9.0+cu128", "main"])
def test_old_torch_is_refused(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setenv("FASTEMB_TORCH", str(fake_torch(tmp_path, version)))
    with pytest.raises(SystemExit, match=rf"torch >= 2\.11 is needed, found {re.escape(version)}"):
        setup.find_torch()


def test_torch_without_headers_is_refused(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fake_torch(tmp_path)
    shutil.rmtree(root / "include")
    monkeypatch.setenv("FASTEMB_TORCH", str(root))
    with pytest.raises(SystemExit, match=r"has no include/torch/csrc/stable/library\.h"):
        setup.find_torch()


def test_torch_of_this_environment_is_found_without_importing_it(setup: ModuleType) -> None:
    found = setup.find_torch()
    assert (found.root, found.version) == (SITE / "torch", torch.__version__)
    assert found.cuda == torch.version.cuda
    assert "import torch\n" not in (ROOT / "setup.py").read_text()


def test_architectures(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup.cuda_archs("13.0") == ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX"]
    assert setup.cuda_archs("12.4") == ["8.0", "8.6", "8.9", "9.0+PTX"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0; 9.0a,10.0+PTX")
    archs = setup.cuda_archs("13.0")
    assert archs == ["8.0", "9.0a", "10.0+PTX"]
    assert setup.gencode(archs) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_100,code=compute_100",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(SystemExit, match="'Hopper' is not like"):
        setup.cuda_archs("13.0")


def fake_nvcc(folder: Path, release: str) -> Path:
    """A wrapper whose toolkit lies elsewhere, as its dry run says."""
    toolkit = folder / "toolkit of cuda"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include" / "cuda_runtime.h").touch()
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = --version ] && echo "Cuda compilation tools, release {release}, V{release}.1"\n'
        f"""[ "$1" = --dryrun ] && echo '#$ INCLUDES="-I{toolkit}/include"  ' >&2 && """
        f"""echo '#$ LIBRARIES=  "-L{toolkit}/lib"' >&2\nexit 0\n"""
    )
    nvcc.chmod(0o755)
    return nvcc


def test_nvcc_tells_its_folders(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = fake_nvcc(tmp_path, "13.0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert setup.find_nvcc() == str(nvcc)
    cuda = setup.inspect_nvcc(str(nvcc))
    assert cuda.includes == ["-isystem", str(tmp_path / "toolkit of cuda" / "include")]
    assert cuda.lib_dirs == [tmp_path / "toolkit of cuda" / "lib"]
    torch_found = setup.Torch(tmp_path, "2.13.0", None)
    with pytest.raises(SystemExit, match=r"has no libcudart\.so"):
        cuda.cudart(torch_found)
    library = tmp_path / "toolkit of cuda" / "lib" / "libcudart.so.13"
    library.parent.mkdir()
    library.touch()
    assert cuda.cudart(torch_found) == [f"-L{library.parent}", "-l:libcudart.so.13"]


def test_when_cuda_is_built(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, cu13, cu12 = (setup.Torch(tmp_path, "2.13.0", cuda) for cuda in (None, "13.0", "12.8"))
    monkeypatch.setattr(setup, "find_nvcc", lambda: None)
    assert setup.choose_cuda(cu13) is None
    monkeypatch.setenv("FASTEMB_BUILD", "cuda")
    with pytest.raises(SystemExit, match="nvcc was not found"):
        setup.choose_cuda(cpu)

    nvcc = str(fake_nvcc(tmp_path, "13.0"))
    monkeypatch.setattr(setup, "find_nvcc", lambda: nvcc)
    assert setup.choose_cuda(cpu).nvcc == nvcc
    monkeypatch.setenv("FASTEMB_BUILD", "auto")
    assert setup.choose_cuda(cpu) is None
    assert setup.choose_cuda(cu13).version == "13.0"
    with pytest.raises(SystemExit, match="major versions must be equal"):
        setup.choose_cuda(cu12)
    monkeypatch.setenv("FASTEMB_BUILD", "cpu")
    assert setup.choose_cuda(cu13) is None


def test_old_nvcc_is_refused(setup: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nvcc >= 12\.0 is needed"):
        setup.inspect_nvcc(str(fake_nvcc(tmp_path, "11.8")))


def test_old_setuptools_is_refused(tmp_path: Path) -> None:
    """It is what a venv of Python 3.11 has, and what --no-build-isolation then builds with."""
    (tmp_path / "setuptools").mkdir()
    (tmp_path / "setuptools" / "__init__.py").write_text("__version__ = '65.5.0'")
    done = subprocess.run(
        [sys.executable, ROOT / "setup.py", "--version"],
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("\nfastemb: setuptools >= 77 is needed to build, this is 65.5.0")


def test_old_compiler_is_refused(
    setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "g++ 9"
    old.write_text('#!/bin/sh\necho "unrecognized command-line option $1"; exit 1\n')
    old.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{old}'")
    with pytest.raises(SystemExit, match=r"(?s)C\+\+20 compiler is needed.*option -std=c\+\+20"):
        setup.Native()


def test_wrong_settings_are_named(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTEMB_BUILD", "gpu")
    with pytest.raises(SystemExit, match="FASTEMB_BUILD must be auto, cpu, cuda or none"):
        setup.requested()
    monkeypatch.setenv("CXX", "/nowhere/g++ -v")
    with pytest.raises(SystemExit, match="CXX names '/nowhere/g"):
        setup.find_compiler()
    monkeypatch.setenv("MAX_JOBS", "all")
    with pytest.raises(SystemExit, match="MAX_JOBS must be a number"):
        setup.jobs()
