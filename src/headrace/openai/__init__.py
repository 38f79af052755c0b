"""OpenAI's API as data: what a request body may say and what an answer looks like.

The HTTP server and batch jobs both use this package, so a request means the same in a body and in a batch line.
Nothing here knows HTTP, files or the engine's loop.

- `schema/`: the request bodies as msgspec structs. The one declaration of each field and its type.
- `fields.py`: names that are no struct fields: those without effect, those refused, those refused in a batch line.
- `body.py`: from a decoded JSON object to a struct; refuses unknown names and wrong types.
- `sampling.py`: from a struct to `SamplingParams`; refuses values out of bounds.
- `prompts.py`: forms of `prompt`, and messages rendered with the model's chat template.
- `response_format.py`: `response_format` and `structured_outputs`.
- `responses.py`, `response_items.py`, `response_tools.py`, `response_output.py`: the requests and answers of
  /v1/responses.
- `answer_format.py`, `parser_names.py`: the parts of an answer (reasoning, text, calls) and the parsers that find them.
- `tool_use.py`: tools, the grammar of a forced call, and how calls are found in an answer.
- `embeddings.py`: the requests and answers of /v1/embeddings, /classify and /pooling.
- `scoring.py`: those of /rerank and /score. `cohere.py`: those of /v2/embed.
- `logprobs.py`, `usage.py`, `choices.py`, `errors.py`: the parts of an answer, as JSON.

To add a sampling parameter: a field of `types.SamplingParams`, the same name in `schema/common.py`, a row in
docs/server.md. Job lines read it from there. `tests/openai/test_sampling_fields.py` fails until all are there.

Each check is made once at each border. Names and types: `body.py`. Values: `SamplingParams.__post_init__`. What only
the API bounds (`n`, the number of stops): `sampling.py`. What depends on the engine: `engine/checks.py`.
"""

from __future__ import annotations
