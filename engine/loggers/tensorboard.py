"""TensorBoard's event files, and the sink that writes them.

Of the package `tensorboard` only the message types are used. Its own writers would import TensorFlow if that is
installed, and compute checksums in Python.
"""

import io
import re
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
from PIL.Image import Image

from loopfeed.engine.config import AUGMENTATION, DATA, OPTIMISER, SETTINGS, TRAINING
from loopfeed.engine.crossing.pushed import Histogram
from loopfeed.engine.loggers.experiment_log import Cell, ExperimentLog, Moment, Table, check_package
from loopfeed.engine.loggers.logger_sink import LoggerSink
from loopfeed.engine.records.run_folder import EVENT_FILE_SUFFIX
from loopfeed.engine.stream.sinks import RunDescription

_MASK = 0xA282EAD8
# TensorBoard reads the files of a folder in the order of their names, which contain the second of their creation.
_NAME = "events.out.tfevents.{:010d}" + EVENT_FILE_SUFFIX
_SECOND = re.compile(r".*tfevents\.(\d{10,11})\b.*")


# The format is TFRecord's (https://www.tensorflow.org/tutorials/load_data/tfrecord): the length as a little-endian
# uint64, a masked CRC-32C of these eight bytes, the data, and a masked CRC-32C of the data.
def frame_record(data: bytes) -> bytes:
    """Return a record with its length and checksums."""
    length = struct.pack("<Q", len(data))
    return length + _masked_checksum(length) + data + _masked_checksum(data)


def _masked_checksum(data: bytes) -> bytes:
    checksum = google_crc32c.value(data)
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + _MASK) & 0xFFFFFFFF)


class EventFile:
    """A new event file, which comes after those already in its folder; a record may be cut off if writing it fails.

    Args:
        folder: created if it does not exist.

    Raises:
        OSError: the folder or the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds = [int(found[1]) for path in folder.iterdir() if (found := _SECOND.fullmatch(path.name))]
        self.path = folder / _NAME.format(max([int(time.time()), *(each + 1 for each in seconds)]))
        self._file = self.path.open("xb")

    def write(self, data: bytes) -> None:
        """Append a record; raise OSError if that fails."""
        self._file.write(frame_record(data))

    def flush(self) -> None:
        """Pass everything to the system; raise OSError if that fails."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file; raise OSError if that fails."""
        self._file.close()


_FILE_VERSION = "brain.Event:2"
_RGB = 3
_HPARAMS_PLUGIN, _SESSION_START_TAG = "hparams", "_hparams_/session_start_info"


class TensorBoardSink(LoggerSink):
    """A sink that writes TensorBoard event files; needs the package `tensorboard`.

    Each launch writes a file of its own. When a run is resumed, TensorBoard hides what earlier files have of steps that
    are done again. If a file cannot be written, the run goes on with a warning.

    Args:
        folder: where to write, such as `RUN/tensorboard`; created if it does not exist.

    Raises:
        ModuleNotFoundError: the package `tensorboard` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        check_package("tensorboard", "TensorBoardSink", "tensorboard")
        super().__init__("TensorBoard", lambda run: open_event_log(Path(folder), run))


def open_event_log(folder: Path, run: RunDescription) -> ExperimentLog:
    """Open an event file for a launch of a run, with the settings of the run."""
    log = EventLog(EventFile(folder), run.step)
    try:
        log.add_settings(run)
    except BaseException:
        log.close()
        raise
    return log


class EventLog:
    """An `loopfeed.engine.loggers.experiment_log.ExperimentLog` in an event file.

    Args:
        file: the file, new.
        step: updates done before this launch; TensorBoard discards what earlier files have of later steps.
    """

    def __init__(self, file: EventFile, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._event, self._file = Event, file
        self._write(Moment(0, 0.0), file_version=_FILE_VERSION)
        self._write(Moment(step + 1, 0.0), session_log=SessionLog(status=SessionLog.START))

    def add_numbers(self, at: Moment, numbers: Mapping[str, float]) -> None:
        """Log numbers as scalars."""
        self._write(at, summary={"value": [{"tag": name, "simple_value": each} for name, each in numbers.items()]})

    def add_histograms(self, at: Moment, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms with their own buckets, and the number of elements that are not finite if there are any."""
        from tensorboard.plugins.histogram.metadata import create_summary_metadata

        metadata = create_summary_metadata(display_name=None, description=None)
        values = [
            {"tag": name, "metadata": metadata, "tensor": _tensor_of_buckets(each)} for name, each in histograms.items()
        ]
        self._write(at, summary={"value": values})
        if bad := {f"nonfinite/{name}": float(each.num_nonfinite) for name, each in histograms.items()
                   if each.num_nonfinite}:  # fmt: skip
            self.add_numbers(at, bad)

    def add_picture(self, at: Moment, name: str, picture: Image) -> None:
        """Log a picture."""
        encoded = io.BytesIO()
        picture.convert("RGB").save(encoded, "PNG")
        width, height = picture.size
        image = {
            "width": width,
            "height": height,
            "colorspace": _RGB,
            "encoded_image_string": encoded.getvalue(),
        }
        self._write(at, summary={"value": [{"tag": name, "image": image}]})

    def add_table(self, at: Moment, name: str, table: Table) -> None:
        """Log a table as text in Markdown."""
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.metadata import create_summary_metadata

        metadata = create_summary_metadata(display_name=None, description=None)
        tensor = {
            "dtype": DT_STRING,
            "tensor_shape": {"dim": [{"size": 1}]},
            "string_val": [markdown_of(table).encode()],
        }
        self._write(at, summary={"value": [{"tag": name, "metadata": metadata, "tensor": tensor}]})

    def add_settings(self, run: RunDescription) -> None:
        """Log the settings of a run as a table, and for the page that compares runs by their settings."""
        from tensorboard.compat.proto.summary_pb2 import SummaryMetadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

        settings = run.resolved_settings
        rows = [(name, _text_of(value)) for name, value in sorted(settings.items())]
        at = Moment(run.step, 0.0)
        self.add_table(at, "settings", Table(("setting", "value"), rows))
        content = HParamsPluginData()
        compared = {name: value for name, value in settings.items() if name in SETTINGS and _is_compared(name)}
        for name, value in compared.items():
            if isinstance(value, bool):
                content.session_start_info.hparams[name].bool_value = value
            elif isinstance(value, int | float):
                content.session_start_info.hparams[name].number_value = value
            else:
                content.session_start_info.hparams[name].string_value = _text_of(value)
        plugin = SummaryMetadata.PluginData(plugin_name=_HPARAMS_PLUGIN, content=content.SerializeToString())
        value = {"tag": _SESSION_START_TAG, "metadata": {"plugin_data": plugin}, "tensor": _tensor_of_floats([], [0])}
        self._write(at, summary={"value": [value]})

    def flush(self) -> None:
        """Pass everything to the system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, at: Moment, **content: Any) -> None:
        self._file.write(self._event(wall_time=at.time or time.time(), step=at.step, **content).SerializeToString())


def _is_compared(name: str) -> bool:
    """Return whether runs are compared by a setting: not if it only says how fast they run or what they write."""
    return SETTINGS[name].group in (DATA, TRAINING, OPTIMISER, AUGMENTATION)


def _tensor_of_buckets(histogram: Histogram) -> dict[str, Any]:
    """Return the buckets as TensorBoard's histograms have them: left edge, right edge and count of each."""
    edges, counts = histogram.edges.tolist(), histogram.counts.tolist()
    if edges[0] == edges[-1]:
        # All elements are equal: TensorBoard shows one bucket without width.
        rows = [(edges[0], edges[0], sum(counts))]
    else:
        rows = list(zip(edges[:-1], edges[1:], counts, strict=True))
    return _tensor_of_floats([float(number) for row in rows for number in row], [len(rows), 3])


def _tensor_of_floats(numbers: list[float], shape: list[int]) -> dict[str, Any]:
    from tensorboard.compat.proto.types_pb2 import DT_DOUBLE

    content = struct.pack(f"<{len(numbers)}d", *numbers)
    return {
        "dtype": DT_DOUBLE,
        "tensor_shape": {"dim": [{"size": size} for size in shape]},
        "tensor_content": content,
    }


def markdown_of(table: Table) -> str:
    """Return a table in Markdown."""
    rows = [[_cell_text(cell) for cell in row] for row in (table.columns, *table.rows)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(table.columns))
    return "\n".join(lines)


def _cell_text(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell).replace("|", "\\|").replace("\n", " ")


def _text_of(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(_text_of, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
