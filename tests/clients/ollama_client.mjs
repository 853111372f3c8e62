// The npm package `ollama` against a server of the demo model and one that embeds: node ollama_client.mjs FOLDER URL URL,
// where the folder has the package in its node_modules.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [folder, chatUrl, poolingUrl] = process.argv.slice(2);
const { Ollama } = createRequire(`${folder}/`)("ollama");
const client = new Ollama({ host: chatUrl });
const [{ name: model, size, details }] = (await client.list()).models;
assert(size > 0 && details.family);
assert.equal((await client.ps()).models[0].name, model);
const shown = await client.show({ model });
assert(shown.capabilities.includes("completion") && shown.template);

const messages = [{ role: "user", content: "Hello" }];
const options = { temperature: 0, num_predict: 8 };
const whole = await client.chat({ model, messages, options, keep_alive: "5m" });
assert.equal(whole.done_reason, "length");
let text = "", last;
for await (const part of await client.chat({ model, messages, options, stream: true })) {
  text += part.message.content;
  last = part;
}
assert.equal(text, whole.message.content);
assert(last.done && last.eval_count === 8 && last.total_duration > 0);

const format = { type: "object", properties: { ok: { type: "boolean" } }, required: ["ok"] };
const closed = await client.chat({ model, messages, format, options: { num_predict: 60 } });
assert(JSON.parse(closed.message.content).ok !== undefined);
const tools = [{ type: "function", function: { name: "f", description: "f", parameters: { type: "object", properties: {} } } }];
await client.chat({ model, messages, tools, options });
assert((await client.generate({ model, prompt: "Hello", options })).response);
assert((await client.generate({ model, prompt: "Hello", raw: true, options })).response);
assert((await client.generate({ model, prompt: "", keep_alive: 0 })).done);

// The demo model does not think, so this is Ollama's own answer to `think`.
const unthinking = await client.chat({ model, messages, options, think: false });
assert(unthinking.message.content && !unthinking.message.thinking);
await assert.rejects(client.chat({ model, messages, think: true }), /does not support thinking/);
await assert.rejects(client.chat({ model: "other", messages }), /other/);
await assert.rejects(client.chat({ model, messages: [{ role: "user", content: "x", images: ["aGk="] }] }), /images/);
const endless = await client.chat({ model, messages, options: { num_predict: 400 }, stream: true });
setTimeout(() => client.abort(), 50);
await assert.rejects(async () => { for await (const _ of endless); }, { name: "AbortError" });

const pooling = new Ollama({ host: poolingUrl });
const [{ name: embedder }] = (await pooling.list()).models;
const { embeddings } = await pooling.embed({ model: embedder, input: ["one", "two"] });
assert.equal(embeddings.length, 2);
assert(Math.abs(embeddings[0].reduce((sum, x) => sum + x * x, 0) - 1) < 1e-3);
