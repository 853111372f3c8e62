// The playground: chats, completions with the probability of each token, gaps, embeddings, rankings.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { Turn } from "./answers.js";
import { START, asCurl, asPython, ask, isSame, requestOf } from "./ask.js";
import { Spark } from "./engine.js";
import { ImageField } from "./images.js";
import { mean, round } from "./numbers.js";
import { currentModel, store, toast, useStore } from "./store.js";

// The name of a mode, its label, what the model must be able to do, and what to write.
const MODES = [
  ["chat", "Chat", "chat", "Ask something …"],
  ["complete", "Complete", "completion", "Text to continue"],
  ["fill", "Fill in", "insert", "Code with <gap> where it is to be filled"],
  ["embed", "Embed", "embed", "One text a line"],
  ["rerank", "Rerank", "rerank", "The query, then one document a line"],
];
const ABOUT = {
  chat: "Answers stream here. Again repeats one with its seed and compares the tokens.",
  complete: "Each token of the answer shows how sure the model was.",
  fill: "The model writes what belongs into the gap.",
  embed: "Texts become vectors; the matrix shows how alike they are.",
  rerank: "Documents are ordered by their relevance to the query.",
};
const TRIES = ["Why do actors need inboxes?", "Write a haiku about a queue", "List three uses of a semaphore"];
const FIRST = {
  chat: "",
  complete: "def fibonacci(n):\n",
  fill: "def area(radius):\n    <gap>\n    return result\n",
  embed:
    "A cat sat on the mat.\nA kitten rested on a rug.\nThe stock market fell today.\nInvestors lost money this morning.",
  rerank:
    "How do I wake a model?\nCall wake_up, or ask it something.\nThe cat sat on the mat.\nBread needs flour, water and salt.",
};

function Slider({ name, text, min, max, step, settings, change }) {
  return html`<label
    >${text}<span>${settings[name]}</span
    ><input
      type="range"
      min=${min}
      max=${max}
      step=${step}
      value=${settings[name]}
      onInput=${(e) => change({ [name]: +e.target.value })}
  /></label>`;
}

function Settings({ model, mode, settings, change }) {
  const card = model?.card;
  if (mode === "embed" || mode === "rerank") {
    return html`<p class="empty">Nothing to set: ${card?.task}, up to ${round(card?.max_model_len)} tokens a text.</p>`;
  }
  const most = Math.max(8, Math.min(card?.max_model_len ?? 1024, 4096));
  const field = { settings, change };
  return html`<${Slider} name="temperature" text="Temperature" min="0" max="2" step="0.05" ...${field} />
    <${Slider} name="top_p" text="Top p" min="0.05" max="1" step="0.05" ...${field} />
    <${Slider} name="max_tokens" text="Tokens at most" min="8" max=${most} step="8" ...${field} />
    <label
      >Seed<input type="number" value=${settings.seed} onInput=${(e) => change({ seed: Math.trunc(+e.target.value) })}
    /></label>
    ${
      mode === "chat" &&
      html`<label class="check"
          ><input
            type="checkbox"
            checked=${settings.probs}
            onChange=${(e) => change({ probs: e.target.checked })}
          />Show how sure each token is</label
        >
        <label
          >System<textarea
            rows="3"
            value=${settings.system}
            placeholder="none"
            onInput=${(e) => change({ system: e.target.value })}
          ></textarea>
        </label>`
    }
    ${
      mode !== "fill" &&
      html`<details class="more">
        <summary>Answer by a JSON schema</summary>
        <label
          >Schema<textarea
            rows="6"
            spellcheck=${false}
            value=${settings.schema}
            placeholder='{"type": "object"}'
            onInput=${(e) => change({ schema: e.target.value })}
          ></textarea>
        </label>
      </details>`
    }`;
}

function Now({ model }) {
  if (!model?.counters) return null;
  const rows = store.history[model.name]?.rows ?? [];
  return html`<a class="card now" href="#engine">
    <span class="label">The engine now</span>
    <span class="big"
      >${round(mean(rows, "out"))}<small>tokens/s · ${model.running} running · ${model.waiting} waiting</small></span
    >
    <${Spark} values=${rows.map((row) => row.out)} label="Output tokens a second"
  /></a>`;
}

function Code({ request, onClose }) {
  const [language, choose] = useState("curl");
  const text = language === "curl" ? asCurl(request) : asPython(request);
  const copy = () =>
    navigator.clipboard?.writeText(text).then(
      () => toast("copied"),
      () => toast("the browser refuses to copy"),
    );
  const tab = (name, label) =>
    html`<button type="button" class="btn small" aria-pressed=${language === name} onClick=${() => choose(name)}>
      ${label}
    </button>`;
  return html`<div class="pad">
    <div class="row">
      ${tab("curl", "curl")}${tab("python", "Python")}<span class="grow"></span>
      <button type="button" class="btn small" onClick=${copy}>Copy</button>
      <button type="button" class="btn small ghost" onClick=${onClose}>Close</button>
    </div>
    <pre class="code" tabindex="0">${text}</pre>
  </div>`;
}

// The state of a conversation, and the tasks that change it.
function useTurns(mode, model, settings) {
  const [turns, put] = useState([]);
  const [live, stream] = useState(null);
  const [error, fail] = useState("");
  const running = useRef(null);
  const partial = useRef(null);
  useEffect(() => {
    const old = running.current;
    running.current = null;
    old?.abort();
    put([]);
    stream(null);
    fail("");
  }, [mode, model?.name]);
  store.stop = () => running.current?.abort();

  async function run(request, show, done) {
    fail("");
    const controller = (running.current = new AbortController());
    partial.current = null;
    // Another mode or model has its own conversation, in which this answer has no place.
    const isCurrent = () => running.current === controller;
    try {
      const answer = await ask(request, controller.signal, (part) => isCurrent() && show((partial.current = part)));
      if (isCurrent()) done(answer);
    } catch (problem) {
      if (!isCurrent()) return;
      const isStopped = problem.name === "AbortError";
      if (partial.current) done({ ...partial.current, isStopped });
      if (!isStopped) fail(problem.message);
    }
    if (!isCurrent()) return;
    running.current = null;
    stream(null);
  }
  function send(text, images) {
    const before = mode === "chat" ? turns : [];
    let request;
    try {
      request = requestOf(mode, model.name, settings, text, before, images);
    } catch (problem) {
      fail(`schema: ${problem.message}`);
      return false;
    }
    const asked = [...before, { role: "user", text, images }];
    put(asked);
    stream({ text: "", thinking: "", tokens: [] });
    run(request, stream, (answer) => put([...asked, { role: "assistant", ...answer, request }]));
    return true;
  }
  function again(turn) {
    if (running.current) return;
    const replace = (answer) =>
      put((all) => all.map((each) => (each === turn ? { ...turn, isSame: isSame(turn, answer) } : each)));
    run(
      turn.request,
      () => {},
      (answer) => !answer.isStopped && replace(answer),
    );
  }
  const shown = live ? [...turns, { role: "assistant", ...live, isLive: true }] : turns;
  return { turns: shown, isLive: !!live, error, send, again, clear: () => put([]) };
}

export function Play() {
  useStore();
  const model = currentModel();
  const [wanted, choose] = useState("chat");
  const [texts, write] = useState(FIRST);
  const [settings, alter] = useState(START);
  const [images, putImages] = useState([]);
  const [shown, show] = useState(null);
  const can = ([, , needs]) => !!model?.card?.can.includes(needs);
  const mode = MODES.find((each) => each[0] === wanted && can(each))?.[0] ?? MODES.find(can)?.[0] ?? "chat";
  const talk = useTurns(mode, model, settings);
  const end = useRef(null);
  const length = talk.turns.length + (talk.turns.at(-1)?.text.length ?? 0);
  useEffect(() => {
    const thread = end.current?.parentNode;
    if (thread) thread.scrollTop = thread.scrollHeight;
  }, [length]);
  const hint = MODES.find(([name]) => name === mode)[3];
  const go = (given = texts[mode]) => {
    if (!given.trim() || talk.isLive || !model?.card) return;
    if (talk.send(given, mode === "chat" ? images : []) && mode === "chat") {
      write({ ...texts, chat: "" });
      putImages([]);
    }
  };
  const onKey = (event) => {
    const isSent = event.key === "Enter" && (event.ctrlKey || event.metaKey || (mode === "chat" && !event.shiftKey));
    if (!isSent || event.isComposing) return;
    event.preventDefault();
    go();
  };
  const button = (each) =>
    html`<button type="button" aria-pressed=${mode === each[0]} disabled=${!can(each)} onClick=${() => choose(each[0])}>
      ${each[1]}
    </button>`;
  const turn = (each, i) =>
    html`<${Turn}
      turn=${each}
      asked=${talk.turns[i - 1]}
      mode=${mode}
      showsProbs=${settings.probs}
      onAgain=${() => talk.again(each)}
      onShow=${() => show(each.request)}
    />`;
  return html`<div class="play">
    <div>
      <h1 class="unseen">Play</h1>
      <div class="seg" role="group" aria-label="What to try">${MODES.map(button)}</div>
      <div class="card">
        <div
          class="thread"
          role="log"
          aria-live="polite"
          aria-busy=${talk.isLive}
          tabindex="0"
          aria-label="Questions and answers"
        >
          ${!talk.turns.length && html`<${Hello} model=${model} mode=${mode} onTry=${go} />`} ${talk.turns.map(turn)}
          ${talk.error && html`<p class="error" role="alert">${talk.error}</p>`}
          <div ref=${end}></div>
        </div>
        ${shown && html`<${Code} request=${shown} onClose=${() => show(null)} />`}
        <form class="composer" onSubmit=${(e) => (e.preventDefault(), go())}>
          <textarea
            id="prompt"
            aria-label=${hint}
            placeholder=${hint}
            rows=${mode === "chat" ? 2 : 5}
            value=${texts[mode]}
            onInput=${(e) => write({ ...texts, [mode]: e.target.value })}
            onKeyDown=${onKey}
          ></textarea>
          ${mode === "chat" && model?.card?.can.includes("vision") && html`<${ImageField} images=${images} change=${putImages} />`}
          <div class="row">
            <button class="btn main" type="submit" disabled=${!model?.card || talk.isLive}>
              ${{ embed: "Compare", rerank: "Rank" }[mode] ?? "Run"}
            </button>
            <button class="btn" type="button" disabled=${!talk.isLive} onClick=${() => store.stop()}>Stop</button>
            <span class="grow"></span>
            ${talk.turns.length > 0 && !talk.isLive && html`<button class="btn ghost" type="button" onClick=${talk.clear}>Clear</button>`}
            <span class="wide"><kbd>${mode === "chat" ? "Enter" : "Ctrl Enter"}</kbd></span>
          </div>
        </form>
      </div>
    </div>
    <aside aria-label="Settings">
      <div class="card pad side">
        <${Settings}
          model=${model}
          mode=${mode}
          settings=${settings}
          change=${(more) => alter({ ...settings, ...more })}
        />
        <p class="foot">Everything here is a route: Code shows a request that gives the same tokens.</p>
      </div>
      <${Now} model=${model} />
    </aside>
  </div>`;
}

function Hello({ model, mode, onTry }) {
  if (!model) return html`<p class="hello">Connecting …</p>`;
  if (!model.card) return html`<p class="hello"><b>${model.name}</b>The model is ${model.state}.</p>`;
  const tries = TRIES.map((text) => html`<button type="button" onClick=${() => onTry(text)}>${text}</button>`);
  return html`<div class="hello">
    <b>${model.name}</b>${ABOUT[mode]}${mode === "chat" && html`<div class="tries">${tries}</div>`}
  </div>`;
}
