// The box to try a prompt: streams the answer, can be stopped, and says how fast it was.

class PromptBox {
  constructor({ onNeedsKey }) {
    this.answer = byId("answer");
    this.stats = byId("prompt-stats");
    this.onNeedsKey = onNeedsKey;
    this.abort = null; // of the running request
    byId("prompt-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("prompt-form").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
  }

  async send() {
    if (this.abort) return;
    this.abort = new AbortController();
    this.setRunning(true);
    this.answer.textContent = "";
    this.run = { startedAt: performance.now(), firstAt: null, lastAt: null, usage: null, end: "" };
    this.showStats("waiting for the first token");
    const { path, body } = this.request();
    try {
      await postStream(path, body, { signal: this.abort.signal, take: (chunk) => this.take(chunk) });
      this.showStats(this.run.end || "the stream ended early");
    } catch (error) {
      this.fail(error);
    } finally {
      this.abort = null;
      this.setRunning(false);
    }
  }

  request() {
    const text = byId("prompt").value;
    const body = {
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    if (byId("mode").value === "completion") return { path: "v1/completions", body: { ...body, prompt: text } };
    return { path: "v1/chat/completions", body: { ...body, messages: [{ role: "user", content: text }] } };
  }

  take(chunk) {
    if (chunk.error) throw new ServerError(0, chunk.error.message);
    const { run } = this;
    run.usage = chunk.usage ?? run.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const text = choice.delta?.content ?? choice.text ?? "";
    if (run.usage?.completion_tokens > 0 && run.firstAt === null) {
      run.firstAt = performance.now();
      run.numFirst = run.usage.completion_tokens;
    }
    if (run.usage?.completion_tokens > 0) run.lastAt = performance.now();
    if (text) this.append(text);
    if (choice.finish_reason) run.end = `finish reason ${choice.finish_reason}`;
    this.showStats(run.end || "streaming");
  }

  append(text) {
    const isAtEnd = this.answer.scrollHeight - this.answer.scrollTop - this.answer.clientHeight < 4;
    this.answer.append(text);
    if (isAtEnd) this.answer.scrollTop = this.answer.scrollHeight;
  }

  fail(error) {
    if (error.name === "AbortError") return this.showStats("stopped");
    this.showStats("");
    this.answer.textContent = error instanceof ServerError ? error.message : "the server is not reachable";
    if (error.needsKey) this.onNeedsKey();
  }

  // Tokens per second after the first token, as the latency of the first one is shown beside it.
  showStats(state) {
    const { startedAt, firstAt, lastAt, usage, numFirst } = this.run;
    const parts = [state];
    if (firstAt !== null) {
      const seconds = (lastAt - firstAt) / 1000;
      parts.push(`TTFT ${formatSeconds((firstAt - startedAt) / 1000)}`);
      if (seconds > 0 && usage.completion_tokens > numFirst) {
        parts.push(`${formatNumber((usage.completion_tokens - numFirst) / seconds)} tokens/s`);
      }
      parts.push(`${usage.completion_tokens} tokens`, `prompt ${usage.prompt_tokens} tokens`);
    }
    setText(this.stats, parts.filter(Boolean).join(" · "));
  }

  setRunning(isRunning) {
    byId("send").disabled = isRunning;
    byId("stop").disabled = !isRunning;
    this.answer.setAttribute("aria-busy", String(isRunning));
  }
}
