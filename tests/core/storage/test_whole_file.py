"""Files that appear whole or not at all, and what a full disk is told as."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cotune.cli.main import main
from cotune.storage.whole_file import is_full, rewriting, system_error_message, whole_file


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_what_is_broken_off_leaves_nothing_and_what_was_there_before_stays(
    tmp_path: Path, error: BaseException
) -> None:
    (tmp_path / "old").write_text("before")
    for name in ("old", "new"):
        with pytest.raises(type(error)), whole_file(tmp_path / name) as file:
            file.write(b"half")
            raise error
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "before"


def test_a_link_is_followed_and_a_device_written_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with whole_file(tmp_path / "link") as file:
        file.write(b"x")
    assert (tmp_path / "there").read_text() == "x" and (tmp_path / "link").is_symlink()
    reading, writing = os.pipe()
    with whole_file(f"/dev/fd/{writing}") as file:
        file.write(b"through")
    assert os.read(reading, 7) == b"through"
    for end in (reading, writing):
        os.close(end)


def test_a_full_disk_is_named_with_its_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, whole_file("/dev/full") as file:
        file.write(b"x")
    assert system_error_message(caught.value) == (
        "The disk of /dev/full is full: no more can be written. Free some space, then run the command again."
    )
    assert is_full(ValueError("I/O error: No space left on device (os error 28)")), "as safetensors says it"
    assert not is_full(FileNotFoundError(errno.ENOENT, "No such file or directory"))


def test_a_command_says_that_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cotune.storage.sqlite_store import SqliteStore

    SqliteStore.open(tmp_path).close()
    for command in (["show", str(tmp_path), "--html"], ["otel", "export", str(tmp_path), "--content", "--out"]):
        main([*command, "/dev/full"])
    assert "cotune show: The disk of /dev/full is full" in capsys.readouterr().err


COUNT = """
import sys
from pathlib import Path
from cotune.storage.whole_file import rewriting
file = Path(sys.argv[1])
for _ in range(50):
    with rewriting(file):
        file.write_text(str(int(file.read_text()) + 1))
"""


def test_no_change_is_lost_that_threads_and_processes_make_at_once(tmp_path: Path) -> None:
    file = tmp_path / "count"
    file.write_text("0")

    def count() -> None:
        for _ in range(50):
            with rewriting(file):
                file.write_text(str(int(file.read_text()) + 1))

    process = subprocess.Popen([sys.executable, "-c", COUNT, str(file)])
    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert process.wait() == 0
    assert file.read_text() == "200"
