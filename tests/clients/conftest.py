"""Clusters of one machine for the tests of clients: the binary and the model come from the command line."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time
import urllib.request

import openai
import pytest

# These need another major version of the openai SDK; test_others.py runs them with an interpreter that has it.
collect_ignore = [] if openai.__version__.startswith("2.") else ["openai2"]

PATIENCE_SECONDS = 60


def pytest_addoption(parser):
    parser.addoption("--binary", help="the thalweg binary")
    parser.addoption("--model", help="an instruct model")
    parser.addoption("--node", default="node", help="Node's binary")
    parser.addoption("--python-openai2", help="an interpreter with openai2/requirements.txt")
    parser.addoption("--url", help="a cluster that runs already, instead of --binary and --model")
    parser.addoption("--served", help="what it serves")


class Cluster:
    """A running cluster, and what clients need to know of it."""

    def __init__(self, process, model, url):
        self.process, self.model, self.url = process, model, url

    def client(self, **options):
        """The openai SDK's client, without retries unless they are asked for."""
        return openai.OpenAI(**(dict(base_url=self.url, api_key="unused", max_retries=0, timeout=120) | options))

    def get(self, path, body=None):
        """The text at a path that the SDK does not know, with a body by POST."""
        url = self.url.removesuffix("/v1") + path
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
            return reply.read().decode()

    def metric(self, name):
        """The sum of a metric over its labels."""
        text = self.get("/metrics")
        return sum(map(float, re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))

    def eventually(self, name, value):
        """Asks again and again until a metric has a value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (found := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} stays {found}, not {value}"

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(timeout=PATIENCE_SECONDS) == 0, "SIGTERM must drain and exit 0"


def start(binary, model, *options, **environment):
    command = [binary, "up", "--model", model, "--http", "127.0.0.1:0", *options]
    environment = os.environ | {"THALWEG_LOG_LEVEL": "warn"} | environment
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    line = process.stdout.readline()
    ready = re.match(r"ready: (\S+) at (\S+)$", line.strip())
    assert ready, f"expected the ready line, got {line!r}; exit code {process.poll()}"
    return Cluster(process, *ready.groups())


@pytest.fixture(scope="session")
def cluster(pytestconfig):
    """The model itself on two workers."""
    option = pytestconfig.getoption
    if url := option("--url"):
        yield Cluster(None, option("--served"), url)
        return
    cluster = start(option("--binary"), option("--model"), "--workers", "2", "--kv-cache-memory-bytes", "128MiB")
    yield cluster
    cluster.stop()


@pytest.fixture
def client(cluster):
    return cluster.client()


@pytest.fixture(scope="session")
def simulated(pytestconfig, tmp_path_factory):
    """Starts clusters that answer as a profile says, for what a model cannot be made to do."""
    started = []

    def simulate(profile, *options, **environment):
        path = pathlib.Path(tmp_path_factory.mktemp("profile")) / "profile.yaml"
        path.write_text(profile)
        option = pytestconfig.getoption
        options = ("--engine", "sim", "--profile", str(path), "--workers", "1", *options)
        started.append(start(option("--binary"), option("--model"), *options, **environment))
        return started[-1]

    yield simulate
    for cluster in started:
        cluster.stop()


TWO_CALLS = """I look it up.
<tool_call>
{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "celsius"}}
</tool_call>
<tool_call>
{"name": "add", "arguments": {"a": 2, "b": 3}}
</tool_call>"""


@pytest.fixture(scope="session")
def calling(cluster, simulated):
    """A cluster whose every answer is a sentence and two tool calls."""
    body = {"prompt": TWO_CALLS, "add_special_tokens": False}
    tokens = json.loads(cluster.get("/tokenize", body))["tokens"]
    # One more for the end.
    profile = {"tokens": {"script": [tokens]}, "output_tokens": {"fixed": len(tokens) + 1}}
    return simulated(json.dumps(profile))
