"""The `run-eval` command, which evaluates the weights of a run, or a weights file, on a split of a data set.

jax and numpy are imported where they are first needed, so that `--help` answers at once.
"""

import json
import math
from typing import TYPE_CHECKING, Any

import click

from loopfeed.engine.commands.command_end import ending, say_to_stderr
from loopfeed.engine.commands.setting_options import overriding_option, setting_option
from loopfeed.engine.commands.user_parts import OWN_GROUP, load_user_parts, take_part_names, user_part_options
from loopfeed.engine.commands.weights_options import mean_option, model_option, parse_snapshot, std_option
from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.engine.named_parts import compare_named
from loopfeed.engine.owners import OF_AN_EVALUATION, with_given
from loopfeed.preprocess.commands.completion import complete_file, complete_folder, complete_word
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.storage_options import parse_text

if TYPE_CHECKING:
    from loopfeed.engine.evaluation.result import ClassResult, EvaluationResult

_GROUPS = {
    "Weights of a snapshot": ("snapshot",),
    "Weights from a file": ("weights", "model", "mean", "std"),
    "Data": ("data", "eval_split", "image_size", "storage_options", "cache", "cache_gb"),
    "Evaluation": ("batch", "eval_mirror", "precision", "kernels"),
    "Infeed": ("prefetch", "reader_threads", "infeed_timeout_s", "transport"),
    OWN_GROUP: ("loss", "metrics", "evaluation"),
    "Output": ("per_class", "predictions", "as_json", "traceback"),
    "Compilation": ("compilation_cache",),
}
# The options that override settings of the run; --loss is only a user's own.
_SETTINGS = tuple(
    name
    for group, names in _GROUPS.items()
    for name in names
    if name in SETTINGS and group not in ("Weights from a file", OWN_GROUP)
)
_EPILOG = """\b
Examples:
  run-eval runs/20261121-101500
  run-eval runs/20261121-101500 --data /mnt/imagenet --per-class
  run-eval runs/mine --model mine.model:build --metrics mine.metrics:METRICS
  run-eval --weights resnet50.safetensors --model resnet50 --data data/shards
"""
_AS_RUN = "as in the run"


def _or_default(name: str) -> str:
    """Return the default to show in the help for a setting that is recorded in a run, but not in a weights file."""
    return f"{_AS_RUN}, else {SETTINGS[name].default}"


@click.command(cls=GroupedCommand, option_groups=_GROUPS, epilog=_EPILOG)
@click.argument("run", required=False, shell_complete=complete_folder)
@click.option(
    "--snapshot",
    metavar="STEP|best",
    callback=parse_snapshot,
    shell_complete=complete_word(lambda: ("best",)),
    show_default="the weights at the end of RUN, else its newest snapshot",
    help="Evaluate the weights of this snapshot of RUN; best is the kept one with the best evaluation.",
)
@click.option(
    "--weights",
    metavar="FILE",
    shell_complete=complete_file,
    help="Weights file to evaluate instead of RUN (safetensors or .pt with torchvision's tensor names).",
)
@model_option
@mean_option
@std_option
@user_part_options(_GROUPS[OWN_GROUP])
@overriding_option("data", default_text="as in the run; required with --weights")
@overriding_option(
    "eval_split",
    "--split",
    default_text="as in the run, else val, else test",
    help_text="Split to evaluate.",
    unit="NAME",
)
@overriding_option(
    "image_size",
    default_text="as in the run, or as recorded in FILE",
    help_text="Size of the central crop that is the network's input.",
)
@overriding_option("storage_options", default_text=f"{_AS_RUN}, without keys; $AWS_ENDPOINT_URL, $AWS_REGION")
@overriding_option("cache", default_text=SETTINGS["cache"].render_default())
@overriding_option("cache_gb", default_text=SETTINGS["cache_gb"].render_default())
@overriding_option("batch", default_text=_or_default("batch"), help_text="Images per batch.")
@overriding_option("eval_mirror", default_text=f"{_AS_RUN}, else off")
@overriding_option(
    "precision",
    default_text=_or_default("precision"),
    help_text="Precision of activations, convolutions and matrix products.",
)
@overriding_option("kernels", default_text=_or_default("kernels"), help_text="Kernels of a CPU.")
@overriding_option("prefetch", default_text=f"{_AS_RUN}, else 4, or more if the batches are small")
@overriding_option("reader_threads", default_text=_or_default("reader_threads"))
@overriding_option(
    "infeed_timeout_s",
    default_text=_or_default("infeed_timeout_s"),
    help_text="Fail if a batch does not arrive within this time.",
)
@setting_option("transport")
@click.option(
    "--per-class",
    is_flag=True,
    help="Also print the balanced accuracy, and for each class its number of images and top-1 accuracy.",
)
@click.option(
    "--predictions",
    metavar="FILE",
    shell_complete=complete_file,
    help="Write index, label, predicted class, its probability, loss and name of each image to FILE (.csv or .jsonl).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON, as in eval.jsonl, instead of text.")
@overriding_option("compilation_cache", default_text=SETTINGS["compilation_cache"].render_default())
def main(
    *,
    run: str | None,
    weights: str | None,
    as_json: bool,
    traceback: bool,
    **options: Any,
) -> None:
    """Evaluate the weights of the run in folder RUN, in the same way as during training.

    RUN may be the URL of a run in an object store. While RUN is still training and has written no weights, its newest
    snapshot is evaluated.

    The result goes to stdout, and all other messages go to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage or
    data, 130 stopped by SIGINT, SIGTERM or SIGHUP.
    """
    with ending("run-eval", "stopped before there was a result", traceback=traceback):
        result = _evaluate(run, weights, options)
        if options["predictions"] is not None and result.predictions is not None:
            from loopfeed.engine.evaluation.result import write_predictions

            write_predictions(options["predictions"], result.predictions)
            num_images = quantity(len(result.predictions.labels), "image")
            say_to_stderr(f"predictions: {options['predictions']}, {num_images}")
        click.echo(_json_line(result) if as_json else _result_text(result, weights))
        seconds, num_images = result.evaluate_s, quantity(result.record.num_images, "image")
        say_to_stderr(
            f"{num_images} in {seconds:.1f} s: {result.record.num_images / seconds:,.1f} images/s, "
            f"infeed wait {100 * result.wait_s / seconds:.1f} % of the time"
        )


def _evaluate(run: str | None, weights: str | None, options: dict[str, Any]) -> "EvaluationResult":
    if (run is None) == (weights is None):
        found = "neither" if run is None else f"{run} and --weights {weights}"
        raise ValueError(f"exactly one of RUN and --weights FILE must be given, got {found}: give one of the two")
    if options["predictions"] is not None:
        from loopfeed.engine.evaluation.result import check_prediction_file

        check_prediction_file(options["predictions"])
    settings = {name: options[name] for name in _SETTINGS if options[name] is not None}
    if settings.get("eval_split") == "off":
        raise ValueError("--split must be the name of a split, got off: leave it out or give a split of the data set")
    names = take_part_names(options, {"model": None})
    if weights is None:
        given = [name for name in _GROUPS["Weights from a file"] if options.get(name) is not None]
        if given:
            raise ValueError(
                f"--{given[0]} can be given only with --weights FILE, got RUN {run} instead: leave --{given[0]} out"
            )
        return _evaluate_run(str(run), settings, names, options)
    if options["snapshot"] is not None:
        raise ValueError("--snapshot can be given only with RUN, got --weights instead: leave one of the two out")
    if other := next((name for name in names if name != "model"), None):
        raise ValueError(f"--{other} of your own can be given only with RUN, got --weights {weights}")
    from loopfeed.engine.evaluation.run import evaluate_weights

    parts = load_user_parts(names)

    return evaluate_weights(
        weights,
        TrainConfig(**settings, model=options["model"] or "auto"),
        model=parts.model,
        mean=options["mean"],
        std=options["std"],
        per_class=options["per_class"],
        predictions=options["predictions"] is not None,
        notify=say_to_stderr,
    )


def _evaluate_run(
    run: str, settings: dict[str, Any], names: dict[str, str], options: dict[str, Any]
) -> "EvaluationResult":
    from loopfeed.engine.crossing.choice import this_platform
    from loopfeed.engine.evaluation.run import evaluate
    from loopfeed.engine.evaluation.subject import at_one_size
    from loopfeed.engine.program.kernels import refuse_missing_kernels
    from loopfeed.engine.records.recorded_run import read_recorded
    from loopfeed.engine.records.stored.reading import local_copy, naming_in, with_weights
    from loopfeed.engine.records.trained_run import run_settings

    snapshot, storage_options = options["snapshot"], parse_text(options["storage_options"])
    with local_copy(run, storage_options, with_weights(snapshot)) as folder:
        notify = naming_in(say_to_stderr, folder, run)
        recorded, record = run_settings(folder), read_recorded(folder)
        parts = load_user_parts(names)
        # An evaluation may use other metrics and other images than the run did.
        for warning in compare_named(record.resolved, parts.named, only=("model", "loss")):
            notify(warning)
        if "data" in settings:
            settings = settings | {"synthetic": False}
        if recorded.eval_split == "off":
            # The run had no evaluations; an evaluation requested now uses the default split.
            settings = {"eval_split": None} | settings
        refuse_missing_kernels(recorded, settings, this_platform())
        config = with_given(recorded, at_one_size(settings))
        if (line := record.describe_replaced(config, OF_AN_EVALUATION, OF_AN_EVALUATION)) is not None:
            notify(line)
        return evaluate(
            config,
            model=parts.model,
            evaluation=parts.evaluation,
            loss=parts.loss,
            metrics=parts.metrics,
            per_class=options["per_class"],
            snapshot=snapshot,
            predictions=options["predictions"] is not None,
            notify=notify,
        )


def _result_text(result: "EvaluationResult", weights: str | None) -> str:
    from loopfeed.engine.stream.sinks import evaluation_words
    from loopfeed.preprocess.printable import printable

    text = evaluation_words(result.record)
    if result.is_mirrored:
        text = text.removesuffix(")") + ", and their mirror images)"
    if weights is not None and result.record.step == 0:
        text = f"evaluation of {printable(weights)}: {text.partition(': ')[2]}"
    if (balanced := result.balanced_accuracy) is not None:
        num_classes = sum(each.num_images > 0 for each in result.classes)
        text += f"\nbalanced accuracy: {100 * balanced:.2f} % (mean over {quantity(num_classes, 'class')})"
    return "\n".join([text, *_class_lines(result.classes)])


def _class_lines(classes: "tuple[ClassResult, ...]") -> list[str]:
    """Return a table with one row per class: label, identifier, name, number of images and top-1 accuracy."""
    if not classes:
        return []
    from loopfeed.preprocess.printable import printable

    rows = [("label", "class", "name", "images", "top-1")]
    for label, each in enumerate(classes):
        share = "–" if math.isnan(each.top1) else f"{100 * each.top1:.2f} %"
        rows.append((str(label), printable(each.id), printable(each.name), f"{each.num_images:,}", share))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return [
        f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]:>{widths[3]}}  "
        f"{row[4]:>{widths[4]}}"
        for row in rows
    ]


def _json_line(result: "EvaluationResult") -> str:
    if not result.classes:
        return result.record.to_json()
    classes = [
        {
            "id": each.id,
            "name": each.name,
            "num_images": each.num_images,
            "top1": None if math.isnan(each.top1) else each.top1,
        }
        for each in result.classes
    ]
    balanced = {"balanced_accuracy": result.balanced_accuracy}
    return json.dumps(json.loads(result.record.to_json()) | balanced | {"classes": classes})
