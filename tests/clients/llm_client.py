"""The command `llm`: a model in extra-openai-models.yaml, prompts, streams, schemas, usage, and its errors."""

from __future__ import annotations

import json
import os
import tempfile

from tests.clients.checks import check, main, raises, shell

SETUP = r"""
# docs: setup
cat > "$(dirname "$(llm logs path)")/extra-openai-models.yaml" <<END
- model_id: headrace
  model_name: $MODEL
  api_base: $URL
  api_key_name: headrace
  supports_schema: true
END
llm keys set headrace --value "$KEY"
# docs: end
"""
PROMPT = r"""
# docs: prompt
llm -m headrace -o max_tokens 16 --usage 'Name a colour.'
# docs: end
"""
SCHEMA = r"""
# docs: schema
llm -m headrace --no-stream 'How warm is it?' --schema '{
  "type": "object",
  "properties": {"kind": {"enum": ["warm", "cold"]}, "degrees": {"type": "integer", "minimum": 0, "maximum": 99}},
  "required": ["kind", "degrees"]
}'
# docs: end
"""


@check
def a_model_in_the_list() -> None:
    shell(SETUP)
    assert "headrace" in shell("llm models list")


@check
def prompt_in_a_stream_with_usage() -> None:
    printed = shell(f"{{ {PROMPT} }} 2>&1")
    print(printed)
    assert "Token usage:" in printed and "input" in printed and "output" in printed


@check
def schema() -> None:
    reading = json.loads(shell(SCHEMA))
    assert reading["kind"] in ("warm", "cold") and 0 <= reading["degrees"] <= 99


@check
def conversation_goes_on() -> None:
    shell("llm -m headrace -o max_tokens 8 --continue 'And another one?'")
    logged = json.loads(shell("llm logs -n 2 --json"))
    assert all(entry["response"] and entry["output_tokens"] for entry in logged)


@check
def errors_reach_the_user() -> None:
    with raises(AssertionError, "a valid API key is needed"):
        shell("llm -m headrace --key wrong Hello")
    with raises(AssertionError, "max_tokens must be at least 1"):
        shell("llm -m headrace -o max_tokens -1 Hello")


if __name__ == "__main__":
    os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
    main("llm")
