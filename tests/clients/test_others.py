"""Clients that need another interpreter: Node's, and those of the openai SDK's version 2. Same clusters, own runners."""

import os
import pathlib
import subprocess

import pytest

HERE = pathlib.Path(__file__).parent
LIMIT_SECONDS = 300


def pytest_generate_tests(metafunc):
    if "file" in metafunc.fixturenames:
        metafunc.parametrize("file", sorted(path.name for path in (HERE / "node").glob("*.test.js")))


def run(command, **environment):
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def broken(simulated):
    """A cluster whose worker leaves every answer at its second message."""
    return simulated("faults: { garbage: truncated }", "--resumes-max", "0", THALWEG_LOG_LEVEL="off")


def test_node(pytestconfig, cluster, calling, broken, file):
    urls = {"THALWEG_URL": cluster.url, "THALWEG_CALLING_URL": calling.url, "THALWEG_BROKEN_URL": broken.url}
    node = [pytestconfig.getoption("--node"), "--test", str(HERE / "node" / file)]
    assert "fail 0" in run(node, THALWEG_MODEL=cluster.model, **urls)


def test_openai_2(pytestconfig, cluster):
    python = pytestconfig.getoption("--python-openai2")
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--url", cluster.url, "--served", cluster.model]
    assert " passed" in run(command + [str(HERE / "openai2")])
