// Numbers as text, and the recent past of each model.  Pure: no document and no request.
const isNumber = (x) => x != null && Number.isFinite(x);

export function round(x, places = 0) {
  if (!isNumber(x)) return "–";
  const digits = { minimumFractionDigits: places, maximumFractionDigits: places };
  return x.toLocaleString("en", digits);
}
export function short(x) {
  if (!isNumber(x)) return "–";
  if (x >= 1e6) return `${round(x / 1e6, 1)} M`;
  return x >= 1e4 ? `${round(x / 1e3, 1)} k` : round(x);
}
export function bytes(x) {
  if (!x) return "–";
  return x >= 2 ** 30 ? `${round(x / 2 ** 30, 2)} GiB` : `${round(x / 2 ** 20)} MiB`;
}
export function seconds(x) {
  if (!isNumber(x)) return "–";
  if (x < 1) return `${round(x * 1000)} ms`;
  return x < 100 ? `${round(x, 2)} s` : `${round(x / 60)} min`;
}
export function span(x) {
  if (!isNumber(x)) return "–";
  if (x < 60) return `${round(x)} s`;
  if (x < 3600) return `${Math.floor(x / 60)} min`;
  return `${Math.floor(x / 3600)} h ${Math.floor((x % 3600) / 60)}`;
}
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
export const percent = (part, whole) => (whole ? `${round((part / whole) * 100)} %` : "–");

// Two minutes at two frames a second.
const KEPT = 240;
const EVENTS_KEPT = 200;

// Add a frame to the past: rates between two frames, and what each bucket of a histogram has gained.
export function note(history, frame) {
  for (const model of frame.models) {
    const past = (history[model.name] ??= { rows: [], first: [], inter: [] });
    const before = past.last;
    past.last = { at: frame.at, counters: model.counters, histograms: model.histograms };
    if (!before?.counters || !model.counters || frame.at <= before.at) continue;
    const elapsed = frame.at - before.at;
    // A model that was loaded anew counts from 0 again.
    const rate = (key) => Math.max(0, model.counters[key] - before.counters[key]) / elapsed;
    push(past.rows, { at: frame.at, out: rate("tokens"), prompt: rate("prompt_tokens"), steps: rate("steps") });
    for (const [key, name] of [
      ["first", "first_token"],
      ["inter", "inter_token"],
    ]) {
      const now = model.histograms[name];
      const then = before.histograms[name];
      if (now && then)
        push(
          past[key],
          now.map(([bound, count], i) => [bound, Math.max(0, count - then[i][1])]),
        );
    }
  }
}
function push(list, value) {
  list.push(value);
  if (list.length > KEPT) list.shift();
}

// Take the events of a frame.  An event that is known already is replaced, never told twice.
export function noteEvents(known, events) {
  for (const event of events) known.set(`${event.model}/${event.id}/${event.at}`, event);
  for (const key of known.keys()) {
    if (known.size <= EVENTS_KEPT) break;
    known.delete(key);
  }
}

export function mean(rows, key, n = 4) {
  const last = rows.slice(-n);
  return last.length ? last.reduce((sum, row) => sum + row[key], 0) / last.length : 0;
}

// Return a quantile of what was observed in the last n frames, linear within its bucket.
export function quantile(parts, q, n = 120) {
  const last = parts.slice(-n);
  if (!last.length) return null;
  const sums = last[0].map(([bound], i) => [bound, last.reduce((sum, part) => sum + part[i][1], 0)]);
  const all = sums.at(-1)[1];
  if (!all) return null;
  let low = 0;
  let before = 0;
  for (const [bound, count] of sums) {
    if (count >= q * all) {
      if (bound === null) return low;
      return low + ((bound - low) * (q * all - before)) / Math.max(count - before, 1e-9);
    }
    low = bound;
    before = count;
  }
  return low;
}
