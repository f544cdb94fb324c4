"""LiteLLM, by its library: the provider is any server of OpenAI's API."""

import json
import os

# It would otherwise ask for its price list before the first call.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pytest
from forced import QUESTION, RHINE, River, named, tool


@pytest.fixture
def request_of(cluster):
    def request(**fields):
        options = dict(model=f"openai/{cluster.model}", api_base=cluster.url, api_key="unused", max_retries=0)
        return options | dict(messages=QUESTION, temperature=0, max_tokens=16) | fields

    return request


def test_a_stream_says_what_the_whole_reply_says(request_of):
    whole = litellm.completion(**request_of())
    chunks = list(litellm.completion(**request_of(), stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.choices[0].finish_reason == whole.choices[0].finish_reason
    assert rebuilt.usage.prompt_tokens == whole.usage.prompt_tokens
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens


def test_cached_tokens_are_told_in_streams_too(request_of):
    messages = [{"role": "user", "content": "A tale of bridges and rivers. " * 20}]
    litellm.completion(**request_of(messages=messages))
    whole = litellm.completion(**request_of(messages=messages)).usage
    chunks = litellm.completion(**request_of(messages=messages), stream=True, stream_options={"include_usage": True})
    streamed = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)][-1]
    assert whole.prompt_tokens_details.cached_tokens >= 16
    assert streamed.prompt_tokens_details.cached_tokens == whole.prompt_tokens_details.cached_tokens


def test_tools_streamed_and_not(request_of):
    fields = dict(tools=[tool("measure", river="Rhine")], tool_choice=named("measure"), max_tokens=200)
    whole = litellm.completion(**request_of(**fields)).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert call.function.name == "measure" and json.loads(call.function.arguments) == {"river": "Rhine"}
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**request_of(**fields), stream=True)))
    (streamed,) = rebuilt.choices[0].message.tool_calls
    assert streamed.function.name == "measure" and streamed.function.arguments == call.function.arguments


def test_structured_output(request_of):
    reply = litellm.completion(**request_of(response_format=River, max_tokens=400))
    assert River.model_validate_json(reply.choices[0].message.content).model_dump() == RHINE


def test_completions(request_of, cluster):
    request = request_of(model=f"text-completion-openai/{cluster.model}", prompt="The river", max_tokens=4)
    del request["messages"]
    assert litellm.text_completion(**request).choices[0].text


def test_errors_are_its_own(request_of):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**request_of(model="openai/nope"))
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**request_of(temperature=-1))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**request_of(messages=[{"role": "user", "content": "word " * 50000}]))
