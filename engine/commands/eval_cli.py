"""The command `run-eval`: a run's folder, or a file of weights, to the counts of a split.

jax and numpy are imported where they are first needed, so that `--help` answers at once.
"""

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import click

from engine.commands.command_end import describe_error, leave, say_to_stderr
from engine.commands.option_sources import with_option_names
from engine.config import PrecisionName, TrainConfig, TransportName
from preprocess.commands.grouped_help import GroupedCommand

if TYPE_CHECKING:
    from engine.evaluation.result import ClassResult, EvaluationResult

_DONE, _FAILED, _WRONG_USAGE, _STOPPED = 0, 1, 2, 130
_DEFAULTS = TrainConfig()
# Options that stand for a setting of the same name; the others are of the command alone.
_SETTINGS = (
    "data",
    "eval_split",
    "batch",
    "image_size",
    "eval_mirror",
    "precision",
    "prefetch",
    "reader_threads",
    "infeed_timeout_s",
    "transport",
    "compilation_cache",
)
_GROUPS = {
    "Weights of no run": ("weights", "model", "mean", "std"),
    "Data": ("data", "eval_split", "image_size"),
    "Evaluation": ("batch", "eval_mirror", "precision"),
    "Infeed": ("prefetch", "reader_threads", "infeed_timeout_s", "transport"),
    "Output": ("per_class", "as_json", "traceback"),
    "Compilation": ("compilation_cache",),
}
_EPILOG = """\b
Examples:
  run-eval runs/20261121-101500
  run-eval runs/20261121-101500 --data /mnt/imagenet --per-class
  run-eval --weights resnet50.safetensors --model resnet50 --data data/shards
"""
_AS_RUN = "as the run"


def _or_default(name: str) -> str:
    """What the help says of a setting that a run brings and a file does not."""
    return f"{_AS_RUN}, else {getattr(_DEFAULTS, name)}"


@click.command(
    cls=GroupedCommand,
    option_groups=_GROUPS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.argument("run", required=False)
@click.option("--weights", metavar="FILE", help="Weights in place of RUN (safetensors, torchvision's names).")
@click.option("--model", metavar="NAME", show_default="what FILE names", help="Whose weights FILE holds.")
@click.option(
    "--mean", type=float, nargs=3, metavar="R G B", show_default="what FILE says, else ImageNet's", help="Of 0 … 1."
)
@click.option(
    "--std", type=float, nargs=3, metavar="R G B", show_default="what FILE says, else ImageNet's", help="Of 0 … 1."
)
@click.option("--data", metavar="DIR|URL", show_default="as the run; needed with FILE", help="Packed data set.")
@click.option(
    "--split", "eval_split", metavar="NAME", show_default="as the run, else val, else test", help="Split to evaluate."
)
@click.option(
    "--image-size",
    type=int,
    metavar="PX",
    show_default="as the run, or as FILE says",
    help="Of the central crop that the network sees.",
)
@click.option("--batch", type=int, metavar="IMAGES", show_default=_or_default("batch"), help="Images a pull.")
@click.option(
    "--eval-mirror/--no-eval-mirror",
    default=None,
    show_default=f"{_AS_RUN}, else off",
    help="The mean of the logits of an image and of its mirror image.",
)
@click.option(
    "--precision",
    type=click.Choice(get_args(PrecisionName)),
    show_default=_or_default("precision"),
    help="Of activations and products.",
)
@click.option(
    "--prefetch",
    type=int,
    metavar="BATCHES",
    show_default=f"{_AS_RUN}, else 4, more of small ones",
    help="Batches read ahead.",
)
@click.option(
    "--reader-threads",
    type=int,
    metavar="N",
    show_default=_or_default("reader_threads"),
    help="Threads that read shards.",
)
@click.option(
    "--infeed-timeout",
    "infeed_timeout_s",
    type=float,
    metavar="SECONDS",
    show_default=_or_default("infeed_timeout_s"),
    help="Longest wait for a batch before the command fails.",
)
@click.option(
    "--transport",
    type=click.Choice(get_args(TransportName)),
    default=_DEFAULTS.transport,
    help="How batches cross to the device.",
)
@click.option("--per-class", is_flag=True, help="A line for each class: images and top-1.")
@click.option("--json", "as_json", is_flag=True, help="A line of JSON, as in eval.jsonl, in place of words.")
@click.option("--traceback", is_flag=True, help="Show a failure's whole traceback.")
@click.option(
    "--compilation-cache",
    metavar="DIR|off",
    show_default=_AS_RUN,
    help="Where compiled programs are kept.",
)
@click.version_option(package_name="feedloop")
def main(
    *,
    run: str | None,
    weights: str | None,
    as_json: bool,
    traceback: bool,
    **options: Any,
) -> None:
    """Evaluate the trained weights of a finished or stopped run in folder RUN, as its training did.

    The counts go to stdout, what is evaluated on what goes to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage or
    data, 130 stopped by SIGINT or SIGTERM.
    """
    try:
        result = _evaluate(run, weights, options)
        click.echo(_json_line(result) if as_json else _words(result, weights))
        _say_speed(result)
        code = _DONE
    except KeyboardInterrupt:
        say_to_stderr("run-eval: stopped; an evaluation is whole or none")
        code = _STOPPED
    except Exception as error:
        if traceback:
            raise
        say_to_stderr(f"run-eval: {with_option_names(describe_error(error), click.get_current_context())}")
        code = _WRONG_USAGE if isinstance(error, ValueError) else _FAILED
    leave(code)


def _evaluate(run: str | None, weights: str | None, options: dict[str, Any]) -> "EvaluationResult":
    if (run is None) == (weights is None):
        found = "neither" if run is None else f"{run} and --weights {weights}"
        raise ValueError(f"the weights must be those of RUN or of --weights FILE, got {found}: give one of the two")
    settings = {name: options[name] for name in _SETTINGS if options[name] is not None}
    if settings.get("eval_split") == "off":
        raise ValueError("the split must be one of the data set's, got off: leave --split out, or name one")
    if weights is None:
        given = [name for name in _GROUPS["Weights of no run"] if options.get(name) is not None]
        if given:
            raise ValueError(f"--{given[0]} belongs to --weights FILE, got it with RUN {run}: the run has its own")
        return _evaluate_run(str(run), settings, per_class=options["per_class"])
    from engine.evaluation.run import evaluate_weights

    return evaluate_weights(
        weights,
        TrainConfig(**settings, model=options["model"] or "auto"),
        mean=options["mean"],
        std=options["std"],
        per_class=options["per_class"],
        notify=say_to_stderr,
    )


def _evaluate_run(run: str, settings: dict[str, Any], *, per_class: bool) -> "EvaluationResult":
    from engine.evaluation.run import evaluate, run_settings

    recorded = run_settings(run)
    if "data" in settings:
        settings = settings | {"synthetic": False}
    if recorded.eval_split == "off":
        # The run evaluated never; whoever asks for it now wants the usual split.
        settings = {"eval_split": None} | settings
    return evaluate(replace(recorded, **settings), per_class=per_class, notify=say_to_stderr)


def _words(result: "EvaluationResult", weights: str | None) -> str:
    from engine.stream.sinks import evaluation_words
    from preprocess.printable import printable

    words = evaluation_words(result.record)
    if result.is_mirrored:
        words = words.removesuffix(")") + ", and their mirror images)"
    if weights is not None and result.record.step == 0:
        words = f"evaluation of {printable(weights)}: {words.partition(': ')[2]}"
    return "\n".join([words, *_class_lines(result.classes)])


def _class_lines(classes: "tuple[ClassResult, ...]") -> list[str]:
    """A table of the classes: label, identifier, name, images, and the share that is right."""
    if not classes:
        return []
    from preprocess.printable import printable

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
    return json.dumps(json.loads(result.record.to_json()) | {"classes": classes})


def _say_speed(result: "EvaluationResult") -> None:
    seconds = result.evaluate_s
    say_to_stderr(
        f"{result.record.num_images:,} images in {seconds:.1f} s: {result.record.num_images / seconds:,.1f} images/s, "
        f"infeed wait {100 * result.wait_s / seconds:.1f} % of the time"
    )
