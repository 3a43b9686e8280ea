"""Draws and packs the demo data set."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from loopfeed.preprocess.cores import num_cores
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.demo.drawing import draw_demo
from loopfeed.preprocess.packing.pack import PackProgress, pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.unsynced import prepare_for_writing
from loopfeed.preprocess.sources.open_source import open_source

DEMO_SIZE = 32
"""Height and width of the demo images in pixels."""


def pack_demo(
    data: str,
    *,
    overwrite: bool = False,
    on_progress: Callable[[str, PackProgress], None] = lambda _split, _progress: None,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Draw the demo data set in a temporary folder and pack it into `data`/train and `data`/val.

    The images are the same every time, so an interrupted pack is continued, and a finished pack is left unchanged.

    Args:
        data: a folder or a TensorStore URL.
        overwrite: delete an existing pack and start over.
        on_progress: called with a split's name and its progress.
        storage_options: how to reach a remote store, such as ``{"endpoint": "http://127.0.0.1:9000"}``.

    Raises:
        ShardError: `data` contains something else, or cannot be written.
    """
    location = prepare_for_writing(open_location(data, storage_options=storage_options))
    rule = ResizeRule(size=DEMO_SIZE, resize=DEMO_SIZE)
    settings = PackSettings(rule=rule, num_workers=num_cores())
    with tempfile.TemporaryDirectory(prefix="loopfeed-demo-") as folder:
        drawn = draw_demo(Path(folder) / "demo", size=DEMO_SIZE)
        with open_source(drawn) as source:
            for name, split in source.splits.items():
                pack_split(
                    split,
                    location.child(name),
                    settings,
                    overwrite=overwrite,
                    on_progress=partial(on_progress, name),
                )
