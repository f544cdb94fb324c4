"""What the openai SDK makes of errors: its exception classes, its retries, streams that break."""

import hashlib
import json
import threading

import openai
import pytest
from forced import QUESTION

KEY = "tw-wide"
NARROW_KEY = "tw-narrow"
ENDLESS = {"extra_body": {"ignore_eos": True}, "max_tokens": 4000}


@pytest.fixture(scope="module")
def guarded(simulated, tmp_path_factory):
    """A cluster with two keys, one of a tenant that may have one request at a time; it says 20 tokens a second."""
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    sha256 = {key: hashlib.sha256(key.encode()).hexdigest() for key in (KEY, NARROW_KEY)}
    keys = [{"name": "wide", "sha256": sha256[KEY]}, {"name": "narrow", "sha256": sha256[NARROW_KEY], "requests-max": 1}]
    path.write_text(json.dumps({"keys": keys}))
    profile = "step: { base_seconds: 0.05 }"
    return simulated(profile, "--api-keys-file", str(path), "--metrics-public")


def ask(client, model, **fields):
    return client.chat.completions.create(**(dict(model=model, messages=QUESTION, max_tokens=2) | fields))


def test_keys_are_checked(guarded):
    assert ask(guarded.client(api_key=KEY), guarded.model).choices
    with pytest.raises(openai.AuthenticationError) as raised:
        ask(guarded.client(api_key="another"), guarded.model)
    assert raised.value.code == "invalid_api_key" and raised.value.type == "authentication_error"
    with pytest.raises(openai.AuthenticationError):
        guarded.client(api_key="another").models.list()


def test_too_many_requests_say_when_to_come_back(guarded):
    client = guarded.client(api_key=NARROW_KEY)
    stream = ask(client, guarded.model, stream=True, **ENDLESS)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as raised:
        ask(client, guarded.model)
    stream.close()
    assert raised.value.code == "overloaded" and raised.value.type == "rate_limit_error"
    assert int(raised.value.response.headers["retry-after"]) >= 1
    guarded.eventually("thalweg_router_streams", 0)


def test_the_sdk_tries_again_until_there_is_room(guarded):
    refused = threading.Event()

    def look(response):
        if response.status_code == 429:
            refused.set()

    http = openai.DefaultHttpxClient(event_hooks={"response": [look]})
    patient = guarded.client(api_key=NARROW_KEY, max_retries=50, http_client=http)
    stream = ask(patient, guarded.model, stream=True, **ENDLESS)
    next(iter(stream))
    replies = []
    waiting = threading.Thread(target=lambda: replies.append(ask(patient, guarded.model)))
    waiting.start()
    assert refused.wait(60), "the second request was let in beside the first"
    stream.close()
    waiting.join(60)
    assert replies and replies[0].usage.completion_tokens == 2


def test_a_stream_that_breaks_raises(simulated):
    broken = simulated("faults: { garbage: truncated }", "--resumes-max", "0", THALWEG_LOG_LEVEL="off")
    request = dict(model=broken.model, messages=QUESTION, max_tokens=64)
    client = broken.client()
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = []
    with pytest.raises(openai.APIError) as raised:
        chunks.extend(stream)
    assert raised.value.body["message"] and raised.value.type == "service_unavailable_error"
    assert not any(choice.finish_reason for chunk in chunks for choice in chunk.choices)
    with pytest.raises(openai.InternalServerError) as raised:
        client.chat.completions.create(**request)
    assert raised.value.status_code == 503 and raised.value.body["message"]


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"top_p": 2}, "top_p"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"extra_body": {"max_tokens": "many"}}, "max_tokens"),
    ],
)
def test_bad_requests_name_their_field(client, cluster, fields, param):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, cluster.model, **fields)
    assert raised.value.param == param and raised.value.code == "invalid_request"


def test_other_errors_have_their_classes(client, cluster):
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("nope")
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.post("/nowhere", cast_to=object, body={})
    with pytest.raises(openai.APIConnectionError):
        cluster.client(base_url="http://127.0.0.1:9/v1").models.list()
    with pytest.raises(openai.APIStatusError) as raised:
        ask(client, cluster.model, messages=[{"role": "user", "content": "x" * (33 << 20)}])
    assert raised.value.status_code == 413
