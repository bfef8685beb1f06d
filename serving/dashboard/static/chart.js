"use strict";

const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  return decorate(made, explained(attributes), children);
};
/* Lets the keyboard reach what has an explanation, and describes it to screen readers. */
const explained = (attributes) => {
  const { "data-help": help, "data-hint": hint } = attributes;
  if (help) return { ...attributes, tabindex: "0", "aria-describedby": `help-${help}` };
  return hint ? { ...attributes, tabindex: "0", "aria-description": hint } : attributes;
};
const shape = (name, attributes = {}, ...children) =>
  decorate(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const decorate = (made, attributes, children) => {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
};

/* Makes `old` equal to `made` and keeps its elements, so that focus, hover and clicks survive. Children with a `data-key` are matched by it. */
function patch(old, made) {
  if (old.nodeType !== made.nodeType || old.nodeName !== made.nodeName) {
    old.replaceWith(made);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== made.data) old.data = made.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  patchChildren(old, [...made.childNodes]);
}

function patchChildren(host, made) {
  const keys = new Set(made.map((child) => child.dataset?.key)), keyed = new Map();
  for (const child of [...host.children]) {
    const { key } = child.dataset;
    if (key === undefined) continue;
    if (keys.has(key)) keyed.set(key, child);
    else child.remove();
  }
  let next = host.firstChild;
  for (const child of made) {
    const old = child.dataset?.key === undefined ? next : keyed.get(child.dataset.key);
    if (old && old === next) {
      next = next.nextSibling;
      patch(old, child);
    } else if (old) {
      host.insertBefore(old, next);
      patch(old, child);
    } else host.insertBefore(child, next);
  }
  while (next) {
    const after = next.nextSibling;
    next.remove();
    next = after;
  }
}

/* Points that are null, or whose distance is over `gap`, are not joined; a point without neighbours is a dot. */
function path(times, values, gap, x, y) {
  let drawn = "", before = null;
  times.forEach((time, i) => {
    if (values[i] === null) return;
    const joined = before !== null && time - before <= gap && values[i - 1] !== null;
    drawn += `${joined ? "L" : "M"}${x(time).toFixed(1)} ${y(values[i]).toFixed(1)}`;
    if (!joined) drawn += "h.01";
    before = time;
  });
  return drawn;
}

function niceTop(largest) {
  const power = 10 ** Math.floor(Math.log10(largest || 1));
  return [1, 2, 4, 5, 10].find((step) => step * power >= largest) * power;
}

const TICKS = [10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800];

function timeTicks(from, to, ticksAtMost) {
  const step = TICKS.find((seconds) => (to - from) / seconds <= ticksAtMost) ?? 604800;
  const zone = new Date(from * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let tick = Math.ceil((from - zone) / step) * step + zone; tick <= to; tick += step) ticks.push(tick);
  return { ticks, step };
}

function clock(time, step = 1) {
  const options = step >= 86400 ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit" };
  if (step < 60) options.second = "2-digit";
  return new Date(time * 1000).toLocaleString([], { ...options, hourCycle: "h23" });
}

/* Returns where a zoomed axis begins: below the first percentile of the values, at a round number. */
function zoomedBottom(values, top) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (!sorted.length) return 0;
  const low = sorted[Math.floor((sorted.length - 1) / 100)], step = niceTop((top - low) / 2 || top / 20) / 2;
  return Math.max(0, Math.min(Math.floor(low / step) * step, top - 4 * step / 10));
}

/* Separates labels that would overlap; `labels` have a y. */
function spread(labels, distance, bottom) {
  labels.sort((a, b) => a.y - b.y);
  labels.forEach((label, i) => { if (i) label.y = Math.max(label.y, labels[i - 1].y + distance); });
  let limit = bottom;
  for (const label of labels.toReversed()) { label.y = Math.min(label.y, limit); limit = label.y - distance; }
}

/* The shapes of marks, around the top of their line. */
const MARKS = {
  refused: "M-4-4L4 4M4-4L-4 4", drift: "M0-5L5 4H-5Z", restart: "M-4-4H4V4H-4Z", checkpoint: "M0-4A4 4 0 1 0 .01-4Z",
  swap: "M0-3V3", lag: "M-5-4H5V4H-5Z", undo: "M5 4V-1H-4M0-5L-4-1L0 3", search: "M0-5L4 0L0 5L-4 0Z",
};

/* Lines over time with a cursor that follows the pointer and the arrow keys. */
class Chart {
  constructor(host) {
    this.host = host;
    this.at = null;
    this.tip = element("div", { class: "tip", "aria-hidden": "true" });
    this.tip.hidden = true;
    host.addEventListener("pointermove", (event) => this.point(event));
    host.addEventListener("pointerdown", (event) => this.point(event));
    host.addEventListener("pointerleave", () => this.move(null));
    host.addEventListener("blur", () => this.move(null));
    host.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.data && this.draw(this.data)).observe(host);
  }

  draw(data) {
    this.data = data;
    const { times, lines, marks, from, to, gap, top, bottom, format } = data;
    const width = this.host.clientWidth, height = this.host.clientHeight;
    const left = 50, right = width < 560 ? 10 : 144, high = 10, low = height - 26;
    const x = this.x = (time) => left + ((time - from) / (to - from)) * (width - left - right);
    const y = this.y = (value) => low - ((Math.min(top, Math.max(bottom, value)) - bottom) / (top - bottom)) * (low - high);
    const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const value = bottom + part * (top - bottom), at = Math.round(y(value)) + 0.5;
      drawing.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
      drawing.append(shape("text", { x: left - 10, y: at + 4, "text-anchor": "end" }, format(value, top - bottom > 0.2)));
    }
    const { ticks, step } = timeTicks(from, to, Math.max(3, (width - left - right) / 110));
    for (const tick of ticks) {
      const anchor = x(tick) > width - 30 ? "end" : "middle";
      drawing.append(shape("text", { x: x(tick), y: height - 6, "text-anchor": anchor }, clock(tick, step)));
    }
    for (const mark of marks) {
      const begin = x(Math.max(from, mark.time)), end = x(Math.min(to, mark.until)), { kind } = mark;
      if (kind === "lag") drawing.append(shape("rect", { class: `event ${kind}`, x: begin, y: high, width: Math.max(2, end - begin), height: low - high }));
      else if (kind === "swap") drawing.append(shape("line", { class: `event ${kind}`, x1: begin, x2: begin, y1: low - 6, y2: low }));
      else {
        drawing.append(shape("line", { class: `event ${kind}`, x1: begin, x2: begin, y1: high, y2: low }));
        if (end - begin > 2) drawing.append(shape("line", { class: `event last ${kind}`, x1: begin, x2: end, y1: low - 1, y2: low - 1 }));
        drawing.append(shape("path", { class: `event ${kind}`, d: MARKS[kind], transform: `translate(${begin.toFixed(1)} ${high})` }));
      }
    }
    const ends = [];
    for (const line of lines) {
      drawing.append(shape("path", { class: `curve ${line.kind}`, d: path(times, line.values, gap, x, y) }));
      const last = line.values.findLastIndex((value) => value !== null);
      if (last >= 0) ends.push({ line, time: times[last], y: y(line.values[last]), value: line.values[last] });
    }
    for (const end of ends) {
      drawing.append(shape("circle", { class: `point mark ${end.line.kind}`, cx: x(end.time), cy: end.y, r: 4 }));
    }
    if (right > 100) {
      spread(ends, 15, low + 4);
      for (const end of ends) {
        const label = `${end.line.short} ${format(end.value)}`;
        drawing.append(shape("text", { class: `end mark ${end.line.kind}`, x: width - right + 12, y: end.y + 4 }, label));
      }
    }
    if (!ends.length) {
      const middle = { class: "empty", x: (left + width - right) / 2, y: y(bottom + 0.625 * (top - bottom)) + 4 };
      drawing.append(shape("text", middle, data.empty));
    }
    this.host.replaceChildren(drawing, this.tip);
    this.host.setAttribute("aria-valuemin", "0");
    this.host.setAttribute("aria-valuemax", String(Math.max(0, times.length - 1)));
    this.show();
  }

  index() {
    const { times } = this.data;
    if (this.at === null || !times.length) return null;
    let nearest = 0;
    times.forEach((time, i) => { if (Math.abs(time - this.at) < Math.abs(times[nearest] - this.at)) nearest = i; });
    return nearest;
  }

  move(time) {
    this.at = time;
    if (this.data) this.draw(this.data);
  }

  point(event) {
    if (!this.data) return;
    const { from, to } = this.data, zero = this.x(from);
    const pointer = event.clientX - this.host.getBoundingClientRect().left;
    this.move(from + ((pointer - zero) / (this.x(to) - zero)) * (to - from));
  }

  key(event) {
    const { times } = this.data ?? { times: [] };
    const last = times.length - 1, here = this.index() ?? last + 1, far = event.shiftKey ? 10 : 1;
    const goals = { ArrowLeft: here - far, ArrowDown: here - far, ArrowRight: here + far, ArrowUp: here + far, PageUp: here + 10, PageDown: here - 10, Home: 0, End: last };
    if (event.key === "Escape") this.move(null);
    if (!(event.key in goals) || last < 0) return;
    event.preventDefault();
    this.move(times[Math.min(last, Math.max(0, goals[event.key]))]);
  }

  /* The marks at a time, within the precision of the pointer; swaps are too frequent to be named. */
  near(time) {
    const { from, to, marks } = this.data, distance = Math.max(1, (to - from) / 120);
    return marks.filter((mark) => mark.kind !== "swap" && time >= mark.time - distance && time <= mark.until + distance).slice(-4);
  }

  show() {
    const i = this.index(), { times, lines, format } = this.data;
    this.tip.hidden = i === null;
    const shown = i ?? times.length - 1;
    const known = lines.filter((line) => shown >= 0 && line.values[shown] !== null);
    const figures = known.map((line) => `${line.short} ${format(line.values[shown])}`).join(", ");
    const happened = shown < 0 ? [] : this.near(times[shown]).map((mark) => mark.text);
    this.host.setAttribute("aria-valuenow", String(Math.max(0, shown)));
    this.host.setAttribute("aria-valuetext", shown < 0 ? this.data.empty : [`${clock(times[shown])}: ${figures || "no figures"}`, ...happened].join(". "));
    if (i === null) return;
    const at = this.x(times[i]), drawing = this.host.firstChild;
    drawing.append(shape("line", { class: "cursor", x1: at, x2: at, y1: 10, y2: this.host.clientHeight - 26 }));
    for (const line of known) {
      drawing.append(shape("circle", { class: `point mark ${line.kind}`, cx: at, cy: this.y(line.values[i]), r: 4.5 }));
    }
    const rows = known.map((line) => element("tr", {}, element("th", {}, line.short), element("td", {}, format(line.values[i]))));
    this.tip.replaceChildren(clock(times[i]), element("table", {}, ...rows), ...this.near(times[i]).map((mark) => element("p", {}, mark.count > 1 ? `${mark.text} (${mark.count} of them)` : mark.text)));
    const leftwards = at > this.host.clientWidth / 2;
    this.tip.style.transform = `translateX(${Math.max(0, leftwards ? at - this.tip.offsetWidth - 14 : at + 14)}px)`;
  }
}

/* One band for each group of series, with a scale from 0 to the greatest value of the group, and its greatest and least
   value at the right end. */
function spark(host, groups, times, from, to, gap, format) {
  const limits = groups.map(({ series }) => series.flat().filter((value) => value !== null))
    .map((values) => (values.length ? [Math.max(...values), Math.min(...values)] : null));
  const labels = limits.map((ends) => (ends ? [`max ${format(ends[0])}`, `min ${format(ends[1])}`] : []));
  const room = Math.max(72, ...labels.flat().map((text) => 10 + 6.3 * text.length));
  const width = host.clientWidth - room, pitch = (host.clientHeight + 8) / groups.length, height = pitch - 8;
  const x = (time) => ((time - from) / (to - from)) * width;
  const drawn = groups.flatMap(({ kinds, series }, band) => {
    const low = band * pitch + height - 1;
    const base = shape("line", { class: "grid", x1: 0, x2: width, y1: low + 0.5, y2: low + 0.5 });
    if (!limits[band]) return [base];
    const y = (value) => low - (value / (limits[band][0] || 1)) * (height - 6);
    return [base, ...series.map((one, i) => shape("path", { class: kinds[i], d: path(times, one, gap, x, y) })).reverse(),
      ...labels[band].map((text, i) => shape("text", { x: width + 6, y: i ? low : low - height + 12 }, text))];
  });
  host.replaceChildren(shape("svg", { viewBox: `0 0 ${host.clientWidth} ${host.clientHeight}`, role: "img", "aria-label": labels.flat().join(", ") || "no figures" }, ...drawn));
}
