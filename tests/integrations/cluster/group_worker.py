"""What the group's tests start in each actor; no torch, so it is there at once."""

import time
from pathlib import Path

from cotune.errors import GroupError, RunError

RANK = "tests.integrations.cluster.group_worker:Rank"
BROKEN = "tests.integrations.cluster.group_worker:BrokenRank"


class Rank:
    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def who(self, packed: bytes = b"") -> tuple[int, int, bytes]:
        return self.rank, self.size, packed

    def refuse(self, ranks: tuple[int, ...]) -> None:
        if self.rank in ranks:
            raise GroupError(f"Rank {self.rank} refuses.", "Do not ask it.")

    def sleep(self, rank: int, seconds: float) -> None:
        if self.rank == rank:
            time.sleep(seconds)

    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise ZeroDivisionError("nothing is left")
        time.sleep(2.0)
        raise RuntimeError("[gloo/transport] Connection closed by peer")


class BrokenRank(Rank):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        if rank == 1:
            raise RunError("There is no GPU here.")


def alive(pid: int) -> bool:
    """Whether a process, or a thread that outlives its end, runs; one that waits to be reaped does not."""
    process = Path("/proc", str(pid))
    try:
        ended = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not ended or len(list((process / "task").iterdir())) > 1
    except OSError:
        return False
