// A chart of the last hour: lines over time, from 0, with a cursor that all charts share.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 112;
const MARGIN = { left: 48, right: 8, top: 8, bottom: 18 };
const MIN_SPAN_S = 300; // a server that has just started: the axis is not stretched further than this
const TIME_STEPS_S = [60, 120, 300, 600, 900, 1200];
const MAX_TIME_LABELS = 4;

function svgElement(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// The smallest short number, whose half is short too, that is not below the value.
function roundedUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const factor = [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((each) => each * power >= value * (1 - 1e-9));
  return factor * power;
}

class Chart {
  // `lines`: [{ key, label }]. `format` writes a value of the axis. `top`: the end of the axis if it is fixed.
  // `onCursor` is called with the index of a sample, or null.
  constructor({ title, lines, format, top = null, onCursor }) {
    this.title = title;
    this.lines = lines;
    this.format = format;
    this.top = top;
    this.svg = svgElement("svg", { role: "img", tabindex: "0", height: HEIGHT });
    this.data = { time: [] };
    this.cursor = null;
    this.svg.addEventListener("pointermove", (event) => onCursor(this.indexAt(event)));
    this.svg.addEventListener("pointerleave", () => onCursor(null));
    this.svg.addEventListener("blur", () => onCursor(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event, onCursor));
  }

  // `data`: { time: [...], key: [...] }, all of the same length.
  draw(data, cursor) {
    this.data = data;
    this.cursor = cursor;
    const width = Math.max(120, this.svg.clientWidth);
    const { time } = data;
    const end = time.length ? time[time.length - 1] : 0;
    const start = Math.min(time[0] ?? 0, end - MIN_SPAN_S);
    const values = this.lines.flatMap(({ key }) => data[key].filter(isKnown));
    const top = this.top ?? (Math.max(...values, 0) > 0 ? roundedUp(Math.max(...values)) : 1);
    this.x = (at) => MARGIN.left + ((at - start) / (end - start)) * (width - MARGIN.left - MARGIN.right);
    this.y = (value) => HEIGHT - MARGIN.bottom - (value / top) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const parts = [...this.grid(width, top, values.length > 0), ...this.timeLabels(start, end, width)];
    if (values.length) parts.push(...this.lines.flatMap((line, place) => this.linePath(line, place)));
    else parts.push(this.emptyLabel(width));
    if (cursor !== null) parts.push(...this.cursorMarks(cursor));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.summary());
    this.svg.replaceChildren(...parts);
  }

  grid(width, top, isLabelled) {
    return [0, top / 2, top].flatMap((value) => {
      const y = this.y(value);
      const line = svgElement("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y, y2: y });
      if (!isLabelled) return [line];
      const label = value === 0 ? "0" : this.format(value);
      return [line, svgElement("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, label)];
    });
  }

  timeLabels(start, end, width) {
    const maxLabels = Math.min(MAX_TIME_LABELS, Math.floor(width / 64));
    const step = TIME_STEPS_S.find((each) => (end - start) / each <= maxLabels) ?? TIME_STEPS_S.at(-1);
    const labels = [];
    for (let at = Math.ceil(start / step) * step; at <= end; at += step) {
      const x = this.x(at);
      if (x < MARGIN.left + 12 || x > width - 16) continue;
      labels.push(svgElement("text", { x, y: HEIGHT - 4, "text-anchor": "middle" }, formatClock(at, false)));
    }
    return labels;
  }

  emptyLabel(width) {
    const x = (MARGIN.left + width - MARGIN.right) / 2;
    return svgElement("text", { x, y: HEIGHT / 2 - 2, "text-anchor": "middle" }, "nothing to show yet");
  }

  // A line with gaps where there is no value. A value without neighbours is a dot.
  linePath({ key }, place) {
    const parts = [];
    for (const run of this.runs(key)) {
      const points = run.map(([at, value]) => `${this.x(at).toFixed(1)},${this.y(value).toFixed(1)}`);
      if (points.length === 1) {
        const [at, value] = run[0];
        parts.push(svgElement("circle", { class: `dot line-${place}`, cx: this.x(at), cy: this.y(value), r: 2.5 }));
        continue;
      }
      if (place === 0) {
        const [first, last] = [this.x(run[0][0]).toFixed(1), this.x(run.at(-1)[0]).toFixed(1)];
        const d = `M${first},${this.y(0)}L${points.join("L")}L${last},${this.y(0)}Z`;
        parts.push(svgElement("path", { class: `area line-${place}`, d }));
      }
      parts.push(svgElement("path", { class: `line line-${place}`, d: `M${points.join("L")}` }));
    }
    return parts;
  }

  runs(key) {
    const runs = [[]];
    this.data.time.forEach((at, index) => {
      const value = this.data[key][index];
      if (isKnown(value)) runs.at(-1).push([at, value]);
      else if (runs.at(-1).length) runs.push([]);
    });
    return runs.filter((run) => run.length);
  }

  cursorMarks(index) {
    const x = this.x(this.data.time[index]);
    const line = svgElement("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    const dots = this.lines.flatMap(({ key }, place) => {
      const value = this.data[key][index];
      if (!isKnown(value)) return [];
      return [svgElement("circle", { class: `dot line-${place}`, cx: x, cy: this.y(value), r: 3.5 })];
    });
    return [line, ...dots];
  }

  indexAt(event) {
    const { time } = this.data;
    if (!time.length) return null;
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    let nearest = 0;
    time.forEach((at, index) => {
      if (Math.abs(this.x(at) - x) < Math.abs(this.x(time[nearest]) - x)) nearest = index;
    });
    return nearest;
  }

  onKey(event, onCursor) {
    const last = this.data.time.length - 1;
    const at = this.cursor ?? last;
    const moves = { ArrowLeft: Math.max(0, at - 1), ArrowRight: Math.min(last, at + 1), Home: 0, End: last };
    if (event.key === "Escape") onCursor(null);
    else if (last >= 0 && event.key in moves) onCursor(moves[event.key]);
    else return;
    event.preventDefault();
  }

  summary() {
    const words = this.lines.map(({ key, label }) => {
      const known = this.data[key].filter(isKnown);
      if (!known.length) return `${label}: no values`;
      return `${label}: highest ${this.format(Math.max(...known))}, latest ${this.format(known.at(-1))}`;
    });
    return `${this.title}, last hour. ${words.join(". ")}.`;
  }
}
