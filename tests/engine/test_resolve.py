from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.config import BLOCK_SIZES, EngineConfig
from headrace.engine.memory_budget import GIB, GPU_RUNTIME_BYTES
from headrace.engine.resolve import resolve, resolve_here
from headrace.engine.settings import Settings
from headrace.errors import ConfigError
from headrace.hardware import GpuFacts, MachineFacts
from tests.engine.small_spec import SMALL_SPEC as SPEC

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, kv heads, head_dim, float32, tokens


def facts(free_memory: int = 4 * GIB) -> MachineFacts:
    return MachineFacts(cpu_model="a cpu", num_cores=6, total_memory=8 * GIB, free_memory=free_memory)


GPU = GpuFacts("a gpu", total_memory=100 * GIB, free_memory=99 * GIB, capability=(9, 0), step_memory=2 * GIB)


def on_gpu(gpu: GpuFacts = GPU, **config: object) -> Settings:
    return resolve(EngineConfig(**config), SPEC, replace(facts(), gpu=gpu))  # type: ignore[arg-type]


def settings(*, free_memory: int = 4 * GIB, **config: object) -> Settings:
    return resolve(EngineConfig(**config), SPEC, facts(free_memory))  # type: ignore[arg-type]


def reason(resolved: Settings, name: str) -> str:
    return next(choice.reason for choice in resolved.choices if choice.name == name)


def test_nothing_set_gives_the_models_context_all_cores_and_a_reason_for_each_choice() -> None:
    resolved = settings()
    assert (resolved.max_model_len, resolved.num_threads, resolved.dtype) == (4096, 6, "float32")
    names = [choice.name for choice in resolved.choices]
    assert names == [
        "device",
        "dtype",
        "num_threads",
        "num_blocks",
        "max_num_seqs",
        "max_model_len",
        "max_num_batched_tokens",
    ]
    assert all(choice.reason for choice in resolved.choices)


def test_what_is_set_is_kept_and_said_to_be() -> None:
    resolved = settings(max_num_seqs=7, max_model_len=100, max_num_batched_tokens=64, num_threads=2)
    assert (resolved.max_num_seqs, resolved.max_model_len, resolved.max_num_batched_tokens) == (7, 100, 64)
    assert reason(resolved, "max_num_seqs") == reason(resolved, "max_model_len") == "as set"


def test_the_cache_is_no_larger_than_all_sequences_at_full_length() -> None:
    resolved = settings(max_num_seqs=2)
    assert resolved.num_blocks == 2 * 4096 // 16
    assert "more is never needed" in reason(resolved, "num_blocks")


def test_the_cache_takes_its_share_of_free_memory_less_the_weights() -> None:
    resolved = settings(free_memory=64 * 1024 * 1024, gpu_memory_utilization=0.25)
    assert resolved.num_blocks == (16 * 1024 * 1024 - SPEC.num_params * 4) // BLOCK_BYTES


def test_a_cache_smaller_than_the_context_shortens_the_context() -> None:
    resolved = settings(num_gpu_blocks_override=10)
    assert resolved.max_model_len == 161
    assert reason(resolved, "max_model_len") == "what the KV cache can hold"


def test_a_small_cache_lowers_the_number_of_sequences() -> None:
    resolved = settings(num_gpu_blocks_override=40)
    assert resolved.max_num_seqs == 10
    assert reason(resolved, "max_num_seqs") == "the KV cache holds this many sequences of 64 tokens"


def test_kv_cache_memory_in_bytes_is_honoured() -> None:
    assert settings(kv_cache_memory_bytes=100 * BLOCK_BYTES + 5).num_blocks == 100


def test_a_cache_below_one_block_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=f"less than one block of 16 tokens, which takes {BLOCK_BYTES:,} bytes"):
        settings(kv_cache_memory_bytes=BLOCK_BYTES - 1)


def test_weights_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"weights of .* GiB as float32 .* leave no room for a KV cache: .* may be used"
    ):
        settings(free_memory=SPEC.num_params)


def test_a_context_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=5,000 is more than the model's own context of 4,096"):
        settings(max_model_len=5000)


def test_a_context_beyond_the_cache_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="max_model_len=1,000 needs 999 tokens of KV cache, and there is room for 160"
    ):
        settings(max_model_len=1000, num_gpu_blocks_override=10)


def test_a_budget_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=8 must be at least max_num_seqs=16"):
        settings(max_num_seqs=16, max_num_batched_tokens=8)


def test_a_small_budget_alone_lowers_the_number_of_sequences() -> None:
    assert settings(max_num_batched_tokens=9).max_num_seqs == 9


def test_without_chunked_prefill_the_budget_holds_the_longest_prompt() -> None:
    assert settings(enable_chunked_prefill=False).max_num_batched_tokens == 4096
    with pytest.raises(ConfigError, match="without chunked prefill a prompt must fit in one step"):
        settings(enable_chunked_prefill=False, max_num_batched_tokens=1024)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"device": "cuda"}, "torch sees no CUDA GPU"),
        ({"dtype": "bfloat16"}, "computes in float32"),
        ({"dtype": "int3"}, "dtype must be one of auto, float32"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        ({"gpu_memory_utilization": 1.5}, "above 0 and at most 1"),
        ({"block_sise": 8}, "did you mean 'block_size'"),
    ],
)
def test_what_cannot_be_honoured_is_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**config)


def test_a_gpu_is_taken_when_there_is_one_unless_the_cpu_is_asked_for() -> None:
    assert (on_gpu().device, on_gpu(device="cpu").device) == ("cuda", "cpu")
    assert on_gpu().dtype == "bfloat16"


def test_a_gpus_cache_is_its_share_less_weights_and_the_measured_step() -> None:
    resolved = on_gpu(gpu_memory_utilization=0.5, max_model_len=4096, max_num_seqs=1024)
    room = 50 * GIB - SPEC.num_params * 2 - 2 * GIB - GPU_RUNTIME_BYTES
    assert resolved.num_blocks == min(room // (BLOCK_BYTES // 2), 1024 * 4096 // 16)


def test_gpu_memory_of_other_processes_is_not_taken() -> None:
    small = replace(GPU, total_memory=8 * GIB, free_memory=4 * GIB)
    resolved = on_gpu(small, max_num_seqs=16_384, max_num_batched_tokens=16_384)
    assert resolved.num_blocks == (4 * GIB - SPEC.num_params * 2 - 2 * GIB - GPU_RUNTIME_BYTES) // (BLOCK_BYTES // 2)
    assert "other processes have left" in reason(resolved, "num_blocks")


@pytest.mark.parametrize(
    ("hidden_size", "num_blocks", "expected"),
    [(2048, 65_535, 1024), (3072, 65_536, 1024), (3072, 65_535, 704), (4096, 65_535, 512), (8192, 65_535, 512)],
)
def test_a_gpu_runs_as_many_sequences_as_fill_its_processors_or_as_the_cache_holds(
    hidden_size: int, num_blocks: int, expected: int
) -> None:
    spec, config = replace(SPEC, hidden_size=hidden_size), EngineConfig(num_gpu_blocks_override=num_blocks)
    assert resolve(config, spec, replace(facts(), gpu=GPU)).max_num_seqs == expected


def test_fp8_halves_the_layers_and_the_cache() -> None:
    small = replace(GPU, total_memory=10 * GIB)
    plain = on_gpu(small, max_num_seqs=16_384, max_num_batched_tokens=16_384)
    half = on_gpu(small, max_num_seqs=16_384, max_num_batched_tokens=16_384, kv_cache_dtype="fp8", quantization="fp8")
    down, rows = 64 * 128, 2 * (64 + 32 + 32 + 64 + 128 + 128) + 64  # of matrices with scales
    copy = 64 * (128 + 4)  # in INT8: the last down projection stays as it is
    saved = SPEC.num_linear_params - down - 4 * rows - copy
    allowed = int(10 * GIB * 0.92) - 2 * GIB - GPU_RUNTIME_BYTES
    assert plain.num_blocks == (allowed - 2 * SPEC.num_params) // (BLOCK_BYTES // 2)
    assert half.num_blocks == (allowed - 2 * SPEC.num_params + saved) // (BLOCK_BYTES // 4)
    assert (half.kv_dtype, half.dtype, half.quantization) == ("float8_e4m3fn", "bfloat16", "fp8")


def test_fp8_weights_are_refused_on_a_cpu() -> None:
    with pytest.raises(
        ConfigError, match=r"needs a GPU: a CPU computes in float32 or INT8, with weights in .* four bits"
    ):
        settings(quantization="fp8")


@pytest.mark.parametrize(("wish", "dtype", "size"), [("float16", "float16", 2), ("fp8", "float8_e4m3fn", 1)])
def test_a_narrower_cache_of_a_cpu_holds_more_tokens(wish: str, dtype: str, size: int) -> None:
    narrow, wide = settings(max_num_seqs=10_000, kv_cache_dtype=wish), settings(max_num_seqs=10_000)
    assert (wide.kv_dtype, narrow.kv_dtype) == ("float32", dtype)
    assert narrow.num_blocks // wide.num_blocks == 4 // size
    assert "the tokens of float32" in reason(narrow, "kv_cache_dtype")


@pytest.mark.parametrize("wish", ["float16", "fp8"])
def test_a_narrower_cache_is_refused_on_a_cpu_without_the_instructions_for_it(wish: str) -> None:
    machine = replace(facts(), multiplies_packed=False)
    with pytest.raises(ConfigError, match=f"kv_cache_dtype='{wish}' needs a GPU or x86 with AVX2"):
        resolve(EngineConfig(kv_cache_dtype=wish), SPEC, machine)  # type: ignore[arg-type]
    assert resolve(EngineConfig(kv_cache_dtype="float32"), SPEC, machine).kv_dtype == "float32"


def test_cache_types_that_a_device_does_not_have_are_refused() -> None:
    with pytest.raises(ConfigError, match="'bfloat16' is not supported on a CPU; use 'float32' or 'float16' or 'fp8'"):
        settings(kv_cache_dtype="bfloat16")
    for wish in ("float32", "float16"):
        with pytest.raises(ConfigError, match="on a GPU that computes in bfloat16; use 'bfloat16' or 'fp8'"):
            on_gpu(kv_cache_dtype=wish)
    assert on_gpu(kv_cache_dtype="bfloat16").kv_dtype == "bfloat16"


@pytest.mark.parametrize("wish", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}])
def test_fp8_is_refused_on_a_gpu_without_hardware_for_it(wish: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"compute capability 8\.9 or more, and a gpu has 8\.0"):
        on_gpu(replace(GPU, capability=(8, 0)), **wish)


def test_quantized_gemms_compute_in_bfloat16() -> None:
    with pytest.raises(ConfigError, match="set dtype='bfloat16'"):
        on_gpu(quantization="fp8", dtype="float16")
    with pytest.raises(ConfigError, match="quantization must be one of fp8, int8, int4, got 'int3'"):
        EngineConfig(quantization="int3")  # type: ignore[arg-type]


def test_sequences_join_a_full_gpu_several_at_a_time() -> None:
    assert on_gpu().min_free_slots_to_start == 32
    assert settings().min_free_slots_to_start == 1


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"block_size": 7},
            "block_size=7 is not one of 1, 2, 4, 8, 16, 32, 64, 128, 256: kernels are made for powers of two",
        ),
        ({"block_size": 24}, "block_size=24 is not one of"),
        ({"block_size": 512}, "block_size=512 is not one of"),
        ({"max_num_seqs": 16_385}, "max_num_seqs=16,385 is more than 16,384: each sequence needs a row of logits and"),
        ({"num_threads": 49}, "num_threads=49 is more than 8 for each of the 6 cores"),
    ],
)
def test_values_outside_of_their_range_are_refused_with_the_reason(wish: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**wish)


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_block_sizes_in_the_range_are_taken(size: int) -> None:
    assert settings(block_size=size).block_size == size


def test_blocks_smaller_than_a_vector_are_warned_about_on_a_cpu() -> None:
    assert settings(block_size=8).warnings == ()
    (warning,) = settings(block_size=4).warnings
    assert warning.startswith("block_size=4 is less than the 8 keys that a CPU reads at once")
    assert on_gpu(block_size=4).warnings == ()


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        (
            {"num_gpu_blocks_override": 8 * GIB // BLOCK_BYTES},
            "num_gpu_blocks_override=1,048,576 is a KV cache of 8.0 GiB; .* does not fit into 8.0 GiB of memory",
        ),
        ({"kv_cache_memory_bytes": 10**15}, "kv_cache_memory_bytes=1,000,000,000,000,000 is a KV cache of 931,322.6"),
    ],
)
def test_a_cache_that_memory_cannot_hold_is_refused_at_a_start(wish: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_here(EngineConfig(**wish), SPEC, facts())  # type: ignore[arg-type]
    assert settings(**wish).num_blocks > 0  # a plan for several GPUs


def test_a_cache_that_just_fits_is_taken_at_a_start() -> None:
    num_blocks = (8 * GIB - 4 * SPEC.num_params) // BLOCK_BYTES
    assert resolve_here(EngineConfig(num_gpu_blocks_override=num_blocks), SPEC, facts()).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.95, None),
        (0.97, "gpu_memory_utilization=0.97 leaves 3.0 GiB of 100.0 GiB for the CUDA context"),
        (1.0, "gpu_memory_utilization=1 leaves 0.0 GiB"),
    ],
)
def test_a_memory_share_that_leaves_little_is_warned_about(share: float, message: str | None) -> None:
    found = on_gpu(gpu_memory_utilization=share).warnings
    assert len(found) == (message is not None)
    assert not any("out of memory" in warning for warning in found)  # these words in a log mean a failure
    assert message is None or (found[0].startswith(message) and "lower it to 0.95 or less (default: 0.92)" in found[0])


def test_on_a_cpu_the_share_is_of_free_memory() -> None:
    assert settings(gpu_memory_utilization=0.95).warnings == ()
    (warning,) = settings(gpu_memory_utilization=0.975).warnings
    assert warning.startswith("gpu_memory_utilization=0.975 leaves 0.1 GiB of 4.0 GiB free memory for everything else")


@pytest.mark.parametrize("sized", [{"num_gpu_blocks_override": 64}, {"kv_cache_memory_bytes": 64 * BLOCK_BYTES}])
def test_a_memory_share_without_effect_is_warned_about(sized: dict[str, int]) -> None:
    (warning,) = settings(gpu_memory_utilization=0.97, **sized).warnings
    assert warning.startswith(f"gpu_memory_utilization=0.97 has no effect: {next(iter(sized))} sets the size")


def test_more_sequences_than_the_cache_holds_are_warned_about() -> None:
    assert settings(max_num_seqs=16, num_gpu_blocks_override=64).warnings == ()  # 16 sequences of 64 tokens
    (warning,) = settings(max_num_seqs=17, num_gpu_blocks_override=64).warnings
    assert warning.startswith("max_num_seqs=17 is more than the KV cache holds: 16 sequences of 64 tokens")
    assert "set 16 or less" in warning


def test_slots_that_take_much_memory_are_warned_about() -> None:
    each = 2 * 4 * SPEC.vocab_size + 4 * 4096 + 4 * 4096 // 16  # logits twice, token ids, block numbers
    free = 100 * 2 * 10 * each  # half of it may be used, and a tenth of that is for 100 slots
    sized = {"num_gpu_blocks_override": 6400, "max_num_seqs": 100}
    assert settings(free_memory=free, **sized).warnings == ()
    (warning,) = settings(free_memory=free * 99 // 100, **sized).warnings
    assert warning.startswith("max_num_seqs=100 takes 0.0 GiB for logits and tables") and "10% of the memory" in warning


def test_more_threads_than_cores_are_warned_about() -> None:
    assert settings(num_threads=6).warnings == ()
    (warning,) = settings(num_threads=7).warnings
    assert warning.startswith("num_threads=7 is more than the 6 cores that this process may use")
    assert on_gpu(num_threads=7).warnings == ()


def test_automatic_settings_are_never_warned_about() -> None:
    for free_memory in (64 * 1024 * 1024, GIB, 64 * GIB):
        assert settings(free_memory=free_memory).warnings == ()
    assert on_gpu().warnings == ()


def on_gpus(num_gpus: int, **config: object) -> Settings:
    return resolve(EngineConfig(**config), SPEC, replace(facts(), gpu=GPU, num_gpus=num_gpus))  # type: ignore[arg-type]


def test_ranks_have_their_part_of_weights_and_kv_heads() -> None:
    """The same memory of each GPU holds about twice the tokens: half of the KV heads, half of the weights."""
    sizes = {"max_num_seqs": 8192, "gpu_memory_utilization": 0.04, "block_size": 16}
    one, two = (on_gpus(2, tensor_parallel_size=size, **sizes) for size in (1, 2))
    assert two.tensor_parallel_size == 2
    assert 1.9 * one.num_blocks < two.num_blocks
    assert "2 of 4 query heads and 1 of 2 KV heads" in reason(two, "tensor_parallel_size")


def test_more_ranks_than_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 needs 2 GPUs, .* may use 1; .*CUDA_VISIBLE_DEVICES"):
        on_gpus(1, tensor_parallel_size=2)


def test_ranks_that_the_heads_do_not_allow_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=8 does not divide the model: 4 query heads, 2 KV heads"
    ):
        settings(tensor_parallel_size=8)


def test_ranks_on_a_cpu_divide_its_threads_and_memory_and_are_warned_about() -> None:
    one, two = settings(tensor_parallel_size=1), settings(tensor_parallel_size=2)
    assert (two.num_threads, two.threads_per_rank) == (6, 3)
    assert "3 for each of 2 ranks" in reason(two, "num_threads")
    assert one.warnings == ()
    (warning,) = two.warnings
    assert "6 sums over the ranks are predicted to add 2.6 ms to each decode step" in warning
    assert "on one CPU it is for tests" in warning


def test_a_small_model_on_several_gpus_is_warned_about_with_the_predicted_time() -> None:
    (warning,) = on_gpus(2, tensor_parallel_size=2).warnings
    assert "6 sums over the ranks take 0.1 ms; 2 engines with tensor_parallel_size=1" in warning
    large = replace(SPEC, hidden_size=8192, intermediate_size=28_672, num_layers=2, num_heads=64, head_dim=128)
    config = EngineConfig(tensor_parallel_size=2)
    assert resolve(config, large, replace(facts(), gpu=GPU, num_gpus=2)).warnings == ()


def test_each_node_has_its_part_of_the_ranks_and_of_its_own_memory() -> None:
    one, two = (settings(pipeline_parallel_size=2, nnodes=count, max_num_seqs=64) for count in (1, 2))
    assert (one.ranks_per_node, two.ranks_per_node) == (2, 1)
    assert [list(two.ranks_of_node(node)) for node in (0, 1)] == [[0], [1]]
    assert two.threads_per_rank == 2 * one.threads_per_rank
    assert reason(two, "nnodes") == "as set: each node has 1 of 2 ranks"
    assert on_gpus(1, pipeline_parallel_size=2, nnodes=2).device == "cuda"  # one GPU on each node


def test_ranks_that_do_not_divide_over_the_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="nnodes=3 does not divide the 2 ranks of pipeline_parallel_size=2"):
        settings(pipeline_parallel_size=2, nnodes=3)
    with pytest.raises(ConfigError, match=r"node_rank=1 hosts ranks .* headrace serve MODEL --headless --node-rank 1"):
        settings(pipeline_parallel_size=2, nnodes=2, node_rank=1)
    with pytest.raises(ConfigError, match="node_rank must be an integer from 0 to 1, got 2"):
        settings(pipeline_parallel_size=2, nnodes=2, node_rank=2)


def test_sums_over_the_network_are_warned_about() -> None:
    warnings = settings(tensor_parallel_size=2, nnodes=2).warnings
    assert any("tensor_parallel_size=2 is over several nodes" in warning for warning in warnings)


def test_a_gpu_without_free_memory_is_no_problem_where_all_sizes_are_set() -> None:
    full = replace(GPU, free_memory=0)
    assert on_gpu(full, num_gpu_blocks_override=8, max_num_seqs=2).num_blocks == 8


def test_a_gpu_older_than_the_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a gpu has compute capability 7\.5, and the kernels need 8\.0"):
        on_gpu(replace(GPU, capability=(7, 5)))
