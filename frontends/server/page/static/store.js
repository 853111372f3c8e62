// State that all views share, and how the page asks the server.
import { useEffect, useState } from "./vendor/htm-preact.js";

export const store = {
  view: "play",
  model: "",
  frame: null,
  // Events by model and id, the oldest first.
  events: new Map(),
  history: {},
  // connecting, live, lost, or key: the server wants a key.
  link: "connecting",
  key: sessionStorage.getItem("trouper-key") ?? "",
  theme: localStorage.getItem("trouper-theme") ?? "",
  dialog: "",
  toast: "",
};

const watchers = new Set();
let isDue = false;

// Change the state.  Views are drawn again at most once for each picture of the screen.
export function set(change) {
  Object.assign(store, change);
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    for (const draw of watchers) draw();
  });
}

export function useStore() {
  const [, draw] = useState(0);
  useEffect(() => {
    const again = () => draw((n) => n + 1);
    watchers.add(again);
    return () => watchers.delete(again);
  }, []);
  return store;
}

export function toast(text) {
  set({ toast: text });
  setTimeout(() => store.toast === text && set({ toast: "" }), 4000);
}

export const currentModel = () =>
  store.frame?.models.find((each) => each.name === store.model) ?? store.frame?.models[0];

// Paths are relative to the folder of the page, so a proxy may put a prefix in front.
const address = (path) => new URL(`..${path}`, new URL(".", import.meta.url)).href;

// Send a request.  The key goes out as a header and to this server only.
export async function call(path, { body, method = body ? "POST" : "GET", signal } = {}) {
  const headers = { ...(body && { "content-type": "application/json" }) };
  if (store.key) headers.authorization = `Bearer ${store.key}`;
  const answer = await fetch(address(path), { method, headers, body: body && JSON.stringify(body), signal });
  if (answer.ok) return answer;
  if (answer.status === 401) set({ dialog: "key" });
  throw Object.assign(new Error(await problem(answer)), { status: answer.status });
}

async function problem(answer) {
  const text = await answer.text();
  try {
    const { error } = JSON.parse(text);
    return `${answer.status} · ${error.message ?? error}`;
  } catch {
    return `${answer.status} · ${text.slice(0, 200)}`;
  }
}

// Yield the events of a stream as they come.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const lines = rest
        .slice(0, end)
        .split("\n")
        .filter((line) => line.startsWith("data: "));
      const data = lines.map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
