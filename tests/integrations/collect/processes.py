"""Applications and collectors as processes that can be killed."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from cotune.records.ids import address
from cotune.storage.open_store import open_store

APP = """
import sys, time
from cotune.integrations.collect.sender import sender
from cotune.collect.sink import CollectorRecords
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Task

url, seconds, pause = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
sink = CollectorRecords(sender(url, "desk"))
end = time.monotonic() + seconds
while time.monotonic() < end:
    episode = LiveEpisode(sink, Task(id="t", input=None), workflow="w")
    for role in ("planner", "solver"):
        said = f"{episode.id} {role}"
        call = episode.start(CallerContext(role, "test"), {"messages": [{"role": "user", "content": said}]})
        message = {"role": "assistant", "content": said}
        call.finish(Answer(candidates=(Candidate(index=0, text=said, message=message),), chosen=0))
        print(call.id, flush=True)
    episode.end("ok", rewards={"team": 1.0})
    print(episode.id, flush=True)
    time.sleep(pause)
"""


def _limited(most: int | None) -> object:
    """What makes the disk full for a process: no file of more than so many bytes."""
    return None if most is None else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


class App:
    """An application that records two calls an episode, and tells the id of each record once it has its answer."""

    def __init__(self, url: str, seconds: float, pause: float = 0.005, most: int | None = None) -> None:
        command = [sys.executable, "-c", APP, url, str(seconds), str(pause)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_limited(most))  # type: ignore[arg-type]
        self.told: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n") and len(line) == 27:
                self.told.append(line.strip())

    def wait_for(self, records: int) -> None:
        """Until so many records have been told."""
        while len(self.told) < records and self.process.poll() is None:
            time.sleep(0.005)

    def end(self, kill: bool = False) -> list[str]:
        """The ids that it has told, once it has ended."""
        if kill:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        return self.told


class CollectorProcess:
    """`cotune collect` as a process; `start` after `stop` uses the same port."""

    def __init__(self, store: str, port: int) -> None:
        self.store = store
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, most: int | None = None, *more: str) -> None:
        command = [sys.executable, "-m", "cotune", "collect", "--store", self.store, "--port", str(self.port), *more]
        self.process = subprocess.Popen(command, preexec_fn=_limited(most), stdout=subprocess.DEVNULL)  # type: ignore[arg-type]
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            time.sleep(0.02)
        raise AssertionError("the collector did not start")

    def stop(self, kill: bool = False) -> int:
        assert self.process is not None
        (self.process.kill if kill else self.process.terminate)()
        return self.process.wait()


@contextlib.contextmanager
def collecting(store: str, port: int) -> Iterator[CollectorProcess]:
    made = CollectorProcess(store, port)
    try:
        yield made
    finally:
        if made.process is not None and made.process.poll() is None:
            made.stop(kill=True)


def adopted(url: str, spool: Path, seconds: float = 60.0) -> list[str]:
    """Run one more process of the application until nothing is left in the spool; what it has recorded itself."""
    told: list[str] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        told += App(url, 0.2).end()
        if not (left := list(spool.glob(f"desk-{address(url.encode())[:8]}/*.frames"))):
            return told
    raise AssertionError(f"left: {[(path.name, path.stat().st_size) for path in left]}")


def check(store: str, told: Sequence[str]) -> int:
    """Hold that every record that was told is stored, once, and whole; how many there are."""
    with open_store(store, read_only=True) as read:
        episodes = [episode.id for episode in read.episodes()]
        calls = [call for id in {*episodes, *read.figures().unfinished()} for call in read.calls(id)]
        ids = [*episodes, *(call.id for call in calls)]
        assert len(ids) == len(set(ids))
        assert sorted(set(told) - set(ids)) == []
        for call in calls:
            assert read.message(call.messages[0])["content"] == call.candidates[0].text
        assert all(read.rewards([id])[id] == {"team": 1.0} for id in episodes)
    return len(ids)
