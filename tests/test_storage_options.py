"""Options of object stores: their parsing, what TensorStore receives, what a run records, and the messages."""

import hashlib
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.records.given_weights import Origin, read_given_weights
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing.dask_request import PackRequest
from loopfeed.preprocess.packing.owner import Owner
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards import location
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.storage_options import (
    StorageOptionError,
    as_text,
    check_options,
    parse_pairs,
    parse_text,
)

DEAD = {"endpoint": "http://127.0.0.1:9", "retries": "0", "credentials": "anonymous"}
URL = "s3://bucket/set"
VALID = {
    "endpoint": "https://storage.example:9000",
    "region": "eu-central-1",
    "host-header": "storage.example",
    "credentials": "profile",
    "profile": "mine",
    "requester-pays": "true",
    "conditional-writes": "false",
    "user-project": "project-1",
    "concurrency": "8",
    "retries": "3",
    "timeout": "20",
}


@pytest.fixture
def uncontacted(monkeypatch):
    monkeypatch.setattr(location, "contact_fault", lambda *_: None)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A home folder without keys."""
    monkeypatch.setenv("HOME", os.fspath(tmp_path))
    return tmp_path


@given(st.sets(st.sampled_from(sorted(VALID))))
def test_options_survive_text(names):
    options = {name: VALID[name] for name in names | ({"endpoint"} if "host-header" in names else set())}
    text = as_text(options)
    assert parse_text(text) == options == parse_pairs((text or "").split(",") if text else ())
    assert storage_options_of(TrainConfig(storage_options=text)) == options


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (
            "endpont=http://a",
            r"^there is no storage option 'endpont': did you mean endpoint\?; known are ",
        ),
        ("endpoint", r"^a storage option must be KEY=VALUE, got 'endpoint'; known are endpoint, "),
        ("endpoint=127.0.0.1:9000", r"must be an address such as http://127\.0\.0\.1:9000, .*got '127\.0\.0\.1:9000'$"),
        ("endpoint=http://", "must be an address"),
        ("region=", "must be a region such as eu-central-1, of .*, got ''"),
        # TensorStore would send the request, and the signature, to bucket.s3.a.example.
        ("region=a.example/", r"must be a region .*, got 'a\.example/'$"),
        ("region=127.0.0.1:9000/b", r"must be a region .*, got '127\.0\.0\.1:9000/b'$"),
        ("credentials=none", "must be one of anonymous, environment, profile, .*, got 'none'"),
        ("retries=-1", r"must be a whole number in 0 … 100, got '-1'"),
        ("timeout=1e3", r"must be a whole number in 1 … 3600"),
        ("host-header=a.example", "needs an endpoint, got none; add endpoint=ADDRESS"),
    ],
)
def test_a_wrong_option_is_refused_with_the_remedy(pair, message):
    with pytest.raises(StorageOptionError, match=message):
        parse_pairs([pair])
    with pytest.raises(
        SettingError, match=f"^storage_options: {'' if message[0] == '^' else '.*'}{message.lstrip('^')}"
    ):
        TrainConfig(storage_options=pair)


@pytest.mark.parametrize(
    "pair",
    ["secret-key=HIDDEN", "aws_secret_access_key=HIDDEN", "token=HIDDEN", "endpoint=http://me:HIDDEN@127.0.0.1"],
)
def test_secrets_are_refused_and_not_repeated(pair):
    with pytest.raises(StorageOptionError) as raised:
        parse_pairs([pair])
    assert "HIDDEN" not in str(raised.value)
    assert "AWS_ACCESS_KEY_ID" in str(raised.value) or "without user, password" in str(raised.value)


def test_contradictions_are_refused():
    with pytest.raises(StorageOptionError, match=r"^the storage option region is given twice, as a and b$"):
        parse_pairs(["region=a", "region=b"])
    with pytest.raises(StorageOptionError, match="profile needs credentials=profile, got credentials=anonymous"):
        check_options({"profile": "a", "credentials": "anonymous"})


@pytest.mark.parametrize(
    ("options", "environment", "members"),
    [
        ({}, {}, {}),
        ({}, {"AWS_REGION": "eu-1", "AWS_DEFAULT_REGION": "eu-2"}, {}),
        ({"region": "eu-3"}, {"AWS_REGION": "eu-1"}, {"aws_region": "eu-3"}),
        (
            {"endpoint": "http://a"},
            {"AWS_REGION": "eu-1", "AWS_DEFAULT_REGION": "eu-2"},
            {"endpoint": "http://a", "aws_region": "eu-1"},
        ),
        (
            {"endpoint": "http://a"},
            {"AWS_DEFAULT_REGION": "eu-2"},
            {"endpoint": "http://a", "aws_region": "eu-2"},
        ),
        ({}, {"AWS_ENDPOINT_URL": "http://a:1/"}, {"endpoint": "http://a:1", "aws_region": "us-east-1"}),
        (
            {"region": "eu"},
            {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"},
            {"endpoint": "http://b", "aws_region": "eu"},
        ),
        (
            {"endpoint": "http://c", "host-header": "d", "requester-pays": "true"},
            {"AWS_ENDPOINT_URL": "http://a"},
            {"endpoint": "http://c", "aws_region": "us-east-1", "host_header": "d", "requester_pays": True},
        ),
    ],
)
def test_what_tensorstore_receives(monkeypatch, uncontacted, options, environment, members):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = open_location(URL, storage_options=options)
    assert found.spec == {"driver": "s3", "bucket": "bucket", "path": "set/"} | members
    assert ts.KvStore.Spec(found.spec).to_json() == found.spec
    assert found.child("train").timeout_s == found.timeout_s == 45


@pytest.mark.parametrize(
    ("url", "options", "resources"),
    [
        (URL, {}, {"s3_request_retries": {"max_retries": 6, "initial_delay": "500ms", "max_delay": "8s"}}),
        (
            URL,
            {"retries": "1"},
            {"s3_request_retries": {"max_retries": 1, "initial_delay": "500ms", "max_delay": "8s"}},
        ),
        (URL, {"concurrency": "3"}, {"s3_request_concurrency": {"limit": 3}}),
        ("gs://bucket/set", {"retries": "4"}, {"gcs_request_retries": {"max_retries": 4}}),
        ("gs://bucket/set", {"concurrency": "3"}, {"gcs_request_concurrency": {"limit": 3}}),
        ("gs://bucket/set", {"user-project": "p"}, {"gcs_user_project": {"project_id": "p"}}),
        ("http://127.0.0.1:9/set", {"retries": "4"}, {"http_request_retries": {"max_retries": 4}}),
    ],
)
def test_the_resources_of_the_context(uncontacted, url, options, resources):
    context = open_location(url, storage_options=options).context
    for name, members in resources.items():
        found = context[name].to_json()
        assert {key: found[key] for key in members} == members


def test_where_the_keys_come_from(monkeypatch, uncontacted, home):
    def found(**options):
        return open_location(URL, storage_options=options).context["aws_credentials"].to_json()

    endpoint = "http://127.0.0.1:9"
    vendor = home / "vendor"
    monkeypatch.setattr("loopfeed.preprocess.storage_options._VENDOR_FILE", vendor)
    assert found() == {"type": "anonymous"}
    vendor.write_text("Amazon EC2\n")
    assert found() == {"type": "imds"}
    assert found(endpoint=endpoint) == {"type": "anonymous"}
    with monkeypatch.context() as inside:
        inside.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/role")
        assert found() == {"type": "default"}
    assert found(endpoint=endpoint, profile="mine") == {"type": "profile", "profile": "mine"}
    assert found(credentials="imds") == {"type": "imds"}
    (home / ".aws").mkdir()
    (home / ".aws/credentials").touch()
    assert found(endpoint=endpoint) == {"type": "profile"}
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert found() == {"type": "profile", "profile": "other"}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    assert found() == {"type": "environment"}
    assert found(credentials="anonymous") == {"type": "anonymous"}


@pytest.mark.parametrize(
    ("url", "option", "message"),
    [
        (
            "gs://bucket/set",
            "endpoint",
            r"endpoint applies to s3://, got gs://.*; .*set \$TENSORSTORE_GCS_HTTP_URL",
        ),
        (URL, "user-project", "user-project applies to gs://, got s3://bucket/set/; leave it out"),
    ],
)
def test_an_option_of_another_store_is_refused(uncontacted, url, option, message):
    with pytest.raises(ShardError, match=message):
        open_location(url, storage_options={option: VALID[option]})


def test_an_invalid_variable_is_named(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:HIDDEN@a")
    with pytest.raises(ShardError, match=r"^\$AWS_ENDPOINT_URL must be an address .*; correct or unset it$"):
        open_location(URL)


def test_a_server_that_stops_is_named_with_its_address(uncontacted, monkeypatch):
    found = open_location(URL, storage_options=DEAD)
    expected = (
        r"^s3://bucket/set/: can't read a: the store at http://127\.0\.0\.1:9 does not answer \(Failed to connect.*\); "
        "check the server and the network$"
    )
    with pytest.raises(ShardError, match=expected):
        found.read("a")
    late = replace(found, timeout_s=7)
    assert late.outage(TimeoutError()) is not None
    assert "(no response within 7 s)" in str(late.outage(TimeoutError()))
    assert late.outage(ValueError("Digest mismatch")) is None


def test_missing_keys_are_named(uncontacted):
    found = open_location(URL, storage_options=DEAD | {"credentials": "environment"})
    with pytest.raises(
        ShardError, match=r"; set \$AWS_ACCESS_KEY_ID and \$AWS_SECRET_ACCESS_KEY, or give --storage-op"
    ):
        found.read("a")


def test_a_refusal_of_the_store_names_the_keys(uncontacted, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("PERMISSION_DENIED: AccessDenied [x-amzn-requestid='sAM']")

    monkeypatch.setattr(ts.KvStore, "read", refuse)
    expected = r"can't read a: PERMISSION_DENIED: AccessDenied; check the address, the keys and their permissions$"
    with pytest.raises(ShardError, match=expected):
        open_location(URL, storage_options=DEAD).read("a")


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_store_that_ignores_conditions_is_named(monkeypatch, is_ignored):
    context = ts.Context()
    notes: list[str] = []
    found = open_location("memory://x", context=context).child("train")
    monkeypatch.setattr(location.Location, "is_remote", True)
    if is_ignored:
        write = ts.KvStore.write
        monkeypatch.setattr(ts.KvStore, "write", lambda store, key, value, **_: write(store, key, value))
    with Owner(found, notify=notes.append) as owner:
        owner.check()
    assert [note.partition(" ignores")[0] for note in notes] == ["warning: the store of memory://x/train/"] * is_ignored


def test_a_file_is_created_on_condition_that_it_does_not_exist(uncontacted, monkeypatch):
    """As the parts of a pack create the plan at the same moment. Only AWS is asked for that without the member."""
    asked = []

    def answer(found, *_):
        asked.append(found.spec.get("use_conditional_write"))
        return SimpleNamespace(generation=b"1")

    monkeypatch.setattr(location.Location, "read", lambda *_: None)
    monkeypatch.setattr(location.Location, "_wait", answer)
    assert open_location(URL, storage_options=DEAD).create("plan", b"")
    assert asked == [True]


def test_workers_reach_the_store_of_the_command_with_their_own_keys(uncontacted, monkeypatch):
    """A request crosses to a machine with other variables, without the keys of the first."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:7")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden-key")
    given = {"timeout": "7", "retries": "1", "conditional-writes": "false"}
    found = open_location(URL, storage_options=given)
    settings = PackSettings(ResizeRule(8, 8))
    sent = pickle.dumps(PackRequest.of("photos", {}, found, given, settings))
    assert b"hidden" not in sent
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:8")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    opened = pickle.loads(sent).open_dest()
    assert replace(opened, context=found.context) == found
    assert opened.spec["endpoint"] == "http://127.0.0.1:7"
    assert opened.context["s3_request_retries"].to_json()["max_retries"] == 1
    assert found.context["aws_credentials"].to_json() == {"type": "environment"}
    assert opened.context["aws_credentials"].to_json() == {"type": "anonymous"}


def test_weights_of_a_url_are_read_like_a_file(tmp_path):
    weights = {"fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_file(weights, tmp_path / "model.safetensors")
    url = f"file://{tmp_path}/model.safetensors"
    given = read_given_weights(url)
    np.testing.assert_array_equal(given.stored.tensors["fc.weight"], weights["fc.weight"])
    sha256 = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert (
        given.origin
        == Origin(url, None, sha256)
        == read_given_weights(url[len("file://") :]).origin._replace(source=url)
    )
    (tmp_path / "damaged").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match=rf"file://{tmp_path}/damaged"):
        read_given_weights(f"file://{tmp_path}/damaged")
    with pytest.raises(ShardError, match=r"/missing does not exist; check the URL$"):
        read_given_weights(f"file://{tmp_path}/missing")
    with pytest.raises(ShardError, match="is not the URL of a file"):
        read_given_weights("s3://bucket")


@pytest.mark.parametrize("url", ["https://me:hidden@host/pack", "s3://hidden@bucket/pack", "http://me:hidden@host?a/b"])
def test_a_url_with_a_user_or_password_is_refused_before_it_is_recorded(url):
    for name in ("data", "init_from", "run_dir"):
        with pytest.raises(
            SettingError, match=rf"^{name}: a URL must have no user or password before its host"
        ) as fault:
            TrainConfig(**{name: url}, synthetic=name == "data")
        assert "hidden" not in str(fault.value)
    with pytest.raises(ShardError, match="a URL must have no user or password before its host") as refused:
        open_location(url)
    assert "hidden" not in str(refused.value)
    for name in ("https://host/a@b", "memory://a/@", "a@b/c"):
        assert TrainConfig(data=name).data == name
