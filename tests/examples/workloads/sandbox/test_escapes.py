"""Programs that try to get out of the sandbox, or to take more than they may: all are refused, and none is left."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from examples.workloads.sandbox.bubblewrap import Limits, Ran, Sandbox
from examples.workloads.sandbox.permission import SandboxUnavailable
from examples.workloads.sandbox.system_calls import refusing_filter

SECRET = "sk-not-for-programs"
MARK = "SANDBOX_TEST_MARK"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(Limits(cpu_s=1, memory_mb=128, scratch_mb=1, output_kb=4))


@pytest.fixture(scope="module")
def crowd() -> Sandbox:
    """One whose programs may have four processes."""
    return Sandbox(Limits(cpu_s=1, wall_s=60, memory_mb=128, processes=4))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 60
    while left := [child.info for child in psutil.Process().children() if child.name() in ("bwrap", "setpriv")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def ran(sandbox: Sandbox, program: str, stdin: str = "") -> Ran:
    return sandbox.run(dedent(program), stdin)


def wait_for_the_end_of(mark: str) -> None:
    """Fail if a process whose command line has the mark is still there after a while."""
    deadline = time.monotonic() + 60
    while [p for p in psutil.process_iter(["cmdline"]) if any(mark in word for word in p.info["cmdline"] or ())]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_reads_writes_and_ends_as_any_other(sandbox: Sandbox) -> None:
    assert (found := ran(sandbox, "print(input()[::-1])", "olleh")).ok and found.stdout == "hello\n"
    found = ran(sandbox, "import sys; print('out'); print('bad', file=sys.stderr); sys.exit(3)")
    assert (found.ok, found.code, found.stdout, found.stderr, found.ended) == (False, 3, "out\n", "bad\n", "exit")
    found = ran(sandbox, "open('note', 'w').write('kept'); print(open('/tmp/note').read())")
    assert found.stdout == "kept\n"
    assert "No such file" in ran(sandbox, "open('/tmp/note')").stderr  # the next one begins with an empty scratch
    assert ran(sandbox, "import os, signal; os.kill(os.getpid(), signal.SIGTERM)").code == 128 + 15
    assert not ran(sandbox, "this is no program").ok


def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = ran(sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
        assert "ConnectionRefusedError" in found.stderr
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    found = ran(sandbox, "import socket; socket.create_connection(('1.1.1.1', 53), 2)")
    assert "Network is unreachable" in found.stderr
    found = ran(sandbox, "import socket; print([name for _, name in socket.if_nameindex()])")
    assert found.stdout == "['lo']\n"


def test_a_socket_of_another_process_by_name_is_out_of_reach(sandbox: Sandbox) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0cotune-{os.getpid()}")
        server.listen()
        found = ran(sandbox, f"import socket; socket.socket(socket.AF_UNIX).connect('\\0cotune-{os.getpid()}')")
    assert "ConnectionRefusedError" in found.stderr


def test_neither_variables_with_keys_nor_a_home_nor_this_repository_reach_it(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    found = ran(sandbox, "import os; print(sorted(os.environ), sorted(os.listdir('/')))")
    names, folders = found.stdout.split("] [")
    assert set(names.strip("[").replace("'", "").split(", ")) <= {"PWD", "LC_CTYPE"}
    allowed = {"bin", "etc", "lib", "lib32", "lib64", "libx32", "program.py", "sbin", "tmp", "usr"}
    beyond = set(folders.strip("]\n").replace("'", "").split(", ")) - allowed
    assert beyond <= {sandbox.python.parts[1]}
    listed = ran(
        sandbox, f"import os; print(os.path.exists({str(Path.home())!r}) and os.listdir({str(Path.home())!r}))"
    )
    assert listed.stdout == "False\n" or len(eval(listed.stdout)) == 1  # the way to an interpreter that is in there
    for path in (Path(__file__), Path("/etc/passwd"), Path("/var"), Path("/dev"), Path("/sys")):
        assert "FileNotFoundError" in ran(sandbox, f"import os; os.stat({str(path)!r})").stderr, path


def test_there_is_no_proc_and_no_other_process_to_signal(sandbox: Sandbox) -> None:
    assert "FileNotFoundError" in ran(sandbox, "import os; os.listdir('/proc')").stderr
    found = ran(
        sandbox,
        f"""
        import os, signal
        for pid in (1, {os.getpid()}, {os.getppid()}, -1):
            try:
                os.kill(pid, signal.SIGKILL)
                print("sent", pid)
            except OSError as error:
                print(type(error).__name__, pid)
        print(os.getpid() < 10)
        """,
    )
    # It may signal the first process of its own namespace, which the kernel shields from that.
    lines = found.stdout.splitlines()
    assert lines[1:3] == [f"ProcessLookupError {os.getpid()}", f"ProcessLookupError {os.getppid()}"]
    assert lines[-1] == "True" and found.ok


def test_nothing_but_the_scratch_can_be_written(sandbox: Sandbox) -> None:
    for path in ("/x", "/usr/x", "/program.py", "/usr/lib/x", "/../x"):
        stderr = ran(sandbox, f"open({path!r}, 'a')").stderr
        assert "Read-only file system" in stderr or "Permission denied" in stderr, path


def test_links_out_of_the_scratch_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    found = ran(
        sandbox,
        f"""
        import os
        os.symlink({str(tmp_path)!r}, "link")
        os.symlink("../../../../../../{tmp_path}", "climb")
        for name in ("link", "climb"):
            try:
                print(open(name + "/secret").read())
            except OSError as error:
                print(type(error).__name__)
        """,
    )
    assert found.stdout == "FileNotFoundError\nFileNotFoundError\n"


def test_the_scratch_cannot_be_filled_beyond_its_size(sandbox: Sandbox) -> None:
    found = ran(
        sandbox,
        """
        written = 0
        try:
            for number in range(100):
                with open(str(number), "wb", 0) as file:
                    written += file.write(bytes(1 << 16))
        except OSError as error:
            print(written <= 1 << 20, error.strerror)
        """,
    )
    assert found.stdout == "True No space left on device\n"
    assert (
        "File too large"
        in ran(sandbox, "open('one', 'wb', 0).write(bytes(1 << 20)); open('one', 'ab', 0).write(b'x')").stderr
    )


def test_huge_output_is_cut_and_cannot_fill_the_memory(sandbox: Sandbox) -> None:
    found = ran(sandbox, "import sys; sys.stdout.write('x' * 5000)")
    assert (len(found.stdout), found.cut, found.ok) == (4096, True, True)
    found = ran(sandbox, "import os\nwhile True: os.write(1, bytes(1 << 16)); os.write(2, b'e' * 100)")
    assert found.cut and not found.ok


def test_a_fork_bomb_and_threads_are_refused(sandbox: Sandbox, crowd: Sandbox) -> None:
    assert "BlockingIOError" in ran(sandbox, "import os; os.fork()").stderr
    assert "can't start new thread" in ran(sandbox, "import threading; threading.Thread(target=print).start()").stderr
    bomb = """
    import os, time
    made = 0
    while made < 50:
        try:
            if os.fork() == 0:
                time.sleep(100)
            made += 1
        except BlockingIOError:
            break
    print(made)
    """
    assert ran(crowd, bomb).stdout == "3\n"


def test_nested_namespaces_are_refused(sandbox: Sandbox) -> None:
    program = "import ctypes; print(ctypes.CDLL(None).unshare({flag}))"
    assert [ran(sandbox, program.format(flag=flag)).stdout for flag in (0x10000000, 0x00020000)] == ["-1\n", "-1\n"]


def test_the_first_process_of_the_sandbox_which_no_limit_binds_cannot_be_taken_over(sandbox: Sandbox) -> None:
    found = ran(
        sandbox,
        """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for request in (16, 0x4206):  # PTRACE_ATTACH, PTRACE_SEIZE
            print(libc.ptrace(request, 1, 0, 0), os.strerror(ctypes.get_errno()))
        print(libc.process_vm_writev(1, 0, 0, 0, 0, 0), os.strerror(ctypes.get_errno()))
        for fd in range(3, 64):
            try:
                os.fstat(fd)
                print("open", fd)
            except OSError:
                pass
        """,
    )
    assert found.stdout == "-1 Operation not permitted\n" * 3 and found.ok


def test_other_machines_have_their_own_numbers_and_unknown_ones_no_sandbox() -> None:
    assert len(refusing_filter("x86_64")) == len(refusing_filter("aarch64")) == 8 * (4 + 16 + 3)
    with pytest.raises(SandboxUnavailable, match="not riscv64"):
        refusing_filter("riscv64")


def test_a_daemon_ends_with_the_program_that_started_it(crowd: Sandbox) -> None:
    mark = f"{MARK}_{os.getpid()}"
    daemon = f"""
    import os, sys
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv({str(crowd.python)!r}, ["python", "-I", "-S", "-c", "import time; time.sleep(100) # {mark}"])
        os._exit(0)
    os.wait()
    print("gone")
    """
    found = ran(crowd, daemon)
    assert (found.stdout, found.seconds < 50) == ("gone\n", True)
    wait_for_the_end_of(mark)


def test_a_busy_loop_ends_by_cpu_seconds_even_if_it_ignores_the_signal(sandbox: Sandbox) -> None:
    assert ran(sandbox, "while True: pass").ended == "cpu"
    found = ran(sandbox, "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass")
    assert (found.ended, found.ok) == ("cpu", False)


def test_one_that_waits_ends_by_the_wall_clock_even_if_it_would_outlive_its_parent() -> None:
    short, mark = Sandbox(Limits(wall_s=2)), f"{MARK}_waits_{os.getpid()}"
    program = "import ctypes, time; ctypes.CDLL(None).prctl(1, 0); print('on', flush=True); time.sleep(1000)"
    asleep = short.run(
        f"import os; os.execv({str(short.python)!r}, ['python', '-I', '-S', '-c', {program!r}, {mark!r}])"
    )
    assert (asleep.ended, asleep.stdout, asleep.ok) == ("wall clock", "on\n", False)
    assert 2 <= asleep.seconds < 20
    wait_for_the_end_of(mark)


def test_memory_is_refused_beyond_its_limit(sandbox: Sandbox) -> None:
    assert "MemoryError" in ran(sandbox, "bytearray(200 << 20)").stderr


def test_memory_that_is_in_no_address_space_is_refused(sandbox: Sandbox) -> None:
    assert "PermissionError" in ran(sandbox, "import os; os.memfd_create('x')").stderr
    shared = "import ctypes; libc = ctypes.CDLL(None); print(libc.shmget(0, 1 << 20, 0o1600), libc.msgget(0, 0o1600))"
    assert ran(sandbox, shared).stdout == "-1 -1\n"


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    found = ran(
        sandbox,
        """
        import resource
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
            try:
                resource.setrlimit(limit, (1 << 40, 1 << 40))
                print("raised", limit)
            except ValueError:
                pass
        """,
    )
    assert (found.stdout, found.ok) == ("", True)


def test_programs_run_side_by_side_from_many_threads(sandbox: Sandbox) -> None:
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda number=number: said.append(sandbox.run(f"print({number})").stdout))
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [f"{number}\n" for number in range(8)]


def test_a_limit_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="limits: cpu_s = 0, but it must be more than 0"):
        Limits(cpu_s=0)
