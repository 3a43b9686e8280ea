"""The options of every command that the project installs, read from click."""

from engine.commands.cli import main as run_train
from engine.commands.control_cli import main as control_run
from engine.commands.eval_cli import main as run_eval
from engine.commands.explain_cli import main as explain_program
from engine.commands.export_cli import main as export_weights
from engine.commands.list_cli import main as list_runs
from engine.commands.predict_cli import main as predict_images
from engine.commands.report_cli import main as report_run
from engine.commands.tail_cli import main as tail_run
from engine.commands.verify_cli import main as verify_run
from preprocess.commands.cli import main as preprocess_imagenet
from preprocess.commands.inspect_cli import main as inspect_shards

_COMMANDS = {
    "control-run": control_run,
    "inspect-shards": inspect_shards,
    "list-runs": list_runs,
    "preprocess-imagenet": preprocess_imagenet,
    "report-run": report_run,
    "run-eval": run_eval,
    "run-train": run_train,
    "tail-run": tail_run,
    "verify-run": verify_run,
    "predict-images": predict_images,
    "export-weights": export_weights,
    "explain-program": explain_program,
}

COMMAND_OPTIONS: dict[str, set[str]] = {
    name: {"--help"}.union(*(param.opts + param.secondary_opts for param in command.params))
    for name, command in _COMMANDS.items()
}
"""The spellings of the options of each command."""
