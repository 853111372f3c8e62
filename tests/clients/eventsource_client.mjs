// The npm package `eventsource` reads a durable stream over a connection that breaks again and again: node eventsource_client.mjs FOLDER URL,
// where the folder has the package in its node_modules.
import assert from "node:assert/strict";
import http from "node:http";
import { createRequire } from "node:module";

const [folder, url] = process.argv.slice(2);
const { EventSource } = createRequire(`${folder}/`)("eventsource");
const answer = await fetch(`${url}/v1/completions`, {
  method: "POST",
  headers: { "content-type": "application/json", "idempotency-key": "eventsource" },
  body: JSON.stringify({ prompt: "Once", max_tokens: 40, temperature: 1, ignore_eos: true, stream: true }),
});
const id = answer.headers.get("x-stream-id");
const expected = [...(await answer.text()).matchAll(/^data: (.*)$/gm)].map((found) => found[1]);

let numConnections = 0;
const statuses = [];
const proxy = http.createServer((request, response) => {
  numConnections += 1;
  const headers = { ...request.headers, host: new URL(url).host };
  http.get(`${url}${request.url}`, { headers }, (upstream) => {
    statuses.push(upstream.statusCode);
    response.writeHead(upstream.statusCode, upstream.headers);
    let numBytes = 0;
    upstream.on("data", (chunk) => {
      if (response.writableEnded) return;
      response.write(chunk.subarray(0, 3000 - numBytes));
      numBytes += chunk.length;
      if (numBytes >= 3000) {
        upstream.destroy();
        response.end();
      }
    });
    upstream.on("end", () => response.end());
    upstream.on("error", () => response.end());
  });
});
await new Promise((done) => proxy.listen(0, "127.0.0.1", done));
const received = [];
const source = new EventSource(`http://127.0.0.1:${proxy.address().port}/v1/streams/${id}`);
source.onmessage = (event) => received.push(event.data);
await new Promise((done) => {
  source.onerror = () => source.readyState === source.CLOSED && done();
});
proxy.close();
assert.deepEqual(received, expected);
assert(numConnections > 2);
assert.equal(statuses.at(-1), 204);
