"""The contact sheet: which images it shows, and where."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageChops, ImageFont

from loopfeed.preprocess.commands.contact_sheet import Geometry, _in_font, choose_images, draw_contact_sheet
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import FakeSource, pack


@given(labels=st.lists(st.integers(0, 30), min_size=1, max_size=300), more=st.integers(0, 200))
def test_chosen_images_are_distinct_in_class_order_and_at_most_100(labels, more):
    labels = np.array(labels, np.uint16)
    num_classes = int(labels.max()) + 1 + more
    chosen = choose_images(labels, num_classes)
    assert 1 <= len(chosen) <= 100
    assert len(set(chosen.tolist())) == len(chosen)
    assert np.all(np.diff(labels[chosen].astype(int)) >= 0)


def test_thumbnails_are_in_their_cells(tmp_path):
    # Class k is plain grey of 60·k, so a cell tells its class by its colour.
    labels = [0, 0, 1, 2, 2, 2]
    images = np.stack([np.full((32, 32, 3), 60 * label, np.uint8) for label in labels])
    classes = tuple(ImageClass(f"n{k}", name) for k, name in enumerate(["tench", "a very long name " * 9, "Ära"]))
    pack(FakeSource(images, labels, classes=classes), tmp_path)
    with open_split(str(tmp_path), "train") as split:
        sheet = draw_contact_sheet(split, title="somewhere")
        again = draw_contact_sheet(split, title="somewhere")
    assert ImageChops.difference(sheet, again).getbbox() is None
    measures = Geometry(thumbnail=128)
    pitch = measures.thumbnail + measures.gap
    shown = {}
    for row in range(3):
        for column in range(10):
            x = measures.gap + column * pitch + 64
            y = measures.header + row * (pitch + measures.caption) + 64
            shown[row, column] = sheet.getpixel((x, y))
    for (row, column), colour in shown.items():
        assert colour == ((60 * row,) * 3 if column < labels.count(row) else (255, 255, 255))
    assert sheet.size == (10 * pitch + measures.gap, measures.header + 3 * (pitch + measures.caption) + measures.gap)
    # The long caption ends within its cell.
    below = (measures.gap + measures.thumbnail, measures.header + pitch + measures.caption + measures.thumbnail)
    gap = sheet.crop((*below, below[0] + measures.gap, below[1] + measures.caption))
    assert gap.getextrema() == ((255, 255),) * 3


def test_a_picture_is_written_only_in_characters_that_its_font_has():
    font = ImageFont.load_default(size=12)
    given = {
        "32 × 32 px": "32 x 32 px",
        "Küche, Löffel – Straße": "Kuche, Loffel - Strasse",
        "Ku\u0308che": "Kuche",
        "step 3 → 4 …": "step 3 -> 4 …",
        "20 °C ± 1": "20 °C ± 1",
        "猫, 狗": "?, ?",
    }
    assert {text: _in_font(text, font) for text in given} == given
    missing = bytes(font.getmask("\uffff"))
    assert all(bytes(font.getmask(each)) != missing for text in given.values() for each in text)
    assert bytes(font.getmask("×")) == missing  # else a plain x is no longer needed
