"""An adapter for Ray Data: `map_batches(ds, model=...)` adds a column of answers to a dataset.

For a file of prompts, `headrace run --ray` loses less when something dies: Ray Data computes whole blocks again. This
module imports no ray; the dataset brings its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.engine.llm import LLM
from headrace.errors import FailedRequestError, RequestError
from headrace.types import RequestOutput, SamplingParams

BATCH_SIZE = 256  # lines that one call answers: several times what an engine runs at once, so that it stays busy


class BatchAnswerer:
    """A callable class for `Dataset.map_batches`: holds an engine for as long as its actor lives. Columns are kept; a
    row that cannot be answered gets a text in the error column, and an empty answer."""

    def __init__(
        self,
        *,
        model: str,
        prompt_column: str = "prompt",
        output_column: str = "text",
        error_column: str = "error",
        sampling_params: dict[str, Any] | None = None,
        engine_options: dict[str, Any] | None = None,
    ) -> None:
        self._prompt_column = prompt_column
        self._output_column = output_column
        self._error_column = error_column
        self._params = SamplingParams(**sampling_params or {})
        self._llm = LLM(model, **engine_options or {})

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        answers = self._answers([_plain(prompt) for prompt in batch[self._prompt_column]])
        texts, errors = [text for text, _ in answers], [error for _, error in answers]
        return {**batch, self._output_column: texts, self._error_column: errors}

    def _answers(self, prompts: Sequence[Any]) -> list[tuple[str, str]]:
        """The text and the error of each prompt. One that is refused is found by halving the batch."""
        if not prompts:
            return []
        try:
            return [_answer(output) for output in self._llm.generate(list(prompts), self._params, use_tqdm=False)]
        except (RequestError, FailedRequestError) as error:
            if len(prompts) == 1:
                return [("", str(error))]
        middle = len(prompts) // 2
        return self._answers(prompts[:middle]) + self._answers(prompts[middle:])


def map_batches(
    dataset: Any,
    *,
    model: str,
    concurrency: int = 1,
    batch_size: int = BATCH_SIZE,
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    **options: Any,
) -> Any:
    """The dataset with a column of answers. `concurrency`: actors, each with an engine. `options` are those of
    `BatchAnswerer`."""
    resources = {name: value for name, value in (("num_gpus", num_gpus), ("num_cpus", num_cpus)) if value is not None}
    return dataset.map_batches(
        BatchAnswerer,
        fn_constructor_kwargs={"model": model, **options},
        batch_size=batch_size,
        batch_format="numpy",
        concurrency=concurrency,
        **resources,
    )


def _answer(output: RequestOutput) -> tuple[str, str]:
    if output.error is not None:
        return "", output.error
    return output.outputs[0].text, ""


def _plain(prompt: Any) -> Any:
    """A column of a batch holds numpy values."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt
