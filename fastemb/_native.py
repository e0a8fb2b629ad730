"""Chooses, once at import, which kernels serve CPU and CUDA tensors.

``fastemb/_ops.py`` and ``fastemb/_row_ops.py`` define the operators and register the reference for
every device; `load` registers the faster kernels over it:

- CPU tensors: ``_C.so`` where it was built;
- CUDA tensors: ``_C_cuda.so`` where it was built, else Triton where it is installed.

``FASTEMB_BACKEND=cpu|cuda|triton|reference`` forces one and raises when it cannot be had. A library
that was never built is no error, one that is there but cannot be loaded is: a slow fallback that
nobody asked for would go unnoticed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fastemb import _library
from fastemb._library import IncompatibleLibraryError, NotBuiltError

BACKENDS = ("cpu", "cuda", "triton", "reference")
CPU_LIBRARY = _library.PACKAGE / "_C.so"
CUDA_LIBRARY = _library.PACKAGE / "_C_cuda.so"

Kernels = dict[str, Callable[..., Any]]


class _State:
    """What `load` found and did."""

    def __init__(self) -> None:
        # name -> reference kernel, of every operator that has kernels
        self.operators: Kernels = {}
        # those of them that the CUDA library does without
        self.cpu_only: frozenset[str] = frozenset()
        self.forced: str | None = None
        # name -> "loaded", or why not
        self.status: dict[str, str] = {}
        self.triton: Kernels | None = None
        # device type -> backend -> the operators it serves there
        self.serves: dict[str, dict[str, frozenset[str]]] = {"cpu": {}, "cuda": {}}
        # keeps registrations of Python kernels alive
        self.registrations: list[torch.library.Library] = []
        # a failed import that `python -m fastemb` is about to report
        self.error: ImportError | ValueError | None = None


_state: _State | None = None


def load(
    operators: Mapping[str, Callable[..., Any]], cpu_only: Collection[str] = frozenset()
) -> None:
    """Load libraries and register kernels; further calls do nothing.

    Args:
        operators: the operators in ``torch.ops.fastemb`` that have kernels, each with its
            reference kernel.
        cpu_only: those of them whose reference is as good as it gets elsewhere.

    Raises:
        NotBuiltError: ``FASTEMB_BACKEND`` names a backend that cannot be had.
        IncompatibleLibraryError: a library is there but cannot be used.
        ValueError: ``FASTEMB_BACKEND`` is not a backend.
    """
    global _state
    if _state is not None:
        return
    state = _State()
    state.operators = dict(operators)
    state.cpu_only = frozenset(cpu_only)
    try:
        _load(state)
    except (ImportError, ValueError) as error:
        if not _is_report():
            raise
        state.error = error
    _state = state


def _is_report() -> bool:
    """Whether this process is ``python -m fastemb``, which must run where an import fails."""
    if sys.argv[:1] != ["-m"]:  # what stands there while Python looks for the module
        return False
    module = sys.orig_argv[-len(sys.argv)]  # before the module's own arguments
    return module == "fastemb" or (module.startswith("-") and module.endswith("mfastemb"))


def _load(state: _State) -> None:
    forced = state.forced = os.environ.get("FASTEMB_BACKEND") or None
    if forced is not None and forced not in BACKENDS:
        choices = ", ".join(BACKENDS)
        raise ValueError(f"FASTEMB_BACKEND must be one of {choices}, got {forced!r}")
    interpret = forced == "triton" and _interpreting()

    # A backend is loaded when nothing else was asked for; with FASTEMB_BACKEND=cuda or triton the
    # CPU library still serves CPU tensors, unless interpreted Triton does.
    skip_cpu: str | None
    if forced == "reference":
        skip_cpu = "FASTEMB_BACKEND=reference"
    elif interpret:
        skip_cpu = "FASTEMB_BACKEND=triton with TRITON_INTERPRET=1"
    else:
        skip_cpu = None if CPU_LIBRARY.exists() else _not_built(CPU_LIBRARY)
    _use_library(state, "cpu", CPU_LIBRARY, skip_cpu, required=forced == "cpu")

    skip_cuda: str | None
    if forced not in (None, "cuda"):
        skip_cuda = f"FASTEMB_BACKEND={forced}"
    elif not CUDA_LIBRARY.exists():
        skip_cuda = _not_built(CUDA_LIBRARY)
    else:
        skip_cuda = None if torch.version.cuda else f"torch {torch.__version__} is a CPU build"
    _use_library(state, "cuda", CUDA_LIBRARY, skip_cuda, required=forced == "cuda")

    if forced not in (None, "triton"):
        state.status["triton"] = f"not loaded: FASTEMB_BACKEND={forced}"
    elif state.status["cuda"] == "loaded":
        state.status["triton"] = "not needed: the CUDA library is loaded"
    else:
        reason = _use_triton(state, ("cpu", "cuda") if interpret else ("cuda",))
        state.status["triton"] = "loaded" if reason is None else f"not loaded: {reason}"
        if forced == "triton" and reason is not None:
            raise NotBuiltError(f"FASTEMB_BACKEND=triton cannot be had: {reason}")


def _use_library(
    state: _State, device: str, path: Path, skip: str | None, *, required: bool
) -> None:
    if skip is not None:
        state.status[device] = f"not loaded: {skip}"
        if required:
            cure = f"\n  to do: FASTEMB_BUILD={device} {_library.reinstall_command()}"
            raise NotBuiltError(
                f"FASTEMB_BACKEND={device} cannot be had: {skip}{'' if path.exists() else cure}"
            )
        return
    state.status[device] = "failed to load"
    _library.load(path)
    key = device.upper()
    served = [op for op in state.operators if device == "cpu" or op not in state.cpu_only]
    absent = [
        name
        for name in served
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fastemb::{name}", key)
    ]
    if absent:
        # An editable install after an update: new Python, old library.
        cause = f"it has no kernel for {', '.join(absent)}: it was built from other sources"
        raise IncompatibleLibraryError(_library.describe(path, cause))
    state.status[device] = "loaded"
    state.serves[device][device] = frozenset(served)


def _not_built(path: Path) -> str:
    info = _library.build_info() or {}
    why = info.get("why_pure")
    if why is None and path == CUDA_LIBRARY and "libraries" in info:
        why = f"FASTEMB_BUILD=auto found no nvcc, or torch {info.get('torch')} is not a CUDA build"
    return f"{path.name} was not built" + (f" ({why})" if why else "")


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def _triton_obstacle() -> str | None:
    """Why Triton kernels cannot run in this process, None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not (torch.version.cuda or torch.version.hip or _interpreting()):
        return (
            f"torch {torch.__version__} is a CPU build (TRITON_INTERPRET=1 runs Triton kernels on "
            "CPU tensors, slowly, for tests)"
        )
    return None


def _triton_kernels() -> Kernels:
    # Not a plain import statement: most processes never need Triton, and importing it is slow.
    module = importlib.import_module("fastemb.triton.kernels")
    return dict(module.KERNELS)


def _use_triton(state: _State, devices: tuple[str, ...]) -> str | None:
    """Register the Triton kernels for the devices; returns why not, if not."""
    obstacle = _triton_obstacle()
    if obstacle is not None:
        return obstacle
    try:
        kernels = _triton_kernels()
    except Exception as error:  # an unfit Triton can fail in any way when it is imported
        reason = f"{type(error).__name__}: {error}"
        if state.forced is None:
            warnings.warn(
                f"fastemb: the Triton kernels cannot be used ({reason}); CUDA tensors use the slow "
                "reference kernels",
                RuntimeWarning,
                stacklevel=2,
            )
        return reason
    for device in devices:
        library = torch.library.Library("fastemb", "IMPL", device.upper())
        for name, kernel in kernels.items():
            library.impl(name, kernel)
        state.registrations.append(library)
        state.serves[device]["triton"] = frozenset(kernels)
    state.triton = kernels
    return None


def backend(name: str) -> SimpleNamespace:
    """The operators of one backend, whatever serves the tensors otherwise.

    Args:
        name: ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        A namespace with one function per operator that the backend implements, arguments as in
        their schemas, without autograd for triton and reference.

    Raises:
        NotBuiltError: the backend cannot be had in this process.
        ValueError: no such backend.
    """
    state = _loaded()
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "reference":
        return SimpleNamespace(**state.operators)
    if name == "triton":
        if state.triton is None:
            obstacle = _triton_obstacle()
            if obstacle is not None:
                raise NotBuiltError(f"the triton backend cannot be had: {obstacle}")
            state.triton = _triton_kernels()
        return SimpleNamespace(**state.triton)
    if state.status[name] != "loaded":
        raise NotBuiltError(f"the {name} backend cannot be had: {state.status[name]}")
    return SimpleNamespace(
        **{op: getattr(torch.ops.fastemb, op) for op in state.serves[name][name]}
    )


def cpu_function(name: str) -> Any | None:
    """A C function of the CPU library, beside its operators; None when it is not loaded."""
    if _loaded().status.get("cpu") != "loaded":
        return None
    return ctypes.CDLL(str(CPU_LIBRARY))[name]  # the library that is loaded already


def cpu_isa() -> dict[str, Any]:
    """Instruction-set levels of the CPU kernels: ``available`` on this machine, and ``active``.

    Both are empty (None) when the CPU library is not loaded. When ``FASTEMB_CPU_ISA`` names none
    of them, ``active`` is the error that every CPU operator raises.
    """

    def call(name: str) -> str | None:
        function = cpu_function(name)
        if function is None:
            return None
        function.restype = ctypes.c_char_p
        return str(function().decode())

    available = call("fastemb_cpu_isa_available")
    return {
        "available": available.split(", ") if available else [],
        "active": call("fastemb_cpu_isa"),
    }


def report() -> dict[str, Any]:
    """Versions, libraries and the backend of every operator; what ``python -m fastemb`` prints.

    Returns:
        ``versions``, ``gpus``, ``forced_backend``, ``cpu_isa``, ``libraries``, ``build``,
        ``operators`` (operator -> device type -> backend) and ``error`` (None, or what is wrong).
    """
    state = _loaded()

    def serving(device: str, op: str) -> str:
        # Registered last, wins; the reference is below all.
        for name, operators in reversed(state.serves[device].items()):
            if op in operators:
                return name
        return "reference"

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    isa = cpu_isa()
    error = None
    if state.error is not None:
        error = f"import fastemb fails\n{state.error}"
    elif isa["active"] is not None and isa["active"] not in isa["available"]:
        error = f"every operator on CPU tensors fails\n{isa['active']}"
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    return {
        "versions": {
            "fastemb": version("fastemb"),
            "torch": torch.__version__,
            "torch CUDA": torch.version.cuda,
            "triton": version("triton"),
            "Python": platform.python_version(),
            "platform": platform.platform(),
        },
        "gpus": [torch.cuda.get_device_name(index) for index in gpus],
        "forced_backend": state.forced,
        "cpu_isa": isa,
        "libraries": dict(state.status),
        "build": _library.build_info(),
        "operators": {
            op: {device: serving(device, op) for device in state.serves} for op in state.operators
        },
        "error": error,
    }


def _loaded() -> _State:
    if _state is None:
        raise RuntimeError("fastemb._native.load has not run; import fastemb first")
    return _state
