
const $ = (id) => document.getElementById(id);
const figure = (name, text) => { document.querySelector(`[data-figure="${name}"]`).textContent = text; };

/* words for numbers */
const NONE = "–";
const grouped = new Intl.NumberFormat("en");
const known = (value) => value !== null && value !== undefined;
const count = (value) => (known(value) ? grouped.format(value) : NONE);
const rate = (value) => (known(value) ? grouped.format(Number(value.toFixed(value < 100 ? 1 : 0))) : NONE);
const percent = (value, whole) => (known(value) ? `${(100 * value).toFixed(whole === true ? 0 : 1)} %` : NONE);
const digits = (value) => (known(value) ? String(Number(value.toPrecision(3))) : NONE);
function duration(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds < 0.9995) return `${digits(seconds * 1000)} ms`;
  if (seconds < 60) return `${digits(seconds)} s`;
  return age(seconds);
}
function age(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}
function bytes(value) {
  const rounded = Number(value.toPrecision(3));
  const power = rounded < 1000 ? 0 : Math.min(4, Math.floor(Math.log10(rounded) / 3));
  return `${digits(value / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}
const sum = (values) => values.reduce((total, value) => total + value, 0);

/* what is known */
const RANGES = [[600, "10 min"], [3600, "1 h"], [86400, "24 h"], [Infinity, "All"]];
const stored = (store, key, value) => {
  try {
    return value === undefined ? store.getItem(key) : store.setItem(key, value);
  } catch { return null; }
};
let range = RANGES[0][0];
let status = null, points = null, heard = 0, failures = 0, timer = 0, looking = false, again = false;
const chart = new Chart($("chart"));

async function ask(path) {
  const token = stored(sessionStorage, "token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const reply = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(8000) });
  if (!reply.ok) throw Object.assign(new Error(`${path}: ${reply.status}`), { status: reply.status });
  return reply.json();
}

/* The finest points that reach back as far as the range does. */
function resolution() {
  const span = Math.min(range, status.time - status.history.since);
  const { resolutions } = status.history;
  return resolutions.find(([seconds, many]) => seconds * many >= span) ?? resolutions.at(-1);
}

async function askHistory() {
  const [wanted, many] = resolution(), began = status.history.since;
  const from = (time) => ask(`api/history?step=${wanted}&since=${time}`);
  const since = (points?.step === wanted && points.began === began && points.time.at(-1)) || 0;
  const fresh = await from(since), turned = since && !fresh.time.length; /* the server's clock was set back */
  if (!since || turned) {
    points = { ...(turned ? await from(0) : fresh), began };
    return;
  }
  const keep = points.time.findIndex((time) => time >= since);
  const join = (old, added) => [...old.slice(0, keep), ...added].slice(-many);
  points.time = join(points.time, fresh.time);
  for (const name of Object.keys(points.series)) points.series[name] = join(points.series[name], fresh.series[name]);
}

async function look() {
  if (looking) {
    again = true;
    return;
  }
  clearTimeout(timer);
  looking = true;
  try {
    status = await ask("api/status");
    await askHistory();
    failures = 0;
    heard = performance.now();
    $("door").hidden = true;
    render();
  } catch (error) {
    if (error.status === 401) return lock();
    if (!(error instanceof TypeError || error instanceof DOMException || error.status)) console.error(error);
    failures += 1;
  } finally {
    looking = false;
  }
  const pause = again ? 0 : Math.min(15000, 1000 * 2 ** Math.max(0, failures - 1));
  again = false;
  if (!document.hidden) timer = setTimeout(look, pause);
}

function lock() {
  document.body.dataset.state = "locked";
  $("sentence").textContent = "This server wants a token.";
  $("refusal").textContent = stored(sessionStorage, "token") ? "The server does not know this token." : "";
  $("door").hidden = false;
  $("token").focus();
}

/* Says how old the figures are, every second, also while no answer comes. */
function watch() {
  if (document.body.dataset.state === "locked" || document.hidden) return;
  const seconds = (performance.now() - heard) / 1000;
  const lost = failures > 0 && (!status || seconds > 3);
  if (lost) {
    say("lost", "The server does not answer.", []);
    $("meta").textContent = status ? `What is below is ${age(seconds)} old; it goes on as soon as the server is back.` : "";
  }
  $("updated").textContent = status ? `Updated ${seconds < 3 ? "just now" : `${age(seconds)} ago`}` : "";
}

function say(state, sentence, problems) {
  document.body.dataset.state = state;
  if ($("sentence").textContent !== sentence) $("sentence").textContent = sentence;
  const reasons = problems.length > 1 ? problems : [];
  if ([...$("problems").children].map((item) => item.textContent).join() !== reasons.join()) {
    $("problems").replaceChildren(...reasons.map((reason) => element("li", {}, reason)));
  }
  const colour = { well: "%2315774a", starting: "%238b5a00" }[state] ?? "%23bf2329";
  const icon = `data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><circle cx='8' cy='8' r='6' fill='${colour}'/></svg>`;
  if ($("icon").href !== icon) $("icon").href = icon;
  document.title = `${status?.name ?? "Anabranch"}: ${sentence.replace(/\.$/, "").toLowerCase()}`;
}

/* the page */
const regression = () => Object.keys(status.learner?.error ?? {}).length > 0 || status.task === "regression";
const score = (value, whole) => (regression() ? digits(value) : percent(value, whole));

function render() {
  const { learner, serving, health } = status;
  say(health.state, health.sentence.replace(/^./, (first) => first.toUpperCase()), health.problems);
  $("pipeline").textContent = status.name;
  const told = [
    known(serving.version) ? `Version ${serving.version}, swapped in ${age(status.time - serving.version_since)} ago` : "Nothing is served yet",
    !learner ? "not learning" : health.silent ? `learner last heard of ${age(status.time - learner.time)} ago` : `learning for ${age(learner.time - learner.started)}`,
    `serving for ${age(serving.time - serving.started)}`,
  ];
  $("meta").replaceChildren(...told.map((text) => element("span", {}, text)));
  renderAccuracy();
  renderTiles();
  renderVersions();
  renderOutcomes();
  renderReplay();
  renderPartitions();
  renderParts();
  watch();
}

function lines() {
  const { learner, baseline } = status, now = regression() ? learner?.error : learner?.accuracy;
  const other = regression() ? baseline?.error : baseline?.accuracy;
  const plain = baseline?.strategy === "none" && learner?.strategy !== "none";
  const all = [
    { kind: "now", series: "now", name: "Now", short: "now", about: "newest events, before training", value: now?.now },
    { kind: "old", series: "old", name: "Old", short: "old", about: "held out, the older ones", value: now?.old },
    { kind: "worst", series: "worst", name: "Worst class", short: "worst class", about: "held out, where it does worst", value: now?.worst },
    { kind: "baseline", series: "baseline_old", name: plain ? "Old, without replay" : "Old, baseline", short: plain ? "no replay" : "baseline", about: plain ? "a baseline that learns from new alone" : "the baseline", value: other?.old },
  ];
  return all.filter((line) => (line.kind !== "baseline" || baseline) && (line.kind !== "worst" || !regression()));
}

function bounds() {
  const first = Math.max(points.time[0] ?? status.time, status.time - range);
  return { from: Math.min(first, status.time - 60), to: status.time };
}

function shown(names) {
  const { from } = bounds(), begin = points.time.findIndex((time) => time >= from);
  const checkpoint = (values) => (begin < 0 ? [] : values.slice(begin));
  return { times: checkpoint(points.time), values: names.map((name) => checkpoint(points.series[name])), gap: 3.5 * points.step };
}

function renderAccuracy() {
  const drawn = lines();
  $("hero-title").textContent = regression() ? "Absolute error" : "Accuracy";
  $("legend").replaceChildren(...drawn.map((line) => element("li", { "data-line": line.kind },
    element("span", { class: "name" }, shape("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }, shape("path", { class: `curve ${line.kind}`, d: "M1 4H21" })), line.name),
    element("span", { class: "value", "data-figure": `accuracy_${line.series}` }, score(line.value)),
    element("span", { class: "about" }, line.about))));
  const { times, values, gap } = shown(drawn.map((line) => line.series));
  if (status.learner?.time > (times.at(-1) ?? 0)) {
    times.push(status.learner.time);
    drawn.forEach((line, i) => values[i].push(line.value ?? null));
  }
  const most = Math.max(0, ...values.flat().filter(known));
  chart.draw({
    ...bounds(), times, gap, format: score,
    top: regression() ? niceTop(most) : 1,
    empty: status.learner ? "Nothing can be told yet: the first held-out events are on their way" : "The learner has not reported yet",
    lines: drawn.map((line, i) => ({ ...line, values: values[i] })),
  });
  if ($("values").open) renderValues(drawn, times, values);
}

function renderValues(drawn, times, values) {
  const head = element("tr", {}, element("th", { scope: "col" }, "Time"), ...drawn.map((line) => element("th", { scope: "col", class: "num" }, line.name)));
  const every = Math.max(1, Math.ceil(times.length / 20)), rows = [];
  for (let i = times.length - 1; i >= 0; i -= every) {
    rows.push(element("tr", {}, element("th", { scope: "row" }, clock(times[i])), ...values.map((column) => element("td", { class: "num" }, score(column[i])))));
  }
  $("values").lastElementChild.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function renderTiles() {
  const { learner, serving, health } = status, rates = health.silent ? {} : learner?.rates ?? {};
  figure("freshness_p50", duration(serving.freshness_p50_seconds));
  figure("freshness_p99", duration(serving.freshness_p99_seconds));
  figure("freshness_note", serving.freshness_p50_seconds > 60 ? "old events are being learned" : "of all events of the last minute");
  figure("rows_new", rate(rates.rows_new));
  figure("rows_replay", rate(rates.rows_replay));
  figure("steps_rate", rate(rates.steps));
  figure("steps", count(learner?.steps));
  const answered = sum(Object.values(serving.requests));
  const failed = sum(Object.entries(serving.requests).filter(([code]) => Number(code) >= 400).map(([, many]) => many));
  figure("requests_rate", rate(serving.requests_per_second));
  figure("request_p50", duration(serving.request_p50_seconds));
  figure("request_p99", duration(serving.request_p99_seconds));
  figure("requests", count(answered));
  const errors = document.querySelector('[data-figure="errors"]');
  errors.textContent = `${count(failed)} ${failed === 1 ? "error" : "errors"}`;
  errors.className = failed ? "bad" : "zero";
  const partitions = Object.values(learner?.partitions ?? {});
  const lag = sum(partitions.map((partition) => partition.pending));
  const asked = learner?.lag_age_seconds, stale = known(asked) && asked >= 10;
  figure("lag", learner && !health.silent && !stale ? count(lag) : NONE);
  const rows = (lag * (learner?.outcomes.trained ?? 0)) / Math.max(1, sum(partitions.map((partition) => partition.finished)));
  const behind = rates.rows_new > 0 ? `about ${duration(rows / rates.rows_new)} at this rate` : "and nothing is learned";
  figure("behind", !learner || health.silent ? "" : stale ? `${count(lag)} as of ${age(asked)} ago` : lag === 0 ? "nothing waits" : behind);
  figure("partitions", `${partitions.length} ${partitions.length === 1 ? "partition" : "partitions"}`);
  for (const host of document.querySelectorAll("[data-spark]")) {
    const { times, values, gap } = shown(host.dataset.spark.split(" "));
    const { from, to } = bounds();
    spark(host, times, values, from, to, gap);
  }
}

const VERDICTS = { pass: "✓", fail: "✕", inconclusive: "○" };

function renderVersions() {
  const { learner, versions } = status, scores = regression() ? -1 : 1;
  const held = learner && known(learner.held_since) && !status.health.silent ? `, held back for ${age(learner.time - learner.held_since)}` : "";
  figure("versions", learner ? `${count(learner.versions_published)} published, ${count(learner.publish_skipped)} skipped${held}` : "");
  $("score-name").textContent = regression() ? "Old error" : "Old";
  const rows = versions.flatMap((version) => {
    const old = version.metrics.old;
    const row = element("tr", { class: ["served", "pinned"].includes(version.fate) ? "served" : "", "data-version": version.number },
      element("th", { scope: "row" }, String(version.number)),
      element("td", { class: "num" }, known(version.time) ? age(status.time - version.time) : NONE),
      element("td", { class: "num wide" }, count(version.step)),
      element("td", { class: "num" }, known(old) ? score(scores * old) : NONE),
      element("td", { class: version.verdict ?? "" }, element("span", { class: "glyph", "aria-hidden": "true" }, VERDICTS[version.verdict] ?? ""), version.verdict ?? NONE),
      element("td", { class: version.fate === "rolled back" ? "refused" : version.fate }, version.fate));
    const told = ["refused", "rolled back"].includes(version.fate) && version.reason;
    return told ? [row, element("tr", { class: "reason" }, element("td", { colspan: "6" }, version.reason))] : [row];
  });
  if (!rows.length) rows.push(element("tr", { class: "reason" }, element("td", { colspan: "6" }, "None has been published yet.")));
  $("versions").tBodies[0].replaceChildren(...rows);
}

const OUTCOMES = ["trained", "stored_only", "held_out", "skipped", "dead_lettered"];

function renderOutcomes() {
  const outcomes = status.learner?.outcomes ?? {}, skipped = status.learner?.skipped ?? {};
  const read = sum(Object.values(outcomes)), alarms = { skipped: "warn", dead_lettered: "bad" };
  figure("read", count(read));
  $("outcome-bar").replaceChildren(...OUTCOMES.filter((name) => outcomes[name]).map((name) => {
    const part = element("span", { class: `o-${name}` });
    part.style.flexGrow = outcomes[name];
    return part;
  }));
  $("outcomes").tBodies[0].replaceChildren(...OUTCOMES.map((name) => {
    const many = outcomes[name] ?? 0;
    const why = name === "skipped" ? Object.entries(skipped).filter(([, rows]) => rows).map(([reason]) => reason.replaceAll("_", " ")).join(", ") : "";
    const label = element("th", { scope: "row" }, element("span", { class: `key o-${name}`, "aria-hidden": "true" }), name.replace("_", " ") + (why && `: ${why}`));
    return element("tr", { "data-outcome": name }, label,
      element("td", { class: `num ${many ? alarms[name] ?? "" : ""}` }, count(many)),
      element("td", { class: "num aside" }, !many ? NONE : many / read < 0.0005 ? "< 0.1 %" : percent(many / read)));
  }));
}

function renderReplay() {
  const { replay_rows: rows = {}, replay_bytes: sizes = {}, replay_bounds: bounds = {}, replay_capacity: capacity, replay_lost: lost } = status.learner ?? {};
  const names = Object.keys(rows), last = names.at(-1); /* the last tier holds all, those before it are caches */
  figure("replay", known(capacity) ? `${count(rows[last] ?? 0)} of ${count(capacity)} events` : "");
  const tiers = names.map((tier) => {
    const size = sizes[tier] ?? 0, bound = bounds[tier] ?? 0, fraction = bound ? Math.min(1, size / bound) : 0;
    const fill = element("span");
    fill.style.width = `${Math.max(100 * fraction, size ? 0.6 : 0)}%`;
    return element("div", { class: "tier", "data-tier": tier },
      element("p", {}, element("span", {}, tier === last ? tier : `${tier}, a cache of ${last}`), element("span", { class: "num" }, `${count(rows[tier])} events`)),
      element("div", { class: "meter", "aria-hidden": "true" }, fill),
      element("p", { class: "aside" }, element("span", {}, bound ? `${bytes(size)} of ${bytes(bound)}` : bytes(size)), element("span", {}, bound ? percent(fraction) : "")));
  });
  if (!tiers.length) tiers.push(element("p", { class: "aside" }, status.learner ? "This learner replays nothing." : NONE));
  if (lost) tiers.push(element("p", { class: "warn", id: "lost" }, `${count(lost)} ${lost === 1 ? "event was" : "events were"} lost by a tier`));
  $("tiers").replaceChildren(...tiers);
}

function renderPartitions() {
  const partitions = Object.entries(status.learner?.partitions ?? {});
  const [name, most] = partitions.reduce((worst, one) => (one[1].pending > worst[1].pending ? one : worst), ["", { pending: 0 }]);
  figure("behindmost", name && partitions.length > 1 ? `${name} lags most, by ${count(most.pending)}` : "");
  const rows = partitions.map(([name, partition]) => element("tr", { "data-partition": name },
    element("th", { scope: "row" }, name),
    element("td", { class: "num" }, count(partition.pending)),
    element("td", { class: "num" }, count(partition.trained_through))));
  if (!rows.length) rows.push(element("tr", { class: "reason" }, element("td", { colspan: "3" }, "None is known yet.")));
  $("partitions").tBodies[0].replaceChildren(...rows);
}

function renderParts() {
  const { learner, serving, baseline } = status, ago = (time) => `${age(status.time - time)} ago`;
  const swaps = serving.swaps.swapped ?? 0, refused = serving.swaps.refused ?? 0, { shadow } = serving;
  const parts = [
    ["Last checkpoint", learner?.checkpoint ? `number ${learner.checkpoint}, ${known(learner.checkpoint_time) ? ago(learner.checkpoint_time) : "age not known"}` : "none yet"],
    ["Holdout set", learner ? `${count(learner.holdout_rows)} events` : NONE],
    ["Learner reported", learner ? ago(learner.time) : "never"],
    ...(baseline ? [["Baseline reported", ago(baseline.time)]] : []),
    ["Swaps", `${count(swaps)}, ${count(refused)} refused`],
    ...(shadow ? [["Shadow", shadow.failed ?? (shadow.rows ? `version ${shadow.version} disagrees by ${score(shadow.disagreement)}, over ${count(shadow.rows)} rows` : `version ${shadow.version}, nothing compared yet`)]] : []),
  ];
  $("parts").replaceChildren(...parts.flatMap(([name, told]) => [element("dt", {}, name), element("dd", {}, told)]));
}

/* what the reader does */
for (const [seconds, name] of RANGES) {
  const choice = element("input", { type: "radio", name: "range", value: seconds });
  choice.checked = seconds === range;
  choice.addEventListener("change", () => { range = seconds; if (status) look(); });
  $("ranges").append(element("label", {}, choice, name));
}

const THEMES = ["auto", "light", "dark"];
function dressUp(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  $("theme").setAttribute("aria-label", `Colour theme: ${theme}`);
}
let theme = THEMES.includes(stored(localStorage, "theme")) ? stored(localStorage, "theme") : "auto";
dressUp(theme);
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  stored(localStorage, "theme", theme);
  dressUp(theme);
});
$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  stored(sessionStorage, "token", $("token").value.trim());
  $("token").value = "";
  look();
});
$("values").addEventListener("toggle", () => status && renderAccuracy());
document.addEventListener("visibilitychange", () => { if (!document.hidden && document.body.dataset.state !== "locked") look(); });
setInterval(watch, 1000);
look();
