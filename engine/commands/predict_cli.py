"""The `predict-images` command, which classifies photographs with the weights of a run or of a file.

jax and numpy are imported where they are first needed, so that `--help` answers at once.
"""

import csv
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from loopfeed.engine.commands.command_end import DONE, FAILED, ending, say_to_stderr
from loopfeed.engine.commands.setting_options import overriding_option
from loopfeed.engine.commands.user_parts import load_user_parts, take_part_names
from loopfeed.engine.commands.weights_options import mean_option, model_option, parse_snapshot, std_option
from loopfeed.engine.config import SETTINGS
from loopfeed.engine.named_parts import compare_named
from loopfeed.preprocess.commands.completion import complete_file, complete_word
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.commands.guarded_output import write_data
from loopfeed.preprocess.commands.storage import storage_option
from loopfeed.preprocess.commands.suggesting import SuggestingChoice
from loopfeed.preprocess.decoding.default_resize import MAX_SIZE
from loopfeed.preprocess.printable import printable, printable_name, spreadsheet_cell
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.storage_options import parse_pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from loopfeed.engine.evaluation.predict import PredictionResult

_GROUPS = {
    "Output": ("top", "as_json", "as_csv", "logits", "traceback"),
    "Images": ("size", "resize", "resample", "levels", "truncated", "image_size"),
    "Weights from a file": ("model", "mean", "std"),
    "Evaluation": ("batch", "eval_mirror", "precision", "kernels"),
    "Reading": ("reader_threads", "infeed_timeout_s"),
    "Compilation": ("compilation_cache",),
    "Run": ("snapshot", "storage_option"),
}
_SETTINGS = tuple(
    name for names in _GROUPS.values() for name in names if name in SETTINGS and name not in ("mean", "std")
)
_RULE = ("size", "resize", "resample", "levels", "truncated")
_RESAMPLERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
_COLUMNS = ("image", "rank", "label", "class", "name", "probability", "error")
_EPILOG = """\b
Examples:
  predict-images runs/photos holiday/
  predict-images runs/photos cat.jpg dog.png --top 1
  predict-images model.safetensors holiday/ --csv > holiday.csv
  predict-images runs/photos holiday/ --json --logits | jq -c '[.image, .logits]'
"""
_AS_RUN = "as in the run"


@click.command(cls=GroupedCommand, option_groups=_GROUPS, epilog=_EPILOG)
@click.argument("run", metavar="RUN|FILE", shell_complete=complete_file)
@click.argument("images", nargs=-1, required=True, metavar="IMAGES...", shell_complete=complete_file)
@click.option("--top", type=click.IntRange(min=1), default=5, metavar="N", help="Number of classes for each image.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON for each image instead of text.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one line for each image and class, instead of text.")
@click.option("--logits", is_flag=True, help="With --json: also print the logits of all classes, by label.")
@click.option(
    "--snapshot",
    metavar="STEP|best",
    show_default="the weights of the run, else its newest snapshot",
    callback=parse_snapshot,
    shell_complete=complete_word(lambda: ("best",)),
    help="Classify with a snapshot of the run; best is the kept snapshot with the best evaluation.",
)
@click.option(
    "--size",
    type=click.IntRange(1, MAX_SIZE),
    metavar="PIXELS",
    show_default="as recorded in the weights",
    help="Side of the square that is cropped from each resized photograph.",
)
@click.option(
    "--resize",
    type=click.IntRange(1, MAX_SIZE),
    metavar="PIXELS",
    show_default="as recorded in the weights",
    help="Length of the shorter side before that crop.",
)
@click.option(
    "--resample",
    type=SuggestingChoice(_RESAMPLERS),
    show_default="as recorded in the weights",
    help="Filter for resizing.",
)
@click.option(
    "--levels",
    metavar="LOW:HIGH",
    show_default="as recorded in the weights",
    help="Values that become black and white in photographs of more than 8 bits, e.g. 0:4095.",
)
@click.option(
    "--truncated",
    type=SuggestingChoice(("skip", "keep")),
    show_default="as recorded in the weights",
    help="keep: classify what is there of files that end too early.",
)
@overriding_option(
    "image_size",
    default_text="as recorded in the weights",
    help_text="Size of the central crop of that square that is the network's input.",
)
@model_option
@mean_option
@std_option
@overriding_option("batch", default_text=f"{_AS_RUN}, else 128; less for fewer images", help_text="Images per batch.")
@overriding_option("eval_mirror", default_text=f"{_AS_RUN}, else off")
@overriding_option(
    "precision",
    default_text=f"{_AS_RUN}, else {SETTINGS['precision'].default}",
    help_text="Precision of activations, convolutions and matrix products.",
)
@overriding_option(
    "kernels", default_text=f"{_AS_RUN}, else {SETTINGS['kernels'].default}", help_text="Kernels of a CPU."
)
@overriding_option(
    "reader_threads", default_text="number of cores", help_text="Number of threads that decode photographs."
)
@overriding_option(
    "infeed_timeout_s",
    default_text=f"{_AS_RUN}, else {SETTINGS['infeed_timeout_s'].default}",
    help_text="Fail if a photograph is not decoded within this time.",
)
@overriding_option("compilation_cache", default_text=SETTINGS["compilation_cache"].render_default())
@storage_option
def main(
    *,
    run: str,
    images: tuple[str, ...],
    top: int,
    as_json: bool,
    as_csv: bool,
    logits: bool,
    traceback: bool,
    **options: Any,
) -> None:
    """Classify photographs with the weights of a run, which may still be training, or of a weights file.

    RUN is a folder, or the URL of a run in an object store. FILE is what run-train --init-from takes.

    IMAGES are files and folders; of a folder, all image files in it and below it, sorted by path. Each photograph is
    decoded, resized and cropped as when the training data were packed.

    The results go to stdout batch by batch, and all other messages go to stderr. Exit codes: 0 done, 1 failed, or an
    image cannot be decoded (the others are still classified), 2 wrong usage, 130 stopped by SIGINT, SIGTERM or SIGHUP.
    """
    with ending("predict-images", "stopped before all images were classified", traceback=traceback) as end:
        if as_json and as_csv:
            raise ValueError("only one of --json and --csv can be given, got both: leave one out")
        if logits and not as_json:
            raise ValueError("--logits can be given only with --json: add it, or leave --logits out")
        num_images = num_failed = 0
        predict_s = 0.0
        for part in _predict(run, images, top, options, logits=logits):
            if as_json or as_csv:
                write_data(_json(part) if as_json else _csv(part, with_header=not num_images))
            else:
                click.echo(_text(part), nl=False)
            num_images += len(part.images)
            num_failed += len(part.failures)
            predict_s += part.predict_s
        say_to_stderr(
            f"{quantity(num_images - num_failed, 'image')} classified in {predict_s:.1f} s"
            + (f", {num_failed:,} could not be decoded" if num_failed else "")
        )
        end.code = FAILED if num_failed else DONE


def _predict(
    run: str, images: tuple[str, ...], top: int, options: dict[str, Any], *, logits: bool
) -> "Iterator[PredictionResult]":
    from loopfeed.engine.control.board import ControlBoard
    from loopfeed.engine.control.signals import StopSignals, ignore_message
    from loopfeed.engine.evaluation.predict import Predictor
    from loopfeed.engine.records.recorded_run import read_recorded

    storage_options = parse_pairs(options["storage_option"])
    parts = load_user_parts(take_part_names(options, {"model": None}))
    if parts.named and Path(run).is_dir():
        for warning in compare_named(read_recorded(Path(run)).resolved, parts.named):
            say_to_stderr(warning)
    with StopSignals(ControlBoard(), ignore_message):
        predictor = Predictor(
            run,
            model=parts.model,
            settings={name: options[name] for name in _SETTINGS if options[name] is not None},
            mean=options["mean"],
            std=options["std"],
            resize_rule={name: options[name] for name in _RULE if options[name] is not None},
            snapshot=options["snapshot"],
            notify=say_to_stderr,
            storage_options=storage_options,
        )
        yield from predictor.stream(images, top=top, logits=logits)


def _ranked(result: "PredictionResult", index: int) -> list[tuple[int, str, str, float | None]]:
    """Return label, identifier, name and probability of each class of an image; the probability is None if NaN."""
    ranked = zip(result.labels[index].tolist(), result.probabilities[index], strict=True)
    named = ((label, result.class_of(label), share) for label, share in ranked)
    return [(label, each.id, each.name, _number(share)) for label, each, share in named]


def _number(value: "np.float32") -> float | None:
    """Return a float32 as the shortest decimal number that stands for it, None if it is not finite."""
    return float(str(value)) if math.isfinite(value) else None


def _text(result: "PredictionResult") -> str:
    lines = []
    for index, image in enumerate(result.images):
        if index in result.failures:
            lines.append(f"{printable(image)}: not classified: {printable(result.failures[index])}")
            continue
        lines.append(printable(image))
        for label, identifier, name, share in _ranked(result, index):
            named = printable(identifier) + (f" {printable(name)}" if name not in ("", identifier) else "")
            percent = "     – %" if share is None else f"{100 * share:6.2f} %"
            lines.append(f"  {percent}  {label}  {named}" if identifier != str(label) else f"  {percent}  {label}")
    return "".join(f"{line}\n" for line in lines)


def _json(result: "PredictionResult") -> str:
    lines: list[dict[str, Any]] = []
    for index, image in enumerate(result.images):
        if index in result.failures:
            lines.append({"image": image, "error": result.failures[index]})
            continue
        keys = ("label", "class", "name", "probability")
        ranked = [dict(zip(keys, each, strict=True)) for each in _ranked(result, index)]
        logits = {} if result.logits is None else {"logits": [_number(each) for each in result.logits[index]]}
        lines.append({"image": image, "predictions": ranked, **logits})
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def _csv(result: "PredictionResult", *, with_header: bool = True) -> str:
    rows: list[tuple[Any, ...]] = [_COLUMNS] if with_header else []
    for index, image in enumerate(result.images):
        if index in result.failures:
            rows.append((spreadsheet_cell(image), "", "", "", "", "", _cell(result.failures[index])))
            continue
        rows += [
            (spreadsheet_cell(image), rank, label, _cell(identifier), _cell(name), share, "")
            for rank, (label, identifier, name, share) in enumerate(_ranked(result, index), start=1)
        ]
    return "".join(map(_csv_line, rows))


def _cell(text: str) -> str:
    """Return the name of a class, which comes with the weights, or a reason; a file's name keeps its characters."""
    return spreadsheet_cell(printable_name(text))


def _csv_line(row: tuple[Any, ...]) -> str:
    text = io.StringIO(newline="")
    # Only a field with a character of the line terminator is quoted: with "\r\n", a name with "\r" is.
    csv.writer(text, lineterminator="\r\n").writerow(row)
    return text.getvalue().removesuffix("\r\n") + "\n"
