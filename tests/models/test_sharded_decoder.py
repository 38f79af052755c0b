"""Decoders divided over ranks: the logits of every family equal those of transformers, and each rank reads its part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headrace.dist.collectives import StageLink, TensorGroup
from headrace.dist.mesh import Mesh
from headrace.errors import ConfigError
from headrace.models import Decoder, ModelSpec, load_decoder, open_checkpoint
from headrace.models.hub_config import spec_from_config
from headrace.models.shards import Shards, check_divisible, check_stages
from headrace.models.spec import MixtureSpec
from headrace.models.weights.random_weights import RandomWeights
from headrace.models.weights.source import slice_of
from tests import seeds
from tests.dist.ranks import on_ranks
from tests.engine.tiny import FAMILIES as TINY_FAMILIES
from tests.engine.tiny import HYBRIDS, SHAPE
from tests.models.test_more_families import MODELS, build
from tests.models.test_parity import FAMILIES, MAX_LENS, SCHEDULES, SMALL, TEXT_LENS, PagedRun, randomize
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

# What differs between families in how they are divided; the others are combinations of these.
TELLING = (
    "llama, biased",
    "llama, tied, one kv head a query head",
    "llama 4, dense layers, two experts a token",
    "mixtral",
    "phi 3",
    "olmo 2",
    "glm 4",
    "gpt-neox",
    "gpt-2",
    "gemma 3",
    "cohere 2",
)


MORE_FAMILIES = [name for name in MODELS if name != "gemma 3n"]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def save(directory: Path, name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(seeds.seed_of(name))
    model = FAMILIES[name]().float().eval()
    randomize(model)
    model.save_pretrained(directory)
    return model


def load_part(directory: Path, group: TensorGroup, **options: Any) -> Decoder:
    return load_decoder(open_checkpoint(str(directory)), dtype=torch.float32, device="cpu", group=group, **options)


def check_logits(
    directory: Path,
    model: transformers.PreTrainedModel,
    size: int,
    max_len: int | None = None,
    *,
    whole_experts: bool = False,
) -> None:
    vocab_size = model.config.get_text_config().vocab_size
    texts = [torch.randint(vocab_size, (length,)) for length in TEXT_LENS]

    def run(group: TensorGroup) -> PagedRun:
        run = PagedRun(load_part(directory, group, max_len=max_len), texts)
        for step in SCHEDULES["mixed batches"]:
            run.step(step)
        return run

    runs = on_ranks(size, run, whole_experts=whole_experts)
    for text, *parts in zip(texts, *(run.logits for run in runs), strict=True):
        logits = [torch.cat(part) for part in parts]
        assert_logits(logits[0], model, text)
        assert all(torch.equal(each, logits[0]) for each in logits)  # every rank samples the same token


@pytest.mark.parametrize("name", TELLING)
def test_two_ranks_compute_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    check_logits(tmp_path, save(tmp_path, name), 2, MAX_LENS.get(name))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("deepseek v3", 2),
        ("command r+", 2),
        *(
            pytest.param(name, size, marks=pytest.mark.slow)
            for name, size in itertools.product(MORE_FAMILIES, (2, 3))
            if (name, size) not in (("deepseek v3", 2), ("command r+", 2), ("gpt-j", 3))  # gpt-j has two heads
        ),
    ],
)
def test_latents_are_whole_on_every_rank_and_norms_and_slopes_of_heads_are_divided(
    name: str, size: int, tmp_path: Path
) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    check_logits(tmp_path, model, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-vl moe", "qwen2 moe", "olmoe", "phi-3.5 moe", "ernie 4.5 moe", "granite moe with a shared expert"),
        *("glm 4.5", "dots1", "deepseek v2", "deepseek v3", "gpt-oss", "minimax m2"),
    ],
)
def test_more_mixtures_compute_the_logits_of_transformers_with_whole_experts(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    check_logits(tmp_path, model, 2, whole_experts=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_the_logits_of_transformers_on_any_number_of_ranks(
    name: str, size: int, tmp_path: Path
) -> None:
    """Three ranks have uneven heads, widths and vocabularies; of two KV heads, two of them share one."""
    check_logits(tmp_path, save(tmp_path, name), size, MAX_LENS.get(name))


MIXTURES = [name for name in FAMILIES if name.startswith(("llama 4", "mixtral", "qwen3 moe"))]


@pytest.mark.parametrize("name", ["llama 4, dense layers, two experts a token", "mixtral"])
def test_two_ranks_with_whole_experts_compute_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    check_logits(tmp_path, save(tmp_path, name), 2, MAX_LENS.get(name), whole_experts=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name, size in itertools.product(MIXTURES, (2, 3, 4))
        if (name, size) != ("mixtral, sliding window, all experts", 4)  # it has three experts, which is refused
    ],
)
def test_every_mixture_computes_the_logits_of_transformers_with_whole_experts(
    name: str, size: int, tmp_path: Path
) -> None:
    """Three ranks have uneven numbers of experts."""
    check_logits(tmp_path, save(tmp_path, name), size, MAX_LENS.get(name), whole_experts=True)


def test_each_rank_reads_only_its_experts(tmp_path: Path) -> None:
    model = save(tmp_path, "mixtral")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    on_both = sum(p.nbytes for name, p in model.named_parameters() if "norm" in name or name.endswith("gate.weight"))
    read = on_ranks(2, lambda group: load_part(tmp_path, group).num_bytes_read, whole_experts=True)
    assert sum(read) == whole + on_both  # norms and routers
    assert max(read) < 0.52 * whole


def test_each_rank_has_the_units_of_its_keys_in_an_fp8_cache(tmp_path: Path) -> None:
    model = save(tmp_path, "llama, biased")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[layer.self_attn.head_dim :] *= 8.0  # of the second KV head
            layer.self_attn.k_proj.bias[layer.self_attn.head_dim :] *= 8.0
    model.save_pretrained(tmp_path)

    def units_of(decoder: Decoder) -> list[list[float]]:
        caches = decoder.allocate_caches(1, 16, torch.float8_e4m3fn, num_slots=1)
        return [[] if cache.key_units is None else cache.key_units.tolist() for cache in caches]

    whole = units_of(load_decoder(open_checkpoint(str(tmp_path)), dtype=torch.float32))
    parts = on_ranks(2, lambda group: units_of(load_part(tmp_path, group)))
    assert [first + second for first, second in zip(*parts, strict=True)] == whole
    assert all(first < second for first, second in whole)


def test_each_stage_reads_only_its_layers(tmp_path: Path) -> None:
    model = save(tmp_path, "llama, tied, one kv head a query head")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    decoders = [
        load_decoder(
            open_checkpoint(str(tmp_path)),
            dtype=torch.float32,
            stages=StageLink(Mesh(pipeline_rank=stage, pipeline_size=2), None, "gloo"),
        )
        for stage in range(2)
    ]
    table = model.get_input_embeddings().weight
    assert sum(decoder.num_bytes_read for decoder in decoders) == whole + table.nbytes  # tied: on both stages
    assert sum(len(decoder.layers) for decoder in decoders) == model.config.num_hidden_layers
    assert [decoder.head is None for decoder in decoders] == [True, False]


@pytest.mark.parametrize(
    ("size", "message"),
    [(1, "tensor_parallel_size, which is 1"), (16, "8 experts of a layer are less than the tensor_parallel_size=16")],
)
def test_experts_that_cannot_be_divided_are_refused_with_the_numbers(size: int, message: str) -> None:
    mixture = MixtureSpec(layers=(0,), num_experts=8, num_chosen=2, expert_size=64, routing="softmax")
    with pytest.raises(ConfigError, match=message):
        check_divisible(replace(spec_of(), mixture=mixture), size, evenly=False, whole_experts=True)


def test_whole_experts_need_a_mixture() -> None:
    with pytest.raises(ConfigError, match="needs a mixture of experts, and llama has none"):
        check_divisible(spec_of(), 2, evenly=False, whole_experts=True)


def spec_of(**changes: Any) -> ModelSpec:
    config = transformers.LlamaConfig(**SMALL | changes).to_dict() | {"architectures": ["LlamaForCausalLM"]}
    return spec_from_config(config, None)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "queries", "kv"),
    [
        (8, 4, 2, [4, 4], [2, 2]),
        (9, 3, 2, [6, 3], [2, 1]),  # SmolLM2-135M: whole groups of three query heads
        (8, 2, 4, [2, 2, 2, 2], [1, 1, 1, 1]),  # each KV head is on two ranks
        (8, 1, 3, [3, 3, 2], [1, 1, 1]),
        (6, 2, 3, [2, 1, 3], [1, 1, 1]),  # the first KV head is on two ranks
    ],
)
def test_heads_are_divided_in_whole_groups_and_kv_heads_are_copied_where_they_are_too_few(
    num_heads: int, num_kv_heads: int, size: int, queries: list[int], kv: list[int]
) -> None:
    spec = replace(spec_of(), num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16)
    shards = [Shards(spec, Mesh(rank, size)) for rank in range(size)]
    assert [each.spec.num_heads for each in shards] == queries
    assert [each.spec.num_kv_heads for each in shards] == kv
    assert [each.heads.queries.start for each in shards] == [0, *itertools.accumulate(queries)][:-1]


def test_every_element_is_on_one_rank_and_what_is_small_is_on_all() -> None:
    spec = spec_of(attention_bias=True, mlp_bias=True)
    shards = [Shards(spec, Mesh(rank, 2)) for rank in range(2)]
    for name, shape in spec.tensor_shapes().items():
        sizes = [torch.Size(each.part(name).shape(shape)).numel() for each in shards]
        is_copied = "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))
        assert sizes == ([torch.Size(shape).numel()] * 2 if is_copied else [torch.Size(shape).numel() // 2] * 2), name


def test_a_number_of_ranks_that_the_heads_do_not_allow_is_refused_with_the_numbers() -> None:
    spec = spec_of()  # 4 query heads, 2 KV heads
    check_divisible(spec, 4, evenly=True)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8 .* 4 query heads, 2 KV heads, .* evenly: 2, 4"):
        check_divisible(spec, 8, evenly=False)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gemma3n", "not supported for Gemma 3n"), *((family, "layers with a recurrent state") for family in HYBRIDS)],
)
def test_families_that_cannot_be_divided_are_refused_with_the_reason(family: str, reason: str) -> None:
    config_class, model_class, extra = TINY_FAMILIES[family]
    config = config_class(**SHAPE | extra).to_dict() | {"architectures": [model_class.__name__]}
    spec = spec_from_config(config)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size=2 .*{reason}"):
        check_divisible(spec, 2, evenly=False)
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size=2 .*{reason}"):
        check_stages(spec, 2)


def test_uneven_parts_are_refused_where_they_must_be_equal() -> None:
    spec = replace(spec_of(), num_heads=9, num_kv_heads=3)
    check_divisible(spec, 2, evenly=False)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .* 9 query heads, 3 KV heads.*evenly: 3"):
        check_divisible(spec, 2, evenly=True)


def test_each_rank_reads_only_its_part_of_the_files(tmp_path: Path) -> None:
    model = save(tmp_path, "llama")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    read = on_ranks(2, lambda group: load_part(tmp_path, group).num_bytes_read)
    norms = sum(parameter.nbytes for name, parameter in model.named_parameters() if "norm" in name)
    assert sum(read) == whole + norms  # which both ranks have
    assert max(read) < 0.51 * whole


def test_ranks_of_a_fused_transposed_checkpoint_read_their_parts_too(tmp_path: Path) -> None:
    model = save(tmp_path, "gpt-2")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    read = on_ranks(2, lambda group: load_part(tmp_path, group).num_bytes_read)
    on_both = 256 * 64 * 4 + 64 * 4 * 3 * 16  # position embeddings; norms and biases of three layers, at most
    assert whole <= sum(read) < whole + on_both


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_random_weights_are_the_same_on_any_number_of_ranks(name: str) -> None:
    spec = spec_of()
    whole = torch.empty(spec.tensor_shapes()[name])
    RandomWeights(spec, seed=5).fill(name, whole)
    parts = []
    for rank in range(2):
        part = Shards(spec, Mesh(rank, 2)).part(name)
        parts.append(torch.empty(part.shape(whole.shape)))
        RandomWeights(spec, seed=5).fill(name, parts[-1], slice_of(part, whole.shape))
    assert torch.equal(torch.cat(parts, dim=1 if "down" in name else 0), whole)
