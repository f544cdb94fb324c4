"""The openai SDK's typed helpers, and streams that are given up."""

import concurrent.futures

import openai
import pydantic
import pytest
from forced import QUESTION, RHINE, River, one_of


def test_parse_returns_the_model(client, cluster):
    reply = client.chat.completions.parse(model=cluster.model, messages=QUESTION, response_format=River, max_tokens=400)
    assert reply.choices[0].message.parsed.model_dump() == RHINE
    assert reply.choices[0].finish_reason == "stop"


def test_a_stream_parses_too(client, cluster):
    request = dict(model=cluster.model, messages=QUESTION, response_format=River, max_tokens=400)
    with client.chat.completions.stream(**request) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "chunk"} <= kinds
    assert final.choices[0].message.parsed.model_dump() == RHINE


def test_a_cut_answer_is_not_parsed(client, cluster):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=cluster.model, messages=QUESTION, response_format=River, max_tokens=3)


def test_a_typed_tool_is_parsed(client, cluster):
    tool = openai.pydantic_function_tool(River)
    request = dict(model=cluster.model, messages=QUESTION, tools=[tool], tool_choice="required", max_tokens=400)
    reply = client.chat.completions.parse(**request, parallel_tool_calls=False)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "River" and call.function.parsed_arguments.model_dump() == RHINE


class Node(pydantic.BaseModel):
    """A tree, whose schema refers to itself."""

    value: int = pydantic.Field(ge=0, le=9)
    children: list["Node"] = pydantic.Field(max_length=1)


def test_a_recursive_model_has_a_schema(client, cluster):
    request = dict(model=cluster.model, messages=QUESTION, response_format=Node, temperature=0, max_tokens=120)
    try:
        node = client.chat.completions.parse(**request).choices[0].message.parsed
        assert 0 <= node.value <= 9
    except openai.LengthFinishReasonError:
        pass  # It may nest for as long as it likes.


def test_many_at_once(client, cluster):
    def ask(number):
        request = dict(model=cluster.model, messages=QUESTION, max_tokens=100)
        return client.chat.completions.create(**request, response_format=one_of(f"answer {number}"))

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(ask, range(16)))
    assert [reply.choices[0].message.content for reply in replies] == [f'"answer {n}"' for n in range(16)]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_stream_that_is_closed_frees_its_worker(client, cluster, kind):
    request = dict(model=cluster.model, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    if kind == "chat":
        stream = client.chat.completions.create(messages=QUESTION, **request)
    else:
        stream = client.completions.create(prompt="The moon", **request)
    next(iter(stream))
    cluster.eventually("thalweg_router_worker_running", 1)
    stream.close()
    for metric in ("worker_running", "worker_bookings", "streams"):
        cluster.eventually(f"thalweg_router_{metric}", 0)


def test_a_call_that_times_out_frees_its_worker(cluster):
    client = cluster.client(timeout=1)
    with pytest.raises(openai.APITimeoutError):
        request = dict(model=cluster.model, messages=QUESTION, max_tokens=4000, extra_body={"ignore_eos": True})
        client.chat.completions.create(**request)
    cluster.eventually("thalweg_router_worker_running", 0)
