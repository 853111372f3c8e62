// The Engine view: what each actor holds, drawn as a stage, with the pace of the last minutes and the KV cache.
import { html } from "./vendor/htm-preact.js";
import { bytes, mean, percent, quantile, round, seconds, short } from "./numbers.js";
import { currentModel, store, useStore } from "./store.js";
import { EventList } from "./tables.js";

// A line with its area.  The accessible name has the last and the highest value.
export function Spark({ values, color = "var(--accent)", label }) {
  const n = 120;
  const tail = values.slice(-n);
  const top = Math.max(1e-9, ...tail) * 1.15;
  const x = (i) => ((i + n - tail.length) / (n - 1)) * 300;
  const y = (value) => 43 - (value / top) * 38;
  const line = tail.map((value, i) => `${i ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  const area = tail.length > 1 ? `${line}L300 44L${x(0).toFixed(1)} 44Z` : "";
  const name = `${label}: now ${round(tail.at(-1) ?? 0, 1)}, at most ${round(Math.max(0, ...tail), 1)}`;
  return html`<svg class="spark" viewBox="0 0 300 44" preserveAspectRatio="none" role="img" aria-label=${name}>
    <path d=${area} fill=${color} opacity=".13" />
    <path
      d=${line}
      fill="none"
      stroke=${color}
      stroke-width="1.6"
      vector-effect="non-scaling-stroke"
      stroke-linejoin="round"
    />
  </svg>`;
}

function Tile({ label, aside, value, unit, values, color }) {
  return html`<div class="card tile">
    <div class="label"><b>${aside}</b>${label}</div>
    <div class="big">${value}<small>${unit}</small></div>
    <${Spark} values=${values} color=${color} label=${label} />
  </div>`;
}

// Five lamps: each stands for twice the messages of the one below.
function Inbox({ x, y, n }) {
  const lit = Math.min(5, Math.ceil(Math.log2(n + 1)));
  const lamp = (i) =>
    html`<rect class=${`inbox ${i < lit ? "on" : ""}`} x=${x} y=${y + (4 - i) * 10.5} width="6" height="7.5" rx="2" />`;
  return html`<g>${[0, 1, 2, 3, 4].map(lamp)}</g>`;
}

function Actor({ x, y, w = 138, h = 84, title, value, sub, inbox, isHot, isBad, children }) {
  return html`<g class=${`node ${isHot ? "hot" : ""} ${isBad ? "bad" : ""}`}>
    <rect class="box" x=${x} y=${y} width=${w} height=${h} rx="12" />
    <text class="t" x=${x + 13} y=${y + 22}>${title}</text>
    <text class="v" x=${x + 13} y=${y + 48}>${value}</text>
    <text class="s" x=${x + 13} y=${y + 68}>${sub}</text>
    ${inbox !== undefined && html`<${Inbox} x=${x + w - 15} y=${y + 16} n=${inbox} />`} ${children}
  </g>`;
}

// One seat for each request slot: lit while its sequence runs.  Dashed circles below wait for a seat.
function Seats({ x, y, w, model }) {
  const { running, waiting, suspects } = model;
  const total = model.card.max_num_seqs;
  const size = total > 60 ? 8 : total > 32 ? 13 : 19;
  const gap = size + (total > 60 ? 3 : 8.2);
  const perRow = Math.max(1, Math.floor(w / gap));
  const numSeats = Math.min(Math.max(total, running), perRow * 6);
  const place = (i, top) => ({
    cx: x + (i % perRow) * gap + size / 2,
    cy: top + Math.floor(i / perRow) * gap + size / 2,
  });
  const circle = (i, top, kind) => html`<circle class=${`seat ${kind}`} ...${place(i, top)} r=${size / 2 - 1} />`;
  const kindOf = (i) => (i < suspects ? "suspect" : i < running ? "on" : "");
  const below = y + Math.ceil(numSeats / perRow) * gap + 6;
  const numPlaces = perRow * Math.max(1, Math.floor((y + 102 - below) / gap));
  const shown = waiting > numPlaces ? numPlaces - 1 : waiting;
  const last = place(shown, below);
  return html`<g>
    ${Array.from({ length: numSeats }, (_, i) => circle(i, y, kindOf(i)))}
    ${Array.from({ length: shown }, (_, i) => circle(i, below, "wait"))}
    ${waiting > shown && html`<text class="s" x=${last.cx - size / 2} y=${last.cy + 4}>+${waiting - shown}</text>`}
  </g>`;
}

function Strip({ x, y, w, blocks: [total, free] }) {
  if (!total) return null;
  const held = total - free;
  return html`<g>
    <text class="s" x=${x} y=${y - 6}>KV blocks</text>
    <text class="s" x=${x + w} y=${y - 6} text-anchor="end">${percent(held, total)} of ${round(total)}</text>
    <rect class="inbox" x=${x} y=${y} width=${w} height="9" rx="4.5" />
    <rect class="inbox on" x=${x} y=${y} width=${(held / total) * w} height="9" rx="4.5" />
  </g>`;
}

const FORTH = ["M112 82H150", "M288 82H326", "M464 82H502", "M746 82H784", "M922 82H960"];
const BACK = ["M960 222H746", "M502 222H464", "M326 222H288", "M150 222H112"];
const SOFT = ["M624 266V290H853V266", "M395 264V290H624"];

// The words and numbers of each actor, for the drawing and for the cards of a narrow screen.
function actorsOf(frame, model) {
  const inbox = (name) =>
    Object.entries(model.inboxes).reduce((sum, [key, n]) => sum + (key.includes(name) ? n : 0), 0);
  const pools = model.card.task !== null;
  const numSteps = model.in_flight.length;
  const isAsleep = ["asleep", "dozing"].includes(model.state);
  const isLost = model.state === "lost";
  return {
    gate: {
      title: "Gate",
      value: `${frame.gate.started} of ${frame.gate.requests}`,
      sub: `room for ${frame.gate.max_sequences}`,
      isHot: frame.gate.requests > 0,
    },
    renderers: {
      title: "Renderers",
      value: model.rendering,
      sub: "texts to tokens",
      inbox: inbox("renderer"),
      isHot: model.rendering > 0,
    },
    scheduler: {
      title: "Scheduler",
      value: `${model.running} run · ${model.waiting} wait`,
      sub: model.pause === "none" ? "a seat for each sequence" : `paused: ${model.pause.replaceAll("_", " ")}`,
      inbox: inbox("scheduler"),
      isHot: model.running > 0,
      isBad: model.suspects > 0,
    },
    executor: {
      title: "Executor",
      value: `#${round(model.step)}`,
      sub: model.call ? `call: ${model.call}` : `${numSteps} step${numSteps === 1 ? "" : "s"} in flight`,
      inbox: inbox("executor"),
      isHot: numSteps > 0,
    },
    worker: {
      title: "Worker",
      value: isLost ? "lost" : isAsleep ? model.state : (model.process_ids[0] ?? "inline"),
      sub: isLost
        ? "being started again"
        : model.process_ids.length > 1
          ? `${model.process_ids.length} processes`
          : model.process_ids.length
            ? "process"
            : "in the server",
      isHot: model.running > 0,
      isBad: isLost,
    },
    output: {
      title: pools ? "Pooler" : "Detokenizer",
      value: model.tracked,
      sub: pools ? "queries" : "sequences",
      inbox: inbox(pools ? "pooler" : "detokenizer"),
      isHot: model.tracked > 0,
    },
    replies: { title: "Reply slots", value: model.num_open, sub: "newest output wins", isHot: model.num_open > 0 },
    observer: { title: "Observer", value: short(model.ended), sub: "requests counted", inbox: inbox("observer") },
  };
}

function Stage({ frame, model, rows }) {
  const actors = actorsOf(frame, model);
  const isBusy = model.running > 0;
  const wire = (kind) => (d) => html`<path class=${kind} d=${d} />`;
  const memory = bytes(model.memory_bytes || frame.memory_bytes);
  const streams = frame.requests.filter((each) => each.model === model.name && each.is_stream).length;
  const text = `Actors of ${model.name}: ${frame.gate.requests} requests in the gate, ${model.rendering} rendering, ${model.running} running, ${model.waiting} waiting, step ${model.step}.`;
  const card = ({ title, value, sub }) =>
    html`<div class="actor"><span>${title}</span><b>${value}</b><em>${sub}</em></div>`;
  return html`<section class="card stage" aria-label="Actors">
    <svg viewBox="0 0 1110 306" role="img" aria-label=${text}>
      ${[...FORTH, ...BACK].map(wire("wire"))} ${SOFT.map(wire("wire soft"))}
      ${isBusy && FORTH.map(wire("flow"))} ${isBusy && BACK.map(wire("flow back"))}
      <${Actor} x=${4} y=${40} w=${108} h=${224} title="Clients" value=${model.num_open} sub="open requests" isHot=${model.num_open > 0}>
        <text class="t" x="17" y="214">Streams</text><text class="vs" x="17" y="236">${streams} live</text></>
      <${Actor} x=${150} y=${40} ...${actors.gate} />
      <${Actor} x=${326} y=${40} ...${actors.renderers} />
      <${Actor} x=${502} y=${40} w=${244} h=${224} ...${actors.scheduler}>
        <${Seats} x=${515} y=${118} w=${222} model=${model} />
        <${Strip} x=${515} y=${242} w=${218} blocks=${model.blocks} /></>
      <${Actor} x=${784} y=${40} ...${actors.executor} />
      <${Actor} x=${960} y=${40} w=${146} h=${224} ...${actors.worker}>
        <text class="t" x="973" y="140">Memory</text><text class="vs" x="973" y="160">${memory}</text>
        <text class="t" x="973" y="188">Pace</text><text class="vs" x="973" y="208">${round(mean(rows, "steps"), 1)} steps/s</text>
        <text class="s" x="973" y="246">${model.card.architecture.replace(/For[A-Z]\w+|Model$/, "")}</text></>
      <${Actor} x=${326} y=${180} ...${actors.output} />
      <${Actor} x=${150} y=${180} ...${actors.replies} />
      <${Actor} x=${784} y=${180} ...${actors.observer} />
    </svg>
    <div class="actors only-phone">${Object.values(actors).map(card)}</div>
  </section>`;
}

// Blocks of the KV cache as cells; a cell stands for several blocks of a large cache.
function Blocks({ model }) {
  const [total, free, cached] = model.blocks;
  if (!total) return html`<p class="empty">This model keeps no KV cache.</p>`;
  const held = total - free;
  const cells = Math.min(total, 432);
  const perCell = total / cells;
  const columns = cells <= 80 ? 20 : cells <= 216 ? 36 : 54;
  // What exists is shown, also if it is less than a cell.
  const numHeld = Math.ceil(held / perCell);
  const numCached = Math.min(cells - numHeld, Math.ceil(cached / perCell));
  const cell = (i) => `M${(i % columns) * 10 + 1} ${Math.floor(i / columns) * 10 + 1}h7v7h-7z`;
  const draw = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => cell(from + i)).join("");
  const size = `${round(total)} blocks of ${model.card.block_size} tokens${perCell > 1 ? `, ${round(perCell, 1)} a cell` : ""}`;
  const name = `${held} of ${total} blocks held, ${cached} cached`;
  const { cache_queries, cache_hits } = model.counters;
  return html`<svg
      class="cells"
      viewBox=${`0 0 ${columns * 10} ${Math.ceil(cells / columns) * 10}`}
      role="img"
      aria-label=${name}
    >
      <path class="used" d=${draw(0, numHeld)} />
      <path class="cached" d=${draw(numHeld, numHeld + numCached)} />
      <path class="free" d=${draw(numHeld + numCached, cells)} />
    </svg>
    <div class="legend">
      <span><i class="used"></i>held ${percent(held, total)}</span>
      <span><i class="cached"></i>cached ${percent(cached, total)}</span>
      <span><i class="free"></i>free ${percent(free - cached, total)}</span>
      <span
        >${size}</span
      >
      <span>prefix hits ${percent(cache_hits, cache_queries)}</span>
    </div>`;
}

function Tiles({ model, past }) {
  const of = (key) => past.rows.map((row) => row[key]);
  const recent = (parts) => parts.map((_, i) => quantile(parts.slice(0, i + 1), 0.5, 20) ?? 0).slice(-120);
  const latency = (label, parts, color) =>
    html`<${Tile}
      label=${label}
      aside="last minute"
      value=${seconds(quantile(parts, 0.5))}
      unit=${`p95 ${seconds(quantile(parts, 0.95))}`}
      values=${recent(parts)}
      color=${color}
    />`;
  return html`<div class="tiles">
    <${Tile}
      label="Output"
      aside=${short(model.counters.tokens)}
      value=${round(mean(past.rows, "out"))}
      unit="tokens/s"
      values=${of("out")}
      color="var(--accent)"
    />
    <${Tile}
      label="Prompts"
      aside=${short(model.counters.prompt_tokens)}
      value=${round(mean(past.rows, "prompt"))}
      unit="tokens/s"
      values=${of("prompt")}
      color="var(--teal)"
    />
    ${latency("First token", past.first, "var(--violet)")} ${latency("Between tokens", past.inter, "var(--blue)")}
  </div>`;
}

export function Engine() {
  const { frame, events, history } = useStore();
  const model = currentModel();
  if (!model) return html`<p class="empty">Waiting for the first frame …</p>`;
  if (!model.counters) return html`<p class="empty">${model.name} is ${model.state}.</p>`;
  const past = history[model.name] ?? { rows: [], first: [], inter: [] };
  const level = frame.level.replaceAll("_", " ");
  return html`<h1 class="unseen">Engine</h1>
    <${Tiles} model=${model} past=${past} />
    <${Stage} frame=${frame} model=${model} rows=${past.rows} />
    <div class="cols">
      <section class="card pad">
        <h2>KV cache <span class="aside">${round(model.counters.preemptions)} preemptions</span></h2>
        <${Blocks} model=${model} />
      </section>
      <section class="card pad">
        <h2>Events <span class="aside">overload: ${level} · loop gap ${seconds(frame.gap_s)}</span></h2>
        <${EventList} events=${events} n=${5} />
      </section>
    </div>`;
}
