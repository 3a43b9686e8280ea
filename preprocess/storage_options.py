"""The options for reaching an object store: address, region, credentials, retries. Each option is declared only here.

Owns the names, the validation, the environment variables, and the translation into TensorStore's specification. No
option holds a secret, so that all can be recorded: keys come from the environment or from a profile. Must not import
tensorstore, so that the commands start fast.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loopfeed.preprocess.suggestions import did_you_mean

DEFAULT_RETRIES = 6
"""How often a failed request is repeated: after 0.5, 1, 2, 4, 8 and 8 s, about half a minute in all."""

DEFAULT_TIMEOUT_S = 45.0
"""Default time limit for one small request to a remote store, in seconds; more than the retries take."""

ANONYMOUS = "anonymous"
"""The value of the option `credentials` with which no keys are sent."""

_INITIAL_DELAY, _MAX_DELAY = "500ms", "8s"
_DRIVERS = {"s3": "s3", "gcs": "gs", "http": "http"}
_VENDOR_FILE = Path("/sys/class/dmi/id/sys_vendor")
_ROLE_VARIABLES = (
    *("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
_SECRETS = re.compile(r"secret|token|password|access.?key", re.IGNORECASE)


class StorageOptionError(ValueError):
    """An option of a store is unknown, invalid or not applicable; the message states the value and the remedy."""


@dataclass(frozen=True)
class StorageOption:
    """The declaration of an option.

    Attributes:
        help_text: what it does, for the reference.
        schemes: the URL schemes that it applies to.
        rule: the values that it takes, in words.
        is_valid: whether a value is allowed.
        variables: environment variables that give its default for ``s3://``, in the order of precedence.
        elsewhere: what to do instead for a scheme that it does not apply to.
        is_of_user: whether it says who asks or who pays, or protects what the user writes; none of these is taken from
            a record.
    """

    help_text: str
    schemes: tuple[str, ...]
    rule: str
    is_valid: Callable[[str], bool]
    variables: tuple[str, ...] = ()
    elsewhere: str = "leave it out"
    is_of_user: bool = False


def _is_address(value: str) -> bool:
    try:
        parts = urlsplit(value)
        is_plain = "@" not in parts.netloc and not parts.query and re.search(r"[\s,]", value) is None
        return parts.scheme in ("http", "https") and bool(parts.hostname) and is_plain
    except ValueError:
        return False


def _one_of(*words: str) -> dict[str, Any]:
    return {"rule": f"one of {', '.join(words)}", "is_valid": lambda value: value in words}


def _number(low: int, high: int) -> dict[str, Any]:
    return {
        "rule": f"a whole number in {low} … {high}",
        "is_valid": lambda value: re.fullmatch(r"[0-9]{1,6}", value) is not None and low <= int(value) <= high,
    }


def _text(rule: str) -> dict[str, Any]:
    return {
        "rule": rule,
        "is_valid": lambda value: bool(value) and value.isprintable() and not re.search(r"[\s,]", value),
    }


def _is_region(value: str) -> bool:
    # It becomes a part of the host's name: with a slash or a colon, the request and its keys would go to another host.
    return re.fullmatch(r"[A-Za-z0-9_-]{1,64}", value) is not None


_S3, _REMOTE = ("s3",), ("s3", "gs", "http")

STORAGE_OPTIONS: Mapping[str, StorageOption] = {
    "endpoint": StorageOption(
        "Address of an S3-compatible server; buckets are addressed by path (ADDRESS/BUCKET/KEY). Default: AWS.",
        _S3,
        rule="an address such as http://127.0.0.1:9000, without user, password or query",
        is_valid=_is_address,
        variables=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
        elsewhere="for gs:// set $TENSORSTORE_GCS_HTTP_URL",
    ),
    "region": StorageOption(
        "Region of the bucket. Default: with an endpoint that of the environment, or us-east-1; else the one that AWS "
        "reports.",
        _S3,
        rule="a region such as eu-central-1, of letters, digits, hyphens and underscores",
        is_valid=_is_region,
        variables=("AWS_REGION", "AWS_DEFAULT_REGION"),
    ),
    "host-header": StorageOption(
        "Host header to send to the endpoint, if a proxy expects another than the endpoint's.",
        _S3,
        **_text("the name of a host"),
    ),
    "credentials": StorageOption(
        "Source of the keys. Default: environment if $AWS_ACCESS_KEY_ID is set, else profile if there is a file of "
        "credentials, else the role of a container or of a machine of Amazon's, else anonymous.",
        _S3,
        **_one_of(ANONYMOUS, "environment", "profile", "imds", "ecs", "default"),
        elsewhere="for gs:// set $GOOGLE_APPLICATION_CREDENTIALS",
        is_of_user=True,
    ),
    "profile": StorageOption(
        "Profile in ~/.aws/credentials or $AWS_SHARED_CREDENTIALS_FILE; implies credentials=profile.",
        _S3,
        **_text("the name of a profile"),
        is_of_user=True,
    ),
    "requester-pays": StorageOption(
        "Pay for requests to a bucket of someone else.", _S3, **_one_of("true", "false"), is_of_user=True
    ),
    "conditional-writes": StorageOption(
        "Whether packs and runs are protected from other writers by conditional writes. Default: true; a warning names "
        "a store that ignores them.",
        _S3,
        **_one_of("true", "false"),
        is_of_user=True,
    ),
    "user-project": StorageOption(
        "Google Cloud project that pays for the requests.",
        ("gs",),
        **_text("the identifier of a project"),
        is_of_user=True,
    ),
    "concurrency": StorageOption(
        "Largest number of requests at a time. Default: 32.", ("s3", "gs"), **_number(1, 1024)
    ),
    "retries": StorageOption(
        f"How often a failed request is repeated, after 0.5, 1, 2, 4 and then 8 s. Default: {DEFAULT_RETRIES}.",
        _REMOTE,
        **_number(0, 100),
    ),
    "timeout": StorageOption(
        "Longest wait, in seconds, for a listing or a small file, retries included; batches have --infeed-timeout. "
        f"Default: {DEFAULT_TIMEOUT_S:.0f}.",
        _REMOTE,
        **_number(1, 3600),
    ),
}
"""The declarations of all options, by name."""


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Return options given as ``KEY=VALUE``; raise StorageOptionError for an unknown, invalid or repeated one."""
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise StorageOptionError(f"a storage option must be KEY=VALUE, got {name!r}; {_known()}")
        if options.get(name, value) != value:
            raise StorageOptionError(f"the storage option {name} is given twice, as {options[name]} and {value}")
        options[name] = value
    check_options(options)
    return options


def parse_text(text: str | None) -> dict[str, str]:
    """Return options given as ``KEY=VALUE`` pairs joined by commas; raise StorageOptionError as `parse_pairs`."""
    return parse_pairs((text or "").split(",")) if text else {}


def as_text(options: Mapping[str, str]) -> str | None:
    """Return options as `parse_text` takes them, sorted by name; None if there are none."""
    return ",".join(f"{name}={value}" for name, value in sorted(options.items())) or None


def check_options(options: Mapping[str, str]) -> None:
    """Raise StorageOptionError for an unknown name or an invalid value. No message repeats a secret."""
    for name, value in options.items():
        declared = STORAGE_OPTIONS.get(name)
        if declared is None and _SECRETS.search(name):
            raise StorageOptionError(
                "keys and passwords are no storage options, because options are recorded; set $AWS_ACCESS_KEY_ID and "
                "$AWS_SECRET_ACCESS_KEY, or give profile=NAME"
            )
        if declared is None:
            raise StorageOptionError(
                f"there is no storage option {name!r}{did_you_mean(name, STORAGE_OPTIONS)}; {_known()}"
            )
        if not isinstance(value, str) or not declared.is_valid(value):
            shown = "an address with a user or password" if "@" in str(value) else repr(value)
            raise StorageOptionError(f"the storage option {name} must be {declared.rule}, got {shown}")
    if "profile" in options and options.get("credentials", "profile") != "profile":
        raise StorageOptionError(
            f"the storage option profile needs credentials=profile, got credentials={options['credentials']}; leave "
            "one of the two out"
        )
    if "host-header" in options and "endpoint" not in options and not _from_environment("endpoint"):
        raise StorageOptionError("the storage option host-header needs an endpoint, got none; add endpoint=ADDRESS")


def check_applicable(options: Mapping[str, str], scheme: str, location: str) -> None:
    """Raise StorageOptionError if an option does not apply to a location with this URL scheme ("" for a path)."""
    for name in options:
        declared = STORAGE_OPTIONS[name]
        if scheme not in declared.schemes:
            schemes = " and ".join(f"{each}://" for each in declared.schemes)
            remedy = declared.elsewhere if scheme == "gs" else "leave it out or give a URL"
            raise StorageOptionError(f"the storage option {name} applies to {schemes}, got {location}; {remedy}")


def with_environment(options: Mapping[str, str], location: str) -> dict[str, str]:
    """Return the options for a location, those that are not given taken from environment variables (``s3://`` only).

    Without an endpoint, no region is taken: AWS itself reports that of the bucket, which may be another.

    Raises:
        StorageOptionError: a variable has an invalid value.
    """
    if not location.startswith("s3://"):
        return dict(options)
    found = {name: value for name in STORAGE_OPTIONS if (value := _from_environment(name))}
    if "endpoint" not in found.keys() | options.keys():
        found.pop("region", None)
    for name, value in found.items():
        if name not in options and not STORAGE_OPTIONS[name].is_valid(value):
            variable = next(each for each in STORAGE_OPTIONS[name].variables if os.environ.get(each))
            raise StorageOptionError(f"${variable} must be {STORAGE_OPTIONS[name].rule}; correct or unset it")
    return found | dict(options)


def recorded_options(options: Mapping[str, str]) -> dict[str, str]:
    """Return those of the options in a record that may be used: no account, and no keys for a server that it names.

    If the environment names the same server, the user has named it too, and the keys are sent there.
    """
    found = {name: value for name, value in options.items() if not STORAGE_OPTIONS[name].is_of_user}
    servers = {name: found[name].rstrip("/") for name in ("endpoint", "host-header") if name in found}
    is_users = servers == {"endpoint": (_from_environment("endpoint") or "").rstrip("/")}
    if options.get("credentials") == ANONYMOUS or (servers and not is_users):
        found["credentials"] = ANONYMOUS
    return found


def _from_environment(name: str) -> str | None:
    return next((value for each in STORAGE_OPTIONS[name].variables if (value := os.environ.get(each))), None)


def spec_members(driver: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the members that the options add to TensorStore's specification of a key-value store."""
    if driver != "s3":
        return {}
    members: dict[str, Any] = {}
    if "endpoint" in options:
        # Without a region, TensorStore asks the server for it, and few servers know.
        members = {"endpoint": options["endpoint"].rstrip("/"), "aws_region": "us-east-1"}
    if "region" in options:
        members["aws_region"] = options["region"]
    if "host-header" in options:
        members["host_header"] = options["host-header"]
    if "requester-pays" in options:
        members["requester_pays"] = options["requester-pays"] == "true"
    return members


def context_members(driver: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Return the resources of TensorStore's context for a store: retries, concurrency, credentials, project."""
    if driver not in _DRIVERS:
        return {}
    members: dict[str, Any] = {
        f"{driver}_request_retries": {
            "max_retries": int(options.get("retries", DEFAULT_RETRIES)),
            "initial_delay": _INITIAL_DELAY,
            "max_delay": _MAX_DELAY,
        }
    }
    if "concurrency" in options:
        members[f"{driver}_request_concurrency"] = {"limit": int(options["concurrency"])}
    if "user-project" in options:
        members["gcs_user_project"] = {"project_id": options["user-project"]}
    if driver == "s3":
        members["aws_credentials"] = _credentials(options)
    return members


def _credentials(options: Mapping[str, str]) -> dict[str, str]:
    """Return TensorStore's specification of where S3's keys come from.

    Its own default looks everywhere, and prints several lines for each place without keys.
    """
    if "profile" in options:
        return {"type": "profile", "profile": options["profile"]}
    if "credentials" in options:
        return {"type": options["credentials"]}
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return {"type": "environment"}
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or expand_home("~/.aws/credentials"))
    if file.is_file():
        return {"type": "profile"} | ({"profile": named} if (named := os.environ.get("AWS_PROFILE")) else {})
    if any(os.environ.get(name) for name in _ROLE_VARIABLES):
        return {"type": "default"}
    return {"type": "imds" if "endpoint" not in options and _is_on_ec2() else ANONYMOUS}


def _is_on_ec2() -> bool:
    """Return whether this machine is one of Amazon's, which can have a role."""
    try:
        return "amazon ec2" in _VENDOR_FILE.read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        return False


def timeout_of(driver: str, options: Mapping[str, str]) -> float | None:
    """Return the time limit for a small request in seconds; None if the store is not remote."""
    return float(options.get("timeout", DEFAULT_TIMEOUT_S)) if driver in _DRIVERS else None


def is_url(location: str) -> bool:
    """Return whether a location is the URL of a store, not a path on this machine."""
    return "://" in location


def check_no_user(location: str) -> None:
    """Raise StorageOptionError for a URL with a user or password, which would be recorded; no message repeats them."""
    _, separator, rest = location.partition("://")
    if separator and "@" in re.split(r"[/?#\\]", rest, maxsplit=1)[0]:
        raise StorageOptionError(
            "a URL must have no user or password before its host, because it is recorded: leave them out, and give "
            "keys as $AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY, as profile=NAME or as "
            "$GOOGLE_APPLICATION_CREDENTIALS; copy what a server gives for a password alone"
        )


def expand_home(location: str) -> Path:
    """Return the path that names a file of this machine, a leading ~ expanded if there is such a home folder."""
    return Path(os.path.expanduser(location))  # noqa: PTH111 - pathlib's raises without a home folder


def scheme_of(driver: str) -> str:
    """Return the URL scheme of a driver of TensorStore, "" if the store is not remote."""
    return _DRIVERS.get(driver, "")


def _known() -> str:
    return f"known are {', '.join(STORAGE_OPTIONS)}"
