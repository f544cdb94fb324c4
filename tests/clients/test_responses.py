"""The Responses API as users of the openai SDK see it. Forced texts come from schemas with one value each."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict


class Capital(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris"]


FORCED = {"city": "Paris"}
FORMAT = {"format": {"type": "json_schema", "name": "capital", "strict": True, "schema": Capital.model_json_schema()}}
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def request(cluster, **fields):
    return dict(model=cluster.model, input="What is the capital of France?", temperature=0, max_output_tokens=200) | fields


def added_up(events):
    """The items that a stream's events add up to."""
    items = {}
    for event in events:
        if event.type == "response.output_item.added":
            items[event.output_index] = ""
        elif event.type in ("response.output_text.delta", "response.function_call_arguments.delta"):
            items[event.output_index] += event.delta
    return [items[at] for at in sorted(items)]


def test_a_response_has_every_field(client, cluster):
    response = client.responses.create(**request(cluster, text=FORMAT, metadata={"a": "b"}, instructions="Be brief."))
    assert response.status == "completed" and response.object == "response" and response.error is None
    assert json.loads(response.output_text) == FORCED
    (message,) = response.output
    assert message.type == "message" and message.role == "assistant" and message.status == "completed"
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens and usage.output_tokens > 0
    assert usage.input_tokens_details.cached_tokens >= 0 and usage.output_tokens_details.reasoning_tokens == 0
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief." and response.store is True
    assert response.text.format.name == "capital" and response.truncation == "disabled"
    # Everything that the SDK's model requires is there and of its type.
    type(response).model_validate(response.to_dict())


def test_events_add_up_to_the_whole(client, cluster):
    body = request(cluster, text=FORMAT)
    events = list(client.responses.create(**body, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [events[0].type, events[1].type, events[-1].type] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]
    whole = events[-1].response
    assert added_up(events) == [whole.output_text] and json.loads(whole.output_text) == FORCED
    done = [event for event in events if event.type == "response.output_text.done"]
    assert [event.text for event in done] == [whole.output_text]
    for event in events:
        type(event).model_validate(event.to_dict())


def test_the_stream_helper_parses(client, cluster):
    fields = request(cluster)
    with client.responses.stream(**fields, text_format=Capital) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds
    assert final.output_parsed == Capital(city="Paris")
    assert client.responses.parse(**fields, text_format=Capital).output_parsed == Capital(city="Paris")


def test_a_call_and_its_result(client, cluster):
    body = request(cluster, tools=[TOOL], tool_choice={"type": "function", "name": "get_weather"})
    events = list(client.responses.create(**body, stream=True))
    response = events[-1].response
    (call,) = response.output
    assert call.type == "function_call" and call.name == "get_weather" and json.loads(call.arguments) == {"city": "Oslo"}
    assert added_up(events) == [call.arguments]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    chained = client.responses.create(
        **request(cluster, input=[result], previous_response_id=response.id, text=FORMAT, tools=[TOOL])
    )
    assert json.loads(chained.output_text) == FORCED and chained.previous_response_id == response.id
    # The same without the store: the whole conversation is sent.
    items = [{"role": "user", "content": body["input"]}, *[item.to_dict() for item in response.output], result]
    resent = client.responses.create(**request(cluster, input=items, text=FORMAT, tools=[TOOL], store=False))
    assert resent.output_text == chained.output_text and resent.usage.input_tokens == chained.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**request(cluster, input=[result]))
    assert error.value.param == "input[0].call_id"


def test_kept_responses(client, cluster):
    first = client.responses.create(**request(cluster, text=FORMAT))
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    second = client.responses.create(**request(cluster, input="And?", previous_response_id=first.id, text=FORMAT))
    assert second.usage.input_tokens > first.usage.input_tokens
    (item,) = client.responses.input_items.list(second.id)
    assert item.role == "user" and item.content[0].text == "And?"
    client.responses.delete(first.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            gone(first.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.create(**request(cluster, previous_response_id=first.id))
    assert error.value.param == "previous_response_id"


def test_an_answer_that_is_cut_off(client, cluster):
    body = request(cluster, max_output_tokens=2)
    response = client.responses.create(**body)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert list(client.responses.create(**body, stream=True))[-1].type == "response.incomplete"


def test_logprobs(client, cluster):
    body = request(cluster, text=FORMAT, include=["message.output_text.logprobs"], top_logprobs=2)
    response = client.responses.create(**body)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(token.token for token in logprobs).startswith(response.output_text)
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in logprobs)
    events = list(client.responses.create(**body, stream=True))
    streamed = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert [token.token for token in streamed] == [token.token for token in logprobs]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"reasoning": {"effort": "endless"}}, "reasoning.effort"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client, cluster, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**request(cluster, **fields))
    assert error.value.param == param
