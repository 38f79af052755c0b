"""Vercel's AI SDK on node: text, streams, tools in several steps and objects, of `openai()` and `anthropic()`."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

from tests.clients.catalogue import CLIENTS
from tests.clients.checks import check, main, shell

PACKAGES = next(client.npm for client in CLIENTS if client.name == "ai-sdk")
HOME = Path(__file__).parents[2] / "build/clients/ai-sdk"

CLIENT = r"""
# docs: client
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.URL, apiKey: process.env.KEY }); // the Responses API
const model = openai(process.env.MODEL);
# docs: end
import { Output, streamText } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
const claude = createAnthropic({ baseURL: process.env.URL, apiKey: process.env.KEY })(process.env.MODEL);
"""
TOOLS = r"""
# docs: tools
const weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
  execute: async ({ city }) => `sunny in ${city}`,
});
const result = await generateText({
  model,
  prompt: "How is the weather in Rome?",
  maxOutputTokens: 200,
  tools: { weather },
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
});
console.log(result.text, result.steps[0].toolResults);
# docs: end
"""


def run(code: str) -> dict:
    """Runs a module that ends with a line of JSON."""
    with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=HOME, delete=False) as script:
        script.write(re.sub(r"^# docs:.*$", "", CLIENT + code, flags=re.MULTILINE))
    try:
        return json.loads(shell(f"node {script.name}").splitlines()[-1])
    finally:
        os.unlink(script.name)


@check
def text() -> None:
    found = run(
        """
        const result = await generateText({ model, prompt: "Name a colour.", maxOutputTokens: 32 });
        console.log(JSON.stringify({ text: result.text, usage: result.usage, reason: result.finishReason }));
        """
    )
    assert found["text"] and 0 < found["usage"]["outputTokens"] <= 32 and found["reason"] in ("stop", "length")


@check
def stream() -> None:
    found = run(
        """
        const result = streamText({ model, prompt: "Name a colour.", maxOutputTokens: 32 });
        let parts = 0;
        for await (const part of result.textStream) parts += 1;
        console.log(JSON.stringify({ parts, text: await result.text, usage: await result.usage }));
        """
    )
    assert found["parts"] > 1 and found["text"] and found["usage"]["inputTokens"] > 0


@check
def tools_in_two_steps() -> None:
    """The second step refers to the items of the first by their ids, which the server has stored."""
    found = run(TOOLS + "console.log(JSON.stringify({ steps: result.steps.length, text: result.text }));")
    assert found["steps"] == 2 and found["text"]


@check
def tools_in_two_steps_without_stored_state() -> None:
    code = TOOLS.replace("  model,\n", "  model,\n  providerOptions: { openai: { store: false } },\n")
    found = run(code + "console.log(JSON.stringify({ steps: result.steps.length, text: result.text }));")
    assert found["steps"] == 2 and found["text"]


@check
def tools_in_a_stream() -> None:
    code = TOOLS.partition("const result")[0]
    found = run(
        code
        + """
        const result = streamText({ model, prompt: "Weather in Oslo?", tools: { weather }, toolChoice: "required" });
        const kinds = new Set();
        for await (const part of result.fullStream) kinds.add(part.type);
        console.log(JSON.stringify({ kinds: [...kinds], results: await result.toolResults }));
        """
    )
    assert {"tool-input-delta", "tool-call", "tool-result"} <= set(found["kinds"])
    assert found["results"][0]["output"].startswith("sunny in ")


@check
def objects() -> None:
    found = run(
        """
        const schema = z.object({ kind: z.enum(["warm", "cold"]), degrees: z.number().int().min(0).max(99) });
        const result = await generateText({ model, prompt: "How warm is it?", output: Output.object({ schema }) });
        console.log(JSON.stringify(result.output));
        """
    )
    assert found["kind"] in ("warm", "cold") and 0 <= found["degrees"] <= 99


@check
def anthropic_tools_in_two_steps() -> None:
    """`anthropic()` of the same SDK, over /v1/messages."""
    code = TOOLS.replace("  model,\n", "  model: claude,\n")
    found = run(code + "console.log(JSON.stringify({ steps: result.steps.length, text: result.text }));")
    assert found["steps"] == 2 and found["text"]


@check
def errors() -> None:
    found = run(
        """
        const wrong = createOpenAI({ baseURL: process.env.URL, apiKey: "wrong" })(process.env.MODEL);
        let status = 0;
        try { await generateText({ model: wrong, prompt: "Hello!", maxRetries: 0 }); }
        catch (error) { status = error.statusCode; }
        console.log(JSON.stringify({ status }));
        """
    )
    assert found["status"] == 401


if __name__ == "__main__":
    HOME.mkdir(parents=True, exist_ok=True)
    shell(f"cd {HOME} && npm install --silent --no-fund --no-audit {' '.join(PACKAGES)}")
    main("ai", installed=PACKAGES[0].partition("@")[2])
