"""Starts an engine without a GPU and without weights, to learn which kernels a start compiles.

The config is resolved for the GPU that is meant, the model is built from its shapes, and the runner goes through its
start and a few steps on meta tensors. Only for a process that does nothing else (`runner/gpu/meta_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.config import EngineConfig
from headrace.engine.drafts import load_draft, open_draft
from headrace.engine.dry_steps import run_steps
from headrace.engine.opening import open_model
from headrace.engine.resolve import resolve_here
from headrace.engine.runners import load_model, measure_step, start_runner
from headrace.engine.settings import Settings
from headrace.hardware import GpuFacts, read_facts
from headrace.models import Checkpoint, ModelSpec
from headrace.startup import ignore_stage

if TYPE_CHECKING:
    from headrace.kernels.gpu.launches import Launch


@dataclass(frozen=True, slots=True)
class DryStart:
    """A start of a config on a GPU, as far as it is known without either weights or the GPU."""

    checkpoint: Checkpoint
    draft: Checkpoint | None
    settings: Settings
    gpu: GpuFacts

    @classmethod
    def of(cls, config: EngineConfig, gpu: GpuFacts) -> DryStart:
        facts = replace(read_facts(), gpu=gpu, num_gpus=1)
        checkpoint = open_model(config)
        draft = open_draft(config, checkpoint.spec, ignore_stage)
        settings = resolve_here(config, checkpoint.spec, facts, None if draft is None else draft.spec)
        return cls(checkpoint, draft, settings, gpu)

    def launches(self, found: Callable[[Launch], None] = lambda launch: None) -> list[Launch]:
        """The different launches of Triton kernels, in their order. `found` gets each of them at once."""
        from headrace.kernels.gpu.architectures import Architecture
        from headrace.runner.gpu.meta_gpu import meta_gpu

        gpu = self.gpu
        with meta_gpu(Architecture(gpu.capability), total_memory=gpu.total_memory, found=found) as launches:
            _start(self.checkpoint, self.draft, self.settings)
        return launches


def _start(checkpoint: Checkpoint, draft: Checkpoint | None, settings: Settings) -> None:
    settings = replace(settings, load_format="auto", cpu_offload_gb=0.0)  # streamed layers launch the same kernels
    checkpoint = replace(checkpoint, spec=with_few_layers(checkpoint.spec, at_least=_num_drafting(settings)))
    decoder = load_model(_without_values(checkpoint), settings, ignore_stage)
    drafting = None if draft is None else load_draft(_without_values(draft), settings)
    measure_step(decoder, settings)
    runner = start_runner(decoder, settings, 0, draft=drafting)
    if checkpoint.spec.pooler is None and not checkpoint.spec.is_encoder:
        run_steps(runner, settings, checkpoint.spec)


def with_few_layers(spec: ModelSpec, *, at_least: int = 1) -> ModelSpec:
    """The model with its first layers only, as many as have all kinds: the others launch the same kernels again. The
    first layer follows no other, and quantizing spares the last one, so there are at least two more than `at_least`."""
    if spec.is_encoder or spec.gemma3n is not None:
        return spec
    kinds = [_layer_kind(spec, index) for index in range(spec.num_layers)]
    num_layers = max(kinds.index(kind) + 1 for kind in set(kinds))
    return replace(spec, num_layers=min(spec.num_layers, max(num_layers, at_least) + 2))


def _layer_kind(spec: ModelSpec, index: int) -> tuple[object, ...]:
    prefix = f"model.layers.{index}."
    shapes = frozenset((name.removeprefix(prefix), shape) for name, shape in spec.layer_shapes(index).items())
    traits = (spec.window_of(index, spec.max_model_len), spec.grows_queries(index), index in spec.ropeless_layers)
    return shapes, spec.rope_of(index), spec.has_mixture(index), spec.has_attention(index), *traits


def _num_drafting(settings: Settings) -> int:
    """Layers that draft tokens, in speculative decoding by the model's own first layers."""
    return 1 if settings.speculation is None else settings.speculation.config.num_layers or 1


def _without_values(checkpoint: Checkpoint) -> Checkpoint:
    from headrace.models.weights.shapes_only import ShapesOnly

    return replace(checkpoint, weights=ShapesOnly(checkpoint.spec))
