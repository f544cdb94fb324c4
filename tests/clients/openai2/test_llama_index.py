"""LlamaIndex's OpenAILike."""

import asyncio

import openai
import pytest
from forced import QUESTION, RHINE, River
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

MESSAGES = [ChatMessage(role="user", content=QUESTION[0]["content"])]


@pytest.fixture
def model(cluster):
    def model(**options):
        options = dict(temperature=0, max_tokens=16, max_retries=0, is_chat_model=True) | options
        return OpenAILike(model=options.pop("model", cluster.model), api_base=cluster.url, api_key="unused", **options)

    return model


def test_a_chat_and_its_stream(model):
    whole = model().chat(MESSAGES)
    assert whole.message.content and whole.raw.usage.completion_tokens > 0
    parts = list(model().stream_chat(MESSAGES))
    assert parts[-1].message.content == whole.message.content
    assert "".join(part.delta or "" for part in parts) == whole.message.content


def test_completions(model):
    for is_chat in (True, False):
        plain = model(is_chat_model=is_chat)
        whole = plain.complete("The quick brown fox")
        assert whole.text and list(plain.stream_complete("The quick brown fox"))[-1].text == whole.text


def test_at_once(model):
    async def ask():
        return await asyncio.gather(*(model().achat(MESSAGES) for _ in range(3)))

    assert len({reply.message.content for reply in asyncio.run(ask())}) == 1


def measure(river: str, unit: str) -> str:
    """Measures a river."""
    return f"{river} in {unit}"


def test_tools_are_called(model):
    calling = model(is_function_calling_model=True, max_tokens=300)
    tools = [FunctionTool.from_defaults(measure)]
    reply = calling.chat_with_tools(tools, user_msg="Measure the Rhine.", tool_required=True)
    calls = calling.get_tool_calls_from_response(reply, error_on_no_tool_call=True)
    assert calls[0].tool_name == "measure" and calls[0].tool_kwargs.keys() == {"river", "unit"}


@pytest.mark.parametrize("options", [{"is_function_calling_model": True}, {"should_use_structured_outputs": True}])
def test_structured_output(model, options):
    structured = model(max_tokens=400, **options).as_structured_llm(River)
    assert structured.chat(MESSAGES).raw.model_dump() == RHINE


def test_errors_are_the_sdks(model):
    with pytest.raises(openai.NotFoundError):
        model(model="nope").chat(MESSAGES)
    with pytest.raises(openai.BadRequestError):
        model(additional_kwargs={"top_p": 2}).chat(MESSAGES)
