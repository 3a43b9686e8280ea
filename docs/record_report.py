"""Record the picture of a report page: `.venv/bin/python docs/record_report.py`, with the extra `integrations`.

Draws the demo set into data/demo if it is not there, makes two runs on it, writes a page about them, opens it in the
browser that the tests use, and writes docs/images/report.png. Takes as long as the training, 2 minutes on 2 idle cores.
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from loopfeed import TrainConfig, pack_demo, report_run, train

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import open_browser  # noqa: E402 - found by the line above

DATA = ROOT / "data/demo"
STEPS = 400
WIDTH, HEIGHT, COLOURS = 1100, 1520, 96


def make_page(folder: Path) -> Path:
    """Make two runs in a folder, and write the page about them."""
    if not (DATA / "val/manifest.json").exists():
        pack_demo(str(DATA))
    for name, optimizer, rate in (("sgd", "sgd", 0.05), ("adamw", "adamw", 0.002)):
        config = TrainConfig(
            steps=STEPS, batch=64, data=str(DATA), eval_every_steps=50, schedule="one-cycle", optimizer=optimizer,
            learning_rate=rate, run_dir=str(folder / name),
        )  # fmt: skip
        train(config)
    return report_run([folder / "sgd", folder / "adamw"], folder / "report.html")


def take_picture(page: Path) -> Image.Image:
    """Return the top of a page as a browser shows it, in few colours."""
    with open_browser() as browser:
        shown = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        shown.goto(page.as_uri())
        content = shown.screenshot()
    return Image.open(io.BytesIO(content)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)


def main() -> None:
    """Train, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        page = make_page(Path(folder))
        take_picture(page).save(ROOT / "docs/images/report.png", optimize=True)


if __name__ == "__main__":
    main()
