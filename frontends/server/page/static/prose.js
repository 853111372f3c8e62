// Markdown, a small part of it, as nodes.  No string of HTML is ever made.
import { html } from "./vendor/htm-preact.js";

// Code, bold text, and links.  Images are left as text, because their addresses would carry data out.
const INLINE = /(`+)([^]*?)\1|\*\*([^*]+)\*\*|(?<!!)\[([^\]\n]{1,300})\]\((https?:\/\/[^\s()<>"']{1,2000})\)/g;
const ITEM = /^\s*([-*•]|\d{1,9}[.)])\s/;

// Divide a line into pieces of text, code, strong text and links.
export function inlineOf(text) {
  const found = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) found.push({ kind: "text", text: text.slice(end, match.index) });
    const [whole, , code, strong, label, href] = match;
    if (label !== undefined) found.push(linkOf(whole, label, href));
    else found.push(strong === undefined ? { kind: "code", text: code } : { kind: "strong", text: strong });
    end = match.index + whole.length;
  }
  if (end < text.length) found.push({ kind: "text", text: text.slice(end) });
  return found;
}
function linkOf(whole, label, href) {
  try {
    return { kind: "link", text: label, href, host: new URL(href).host };
  } catch {
    return { kind: "text", text: whole };
  }
}

// Divide a text into paragraphs, headings, lists and blocks of code.
export function blocksOf(text) {
  const blocks = [];
  for (const [i, part] of text.split("```").entries()) {
    if (i % 2) blocks.push({ kind: "pre", text: part.replace(/^[\w+-]{0,20}\n/, "") });
    else
      blocks.push(
        ...part
          .split(/\n{2,}/)
          .map(blockOf)
          .filter(Boolean),
      );
  }
  return blocks;
}
function blockOf(piece) {
  const lines = piece.split("\n").filter((line) => line.trim());
  if (!lines.length) return null;
  if (lines.every((line) => ITEM.test(line))) {
    const items = lines.map((line) => inlineOf(line.replace(ITEM, "")));
    return { kind: /^\s*\d/.test(lines[0]) ? "ol" : "ul", items };
  }
  const heading = lines.length === 1 && /^#{1,6}\s+(.*)/.exec(lines[0]);
  if (heading) return { kind: "h3", pieces: inlineOf(heading[1]) };
  return { kind: "p", lines: lines.map(inlineOf) };
}

function Piece({ piece }) {
  if (piece.kind === "code") return html`<code>${piece.text}</code>`;
  if (piece.kind === "strong") return html`<strong>${piece.text}</strong>`;
  if (piece.kind === "text") return piece.text;
  // The host is written out, because the label may say anything.
  return html`<a href=${piece.href} target="_blank" rel="noopener noreferrer nofollow">${piece.text}</a
    ><span class="host"> (${piece.host})</span>`;
}
const pieces = (list) => list.map((piece) => html`<${Piece} piece=${piece} />`);

function Block({ block }) {
  if (block.kind === "pre") return html`<pre tabindex="0"><code>${block.text}</code></pre>`;
  if (block.kind === "h3") return html`<h3>${pieces(block.pieces)}</h3>`;
  if (block.kind === "p") return html`<p>${block.lines.map((line, i) => [i ? html`<br />` : "", pieces(line)])}</p>`;
  const items = block.items.map((item) => html`<li>${pieces(item)}</li>`);
  return block.kind === "ol"
    ? html`<ol>
        ${items}
      </ol>`
    : html`<ul>
        ${items}
      </ul>`;
}

export function Prose({ text }) {
  return html`<div class="prose" dir="auto">${blocksOf(text).map((block) => html`<${Block} block=${block} />`)}</div>`;
}
