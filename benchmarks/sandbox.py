"""Programs in the sandbox of the examples: how many a second, and the memory of the process that runs them.

    python -m benchmarks.sandbox [--programs 1000] [--threads 2]

Every program reads a number and prints its square. The last line is JSON: programs per second, seconds, the growth of
this process's memory from the first tenth on, in MB, and processes that are left.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor

import psutil

from examples.workloads.sandbox.bubblewrap import Sandbox

PROGRAM = "print(int(input()) ** 2)"


def main() -> None:
    """Run them all and print the figures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    sandbox, process, early = Sandbox(at_once=options.threads), psutil.Process(), options.programs // 10
    began, rss = time.perf_counter(), 0
    with ThreadPoolExecutor(options.threads) as pool:
        answers = pool.map(lambda number: sandbox.run(PROGRAM, str(number)).stdout, range(options.programs))
        for number, answer in enumerate(answers):
            assert answer == f"{number**2}\n", (number, answer)
            if number == early:
                rss = process.memory_info().rss
    seconds = time.perf_counter() - began
    figures = {
        "programs": options.programs,
        "per_second": round(options.programs / seconds, 1),
        "seconds": round(seconds, 1),
        "memory_growth_mb": round((process.memory_info().rss - rss) / 1e6, 1),
        "processes_left": sum(child.name() == "bwrap" for child in process.children(recursive=True)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
