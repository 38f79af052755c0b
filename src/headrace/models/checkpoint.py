"""A located model with its config read and checked. Weights are read when a decoder is loaded. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import ConfigError, ModelError, UnsupportedModelError
from headrace.models.encoder_config import encoder_of_config, encoder_spec, stored_encoder
from headrace.models.families import family_of_config, family_of_gguf
from headrace.models.family import Config
from headrace.models.gguf_config import spec_from_gguf
from headrace.models.gguf_encoder import read_encoder
from headrace.models.gguf_file import read_gguf
from headrace.models.hub_config import spec_from_config
from headrace.models.pooling_config import AUTOMATIC, PoolingChoice, choose_pooler
from headrace.models.sentence_transformers import SentenceModules, read_activation, read_modules, read_score_tokens
from headrace.models.sources import Progress, locate
from headrace.models.spec import ModelSpec
from headrace.models.stored_tensors import Stored, has_head
from headrace.models.weights.gguf_tensors import GgufTensors, packed_bits, rope_tensors, stored_dtype
from headrace.models.weights.head_files import WithHeadFiles
from headrace.models.weights.joined_norms import JoinedNorms
from headrace.models.weights.mxfp4 import Mxfp4Files
from headrace.models.weights.quantized_files import QuantizedFiles
from headrace.models.weights.rearranged import Rearranged
from headrace.models.weights.safetensors_files import SafetensorsFiles, read_json, safetensors_paths
from headrace.models.weights.source import WeightSource
from headrace.text.load import load_tokenizer
from headrace.text.source import TextSource

if TYPE_CHECKING:
    from torch import Tensor

_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Checkpoint:
    spec: ModelSpec
    source: Path  # the directory or GGUF file
    text: TextSource
    weights: WeightSource | None  # None: opened with load_format 'random'

    def tensor(self, name: str) -> Tensor:
        """Reads one tensor under its canonical name, as float32."""
        import torch

        if self.weights is None or name not in self.weights.names():
            raise ModelError(f"{self.source} has no tensor {name!r}")
        out = torch.empty(self.weights.shape(name), dtype=torch.float32)
        self.weights.fill(name, out)
        return out

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        names = () if self.weights is None else self.weights.names()
        return ((name, self.tensor(name)) for name in names)


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    load_format: str = "auto",
    progress: Progress | None = None,
    pooling: PoolingChoice = AUTOMATIC,
    hf_overrides: Config | None = None,
) -> Checkpoint:
    """Opens a directory, a GGUF file, a hub id, or the default model, which is fetched on first use. `hf_overrides`
    replace keys of config.json."""
    path = locate(model, revision=revision, load_format=load_format, progress=progress)
    if path.is_file():
        return _open_gguf(path, load_format, pooling, hf_overrides)
    if load_format == "gguf" or (load_format == "auto" and not (path / "config.json").exists()):
        return _open_gguf(_only_gguf(path), load_format, pooling, hf_overrides)
    return _open_directory(path, load_format, pooling, hf_overrides)


def _open_gguf(path: Path, load_format: str, pooling: PoolingChoice, hf_overrides: Config | None) -> Checkpoint:
    if hf_overrides:
        raise ConfigError(f"hf_overrides change a config.json, and {path} is a GGUF file")
    if load_format == "safetensors":
        raise ConfigError(f"load_format 'safetensors' does not fit {path}; leave it at 'auto'")
    file = read_gguf(path)
    shapes = {tensor.name: tensor.shape for tensor in file.tensors.values()}
    encoder = read_encoder(file.metadata, shapes, dtype=stored_dtype(file))
    if encoder is not None:
        pooler = choose_pooler(encoder.config, encoder.spec, pooling, encoder=encoder.family, modules=encoder.modules)
        spec: ModelSpec = replace(encoder.spec, pooler=pooler)
        rotates_pairs = False
    else:
        spec = spec_from_gguf(file.metadata, shapes, rope_tensors=rope_tensors(file), dtype=stored_dtype(file))
        spec = replace(spec, pooler=choose_pooler({}, spec, pooling))
        rotates_pairs = family_of_gguf(file.metadata).gguf_rotates_pairs
    spec = replace(spec, packed_bits=packed_bits(file, spec))
    weights = GgufTensors(file, spec, rotates_pairs=rotates_pairs)
    return Checkpoint(
        spec=spec,
        source=path,
        text=TextSource(gguf_metadata=file.metadata),
        weights=None if load_format == "random" else weights,
    )


def _only_gguf(directory: Path) -> Path:
    paths = sorted(directory.glob("*.gguf"))
    if len(paths) == 1:
        return paths[0]
    if paths:
        names = ", ".join(path.name for path in paths)
        raise ModelError(f"{directory} has {len(paths)} GGUF files ({names}); give the path of one")
    raise ModelError(f"{directory} has no config.json and no GGUF file; a model directory needs one or the other")


def _open_directory(
    directory: Path, load_format: str, pooling: PoolingChoice, hf_overrides: Config | None
) -> Checkpoint:
    config = {**read_json(directory / "config.json"), **(hf_overrides or {})}
    spec = _spec(directory, config, pooling)
    weights: WeightSource | None = None
    if load_format != "random":
        _require_safetensors(directory)
        files = SafetensorsFiles(directory)
        if "text_config" in config:
            spec = replace(spec, tie_embeddings=not has_head(files.names()))
        weights = _weights(directory, config, spec, files)
    return Checkpoint(spec=spec, source=directory, text=TextSource(directory=directory), weights=weights)


def _spec(directory: Path, config: Config, pooling: PoolingChoice) -> ModelSpec:
    modules = read_modules(directory)
    encoder = encoder_of_config(config)
    if encoder is not None:
        spec: ModelSpec = encoder_spec(encoder, config)
    else:
        generation = directory / "generation_config.json"
        spec = spec_from_config(config, read_json(generation) if generation.exists() else None)
    pooler = choose_pooler(
        config,
        spec,
        pooling,
        encoder=encoder,
        modules=modules,
        score_tokens=read_score_tokens(directory),
        activation=read_activation(directory),
        find_token=_token_finder(directory),
    )
    max_len = spec.max_model_len if pooler is None else _max_len(spec, modules)
    return replace(spec, pooler=pooler, max_model_len=max_len)


def _max_len(spec: ModelSpec, modules: SentenceModules | None) -> int:
    """The longest input: that of the model, or less if sentence-transformers truncates before it."""
    stated = None if modules is None else modules.max_seq_len
    return spec.max_model_len if stated is None else min(stated, spec.max_model_len)


def _token_finder(directory: Path) -> Callable[[str], int | None]:
    def find(text: str) -> int | None:
        return load_tokenizer(TextSource(directory=directory)).single_id(text)

    return find


def _weights(directory: Path, config: Config, spec: ModelSpec, files: SafetensorsFiles) -> WeightSource:
    stored = _stored(config, spec)
    is_plain = stored.is_ours and spec.pooler is None
    unpacked = Mxfp4Files(files) if spec.quantization is None else QuantizedFiles(files, spec.quantization)
    weights: WeightSource = files if spec.quantization is None else QuantizedFiles(files, spec.quantization)
    weights = weights if is_plain else Rearranged(JoinedNorms(unpacked), stored, spec)
    folders = {} if spec.pooler is None else {i: layer.folder for i, layer in enumerate(spec.pooler.layers)}
    found = {index: SafetensorsFiles(directory / folder) for index, folder in folders.items() if folder is not None}
    return WithHeadFiles(weights, found) if found else weights


def _stored(config: Config, spec: ModelSpec) -> Stored:
    is_classifier = spec.pooler is not None and spec.pooler.task == "classify"
    encoder = encoder_of_config(config)
    if encoder is not None:
        return stored_encoder(encoder, is_classifier=is_classifier)
    stored = family_of_config(config).stored
    return replace(stored, names={**stored.names, "head.0": "score"}) if is_classifier else stored


def _require_safetensors(directory: Path) -> None:
    if safetensors_paths(directory):
        return
    pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
    if pickles:
        raise UnsupportedModelError(
            f"{directory} has its weights only as pickles ({pickles[0]}), which can run code when read; "
            f"convert them where you trust them: AutoModelForCausalLM.from_pretrained({str(directory)!r})"
            ".save_pretrained(target) of the transformers library writes safetensors"
        )
    raise ModelError(
        f"{directory} has a config.json but no *.safetensors; fetch the weights, or use --load-format random"
    )
