// The cards of figures: the values of this moment, or of the cursor's time, above a chart of the last hour.

const NO_SAMPLES = "there are no two samples yet";
const IDLE = "no request in the last minute";

// `key`: a column of /dashboard/data. `why`: why it may have no value.
const CARDS = [
  {
    title: "Throughput, tokens/s",
    format: formatNumber,
    lines: [
      { key: "generation_tokens_per_s", label: "output", why: NO_SAMPLES },
      { key: "prompt_tokens_per_s", label: "prompt", why: NO_SAMPLES },
    ],
  },
  {
    title: "Requests",
    format: formatNumber,
    lines: [
      { key: "num_running", label: "running", why: "the engine is down" },
      { key: "num_waiting", label: "waiting", why: "the engine is down" },
    ],
    notes: (live) => [
      `oldest wait ${formatSeconds(live.oldest_wait_s)}`,
      isKnown(live.queue_use) ? `queue ${formatShare(live.queue_use)} full` : "queue without limit",
    ],
  },
  {
    title: "Requests/s",
    format: formatNumber,
    lines: [
      { key: "finished_per_s", label: "done", why: NO_SAMPLES },
      { key: "refused_per_s", label: "refused", why: NO_SAMPLES },
      { key: "errors_per_s", label: "failed", why: NO_SAMPLES },
    ],
  },
  {
    title: "KV cache",
    format: formatShare,
    top: 1,
    lines: [{ key: "kv_use", label: "in use", why: "the engine is down" }],
    notes: (live) => [`preemptions ${formatNumber(live.preemptions_per_s)} /s`],
  },
  ...[
    ["ttft", "Time to first token"],
    ["itl", "Inter-token latency"],
    ["e2e", "End-to-end latency"],
  ].map(([name, title]) => ({
    title,
    format: formatSeconds,
    lines: [
      { key: `${name}_p50_s`, label: "p50", why: IDLE },
      { key: `${name}_p95_s`, label: "p95", why: IDLE },
    ],
  })),
  {
    title: "Prefix cache",
    format: formatShare,
    top: 1,
    lines: [{ key: "prefix_hit_share", label: "of prompt tokens hit", why: "no prompt in the last minute" }],
  },
];

class Card {
  constructor({ title, format, lines, top, notes }, onCursor) {
    this.format = format;
    this.lines = lines;
    this.notes = notes;
    this.chart = new Chart({ title, lines, format, top, onCursor });
    this.values = lines.map(({ key }) => element("dd", { "data-figure": key }, UNKNOWN));
    const pairs = lines.map(({ label }, place) =>
      element("div", { class: `line-${place}` }, element("dt", {}, label), this.values[place]),
    );
    this.time = element("time", {}, "now");
    this.foot = notes ? element("p", { class: "notes" }) : null;
    const head = element("div", { class: "card-head" }, element("h3", {}, title), this.time);
    this.element = element("article", { class: "card" }, head, element("dl", { class: "values" }, ...pairs));
    this.element.append(this.chart.svg);
    if (this.foot) this.element.append(this.foot);
  }

  // `nowWord` says what the values are where there is no cursor.
  show(data, live, cursor, nowWord) {
    this.lines.forEach(({ key, why }, place) => {
      const value = cursor === null ? live[key] : data[key][cursor];
      setText(this.values[place], this.format(value));
      this.values[place].title = isKnown(value) ? "" : why;
    });
    setText(this.time, cursor === null ? nowWord : `at ${formatClock(data.time[cursor])}`);
    if (this.foot) setText(this.foot, cursor === null ? this.notes(live).join(" · ") : "");
    this.chart.draw(data, cursor);
  }
}

// Owns the samples of the last hour and the cursor.
class Board {
  constructor(container) {
    this.cursor = null;
    this.isStale = false; // the server does not answer
    this.cards = CARDS.map((card) => new Card(card, (index) => this.moveCursor(index)));
    container.replaceChildren(...this.cards.map((card) => card.element));
    new ResizeObserver(() => this.draw()).observe(container);
    this.reset();
  }

  reset() {
    this.history = null;
    this.data = null;
    this.next = 0;
  }

  // `history` has the samples that are new since `this.next`; `time` is the server's clock now.
  take({ history, live, time }) {
    const keys = Object.keys(history.columns);
    this.history ??= Object.fromEntries(keys.map((key) => [key, []]));
    for (const key of keys) this.history[key].push(...history.columns[key]);
    while (this.history.time.length && this.history.time[0] < time - history.span_s) {
      for (const key of keys) this.history[key].shift();
    }
    this.next = history.next;
    this.live = live;
    // The figures of this moment are the last point, until the next sample.
    this.data = Object.fromEntries(keys.map((key) => [key, [...this.history[key], live[key] ?? null]]));
    this.data.time[this.data.time.length - 1] = time;
    if (this.cursor !== null) this.cursor = Math.min(this.cursor, this.data.time.length - 1);
    this.draw();
  }

  setStale(isStale) {
    if (isStale === this.isStale) return;
    this.isStale = isStale;
    this.draw();
  }

  moveCursor(index) {
    if (index === this.cursor) return;
    this.cursor = index;
    this.draw();
  }

  draw() {
    if (this.data === null) return;
    for (const card of this.cards) card.show(this.data, this.live, this.cursor, this.isStale ? "last known" : "now");
  }
}
