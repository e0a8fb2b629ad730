"""Builds fastemb's native libraries: ``fastemb/_C.so`` (CPU) and ``fastemb/_C_cuda.so`` (CUDA).

They are ordinary shared libraries without any Python in them, written against torch's stable ABI:
one build serves every CPython and every torch from 2.11 on. Only torch's headers and libraries are
needed, never ``import torch``; that is why this works in pip's isolated builds too. No network, no
git, no look at the hardware.

Environment
    FASTEMB_BUILD   auto (default): CPU, and CUDA when nvcc is there and torch is a CUDA build
                    cpu | cuda: exactly that (cuda includes cpu), or fail;  none: pure Python
    FASTEMB_TORCH   folder that holds the torch package, for builders with a prefix of their own
    CXX, CXXFLAGS, LDFLAGS, MAX_JOBS
    CUDACXX, CUDA_HOME, CUDA_PATH, TORCH_CUDA_ARCH_LIST, NVCC_APPEND_FLAGS
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # which may lack what is imported next
    raise SystemExit(
        f"\nfastemb: setuptools >= 77 is needed to build, this is {setuptools.__version__}: "
        "pip install -U setuptools, or leave out --no-build-isolation\n"
    )

from setuptools import Command, Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
OBJECTS = (
    ROOT / "build" / "native"
)  # kept between builds; an object is reused while nothing it came from changed

MIN_TORCH = (2, 11)
CPU_LIBRARY, CUDA_LIBRARY, BUILD_INFO = "_C.so", "_C_cuda.so", "build_info.json"

STABLE_ABI = ["-DTORCH_TARGET_VERSION=0x020b000000000000", "-DTORCH_STABLE_ONLY"]
# CPU and CUDA agree bit for bit, hence no contraction to fma anywhere and no fast-math, not from
# CXXFLAGS either: what is to be fused says so.
CXX_FLAGS = [
    "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-fast-math",
    "-fno-math-errno",
    "-Wall", "-Wextra", "-Wno-psabi",
]  # fmt: skip
NVCC_FLAGS = [
    "-std=c++20", "-O3", "--fmad=false",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wno-psabi",
]  # fmt: skip
# Kernels are compiled once per instruction set and chosen at run time. Processors without AVX2 are
# of before 2013: for them, what takes half the time to compile and runs as fast within a tenth.
X86_LEVELS = {
    "baseline": ["-O1"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mf16c",
        "-mprefer-vector-width=512",
    ],
}  # fmt: skip


class BuildError(SystemExit):
    """Ends the build with a message instead of a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nfastemb: {message}\n")


def warn(message: str) -> None:
    print(f"\nWARNING: fastemb: {message}\n", file=sys.stderr, flush=True)


def output_of(command: Sequence[str]) -> str:
    """stdout and stderr of a command that must succeed, run in the source tree."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise BuildError(f"cannot run {command[0]}: {error}") from None
    if done.returncode != 0:
        raise BuildError(f"command failed: {shlex.join(command)}\n\n{done.stdout}")
    return done.stdout


# ---- what to build ----------------------------------------------------------------------------


def requested() -> str:
    mode = os.environ.get("FASTEMB_BUILD") or "auto"
    if mode not in ("auto", "cpu", "cuda", "none"):
        raise BuildError(f"FASTEMB_BUILD must be auto, cpu, cuda or none, got {mode!r}")
    return mode


def find_compiler() -> list[str] | None:
    """The C++ compiler as a command ($CXX may hold arguments), or None when there is none."""
    if os.environ.get("CXX"):
        command = shlex.split(os.environ["CXX"])
        if shutil.which(command[0]) is None:
            raise BuildError(f"CXX names {command[0]!r}, which cannot be run")
        return command
    found = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    return [found] if found else None


@functools.cache
def why_pure() -> str | None:
    """Why this build makes no native library; None when it makes some."""
    mode = requested()
    if mode == "none":
        return "FASTEMB_BUILD=none"
    missing = None
    if not sys.platform.startswith("linux"):
        missing = f"native libraries are built on Linux only, this is {sys.platform}"
    elif find_compiler() is None:
        missing = "no C++ compiler was found (tried $CXX, g++, c++, clang++)"
    if missing and mode != "auto":
        raise BuildError(f"FASTEMB_BUILD={mode}, but {missing}")
    if missing:
        warn(
            f"{missing}.\n"
            "  fastemb is installed as pure Python: correct, but slow. For the native kernels\n"
            "  install g++ (for example `apt-get install g++`) and install again from where this\n"
            "  comes from:\n"
            "    pip install --force-reinstall --no-deps --no-cache-dir ..."
        )
    return missing


# ---- torch ------------------------------------------------------------------------------------


@dataclass
class Torch:
    root: Path
    version: str
    cuda: str | None

    @property
    def lib(self) -> Path:
        return self.root / "lib"

    @property
    def includes(self) -> list[str]:
        # -isystem: torch's headers are not ours to be warned about.
        include = self.root / "include"
        return [
            "-isystem",
            str(include),
            "-isystem",
            str(include / "torch" / "csrc" / "api" / "include"),
        ]


def torch_candidates() -> Iterator[Path]:
    """Folders that may be the torch package, the one that `import torch` would take first."""
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        yield Path(spec.origin).parent
    # An isolated build cannot import torch, yet it runs in the target interpreter, whose folders
    # sysconfig names.
    for name in ("purelib", "platlib"):
        yield Path(sysconfig.get_path(name)) / "torch"
    config = Path(sys.prefix) / "pyvenv.cfg"
    if config.is_file() and re.search(
        r"(?im)^include-system-site-packages\s*=\s*true", config.read_text()
    ):
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        for name in ("purelib", "platlib"):
            yield Path(sysconfig.get_path(name, vars=base)) / "torch"
    yield Path(site.getusersitepackages()) / "torch"


def find_torch() -> Torch:
    if os.environ.get("FASTEMB_TORCH"):
        given = Path(os.environ["FASTEMB_TORCH"]).expanduser().resolve()
        candidates = [given / "torch", given]
    else:
        candidates = list(dict.fromkeys(torch_candidates()))
    root = next((c for c in candidates if (c / "version.py").is_file()), None)
    if root is None:
        searched = "\n".join(f"    {c}" for c in candidates)
        raise BuildError(
            "torch was not found; its headers are needed to build the native libraries. Looked at\n"
            f"{searched}\n"
            "  Install torch first, then one of\n"
            "    FASTEMB_TORCH=DIR pip install ...       DIR: the folder that holds torch\n"
            "    pip install --no-build-isolation ...    builds with what is importable here\n"
            "    FASTEMB_BUILD=none pip install ...      pure Python, no native libraries"
        )
    text = (root / "version.py").read_text()

    def constant(name: str) -> str | None:
        found = re.search(rf"(?m)^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text)
        return found.group(1) if found else None

    version = constant("__version__") or "unknown"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    least = ".".join(map(str, MIN_TORCH))
    if numbers is None or (int(numbers[1]), int(numbers[2])) < MIN_TORCH:
        raise BuildError(f"torch >= {least} is needed, found {version} in {root}")
    for part in ("include/torch/csrc/stable/library.h", "lib/libtorch_cpu.so"):
        if not (root / part).is_file():
            raise BuildError(
                f"the torch {version} in {root} has no {part}; install torch's own wheel"
            )
    return Torch(root, version, constant("cuda"))


# ---- nvcc -------------------------------------------------------------------------------------


@dataclass
class Cuda:
    nvcc: str
    version: str
    includes: list[str]
    lib_dirs: list[Path]
    archs: list[str] = field(default_factory=list)

    @property
    def major(self) -> int:
        return int(self.version.split(".")[0])

    def cudart(self, torch: Torch) -> list[str]:
        """Linker arguments for the shared runtime; torch's CUDA wheels have loaded it before us."""
        bundled = (torch.root.parent / "nvidia").glob("*/lib")
        for folder in (*self.lib_dirs, *sorted(bundled)):
            for name in ("libcudart.so", f"libcudart.so.{self.major}"):
                if (folder / name).exists():
                    return [f"-L{folder}", f"-l:{name}"]
        searched = ", ".join(map(str, self.lib_dirs))
        raise BuildError(
            f"nvcc {self.version} ({self.nvcc}) has no libcudart.so; looked in {searched}"
        )


def find_nvcc() -> str | None:
    env = os.environ
    if env.get("CUDACXX"):
        if shutil.which(env["CUDACXX"]) is None:
            raise BuildError(f"CUDACXX names {env['CUDACXX']!r}, which cannot be run")
        return shutil.which(env["CUDACXX"])
    homes = [env[name] for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    places = [f"{home}/bin/nvcc" for home in homes] + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, places)), None)


def inspect_nvcc(nvcc: str) -> Cuda:
    release = re.search(r"release (\d+\.\d+)", output_of([nvcc, "--version"]))
    if release is None:
        raise BuildError(f"cannot read the version of {nvcc}")
    cuda = Cuda(nvcc, release[1], [], [])
    if cuda.major < 12:
        raise BuildError(f"nvcc >= 12.0 is needed (C++20), {nvcc} is {cuda.version}")
    # nvcc may be a wrapper, so that its folder says nothing; its own dry run names the toolkit's.
    dry = output_of([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull])
    for name, values in re.findall(r"(?m)^#\$ (INCLUDES|SYSTEM_INCLUDES|LIBRARIES)=(.*)$", dry):
        words = [word for word in shlex.split(values) if word != "-isystem"]
        if name == "LIBRARIES":
            cuda.lib_dirs += [Path(word.removeprefix("-L")).resolve() for word in words]
        else:
            for word in words:
                cuda.includes += ["-isystem", str(Path(word.removeprefix("-I")).resolve())]
    if not any((Path(folder) / "cuda_runtime.h").is_file() for folder in cuda.includes):
        raise BuildError(
            f"nvcc {cuda.version} ({nvcc}) comes without cuda_runtime.h; install the CUDA runtime "
            "headers"
        )
    cuda.archs = cuda_archs(cuda.version)
    return cuda


def cuda_archs(nvcc_version: str) -> list[str]:
    """TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX"), or what is in use since Ampere and nvcc knows."""
    text = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if not text:
        major, minor = map(int, nvcc_version.split(".")[:2])
        text = (
            "8.0;8.6;8.9;9.0;10.0;12.0+PTX" if (major, minor) >= (12, 8) else "8.0;8.6;8.9;9.0+PTX"
        )
    archs = [arch for arch in re.split(r"[;,\s]+", text) if arch]
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", arch):
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: {arch!r} is not like 9.0, 9.0a or 9.0+PTX")
    return archs


def gencode(archs: Sequence[str]) -> list[str]:
    flags = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if arch.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return flags


def choose_cuda(torch: Torch) -> Cuda | None:
    mode = requested()
    if mode == "cpu" or (mode == "auto" and torch.cuda is None):
        return None
    nvcc = find_nvcc()
    if nvcc is None:
        if mode == "cuda":
            raise BuildError(
                "FASTEMB_BUILD=cuda, but nvcc was not found (tried $CUDACXX, $CUDA_HOME/bin, "
                "$CUDA_PATH/bin, PATH, /usr/local/cuda/bin)"
            )
        return None
    cuda = inspect_nvcc(nvcc)
    if torch.cuda is not None and int(torch.cuda.split(".")[0]) != cuda.major:
        raise BuildError(
            f"nvcc is {cuda.version} ({nvcc}) but torch {torch.version} is built for CUDA "
            f"{torch.cuda}; the major versions must be equal. Point CUDA_HOME to the right "
            "toolkit, or set FASTEMB_BUILD=cpu (CUDA tensors then use Triton)"
        )
    return cuda


# ---- compiling --------------------------------------------------------------------------------


def identity(file: str) -> str:
    """The content of a file of this tree, which has a relative path; the date of any other.

    What is unpacked or copied over a source may be older than it, and than its object.
    """
    if Path(file).is_absolute():
        return str(Path(file).stat().st_mtime_ns)
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


@dataclass
class Compile:
    """One source to one object."""

    source: Path
    label: str  # tells apart the objects of one source
    command: list[str]
    salt: str = ""  # what else the object depends on
    parallel: tuple[str, ...] = ()  # flags that change speed, not the object

    @property
    def object(self) -> Path:
        return OBJECTS / self.source.relative_to(CSRC).with_suffix(f".{self.label}.o")

    def fresh(self) -> bool:
        try:
            recorded = self.object.with_suffix(".cmd").read_text()
            return self.object.exists() and recorded == self.stamp()
        except FileNotFoundError:
            return False

    def sources(self) -> list[str]:
        """The files that the object was made of."""
        text = self.object.with_suffix(".d").read_text().partition(":")[2]
        words = text.replace("\\\n", " ").replace("\\ ", "\0").split()
        return [word.replace("\0", " ") for word in words]

    def stamp(self) -> str:
        files = [f"{identity(file)} {file}" for file in self.sources()]
        return "\n".join([self.salt, shlex.join(self.command), *files])

    def run(self) -> None:
        self.object.parent.mkdir(parents=True, exist_ok=True)
        ends = (".cmd", ".d", f".{os.getpid()}.part")
        stamp, depfile, part = (self.object.with_suffix(end) for end in ends)
        stamp.unlink(missing_ok=True)
        started = time.time_ns()
        # Paths are relative, so that objects do not depend on where the tree lies.
        source, made, made_from = (file.relative_to(ROOT) for file in (self.source, part, depfile))
        print(f"  {Path(self.command[0]).name} {source} ({self.label})", flush=True)
        files = ["-c", str(source), "-o", str(made), "-MD", "-MF", str(made_from)]
        printed = output_of([*self.command, *self.parallel, *files])
        if printed.strip():
            print(printed, flush=True)
        part.replace(self.object)
        if all((ROOT / file).stat().st_mtime_ns <= started for file in self.sources()):
            stamp.write_text(self.stamp())  # else one was edited while it compiled


def jobs() -> int:
    try:
        return max(1, int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0))))
    except ValueError:
        raise BuildError(f"MAX_JOBS must be a number, got {os.environ['MAX_JOBS']!r}") from None


def compile_all(units: Sequence[Compile]) -> list[str]:
    pool = ThreadPoolExecutor(jobs())
    stale = [unit for unit in units if not unit.fresh()]
    # The long ones first, so that all processors end at about the same time.
    stale.sort(key=lambda unit: (unit.label != "nvcc", -unit.source.stat().st_size))
    try:
        for done in [pool.submit(unit.run) for unit in stale]:
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
    return [str(unit.object) for unit in units]


def link(compiler: Sequence[str], target: Path, arguments: Sequence[str]) -> None:
    """Links to a new file and renames it: a process may have the old library mapped."""
    part = target.with_suffix(f".{os.getpid()}.part")
    flags = shlex.split(os.environ.get("LDFLAGS", ""))
    output_of([*compiler, "-shared", "-o", str(part), *arguments, *flags])
    part.replace(target)
    print(f"  linked {target.name}", flush=True)


def sources(pattern: str) -> list[Path]:
    found = sorted(CSRC.glob(pattern))
    if not found:
        raise BuildError(f"no csrc/{pattern}: this source tree is incomplete")
    return found


class Native:
    """The native libraries of one build."""

    def __init__(self) -> None:
        compiler = find_compiler()
        assert compiler is not None  # why_pure() saw to it
        self.cxx = compiler
        try:
            output_of([*self.cxx, "-std=c++20", "-fsyntax-only", "-xc++", os.devnull])
        except BuildError as error:
            raise BuildError(
                f"a C++20 compiler is needed, and {shlex.join(self.cxx)} is none: install a newer "
                f"one and name it in CXX, or set FASTEMB_BUILD=none\n{error}"
            ) from None
        self.machine = output_of([*self.cxx, "-dumpmachine"]).strip()
        self.flags = [*shlex.split(os.environ.get("CXXFLAGS", "")), *CXX_FLAGS]

    @functools.cached_property
    def torch(self) -> Torch:
        return find_torch()

    @functools.cached_property
    def cuda(self) -> Cuda | None:
        return choose_cuda(self.torch)

    @property
    def levels(self) -> dict[str, list[str]]:
        return X86_LEVELS if self.machine.startswith("x86_64") else {"baseline": []}

    def kernel_unit(self, source: Path, label: str, *flags: str) -> Compile:
        return Compile(source, label, [*self.cxx, *self.flags, "-Icsrc", *flags])

    def adapter_unit(self, source: Path, *flags: str) -> Compile:
        command = [*self.cxx, *self.flags, *STABLE_ABI, "-Icsrc", *flags, *self.torch.includes]
        return Compile(source, "torch", command, salt=self.torch.version)

    def cpu_kernels(self) -> list[Compile]:
        """What needs no torch."""
        dispatch = CSRC / "cpu" / "dispatch.cpp"
        units = [
            self.kernel_unit(source, level, f"-DFE_ISA={level}", *flags)
            for source in sources("cpu/*.cpp")
            if source != dispatch
            for level, flags in self.levels.items()
        ]
        x86 = ["-DFE_X86_LEVELS=1"] if len(self.levels) > 1 else []
        return [*units, self.kernel_unit(dispatch, "once", *x86)]

    def cpu_units(self) -> list[Compile]:
        adapters = [self.adapter_unit(source) for source in sources("torch/cpu_*.cpp")]
        return [*self.cpu_kernels(), *adapters]

    def cuda_units(self, cuda: Cuda) -> list[Compile]:
        kernels = sources("cuda/*.cu")
        command = [cuda.nvcc, *NVCC_FLAGS, *gencode(cuda.archs), "-Icsrc"]
        if os.environ.get("CXX") and len(self.cxx) == 1 and not os.environ.get("NVCC_CCBIN"):
            command.append(f"-ccbin={self.cxx[0]}")
        # nvcc reads these by itself
        extra = [os.environ.get(f"NVCC_{where}_FLAGS", "") for where in ("PREPEND", "APPEND")]
        salt = " ".join([cuda.version, *extra])
        threads = (f"--threads={max(1, jobs() // len(kernels))}",)
        return [
            *(Compile(source, "nvcc", command, salt, threads) for source in kernels),
            *(
                self.adapter_unit(source, "-DUSE_CUDA", *cuda.includes)
                for source in sources("torch/cuda_*.cpp")
            ),
        ]

    def torch_libraries(self, *names: str) -> list[str]:
        # torch loads its libraries with local visibility: what is not NEEDED is not seen. Hence
        # --no-as-needed.
        libraries = [f"-l{name}" for name in names]
        return [f"-L{self.torch.lib}", "-Wl,--no-as-needed", *libraries, "-Wl,--as-needed"]

    def link_cpu(self, target: Path, objects: Sequence[str]) -> None:
        link(self.cxx, target, [*objects, *self.torch_libraries("torch_cpu"), "-Wl,-z,defs"])

    def link_cuda(self, cuda: Cuda, target: Path, objects: Sequence[str]) -> None:
        search, strict = [], ["-Wl,-z,defs"]
        if not (self.torch.lib / "libtorch_cuda.so").exists():
            # An empty library of that name records the dependency, which a CUDA torch then meets.
            folder = OBJECTS / "stub"
            folder.mkdir(parents=True, exist_ok=True)
            stub = ["-Wl,-soname,libtorch_cuda.so", "-x", "c++", os.devnull]
            link(self.cxx, folder / "libtorch_cuda.so", stub)
            search, strict = [f"-L{folder}"], []
        libraries = self.torch_libraries("torch_cuda", "torch_cpu")
        link(self.cxx, target, [*objects, *search, *libraries, *cuda.cudart(self.torch), *strict])

    def build(self, package: Path) -> dict[str, object]:
        """Builds the libraries into the package folder; returns what build_info.json records."""
        cuda = self.cuda
        print(f"fastemb: building for torch {self.torch.version} in {self.torch.root}", flush=True)
        cpu_units, cuda_units = self.cpu_units(), self.cuda_units(cuda) if cuda else []
        objects = compile_all([*cuda_units, *cpu_units])
        libraries = [CPU_LIBRARY]
        self.link_cpu(package / CPU_LIBRARY, objects[len(cuda_units) :])
        if cuda:
            libraries.append(CUDA_LIBRARY)
            self.link_cuda(cuda, package / CUDA_LIBRARY, objects[: len(cuda_units)])
        return {
            "libraries": libraries,
            "torch": self.torch.version,
            "torch_cuda": self.torch.cuda,
            "nvcc": cuda.version if cuda else None,
            "cuda_archs": cuda.archs if cuda else [],
            "compiler": output_of([*self.cxx, "--version"]).splitlines()[0],
            "machine": self.machine,
            "cpu_levels": list(self.levels),
            "cxx_flags": self.flags,
            "nvcc_flags": NVCC_FLAGS if cuda else [],
        }


# ---- setuptools -------------------------------------------------------------------------------


def record(package: Path, version: str, info: dict[str, object]) -> None:
    """Writes build_info.json and removes libraries that this build did not make."""
    for name in (CPU_LIBRARY, CUDA_LIBRARY):
        if name not in info["libraries"]:  # type: ignore[operator]
            (package / name).unlink(missing_ok=True)
    (package / BUILD_INFO).write_text(json.dumps({"version": version, **info}, indent=2) + "\n")


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        """Decides whether build_ext runs and whether the wheel is tagged for a platform."""
        return why_pure() is None


class BuildPy(build_py):
    def run(self) -> None:
        pure = why_pure()
        if self.editable_mode:
            package = ROOT / "fastemb"
        else:
            package = Path(self.build_lib) / "fastemb"
            shutil.rmtree(
                package, ignore_errors=True
            )  # files of an earlier build are not files of this one
        super().run()
        if pure is not None:
            info: dict[str, object] = {
                "libraries": [],
                "why_pure": pure,
                "machine": platform.machine(),
            }
            record(package, self.distribution.get_version(), info)


class BuildNative(build_ext):
    def _packages(self) -> tuple[Path, Path]:
        """Where the libraries go, and where a regular build would put them."""
        regular = Path(self.build_lib) / "fastemb"
        return (ROOT / "fastemb" if self.inplace else regular), regular

    def run(self) -> None:
        package = self._packages()[0].resolve()
        package.mkdir(parents=True, exist_ok=True)
        record(package, self.distribution.get_version(), Native().build(package))

    def get_output_mapping(self) -> dict[str, str]:
        package, regular = self._packages()
        names = (CPU_LIBRARY, CUDA_LIBRARY, BUILD_INFO)
        return {
            str(regular / name): str(package / name) for name in names if (package / name).exists()
        }

    def get_outputs(self) -> list[str]:
        return list(self.get_output_mapping())

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in lists them


class BuildKernels(Command):
    """Compiles the CPU kernels alone: for those who still wait for torch."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        if why_pure() is None:
            compile_all(Native().cpu_kernels())


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, plat = super().get_tag()
        return (python, abi, plat) if self.root_is_pure else ("py3", "none", plat)


if __name__ == "__main__":
    setuptools.setup(
        distclass=NativeDistribution,
        cmdclass={
            "build_py": BuildPy,
            "build_ext": BuildNative,
            "build_kernels": BuildKernels,
            "bdist_wheel": PlatformWheel,
        },
    )
