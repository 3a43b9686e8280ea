"""Weights & Biases (https://wandb.ai) as a logger of experiments, and the sink that logs to it."""

import hmac
import importlib
import netrc
import os
import secrets
import string
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
from PIL.Image import Image

from loopfeed.engine.crossing.pushed import Histogram
from loopfeed.engine.loggers.experiment_log import ExperimentLog, LogRefusedError, Moment, Table, check_package
from loopfeed.engine.loggers.logger_sink import LoggerSink
from loopfeed.engine.records.run_folder import WANDB, WANDB_RUN_ID
from loopfeed.engine.records.whole_file import make_folder, write_whole
from loopfeed.engine.stream.sinks import RunDescription
from loopfeed.models.trusted_folder import folder_fault, make_private_folder, user_cache_folder
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.storage_options import expand_home

_STEP = "step"
# To reach the server, unless the user sets another limit; the package's own is 90 s.
_INIT_TIMEOUT_S, _INIT_TIMEOUT_VARIABLE = 30.0, "WANDB_INIT_TIMEOUT"
_OFFLINE = ("offline", "dryrun", "disabled")
_HOST = "https://api.wandb.ai"
_ID_VARIABLE = "WANDB_RUN_ID"
_ID_CHARACTERS, _ID_LENGTH, _MOST_ID_BYTES = string.ascii_lowercase + string.digits, 8, 256
_KEY, _KEY_BYTES = "wandb-key", 32


class WandbSink(LoggerSink):
    """A sink that logs to Weights & Biases; needs the package `wandb` and an account; nothing is asked.

    A resumed run continues the same run of Weights & Biases, whose id is kept in `RUN/wandb/run-id`, if this user wrote
    it on this machine; else, it begins another one, unless `WANDB_RUN_ID` names one. If the service cannot be reached,
    the run goes on with a warning; `WANDB_MODE=offline` logs to files, for `wandb sync`.

    Args:
        project: the project to log to.
        folder: in which `wandb/` is created; None uses the run folder, or the working directory without one.
        name: the name of the run there; None uses that of the run folder.

    Raises:
        ModuleNotFoundError: the package `wandb` is not installed.
    """

    def __init__(self, project: str, folder: str | Path | None = None, name: str | None = None) -> None:
        check_package("wandb", "WandbSink", "wandb")
        given = None if folder is None else Path(folder)
        super().__init__("Weights & Biases", lambda run: open_wandb_log(project, given or run.run_dir, name, run))


def open_wandb_log(project: str, folder: Path | None, name: str | None, run: RunDescription) -> ExperimentLog:
    """Begin or continue a run of Weights & Biases."""
    import wandb

    check_login(wandb)
    run_id = None if folder is None else kept_run_id(folder / WANDB, run.notify)
    # Silent, because a question at the terminal would disturb the display of the losses.
    settings = wandb.Settings(silent=True, console="off")
    if _INIT_TIMEOUT_VARIABLE not in os.environ:
        settings.init_timeout = _INIT_TIMEOUT_S
    if folder is not None and not is_in_repository_of_user(folder):
        settings.disable_git = True
    begun = wandb.init(
        project=project,
        id=run_id,
        resume="allow",
        dir=None if folder is None else str(folder),
        name=name or (None if run.run_dir is None else run.run_dir.resolve().name),
        config=run.resolved_settings,
        settings=settings,
    )
    # Its own step counts calls and must not go back, as the steps of a resumed run do.
    begun.define_metric(_STEP)
    begun.define_metric("*", step_metric=_STEP)
    run.notify(f"Weights & Biases: {begun.dir if begun.offline else begun.url}")
    return WandbLog(begun)


def is_in_repository_of_user(folder: Path) -> bool:
    """Return whether git finds the same repository from a folder as from the working directory.

    The package runs git in the run folder. A repository that came with the folder names programs in its settings, which
    git runs.
    """
    return _repository_of(folder) == _repository_of(Path.cwd())


def _repository_of(folder: Path) -> Path | None:
    """Return the innermost folder around `folder` in which git would find a repository, bare ones included."""
    place = Path(os.path.realpath(folder))
    for each in (place, *place.parents):
        if (each / ".git").exists() or ((each / "HEAD").exists() and (each / "objects").is_dir()):
            return each
    return None


def check_login(wandb: Any) -> None:
    """Raise LogRefusedError if the package would ask for an account at a terminal or in a notebook; asks nobody itself.

    The package looks for a key in its own settings and session, the environment and the user's netrc file.

    Args:
        wandb: the package.
    """
    settings: Any = None
    with suppress(Exception):  # another version, or no home folder
        settings = wandb.setup().settings

    def found(variable: str, name: str) -> str:
        return os.environ.get(variable) or str(getattr(settings, name, None) or "")

    if found("WANDB_MODE", "mode") in _OFFLINE or os.environ.get("WANDB_DISABLED"):
        return
    if found("WANDB_API_KEY", "api_key") or found("WANDB_IDENTITY_TOKEN_FILE", "identity_token_file"):
        return
    host = found("WANDB_BASE_URL", "base_url") or _HOST
    if not _is_known_to_package(host) and not _is_in_netrc(urlsplit(host)) and _can_ask():
        raise LogRefusedError(
            f"no account is known for {host}: run `wandb login`, set WANDB_API_KEY, or log to files with "
            "WANDB_MODE=offline"
        )


def _is_known_to_package(host: str) -> bool:
    """Return whether the package itself finds an account for a host, as it does for the former names of its server."""
    with suppress(Exception):  # another version, or a key that it does not accept
        login: Any = importlib.import_module("wandb.sdk.lib.wbauth")
        found = login.authenticate_session(host=host, source="run-train", prompt=False, update_session=False)
        return found is not None
    return False


def _can_ask() -> bool:
    """Return whether the package could ask a question, where it then waits for an answer; elsewhere it raises."""
    with suppress(Exception):  # another version
        terminal: Any = importlib.import_module("wandb.errors.term")
        return bool(terminal.can_use_terminput())
    return True


def _is_in_netrc(host: SplitResult) -> bool:
    """Return whether the user's netrc file has a password for a host."""
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in map(expand_home, names):
        with suppress(OSError, ValueError, netrc.NetrcParseError):
            known = netrc.netrc(path)
            return any((known.authenticators(name) or [""])[-1] for name in (host.netloc, host.hostname or ""))
    return False


def kept_run_id(folder: Path, notify: Callable[[str], None]) -> str:
    """Return the id of a run that a folder keeps; if this user has kept none here, create one and keep it.

    A folder of somebody else must not choose which run of this user's is continued, so that the id counts only with a
    mark that is made of it with a key of this user on this machine.

    Args:
        folder: that of the logger in the run folder.
        notify: called with a line about an id that is not used.
    """
    path = folder / WANDB_RUN_ID
    if given := os.environ.get(_ID_VARIABLE):
        return given
    try:
        kept, _, mark = read_regular(path, max_bytes=_MOST_ID_BYTES).decode().strip().partition("\n")
    except (FileNotFoundError, ValueError):  # no text, or longer than any that is written here
        kept = mark = ""
    key = _own_key()
    if kept and key is not None and hmac.compare_digest(_mark_of(kept, key).encode(), mark.encode()):
        return kept
    if kept:
        notify(
            f"{path} was not written by you on this machine: another run of Weights & Biases is begun (to continue "
            f"that one, set {_ID_VARIABLE}={printable(kept)})"
        )
    created = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))
    make_folder(folder)
    write_whole(path, f"{created}\n{'' if key is None else _mark_of(created, key)}\n".encode())
    return created


def _mark_of(run_id: str, key: bytes) -> str:
    return hmac.new(key, run_id.encode(), "sha256").hexdigest()


def _own_key() -> bytes | None:
    """Return random bytes that only this user on this machine knows; None if there is no folder for them."""
    if (cache := user_cache_folder()) is None:
        return None
    path = cache / _KEY
    with suppress(OSError):
        make_private_folder(cache)
        if folder_fault(cache) is not None:
            return None
        if not path.exists():
            # Whole from the first moment, and never replaced: another process may be first.
            with tempfile.NamedTemporaryFile(dir=cache, prefix=f".{_KEY}-") as file, suppress(FileExistsError):
                file.write(secrets.token_bytes(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
                os.link(file.name, path)
        if len(key := read_regular(path, max_bytes=_KEY_BYTES)) == _KEY_BYTES:
            return key
    return None


class WandbLog:
    """An `loopfeed.engine.loggers.experiment_log.ExperimentLog` of a run of Weights & Biases.

    Args:
        run: the run, as `wandb.init` returns it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def add_numbers(self, at: Moment, numbers: Mapping[str, float]) -> None:
        """Log numbers."""
        self._log(at, numbers)

    def add_histograms(self, at: Moment, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms with their own buckets, and the number of elements that are not finite if there are any."""
        import wandb

        found: dict[str, Any] = {
            name: wandb.Histogram(np_histogram=(each.counts, _increasing(each))) for name, each in histograms.items()
        }
        bad = {f"nonfinite/{name}": each.num_nonfinite for name, each in histograms.items() if each.num_nonfinite}
        self._log(at, found | bad)

    def add_picture(self, at: Moment, name: str, picture: Image) -> None:
        """Log a picture."""
        import wandb

        self._log(at, {name: wandb.Image(picture)})

    def add_table(self, at: Moment, name: str, table: Table) -> None:
        """Log a table."""
        import wandb

        rows = [list(row) for row in table.rows]
        self._log(at, {name: wandb.Table(columns=list(table.columns), data=rows)})

    def flush(self) -> None:
        """Do nothing: the service's process sends what it has."""

    def close(self) -> None:
        """Send what is left and end the run there; the run can be continued."""
        self._run.finish()

    def _log(self, at: Moment, values: Mapping[str, Any]) -> None:
        self._run.log({**values, _STEP: at.step})


def _increasing(histogram: Histogram) -> Any:
    """Return the edges of the buckets, which must increase for Weights & Biases."""
    edges = histogram.edges.astype(np.float64)
    return edges if edges[0] < edges[-1] else edges[0] + np.linspace(0, 1e-6, len(edges))
