"""Time of `import cotune` in a fresh interpreter, over that of an empty one. Last line: JSON, in seconds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

REPEATS = 11


def seconds(code: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started


def main() -> None:
    for code in ("pass", "import cotune"):
        seconds(code)
    empty = [seconds("pass") for _ in range(REPEATS)]
    loaded = [seconds("import cotune") for _ in range(REPEATS)]
    result = {
        "import_seconds": round(statistics.median(loaded) - statistics.median(empty), 4),
        "with_interpreter_seconds": round(statistics.median(loaded), 4),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
