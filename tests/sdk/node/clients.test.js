// What clients that check the schema of every chunk say of a cluster: node --test, with THALWEG_URL and THALWEG_MODEL.

import assert from "node:assert/strict";
import test from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const { THALWEG_URL: baseURL, THALWEG_MODEL: model, THALWEG_API_KEY: apiKey = "unused" } = process.env;
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", maxLength: 12 } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const request = { model, messages, temperature: 0, max_tokens: 120 };
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const provider = createOpenAICompatible({ name: "thalweg", baseURL, apiKey, includeUsage: true });

test("openai's stream helper adds text up", async () => {
  const stream = client.chat.completions.stream({ ...request, max_tokens: 16, logprobs: true, top_logprobs: 2 });
  const whole = await stream.finalChatCompletion();
  assert.ok(whole.choices[0].message.content);
  assert.ok(Number.isInteger(whole.created));
});

for (const choice of [{ type: "function", function: { name: "get_weather" } }, "required"]) {
  test(`openai's stream helper adds calls up: ${JSON.stringify(choice)}`, async () => {
    const stream = client.chat.completions.stream({ ...request, tools, tool_choice: choice, parallel_tool_calls: false });
    const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.equal(message.tool_calls.length, 1);
    assert.equal(message.tool_calls[0].function.name, "get_weather");
    assert.equal(typeof JSON.parse(message.tool_calls[0].function.arguments).city, "string");
  });
}

test("the AI SDK takes text and usage", async () => {
  const faults = [];
  const onError = ({ error }) => faults.push(error);
  const result = streamText({ model: provider(model), messages, maxOutputTokens: 16, onError });
  assert.ok(await result.text);
  assert.deepEqual(faults, []);
  assert.ok((await result.usage).inputTokens > 0);
});

test("the AI SDK takes forced calls", async () => {
  const faults = [];
  const result = streamText({
    model: provider(model),
    messages,
    maxOutputTokens: 120,
    tools: { get_weather: tool({ inputSchema: z.strictObject({ city: z.string().max(12) }) }) },
    toolChoice: { type: "tool", toolName: "get_weather" },
    onError: ({ error }) => faults.push(error),
  });
  const calls = await result.toolCalls;
  assert.deepEqual(faults, []);
  assert.equal(calls.length, 1);
  assert.equal(typeof calls[0].input.city, "string");
  assert.equal(await result.finishReason, "tool-calls");
});

test("errors are the SDK's own", async () => {
  await assert.rejects(client.chat.completions.create({ ...request, n: 0 }), OpenAI.BadRequestError);
  await assert.rejects(client.chat.completions.create({ ...request, model: "nope" }), OpenAI.NotFoundError);
});
