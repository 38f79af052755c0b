// What the server says about itself in words: alerts, bottleneck, GPUs, settings.

const STATE_TONES = { firing: "bad", pending: "unsure", unknown: "quiet", ok: "good" };
const SOURCES = ["given", "automatic", "reported", "default"];
const VALUE_FORMATS = {
  share: formatShare,
  seconds: formatSeconds,
  per_second: (value) => (isKnown(value) ? `${formatNumber(value)} /s` : UNKNOWN),
};

// ---- alerts

function showAlerts({ states }) {
  const active = states.filter(({ state }) => state === "firing" || state === "pending");
  const numFiring = active.filter(({ state }) => state === "firing").length;
  const numUnknown = states.filter(({ state }) => state === "unknown").length;
  const parts = [numFiring ? `${numFiring} firing` : "None firing"];
  if (active.length > numFiring) parts.push(`${active.length - numFiring} pending`);
  if (numUnknown) parts.push(`${numUnknown} unknown`);
  const summary = byId("alerts-summary");
  setText(summary, states.length ? parts.join(", ") : "Not evaluated yet");
  summary.className = `headline ${numFiring ? "bad" : ""}`;
  byId("active-alerts").replaceChildren(...active.map(activeAlert));
  byId("all-alerts").replaceChildren(...states.map(alertRow));
}

function alertValue({ value, unit }) {
  return (VALUE_FORMATS[unit] ?? formatNumber)(value);
}

function activeAlert(alert) {
  const head = element("p", {}, element("b", {}, alert.name), ` ${alert.state} (${alert.severity}), `);
  head.append(`${alert.measure}: ${alertValue(alert)}, threshold: ${alert.threshold_text}`);
  const kind = alert.state === "firing" ? alert.severity : "pending";
  return element("div", { class: `item ${kind}` }, head, element("p", {}, `${alert.meaning} ${alert.advice}`));
}

function alertRow(alert) {
  const state = element("td", { class: STATE_TONES[alert.state] ?? "" }, alert.state);
  const value = element("td", { class: "value" }, alertValue(alert));
  if (alert.note) state.title = value.title = alert.note;
  const name = element("td", { title: alert.meaning }, alert.name);
  return element("tr", {}, name, state, value, element("td", { class: "value" }, alert.threshold_text));
}

// ---- bottleneck

function showBottleneck({ headline, findings }) {
  setText(byId("bottleneck"), headline);
  byId("findings").replaceChildren(...findings.map(findingItem));
}

function findingItem(finding) {
  const numbers = Object.entries(finding.numbers).map(([name, value]) => `${name} ${value}`);
  const item = element("div", { class: `item ${finding.severity}` });
  item.append(element("p", {}, element("b", {}, capitalized(finding.title)), ...(numbers.length ? [": "] : [])));
  item.firstChild.append(numbers.join(", "));
  if (finding.why) item.append(element("p", { class: "quiet" }, finding.why));
  if (finding.advice.length) item.append(element("ul", {}, ...finding.advice.map(adviceItem)));
  return item;
}

function adviceItem({ text, gain, certainty }) {
  const words = [isKnown(gain) ? `up to ${formatShare(gain)} more throughput` : null, certainty].filter(Boolean);
  return element("li", {}, `${capitalized(text)} `, element("span", { class: "quiet" }, `(${words.join(", ")})`));
}

function capitalized(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

// ---- GPUs

function showGpus({ gpus, missing }) {
  const shown = gpus.length ? gpus.map(gpuFigures) : [element("p", {}, `No GPU figures: ${missing || "none found"}.`)];
  byId("gpus").replaceChildren(...shown);
}

function gpuFigures(gpu) {
  const rest = [
    isKnown(gpu.power_w) ? `${withDigits(gpu.power_w, 0)} W` : null,
    isKnown(gpu.temperature_c) ? `${withDigits(gpu.temperature_c, 0)} °C` : null,
    isKnown(gpu.sm_clock_mhz) ? `${withDigits(gpu.sm_clock_mhz, 0)} MHz` : null,
  ].filter(Boolean);
  const memory = `${formatGibibytes(gpu.memory_bytes)} of ${formatGibibytes(gpu.memory_total_bytes)}`;
  const list = element("dl", {});
  addMeter(list, "utilisation", gpu.utilization, formatShare(gpu.utilization));
  addMeter(list, "memory", isKnown(gpu.memory_bytes) ? gpu.memory_bytes / gpu.memory_total_bytes : null, memory);
  list.append(element("dt", {}, "power, heat, clock"));
  list.append(element("dd", { class: "wide" }, rest.join(", ") || "not reported"));
  return element("div", { class: "gpu" }, element("h3", {}, `${gpu.index}: ${gpu.name}`), list);
}

function addMeter(list, label, share, text) {
  const meter = element("meter", { min: "0", max: "1", "aria-label": `GPU ${label}` });
  if (isKnown(share)) meter.value = share;
  const value = element("dd", {}, text);
  if (!isKnown(share)) value.title = "the GPU does not report it";
  list.append(element("dt", {}, label), element("dd", {}, meter), value);
}

// ---- batches

function showBatches({ data }) {
  byId("batches-panel").hidden = false;
  byId("no-batches").hidden = data.length > 0;
  byId("batches").replaceChildren(...data.map(batchRow));
}

function batchRow({ id, status, created_at: createdAt, request_counts: counts }) {
  const cells = [status, ...[counts.completed, counts.failed, counts.total].map(formatNumber), formatClock(createdAt)];
  return element("tr", {}, element("td", { class: "name" }, id), ...cells.map((text) => element("td", {}, text)));
}

// ---- settings

function settingText(value) {
  if (value === null) return "none";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// Those that somebody or something chose come first.
function showSettings({ settings }) {
  const order = ([, { source }]) => SOURCES.indexOf(source);
  const rows = Object.entries(settings).sort((one, other) => order(one) - order(other) || (one[0] < other[0] ? -1 : 1));
  byId("settings").replaceChildren(
    ...rows.map(([name, { value, source, reason }]) =>
      element(
        "tr",
        {},
        element("td", { class: "name" }, name),
        element("td", { class: "value" }, settingText(value)),
        element("td", {}, source),
        element("td", {}, reason),
      ),
    ),
  );
  searchSettings();
}

// Every word must be somewhere in the row. A name matches with dashes too, as on the command line.
function searchSettings() {
  const words = byId("settings-search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...byId("settings").rows];
  for (const row of rows) {
    const text = [...row.cells].map((cell) => cell.textContent.toLowerCase()).join(" ");
    row.hidden = !words.every((word) => text.includes(word) || text.includes(asField(word)));
  }
  setText(byId("settings-count"), `${rows.filter((row) => !row.hidden).length} of ${rows.length}`);
}

function asField(flag) {
  return flag.replace(/^--/, "").replaceAll("-", "_");
}
