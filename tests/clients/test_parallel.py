"""Two calls in one answer, behind a sentence: what clients put together from their pieces."""

import json

import litellm
from forced import arguments
from langchain_openai import ChatOpenAI
from test_tools import TOOLS

QUESTION = [{"role": "user", "content": "What is the weather in Oslo, and what is 2 + 3?"}]
CALLS = [("get_weather", {"city": "Oslo", "unit": "celsius"}), ("add", {"a": 2, "b": 3})]


def test_with_the_openai_sdk(calling):
    request = dict(model=calling.model, messages=QUESTION, tools=TOOLS)
    client = calling.client()
    whole = client.chat.completions.create(**request).choices[0]
    with client.chat.completions.stream(**request) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [event.name for event in done] == [name for name, _ in CALLS]
    for choice in (whole, final):
        assert choice.finish_reason == "tool_calls" and choice.message.content.strip() == "I look it up."
        assert [(call.function.name, arguments(call)) for call in choice.message.tool_calls] == CALLS
        assert len({call.id for call in choice.message.tool_calls}) == 2


def test_only_one_where_only_one_is_wanted(calling):
    request = dict(model=calling.model, messages=QUESTION, tools=TOOLS, parallel_tool_calls=False)
    choice = calling.client().chat.completions.create(**request).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


def test_deltas_name_a_call_once(calling):
    request = dict(model=calling.model, messages=QUESTION, tools=TOOLS)
    calls = {}
    for chunk in calling.client().chat.completions.create(**request, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            if part.index not in calls:
                assert part.id and part.type == "function" and part.function.name
                calls[part.index] = [part.function.name, ""]
            else:
                assert part.id is None and part.function.name is None
            calls[part.index][1] += part.function.arguments
    assert [(name, json.loads(text)) for _, (name, text) in sorted(calls.items())] == CALLS


def test_with_langchain(calling):
    model = ChatOpenAI(model=calling.model, base_url=calling.url, api_key="unused").bind_tools(TOOLS)
    whole = model.invoke(QUESTION)
    parts = list(model.stream(QUESTION))
    for message in (whole, sum(parts[1:], parts[0])):
        assert [(call["name"], call["args"]) for call in message.tool_calls] == CALLS
        assert message.content.strip() == "I look it up." and not message.invalid_tool_calls


def test_with_litellm(calling):
    request = dict(model=f"openai/{calling.model}", api_base=calling.url, api_key="unused", messages=QUESTION, tools=TOOLS)
    rebuilt = litellm.stream_chunk_builder(list(litellm.completion(**request, stream=True)))
    for reply in (litellm.completion(**request), rebuilt):
        calls = reply.choices[0].message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
