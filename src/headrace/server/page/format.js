// Numbers, times and shares as text. What is unknown is a dash, never 0.

const UNKNOWN = "–";
const KIBI = 1024;

function isKnown(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function withDigits(value, numDigits) {
  return value.toLocaleString("en-US", { maximumFractionDigits: numDigits });
}

function formatNumber(value) {
  if (!isKnown(value)) return UNKNOWN;
  const size = Math.abs(value);
  return withDigits(value, size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

function formatShare(value) {
  if (!isKnown(value)) return UNKNOWN;
  return `${withDigits(100 * value, value > 0 && value < 0.1 ? 1 : 0)} %`;
}

function formatSeconds(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value >= 120) return formatAge(value);
  if (value >= 1 || value === 0) return `${withDigits(value, value >= 10 ? 1 : 2)} s`;
  const milliseconds = 1000 * value;
  return `${withDigits(milliseconds, milliseconds >= 100 ? 0 : milliseconds >= 10 ? 1 : 2)} ms`;
}

// "3 min", "2 h 5 min", "4 d 3 h"
function formatAge(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.max(0, Math.floor(seconds))} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

function formatGibibytes(value) {
  return isKnown(value) ? `${withDigits(value / KIBI ** 3, 1)} GiB` : UNKNOWN;
}

// A time in seconds since the epoch, on the clock of the browser's time zone.
function formatClock(seconds, withSeconds = true) {
  const parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23", ...(withSeconds && { second: "2-digit" }) };
  return new Date(1000 * seconds).toLocaleTimeString("en-GB", parts);
}

// Elements are made of text only: nothing that the server sends is ever read as HTML.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function byId(id) {
  return document.getElementById(id);
}

// Sets a text only if it changed, so that screen readers and selections are left alone.
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
