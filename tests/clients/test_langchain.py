"""LangChain's ChatOpenAI."""

import asyncio

import openai
import pytest
from forced import RHINE, River, named, one_of, tool
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = [SystemMessage("You are brief."), HumanMessage("Tell me of the river Rhine.")]


@pytest.fixture
def chat(cluster):
    def chat(**options):
        options = dict(model=cluster.model, base_url=cluster.url, api_key="unused", max_retries=0) | options
        return ChatOpenAI(**(dict(temperature=0, max_tokens=16) | options))

    return chat


def test_invoke_and_stream_agree(chat):
    whole = chat().invoke(QUESTION)
    assert isinstance(whole, AIMessage) and whole.content and whole.response_metadata["finish_reason"] in ("stop", "length")
    parts = list(chat(stream_usage=True).stream(QUESTION))
    assert all(isinstance(part, AIMessageChunk) for part in parts)
    total = sum(parts[1:], parts[0])
    assert total.content == whole.content
    assert total.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    for count in ("input_tokens", "output_tokens", "total_tokens"):
        assert total.usage_metadata[count] == whole.usage_metadata[count] > 0


def test_cached_tokens_reach_the_user(chat, cluster):
    prompt = [HumanMessage("A long tale of rivers and bridges. " * 20)]
    chat().invoke(prompt)
    whole = chat().invoke(prompt)
    cached = whole.usage_metadata["input_token_details"]["cache_read"]
    assert 16 <= cached <= whole.usage_metadata["input_tokens"]
    parts = list(chat(stream_usage=True).stream(prompt))
    total = sum(parts[1:], parts[0])
    assert total.usage_metadata["input_token_details"]["cache_read"] == cached
    raw = [{"role": "user", "content": prompt[0].content}]
    reply = cluster.client().chat.completions.create(model=cluster.model, messages=raw, max_tokens=2)
    assert reply.usage.prompt_tokens_details.cached_tokens == cached


def test_batch_and_async(chat):
    questions = [[HumanMessage(f"Say the number {number}.")] for number in range(4)]
    batched = chat().batch(questions)

    async def together():
        return await asyncio.gather(*(chat().ainvoke(question) for question in questions))

    assert [reply.content for reply in batched] == [reply.content for reply in asyncio.run(together())]


@langchain_tool
def measure(river: str, unit: str) -> str:
    """Measures a river."""
    return f"{river} in {unit}"


@langchain_tool
def guess(length: int) -> str:
    """Guesses."""
    return str(length)


def test_tools_are_bound_and_streamed(chat):
    forced = tool("measure", river="Rhine", unit="km")
    bound = chat(max_tokens=400).bind_tools([forced, guess], tool_choice="measure")
    whole = bound.invoke(QUESTION)
    (call,) = whole.tool_calls
    assert call["name"] == "measure" and measure.invoke(call["args"]) == "Rhine in km"
    total = None
    for part in bound.stream(QUESTION):
        total = part if total is None else total + part
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [(call["name"], call["args"])]
    assert not total.invalid_tool_calls and total.tool_calls[0]["id"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    answer = chat(max_tokens=400).with_structured_output(River, method=method).invoke(QUESTION)
    assert answer.model_dump() == RHINE


def test_structured_output_of_a_schema_with_the_raw_reply(chat):
    schema = {"title": "answer", "type": "object", "properties": {"sea": {"const": "north"}}, "required": ["sea"]}
    schema["additionalProperties"] = False
    structured = chat(max_tokens=400).with_structured_output(schema, method="json_schema", include_raw=True)
    answer = structured.invoke(QUESTION)
    assert answer["parsed"] == {"sea": "north"} and answer["parsing_error"] is None


def test_logprobs(chat):
    reply = chat(logprobs=True, top_logprobs=2, max_tokens=4).invoke(QUESTION)
    content = reply.response_metadata["logprobs"]["content"]
    assert len(content) == reply.usage_metadata["output_tokens"] and len(content[0]["top_logprobs"]) == 2


def test_stops_and_seeds(chat):
    random = dict(temperature=1, seed=5, max_tokens=12)
    assert chat(**random).invoke(QUESTION).content == chat(**random).invoke(QUESTION).content
    answer = chat().bind(response_format=one_of("one two")).invoke(QUESTION, stop=["two"])
    assert "one" in answer.content and "two" not in answer.content


def test_completions(cluster):
    model = OpenAI(model=cluster.model, base_url=cluster.url, api_key="unused", temperature=0, max_tokens=8)
    assert model.invoke("The quick brown fox") == "".join(model.stream("The quick brown fox"))
    assert len(model.generate(["One river", "Two rivers"]).generations) == 2


def test_errors_are_the_sdks(chat):
    with pytest.raises(openai.NotFoundError):
        chat(model="nope").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError):
        chat(temperature=-1).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError):
        chat().bind(tools=[tool("f", a=1)], tool_choice=named("g")).invoke(QUESTION)
