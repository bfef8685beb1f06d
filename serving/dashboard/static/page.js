
const $ = (id) => document.getElementById(id);
const figure = (name, text) => { document.querySelector(`[data-figure="${name}"]`).textContent = text; };

/* the rollout commands, by the server's names: POST api/versions/N:ACTION */
const ACTIONS = { promote: "promote", pin: "pin", unpin: "unpin", reject: "reject" };

/* explanations, shown on hover and on keyboard focus */
const HELP = {
  now: "Accuracy on the newest events, each predicted before the model trains on it (prequential). It falls when the stream changes, such as with a new class, until that is learned. Compare it with the rule next to it, and with the same figure of a second learner.",
  old: "Accuracy on the older three quarters of the holdout set, which the model never trains on.",
  worst: "Of all classes, the lowest accuracy on the holdout set.",
  measure_now: "The measure by which versions are judged, on the newest 5,000 events, each predicted before the model trains on it (prequential). Next to it: the 95 % interval, and what one answer for all events has at best.",
  measure_held_out: "The measure by which versions are judged, of the newest version on the holdout set, which the model never trains on. Rare classes have more than their share of it. Next to it: the 95 % interval, and what one answer for all events has at best.",
  judged: "The measure by which versions are judged, on the holdout set when the version was published. Point at a value for what one answer for all events has.",
  slices: "The newest version on held-out events with one value of a feature, next to what one answer has there, and to the served version. Slices with too few events are not compared.",
  precision: "Of the answers that named the class, the part that was right.",
  recall: "Of the events of the class, the part that was found.",
  baseline: "The same figure of a second learner, on the same events, that runs for comparison.",
  zoom: "Starts the y axis at the 1st percentile of the values instead of 0, the baseline left out.",
  freshness: "Time from the append of an event to Kafka until a version that has trained on it is served. Median and 99th percentile over the last minute.",
  latency: "Time from the receipt of an inference request to its reply. Median and 99th percentile over the last minute.",
  lag: "Offsets between the end of the topic's partitions and what has its outcome, and how long the oldest of them has waited.",
  verdict: "The quality gate compares each version with the served one on the holdout set: pass and inconclusive may be served, fail may not. Point at a verdict for its reasons.",
  status: "Served now; replaced by a newer version; refused by the gate or because it cannot be loaded; rejected by a person; superseded before it was served.",
  fleet: "The servers that follow the object store, by what each reports every five seconds. A canary is one version ahead while that is judged.",
  trained_through: "The last offset, inclusive, up to which every event of the partition has its outcome.",
  checkpoint: "What a restart resumes from: model, optimizer, replay store and offsets, written together.",
  storage: "What [storage] lacks of the newest checkpoint, version and erasure log. Uploads run in the background, and training does not wait for them.",
  holdout: "Labelled events that are never trained on. The gate judges versions by them.",
  backfill: "The files of [stream.backfill], which are learned before the topics. The expected end is at the rate of the last half minute.",
  undo: "What `anabranch undo` took out. The learner returned to a checkpoint from before it, and learns the stream again without it.",
  device: "The NVIDIA devices that the learner trains on, by the driver's own readings. The temperature is that of the hottest.",
  capacity: "Old events that are sampled together with new ones. The store evicts when it is 1/32 above its capacity, back to it.",
  forgetting: "Best accuracy ever less accuracy now on the holdout set, mean over the classes.",
  loss: "Mean loss of new events before the model trains on them.",
  search: "The settings that the model trains with, and the challengers that try others on the same events; anabranch search status has each.",
  inputs: "Features, or predictions, that have drifted against the events before.",
  drift: "Changes of the stream that the detector has noticed over the life of the pipeline.",
  ratio: "Old events that the next step replays for each new one.",
  labels: "Events that wait for a label from the topics of [stream.labels], and the time from an event to its label.",
  sharing: "The learner yields the device to requests. The percentage is the time of the last steps that was left to training.",
};

/* words for numbers */
const NONE = "–";
const grouped = new Intl.NumberFormat("en");
const known = (value) => value !== null && value !== undefined;
const count = (value) => (known(value) ? grouped.format(value) : NONE);
const rate = (value) => (known(value) ? grouped.format(Number(value.toFixed(value < 100 ? 1 : 0))) : NONE);
const percent = (value, rounded) => (known(value) ? `${(100 * value).toFixed(rounded === true ? 0 : 1)} %` : NONE);
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

/* the state of the page */
const MOST_EVENTS = 1200;
const RANGES = [[600, "10 min"], [3600, "1 h"], [86400, "24 h"], [Infinity, "All"]];
const stored = (store, key, value) => {
  try {
    return value === undefined ? store.getItem(key) : store.setItem(key, value);
  } catch { return null; }
};
let range = RANGES[0][0];
let status = null, points = null, received = 0, failures = 0, timer = 0, refreshing = false, again = false;
let adminToken = ""; /* in memory alone: never stored */
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
  const [step, many] = resolution(), began = status.history.since;
  const from = (time) => ask(`api/history?step=${step}&since=${time}`);
  const since = (points?.step === step && points.began === began && points.time.at(-1)) || 0;
  const fresh = await from(since), turned = since && !fresh.time.length; /* the server's clock was set back */
  if (!since || turned) {
    points = { ...(turned ? await from(0) : fresh), began };
    return;
  }
  const id = (event) => `${event.kind} ${event.time}`, updated = new Set(fresh.events.map(id));
  points.events = [...points.events.filter((event) => !updated.has(id(event))), ...fresh.events].slice(-MOST_EVENTS);
  const keep = points.time.findIndex((time) => time >= since);
  const join = (old, added) => [...old.slice(0, keep), ...added].slice(-many);
  points.time = join(points.time, fresh.time);
  for (const name of Object.keys(points.series)) points.series[name] = join(points.series[name], fresh.series[name]);
}

async function refresh() {
  if (refreshing) {
    again = true;
    return;
  }
  clearTimeout(timer);
  refreshing = true;
  try {
    status = await ask("api/status");
    await askHistory();
    failures = 0;
    received = performance.now();
    $("token-form").hidden = true;
    render();
  } catch (error) {
    if (error.status === 401) return lock();
    if (!(error instanceof TypeError || error instanceof DOMException || error.status)) console.error(error);
    failures += 1;
  } finally {
    refreshing = false;
  }
  const pause = again ? 0 : Math.min(15000, 1000 * 2 ** Math.max(0, failures - 1));
  again = false;
  if (!document.hidden) timer = setTimeout(refresh, pause);
}

function lock() {
  document.body.dataset.state = "locked";
  $("sentence").textContent = "This server requires a token.";
  $("refusal").textContent = stored(sessionStorage, "token") ? "The server does not know this token." : "";
  $("token-form").hidden = false;
  $("token").focus();
}

/* Shows the age of the figures, every second, also while the server does not answer. */
function watch() {
  if (document.body.dataset.state === "locked" || document.hidden) return;
  const seconds = (performance.now() - received) / 1000;
  const lost = failures > 0 && (!status || seconds > 3);
  if (lost) {
    headline("lost", "The server does not answer.", []);
    $("meta").textContent = status ? `What is below is ${age(seconds)} old. The page continues as soon as the server answers.` : "";
  }
  $("updated").textContent = status ? `Updated ${seconds < 3 ? "just now" : `${age(seconds)} ago`}` : "";
}

function headline(state, sentence, problems) {
  document.body.dataset.state = state;
  if ($("sentence").textContent !== sentence) $("sentence").textContent = sentence;
  const reasons = problems.length > 1 ? problems : [];
  if ([...$("problems").children].map((item) => item.textContent).join() !== reasons.join()) {
    $("problems").replaceChildren(...reasons.map((reason) => element("li", {}, reason)));
  }
  const [colour, drawn] = { well: ["15774a", "M8 2a6 6 0 1 0 .01 0Z"], attention: ["8b5a00", "M8 1 15 14H1Z"], starting: ["8b5a00", "M8 2a6 6 0 1 0 .01 0Z"] }[state] ?? ["bf2329", "M8 1 15 8 8 15 1 8Z"];
  const icon = `data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><path d='${drawn}' fill='%23${colour}'/></svg>`;
  if ($("icon").href !== icon) $("icon").href = icon;
  document.title = `${status?.name ?? "Anabranch"}: ${sentence.replace(/\.$/, "").toLowerCase()}`;
}

/* the page */
const regression = () => Object.keys(status.learner?.error ?? {}).length > 0 || status.task === "regression";
const score = (value, rounded) => (regression() ? digits(value) : percent(value, rounded));
/* The measure by which versions are judged, where it is not the task's own score. */
const judged = (report = status.learner) => report?.measures?.[report.measure];
const words = (name) => name.replaceAll("_", " ");
const capital = (text) => text.replace(/^./, (first) => first.toUpperCase());

function render() {
  const { learner, serving, health } = status;
  headline(health.state, capital(health.sentence), health.problems);
  $("pipeline").textContent = status.name;
  $("links").replaceChildren(...Object.entries(status.links).map(([name, href]) => element("a", { href }, name)));
  const facts = [
    known(serving.version) ? `Version ${serving.version}, swapped in ${age(status.time - serving.version_since)} ago` : "Nothing is served yet",
    !learner ? "no learner" : health.silent ? `last report of the learner ${age(status.time - learner.time)} ago` : `learning for ${age(learner.time - learner.started)}`,
    `serving for ${age(serving.time - serving.started)}`,
  ];
  const compared = Object.values(learner?.baselines ?? {}).map((each) => each.comparison).filter(Boolean);
  if (learner && !health.silent && !health.sentence.includes("behind the stream")) facts.splice(1, 0, behind(learner, serving));
  const { value = {}, constant = {} } = judged() ?? {}, window = known(value.held_out) ? "held_out" : "now";
  if (known(value[window]) && !health.silent) facts.push(`${words(window)} ${words(learner.measure)} ${digits(value[window])}, constant ${digits(constant[window])}`);
  if (compared.length && !health.silent) facts.push(`now ${judged() ? `by ${regression() ? "absolute error" : "accuracy"} ` : ""}${compared.join(", ")}`);
  $("meta").replaceChildren(...facts.map((text) => element("span", {}, text)));
  figure("served", known(serving.version) ? `Serves version ${serving.version}` : "");
  const rejected = learner?.outcomes.dead_lettered ?? 0;
  $("rejected").hidden = !rejected;
  $("rejected").firstElementChild.textContent = `${count(rejected)} ${rejected === 1 ? "message was" : "messages were"} rejected and sent to the dead-letter topic, each with its reason.`;
  renderBackfill(learner?.backfill);
  renderAccuracy();
  renderTiles();
  renderVersions();
  renderClasses();
  renderSlices();
  renderOutcomes();
  renderReplay();
  renderPartitions();
  renderFleet();
  renderFacts();
  watch();
}

/* How far what is served is behind, where the sentence does not say it; a history is behind by its nature. */
const UNITS_OF_TIME = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]];
function behind(learner, serving) {
  const reads = learner.backfill && !learner.backfill.done;
  const late = Math.max(learner.lag_seconds, reads ? 0 : serving.freshness_p50_seconds ?? 0);
  if (learner.lag_age_seconds >= 10) return "how far behind is not known";
  if (late < 10) return "less than 10 seconds behind";
  const [size, unit] = UNITS_OF_TIME.find(([seconds]) => late >= seconds), many = Math.floor(late / size);
  return `${count(many)} ${unit}${many === 1 ? "" : "s"} behind`;
}

function lines() {
  const { learner, baseline } = status, now = regression() ? learner?.error : learner?.accuracy;
  const other = regression() ? baseline?.error : baseline?.accuracy;
  const plain = baseline?.strategy === "none" && learner?.strategy !== "none";
  const measure = judged(), second = plain ? "Held out, without replay" : "Held out, baseline";
  if (measure) {
    const about = (window, events) => `${events}${known(measure.value[window]) ? `, ${digits(measure.lower[window])} to ${digits(measure.upper[window])}; constant: ${digits(measure.constant[window])}` : ""}`;
    const drawn = [
      { kind: "now", series: "measure_now", help: "measure_now", name: "Now", short: "now", about: about("now", "newest 5,000 events"), value: measure.value.now },
      { kind: "old", series: "measure_held_out", help: "measure_held_out", name: "Held out", short: "held out", about: about("held_out", "held-out events"), value: measure.value.held_out },
      { kind: "baseline", series: "baseline_measure_held_out", name: second, short: plain ? "no replay" : "baseline", about: "held-out events, baseline", value: judged(baseline)?.value.held_out },
    ];
    return drawn.filter((line) => line.kind !== "baseline" || baseline);
  }
  const rules = Object.values(learner?.baselines ?? {});
  const ruled = (name) => rules.filter((each) => known(each.scores[name])).map((each) => `; ${each.rule}: ${score(each.scores[name])}`).join("");
  const all = [
    { kind: "now", series: "now", name: "Now", short: "now", about: `newest events, before training${ruled("now")}`, value: now?.now },
    { kind: "old", series: "old", name: "Old", short: "old", about: `older held-out events${ruled("old")}`, value: now?.old },
    { kind: "worst", series: "worst", name: "Worst class", short: "worst class", about: "held-out events, lowest of all classes", value: now?.worst },
    { kind: "baseline", series: "baseline_old", name: plain ? "Old, without replay" : "Old, baseline", short: plain ? "no replay" : "baseline", about: plain ? "older held-out events, baseline" : "the baseline", value: other?.old },
  ];
  return all.filter((line) => (line.kind !== "baseline" || baseline) && (line.kind !== "worst" || !regression()));
}

function bounds() {
  const first = Math.max(points.time[0] ?? status.time, status.time - range);
  return { from: Math.min(first, status.time - 60), to: status.time };
}

function shown(names) {
  const { from } = bounds(), begin = points.time.findIndex((time) => time >= from);
  const visible = (values) => (begin < 0 ? [] : values.slice(begin));
  return { times: visible(points.time), values: names.map((name) => visible(points.series[name])), gap: 3.5 * points.step };
}

function renderAccuracy() {
  const drawn = lines(), measure = judged(), format = measure ? digits : score;
  const title = measure ? capital(words(status.learner.measure)) : regression() ? "Absolute error" : "Accuracy";
  $("hero-title").textContent = title;
  $("chart").setAttribute("aria-label", `${title} over time: the arrow keys move through it`);
  patchChildren($("legend"), drawn.map((line) => element("li", { "data-line": line.kind },
    element("span", { class: "name" }, shape("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }, shape("path", { class: `curve ${line.kind}`, d: "M1 4H21" })), element("span", { "data-help": line.help ?? line.kind }, line.name)),
    element("span", { class: "value", "data-figure": `accuracy_${line.series}` }, format(line.value)),
    element("span", { class: "about" }, line.about))));
  const { times, values, gap } = shown(drawn.map((line) => line.series));
  if (status.learner?.time > (times.at(-1) ?? 0)) {
    times.push(status.learner.time);
    drawn.forEach((line, i) => values[i].push(line.value ?? null));
  }
  const most = Math.max(0, ...values.flat().filter(known)), top = measure || regression() ? niceTop(most) : 1;
  const { from } = bounds(), marks = points.events.filter((event) => event.until >= from);
  chart.draw({
    ...bounds(), times, gap, format,
    top, bottom: $("zoom").checked ? zoomedBottom(drawn.flatMap((line, i) => (line.kind === "baseline" ? [] : values[i])), top) : 0, marks,
    empty: status.learner ? "No figures yet: the first held-out events are on their way" : "The learner has not reported yet",
    lines: drawn.map((line, i) => ({ ...line, values: values[i] })),
  });
  const kinds = Object.keys(EVENTS).filter((kind) => marks.some((mark) => mark.kind === kind));
  patchChildren($("marks"), kinds.map((kind) => element("li", { "data-key": kind },
    shape("svg", { viewBox: "-6 -6 12 12", "aria-hidden": "true" }, shape("path", { class: `event ${kind}`, d: MARKS[kind] })),
    `${EVENTS[kind]} (${count(sum(marks.filter((mark) => mark.kind === kind).map((mark) => mark.count)))})`)));
  if ($("values").open) renderValues(drawn, times, values, format);
  if ($("happened").open) renderEvents(marks);
}

const EVENTS = { swap: "swap", refused: "refused version", drift: "drift", restart: "restart", checkpoint: "checkpoint", lag: "lag policy", undo: "undo", search: "search" };

function renderEvents(marks) {
  const rows = marks.toReversed().slice(0, 100).map((mark) => element("tr", { "data-event": mark.kind },
    element("th", { scope: "row" }, clock(mark.time)),
    element("td", {}, EVENTS[mark.kind]),
    element("td", { class: "words" }, mark.count > 1 ? `${count(mark.count)} until ${clock(mark.until)}. Last: ${mark.text}` : mark.text)));
  $("happened").lastElementChild.replaceChildren(element("table", {}, element("tbody", {}, ...rows)));
}

function renderValues(drawn, times, values, format) {
  const head = element("tr", {}, element("th", { scope: "col" }, "Time"), ...drawn.map((line) => element("th", { scope: "col", class: "num" }, line.name)));
  const every = Math.max(1, Math.ceil(times.length / 20)), rows = [];
  for (let i = times.length - 1; i >= 0; i -= every) {
    rows.push(element("tr", {}, element("th", { scope: "row" }, clock(times[i])), ...values.map((column) => element("td", { class: "num" }, format(column[i])))));
  }
  $("values").lastElementChild.replaceChildren(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
}

function renderTiles() {
  const { learner, serving, health } = status, rates = health.silent ? {} : learner?.rates ?? {};
  figure("freshness_p50", duration(serving.freshness_p50_seconds));
  figure("freshness_p99", duration(serving.freshness_p99_seconds));
  figure("freshness_remark", serving.freshness_p50_seconds > 60 ? "old events are being trained on" : "events of the last minute");
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
  const behind = rates.rows_new > 0 ? `about ${duration(rows / rates.rows_new)} at this rate` : "and nothing is trained on";
  figure("behind", !learner || health.silent ? "" : stale ? `${count(lag)} as of ${age(asked)} ago` : lag === 0 ? "nothing waits" : behind);
  figure("lag_seconds", learner && !health.silent && !stale ? `oldest waits ${duration(learner.lag_seconds)}${learner.behind ? ", lag policy holds" : ""}` : "age not known");
  const topics = partitions.filter((partition) => !partition.history).length;
  figure("partitions", `${topics} ${topics === 1 ? "partition" : "partitions"}`);
  renderDevice(health.silent ? null : learner?.device);
  for (const host of document.querySelectorAll("[data-spark]")) {
    /* Series of one unit and meaning share a band; "|" begins another. */
    const bands = host.dataset.spark.split(" | ").map((names) => names.split(" ")), names = bands.flat();
    const { times, values, gap } = shown(names), { from, to } = bounds();
    const groups = bands.map((band) => ({
      kinds: band.map((name) => "ab"[names.indexOf(name)]),
      series: band.map((name) => values[names.indexOf(name)]),
    }));
    spark(host, groups, times, from, to, gap, names[0].endsWith("_seconds") ? duration : rate);
  }
}

function renderBackfill(backfill) {
  $("backfill").hidden = !backfill || backfill.done;
  if ($("backfill").hidden) return;
  const { rows_read: read, rows, files_read: filesRead, files, file, rate: speed, seconds_left: left } = backfill;
  const part = Math.min(0.999, read / Math.max(1, rows)), ends = known(left) && !status.health.silent;
  figure("backfill_read", percent(part));
  figure("backfill_left", ends ? `${age(left)} left` : "");
  figure("backfill_rows", `${count(read)} of ${count(rows)} rows, ${status.health.silent ? NONE : count(Math.round(speed))} rows/s`);
  figure("backfill_file", `file ${count(Math.min(filesRead + 1, files))} of ${count(files)}${file ? `: ${file}` : ""}`);
  $("backfill-bar").setAttribute("aria-valuenow", Math.floor(100 * part));
  $("backfill-bar").firstElementChild.style.width = `${100 * part}%`;
}

function renderDevice(health) {
  const devices = health?.devices ?? [], of = (name) => devices.map((device) => device[name]).filter(known);
  $("device").hidden = !devices.length;
  if (!devices.length) return;
  const hot = devices.map((device) => device.temperatures.gpu).filter(known);
  figure("device_temperature", hot.length ? `${rate(Math.max(...hot))} °C` : NONE);
  figure("device_name", devices.length > 1 ? `hottest of ${devices.length}` : "");
  const power = of("power"), used = of("memory_used"), total = of("memory_total");
  figure("device_use", [
    ...(used.length ? [`${bytes(sum(used))} of ${bytes(sum(total))}`] : []),
    ...(power.length ? [`${rate(sum(power))} W`] : []),
    ...(known(health.joules_per_event) ? [`${digits(health.joules_per_event)} J an event`] : []),
  ].join(", "));
  const problems = of("problems").flat(), warnings = of("warnings").flat(), state = document.querySelector('[data-figure="device_state"]');
  state.textContent = [...problems, ...warnings][0] ?? "no warnings";
  state.className = `remark ${problems.length ? "bad" : warnings.length ? "warn" : ""}`;
}

const VERDICTS = { pass: "✓", fail: "✕", inconclusive: "○" };
const STATUSES = { swapped: "replaced", "rolled back": "rejected" };

/* How far an inconclusive version was from a verdict, such as "17 of 1,000 holdout events". */
function compared(version) {
  const rows = /^(\d+) of (\d+) (?:held-out|holdout) events/.exec(version.reason ?? "");
  return rows ? `${count(Number(rows[1]))} of ${count(Number(rows[2]))} holdout events` : "";
}

/* The rollout commands that apply to a version. */
function actionsOf(version) {
  const { fate, removed } = version;
  if (removed) return [];
  if (fate === "pinned") return ["unpin"];
  return [...(fate === "served" ? [] : ["promote"]), "pin", ...(fate === "rolled back" ? [] : ["reject"])];
}

function versionRows(version) {
  const metric = judged() ? status.learner.measure : "old", format = judged() ? digits : score, sign = !judged() && regression() ? -1 : 1;
  const value = version.metrics[metric], constant = version.constant?.[metric], shown = STATUSES[version.fate] ?? version.fate;
  const beaten = known(constant) ? { "data-hint": `One answer for all these events has ${format(sign * constant)}.` } : {};
  const why = version.reason ? { "data-hint": version.reason } : {};
  const row = element("tr", { class: ["served", "pinned"].includes(version.fate) ? "served" : "", "data-key": version.number, "data-version": version.number },
    element("th", { scope: "row" }, String(version.number)),
    element("td", { class: "num" }, known(version.time) ? age(status.time - version.time) : NONE),
    element("td", { class: "num wide" }, count(version.step)),
    element("td", { class: "num" }, known(value) ? element("span", beaten, format(sign * value)) : NONE),
    element("td", { class: version.verdict ?? "" }, element("span", { class: "glyph", "aria-hidden": "true" }, VERDICTS[version.verdict] ?? ""),
      element("span", version.verdict ? why : {}, version.verdict ?? NONE), ...(version.verdict === "inconclusive" && compared(version) ? [":", element("span", { class: "compared" }, ` ${compared(version)}`)] : [])),
    element("td", { class: version.fate === "rolled back" ? "refused" : version.fate }, shown),
    element("td", { class: "actions" }, ...actionsOf(version).map((action) =>
      element("button", { type: "button", "data-key": action, "data-action": action, "aria-label": `${TITLES[action]} version ${version.number}` }, TITLES[action]))));
  const explains = ["refused", "rolled back"].includes(version.fate) && version.reason;
  return explains ? [row, element("tr", { class: "reason", "data-key": `${version.number} reason` }, element("td", { colspan: "7" }, version.reason))] : [row];
}

function renderVersions() {
  const { learner, versions } = status;
  const held = learner && known(learner.held_since) && !status.health.silent ? `, held back for ${age(learner.time - learner.held_since)}` : "";
  figure("versions", learner ? `${count(learner.versions_published)} published, ${count(learner.publish_skipped)} skipped${held}` : "");
  const name = judged() ? capital(words(learner.measure)) : regression() ? "Old error" : "Old";
  patchChildren($("score-name"), [element("span", { "data-help": judged() ? "judged" : "old" }, name)]);
  const rows = versions.flatMap(versionRows);
  if (!rows.length) rows.push(element("tr", { class: "reason" }, element("td", { colspan: "7" }, "None has been published yet.")));
  patchChildren($("versions").tBodies[0], rows);
}

/* The classes, the one of which the fewest are found first. */
const FEWEST = 10;
function renderClasses() {
  const classes = Object.entries(status.learner?.newest_classes ?? {});
  $("classes").hidden = !classes.length;
  classes.sort(([, one], [, other]) => (one.recall ?? 2) - (other.recall ?? 2));
  const worst = classes.find(([, each]) => each.support >= FEWEST);
  figure("worst", worst ? `worst: ${worst[0]}, ${count(worst[1].found)} of ${count(worst[1].support)} found` : "");
  $("classes-rows").replaceChildren(...classes.map(([name, each]) => element("tr", { "data-class": name },
    element("th", { scope: "row" }, name),
    element("td", { class: "num" }, count(each.support)),
    element("td", { class: "num" }, percent(each.precision)),
    element("td", { class: `num ${worst?.[0] === name ? "warn" : ""}` }, percent(each.recall)))));
}

/* The slices by whose values versions are compared, the worst one first. */
function renderSlices() {
  const slices = Object.entries(status.learner?.slices ?? {}), rank = (each) => each.accuracy ?? -each.error;
  $("slices").hidden = !slices.length;
  slices.sort(([, one], [, other]) => other.worse - one.worse || rank(one) - rank(other));
  const few = slices.filter(([, each]) => !each.compared).length;
  figure("slices-few", few ? `${count(few)} of ${count(slices.length)} not compared` : "");
  $("slices-rows").replaceChildren(...slices.map(([name, each]) => element("tr", { "data-slice": name },
    element("th", { scope: "row" }, name + (each.values && ` (${each.values})`)),
    element("td", { class: "num" }, count(each.rows)),
    element("td", { class: "num" }, score(each.accuracy ?? each.error)),
    element("td", { class: "num aside" }, score(each.constant)),
    element("td", { class: `num ${each.worse ? "bad" : ""}` }, known(each.drop) ? each.drop.toFixed(4) : NONE))));
}

const OUTCOMES = ["trained", "stored_only", "held_out", "skipped", "dead_lettered"];

function renderOutcomes() {
  const outcomes = { ...status.learner?.outcomes }, skipped = status.learner?.skipped ?? {};
  for (const [name, many] of Object.entries(status.learner?.labels?.ended ?? {})) outcomes[name] = (outcomes[name] ?? 0) + many;
  if (known(outcomes.waiting)) outcomes.waiting = status.learner.labels?.waiting ?? 0;
  delete outcomes.label;
  const names = [...OUTCOMES, ...Object.keys(outcomes).filter((name) => !OUTCOMES.includes(name))];
  const read = sum(Object.values(outcomes)), alarms = { skipped: "warn", dead_lettered: "bad" };
  figure("read", count(read));
  $("outcome-bar").replaceChildren(...names.filter((name) => outcomes[name]).map((name) => {
    const part = element("span", { class: `o-${name}` });
    part.style.flexGrow = outcomes[name];
    return part;
  }));
  $("outcomes").tBodies[0].replaceChildren(...names.map((name) => {
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
  const full = known(capacity) && (rows[last] ?? 0) >= capacity;
  figure("replay", full ? `full, capacity ${count(capacity)} events` : known(capacity) ? `${count(rows[last] ?? 0)} of ${count(capacity)} events` : "");
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
  const partitions = Object.entries(status.learner?.partitions ?? {}).filter(([, partition]) => !partition.history);
  const [name, most] = partitions.reduce((worst, one) => (one[1].pending > worst[1].pending ? one : worst), ["", { pending: 0 }]);
  figure("behindmost", name && partitions.length > 1 ? `${name} lags most, by ${count(most.pending)}` : "");
  const rows = partitions.map(([name, partition]) => element("tr", { "data-partition": name },
    element("th", { scope: "row" }, name),
    element("td", { class: "num" }, count(partition.pending)),
    element("td", { class: "num" }, count(partition.trained_through))));
  if (!rows.length) rows.push(element("tr", { class: "reason" }, element("td", { colspan: "3" }, "None is known yet.")));
  $("partitions").tBodies[0].replaceChildren(...rows);
}

function renderFleet() {
  const { servers = [], rollout, problem } = status.fleet ?? {};
  const counts = new Map();
  for (const { version, silent } of servers) if (!silent) counts.set(version, (counts.get(version) ?? 0) + 1);
  const newest = [...counts].sort(([one], [other]) => (other ?? 0) - (one ?? 0));
  figure("fleet", problem ?? newest.map(([version, many]) => `${count(many)} ${known(version) ? `with version ${version}` : "without a version"}`).join(", "));
  $("fleet").hidden = !servers.length && !problem;
  $("servers").tBodies[0].replaceChildren(...servers.map((server) => {
    const state = server.silent ? `silent for ${age(status.time - server.time)}` : server.problems ? `problems: ${count(server.problems)}` : server.ready ? "ready" : "not ready";
    return element("tr", { "data-server": server.id },
      element("th", { scope: "row" }, server.id + (rollout.canaries.includes(server.id) ? " (canary)" : "")),
      element("td", { class: "num" }, known(server.version) ? String(server.version) : NONE),
      element("td", { class: "num" }, server.silent ? NONE : rate(server.requests_per_second)),
      element("td", { class: "num wide" }, server.silent ? NONE : duration(server.request_p99_seconds)),
      element("td", { class: state === "ready" ? "" : "warn" }, state));
  }));
}

const pairs = (values, format) => Object.entries(values).map(([name, value]) => `${name.replaceAll("_", " ")} ${format(value)}`).join(", ");

const lacking = (lags) => {
  const late = Object.entries(lags).filter(([, lag]) => lag > 0);
  return late.length ? `lacks the newest ${pairs(Object.fromEntries(late), (lag) => `for ${duration(lag)}`)}` : "has everything";
};

/* Numbers that an extension reports, in the unit that a name ends with. */
const UNITS = { _seconds: duration, _bytes: bytes, _ratio: percent };
const numbers = (own) => Object.entries(own).map(([name, value]) => {
  const unit = Object.keys(UNITS).find((end) => name.endsWith(end)) ?? "";
  const format = (one) => (typeof one === "number" ? (UNITS[unit] ?? count)(one) : known(one) ? String(one) : NONE);
  const found = known(value) && typeof value === "object" ? pairs(value, format) || "none" : format(value);
  return `${name.slice(0, name.length - unit.length).replaceAll("_", " ")} ${found}`;
}).join("; ");

function renderFacts() {
  const { learner, serving, baseline } = status, ago = (time) => `${age(status.time - time)} ago`;
  const swaps = serving.swaps.swapped ?? 0, refused = serving.swaps.refused ?? 0, { shadow } = serving, device = learner?.device_sharing;
  const learned = learner?.backfill?.done ? [["History", `${count(learner.backfill.rows_read)} rows of ${count(learner.backfill.files)} ${learner.backfill.files === 1 ? "file" : "files"} were read`, "backfill"]] : [];
  const training = [
    ...learned,
    ["Strategy", learner?.strategy || NONE],
    ...(judged() ? [[regression() ? "Absolute error" : "Accuracy", pairs(regression() ? learner.error : learner.accuracy, score) || NONE], ...Object.values(learner.baselines).map((each) => [capital(each.rule), pairs(each.scores, score) || NONE])] : []),
    ["Loss, mean", learner && Object.keys(learner.loss).length ? pairs(learner.loss, digits) : NONE, "loss"],
    ["Forgetting, mean", known(learner?.forgetting) ? score(learner.forgetting) : NONE, "forgetting"],
    ["Drifts", !learner ? NONE : learner.drifts ? `${count(learner.drifts)}, last at step ${count(learner.drift_step)}` : "none", "drift"],
    ["Inputs", !learner?.inputs || !Object.keys(learner.inputs.psi).length ? NONE : learner.inputs.drifted.length ? `drifted: ${learner.inputs.drifted.join(", ")}` : "no drift", "inputs"],
    ["Replay ratio", learner ? `${digits(learner.replay_ratio)} old for each new event` : NONE, "ratio"],
    ["Device sharing", device ? `${device.policy}, training ${percent(device.training, true)} of the time, yielded ${count(device.times)} times` : "off", "sharing"],
    ["Gate", !learner?.verdict ? NONE : learner.held_reasons.length ? `fail: ${learner.held_reasons.join("; ")}` : learner.verdict, "verdict"],
  ];
  const search = learner?.search;
  if (search) training.push(["Search", `${pairs(search.values, digits)}${search.pinned ? ", pinned" : `, ${count(search.challengers.length)} challengers`}${Object.keys(search.outcomes).length ? `; ended: ${pairs(search.outcomes, count)}` : ""}`, "search"]);
  const labels = learner?.labels;
  if (labels) training.push(["Late labels", `${count(labels.waiting)} events wait${known(labels.lag_p99_seconds) ? `, labels take ${duration(labels.lag_p50_seconds)}, 99 % of them less than ${duration(labels.lag_p99_seconds)}` : ""}`, "labels"]);
  for (const [name, own] of Object.entries(learner?.extensions ?? {})) training.push([capital(words(name)), numbers(own)]);
  const undo = learner?.undo;
  const undone = undo && `number ${undo.number}, without ${count(undo.offsets)} offsets: ${undo.left ? `${percent(undo.fraction)} learned again, ${count(undo.left)} offsets left` : "learned again"}`;
  const state = [
    ...(undo ? [["Undo", undone, "undo"]] : []),
    ["Checkpoint", learner?.checkpoint ? `number ${learner.checkpoint}, ${known(learner.checkpoint_time) ? ago(learner.checkpoint_time) : "age not known"}` : "none yet", "checkpoint"],
    ...(learner?.storage ? [["Object store", lacking(learner.storage.lag_seconds), "storage"]] : []),
    ["Holdout set", learner ? `${count(learner.holdout_rows)} events` : NONE, "holdout"],
    ["Learner reported", learner ? ago(learner.time) : "never"],
    ...(baseline ? [["Baseline reported", ago(baseline.time)]] : []),
    ["Swaps", `${count(swaps)}, ${count(refused)} refused`],
    ...(shadow ? [["Shadow", shadow.failed ?? (shadow.rows ? `version ${shadow.version} disagrees by ${score(shadow.disagreement)}, over ${count(shadow.rows)} rows` : `version ${shadow.version}, nothing compared yet`)]] : []),
    ...[...(learner?.warnings ?? []), ...(serving?.warnings ?? [])].map((warning) => ["Warning", warning]),
  ];
  for (const [id, facts] of [["training", training], ["state", state]]) {
    patchChildren($(id), facts.flatMap(([name, fact, help]) => [element("dt", {}, help ? element("span", { "data-help": help }, name) : name), element("dd", {}, fact)]));
  }
}

/* explanations */
for (const [key, text] of Object.entries(HELP)) $("helps").append(element("span", { id: `help-${key}` }, text));
for (const term of document.querySelectorAll("[data-help]")) decorate(term, explained({ "data-help": term.dataset.help }), []);

let hinted = null;
const EXPLAINED = "[data-help], [data-hint]";
function positionHint() {
  const at = hinted.getBoundingClientRect(), box = $("hint").getBoundingClientRect();
  const above = at.bottom + box.height + 8 > innerHeight;
  $("hint").style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - box.width - 8))}px`;
  $("hint").style.top = `${above ? at.top - box.height - 6 : at.bottom + 6}px`;
}
/* Shows the explanation of what the pointer is on, else of what has the keyboard's focus. */
function hint(event) {
  const focused = document.activeElement?.matches(EXPLAINED) ? document.activeElement : null;
  hinted = event.target.closest?.(EXPLAINED) ?? focused;
  $("hint").hidden = !hinted;
  if (!hinted) return;
  $("hint").textContent = hinted.dataset.hint ?? HELP[hinted.dataset.help];
  positionHint();
}
function noHint() {
  hinted = null;
  $("hint").hidden = true;
}
document.addEventListener("pointerover", hint);
document.addEventListener("focusin", hint);
document.addEventListener("focusout", noHint);
document.addEventListener("scroll", () => { if (hinted) positionHint(); }, { capture: true, passive: true });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") noHint(); });

/* rollout commands */
const TITLES = { promote: "Promote", pin: "Pin", unpin: "Unpin", reject: "Reject" };
const CONFIRMED = {
  promote: (number) => `Version ${number} is served whatever its verdict, and versions newer than it that are there now are not. The next version that passes the gate replaces it.`,
  reject: (number) => `Version ${number} is never served again, and if it is served now, an older version replaces it. It comes back only when a person promotes it.`,
};
const pending = { action: "", number: 0 };

async function post(action, number) {
  const token = adminToken || stored(sessionStorage, "token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let reply;
  try {
    reply = await fetch(`api/versions/${number}:${ACTIONS[action]}`, { method: "POST", headers, signal: AbortSignal.timeout(30000) });
  } catch {
    return { status: 0, error: "The server did not answer; whether it did what was asked is not known. See the table." };
  }
  const body = await reply.json().catch(() => ({}));
  return { status: reply.status, error: reply.ok ? "" : sentenceOf(body.error ?? `the server answered ${reply.status}`) };
}
const sentenceOf = (text) => `${capital(text).replace(/[.]$/, "")}.`;

function openCommand(action, number, text, error = "", asksToken = false) {
  Object.assign(pending, { action, number });
  $("command-title").textContent = `${TITLES[action]} version ${number}?`;
  $("command-text").textContent = text;
  $("command-error").textContent = error;
  $("command-go").textContent = TITLES[action];
  $("command-go").disabled = false;
  $("command-token").hidden = !asksToken;
  if (!$("command").open) $("command").showModal();
  (asksToken ? $("admin-token") : $("command-cancel")).focus();
}

async function sendCommand(action, number) {
  const text = CONFIRMED[action]?.(number) ?? "";
  $("command-go").disabled = true;
  const { status: code, error } = await post(action, number);
  if (!error) {
    $("command").close();
    refresh();
    return;
  }
  const refused = code === 401 || code === 403, wrong = refused && adminToken;
  if (refused) adminToken = "";
  openCommand(action, number, text, refused && !wrong ? "" : error, refused);
}

$("versions").addEventListener("click", (event) => {
  const action = event.target.dataset.action, number = Number(event.target.closest("tr")?.dataset.version);
  if (!action) return;
  if (action in CONFIRMED) openCommand(action, number, CONFIRMED[action](number));
  else sendCommand(action, number);
});
$("command-form").addEventListener("submit", (event) => {
  event.preventDefault();
  adminToken = $("admin-token").value.trim() || adminToken;
  $("admin-token").value = "";
  sendCommand(pending.action, pending.number);
});
$("command-cancel").addEventListener("click", () => $("command").close());
$("command").addEventListener("close", () => { $("admin-token").value = ""; });

/* choices of the reader */
for (const [seconds, name] of RANGES) {
  const choice = element("input", { type: "radio", name: "range", value: seconds });
  choice.checked = seconds === range;
  choice.addEventListener("change", () => { range = seconds; if (status) refresh(); });
  $("ranges").append(element("label", {}, choice, name));
}

const THEMES = ["auto", "light", "dark"];
function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
  $("theme").setAttribute("aria-label", `Colour theme: ${theme}`);
}
let theme = THEMES.includes(stored(localStorage, "theme")) ? stored(localStorage, "theme") : "auto";
applyTheme(theme);
$("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  stored(localStorage, "theme", theme);
  applyTheme(theme);
});
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  stored(sessionStorage, "token", $("token").value.trim());
  $("token").value = "";
  refresh();
});
for (const id of ["values", "happened"]) $(id).addEventListener("toggle", () => status && renderAccuracy());
$("zoom").checked = stored(localStorage, "zoom") === "on";
$("zoom").addEventListener("change", () => {
  stored(localStorage, "zoom", $("zoom").checked ? "on" : "off");
  if (status && points) renderAccuracy();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden && document.body.dataset.state !== "locked") refresh(); });
setInterval(watch, 1000);
refresh();
