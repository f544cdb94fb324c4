"""A cluster of one machine for the SDK tests: the binary and the model come from the command line."""

import re
import signal
import subprocess

import openai
import pytest


def pytest_addoption(parser):
    parser.addoption("--binary", required=True, help="the thalweg binary")
    parser.addoption("--model", required=True, help="an instruct model")


class Cluster:
    def __init__(self, process, model, url):
        self.process, self.model, self.url = process, model, url

    def client(self, **options):
        return openai.OpenAI(base_url=self.url, api_key="unused", max_retries=0, timeout=120, **options)


@pytest.fixture(scope="session")
def cluster(pytestconfig):
    command = [pytestconfig.getoption("binary"), "up", "--model", pytestconfig.getoption("model")]
    command += ["--http", "127.0.0.1:0", "--workers", "2", "--kv-cache-memory-bytes", "128MiB", "--log-level", "warn"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    ready = re.match(r"ready: (\S+) at (\S+)$", line.strip())
    assert ready, f"expected the ready line, got {line!r}; exit code {process.poll()}"
    yield Cluster(process, *ready.groups())
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0, "SIGTERM must drain and exit 0"


@pytest.fixture
def client(cluster):
    return cluster.client()
