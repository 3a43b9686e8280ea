"""The report page in a browser: nothing fails or is loaded, values under the pointer, widths, schemes and print."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from loopfeed import report_run
from tests.browser import open_browser
from tests.report_runs import OTHER, RUN, make_runs
from tests.toy import Linear

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.integration

PHONE, DESKTOP = 390, 1440
PAGES = ("one", "two")
# Every element with text of its own: its colour, and the nearest background behind it.
TEXT_COLOURS = """() => {
  const opaque = (colour) => !/^(transparent|rgba\\(.*, 0\\))$/.test(colour);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const numbers = (colour) => {
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const texts = [...element.childNodes].filter((each) => each.nodeType === 3 && each.data.trim());
    if (!texts.length || element.tagName === "SCRIPT" || !element.checkVisibility()) continue;
    let behind = element;
    while (behind && !opaque(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
    const style = getComputedStyle(element);
    found.push({
      text: texts[0].data.trim().slice(0, 40),
      colour: numbers(element instanceof SVGElement ? style.fill : style.color),
      ground: numbers(behind ? getComputedStyle(behind).backgroundColor : "white"),
    });
  }
  return found;
}"""
# What sticks out of the page at its right, except in what scrolls within itself.
OUTSIDE = """() => [...document.body.querySelectorAll("*")].filter((each) =>
  !each.closest(".scroll") && !each.closest("svg") && each.checkVisibility()
  && each.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5
).map((each) => each.outerHTML.slice(0, 80))"""


@dataclass
class Shown:
    """A page in the browser, and what happened in it."""

    page: "Page"
    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def files(browser, tmp_path_factory) -> dict[str, Path]:
    """Return the pages about one run and about two; without a browser, the tests are skipped before any run."""
    folder = tmp_path_factory.mktemp("place")
    make_runs(folder)
    runs = {"one": [folder / RUN], "two": [folder / RUN, folder / OTHER]}
    return {name: report_run(paths, folder / f"{name}.html", model=Linear()) for name, paths in runs.items()}


@contextmanager
def shown(browser: "Browser", file: Path, *, width: int = DESKTOP, scheme: Any = "light") -> Iterator[Shown]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    found = Shown(context.new_page())
    page = found.page
    page.on("console", lambda message: found.console.append(message.text))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("dialog", lambda dialog: found.dialogs.append(dialog.message))
    page.on("dialog", lambda dialog: dialog.dismiss())
    page.goto(file.as_uri(), timeout=30_000)
    yield found
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_nothing_fails_and_nothing_is_loaded(browser, files, name):
    with shown(browser, files[name]) as found:
        assert found.page.evaluate("document.images.length") > 0
        assert found.page.evaluate("[...document.images].every((each) => each.complete && each.naturalWidth > 0)")
        assert (found.console, found.errors, found.dialogs) == ([], [], [])
        assert [url for url in found.requests if not url.startswith("data:")] == [files[name].as_uri()]


def test_the_policy_stops_network_and_added_scripts(browser, files):
    """What an escape that failed could do."""
    with shown(browser, files["one"]) as found:
        stopped = found.page.evaluate("""async () => {
          const names = [];
          document.addEventListener("securitypolicyviolation", (event) => names.push(event.effectiveDirective));
          await fetch("http://127.0.0.1:9/").catch(() => 0);
          const script = document.createElement("script");
          script.textContent = "alert(1)";
          const picture = document.createElement("img");
          picture.src = "http://127.0.0.1:9/x.png";
          document.body.append(script, picture);
          document.body.setAttribute("onclick", "alert(2)");
          document.body.click();
          await new Promise((done) => setTimeout(done, 50));
          return names.sort();
        }""")
        assert stopped == ["connect-src", "img-src", "script-src-attr", "script-src-elem"]
        assert found.dialogs == []


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_the_values_under_the_pointer_are_those_of_the_step(browser, files, width):
    with shown(browser, files["two"], width=width) as found:
        charts = found.page.locator("figure.chart").all()
        assert len(charts) >= 6
        for chart in charts:
            data = json.loads(chart.locator("script").text_content() or "")
            outputs, step = chart.locator(".value"), chart.locator(".step")
            at_rest = outputs.all_text_contents()
            plot = chart.locator(".plot")
            plot.scroll_into_view_if_needed()
            box = plot.bounding_box()
            assert box is not None
            for wanted in (4, 8, 12):
                # Half a pixel to the left: the last step is at the edge.
                found.page.mouse.move(box["x"] + box["width"] * wanted / data["last"] - 0.5, box["y"] + 30)
                assert step.text_content() == str(wanted)
                values = [line["y"][line["x"].index(wanted)] for line in data["lines"]]
                assert list(map(float, outputs.all_text_contents())) == values
            assert chart.locator(".cursor").evaluate("each => getComputedStyle(each).visibility") == "visible"
            found.page.mouse.move(0, 0)
            assert outputs.all_text_contents() == at_rest


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [320, PHONE, DESKTOP])
def test_nothing_sticks_out_of_the_page(browser, files, name, width):
    with shown(browser, files[name], width=width) as found:
        found.page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        assert found.page.evaluate("document.documentElement.scrollWidth") == width
        assert found.page.evaluate(OUTSIDE) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_enough_contrast(browser, files, scheme):
    with shown(browser, files["two"], scheme=scheme) as found:
        found.page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        texts = found.page.evaluate(TEXT_COLOURS)
    assert len(texts) > 200
    # WCAG 2.2, 1.4.3: at least 4.5 for text of this size.
    low = [(each, contrast(each["colour"], each["ground"])) for each in texts]
    assert [each for each in low if each[1] < 4.5] == []


def contrast(one, other):
    """Return the contrast ratio of two sRGB colours, as WCAG 2.2 defines it."""

    def luminance(colour):
        parts = np.array(colour) / 255
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def picture_of(page: "Page") -> np.ndarray:
    """Return the brightness of the pixels of the whole page, int16 [H, W]."""
    return np.asarray(Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("L")).astype(np.int16)


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_light_and_dark_look_different_and_neither_is_blank(browser, files, width):
    pictures = {}
    for scheme in ("light", "dark"):
        with shown(browser, files["one"], width=width, scheme=scheme) as found:
            pictures[scheme] = picture_of(found.page)
    assert pictures["light"].shape == pictures["dark"].shape
    assert pictures["light"].shape[1] == width
    grounds = {scheme: np.bincount(picture.ravel()).argmax() for scheme, picture in pictures.items()}
    assert grounds["light"] > 200
    assert grounds["dark"] < 60
    for scheme, picture in pictures.items():
        # Texts, lines and pictures cover a part of every screen from the top to the bottom.
        is_drawn = np.abs(picture - grounds[scheme]) > 40
        covered = [part.mean() for part in np.array_split(is_drawn, len(picture) // 900 + 1)]
        assert min(covered) > 0.003
