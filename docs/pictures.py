"""The pictures of README and docs, made from runs.

    make demo
    python -m docs.pictures runs/demo/run                    # viewer.png: the page of a run
    python -m docs.pictures runs/demo/run --of candidates    # candidates.png: a call with its candidates and rewards

    cotune train benchmarks.replay:OUTCOME --config examples/plan_path/train.toml --model runs/demo/base \\
        --tasks runs/demo/tasks.jsonl --plan replay -k 4 --steps 2 --tasks-per-step 8 --out runs/replay
    python -m docs.pictures runs/replay --of replay          # replay.png: the candidates of a fork

    python -m benchmarks.blame_applications --applications flow_of_three --parts planted --rates 0.6 --keep runs/planted
    python -m docs.pictures runs/planted/flow_of_three-planted-0.6-drawn-0 --of blame  # blame.png: who is at fault

    python -m examples.judged.demo
    python -m docs.pictures runs/judged/run --of judges      # judges.png: candidates that a judge has ranked

Writes docs/assets/NAME.png, by headless Chromium. Needs Debian's packages chromium and chromium-driver, which the tests
need too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from benchmarks.viewer import browser
from cotune.integrations.web.viewer.server import viewing
from cotune.reading.groups import step_groups
from cotune.reading.run import OpenedRun
from cotune.records.ids import candidate_id
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store

ASSETS = Path(__file__).parent / "assets"
LARGEST = 200_000
"""Bytes of a picture that is checked in."""


def rewarded_call(run: Path) -> str:
    """The page of a call of the last training step whose candidates got different rewards."""
    with open_store(run, read_only=True) as store:
        for episode in store.figures().episode_ids(EpisodeFilters(phase="train"), 50):
            for call in store.calls(episode):
                rewards = store.rewards([candidate_id(call.id, one.index) for one in call.candidates])
                if len({tuple(sorted(named.items())) for named in rewards.values()}) > 1:
                    return f"run/{run.name}/call/{call.id}"
    raise SystemExit(f"{run}: no call has candidates with different rewards.")


def widest_group(run: Path) -> str:
    """The page of the group of training whose rewards differ most."""
    with OpenedRun(run) as opened:
        steps = opened.figures.steps("train")
        found = [(step, group) for step in steps for group in step_groups(opened, step).groups]
    step, group = max(found, key=lambda one: one[1].spread)
    return f"run/{run.name}/group/{group.id}?step={step + 1}"


PICTURES: Mapping[str, tuple[Callable[[Path], str], int]] = {
    "viewer": (lambda run: "", 930),
    "candidates": (rewarded_call, 930),
    "replay": (widest_group, 760),
    "judges": (widest_group, 930),
    "blame": (lambda run: f"run/{run.name}/blame", 620),
}
"""By name, the address of the page that a picture shows, and the height of the window."""


def picture(run: Path, target: Path, page: str = "", size: tuple[int, int] = (1280, 930)) -> None:
    """Write a page of the viewer as a PNG with 256 colours, small enough to be checked in."""
    with tempfile.TemporaryDirectory() as profile, viewing([run]) as server:
        driver = browser(profile)
        try:
            driver.set_window_size(*size)
            driver.get(f"{server.url.rstrip('/')}/{page}")
            driver.save_screenshot(str(target))
        finally:
            driver.quit()
    Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, such as runs/demo/run")
    parser.add_argument("--of", choices=PICTURES, default="viewer", help="what to show (default: %(default)s)")
    options = parser.parse_args(arguments)
    page, height = PICTURES[options.of]
    picture(options.run, ASSETS / f"{options.of}.png", page(options.run), (1280, height))


if __name__ == "__main__":
    main()
