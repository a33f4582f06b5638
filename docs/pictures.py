"""The picture of the viewer in README and docs, made from a run.

    make demo
    python -m docs.pictures runs/demo/run

Writes docs/assets/viewer.png: the run page in headless Chromium. Needs Debian's packages chromium and chromium-driver,
which the tests need too.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from benchmarks.viewer import browser
from cotune.integrations.web.viewer.server import viewing

ASSETS = Path(__file__).parent / "assets"


def viewer_picture(run: Path, target: Path, size: tuple[int, int] = (1280, 930)) -> None:
    """Write the page of a run as a PNG with 256 colours, small enough for a README."""
    with tempfile.TemporaryDirectory() as profile, viewing([run]) as server:
        driver = browser(profile)
        try:
            driver.set_window_size(*size)
            driver.get(server.url)
            driver.save_screenshot(str(target))
        finally:
            driver.quit()
    Image.open(target).convert("RGB").quantize(256).save(target, optimize=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder, such as runs/demo/run")
    viewer_picture(parser.parse_args(arguments).run, ASSETS / "viewer.png")


if __name__ == "__main__":
    main()
