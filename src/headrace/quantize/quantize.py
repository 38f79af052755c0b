"""Reads a checkpoint layer by layer, quantizes its matrices and writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.errors import ConfigError, UnsupportedModelError
from headrace.kernels.quantized import Kind, QuantizedWeight, quantize, quantize_int4
from headrace.models import Checkpoint, Decoder, load_decoder, open_checkpoint
from headrace.models.quantized import kept_in_16_bits
from headrace.models.sources import Progress
from headrace.models.spec import ModelSpec
from headrace.models.weights.rearranged import Rearranged
from headrace.models.weights.safetensors_files import read_json
from headrace.quantize.calibrate import Calibration, Inputs
from headrace.quantize.compensation import compensated_fp8, compensated_int4
from headrace.quantize.evaluate import NUM_WINDOWS, Scores, embedded_text, score, windows_of
from headrace.quantize.folding import apply, folds_of
from headrace.quantize.output import OutputDirectory
from headrace.quantize.stored import quantization_config, stored_tensors
from headrace.text import load_tokenizer

OnStage = Callable[[str, int, int], None]  # name of the stage, done, total
_NUM_CALIBRATION_WINDOWS = 16
_TEXT_CHARACTERS = 120_000
_NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.pt", "*.pth", "*.gguf", "config.json")
_GROUP_LENS = (128, 64, 32)
_MIN_WIDTH_OF_LARGE_GROUPS = 1024


@dataclass(frozen=True, slots=True)
class Request:
    model: str
    kind: Kind
    output: Path
    data: list[str] | None = None  # texts to calibrate with
    device: str = "cpu"
    evaluates: bool = True
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What the quantized model is like."""

    kind: Kind
    method: str
    kept: tuple[str, ...]  # matrices that stay in 16 bits
    num_bytes: int
    num_bytes_before: int
    perplexity: float | None = None
    perplexity_before: float | None = None
    agreement: float | None = None  # share of positions with the same most likely token
    evaluated_with: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def quantize_checkpoint(request: Request, on_stage: OnStage = lambda name, done, total: None) -> Report:
    """Writes the quantized checkpoint to `request.output`, which must not exist, and returns its report."""
    checkpoint = open_checkpoint(request.model, revision=request.revision)
    config = _checked_config(checkpoint, has_data=request.data is not None)
    windows = None if request.data is None else _calibration_windows(request.data, checkpoint)
    output = OutputDirectory(request.output)
    decoder = _load(checkpoint, request.device, _stage(on_stage, "load"))
    kept = kept_in_16_bits(checkpoint.spec.num_layers) & checkpoint.spec.tensor_shapes().keys()
    before = _scores(decoder, checkpoint, on_stage, "evaluate the original") if request.evaluates else None
    calibration = None if windows is None else _calibration(decoder, windows, request, on_stage)
    del decoder
    _write(checkpoint, config, request, calibration, kept, output, on_stage)
    del calibration
    output.complete()
    after: Scores | None = None
    if before is not None:
        written = open_checkpoint(str(output.partial))
        after = _scores(_load(written, request.device), checkpoint, on_stage, "evaluate the quantized model")
    report = _report(request, output, checkpoint.spec, kept, before, after)
    output.write_json("headrace_quantize.json", report.as_json())
    output.publish()
    return report


def _checked_config(checkpoint: Checkpoint, *, has_data: bool) -> dict[str, Any]:
    """Refuses models whose tensors cannot be replaced one by one."""
    spec, source = checkpoint.spec, checkpoint.source
    if not (source / "config.json").exists():
        raise UnsupportedModelError(f"{source} is a GGUF file; give a directory with config.json and safetensors")
    config = read_json(source / "config.json")
    if spec.quantization is not None or config.get("quantization_config"):
        raise UnsupportedModelError(f"{source} is quantized already; give the original model")
    if _stored_names(checkpoint) is None or spec.latent is not None:
        raise UnsupportedModelError(
            f"{spec.family} cannot be quantized into a file yet: only models that store each of their matrices as a "
            "tensor of its own; quantization='fp8' quantizes any model at load"
        )
    if spec.mixture is not None and has_data:
        raise UnsupportedModelError("a mixture of experts is quantized without data; leave out --data")
    return config


def _stored_names(checkpoint: Checkpoint) -> dict[str, str] | None:
    """The name of each tensor in the checkpoint's files; None: some are parts of others."""
    weights = checkpoint.weights
    assert weights is not None
    return weights.stored_names() if isinstance(weights, Rearranged) else {name: name for name in weights.names()}


def _calibration_windows(texts: list[str], checkpoint: Checkpoint) -> Tensor:
    ids = load_tokenizer(checkpoint.text).encode("\n".join(texts)[:_TEXT_CHARACTERS])
    return windows_of(ids, _NUM_CALIBRATION_WINDOWS, text="the text to calibrate with")


def _calibration(decoder: Decoder, windows: Tensor, request: Request, on_stage: OnStage) -> Calibration:
    return Calibration(decoder, windows, _stage(on_stage, "calibrate"), has_moments=request.kind != "int8")


def _load(checkpoint: Checkpoint, device: str, progress: Progress = lambda done, total: None) -> Decoder:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return load_decoder(checkpoint, dtype=dtype, device=device, max_len=2048, progress=progress)


def _scores(decoder: Decoder, checkpoint: Checkpoint, on_stage: OnStage, name: str) -> Scores:
    ids = load_tokenizer(checkpoint.text).encode(embedded_text()[:_TEXT_CHARACTERS])
    return score(decoder, windows_of(ids, NUM_WINDOWS), _stage(on_stage, name))


def _write(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    request: Request,
    calibration: Calibration | None,
    kept: frozenset[str],  # matrices that stay in 16 bits
    output: OutputDirectory,
    on_stage: OnStage,
) -> None:
    spec, stored = checkpoint.spec, _stored_names(checkpoint)
    assert stored is not None
    dtype, group_len = getattr(torch, spec.dtype), _group_len(spec) if request.kind == "int4" else 0
    device = torch.device(request.device)
    plain = ["lm_head"]  # matrices that are not quantized
    output.add({stored[name]: checkpoint.tensor(name).to(dtype) for name in spec.outer_shapes()})
    for index in range(spec.num_layers):
        tensors = {name: checkpoint.tensor(name).to(device) for name in spec.layer_shapes(index)}
        inputs = None if calibration is None else calibration.inputs_of(index)
        if inputs is not None and request.kind == "int8":
            for fold in folds_of(spec, index, inputs):
                apply(fold, tensors)
        for name, tensor in tensors.items():
            if _is_quantized(name) and name not in kept:
                weight = _quantized(tensor, request.kind, group_len, None if inputs is None else inputs.of(name))
                output.add(stored_tensors(stored[name], weight, dtype))
            else:
                output.add({stored[name]: tensor.to(dtype)})
                plain += [stored[name].removesuffix(".weight")] if tensor.dim() == 2 else []
        on_stage("quantize", index + 1, spec.num_layers)
    stated = quantization_config(request.kind, group_len, plain)
    output.write_json("config.json", config | {"quantization_config": stated})
    _copy_others(checkpoint.source, output)


def _is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def _stage(on_stage: OnStage, name: str) -> Progress:
    return lambda done, total: on_stage(name, done, total or 0)


def _group_len(spec: ModelSpec) -> int:
    """The largest groups of four bits that divide the rows of all matrices: a config states one length. Small models
    lose most by rounding, and get the smallest groups (docs/experiments.md)."""
    widths = {spec.hidden_size, *(shape[1] for name, shape in spec.tensor_shapes().items() if _is_quantized(name))}
    lengths = _GROUP_LENS if spec.hidden_size >= _MIN_WIDTH_OF_LARGE_GROUPS else _GROUP_LENS[-1:]
    found = next((size for size in lengths if all(width % size == 0 for width in widths)), None)
    if found is None:
        raise UnsupportedModelError(f"rows of {sorted(widths)} weights divide into no groups of {lengths[-1]} or more")
    return found


def _quantized(tensor: Tensor, kind: Kind, group_len: int, inputs: Inputs | None) -> QuantizedWeight:
    moments = None if inputs is None else inputs.moments
    if kind == "int4":
        if moments is None:
            return quantize_int4(tensor, group_len, has_zeros=True)
        return compensated_int4(tensor, moments, group_len)
    if kind == "fp8" and moments is not None:
        return compensated_fp8(tensor, moments)
    return quantize(tensor, kind)


def _copy_others(source: Path, output: OutputDirectory) -> None:
    """Copies the tokenizer, the chat template and other small files."""
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in _NOT_COPIED):
            output.copy(path)


def _report(
    request: Request,
    output: OutputDirectory,
    spec: ModelSpec,
    kept: frozenset[str],
    before: Scores | None,
    after: Scores | None,
) -> Report:
    methods = {
        "int8": "SmoothQuant",
        "int4": "error compensation (GPTQ), groups with zero points",
        "fp8": "error compensation (GPTQ)",
    }
    plain = {"int8": "round to nearest", "int4": "groups with zero points, searched clips", "fp8": "round to nearest"}
    return Report(
        kind=request.kind,
        method=plain[request.kind] if request.data is None else methods[request.kind],
        kept=tuple(sorted(kept)),
        num_bytes=output.num_bytes,
        num_bytes_before=spec.num_params * getattr(torch, spec.dtype).itemsize,
        perplexity=None if after is None else after.perplexity,
        perplexity_before=None if before is None else before.perplexity,
        agreement=None if before is None or after is None else after.agreement(before),
        evaluated_with="" if before is None else _evaluated_with(request),
    )


def _evaluated_with(request: Request) -> str:
    if request.device == "cuda":
        return "weights and activations as they are served, on a GPU"
    if request.kind == "int8":
        return "weights and activations as a CPU serves them; a GPU rounds activations with one scale per token"
    return "quantized weights in float32 on a CPU; activations are not rounded"


def read_texts(path: Path) -> list[str]:
    """Reads texts to calibrate with: lines of JSON with `text`, `prompt` or `messages`, or plain lines."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not text in UTF-8 (byte {error.start}); give lines of text, or of JSON with text, prompt or "
            "messages"
        ) from error
    return [_text_of(line) for line in lines if line.strip()]


def _text_of(line: str) -> str:
    try:
        content = json.loads(line)
    except ValueError:
        return line
    if isinstance(content, dict) and isinstance(content.get("body"), dict):
        content = content["body"]
    if not isinstance(content, dict):
        return line
    if isinstance(content.get("messages"), list):
        return "\n".join(_message_text(message) for message in content["messages"])
    return next((value for name in ("text", "prompt") if isinstance(value := content.get(name), str)), line)


def _message_text(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
