from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.errors import AdapterError
from headrace.jobs.spec import JobSpec
from headrace.jobs.store.fingerprint import fingerprint_of


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "there is no directory"),
        ([], r"no adapter_config\.json"),
        (["adapter_config.json"], r"no adapter_model\.safetensors"),
        (["adapter_config.json", "adapter_model.bin"], "a pickle, which is not read"),
    ],
)
def test_an_adapter_without_its_files_is_refused_in_the_words_of_a_server(
    files: list[str] | None, message: str, tmp_path: Path
) -> None:
    directory = tmp_path / "adapter"
    if files is not None:
        directory.mkdir()
        for name in files:
            (directory / name).touch()
    job = JobSpec(input="in.jsonl", output="out.jsonl", config=EngineConfig(lora_modules={"sql": str(directory)}))
    with pytest.raises(AdapterError, match=message):
        fingerprint_of(job)
