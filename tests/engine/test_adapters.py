"""LoRA adapters in the engine: the answers are those of a model whose weights are merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from headrace import LLM, LoRARequest, SamplingParams
from headrace.errors import AdapterError, ConfigError, RequestError
from headrace.types import RequestOutput
from tests.engine.adapters import greedy_logprobs, merged, save_adapter, write_adapter
from tests.engine.tiny import save_model

NUM_TOKENS = 12
# The stop token is never sampled, but makes the length unknown, so that preemption can happen.
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True, stop_token_ids=(10**6,))
LOGPROB_ERROR = 3e-4
PREFIX = [(7 * i) % 300 + 1 for i in range(40)]


@dataclass(frozen=True)
class Adapted:
    """A model with three adapters: other ranks, other targets, another scale."""

    directory: Path
    model: transformers.PreTrainedModel
    paths: dict[str, Path]

    def request(self, name: str | None) -> LoRARequest | None:
        return None if name is None else LoRARequest(name, 1 + list(self.paths).index(name), str(self.paths[name]))

    def expected(self, name: str | None, prompt: list[int]) -> tuple[list[int], list[float]]:
        model = self.model if name is None else merged(self.model, self.paths[name])
        return greedy_logprobs(model, prompt, NUM_TOKENS)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    root = tmp_path_factory.mktemp("adapted")
    model = save_model(root / "model")
    paths = {
        "all": save_adapter(root / "all", model, rank=8, seed=1),
        "small": save_adapter(root / "small", model, rank=3, seed=2, targets=("q_proj", "v_proj"), size=0.3),
        "stable": save_adapter(
            root / "stable", model, rank=5, seed=3, targets=("k_proj", "down_proj"), use_rslora=True
        ),
    }
    return Adapted(root / "model", model, paths)


@pytest.fixture(scope="module")
def llm(adapted: Adapted) -> Iterator[LLM]:
    """Small chunks and a small cache: prompts are chunked, and sequences are preempted."""
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 6, "num_gpu_blocks_override": 14, "max_model_len": 112}
    settings |= {"block_size": 8}
    with LLM(str(adapted.directory), enable_lora=True, **settings) as engine:
        yield engine


def assert_answer(output: RequestOutput, expected: tuple[list[int], list[float]]) -> None:
    tokens, logprobs = expected
    answer = output.outputs[0]
    assert list(answer.token_ids) == tokens
    assert answer.logprobs is not None
    found = [entry.logprob for entry in answer.logprobs]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(logprobs), rtol=0, atol=LOGPROB_ERROR)


def test_a_mixed_batch_gives_the_answers_of_merged_models(llm: LLM, adapted: Adapted) -> None:
    names = [None, "all", "small", "stable", "all", None, "stable", "small"]
    prompts = [[*PREFIX[: 40 * (index % 2)], *range(1, 2 + 5 * index)] for index in range(len(names))]
    preemptions = llm.stats.scheduler.num_preemptions
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        PARAMS,
        lora_request=[adapted.request(name) for name in names],
        use_tqdm=False,
    )
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert_answer(output, adapted.expected(name, prompt))
    assert llm.stats.scheduler.num_preemptions > preemptions, "the cache was meant to be too small"


def test_a_cached_prefix_is_reused_with_its_own_adapter_only(llm: LLM, adapted: Adapted) -> None:
    prompt = [*PREFIX[::-1], 5]
    cached = {}
    for name in (None, "all", None, "all", "small"):
        (output,) = llm.generate(
            {"prompt_token_ids": prompt}, PARAMS, lora_request=adapted.request(name), use_tqdm=False
        )
        assert_answer(output, adapted.expected(name, prompt))
        cached.setdefault(name, []).append(output.num_cached_tokens)
    assert cached == {None: [0, 40], "all": [0, 40], "small": [0]}


def test_an_adapter_that_is_loaded_again_does_not_find_the_blocks_of_its_former_weights(
    llm: LLM, adapted: Adapted
) -> None:
    prompt = [*PREFIX, 77]
    for name in ("all", "small"):
        request = LoRARequest("changing", 9, str(adapted.paths[name]))
        (output,) = llm.generate({"prompt_token_ids": prompt}, PARAMS, lora_request=request, use_tqdm=False)
        assert_answer(output, adapted.expected(name, prompt))
        assert output.num_cached_tokens == 0


@pytest.mark.slow
def test_the_least_recently_used_adapter_makes_room_for_another(adapted: Adapted) -> None:
    with LLM(str(adapted.directory), enable_lora=True, max_loras=2, num_gpu_blocks_override=64) as llm:
        for name in ("all", "small", "all", "stable", "small"):
            prompt = [*PREFIX[:9], 3]
            (output,) = llm.generate(
                {"prompt_token_ids": prompt}, PARAMS, lora_request=adapted.request(name), use_tqdm=False
            )
            assert_answer(output, adapted.expected(name, prompt))
        assert llm.stats.adapters is not None
        assert set(llm.stats.adapters.loaded) == {"stable", "small"}


def test_more_adapters_than_max_loras_answer_one_call(adapted: Adapted) -> None:
    names = ["all", "small", None, "stable", "all", "stable", "small"]
    prompts = [[*PREFIX[: 5 * index], 3] for index in range(len(names))]
    modules = {name: str(adapted.paths[name]) for name in ("all", "small")}
    with LLM(str(adapted.directory), lora_modules=modules, max_loras=1, num_gpu_blocks_override=64) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            PARAMS,
            lora_request=[adapted.request(name) for name in names],
            use_tqdm=False,
        )
        stats = llm.stats.adapters
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert_answer(output, adapted.expected(name, prompt))
    assert stats is not None and set(stats.loaded) == set(adapted.paths) and len(stats.resident) == 1


def test_speculative_decoding_keeps_the_answers_of_adapters(adapted: Adapted) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    settings = {"lora_modules": {"all": str(adapted.paths["all"])}, "num_gpu_blocks_override": 64}
    prompt = [4, 9, 4, 9, 4, 9, 4, 9, 4, 9]
    with LLM(str(adapted.directory), speculative_config=speculative, **settings) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt}] * 2,
            PARAMS,
            lora_request=[adapted.request("all"), None],
            use_tqdm=False,
        )
    for name, output in zip(("all", None), outputs, strict=True):
        assert_answer(output, adapted.expected(name, prompt))


@pytest.mark.parametrize(
    "family",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "falcon_h1", "granite", "glm4")), "phi3"],
)
def test_families_whose_matrices_are_fused_scaled_or_reordered_take_adapters(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", family)
    targets = ("qkv_proj", "gate_up_proj", "q_proj", "k_proj", "v_proj", "o_proj")
    path = save_adapter(tmp_path / "adapter", model, targets=targets, size=0.2, seed=5)
    adapted = Adapted(tmp_path / "model", model, {"all": path})
    with LLM(str(tmp_path / "model"), lora_modules=f"all={path}", num_gpu_blocks_override=64) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": PREFIX[:11]}] * 2,
            PARAMS,
            lora_request=[adapted.request("all"), None],
            use_tqdm=False,
        )
    for name, output in zip(("all", None), outputs, strict=True):
        assert_answer(output, adapted.expected(name, PREFIX[:11]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 17}, "rank 17 is more than max_lora_rank=16"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model_for_weight_conversion"),
        ({"r": 5}, "was the adapter made for another model"),
        ({"r": "four"}, "a rank must be an integer"),
    ],
)
def test_an_adapter_that_would_be_computed_wrongly_is_refused(
    llm: LLM, adapted: Adapted, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = save_adapter(tmp_path, adapted.model, rank=4, targets=("q_proj",), **change)
    with pytest.raises(AdapterError, match=message):
        llm.generate("a", PARAMS, lora_request=LoRARequest("bad", 9, str(path)), use_tqdm=False)
    assert llm.generate("a", PARAMS, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.lora_embedding_A", "no matrix of LoRA"),
        ("model.layers.0.mlp.experts.0.up_proj.lora_A.weight", "experts"),
        ("lm_head.lora_A.weight", "of the head"),
        ("model.layers.7.self_attn.q_proj.lora_A.weight", "no such matrix"),
    ],
)
def test_a_tensor_that_would_be_ignored_is_refused(
    llm: LLM, adapted: Adapted, tmp_path: Path, name: str, message: str
) -> None:
    tensors = {f"base_model.model.{name}": torch.ones(4, 96)}
    if name.endswith("lora_A.weight"):
        tensors[f"base_model.model.{name.replace('lora_A', 'lora_B')}"] = torch.ones(96, 4)
    write_adapter(tmp_path, tensors, {"r": 4, "lora_alpha": 8})
    with pytest.raises(AdapterError, match=message):
        llm.generate("a", PARAMS, lora_request=LoRARequest("bad", 9, str(tmp_path)), use_tqdm=False)


def test_a_truncated_file_a_missing_directory_and_infinite_values_are_refused(
    llm: LLM, adapted: Adapted, tmp_path: Path
) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(AdapterError, match=message):
            llm.generate("a", PARAMS, lora_request=LoRARequest("bad", 9, str(path)), use_tqdm=False)

    refused(tmp_path / "nowhere", "there is no directory")
    path = save_adapter(tmp_path / "cut", adapted.model)
    whole = (path / "adapter_model.safetensors").read_bytes()
    (path / "adapter_model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(path, "cannot be read as safetensors")
    refused(save_adapter(tmp_path / "infinite", adapted.model, size=float("inf")), "not finite")


def test_settings_that_cannot_work_are_refused(adapted: Adapted) -> None:
    path = str(adapted.paths["all"])
    with pytest.raises(ConfigError, match="twice"):
        LLM(str(adapted.directory), lora_modules=[f"a={path}", {"name": "a", "path": path}])
    with pytest.raises(ConfigError, match="not divided over ranks"):
        LLM(str(adapted.directory), enable_lora=True, tensor_parallel_size=2)
    with pytest.raises(RequestError, match="enable_lora=True"), LLM(str(adapted.directory)) as llm:
        llm.generate("a", PARAMS, lora_request=LoRARequest("a", 1, path))
