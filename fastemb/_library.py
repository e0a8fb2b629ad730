"""Loads one native library, or says in one message why it cannot be loaded and what to do.

A shared library fails in ways that name neither the cause nor the cure: a bare undefined symbol, a
"file not found" for a file of another architecture, a bus error for a truncated one. So the file is
looked at before the loader sees it, and what the loader says is put beside the versions of the
build and of the running process.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import struct
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).resolve().parent
MIN_TORCH = (2, 11)

# e_machine of the ELF header, by the names that platform.machine() has for it
_ELF_MACHINES = {
    21: ("ppc64le",),
    22: ("s390x",),
    62: ("x86_64", "AMD64"),
    183: ("aarch64", "arm64"),
    243: ("riscv64",),
}


class NotBuiltError(ImportError):
    """A backend was asked for that this installation does not have, or this machine cannot run."""


class IncompatibleLibraryError(ImportError):
    """A native library is there but cannot be used by this Python process."""


@cache
def build_info() -> dict[str, Any] | None:
    """What setup.py recorded about the build; None when there was none (a plain source tree)."""
    try:
        info = json.loads((PACKAGE / "build_info.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return info if isinstance(info, dict) else None


def reinstall_command() -> str:
    """The command that builds this installation anew."""
    pip = "pip install --force-reinstall --no-deps"
    if (PACKAGE.parent / "setup.py").is_file():
        return f"{pip} -e {shlex.quote(str(PACKAGE.parent))}"
    return f"{pip} --no-cache-dir --no-binary fastemb {shlex.quote(_installed_from())}"


def _installed_from() -> str:
    """The sources that pip was given, as it takes them: a folder, repository or archive.

    pip writes that down (PEP 610), and nothing for what it found by name.
    """
    try:
        origin = json.loads(distribution("fastemb").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, json.JSONDecodeError):
        origin = {}
    url = str(origin.get("url", ""))
    if not url or url.endswith(".whl"):
        return "fastemb"
    vcs = origin.get("vcs_info")
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url


def load(path: Path) -> None:
    """Load a library into the process, so that its kernels register themselves.

    Raises:
        IncompatibleLibraryError: it cannot be loaded; the message has cause, versions and cure.
    """
    cause = _unusable_file(path) or _unusable_torch()
    if cause is None:
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            cause = _explain(str(error.__cause__ or error), path)
    if cause is not None:
        raise IncompatibleLibraryError(describe(path, cause))


def describe(path: Path, cause: str) -> str:
    """The whole message for a library that cannot be used."""
    info = build_info()
    if info is None:
        built = "unknown (no build_info.json beside it)"
    else:
        built = f"fastemb {info.get('version')} against torch {info.get('torch')}"
        if info.get("nvcc"):
            built += f", CUDA {info['nvcc']}"
        built += f", {info.get('machine')}, {info.get('compiler')}"
    running = (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Python {platform.python_version()}, {platform.machine()}"
    )
    return (
        f"fastemb cannot use its native library {path}\n"
        f"  cause:   {cause}\n"
        f"  built:   {built}\n"
        f"  running: {running}\n"
        f"  to do:   build it anew for this environment: {reinstall_command()}\n"
        "           or run without native kernels (slow): FASTEMB_BACKEND=reference"
    )


def _unusable_torch() -> str | None:
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if numbers is not None and (int(numbers[1]), int(numbers[2])) < MIN_TORCH:
        least = ".".join(map(str, MIN_TORCH))
        return f"the library needs torch >= {least}, this is torch {torch.__version__}"
    return None


def _unusable_file(path: Path) -> str | None:
    """What is wrong with a 64-bit ELF file, as far as its header tells."""
    try:
        with path.open("rb") as file:
            header = file.read(64)
        size = path.stat().st_size
    except OSError as error:
        return f"the file cannot be read: {error.strerror}"
    if not header.startswith(b"\x7fELF"):
        return f"the file is damaged: not a shared library ({size} bytes)"
    if len(header) < 64:
        return f"the file is truncated: {size} bytes"
    order = "<" if header[5] == 1 else ">"
    (machine,) = struct.unpack_from(f"{order}H", header, 18)
    known = _ELF_MACHINES.get(machine)
    if header[4] != 2 or (known is not None and platform.machine() not in known):
        made_for = known[0] if known and header[4] == 2 else f"ELF machine {machine}"
        return f"the library is for {made_for}, this machine is {platform.machine()}"
    # The linker puts the section headers last. A file that ends before them would be mapped and
    # end the process with a bus error.
    (sections,) = struct.unpack_from(f"{order}Q", header, 40)
    entry_size, entries = struct.unpack_from(f"{order}HH", header, 58)
    needed = sections + entry_size * entries
    if size < needed:
        return f"the file is truncated: {size} bytes of {needed}"
    return None


def _explain(message: str, path: Path) -> str:
    """The loader's message in words that lead to the cure."""
    message = message.removeprefix(f"{path}: ")
    symbol = re.search(r"undefined symbol: (\S+)", message)
    if symbol:
        info = build_info() or {}
        return (
            f"neither the library nor torch {torch.__version__} has the symbol "
            f"{symbol[1].rstrip(',')}, so it was built for another torch "
            f"(this one against {info.get('torch', 'an unknown one')})"
        )
    missing = re.search(r"(\S+\.so\S*): cannot open shared object file", message)
    if missing:
        return f"it needs {missing[1]}, which is not in this environment"
    version = re.search(r"version `(\S+)' not found", message)
    if version:
        return (
            f"it needs {version[1]}, which the C/C++ runtime of this system lacks: it was built on "
            "a newer system"
        )
    return message
