// What the Play view asks: bodies of requests, their answers as they come, and the same requests as commands.
import { call, events, store } from "./store.js";

export const START = { temperature: 0.7, top_p: 1, max_tokens: 256, seed: 7, system: "", schema: "", probs: false };

const linesOf = (text) => text.split("\n").filter((line) => line.trim());
const STREAM = { stream: true, stream_options: { include_usage: true } };

// Return the path and the body of a request.  Throws SyntaxError if the schema is no JSON.
export function requestOf(mode, model, settings, text, turns = [], images = []) {
  if (mode === "embed") return ["/v1/embeddings", { model, input: linesOf(text) }];
  if (mode === "rerank") {
    const [query = "", ...documents] = linesOf(text);
    return ["/rerank", { model, query, documents }];
  }
  const { temperature, top_p, max_tokens, seed } = settings;
  if (mode === "fill") {
    const [input_prefix, input_suffix = ""] = text.split("<gap>");
    return ["/infill", { model, input_prefix, input_suffix, n_predict: max_tokens, temperature, top_p, seed }];
  }
  const body = { model, temperature, top_p, max_tokens, seed, return_token_ids: true, ...STREAM };
  if (settings.schema.trim()) {
    const json_schema = { name: "answer", schema: JSON.parse(settings.schema) };
    body.response_format = { type: "json_schema", json_schema };
  }
  if (mode === "complete") return ["/v1/completions", { ...body, prompt: text, logprobs: 5 }];
  const system = settings.system ? [{ role: "system", content: settings.system }] : [];
  const before = turns.map((turn) => ({ role: turn.role, content: contentOf(turn.text, turn.images) }));
  const messages = [...system, ...before, { role: "user", content: contentOf(text, images) }];
  const probs = settings.probs && { logprobs: true, top_logprobs: 5 };
  return ["/v1/chat/completions", { ...body, messages, ...probs }];
}
function contentOf(text, images = []) {
  if (!images.length) return text;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}

// Send a request.  `onPart` gets what there is so far, after each event of a stream.
export async function ask([path, body], signal, onPart) {
  const begun = performance.now();
  const found = { text: "", thinking: "", tokens: [], ids: [], usage: null, first: null, reason: null };
  const whole = () => ({ ...found, total: performance.now() - begun });
  const answer = await call(path, { body, signal });
  if (!body.stream) {
    const result = await answer.json();
    const usage = result.usage ?? { completion_tokens: result.tokens_predicted };
    return { ...whole(), result, text: result.content ?? "", ids: result.tokens ?? [], usage };
  }
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    found.usage = event.usage ?? found.usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    const delta = choice.delta ?? { content: choice.text };
    const thinking = delta.reasoning ?? delta.reasoning_content ?? "";
    if ((delta.content || thinking) && found.first === null) found.first = performance.now() - begun;
    found.text += delta.content ?? "";
    found.thinking += thinking;
    found.reason = choice.finish_reason ?? found.reason;
    found.ids.push(...(choice.token_ids ?? []));
    found.tokens.push(...tokensOf(choice.logprobs));
    onPart(whole());
  }
  return whole();
}

// Read the logprobs of a chat or of a completion as probabilities.
function tokensOf(logprobs) {
  if (logprobs?.content) {
    return logprobs.content.map((one) => ({
      text: one.token,
      p: Math.exp(one.logprob),
      top: one.top_logprobs.map((other) => [other.token, Math.exp(other.logprob)]),
    }));
  }
  return (logprobs?.tokens ?? []).map((text, i) => ({
    text,
    p: Math.exp(logprobs.token_logprobs[i]),
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, value]) => [other, Math.exp(value)]),
  }));
}

// Return whether two answers to one request have the same tokens.
export function isSame(one, other) {
  const key = (answer) => JSON.stringify(answer.ids.length ? answer.ids : [answer.text, answer.result]);
  return key(one) === key(other);
}

const shownBody = (body) => ({ ...body, stream: undefined, stream_options: undefined });
const addressOf = (path) => new URL(`..${path}`, location.href).href;

export function asCurl([path, body]) {
  const key = store.key ? ` \\\n  -H "authorization: Bearer $KEY"` : "";
  const quoted = JSON.stringify(shownBody(body), null, 1).replaceAll("'", "'\\''");
  return `curl -s ${addressOf(path)} \\\n  -H 'content-type: application/json'${key} \\\n  -d '${quoted}'`;
}

export function asPython([path, body]) {
  // The body is JSON within a Python string, so no value has to be spelled in Python.
  const quoted = JSON.stringify(JSON.stringify(shownBody(body)));
  const key = store.key ? `, "authorization": "Bearer " + os.environ["KEY"]` : "";
  return `import os\nimport urllib.request\n
body = ${quoted}
headers = {"content-type": "application/json"${key}}
request = urllib.request.Request("${addressOf(path)}", body.encode(), headers)
print(urllib.request.urlopen(request).read().decode())`;
}
