"""The Python examples of the documents run as programs, with a tiny model in place of those they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, EngineConfig, SamplingParams
from headrace.engine import opening, start
from tests.engine.tiny import save_model

ROOT = Path(__file__).parents[2]
SECTIONS = [
    *(("docs/python.md", title) for title in ("LLM", "AsyncEngine", "DynamicBatcher")),
    ("docs/getting-started.md", "First Python program"),
    ("README.md", "Use it from Python"),
]
STRUCTURED = ("docs/structured-output.md", ("In Python", "Mistakes", "Tool calls"))  # one program


def blocks_of(document: str, section: str) -> list[str]:
    """The Python blocks of the section whose title begins so."""
    (text,) = [part for part in (ROOT / document).read_text().split("\n## ") if part.startswith(section)]
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def run(document: str, section: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(document, section):
        exec(compile(block, document, "exec"), names)
    return names


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_model(directory)
    return directory


@pytest.fixture
def tiny_for_all(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever model is named, the tiny one is opened, and closed at the end."""
    opened, engines = opening.open_checkpoint, []

    def remembers(config: Any, deliver: Any, **options: Any) -> Any:
        engines.append(start.start_engine(config, deliver, **options))
        return engines[-1]

    monkeypatch.setattr(opening, "open_checkpoint", lambda model, **options: opened(str(tiny), **options))
    for module in ("llm", "async_engine"):
        monkeypatch.setattr(f"headrace.engine.{module}.start_engine", remembers)
    yield
    for engine in engines:
        engine.close()


@pytest.mark.usefixtures("tiny_for_all")
@pytest.mark.parametrize(("document", "section"), SECTIONS)
def test_the_examples_of_a_section_run(document: str, section: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(document, section)
    printed = capsys.readouterr().out
    assert printed
    if section == "DynamicBatcher":
        assert printed == "['short', 'short', 'long'] 3.0\n"
    if section == "LLM":
        assert "'max_num_seq', did you mean 'max_num_seqs'?" in printed
        assert "'max_new_tokens', did you mean 'max_tokens'?" in printed
        assert "generate() has no argument 'sampling_param', did you mean 'sampling_params'?" in printed


@pytest.mark.usefixtures("tiny_for_all")
def test_the_examples_of_structured_output_print_what_has_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    document, sections = STRUCTURED
    names: dict[str, Any] = {"__name__": "__main__"}
    for section in sections:
        for block in blocks_of(document, section):
            exec(compile(block, document, "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] in ("Africa", "America", "Asia", "Europe", "Oceania")
    assert re.fullmatch(r"one of three (positive|negative|neutral) stop", printed[1])
    assert re.fullmatch(r"a date [12]\d{3}-[01]\d-[0-3]\d stop", printed[2])
    assert re.fullmatch(r"a sum \d{1,2}(\+\d{1,2}){1,3} stop", printed[3])
    assert printed[4] == "structured_outputs True"
    assert printed[5] == "get_weather dict_keys(['city'])"
    assert printed[6] == "[ContentDelta(text='Let me see.')]"
    count = (ROOT / document).read_text().count("```python")
    assert count == sum(len(blocks_of(document, section)) for section in sections)


def test_every_example_is_in_a_section_that_runs() -> None:
    for document in ("docs/python.md", "docs/getting-started.md", "README.md"):
        count = (ROOT / document).read_text().count("```python")
        assert count == sum(len(blocks_of(name, section)) for name, section in SECTIONS if name == document) > 0


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs/settings.md").read_text()
    assert [field.name for field in fields(EngineConfig) if f"`{field.name}`" not in text] == []


def test_every_sampling_parameter_is_documented() -> None:
    text = (ROOT / "docs/python.md").read_text()
    assert [field.name for field in fields(SamplingParams) if f"`{field.name}`" not in text] == []


def test_every_public_method_of_llm_is_documented() -> None:
    text = (ROOT / "docs/python.md").read_text()
    public = [name for name in vars(LLM) if not name.startswith("_")]
    assert [name for name in public if f"`{name}" not in text] == []
