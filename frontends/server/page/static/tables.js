// The views that are lists: requests, models, events.
import { html } from "./vendor/htm-preact.js";
import { bytes, clock, round, seconds, short, span } from "./numbers.js";
import { call, set, store, toast, useStore } from "./store.js";

const WHY_NOT = {
  none: "The server has no control routes: start it with --dev-mode or --admin-key.",
  key: "This needs the administrator's key.",
};
// Why this client may not use control routes, or null.
const obstacle = (frame) => (frame.may_control ? null : frame.has_control ? WHY_NOT.key : WHY_NOT.none);

export function EventList({ events, n = 200 }) {
  const last = [...events.values()].slice(-n).reverse();
  if (!last.length) return html`<p class="empty">Nothing has happened: no loss, no preemption, no refusal.</p>`;
  const line = (event) =>
    html`<li key=${`${event.model}/${event.id}`}>
      <time>${clock(event.at)}</time><span class=${`dot ${event.kind}`} aria-hidden="true"></span>
      <span>${event.text} <span class="who">· ${event.model}</span></span>
    </li>`;
  return html`<ol class="feed">
    ${last.map(line)}
  </ol>`;
}

export function Events() {
  const { events } = useStore();
  return html`<h1 class="unseen">Events</h1>
    <section class="card pad">
      <h2>Events <span class="aside">the last 200</span></h2>
      <${EventList} events=${events} />
    </section>`;
}

async function abort(id) {
  try {
    const answer = await call("/abort_requests", { body: { request_ids: [id] } });
    toast((await answer.json()).aborted ? "aborted" : "it has ended already");
  } catch (problem) {
    toast(problem.message);
  }
}

const STATES = { prompt: ["loading", "first token"], running: ["awake", "running"], ending: ["", "ending"] };
const COLUMNS = [
  ["Request"],
  ["Model"],
  ["Route"],
  ["Key"],
  ["Age", "num"],
  ["Prompt", "num"],
  ["Output", "num"],
  ["tokens/s", "num"],
  ["State"],
  ["Action"],
];

function RequestRow({ request, why }) {
  const [dot, state] = STATES[request.state];
  const pace = request.num_output_tokens ? round(request.num_output_tokens / request.age_s, 1) : "–";
  return html`<tr>
    <td class="mono">${request.id.slice(0, 22)}</td>
    <td>${request.model}</td>
    <td class="mono">${request.route}</td>
    <td>${request.key || "–"}</td>
    <td class="num">${seconds(request.age_s)}</td>
    <td class="num">${short(request.num_prompt_tokens)}</td>
    <td class="num">${short(request.num_output_tokens)}</td>
    <td class="num">${pace}</td>
    <td>
      <span class="pill"><span class=${`dot ${dot}`}></span>${state}</span>
    </td>
    <td>
      <button
        type="button"
        class="btn small"
        disabled=${why !== null}
        title=${why ?? ""}
        aria-label=${`Abort request ${request.id}`}
        onClick=${() => abort(request.id)}
      >
        Abort
      </button>
    </td>
  </tr>`;
}

export function Requests() {
  const { frame } = useStore();
  if (!frame) return html`<p class="empty">Waiting for the first frame …</p>`;
  const title = html`<h1 class="unseen">Requests</h1>`;
  if (!frame.requests.length) {
    return html`${title}
      <div class="card">
        <p class="empty">
          No request is open. Ask something in <a href="#play">Play</a>, or send one with any OpenAI or Ollama client.
        </p>
      </div>`;
  }
  const why = obstacle(frame);
  const row = (request) => html`<${RequestRow} key=${request.id} request=${request} why=${why} />`;
  return html`${title}
    <div class="card scroll" tabindex="0" role="region" aria-label="Open requests">
      <table>
        <thead>
          <tr>
            ${COLUMNS.map(([name, kind]) => html`<th class=${kind} scope="col">${name}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${frame.requests.map(row)}
        </tbody>
      </table>
    </div>
    ${frame.more > 0 && html`<p class="foot">${round(frame.more)} more are open.</p>`}
    ${why !== null && html`<p class="foot">${why}</p>`}`;
}

const sleep = (level) => `/sleep?level=${level}&mode=keep`;
const WAKE = ["Wake", "/wake_up", "Takes requests again."];
const SLEEP = ["Sleep", sleep(2), "Also gives the weights back; waking reads them again."];
// By state: what can be done, the route for it, and what it means.
const ACTIONS = {
  awake: [
    ["Doze", sleep(1), "Gives the KV cache and working copies of the weights back; awake again in milliseconds."],
    SLEEP,
  ],
  dozing: [WAKE, SLEEP],
  asleep: [WAKE],
  paused: [["Resume", "/resume", "Schedules requests again."]],
};
// Of a server with several models.
const LOAD = ["Load", "/models/load", "Starts its worker and reads its weights."];
const UNLOAD = ["Unload", "/models/unload", "Stops its worker when its requests have ended."];

function actionsOf(frame, state) {
  if (frame.budget_bytes === null) return ACTIONS[state] ?? [];
  return ["cold", "failed", "dozing", "asleep"].includes(state) ? [LOAD] : state === "awake" ? [UNLOAD] : [];
}

async function act(model, [label, path]) {
  set({ busy: { ...store.busy, [model]: label } });
  try {
    await call(path, path.startsWith("/models/") ? { body: { model } } : { method: "POST" });
  } catch (problem) {
    toast(problem.message);
  }
  set({ busy: { ...store.busy, [model]: undefined } });
}

function Card({ frame, model, why, busy }) {
  const { card } = model;
  const chips = card && [
    card.architecture.replace(/For[A-Z]\w+/, ""),
    ...card.can,
    card.dtype || "not loaded",
    card.device,
    card.num_replicas > 1 ? `${card.num_replicas} replicas` : card.worker,
  ];
  const facts = card && [
    ["Context", `${round(card.max_model_len)} tokens`],
    ["Weights", bytes(card.num_weight_bytes)],
    [
      "Worker",
      model.process_ids.length ? `${model.process_ids.join(", ")} · ${bytes(model.memory_bytes)}` : "in the server",
    ],
    ["Open requests", round(model.num_open)],
    ["Tokens written", short(model.counters?.tokens)],
  ];
  const button = (action) =>
    html`<button
      type="button"
      class=${`btn small ${["Wake", "Resume", "Load"].includes(action[0]) ? "main" : ""}`}
      title=${why ?? action[2]}
      disabled=${why !== null || !!busy}
      onClick=${() => act(model.name, action)}
    >
      ${action[0]}
    </button>`;
  const see = () => {
    set({ model: model.name });
    location.hash = "engine";
  };
  return html`<section class="card pad modelcard" aria-label=${model.name}>
    <h2>
      <span class=${`dot ${model.state}`}></span>${model.name}<span class="aside"
        >${busy ? `${busy.toLowerCase()} …` : model.state}</span
      >
    </h2>
    ${
      card &&
      html`<div class="chips">${chips.map((chip) => html`<span class="chip">${chip}</span>`)}</div>
        <dl class="facts">
          ${facts.map(
            ([name, value]) =>
              html`<dt>${name}</dt>
                <dd>${value}</dd>`,
          )}
        </dl>`
    }
    <div class="acts">
      ${actionsOf(frame, model.state).map(button)}<span class="grow"></span
      ><button type="button" class="btn small ghost" onClick=${see}>See its actors</button>
    </div>
  </section>`;
}

export function Models() {
  const { frame, busy = {} } = useStore();
  if (!frame) return html`<p class="empty">Waiting for the first frame …</p>`;
  const whole = frame.budget_bytes ?? frame.machine_bytes;
  const used = frame.models.reduce((sum, model) => sum + model.memory_bytes, frame.memory_bytes);
  const parts = [
    ["front", "server", frame.memory_bytes],
    ...frame.models.map((model, i) => [`w${i % 4}`, model.name, model.memory_bytes]),
  ];
  const bar = ([kind, , size]) =>
    size > 0 && html`<span class=${kind} style=${{ width: `${(size / whole) * 100}%` }}></span>`;
  const note = ([kind, name, size]) =>
    html`<span><i class=${kind}></i>${name} ${size ? bytes(size) : "without a process"}</span>`;
  const why = obstacle(frame);
  return html`<h1 class="unseen">Models</h1>
    <section class="card pad">
      <h2>
        Memory <span class="aside">${bytes(used)} of ${bytes(whole)} · up ${span(frame.at - frame.started_at)}</span>
      </h2>
      <div class="budget" role="img" aria-label=${`${bytes(used)} of ${bytes(whole)} used`}>${parts.map(bar)}</div>
      <div class="legend">${parts.map(note)}</div>
    </section>
    <div class="models">
      ${frame.models.map((model) => html`<${Card} key=${model.name} frame=${frame} model=${model} why=${why} busy=${busy[model.name]} />`)}
    </div>
    ${why !== null && html`<p class="foot">${why}</p>`}`;
}
