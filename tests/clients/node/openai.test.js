// The openai SDK for Node.

import assert from "node:assert/strict";
import test from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { apiKey, baseURL, brokenURL, calls, callingURL, messages, model, rhine } from "./setup.js";

const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const request = { model, messages, temperature: 0, max_tokens: 200 };
const Rhine = z.object({ name: z.literal("Rhine"), length_km: z.literal(1233) });
const functions = [
  { type: "function", function: { name: "get_weather", parameters: { type: "object" } } },
  { type: "function", function: { name: "add", parameters: { type: "object" } } },
];

test("models are listed", async () => {
  const served = [];
  for await (const { id } of client.models.list()) served.push(id);
  assert.ok(served.includes(model));
});

test("a stream says what the whole reply says", async () => {
  const short = { ...request, max_tokens: 16, logprobs: true, top_logprobs: 2 };
  const whole = await client.chat.completions.create(short);
  const stream = client.chat.completions.stream({ ...short, stream_options: { include_usage: true } });
  const added = await stream.finalChatCompletion();
  assert.equal(added.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(added.choices[0].logprobs.content.length, whole.usage.completion_tokens);
  assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
  assert.ok(Number.isInteger(added.created));
});

test("a stream that is given up leaves the server serving", async () => {
  const stream = await client.chat.completions.create({ ...request, max_tokens: 4000, stream: true, ignore_eos: true });
  for await (const chunk of stream) if (chunk.choices.length > 0) break;
  assert.ok((await client.chat.completions.create({ ...request, max_tokens: 2 })).choices);
});

test("an answer is parsed", async () => {
  const response_format = zodResponseFormat(Rhine, "river");
  const reply = await client.chat.completions.parse({ ...request, response_format });
  assert.deepEqual(reply.choices[0].message.parsed, rhine);
});

for (const choice of [{ type: "function", function: { name: "note" } }, "required"]) {
  test(`a forced call is added up and parsed: ${JSON.stringify(choice)}`, async () => {
    const tools = [zodFunction({ name: "note", parameters: Rhine })];
    const stream = client.chat.completions.stream({ ...request, tools, tool_choice: choice, parallel_tool_calls: false });
    const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.deepEqual(message.tool_calls.map((call) => call.function.parsed_arguments), [rhine]);
  });
}

test("two calls of one answer are told apart", async () => {
  const calling = new OpenAI({ baseURL: callingURL, apiKey, maxRetries: 0 });
  const whole = await calling.chat.completions.create({ model, messages, tools: functions });
  const added = await calling.chat.completions.stream({ model, messages, tools: functions }).finalChatCompletion();
  for (const { choices } of [whole, added]) {
    const made = choices[0].message.tool_calls.map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
    assert.deepEqual(made, calls);
    assert.equal(choices[0].message.content.trim(), "I look it up.");
  }
});

test("errors are the SDK's own", async () => {
  await assert.rejects(client.chat.completions.create({ ...request, n: 0 }), OpenAI.BadRequestError);
  await assert.rejects(client.chat.completions.create({ ...request, model: "nope" }), OpenAI.NotFoundError);
  const broken = new OpenAI({ baseURL: brokenURL, apiKey, maxRetries: 0 });
  const stream = await broken.chat.completions.create({ ...request, stream: true });
  const read = async () => {
    for await (const chunk of stream) assert.ok(chunk.choices.every((choice) => choice.finish_reason === null));
  };
  await assert.rejects(read(), (error) => error instanceof OpenAI.APIError && error.message.includes("worker was lost"));
});
