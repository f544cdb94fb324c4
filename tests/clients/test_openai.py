"""What users of the openai SDK see."""

import json

import openai
import pytest

QUESTION = [{"role": "user", "content": "Write one sentence about the moon."}]


def test_models(client, cluster):
    assert cluster.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(cluster.model).id == cluster.model


def test_chat_is_sensible(client, cluster):
    reply = client.chat.completions.create(model=cluster.model, messages=QUESTION, temperature=0, max_tokens=48)
    choice = reply.choices[0]
    assert "moon" in choice.message.content.lower()
    assert choice.message.role == "assistant" and choice.finish_reason in ("stop", "length")
    usage = reply.usage
    assert usage.prompt_tokens > 10 and usage.completion_tokens > 3
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_says_what_the_whole_reply_says(client, cluster):
    request = dict(model=cluster.model, messages=QUESTION, temperature=0, max_tokens=32)
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert [c.usage is not None for c in chunks].count(True) == 1 and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_an_answer_that_was_begun_goes_on(client, cluster):
    request = dict(model=cluster.model, temperature=0, max_tokens=16)
    whole = client.chat.completions.create(**request, messages=QUESTION).choices[0].message.content
    begun = " ".join(whole.split(" ")[:4])
    messages = QUESTION + [{"role": "assistant", "content": begun}]
    open_end = {"continue_final_message": True}
    rest = client.chat.completions.create(**request, messages=messages, extra_body=open_end)
    assert (begun + rest.choices[0].message.content).startswith(whole) and rest.choices[0].message.content


def test_completions(client, cluster):
    request = dict(model=cluster.model, prompt="The quick brown fox", temperature=0, max_tokens=8)
    whole = client.completions.create(**request, logprobs=2)
    assert whole.choices[0].text
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    streamed = "".join(c.choices[0].text for c in client.completions.create(**request, stream=True) if c.choices)
    assert streamed == whole.choices[0].text


def test_choices_and_seeds(client, cluster):
    request = dict(model=cluster.model, messages=QUESTION, temperature=1.0, max_tokens=16, n=4, seed=11)
    first = client.chat.completions.create(**request)
    again = client.chat.completions.create(**request)
    texts = [[choice.message.content for choice in reply.choices] for reply in (first, again)]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]


def test_logprobs_of_a_chat(client, cluster):
    reply = client.chat.completions.create(
        model=cluster.model, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == reply.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token


RIVER = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "length_km": {"type": "integer", "minimum": 1, "maximum": 9999},
        "navigable": {"type": "boolean"},
    },
    "required": ["name", "length_km", "navigable"],
    "additionalProperties": False,
}


def json_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def check_river(text):
    river = json.loads(text)
    assert river.keys() == RIVER["properties"].keys()
    assert len(river["name"]) <= 12 and 1 <= river["length_km"] <= 9999 and isinstance(river["navigable"], bool)


@pytest.mark.parametrize("temperature", [0, 1])
def test_json_follows_its_schema_streamed_and_not(client, cluster, temperature):
    messages = [{"role": "user", "content": "Describe the river Rhine in JSON."}]
    request = dict(model=cluster.model, messages=messages, temperature=temperature, seed=7, max_tokens=300)
    request["response_format"] = json_schema(RIVER)
    whole = client.chat.completions.create(**request).choices[0]
    check_river(whole.message.content)
    assert whole.finish_reason == "stop"
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.message.content


def test_any_json_object(client, cluster):
    messages = [{"role": "user", "content": "Answer with the JSON object {\"moon\": true} and nothing else."}]
    request = dict(model=cluster.model, messages=messages, temperature=0, max_tokens=400)
    choice = client.chat.completions.create(**request, response_format={"type": "json_object"}).choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_a_single_value_is_forced(client, cluster):
    request = dict(model=cluster.model, messages=QUESTION, temperature=1.5)
    reply = client.chat.completions.create(**request, response_format=json_schema({"enum": ["Thalweg"]}))
    assert json.loads(reply.choices[0].message.content) == "Thalweg"


@pytest.mark.parametrize(
    "constraint",
    [{"guided_choice": ["sun", "moon"]}, {"structured_outputs": {"choice": ["sun", "moon"]}}, {"guided_regex": "sun|moon"}],
    ids=["guided_choice", "structured_outputs", "guided_regex"],
)
def test_vllms_constraints(client, cluster, constraint):
    request = dict(model=cluster.model, messages=QUESTION, temperature=1, n=3)
    reply = client.chat.completions.create(**request, extra_body=constraint)
    assert all(choice.message.content in ("sun", "moon") for choice in reply.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_enforced_is_a_bad_request(client, cluster, stream):
    request = dict(model=cluster.model, messages=QUESTION, stream=stream)
    for schema in ({"type": "wobble"}, {"type": "string", "pattern": "("}, {"$ref": "#/$defs/none"}):
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**request, response_format=json_schema(schema))
        assert raised.value.param == "response_format.json_schema.schema"


def test_a_stream_cut_by_the_client_leaves_the_server_serving(client, cluster):
    stream = client.chat.completions.create(
        model=cluster.model, messages=QUESTION, max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    reply = client.chat.completions.create(model=cluster.model, messages=QUESTION, max_tokens=4)
    assert reply.usage.completion_tokens > 0


@pytest.mark.parametrize(
    "change, error",
    [
        ({"model": "nope"}, openai.NotFoundError),
        ({"messages": []}, openai.BadRequestError),
        ({"temperature": -1}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
        ({"max_tokens": -5}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 50000}]}, openai.BadRequestError),
    ],
    ids=["model", "messages", "temperature", "n", "max_tokens", "context"],
)
def test_bad_requests_raise_the_sdks_errors(client, cluster, change, error):
    request = dict(model=cluster.model, messages=QUESTION, max_tokens=4) | change
    with pytest.raises(error) as raised:
        client.chat.completions.create(**request)
    assert raised.value.body["message"] and raised.value.body["type"] == "invalid_request_error"
    assert client.chat.completions.create(model=cluster.model, messages=QUESTION, max_tokens=2).choices
