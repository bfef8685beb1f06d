"use strict";

const element = (name, attributes = {}, ...children) => {
  const made = document.createElement(name);
  return dress(made, attributes, children);
};
const shape = (name, attributes = {}, ...children) =>
  dress(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const dress = (made, attributes, children) => {
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
};

/* Points that are null, or that lie further apart than `gap`, are not joined; one that stands alone is a dot. */
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

function niceTop(most) {
  const power = 10 ** Math.floor(Math.log10(most || 1));
  return [1, 2, 4, 5, 10].find((step) => step * power >= most) * power;
}

const TICKS = [10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400, 172800];

function timeTicks(from, to, most) {
  const step = TICKS.find((seconds) => (to - from) / seconds <= most) ?? 604800;
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

/* Moves labels apart that would cover each other; `labels` have a y. */
function spread(labels, distance, bottom) {
  labels.sort((a, b) => a.y - b.y);
  labels.forEach((label, i) => { if (i) label.y = Math.max(label.y, labels[i - 1].y + distance); });
  let limit = bottom;
  for (const label of labels.toReversed()) { label.y = Math.min(label.y, limit); limit = label.y - distance; }
}

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
    const { times, lines, from, to, gap, top, format } = data;
    const width = this.host.clientWidth, height = this.host.clientHeight;
    const left = 44, right = width < 560 ? 10 : 132, high = 10, low = height - 26;
    const x = this.x = (time) => left + ((time - from) / (to - from)) * (width - left - right);
    const y = this.y = (value) => low - (Math.min(value, top) / top) * (low - high);
    const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const at = Math.round(y(part * top)) + 0.5;
      drawing.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
      drawing.append(shape("text", { x: left - 10, y: at + 4, "text-anchor": "end" }, format(part * top, true)));
    }
    const { ticks, step } = timeTicks(from, to, Math.max(3, (width - left - right) / 110));
    for (const tick of ticks) {
      const anchor = x(tick) > width - 30 ? "end" : "middle";
      drawing.append(shape("text", { x: x(tick), y: height - 6, "text-anchor": anchor }, clock(tick, step)));
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
      const middle = { class: "empty", x: (left + width - right) / 2, y: y(0.625 * top) + 4 };
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
    const place = event.clientX - this.host.getBoundingClientRect().left;
    this.move(from + ((place - zero) / (this.x(to) - zero)) * (to - from));
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

  show() {
    const i = this.index(), { times, lines, format } = this.data;
    this.tip.hidden = i === null;
    const shown = i ?? times.length - 1;
    const known = lines.filter((line) => shown >= 0 && line.values[shown] !== null);
    const said = known.map((line) => `${line.short} ${format(line.values[shown])}`).join(", ");
    this.host.setAttribute("aria-valuenow", String(Math.max(0, shown)));
    this.host.setAttribute("aria-valuetext", shown < 0 ? this.data.empty : `${clock(times[shown])}: ${said || "nothing known"}`);
    if (i === null) return;
    const at = this.x(times[i]), drawing = this.host.firstChild;
    drawing.append(shape("line", { class: "cursor", x1: at, x2: at, y1: 10, y2: this.host.clientHeight - 26 }));
    for (const line of known) {
      drawing.append(shape("circle", { class: `point mark ${line.kind}`, cx: at, cy: this.y(line.values[i]), r: 4.5 }));
    }
    const rows = known.map((line) => element("tr", {}, element("th", {}, line.short), element("td", {}, format(line.values[i]))));
    this.tip.replaceChildren(clock(times[i]), element("table", {}, ...rows));
    const leftwards = at > this.host.clientWidth / 2;
    this.tip.style.transform = `translateX(${Math.max(0, leftwards ? at - this.tip.offsetWidth - 14 : at + 14)}px)`;
  }
}

/* A line without axes: the first series strong, the second faint; from 0 to the most that either has. */
function spark(host, times, series, from, to, gap) {
  const width = host.clientWidth, height = host.clientHeight;
  const most = Math.max(...series.flat().filter((value) => value !== null), 0) || 1;
  const x = (time) => ((time - from) / (to - from)) * width;
  const y = (value) => height - 1 - (value / most) * (height - 3);
  const base = shape("line", { class: "grid", x1: 0, x2: width, y1: height - 0.5, y2: height - 0.5 });
  const curves = series.map((values, i) => shape("path", { class: "ab"[i], d: path(times, values, gap, x, y) }));
  host.replaceChildren(shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, base, ...curves.reverse()));
}
