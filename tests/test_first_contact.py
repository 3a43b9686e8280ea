"""The first contact with a remote store: an address where nothing answers is one line, soon; a slow store works."""

import http.server
import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest
from click.testing import CliRunner

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.run.train import plan_run
from loopfeed.preprocess.commands import cli, inspect_cli
from loopfeed.preprocess.shards import store_errors
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import fake_source, pack

REFUSED = "http://127.0.0.1:9/set"


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(store_errors, "_RETRIES", {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"})


@contextmanager
def silent_server():
    """Accept connections, and never answer."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/set"


@contextmanager
def folder_server(folder, delay_s=0.0, first_codes=()):
    """Serve a folder, each answer after a delay, the first ones with error codes."""
    codes = list(first_codes)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=folder)

        def do_GET(self):
            time.sleep(delay_s)
            if codes:
                self.send_error(codes.pop(0))
            else:
                super().do_GET()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_server_that_never_answers_is_given_up_and_named(monkeypatch):
    assert store_errors.CONTACT_TIMEOUT_S <= 15
    monkeypatch.setattr(store_errors, "CONTACT_TIMEOUT_S", 0.3)
    with silent_server() as address, pytest.raises(ShardError, match=rf"^{address} .* \(no response within 0\.3 s\);"):
        open_location(address)


@pytest.mark.parametrize("url", ["gs://bucket/set", REFUSED])
def test_each_command_reports_an_unreachable_store_in_one_line(tmp_path, monkeypatch, url):
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "none")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").touch()
    for result in (
        CliRunner().invoke(inspect_cli.main, [url]),
        CliRunner().invoke(cli.main, [str(tmp_path), url]),
    ):
        assert result.exit_code == 2
        (line,) = [each for each in result.stderr.splitlines() if "Listing" not in each]
        assert f": {url} cannot be reached (" in line
    with pytest.raises(ValueError, match=f"^{url} cannot be reached"):
        plan_run(TrainConfig(data=url))


def test_a_slow_store_whose_first_answers_are_errors_works(tmp_path):
    pack(fake_source(4), tmp_path)
    with folder_server(tmp_path, delay_s=0.05, first_codes=(503, 503)) as url:
        assert open_split(url, "train").num_images == 4


def test_a_refusal_is_an_answer():
    with folder_server("/", first_codes=(403,)) as url:
        assert store_errors.contact_fault(open_location(url).spec, open_location(url).context) is None


def test_a_local_folder_is_not_contacted(monkeypatch, tmp_path):
    monkeypatch.setattr(store_errors, "_RETRIES", None)
    local, memory = open_location(str(tmp_path)), open_location("memory://x")
    assert (local.spec["driver"], memory.spec["driver"]) == ("file", "memory")
