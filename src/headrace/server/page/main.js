// The loop: asks for new figures every two seconds while the page is visible, and says so when there are none.

const POLL_MS = 2000;
const NUM_BATCHES = 10; // that are shown

const STATES = {
  ready: ["ready", "good"],
  starting: ["starting", "unsure"],
  draining: ["draining", "unsure"],
  engine_dead: ["engine down", "bad"],
};

const page = {
  board: new Board(byId("cards")),
  server: null, // the id of the server process whose figures are shown
  numSamples: null, // when alerts and bottleneck were asked for
  unreachableSince: null,
  timer: null,
  isPolling: false,
};

async function poll() {
  if (page.isPolling) return;
  clearTimeout(page.timer);
  page.isPolling = true;
  let isNext = true;
  try {
    take(await newData());
    await askSeldom();
    reached();
  } catch (error) {
    if (error.needsKey) {
      askForKey();
      isNext = false;
    } else {
      lost(error);
    }
  }
  page.isPolling = false;
  if (isNext && !document.hidden) page.timer = setTimeout(poll, POLL_MS);
}

async function newData() {
  const data = await getJson(`dashboard/data?since=${page.board.next}`);
  if (page.server === null || page.server === data.server) return data;
  // Another process answers now: its samples are counted from 0.
  page.board.reset();
  page.server = null;
  return getJson("dashboard/data?since=0");
}

function take(data) {
  showHeader(data);
  byId("board").hidden = false;
  byId("key-form").hidden = true;
  byId("forget-key").hidden = !keyStore.get();
  page.board.take(data);
  showGpus(data.gpu);
}

// What changes with a sample at most, or with the server.
async function askSeldom() {
  const isNewServer = page.server !== page.current.server;
  if (isNewServer || page.numSamples !== page.board.next) {
    const [alerts, bottleneck] = await Promise.all([getJson("alerts"), getJson("bottleneck")]);
    showAlerts(alerts);
    showBottleneck(bottleneck);
    if (page.current.has_batches) showBatches(await getJson(`v1/batches?limit=${NUM_BATCHES}`));
    page.numSamples = page.board.next;
  }
  if (isNewServer) {
    showSettings(await getJson("server_info"));
    page.server = page.current.server;
  }
}

function showHeader(data) {
  page.current = data;
  document.title = `Headrace · ${data.model}`;
  setText(byId("model"), data.model);
  const parts = [`version ${data.version}`, `running for ${formatAge(data.time - data.started_at)}`];
  setText(byId("about"), parts.join(" · "));
  const [text, tone] = STATES[data.state] ?? [data.state, "unsure"];
  showState(text, tone);
}

function showState(text, tone) {
  setText(byId("state"), text);
  byId("state").className = `badge ${tone}`;
}

function showNotice(text) {
  setText(byId("notice"), text);
  byId("notice").hidden = !text;
}

function reached() {
  page.unreachableSince = null;
  showNotice("");
  setStale(false);
}

function lost(error) {
  page.unreachableSince ??= Date.now() / 1000;
  const since = formatClock(page.unreachableSince);
  const answered = error instanceof ServerError ? ` The last answer: ${error.message}.` : "";
  showNotice(`Not reachable since ${since}. Trying again every ${POLL_MS / 1000} s.${answered}`);
  showState("not reachable", "bad");
  setStale(true);
}

function setStale(isStale) {
  document.body.classList.toggle("is-stale", isStale);
  page.board.setStale(isStale);
}

// ---- the key

function askForKey() {
  const hadKey = Boolean(keyStore.get());
  keyStore.forget();
  reached();
  byId("board").hidden = true;
  byId("forget-key").hidden = true;
  byId("key-error").hidden = !hadKey;
  setText(byId("key-error"), hadKey ? "The server does not accept this key." : "");
  byId("key-form").hidden = false;
  showState("key needed", "unsure");
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keyStore.set(byId("key").value.trim());
  byId("key").value = "";
  poll();
});

byId("forget-key").addEventListener("click", () => {
  keyStore.forget();
  location.reload();
});

// ---- start

byId("settings-search").addEventListener("input", searchSettings);
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(page.timer);
  else poll();
});
new PromptBox({ onNeedsKey: askForKey });
poll();
