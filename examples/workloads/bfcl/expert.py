"""An expert behind an OpenAI-compatible address, who knows the right calls of the tasks to train on.

python -m examples.workloads.bfcl.expert --port 8100
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from examples.tool_agent.provider import Answers, serving
from examples.workloads.bfcl.tasks import Request, make_tasks


def expert(tasks: Iterable[Request]) -> Answers:
    """Says the tool or the call that comes next in the right calls of a request, `done` after the last."""
    right = dict(pair for task in tasks for pair in zip(task["requests"], task["truth"], strict=True))

    def answers(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        what, request, *so_far = messages[-1]["content"].split("\n")
        left = list(right[request])
        for line in so_far:
            if left and line.startswith(f"{left[0]} -> "):
                del left[0]
        call = left[0] if left else "done"
        return {"role": "assistant", "content": call.partition("(")[0] if what.startswith("Tools: ") else call}

    return answers


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=8100)
    with serving(parser.parse_args().port, expert(make_tasks("turns"))) as url:
        print(f"OPENAI_BASE_URL={url}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
