// Vercel's AI SDK, which holds every chunk to a schema.

import assert from "node:assert/strict";
import test from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

import { apiKey, baseURL, brokenURL, calls, callingURL, messages, model, rhine, river } from "./setup.js";

const at = (url, options) =>
  createOpenAICompatible({ name: "thalweg", baseURL: url, apiKey, includeUsage: true, supportsStructuredOutputs: true, ...options });
const provider = at(baseURL);
const request = { model: provider(model), messages, temperature: 0, maxOutputTokens: 200, maxRetries: 0 };

/// What streamText says, with the faults that it would otherwise only log.
const streamed = async (options) => {
  const faults = [];
  const result = streamText({ ...options, onError: ({ error }) => faults.push(error) });
  const parts = [];
  for await (const part of result.fullStream) parts.push(part);
  return { result, parts, faults };
};

test("texts and their usage agree, streamed and not", async () => {
  const short = { ...request, maxOutputTokens: 16 };
  const whole = await generateText(short);
  const { result, faults } = await streamed(short);
  assert.deepEqual(faults, []);
  assert.ok(whole.text);
  assert.equal(await result.text, whole.text);
  assert.equal(await result.finishReason, whole.finishReason);
  const { inputTokens, outputTokens } = await result.usage;
  assert.deepEqual([inputTokens, outputTokens], [whole.usage.inputTokens, whole.usage.outputTokens]);
  assert.ok(inputTokens > 0 && outputTokens > 0);
});

test("objects follow their schema", async () => {
  const schema = jsonSchema(river);
  assert.deepEqual((await generateObject({ ...request, schema })).object, rhine);
  const growing = streamObject({ ...request, schema });
  const partial = [];
  for await (const object of growing.partialObjectStream) partial.push(object);
  assert.deepEqual(partial.at(-1), rhine);
  const output = Output.object({ schema: z.object({ name: z.literal("Rhine"), length_km: z.literal(1233) }) });
  assert.deepEqual((await generateText({ ...request, output })).output, rhine);
});

test("a forced call is made, streamed and not", async () => {
  const tools = { note: tool({ inputSchema: jsonSchema(river) }) };
  const forced = { ...request, tools, toolChoice: { type: "tool", toolName: "note" } };
  const whole = await generateText(forced);
  const { result, faults } = await streamed(forced);
  assert.deepEqual(faults, []);
  for (const made of [whole.toolCalls, await result.toolCalls]) {
    assert.deepEqual(made.map(({ toolName, input }) => [toolName, input]), [["note", rhine]]);
  }
  assert.equal(await result.finishReason, "tool-calls");
});

test("an agent calls its tool round after round", async () => {
  const rounds = 11;
  let notes = 0;
  const tools = { note: tool({ inputSchema: jsonSchema(river), execute: async () => ({ seen: `bridge ${(notes += 1)}` }) }) };
  const { steps } = await generateText({ ...request, tools, toolChoice: "required", stopWhen: stepCountIs(rounds),
    providerOptions: { thalweg: { parallel_tool_calls: false } } });
  assert.equal(steps.length, rounds);
  assert.ok(notes >= rounds);
});

test("two calls of one answer are told apart", async () => {
  const tools = Object.fromEntries(calls.map(([name]) => [name, tool({ inputSchema: jsonSchema({ type: "object" }) })]));
  const asked = { ...request, model: at(callingURL)(model), tools };
  const whole = await generateText(asked);
  const { result, faults } = await streamed(asked);
  assert.deepEqual(faults, []);
  for (const made of [whole.toolCalls, await result.toolCalls]) {
    assert.deepEqual(made.map(({ toolName, input }) => [toolName, input]), calls);
  }
  assert.equal((await result.text).trim(), "I look it up.");
});

test("errors have their status and their message", async () => {
  const refused = generateText({ ...request, topP: 2 });
  await assert.rejects(refused, (error) => APICallError.isInstance(error) && error.statusCode === 400 && /top_p/.test(error.message));
  const { faults, parts } = await streamed({ ...request, model: at(brokenURL)(model) });
  assert.ok(faults.length > 0 || parts.some((part) => part.type === "error"));
});
