"""Tool calls and thoughts as users of the openai SDK see them."""

import json

import openai
import pytest

QUESTION = [{"role": "user", "content": "What is the weather in Oslo, and what is 2 + 3?"}]


def tool(name, **properties):
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": f"{name} of it", "parameters": parameters}}


TOOLS = [
    tool("get_weather", city={"type": "string", "maxLength": 12}, unit={"enum": ["celsius", "fahrenheit"]}),
    tool("add", a={"type": "integer", "minimum": 0, "maximum": 99}, b={"type": "integer", "minimum": 0, "maximum": 99}),
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def check_arguments(call):
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        assert set(arguments) == {"city", "unit"} and arguments["unit"] in ("celsius", "fahrenheit")
        assert isinstance(arguments["city"], str) and len(arguments["city"]) <= 12
    else:
        assert call.function.name == "add" and set(arguments) == {"a", "b"}
        assert all(isinstance(value, int) and 0 <= value <= 99 for value in arguments.values())


def request(cluster, **fields):
    return dict(model=cluster.model, messages=QUESTION, tools=TOOLS, temperature=0, max_tokens=200) | fields


def streamed(client, body):
    """The final completion by the SDK's own helper, and every chunk."""
    with client.chat.completions.stream(**body) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        return stream.get_final_completion(), chunks


def choice_of(client, body):
    """The choice of a whole reply, checked to be what the stream says."""
    whole = client.chat.completions.create(**body).choices[0]
    try:
        final, chunks = streamed(client, body)
    except openai.LengthFinishReasonError:
        assert whole.finish_reason == "length"
        return whole
    calls = lambda choice: [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert calls(final.choices[0]) == calls(whole)
    assert final.choices[0].finish_reason == whole.finish_reason
    assert (final.choices[0].message.content or "") == (whole.message.content or "")
    assert len({chunk.id for chunk in chunks}) == 1 and all(isinstance(chunk.created, int) for chunk in chunks)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    parts = [part for delta in deltas for part in delta.tool_calls or []]
    assert all(isinstance(part.index, int) for part in parts)
    assert len([part.id for part in parts if part.id]) == len(whole.message.tool_calls or [])
    return whole


def test_a_named_function_is_called(client, cluster):
    choice = choice_of(client, request(cluster, tool_choice=NAMED))
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.id and call.type == "function" and call.function.name == "get_weather"
    check_arguments(call)


def test_required_calls_keep_to_the_schemas(client, cluster):
    choice = choice_of(client, request(cluster, tool_choice="required", parallel_tool_calls=False))
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    check_arguments(choice.message.tool_calls[0])


def test_unmatched_stops_leave_calls_whole(client, cluster):
    choice = choice_of(client, request(cluster, tool_choice=NAMED, stop=["\n\n", "}}", "zzz", "city"]))
    check_arguments(choice.message.tool_calls[0])


@pytest.mark.parametrize("max_tokens", [1, 4, 8, 12, 16, 40])
def test_a_cut_call_says_so(client, cluster, max_tokens):
    choice = client.chat.completions.create(**request(cluster, tool_choice=NAMED, max_tokens=max_tokens)).choices[0]
    calls = choice.message.tool_calls or []
    try:
        whole = bool(calls) and json.loads(calls[0].function.arguments) is not None
    except ValueError:
        whole = False
    assert choice.finish_reason == ("tool_calls" if whole else "length")


def test_auto_and_none_answer(client, cluster):
    auto = choice_of(client, request(cluster, tool_choice="auto", max_tokens=48))
    for call in auto.message.tool_calls or []:
        assert call.function.name in ("get_weather", "add")
    none = choice_of(client, request(cluster, tool_choice="none", max_tokens=16))
    assert none.message.content and not none.message.tool_calls
    bare = client.chat.completions.create(model=cluster.model, messages=QUESTION, tool_choice="none", max_tokens=4)
    assert bare.choices[0].message.content


def test_a_history_of_calls_goes_on(client, cluster):
    call = choice_of(client, request(cluster, tool_choice=NAMED)).message.tool_calls[0]
    history = QUESTION + [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "7 degrees"}]},
    ]
    for fields in ({"tools": TOOLS}, {}):
        reply = client.chat.completions.create(model=cluster.model, messages=history, max_tokens=8, **fields)
        assert reply.usage.completion_tokens > 0


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice.function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ],
)
def test_wrong_tools_are_named(client, cluster, fields, param):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**request(cluster, **fields))
    assert raised.value.param == param
