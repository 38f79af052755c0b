from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LLM
from headrace.bench.sweep.settings_file import settings_file
from headrace.config import EMBEDDED_MODEL
from headrace.engine.settings_file import config_from
from headrace.errors import ConfigError
from tests.engine.tiny import save_model


def written(directory: Path, text: str) -> Path:
    path = directory / "settings.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_gives_the_model_and_its_settings(tmp_path: Path) -> None:
    config = config_from(None, written(tmp_path, 'model = "other"\nmax-num-seqs = 12\n'), {})
    assert (config.model, config.max_num_seqs) == ("other", 12)


def test_arguments_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, 'model = "other"\nmax_num_seqs = 12\nblock_size = 32\n')
    config = config_from("mine", path, {"max_num_seqs": 3})
    assert (config.model, config.max_num_seqs, config.block_size) == ("mine", 3, 32)


def test_without_a_file_the_embedded_model_is_the_default() -> None:
    assert config_from(None, None, {}).model == EMBEDDED_MODEL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq = 4\n", "unknown key 'max_num_seq'.*max_num_seqs"),
        ('max_num_seqs = "4"\n', "max_num_seqs must be an integer"),
        ('scheduler_cls = "m"\n', "scheduler_cls='m' is refused: there is one scheduler"),
        ("max_num_seqs = \n", "is not TOML"),
        ("max_num_seqs = 0\n", "max_num_seqs must be an integer of at least 1"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from(None, written(tmp_path, text), {})


def test_dotted_keys_of_yaml_are_keys_of_one_object(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "speculative-config.method: ngram\nspeculative-config.num_speculative_tokens: 3\n", encoding="utf-8"
    )
    speculative = config_from(None, path, {}).speculative
    assert speculative is not None
    assert (speculative.method, speculative.num_tokens) == ("ngram", 3)


def test_a_dotted_key_beside_a_value_of_its_parent_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("speculative-config: x\nspeculative-config.method: ngram\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"speculative-config is set to 'x', and speculative-config\.method"):
        config_from(None, path, {})


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
        config_from(None, tmp_path / "missing.toml", {})


def test_llm_takes_the_file_that_tune_writes(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    suffix, text = settings_file("headrace", {"model": str(tmp_path / "model"), "max_num_seqs": 5})
    assert suffix == ".toml"
    with LLM(config=written(tmp_path, text)) as llm:
        assert llm.settings.max_num_seqs == 5
