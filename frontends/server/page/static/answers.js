// Answers as drawings: tokens with their probabilities, vectors as a matrix, documents by relevance.
import { html, useState } from "./vendor/htm-preact.js";
import { round, seconds } from "./numbers.js";
import { Prose } from "./prose.js";
import { Thumbs } from "./images.js";

const bandOf = (p) => ["p0", "p1", "p2", "p3", "p4"][[0.1, 0.35, 0.65, 0.9].filter((limit) => p >= limit).length];
const visible = (text) => JSON.stringify(text).slice(1, -1) || "(empty)";

// The tokens of an answer.  Arrow keys move, and the chosen token shows its alternatives.
export function Tokens({ tokens }) {
  const [chosen, choose] = useState(-1);
  const one = tokens[chosen];
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const to = chosen + step;
    if (!step || to < 0 || to >= tokens.length) return;
    event.preventDefault();
    choose(to);
    event.currentTarget.children[to].focus();
  };
  const token = (each, i) =>
    html`<span
      role="button"
      class=${`tok ${bandOf(each.p)} ${i === chosen ? "sel" : ""}`}
      tabindex=${i === Math.max(chosen, 0) ? 0 : -1}
      aria-pressed=${i === chosen}
      aria-label=${`${visible(each.text)}, ${round(each.p * 100, 1)} %`}
      onClick=${() => choose(i)}
      onFocus=${() => choose(i)}
      >${each.text.replaceAll("\n", "↵\n")}</span
    >`;
  return html`<div>
    <div class="plain" dir="auto" onKeyDown=${move} role="group" aria-label="Tokens; arrow keys move between them">
      ${tokens.map(token)}
    </div>
    <p class="legend scale">
      <span><i class="p0"></i>below 10 %</span><span><i class="p1"></i>35</span><span><i class="p2"></i>65</span
      ><span><i class="p3"></i>90</span><span><i class="p4"></i>above 90 %</span>
    </p>
    ${one && html`<${Alternatives} token=${one} />`}
  </div>`;
}

function Alternatives({ token }) {
  const others = [...token.top].sort((a, b) => b[1] - a[1]);
  const bar = ([text, p]) =>
    html`<span class="w">${visible(text)}</span>
      <span class="h"><i class=${text === token.text ? "me" : ""} style=${{ width: `${p * 100}%` }}></i></span>
      <span class="num">${round(p * 100, 1)} %</span>`;
  return html`<div class="probs" role="status">${others.map(bar)}</div>`;
}

// The cosine of each pair of vectors.
function Matrix({ vectors, lines }) {
  const norms = vectors.map((vector) => Math.hypot(...vector));
  const cosine = (i, j) => vectors[i].reduce((sum, x, k) => sum + x * vectors[j][k], 0) / (norms[i] * norms[j]);
  const cell = (i, j) => {
    const value = cosine(i, j);
    const background = `color-mix(in srgb, var(--accent) ${Math.max(0, value) * 70}%, var(--raised))`;
    return html`<td class=${`c ${value > 0.6 ? "strong" : ""}`} style=${{ background }}>${round(value, 2)}</td>`;
  };
  const row = (line, i) =>
    html`<tr>
      <th scope="row">${line}</th>
      ${vectors.map((_, j) => cell(i, j))}
    </tr>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Similarity of the texts">
      <table class="matrix">
        <tbody>
          ${lines.map(row)}
        </tbody>
      </table>
    </div>
    <p class="foot">Cosine of vectors with ${round(vectors[0].length)} dimensions.</p>`;
}

function Ranking({ results, lines }) {
  const top = Math.max(...results.map((each) => each.relevance_score), 1e-9);
  const bar = (each) =>
    html`<span>${lines[each.index + 1]}</span>
      <span class="h"><i style=${{ width: `${Math.max(0, each.relevance_score / top) * 100}%` }}></i></span>
      <span class="num">${round(each.relevance_score, 3)}</span>`;
  return html`<div class="probs wide-probs">${results.map(bar)}</div>`;
}

function Content({ turn, asked, mode, showsProbs }) {
  const lines = (asked?.text ?? "").split("\n").filter((line) => line.trim());
  const { result } = turn;
  if (result?.data) return html`<${Matrix} vectors=${result.data.map((each) => each.embedding)} lines=${lines} />`;
  if (result?.results) return html`<${Ranking} results=${result.results} lines=${lines} />`;
  if (turn.tokens?.length && (mode === "complete" || showsProbs)) return html`<${Tokens} tokens=${turn.tokens} />`;
  if (mode === "chat" && turn.role === "assistant") return html`<${Prose} text=${turn.text} />`;
  return html`<div class=${mode === "chat" ? "said" : "plain"} dir="auto">${turn.text}</div>`;
}

function Foot({ turn, onAgain, onShow }) {
  const { usage, first, total, reason } = turn;
  const num = usage?.completion_tokens;
  const pace = num > 1 && first !== null && total > first ? (num - 1) / ((total - first) / 1000) : null;
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  return html`<div class="foot">
    ${first !== null && html`<span>first token <b>${seconds(first / 1000)}</b></span>`}
    ${pace !== null && html`<span><b>${round(pace, 1)}</b> tokens/s</span>`}
    ${num > 0 && html`<span><b>${round(num)}</b> tokens</span>`}
    ${usage?.prompt_tokens > 0 && html`<span>prompt <b>${round(usage.prompt_tokens)}</b>${cached ? html`, <b>${round(cached)}</b> cached` : ""}</span>`}
    ${reason === "length" && html`<span>cut by the limit</span>`} ${turn.isStopped && html`<span>stopped</span>`}
    ${turn.isSame === true && html`<span class="same">✓ the same tokens again</span>`}
    ${turn.isSame === false && html`<span class="differs">✗ other tokens</span>`}
    <span class="grow"></span>
    <button type="button" class="btn small ghost" onClick=${onAgain}>Again</button>
    <button type="button" class="btn small ghost" onClick=${onShow}>Code</button>
  </div>`;
}

// One question or answer.
export function Turn({ turn, asked, mode, showsProbs, onAgain, onShow }) {
  const isAnswer = turn.role === "assistant";
  const name = mode === "chat" ? turn.role : isAnswer ? "answer" : "given";
  return html`<article class=${`turn ${turn.role}`}>
    <div class="role">${name}${turn.isLive && html`<span class="caret"></span>`}</div>
    ${turn.images?.length > 0 && html`<${Thumbs} images=${turn.images} />`}
    ${
      turn.thinking &&
      html`<details class="thinking" open=${turn.isLive && !turn.text}>
        <summary>Reasoning</summary>
        <div dir="auto">${turn.thinking}</div>
      </details>`
    }
    <${Content} turn=${turn} asked=${asked} mode=${mode} showsProbs=${showsProbs} />
    ${isAnswer && !turn.isLive && html`<${Foot} turn=${turn} onAgain=${onAgain} onShow=${onShow} />`}
  </article>`;
}
