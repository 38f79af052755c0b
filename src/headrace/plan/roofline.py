"""Seconds of each step from what it reads and computes: a roofline with a few fitted constants.

    GEMMs       weights read once per step against FLOPs of the step's tokens, whichever takes longer
    attention   FLOPs of prompts
    cache       keys and values that decoding sequences read, at the memory's bandwidth
    other       activations of norms, RoPE and MLPs; sampling; gaps between kernels
    network     all-reduces of tensor parallelism
    bus         copies of streamed layers from host memory, as far as nothing else hides them
    host        what the host adds: launching prompts kernel by kernel, requests

Tensor parallelism divides weights, FLOPs and cache reads by the number of GPUs. With whole experts on each GPU, the one
whose experts are chosen most often decides (`imbalance`); that slices of an expert make narrow GEMMs is not modelled.
In a pipeline of p stages each stage works on its own p-th of the batch: a step of all of them takes as long as a whole
model takes for a p-th of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.plan.constants import FEW_ROWS, Constants
from headrace.plan.gpus import Gpu
from headrace.plan.precision import Precision
from headrace.plan.shape import ModelShape
from headrace.plan.simulate import FloatArray, Steps

EAGER_LAYER_SECONDS = 0.7e-3  # as runner/gpu/graph_sizes.py: host time to launch a layer kernel by kernel
MAX_GRAPH_TOKENS = 2048  # larger steps with prompts are launched kernel by kernel
SMOOTHNESS = 3.0  # of the corner between the two sides of the roofline
LINK_LATENCY_SECONDS = {"NVLink": 8e-6, "Infinity Fabric": 12e-6, "PCIe": 30e-6}
LINK_EFFICIENCY = 0.75
PIPELINE_LOSS = 0.1  # assumed share of time that stages wait for each other; not measured
NODE_BANDWIDTH = 25e9  # bytes/s between nodes: a network of 200 Gbit/s per GPU


@dataclass(frozen=True, slots=True)
class Machine:
    """What a model runs on: a GPU, how many of them, and the constants of the engine there."""

    gpu: Gpu
    constants: Constants
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    whole_experts: bool = False  # tensor ranks divide the experts, not the matrices of each
    streamed_bytes: int = 0  # of weights, which every step copies to each GPU

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """One row per step, split by what takes the time."""

    gemm: FloatArray
    attention: FloatArray
    cache: FloatArray
    other: FloatArray
    network: FloatArray
    bus: FloatArray
    host: FloatArray

    @property
    def total(self) -> FloatArray:
        return self.gemm + self.attention + self.cache + self.other + self.network + self.bus + self.host


def step_seconds(steps: Steps, shape: ModelShape, precision: Precision, machine: Machine) -> StepSeconds:
    """Seconds of every step."""
    stages = machine.pipeline_parallel
    tokens, sampled = steps.tokens / stages, steps.sampled / stages
    gemm = _linear(tokens, shape, precision, machine) + _head(sampled, shape, precision, machine)
    attention = _prefill_attention(steps, shape, machine) / stages
    cache = _cache(steps, shape, precision, machine) / stages
    other = _other(tokens, steps, shape, precision, machine)
    network = _network(tokens, shape, machine)
    if stages > 1:
        network = network + PIPELINE_LOSS * (gemm + attention + cache + other)
    on_device = gemm + attention + cache + other + network
    bus = _bus(on_device, shape, machine)
    is_eager = steps.prefill_tokens > MAX_GRAPH_TOKENS
    launching = np.where(is_eager, shape.num_layers * EAGER_LAYER_SECONDS, 0.0)
    host = np.maximum(launching - on_device - bus, 0.0)
    if machine.gpu.is_cpu:
        host = np.zeros_like(host)
    return StepSeconds(gemm, attention, cache, other, network, bus, host)


def experts_hit(tokens: FloatArray, num_experts: int, num_chosen: int) -> FloatArray:
    """Expected share of a layer's experts that at least one of the tokens chooses, if all are equally likely."""
    return np.asarray(1.0 - (1.0 - num_chosen / num_experts) ** tokens)


def imbalance(count: FloatArray, num_ranks: int) -> FloatArray:
    """How much more than its share the fullest of so many ranks has, if `count` things are spread at random: the usual
    estimate of the largest of several normal variables. The other ranks wait for it."""
    more = np.sqrt(2.0 * np.log(num_ranks) * (num_ranks - 1) / np.maximum(count, 1.0))
    return np.asarray(np.minimum(1.0 + more, num_ranks))


def _linear(tokens: FloatArray, shape: ModelShape, precision: Precision, machine: Machine) -> FloatArray:
    moe = shape.experts
    read = np.full(len(tokens), shape.linear_params * precision.linear_bytes)
    flops = 2.0 * shape.linear_params * tokens
    if moe is not None:
        hit = experts_hit(tokens, moe.num_experts, moe.num_chosen)
        num_ranks = machine.tensor_parallel if machine.whole_experts else 1
        read = read + shape.expert_params * precision.linear_bytes * hit * imbalance(hit * moe.num_experts, num_ranks)
        # Counted as more work at the rate of dense GEMMs.
        chosen = 2.0 * moe.num_layers * moe.num_chosen * moe.params_each * tokens
        chosen = chosen * imbalance(tokens * moe.num_chosen, num_ranks)
        flops = flops + chosen / machine.constants.mixture_gemm
    constants = machine.constants
    many = constants.weight_reads_fp8 if precision.weights in ("fp8", "int8") else constants.weight_reads
    share = np.where(_has_few(tokens, shape, precision), constants.few_weight_reads, many)
    return _corner(read, flops, _gemm_rate(precision, shape, machine), share, machine) * (tokens > 0)


def _has_few(tokens: FloatArray, shape: ModelShape, precision: Precision) -> FloatArray:
    """Whether the kernels for few rows compute a step. Experts in eight bits have none."""
    has_kernels = not (shape.has_mixture and precision.is_quantized)
    return np.asarray((tokens <= FEW_ROWS) & has_kernels)


def _head(sampled: FloatArray, shape: ModelShape, precision: Precision, machine: Machine) -> FloatArray:
    has_copy = precision.is_quantized and not machine.gpu.is_cpu  # in INT8
    read = shape.head_params * np.where((sampled <= FEW_ROWS) & has_copy, 1.0, precision.head_bytes)
    rate = machine.gpu.bf16_rate * machine.constants.gemm
    flops = 2.0 * shape.head_params * sampled
    return _corner(read, flops, rate, machine.constants.weight_reads, machine) * (sampled > 0)


def _gemm_rate(precision: Precision, shape: ModelShape, machine: Machine) -> float:
    constants = machine.constants
    share = constants.gemm_fp8 if precision.weights in ("fp8", "int8") else constants.gemm
    return precision.rate(machine.gpu) * share / (1.0 + constants.narrow / shape.hidden_size)


def _corner(
    read: FloatArray, flops: FloatArray, rate: float, share: FloatArray | float, machine: Machine
) -> FloatArray:
    """Near the corner of the roofline neither side hides the other completely."""
    in_memory = read / (machine.gpu.bandwidth * share)
    in_flops = flops / rate
    joint: FloatArray = (in_memory**SMOOTHNESS + in_flops**SMOOTHNESS) ** (1.0 / SMOOTHNESS)
    return joint / machine.tensor_parallel


def _prefill_attention(steps: Steps, shape: ModelShape, machine: Machine) -> FloatArray:
    prompts = np.maximum(steps.prompts, 1)
    mean_context = (steps.prefill_context + steps.prefill_tokens) / prompts
    flops = 4.0 * shape.num_layers * shape.attention_width * steps.pairs * _window_shares(shape, mean_context)
    rate = machine.gpu.bf16_rate * machine.constants.prefill_attention
    return np.asarray(flops / rate / machine.tensor_parallel)


def _cache(steps: Steps, shape: ModelShape, precision: Precision, machine: Machine) -> FloatArray:
    mean_context = steps.context_tokens / np.maximum(steps.decode_seqs, 1)
    token_bytes = shape.kv_elements_per_token * precision.cache_bytes
    read = steps.context_tokens * token_bytes * _window_shares(shape, mean_context)
    read = read + (steps.prefill_context + steps.tokens) * token_bytes
    # Heads that do not divide are copied: a GPU then holds and reads at least one key-value head.
    split = min(machine.tensor_parallel, shape.num_kv_heads)
    seconds = read / (machine.gpu.bandwidth * machine.constants.cache_reads) / split
    # A decode step reads and writes the whole recurrent state of each sequence.
    seconds = seconds + 2.0 * steps.decode_seqs * shape.state_bytes / machine.gpu.bandwidth
    fixed = steps.decode_seqs * shape.num_layers * machine.constants.seq_layer_seconds / machine.tensor_parallel
    return np.asarray(seconds + fixed)


def _window_shares(shape: ModelShape, mean_context: FloatArray) -> FloatArray:
    """Share of the contexts that lies within the windows of the layers."""
    if not shape.windows:
        return np.ones_like(mean_context)
    sizes: FloatArray = np.array([window or np.inf for window in shape.windows])
    kinds, counts = np.unique(sizes, return_counts=True)
    shares = np.minimum(1.0, kinds[None, :] / np.maximum(mean_context, 1.0)[:, None])
    return np.asarray(shares @ counts / len(sizes))


def _other(tokens: FloatArray, steps: Steps, shape: ModelShape, precision: Precision, machine: Machine) -> FloatArray:
    constants, gpu = machine.constants, machine.gpu
    # Norms read and write the residual stream twice a layer, RoPE the queries and keys, the MLP its activations.
    elements = shape.num_layers * (8 * shape.hidden_size + 3 * shape.q_size + 2 * shape.kv_size + 3 * shape.mlp_width)
    factor = constants.activations + (constants.quantize if precision.weights in ("fp8", "int8") else 0.0)
    traffic = tokens * elements * precision.plain_bytes * factor / gpu.bandwidth / machine.tensor_parallel
    logits = steps.sampled * shape.vocab_size * 2 * precision.plain_bytes / gpu.bandwidth
    is_few = _has_few(tokens, shape, precision)
    if precision.is_quantized:
        few = constants.packed_layer_seconds + constants.packed_row_seconds * tokens
    else:
        few = np.where(tokens <= 1, constants.one_layer_seconds, constants.few_layer_seconds)
    layers = np.where(is_few, few, constants.layer_seconds)
    fixed = constants.step_seconds + shape.num_layers * layers
    if shape.experts is not None:
        routing = np.where(is_few, constants.few_mixture_layer_seconds, constants.mixture_layer_seconds)
        fixed = fixed + shape.experts.num_layers * routing
    return np.asarray(traffic + logits / machine.num_gpus + fixed)


def _bus(on_device: FloatArray, shape: ModelShape, machine: Machine) -> FloatArray:
    """Copies overlap with all computation but that of the last layer. Each stage copies its layers for every p-th of
    the batch."""
    if not machine.streamed_bytes:
        return np.zeros_like(on_device)
    copies = machine.pipeline_parallel * machine.streamed_bytes / machine.gpu.host_link.copy_bytes_per_s
    return np.maximum(copies + on_device / shape.num_layers - on_device, 0.0)


def _network(tokens: FloatArray, shape: ModelShape, machine: Machine) -> FloatArray:
    """Two all-reduces of the residual stream per layer, and its transfer between stages."""
    gpu, size = machine.gpu, machine.tensor_parallel
    seconds = np.zeros_like(tokens)
    message = tokens * shape.hidden_size * 2
    if size > 1:
        latency = LINK_LATENCY_SECONDS.get(gpu.link, 30e-6)
        each = latency + 2 * (size - 1) / size * message / (gpu.link_bandwidth * LINK_EFFICIENCY)
        seconds = seconds + 2 * shape.num_layers * each
    if machine.pipeline_parallel > 1:
        seconds = seconds + machine.pipeline_parallel * (50e-6 + message / (NODE_BANDWIDTH * LINK_EFFICIENCY))
    return np.asarray(seconds)
