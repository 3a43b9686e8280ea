"""Draw the diagrams of the concepts into docs/images: `python docs/draw_diagrams.py`. Needs Python alone."""

from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).parent / "images"

INK, QUIET, LINE = "#1c2733", "#5b6b7b", "#8a99a8"
HOST, DEVICE, CROSSING, DISK = "#e8f1fb", "#e9f6ec", "#fdf0dc", "#f1eefa"
EDGES = {HOST: "#7aa7d9", DEVICE: "#7dbb8a", CROSSING: "#dfa94f", DISK: "#a796d6", "#ffffff": LINE}


@dataclass
class Drawing:
    """An SVG in the making.

    Attributes:
        width, height: in pixels.
        title: for those who cannot see it.
    """

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, text: str = "", fill: str = "#ffffff", **more: Any) -> None:
        """Draw a rectangle with lines of text in its middle."""
        dash = ' stroke-dasharray="5 4"' if more.get("dashed") else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="7" fill="{fill}" '
            f'stroke="{EDGES.get(fill, LINE)}" stroke-width="1.4"{dash}/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 5 + 18 * (number - (len(lines) - 1) / 2), line, anchor="middle", **more)

    def frame(self, x: float, y: float, w: float, h: float, label: str, fill: str) -> None:
        """Draw a room with its name in the upper left corner."""
        self.box(x, y, w, h, fill=fill)
        self.text(x + 12, y + 20, label, colour=QUIET, size=13, bold=True)

    def text(self, x: float, y: float, text: str, **more: Any) -> None:
        """Write a line."""
        anchor, colour, size = more.get("anchor", "start"), more.get("colour", INK), more.get("size", 14)
        weight = ' font-weight="600"' if more.get("bold") else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}>'
            f"{escape(text)}</text>"
        )

    def arrow(self, *points: tuple[float, float], label: str = "", above: float = 7, colour: str = INK) -> None:
        """Draw an arrow through points, its label over the middle of its first part."""
        path = " ".join(f"{x},{y}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.7" marker-end="url(#head)"/>'
        )
        if label:
            (x, y), (to_x, to_y) = points[0], points[1]
            self.text((x + to_x) / 2, (y + to_y) / 2 - above, label, anchor="middle", colour=QUIET, size=13)

    def save(self, name: str) -> None:
        """Write the file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" '
            "font-family=\"system-ui, 'DejaVu Sans', sans-serif\">\n"
            f"<title>{escape(self.title)}</title>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            f'orient="auto-start-reverse"><path d="M0 0 L10 5 L0 10 z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>\n'
        )
        (IMAGES / f"{name}.svg").write_text(head + "\n".join(self.parts) + "\n</svg>\n", encoding="utf-8")


def overview() -> None:
    """The way from images to losses."""
    d = Drawing(860, 300, "The way of the data")
    d.frame(10, 20, 190, 260, "offline", DISK)
    d.box(30, 60, 150, 44, "images (JPEG …)")
    d.box(30, 138, 150, 44, "preprocess-imagenet", size=13)
    d.box(30, 216, 150, 44, "shards (Zarr 3)")
    d.arrow((105, 104), (105, 138))
    d.arrow((105, 182), (105, 216))
    d.frame(230, 20, 370, 260, "host", HOST)
    d.box(250, 216, 130, 44, "reader threads")
    d.box(450, 216, 130, 44, "ring of batches")
    d.arrow((180, 238), (250, 238))
    d.arrow((380, 238), (450, 238))
    d.box(250, 60, 130, 62, "run folder\nterminal")
    d.box(450, 60, 130, 62, "a queue and a\nthread a sink")
    d.arrow((450, 91), (380, 91))
    d.text(415, 160, "control-run, signals", anchor="middle", colour=QUIET, size=13)
    d.arrow((490, 166), (515, 216))
    d.frame(680, 20, 170, 260, "device", DEVICE)
    d.box(700, 60, 130, 200, "one program:\n\nlax.while_loop\nover the whole\ntraining")
    d.arrow((580, 238), (700, 238), label="INFEED")
    d.arrow((700, 91), (580, 91), label="OUTFEED")
    d.save("overview")


def loop() -> None:
    """The loops of the program."""
    d = Drawing(860, 330, "The loops of the program")
    d.frame(10, 10, 840, 310, "while: steps are left, and nothing asks to stop", DEVICE)
    d.frame(30, 45, 590, 255, "while: the next boundary is not reached", "#ffffff")
    steps = ["pull a batch and\nthe control word", "unpack, augment,\nmake targets", "loss and\ngradient", "update"]
    for number, words in enumerate(steps):
        x = 46 + 142 * number
        d.box(x, 95, 126, 62, words, fill=CROSSING if number == 0 else HOST, size=12.5)
        if number:
            d.arrow((x - 16, 126), (x, 126))
    d.box(472, 205, 126, 62, "push loss and\nlearning rate", fill=CROSSING, size=13)
    d.arrow((535, 157), (535, 205))
    d.arrow((472, 236), (109, 236), (109, 157))
    d.text(290, 228, "next step", anchor="middle", colour=QUIET, size=13)
    d.frame(645, 45, 190, 255, "at a boundary", "#ffffff")
    d.box(660, 85, 160, 76, "evaluate the whole\nsplit (a loop of its\nown), push counts", fill=HOST, size=13)
    d.box(660, 205, 160, 62, "push a snapshot\nof the state", fill=CROSSING, size=13)
    d.arrow((740, 161), (740, 205))
    d.arrow((598, 236), (632, 236), (632, 123), (660, 123))
    d.save("loop")


def crossings() -> None:
    """The ring, a pull and a push."""
    d = Drawing(860, 360, "The infeed and the outfeed")
    d.frame(10, 10, 520, 340, "host", HOST)
    d.frame(640, 10, 210, 340, "device", DEVICE)
    for number in (0, 1):
        d.box(30, 58 + 52 * number, 120, 40, "reader thread", size=13)
    d.text(345, 42, "ring, --prefetch batches", anchor="middle", colour=QUIET, size=13)
    states = ["ready\nstep 7", "ready\nstep 8", "filling\nstep 9", "empty"]
    for number, words in enumerate(states):
        fill = (CROSSING, CROSSING, "#ffffff", "#ffffff")[number]
        d.box(210 + 70 * number, 66, 62, 70, words, fill=fill, size=12, dashed=number == 3)
    d.arrow((150, 78), (186, 78), (186, 154), (381, 154), (381, 136))
    d.arrow((150, 130), (186, 130))
    d.box(660, 60, 170, 62, "pull(step 7)", fill=CROSSING)
    d.arrow((241, 66), (241, 52), (500, 52), (500, 80), (660, 80))
    d.text(585, 72, "batch of step 7", anchor="middle", colour=QUIET, size=13)
    d.box(30, 178, 170, 40, "signals, control-run", size=13)
    d.box(270, 176, 225, 46, "control word: stop, evaluate,\nsnapshot, rate", fill=CROSSING, size=13)
    d.arrow((200, 198), (270, 198))
    d.arrow((495, 198), (560, 198), (560, 106), (660, 106))
    d.box(660, 172, 170, 52, "train on it", fill=HOST)
    d.arrow((745, 122), (745, 172))
    d.arrow((745, 224), (745, 268))
    d.box(660, 268, 170, 52, "push(loss)", fill=CROSSING)
    for number, words in enumerate(("loss.jsonl", "terminal", "a sink of yours")):
        y = 238 + 36 * number
        d.box(30, y, 130, 29, words, size=13, fill=DISK if number == 0 else "#ffffff")
        d.box(210, y, 120, 29, "queue, thread", size=12)
        d.arrow((210, y + 14.5), (160, y + 14.5))
        d.arrow((420, 294), (372, 294), (372, y + 14.5), (330, y + 14.5))
    d.box(420, 274, 90, 40, "record", size=13)
    d.arrow((660, 294), (510, 294))
    d.save("crossings")


def order() -> None:
    """The stream of positions."""
    d = Drawing(860, 250, "The stream of positions")
    epochs = [(3, 0, 5, 2, 4, 1), (5, 2, 0, 1, 3, 4), (1, 4, 3, 0, 2, 5)]
    colours = [HOST, DEVICE, DISK]
    side, left = 45, 25
    d.text(left, 32, "position p", colour=QUIET, size=13)
    d.text(left, 158, "image = permutation(seed, epoch)(p mod N), N = 6", colour=QUIET, size=13)
    for epoch, images in enumerate(epochs):
        for number, image in enumerate(images):
            position = 6 * epoch + number
            x = left + side * position
            d.text(x + side / 2, 56, str(position), anchor="middle", colour=QUIET, size=12)
            d.box(x + 2, 64, side - 4, 40, str(image), fill=colours[epoch])
        middle = left + side * (6 * epoch + 3)
        d.text(middle, 128, f"epoch {epoch}", anchor="middle", size=13)
    for step in range(4):
        x = left + 4 * side * step
        d.parts.append(
            f'<path d="M{x + 4} 178 v12 h{4 * side - 8} v-12" fill="none" '
            f'stroke="{EDGES[CROSSING]}" stroke-width="2.2"/>'
        )
        d.text(x + 2 * side, 212, f"step {step}, a batch of 4", anchor="middle", size=13)
    words = "step 1 holds the end of epoch 0 and the beginning of epoch 1"
    d.text(left, 238, words, colour=QUIET, size=13)
    d.save("order")


def chunks() -> None:
    """Time lines with and without chunks."""
    d = Drawing(860, 230, "Chunks")
    d.text(20, 32, "--chunk 1", bold=True)
    x = 20.0
    for number in range(4):
        d.box(x, 46, 40, 40, "pull", fill=CROSSING, size=12)
        d.box(x + 42, 46, 76, 40, f"step {number}", fill=DEVICE, size=13)
        d.box(x + 120, 46, 42, 40, "push", fill=CROSSING, size=12)
        x += 166
    d.text(20, 130, "--chunk 4", bold=True)
    d.box(20, 144, 56, 40, "pull 4", fill=CROSSING, size=12)
    for number in range(4):
        d.box(78 + 78 * number, 144, 76, 40, f"step {number}", fill=DEVICE, size=13)
    d.box(390, 144, 60, 40, "push 4", fill=CROSSING, size=12)
    d.arrow((690, 66), (840, 66))
    d.text(765, 90, "time", anchor="middle", colour=QUIET, size=13)
    words = "Where a step takes much longer than the crossings beside it, both are equally fast."
    d.text(20, 214, words, colour=QUIET, size=13)
    d.save("chunks")


def snapshots() -> None:
    """A snapshot beside the loop."""
    d = Drawing(860, 230, "A snapshot is written while the program goes on")
    d.text(20, 55, "device", colour=QUIET, size=13, bold=True)
    for number in range(6):
        step = 498 + number
        d.box(100 + 114 * number + (46 if number > 2 else 0), 30, 110, 40, f"step {step}", fill=DEVICE, size=13)
    d.box(442, 30, 42, 40, "push", fill=CROSSING, size=12)
    d.text(20, 145, "a thread", colour=QUIET, size=13, bold=True)
    d.arrow((463, 70), (463, 118))
    words = ["logs to\nthe disk", "arrays and\ndigests", "whole: named\nsnapshots/500"]
    for number, text in enumerate(words):
        d.box(450 + 130 * number, 118, 120, 52, text, fill=DISK, size=13)
    d.text(450, 200, "killed before the last of these: the earlier snapshot counts", colour=QUIET, size=13)
    d.save("snapshots")


def convolutions() -> None:
    """Where XLA's fast kernels for convolutions are used."""
    d = Drawing(860, 270, "Convolutions inside and outside of a loop, on a CPU")
    d.text(250, 30, "entry computation", bold=True, anchor="middle")
    d.text(640, 30, "body of a while loop", bold=True, anchor="middle")
    d.text(20, 90, "lax.conv_…", size=13)
    d.text(20, 110, "gradients", size=13, colour=QUIET)
    d.box(130, 60, 240, 66, "rewritten by XLA:\nfast kernels", fill=DEVICE)
    d.box(520, 60, 240, 66, "a naive nest of loops", fill="#fbe6e4")
    d.text(20, 190, "models.", size=13)
    d.text(20, 208, "convolution", size=13)
    d.box(130, 160, 630, 80, fill=DEVICE)
    d.text(445, 192, "matrix products over patches, rows or columns,", anchor="middle")
    d.text(445, 214, "or canonical convolutions, chosen by shape: fast in both", anchor="middle")
    d.save("convolutions")


def main() -> None:
    """Draw them all."""
    IMAGES.mkdir(exist_ok=True)
    for draw in (overview, loop, crossings, order, chunks, snapshots, convolutions):
        draw()


if __name__ == "__main__":
    main()
