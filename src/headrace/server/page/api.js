// Requests to the server. The key is in the Authorization header, never in an address.

const KEY_NAME = "headrace-api-key"; // in sessionStorage: one tab, until it is closed
const TIMEOUT_MS = 10_000;

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
    this.needsKey = status === 401;
  }
}

const keyStore = {
  get: () => sessionStorage.getItem(KEY_NAME) ?? "",
  set: (key) => sessionStorage.setItem(KEY_NAME, key),
  forget: () => sessionStorage.removeItem(KEY_NAME),
};

function headersWithKey(headers = {}) {
  const key = keyStore.get();
  return key ? { ...headers, Authorization: `Bearer ${key}` } : headers;
}

async function checked(response) {
  if (response.ok) return response;
  let message = `the server answered with status ${response.status}`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {
    // not an error of this server: a proxy's page
  }
  throw new ServerError(response.status, message);
}

// Addresses are relative: the server may be below a path of a proxy.
async function getJson(path) {
  const signal = AbortSignal.timeout(TIMEOUT_MS);
  const response = await fetch(path, { headers: headersWithKey(), signal, cache: "no-store" });
  return (await checked(response)).json();
}

// Calls `take` with each event of a stream of server-sent events.
async function postStream(path, body, { signal, take }) {
  const response = await fetch(path, {
    method: "POST",
    headers: headersWithKey({ "Content-Type": "application/json" }),
    body: JSON.stringify(body),
    signal,
  });
  const reader = (await checked(response)).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
      const data = event.slice("data: ".length);
      if (data !== "[DONE]") take(JSON.parse(data));
    }
  }
}
