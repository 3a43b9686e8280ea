"""The options of every command that the project installs, read from click."""

from loopfeed.engine.commands.cli import main as run_train
from loopfeed.engine.commands.control_cli import main as control_run
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.commands.explain_cli import main as explain_program
from loopfeed.engine.commands.export_cli import main as export_model
from loopfeed.engine.commands.list_cli import main as list_runs
from loopfeed.engine.commands.predict_cli import main as predict_images
from loopfeed.engine.commands.report_cli import main as report_run
from loopfeed.engine.commands.tail_cli import main as tail_run
from loopfeed.engine.commands.verify_cli import main as verify_run
from loopfeed.preprocess.commands.cli import main as preprocess_imagenet
from loopfeed.preprocess.commands.inspect_cli import main as inspect_shards

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
    "export-model": export_model,
    "explain-program": explain_program,
}

COMMAND_OPTIONS: dict[str, set[str]] = {
    name: {"--help"}.union(*(param.opts + param.secondary_opts for param in command.params))
    for name, command in _COMMANDS.items()
}
"""The spellings of the options of each command."""
