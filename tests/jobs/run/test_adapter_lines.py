"""Jobs with LoRA adapters: by the `model` of a line, part of the job's identity, and after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from headrace.config import EngineConfig
from headrace.errors import ConfigError, JobError
from headrace.jobs.run.run_job import run_job
from headrace.jobs.spec import JobSpec
from tests.engine.adapters import merged, save_adapter
from tests.engine.tiny import greedy, save_model

WriteLines = Callable[..., Path]
PROMPT = list(range(1, 12))
NUM_TOKENS = 6
SAMPLING = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter-lines")


@pytest.fixture(scope="module")
def model(root: Path) -> transformers.PreTrainedModel:
    made = save_model(root / "model")
    for seed, name in enumerate(("a", "b")):
        save_adapter(root / name, made, seed=seed)
    return made


def job_of(root: Path, source: Path, *modules: str) -> JobSpec:
    config = EngineConfig(
        model=str(root / "model"), max_num_seqs=4, num_gpu_blocks_override=64, lora_modules=tuple(modules) or None
    )
    return JobSpec(input=str(source), output=str(source.parent / "out.jsonl"), config=config)


def openai_line(custom_id: str, name: str | None) -> dict[str, Any]:
    body = {"prompt": PROMPT, **SAMPLING} | ({} if name is None else {"model": name})
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def test_the_model_of_a_line_names_its_adapter(
    root: Path, model: transformers.PreTrainedModel, write_lines: WriteLines
) -> None:
    tokenizer = Tokenizer.from_file(str(root / "model" / "tokenizer.json"))
    plain = [{"prompt": PROMPT, **SAMPLING, **more} for more in ({}, {"model": "a"}, {"model": "b"})]
    source = write_lines(*plain, openai_line("c", "b"), {"prompt": PROMPT, "model": "bb"})
    job = job_of(root, source, f"a={root / 'a'}", f"b={root / 'b'}")
    run_job(job, quiet=True)
    lines = [json.loads(line) for line in Path(job.output).read_text().splitlines()]
    by_index = {line.get("index", 3): line for line in lines}
    for index, adapted in enumerate((model, merged(model, root / "a"), merged(model, root / "b"))):
        assert by_index[index]["text"] == tokenizer.decode(greedy(adapted, PROMPT, NUM_TOKENS))
        assert by_index[index].get("model") == (None, "a", "b")[index]
    texts = [by_index[index]["text"] for index in range(3)]
    assert len(set(texts)) == 3, "lines that differ only in their adapter are no duplicates"
    answer = by_index[3]["response"]["body"]
    assert (answer["model"], answer["choices"][0]["text"]) == ("b", texts[2])
    assert by_index[4]["error"]["code"] == "model_not_found" and "'b'" in by_index[4]["error"]["message"]


@pytest.mark.slow
def test_a_job_that_was_killed_goes_on_with_the_same_adapters_and_no_others(
    root: Path, model: transformers.PreTrainedModel, write_lines: WriteLines
) -> None:
    names = [None, "a", "b"]
    source = write_lines(*({"prompt": [*PROMPT, n], "model": names[n % 3], **SAMPLING} for n in range(24)))
    job = job_of(root, source, f"a={root / 'a'}", f"b={root / 'b'}")
    command = [
        *(sys.executable, "-m", "headrace", "run", str(source), "-o", job.output, "--model", str(root / "model")),
        *("--max-num-seqs", "4", "--num-gpu-blocks-override", "64", "--lora-modules", f"a={root / 'a'}"),
        f"b={root / 'b'}",
    ]
    environment = os.environ | {"HEADRACE_CRASH_AT": "written:1"}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    with pytest.raises(JobError, match=r"adapter\.b"):
        run_job(job_of(root, source, f"a={root / 'a'}", f"b={root / 'a'}"), quiet=True)
    with pytest.raises(JobError, match=r"adapter\.a"):
        run_job(job_of(root, source), quiet=True)
    report = run_job(job, quiet=True)
    assert report.num_before > 0
    lines = [json.loads(line) for line in Path(job.output).read_text().splitlines()]
    resumed = {line["index"]: line["text"] for line in lines}
    whole = job_of(root, source, f"a={root / 'a'}", f"b={root / 'b'}")
    fresh = JobSpec(input=whole.input, output=str(source.parent / "fresh.jsonl"), config=whole.config)
    run_job(fresh, quiet=True)
    once = [json.loads(line) for line in Path(fresh.output).read_text().splitlines()]
    assert resumed == {line["index"]: line["text"] for line in once}


def test_an_adapter_with_the_name_of_the_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'.*/model' is the name of the model; choose another one for the adapter"):
        job_of(tmp_path, tmp_path / "in.jsonl", f"{tmp_path / 'model'}=a")
