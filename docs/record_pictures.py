"""Record the pictures of the README from a real run: `.venv/bin/python docs/record_pictures.py`, on Linux.

Draws the demo set into data/demo if it is not there, trains on it in a terminal of 84 columns, and writes

- docs/images/terminal.svg, the screen as it stands in the middle of the run and at its end,
- docs/images/loss.svg, the loss of every step, out of the run's loss.jsonl.

Takes as long as the training, 2 minutes on 2 idle cores. Needs neither a network nor more than Loopfeed's own packages.
"""

import codecs
import fcntl
import io
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
IMAGES = Path(__file__).parent / "images"
COLUMNS = 84

STEPS, MIDDLE = 1000, 400  # of the recipe
ARGUMENTS = ["--recipe", "demo", "--data", "data/demo", "--eval-every", "250"]
# An SVG that an <img> shows loads no font: any of the reader's own monospaced ones will do, set to rich's widths.
_FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def run_in_terminal(command: list[str]) -> str:
    """Run a command on a pseudo-terminal and return all that it wrote; raises CalledProcessError where it fails."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    settings = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, env=settings)
    os.close(slave)
    decoder, output = codecs.getincrementaldecoder("utf-8")(), ""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as EIO
            break
        if not data:
            break
        output += decoder.decode(data)
    os.close(master)
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, command, output)
    return output


def screen_of(output: str) -> list[str]:
    """Return the lines that a terminal shows after `output`, colours left in; knows what rich's progress line uses."""
    lines = [""]
    row = 0
    for part in re.split(r"(\r|\n|\x1b\[2K|\x1b\[\d*A|\x1b\[\?\d+[hl])", output):
        if part == "\n":
            row += 1
            if row == len(lines):
                lines.append("")
        elif part == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part):
            row -= int(part[2:-1] or 1)
        elif part != "\r" and not re.fullmatch(r"\x1b\[\?\d+[hl]", part):
            lines[row] += part
    return lines


def draw_screen(command: str, output: str) -> str:
    """Return an SVG of the screen in the middle of the run, and of what came after it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", lambda code: "\0" * len(code.group()), output)
    steps = re.finditer(rf"(\d+)\0*/\0*{STEPS}", plain)
    middle = next(match.end() for match in steps if int(match.group(1)) >= MIDDLE)
    ends = [place for place in (output.find("\r", middle), output.find("\n", middle)) if place >= 0]
    before = screen_of(output[: min(ends)])
    end = [line for line in screen_of(output) if line.strip()]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {command}", style="bold"))
    shown = [line for line in before if line.strip()]
    for line in [*shown, None, *end[-4:]]:
        console.print(Text("        ⋮", style="dim") if line is None else Text.from_ansi(line))
    svg = console.export_svg(title="run-train", theme=MONOKAI, unique_id="loopfeed")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"font-family: [^;]+;", f"font-family: {_FONT};", svg)


def draw_losses(path: Path) -> str:
    """Return an SVG of the loss of every step and of its running mean."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    losses = [record["loss"] for record in records]
    left, top, width, height = 60, 20, 620, 240
    most = 2.5

    def place(step: float, loss: float) -> str:
        return f"{left + width * step / len(losses):.1f},{top + height * (1 - min(loss, most) / most):.1f}"

    smooth, mean = [], losses[0]
    for loss in losses:
        mean += 0.05 * (loss - mean)
        smooth.append(mean)
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 310" font-family="sans-serif" font-size="13">',
        '<rect width="720" height="310" fill="#ffffff"/>',
    ]
    for tick in (0, 0.5, 1, 1.5, 2, 2.5):
        y = top + height * (1 - tick / most)
        lines.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="#e0e4ea"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="#445">{tick:g}</text>')
    for step in range(0, len(losses) + 1, 200):
        x = left + width * step / len(losses)
        lines.append(f'<text x="{x}" y="{top + height + 20}" text-anchor="middle" fill="#445">{step:,}</text>')
    for values, colour, stroke in ((losses, "#9dbbe8", 1), (smooth, "#1f5fbf", 2)):
        points = " ".join(place(step + 1, loss) for step, loss in enumerate(values))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{stroke}"/>')
    middle = left + width / 2
    lines += [
        f'<text x="{middle}" y="{top + height + 42}" text-anchor="middle" fill="#223">step</text>',
        f'<text x="{left + width - 8}" y="{top + 18}" text-anchor="end" fill="#223">'
        "loss of each step, and its running mean: ResNet-8 on the demo set</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, and write both pictures."""
    commands = Path(sys.executable).parent
    if not (ROOT / "data/demo/val/manifest.json").exists():
        subprocess.run([commands / "preprocess-imagenet", "--demo", "data/demo"], cwd=ROOT, check=True)
    run = Path(tempfile.mkdtemp()) / "demo"
    # A plain path on the picture, and nothing left of the run.
    shown = ROOT / "runs/demo"
    if shown.exists():
        raise SystemExit(f"record_pictures: {shown} exists, and the recorded run is to have that name: move it away")
    output = run_in_terminal([str(commands / "run-train"), *ARGUMENTS, "--run-dir", "runs/demo"])
    shutil.move(shown, run)
    (run / "terminal.txt").write_text(output, encoding="utf-8")
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "terminal.svg").write_text(draw_screen(f"run-train {' '.join(ARGUMENTS)}", output), encoding="utf-8")
    (IMAGES / "loss.svg").write_text(draw_losses(run / "loss.jsonl"), encoding="utf-8")
    shutil.rmtree(run.parent)


if __name__ == "__main__":
    main()
