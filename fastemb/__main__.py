"""``python -m fastemb``: the environment report to put into a bug report."""

from __future__ import annotations

import sys
from typing import Any

from fastemb import _native


def render(report: dict[str, Any]) -> str:
    """The report of `_native.report` as text."""
    lines = [f"{name:<10} {value or '-'}" for name, value in report["versions"].items()]
    lines += [f"{'GPU':<10} {name}" for name in report["gpus"] or ["none visible"]]
    isa = report["cpu_isa"]
    active = isa["active"] if isa["active"] in isa["available"] else "none"
    levels = f"{', '.join(isa['available'])}; active: {active}" if isa["active"] else "-"
    lines.append(f"{'CPU levels':<10} {levels}")
    lines.append(f"{'forced':<10} {report['forced_backend'] or 'no (FASTEMB_BACKEND is not set)'}")

    lines += ["", "backends"]
    lines += [f"  {name:<8} {status}" for name, status in report["libraries"].items()]

    lines += ["", "build"]
    build = report["build"] or {
        "build_info.json": "none: fastemb was not installed by its setup.py"
    }
    for name, value in build.items():
        shown = " ".join(map(str, value)) if isinstance(value, list) else value
        lines.append(f"  {name:<12} {shown if shown not in (None, '') else '-'}")

    width = max(map(len, report["operators"]), default=0)
    lines += ["", f"{'operator':<{width}}  CPU tensors  CUDA tensors"]
    for op, served in report["operators"].items():
        lines.append(f"{op:<{width}}  {served['cpu']:<11}  {served['cuda']}")
    if report["error"]:
        lines += ["", f"ERROR: {report['error']}"]
    return "\n".join(lines)


def main() -> int:
    report = _native.report()
    print(render(report))
    return 1 if report["error"] else 0


if __name__ == "__main__":
    sys.exit(main())
