"""The probe starts a real engine and reports both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.plan.probe import probe
from headrace.plan.settings import PlanSettings

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1200,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.hardware.read_gpu", lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_a_probe_shows_predicted_and_real_values(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    report = probe(str(tmp_path), PlanSettings(max_num_seqs=4), num_requests=4, input_len=8, output_len=4)
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["max_num_seqs"]["predicted"] == rows["max_num_seqs"]["real"] == 4
    assert rows["cache, tokens"]["predicted"] == rows["cache, tokens"]["real"] == 4 * 256
    assert rows["workload, seconds"]["real"] > 0


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="--probe would not fit on this machine"):
        probe("deepseek-r1", PlanSettings())
