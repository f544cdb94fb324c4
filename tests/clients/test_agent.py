"""An agent's long loop of tool calls: every round's history comes back whole, and from the prefix cache."""

import json

from forced import arguments, named, one_of, tool
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

ROUNDS = 12
# The second is never called: a round chooses one of several.
TOOLS = [tool("step", mile=list(range(8))), tool("rest", hours=1)]


def result(number):
    return json.dumps({"seen": f"bridge {number}"})


def check_cache(prompts, cached):
    """A round computes little more than what it added."""
    assert prompts == sorted(prompts)
    assert sum(cached[1:]) > 0.6 * sum(prompts[1:]), (prompts, cached)


def test_with_the_openai_sdk(client, cluster):
    messages = [{"role": "user", "content": "Walk down the river."}]
    prompts, cached = [], []
    for number in range(ROUNDS):
        request = dict(model=cluster.model, messages=messages, tools=TOOLS, temperature=0, max_tokens=200)
        reply = client.chat.completions.create(**request, tool_choice=named("step"))
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "step" and arguments(call)["mile"] in range(8)
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result(number)})
        prompts.append(reply.usage.prompt_tokens)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    request = dict(model=cluster.model, messages=messages, tools=TOOLS, max_tokens=200)
    last = client.chat.completions.create(**request, tool_choice="none", response_format=one_of("The sea."))
    assert json.loads(last.choices[0].message.content) == "The sea."
    assert len({message["tool_call_id"] for message in messages if message["role"] == "tool"}) == ROUNDS
    check_cache(prompts, cached)


def test_with_langchain(cluster):
    options = dict(model=cluster.model, base_url=cluster.url, api_key="unused", max_retries=0)
    model = ChatOpenAI(**options, temperature=0, max_tokens=200)
    forced = model.bind_tools(TOOLS, tool_choice="step")
    messages = [HumanMessage("Swim up the river.")]
    for number in range(ROUNDS):
        reply = forced.invoke(messages)
        (call,) = reply.tool_calls
        assert call["name"] == "step" and call["args"]["mile"] in range(8) and not reply.invalid_tool_calls
        messages += [reply, ToolMessage(result(number), tool_call_id=call["id"])]
    last = model.bind_tools(TOOLS, tool_choice="none").bind(response_format=one_of("The spring.")).invoke(messages)
    assert json.loads(last.content) == "The spring."
    replies = [message.usage_metadata for message in messages if isinstance(message, AIMessage)]
    check_cache([r["input_tokens"] for r in replies], [r["input_token_details"]["cache_read"] for r in replies])
