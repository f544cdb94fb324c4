"""Instructor, in each of its modes that a server must know something for."""

import asyncio

import instructor
import openai
import pytest
from forced import QUESTION, RHINE, River
from pydantic import BaseModel, Field

MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT]


@pytest.mark.parametrize("mode", MODES)
def test_a_model_comes_back(cluster, mode):
    client = instructor.from_openai(cluster.client(), mode=mode)
    request = dict(model=cluster.model, messages=QUESTION, max_tokens=400, temperature=0, max_retries=0)
    river, reply = client.chat.completions.create_with_completion(response_model=River, **request)
    assert river.model_dump() == RHINE and reply.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_model_grows_while_it_streams(cluster, mode):
    client = instructor.from_openai(cluster.client(), mode=mode)
    request = dict(model=cluster.model, messages=QUESTION, max_tokens=400, temperature=0, max_retries=0)
    parts = list(client.chat.completions.create_partial(response_model=River, **request))
    assert len(parts) > 2 and parts[-1].model_dump() == RHINE


def test_json_mode(cluster):
    """The schema stands in the prompt alone here: what comes back is JSON, if not that of the schema."""
    client = instructor.from_openai(cluster.client(), mode=instructor.Mode.JSON)
    request = dict(model=cluster.model, messages=QUESTION, max_tokens=400, temperature=0, max_retries=0)

    class Anything(BaseModel, extra="allow"):
        note: str = Field(default="")

    try:
        assert client.chat.completions.create(response_model=Anything, **request) is not None
    except (instructor.core.InstructorRetryException, instructor.core.IncompleteOutputException):
        pass  # A small model may write without end.


def test_at_once(cluster):
    options = dict(base_url=cluster.url, api_key="unused", max_retries=0)

    async def ask():
        client = instructor.from_openai(openai.AsyncOpenAI(**options), mode=instructor.Mode.TOOLS)
        request = dict(model=cluster.model, messages=QUESTION, max_tokens=400, max_retries=0, temperature=0)
        return await asyncio.gather(*(client.chat.completions.create(response_model=River, **request) for _ in range(3)))

    assert [river.model_dump() for river in asyncio.run(ask())] == [RHINE] * 3
