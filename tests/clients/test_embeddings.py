"""Embeddings as users of the openai SDK see them."""

import math

import openai
import pytest

TEXTS = ["The cat sat on the mat.", "The cat is sitting on the mat.", "Interest rates rose by 2% in May 1994."]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_the_sdks_own_way_is_base64_and_says_what_floats_say(client, cluster):
    packed = client.embeddings.create(model=cluster.model, input=TEXTS)
    plain = client.embeddings.create(model=cluster.model, input=TEXTS, encoding_format="float")
    assert [item.embedding for item in packed.data] == [pytest.approx(item.embedding, abs=1e-7) for item in plain.data]
    assert [item.index for item in packed.data] == [0, 1, 2] and packed.object == "list"
    assert packed.model == cluster.model and packed.data[0].object == "embedding"
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 20
    for item in packed.data:
        assert math.isclose(dot(item.embedding, item.embedding), 1.0, abs_tol=1e-5)
    vectors = [item.embedding for item in packed.data]
    assert dot(vectors[0], vectors[1]) > dot(vectors[0], vectors[2])


def test_raw_base64_is_left_to_who_asks_for_it(client, cluster):
    reply = client.embeddings.create(model=cluster.model, input="a", encoding_format="base64")
    assert isinstance(reply.data[0].embedding, str)


def test_token_ids_and_dimensions(client, cluster):
    reply = client.embeddings.create(model=cluster.model, input=[[1, 2, 3], [4]], dimensions=8)
    assert [len(item.embedding) for item in reply.data] == [8, 8] and reply.usage.prompt_tokens == 4
    whole = client.embeddings.create(model=cluster.model, input=[1, 2, 3])
    assert len(whole.data) == 1
    cut = whole.data[0].embedding[:8]
    length = math.sqrt(dot(cut, cut))
    assert reply.data[0].embedding == pytest.approx([x / length for x in cut], abs=1e-6)


def test_errors_are_the_sdks(client, cluster):
    for wrong in [{"input": ""}, {"input": []}, {"input": "a", "dimensions": 100_000}, {"input": ["a"] * 2049}]:
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model=cluster.model, **wrong)
        assert refused.value.param in ("input", "dimensions")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nope", input="a")


def test_options_of_vllm(client, cluster):
    long = "word " * 100_000
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=cluster.model, input=long)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "input"
    cut = client.embeddings.create(model=cluster.model, input=long, extra_body={"truncate_prompt_tokens": 16})
    assert cut.usage.prompt_tokens == 16
