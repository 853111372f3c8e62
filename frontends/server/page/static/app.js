// The frame around the views: header, keys, dialogs, and the stream of the server's state.
import { html, render } from "./vendor/htm-preact.js";
import { Engine } from "./engine.js";
import { note, noteEvents, span } from "./numbers.js";
import { Play } from "./play.js";
import { call, currentModel, events, set, store, useStore } from "./store.js";
import { Events, Models, Requests } from "./tables.js";

const VIEWS = [
  ["play", "Play", null],
  ["engine", "Engine", Engine],
  ["requests", "Requests", Requests],
  ["models", "Models", Models],
  ["events", "Events", Events],
];
const LINKS = { connecting: "connecting", lost: "connection lost", key: "needs a key" };
const KEYS = [
  ["1 … 5", "Play, Engine, Requests, Models, Events"],
  ["/", "Write a prompt"],
  ["Ctrl Enter", "Run it"],
  ["Esc", "Stop the answer"],
  ["← →", "Move over the tokens of an answer"],
  ["?", "This list"],
];
const LONGEST_WAIT_MS = 8000;

const viewOf = (hash) => VIEWS.find(([name]) => name === hash.slice(1))?.[0] ?? "play";
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  document.documentElement.dataset.theme = store.theme || (prefersDark.matches ? "dark" : "light");
}

function take(frame) {
  if (store.frame?.started_at !== frame.started_at) {
    // Another process counts from 0 and names its events anew.
    store.history = {};
    store.events.clear();
  }
  note(store.history, frame);
  noteEvents(store.events, frame.events);
  if (!frame.models.some((each) => each.name === store.model)) store.model = frame.models[0]?.name ?? "";
  set({ frame, link: "live" });
}

// Follow the server's state.  A lost connection is tried again after 0.5 to 8 s.
async function follow() {
  for (let wait = 500; ; wait = Math.min(wait * 2, LONGEST_WAIT_MS)) {
    const attempt = new AbortController();
    let wake;
    store.reconnect = () => {
      attempt.abort();
      wake?.();
    };
    try {
      for await (const frame of events(await call("/ui/state", { signal: attempt.signal }))) {
        take(frame);
        wait = 250;
      }
      // The server ends a stream in order when its time is over.
      set({ link: "connecting" });
    } catch (problem) {
      set({ link: problem.status === 401 ? "key" : "lost" });
    }
    // A new key is tried at once, also if it comes while the server has not answered yet.
    if (attempt.signal.aborted) continue;
    await new Promise((go) => {
      wake = go;
      setTimeout(go, wait);
    });
  }
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("trouper-theme", theme);
  set({ theme });
  paint();
}

function Icon({ d }) {
  return html`<svg
    viewBox="0 0 16 16"
    width="15"
    height="15"
    aria-hidden="true"
    fill="currentColor"
    fill-rule="evenodd"
  >
    <path d=${d} />
  </svg>`;
}
const HALF_DISC = "M8 1.5a6.5 6.5 0 1 0 0 13a6.5 6.5 0 1 0 0-13ZM8 3v10a5 5 0 0 0 0-10Z";
const KEY =
  "M10.5 1.5a4 4 0 0 0-3.8 5.3L1.5 12v2.5H4V13h1.5v-1.5H7l1.9-1.9a4 4 0 1 0 1.6-8.1Zm1 2.2a1.3 1.3 0 1 1 0 2.6a1.3 1.3 0 0 1 0-2.6Z";

function ModelChoice({ frame, model }) {
  const option = (each) => html`<option value=${each.name} selected=${each.name === model}>${each.name}</option>`;
  return html`<select class="model" aria-label="Model" value=${model} onChange=${(e) => set({ model: e.target.value })}>
    ${frame.models.map(option)}
  </select>`;
}

function Header() {
  const { frame, view, link, model } = useStore();
  const now = currentModel();
  const isLive = link === "live";
  const numOpen = frame?.requests.length ?? 0;
  const tab = ([name, text]) =>
    html`<a href=${`#${name}`} aria-current=${view === name ? "page" : undefined}
      >${text}${name === "requests" && numOpen > 0 && html`<span class="badge">${numOpen + frame.more}</span>`}</a
    >`;
  return html`<header class="top">
    <div class="brand"><img src="mark.svg" alt="" /><span>trouper</span><small>${frame?.version ?? ""}</small></div>
    <nav class="tabs" aria-label="Views">${VIEWS.map(tab)}</nav>
    <span class="grow"></span>
    ${frame && html`<${ModelChoice} frame=${frame} model=${model} />`}
    <span class="pill" role="status"
      ><span class=${`dot ${isLive ? now?.state : "lost"}`}></span>${isLive ? now?.state : LINKS[link]}</span
    >
    <span class="pill wide">up ${frame ? span(frame.at - frame.started_at) : "–"}</span>
    <button
      type="button"
      class="icon"
      title="Dark or light"
      aria-label="Change between dark and light"
      onClick=${switchTheme}
    >
      <${Icon} d=${HALF_DISC} />
    </button>
    <button type="button" class="icon" title="API key" aria-label="API key" onClick=${() => set({ dialog: "key" })}>
      <${Icon} d=${KEY} />
    </button>
    <button
      type="button"
      class="icon wide"
      title="Keyboard"
      aria-label="Keyboard shortcuts"
      onClick=${() => set({ dialog: "help" })}
    >
      ?
    </button>
  </header>`;
}

function Dialog({ label, children }) {
  const open = (node) => node && !node.open && node.showModal();
  const onClick = (event) => event.target.tagName === "DIALOG" && event.target.close();
  return html`<dialog
    class="dialog"
    aria-label=${label}
    ref=${open}
    onClose=${() => set({ dialog: "" })}
    onClick=${onClick}
  >
    <h2>${label}</h2>
    ${children}
  </dialog>`;
}

function KeyDialog() {
  const save = (event) => {
    event.preventDefault();
    const key = event.target.elements.key.value.trim();
    sessionStorage.setItem("trouper-key", key);
    set({ key, dialog: "" });
    store.reconnect?.();
  };
  return html`<${Dialog} label="API key">
    <p>It stays in this tab, and goes out as a header to this server only.</p>
    <form onSubmit=${save}><input name="key" type="password" autocomplete="off" aria-label="Key" defaultValue=${store.key} />
      <p><button class="btn main" type="submit">Use it</button></p></form></>`;
}

function HelpDialog() {
  const line = ([key, text]) =>
    html`<dt>${key.split(" ").map((part) => html`<kbd>${part}</kbd> `)}</dt>
      <dd>${text}</dd>`;
  return html`<${Dialog} label="Keyboard"><dl class="keys">${KEYS.map(line)}</dl><p><button type="button" class="btn" onClick=${() => document.querySelector("dialog")?.close()}>Close</button></p></>`;
}

function App() {
  const { view, dialog, toast } = useStore();
  const View = VIEWS.find(([name]) => name === view)[2];
  // Play stays in the document, so that an answer goes on while another view is shown.
  return html`<${Header} />
    <main id="main" tabindex="-1">
      ${View && html`<${View} />`}
      <div hidden=${view !== "play"}><${Play} /></div>
    </main>
    ${dialog === "key" && html`<${KeyDialog} />`} ${dialog === "help" && html`<${HelpDialog} />`}
    <div class="toast" role="status" hidden=${!toast}>${toast}</div>`;
}

function onKey(event) {
  if (event.key === "Escape") store.stop?.();
  const isWriting = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (isWriting || event.ctrlKey || event.metaKey || event.altKey || store.dialog) return;
  if (/^[1-5]$/.test(event.key)) location.hash = VIEWS[event.key - 1][0];
  else if (event.key === "?") set({ dialog: "help" });
  else if (event.key === "/") {
    event.preventDefault();
    location.hash = "play";
    setTimeout(() => document.querySelector("#prompt")?.focus(), 60);
  }
}

store.view = viewOf(location.hash);
paint();
prefersDark.addEventListener("change", paint);
addEventListener("hashchange", () => set({ view: viewOf(location.hash) }));
addEventListener("keydown", onKey);
const root = document.querySelector("#app");
root.textContent = "";
render(html`<${App} />`, root);
follow();
