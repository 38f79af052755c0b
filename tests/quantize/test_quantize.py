"""`headrace quantize`: what it writes is the same model with fewer bits, and appears whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.cli.main import main
from headrace.errors import ConfigError, HeadraceError, UnsupportedModelError
from headrace.kernels.quantized import Kind, QuantizedWeight, dequantize, quantize, quantize_fp8, quantize_int4
from headrace.models import Decoder, load_decoder, open_checkpoint
from headrace.quantize import calibrate
from headrace.quantize.calibrate import Calibration, record_inputs
from headrace.quantize.compensation import compensated_fp8, compensated_int4
from headrace.quantize.evaluate import prefill, score
from headrace.quantize.folding import apply, folds_of
from headrace.quantize.output import OutputDirectory
from headrace.quantize.quantize import Request, quantize_checkpoint, read_texts
from tests.engine.tiny import save_model

Q = "model.layers.0.self_attn.q_proj.weight"
TEXT = [f"line {number} of a text to calibrate with" for number in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_model(directory)
    return directory


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_matrices_are_written_as_they_are_rounded(kind: Kind, model: Path, tmp_path: Path) -> None:
    quantize_checkpoint(Request(str(model), kind, tmp_path / "out", evaluates=False))
    before, after = open_checkpoint(str(model)), open_checkpoint(str(tmp_path / "out"))
    assert after.spec.quantization is not None and after.spec.quantization.kind == kind
    original = before.tensor(Q)
    expected = quantize_int4(original, 32, has_zeros=True) if kind == "int4" else quantize(original, kind)
    assert torch.allclose(after.tensor(Q), dequantize(expected), rtol=1e-2, atol=1e-3)
    assert torch.equal(after.tensor("model.norm.weight"), before.tensor("model.norm.weight"))
    kept = "model.layers.2.mlp.down_proj"  # of the last layer
    assert torch.equal(after.tensor(f"{kept}.weight"), before.tensor(f"{kept}.weight"))
    assert after.weights.quantized(f"{kept}.weight", torch.device("cpu")) is None
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", kept]
    assert (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize(("kind", "method", "min_agreement"), [("int8", "SmoothQuant", 0.5), ("int4", "GPTQ", 0.1)])
def test_the_report_has_the_loss_before_and_after(
    kind: Kind, method: str, min_agreement: float, model: Path, tmp_path: Path
) -> None:
    stages: set[str] = set()
    request = Request(str(model), kind, tmp_path / "out", data=TEXT)
    report = quantize_checkpoint(request, lambda name, done, total: stages.add(name))
    assert report.perplexity and report.perplexity_before and report.agreement
    assert method in report.method and report.agreement > min_agreement
    assert json.loads((tmp_path / "out" / "headrace_quantize.json").read_text()) == json.loads(
        json.dumps(report.as_json())
    )
    assert stages == {"load", "evaluate the original", "calibrate", "quantize", "evaluate the quantized model"}


@pytest.fixture(scope="module")
def decoder(model: Path) -> Decoder:
    return load_decoder(open_checkpoint(str(model)), dtype=torch.float32)


def test_folded_scales_leave_the_model_as_it_is(model: Path, decoder: Decoder) -> None:
    checkpoint = open_checkpoint(str(model))
    inputs = record_inputs(decoder, torch.arange(64, dtype=torch.int32)[None])
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.spec.layer_shapes(1)}
    x = torch.randn(5, checkpoint.spec.hidden_size)
    expected = mlp(tensors, x)
    for fold in folds_of(checkpoint.spec, 1, inputs[1]):
        apply(fold, tensors)
    assert not torch.equal(
        tensors["model.layers.1.mlp.down_proj.weight"], checkpoint.tensor("model.layers.1.mlp.down_proj.weight")
    )
    assert torch.allclose(mlp(tensors, x), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def mlp(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A layer's MLP after its norm, without the norm's division, which folding does not touch."""
    prefix = "model.layers.1."
    x = x * tensors[prefix + "post_attention_layernorm.weight"]
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def test_recorded_inputs_are_those_of_the_model(decoder: Decoder) -> None:
    ids = torch.arange(40, dtype=torch.int32)
    inputs = record_inputs(decoder, ids[None])
    embedded = decoder.layers[0].attention_norm.plain(decoder.embeddings(ids))
    assert torch.allclose(inputs[0].qkv.largest, embedded.abs().amax(0), rtol=1e-5)
    assert torch.allclose(prefill(decoder, ids), prefill(decoder, ids))


def test_compensation_gives_outputs_nearer_to_the_original_than_rounding_does() -> None:
    x = torch.randn(500, 8) @ torch.randn(8, 96) + 0.1 * torch.randn(500, 96)  # inputs that rise and fall together
    weight = torch.randn(40, 96)
    expected = x @ weight.t()

    def error(found: QuantizedWeight) -> float:
        return float((x @ dequantize(found).t() - expected).square().mean())

    moments = x.t() @ x
    assert error(compensated_int4(weight, moments, 32)) < 0.2 * error(quantize_int4(weight, 32, has_zeros=True))
    assert error(compensated_fp8(weight, moments)) < 0.2 * error(quantize_fp8(weight))


def test_compensation_rounds_to_nearest_where_inputs_are_independent() -> None:
    weight = torch.randn(40, 96)
    found = compensated_int4(weight, torch.eye(96), 32)
    assert torch.equal(found.values, quantize_int4(weight, 32, has_zeros=True).values)
    assert torch.equal(compensated_fp8(weight, torch.eye(96)).values.float(), quantize_fp8(weight).values.float())


def test_weights_that_compensation_makes_too_large_are_clipped() -> None:
    """Two inputs that are nearly the same: all of the error of the first column goes to the second."""
    weight = torch.tensor([[447.0, 448.0], [1.0, 448.0]])
    found = dequantize(compensated_fp8(weight, torch.tensor([[1.0, 0.999], [0.999, 1.0]])))
    assert found.isfinite().all() and found.abs().max() <= 448.0


def test_layers_are_calibrated_in_several_passes_where_memory_is_short(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = torch.arange(40, dtype=torch.int32)[None]
    at_once = record_inputs(decoder, windows, has_moments=True)
    monkeypatch.setattr(calibrate, "MAX_MOMENT_BYTES", 1)
    seen: list[tuple[int, int | None]] = []
    calibration = Calibration(decoder, windows, lambda done, total: seen.append((done, total)), has_moments=True)
    for index in range(len(decoder.layers)):
        assert torch.equal(calibration.inputs_of(index).down.moments, at_once[index].down.moments)
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_a_model_agrees_with_itself(decoder: Decoder) -> None:
    windows = torch.arange(64, dtype=torch.int32).view(2, 32)
    scores = score(decoder, windows)
    assert scores.agreement(score(decoder, windows)) == 1.0


def test_an_output_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "of a run that died").touch()
    output = OutputDirectory(tmp_path / "out", max_file_bytes=500)
    for name in "abc":
        output.add({name: torch.ones(100)})
    output.complete()
    assert not (tmp_path / "out").exists()
    output.publish()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json"]
    assert not (tmp_path / "out.partial").exists()
    with pytest.raises(ConfigError, match="exists already"):
        OutputDirectory(tmp_path / "out")


def test_quantized_models_and_fused_matrices_are_refused(model: Path, tmp_path: Path) -> None:
    quantize_checkpoint(Request(str(model), "int4", tmp_path / "out", evaluates=False))
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        quantize_checkpoint(Request(str(tmp_path / "out"), "fp8", tmp_path / "again"))
    save_model(tmp_path / "fused", "phi3")
    with pytest.raises(UnsupportedModelError, match="each of their matrices as a tensor of its own"):
        quantize_checkpoint(Request(str(tmp_path / "fused"), "fp8", tmp_path / "again"))
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4"])
def test_a_mixture_is_quantized_without_data_under_the_names_of_its_files(kind: Kind, tmp_path: Path) -> None:
    save_model(tmp_path / "mixture", "mixtral")
    given = Request(str(tmp_path / "mixture"), kind, tmp_path / "out", evaluates=False)
    with pytest.raises(UnsupportedModelError, match="without data; leave out --data"):
        quantize_checkpoint(replace(given, data=["a text"]))
    quantize_checkpoint(given)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *(f"model.layers.{index}.block_sparse_moe.gate" for index in range(3))]
    original, found = (open_checkpoint(str(tmp_path / name)) for name in ("mixture", "out"))
    for part in ("gate_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.2.{part}.weight"
        assert found.weights.quantized(name, torch.device("cpu")) is not None
        error = found.tensor(name) - original.tensor(name)
        assert error.norm() / original.tensor(name).norm() < (0.1 if kind == "int4" else 0.03)
    router = "model.layers.1.mlp.router.weight"
    assert torch.equal(found.tensor(router), original.tensor(router))


def test_texts_are_read_from_prompts_messages_and_plain_lines(tmp_path: Path) -> None:
    lines = ['{"prompt": "one"}', '{"messages": [{"role": "user", "content": "two"}]}', "", "three"]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    assert read_texts(tmp_path / "data.jsonl") == ["one", "two", "three"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('\ufeff{"prompt": "one"}', "one"),
        ('{"text": "a\u2028b"}', "a\u2028b"),
        ('{"messages": [{"role": "user", "content": [{"type": "text", "text": "two"}]}]}', "two"),
        ('{"messages": [{"role": "assistant", "content": null}, "x"]}', "\n"),
        ('{"custom_id": "1", "body": {"prompt": "three"}}', "three"),
        ('{"body": "four"}', '{"body": "four"}'),
    ],
)
def test_any_line_of_json_gives_a_text(line: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(line + "\n", encoding="utf-8")
    assert read_texts(tmp_path / "data.jsonl") == [text]


def test_texts_that_cannot_be_used_are_refused_before_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"PAR1\xff")
    with pytest.raises(ConfigError, match=r"data.parquet is not text in UTF-8 \(byte 4\); give lines of text"):
        read_texts(tmp_path / "data.parquet")
    stages: set[str] = set()
    request = Request(str(model), "int4", tmp_path / "out", data=["too short"])
    with pytest.raises(ConfigError, match=r"the text to calibrate with has .* tokens, and 512 are needed at least"):
        quantize_checkpoint(request, lambda name, done, total: stages.add(name))
    assert not stages and not (tmp_path / "out.partial").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HeadraceError, match=r"file/out.partial cannot be written: Not a directory"):
        OutputDirectory(tmp_path / "file" / "out")
    output = OutputDirectory(tmp_path / "out")
    output.add({"a": torch.ones(100)})
    output.partial.rmdir()
    with pytest.raises(HeadraceError, match=r"out.partial cannot be written: .*No such file"):
        output.complete()


def test_the_command_prints_the_loss(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(model), "--to", "int8", "-o", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "perplexity" in printed and "agreement" in printed and "as a CPU serves them" in printed
