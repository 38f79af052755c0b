"""Every family against transformers on tiny random weights: equal logits however the tokens are split into steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.errors import ModelError
from headrace.kernels import ops
from headrace.models import Decoder, load_decoder, open_checkpoint
from headrace.runner.cpu_graphs import StepGraphs
from tests import seeds
from tests.tolerances import assert_logits

pytestmark = pytest.mark.parity

VOCAB_SIZE, BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS = 128, 16, 60, 6
MODEL_FILE = "model.safetensors"
TEXT_LENS = (50, 37, 5)  # of slots 0, 1 and 2
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
NEOX = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256}
GEMMA2 = SMALL | {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 8.0,
}
GEMMA3 = SMALL | {"num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

LLAMA4: dict[str, Any] = SMALL | {
    "num_hidden_layers": 5,
    "head_dim": 32,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "rope_parameters": LLAMA3_ROPE,
}
QWEN3_MOE: dict[str, Any] = SMALL | {
    "head_dim": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}


def longrope(original_max_len: int, rotary_dim: int = 16) -> dict[str, Any]:
    return {
        "original_max_position_embeddings": original_max_len,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": rotary_dim / 16,
            "short_factor": [1.0 + 0.1 * i for i in range(rotary_dim // 2)],
            "long_factor": [2.0 + 0.5 * i for i in range(rotary_dim // 2)],
        },
    }


FAMILIES: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "llama, tied, one kv head a query head": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 4}, tie_word_embeddings=True)
    ),
    "llama, biased": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)
    ),
    "llama 3.1": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE)),
    "llama 4": lambda: transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**LLAMA4)),
    "llama 4, dense layers, two experts a token": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **LLAMA4, interleave_moe_layer_step=2, num_experts_per_tok=2, no_rope_layer_interval=2, attention_bias=True
        )
    ),
    "llama 4, no norms, no growth, layers by name": lambda: transformers.Llama4ForCausalLM(
        transformers.Llama4TextConfig(
            **LLAMA4,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            moe_layers=[0, 3],
            no_rope_layers=[0, 1, 1, 0, 1],
            layer_types=[
                "full_attention",
                "chunked_attention",
                "full_attention",
                "chunked_attention",
                "full_attention",
            ],
        )
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=4)),
    "mixtral, sliding window, all experts": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=3, sliding_window=8)
    ),
    "mistral, sliding window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SMALL, sliding_window=8)
    ),
    "mistral, no window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**SMALL, sliding_window=None, head_dim=32)
    ),
    "ministral": lambda: transformers.MinistralForCausalLM(
        transformers.MinistralConfig(
            **SMALL,
            head_dim=16,
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    ),
    "phi 3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SMALL, sliding_window=8)),
    "phi 3, longer than the original context": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SMALL, **longrope(4))
    ),
    "phi 3, within the original context": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SMALL, **longrope(128))
    ),
    "phi 4, a part of each head rotates": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(**SMALL, tie_word_embeddings=True, **longrope(4, rotary_dim=12))
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
    "qwen2, sliding window, yarn": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**SMALL, **SLIDING, rope_parameters=YARN_ROPE)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SMALL, head_dim=32, tie_word_embeddings=True)
    ),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN3_MOE)),
    "qwen3 moe, weights among the chosen, dense layers": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **QWEN3_MOE, norm_topk_prob=True, mlp_only_layers=[0], use_sliding_window=True, sliding_window=8
        )
    ),
    "smollm 3": lambda: transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**SMALL, no_rope_layer_interval=2)),
    "smollm 3, biased, sliding window": lambda: transformers.SmolLM3ForCausalLM(
        transformers.SmolLM3Config(
            **SMALL,
            no_rope_layers=[0, 1, 1],
            use_sliding_window=True,
            sliding_window=8,
            attention_bias=True,
            tie_word_embeddings=False,
        )
    ),
    "granite": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SMALL, **MULTIPLIERS)),
    "granite, tied": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(
            **SMALL, **MULTIPLIERS | {"residual_multiplier": 2.0}, tie_word_embeddings=True, rms_norm_eps=0.1
        )
    ),
    "olmo 2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL)),
    "olmo 3": lambda: transformers.Olmo3ForCausalLM(
        transformers.Olmo3Config(
            **SMALL | {"num_hidden_layers": 4},
            sliding_window=8,
            rope_parameters={"full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default"}},
        )
    ),
    "glm": lambda: transformers.GlmForCausalLM(transformers.GlmConfig(**SMALL, head_dim=32)),
    "glm 4": lambda: transformers.Glm4ForCausalLM(transformers.Glm4Config(**SMALL, head_dim=32)),
    "glm 4, whole heads rotate, no bias": lambda: transformers.Glm4ForCausalLM(
        transformers.Glm4Config(**SMALL, head_dim=16, partial_rotary_factor=1.0, attention_bias=False)
    ),
    "starcoder 2": lambda: transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**SMALL, sliding_window=8)),
    "starcoder 2, no biases, untied": lambda: transformers.Starcoder2ForCausalLM(
        transformers.Starcoder2Config(**SMALL, use_bias=False, tie_word_embeddings=False)
    ),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**NEOX)),
    "gpt-neox, one half after the other, half of each head rotates": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            **NEOX,
            use_parallel_residual=False,
            hidden_act="gelu_fast",
            attention_bias=False,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        )
    ),
    "gpt-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "gpt-2, other settings": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            **GPT2, n_inner=96, activation_function="gelu", scale_attn_weights=False, tie_word_embeddings=False
        )
    ),
    "phi 2": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL | {"num_key_value_heads": None})),
    "stablelm": lambda: transformers.StableLmForCausalLM(transformers.StableLmConfig(**SMALL)),
    "stablelm, parallel, biased": lambda: transformers.StableLmForCausalLM(
        transformers.StableLmConfig(**SMALL, use_parallel_residual=True, use_qkv_bias=True)
    ),
    "seed oss": lambda: transformers.SeedOssForCausalLM(
        transformers.SeedOssConfig(**SMALL, head_dim=32, attention_out_bias=True)
    ),
    "ernie 4.5": lambda: transformers.Ernie4_5ForCausalLM(
        transformers.Ernie4_5Config(**SMALL, head_dim=32, use_bias=True)
    ),
    "exaone 4": lambda: transformers.Exaone4ForCausalLM(
        transformers.Exaone4Config(**SMALL, sliding_window=8, sliding_window_pattern=2)
    ),
    "exaone 4, no windows": lambda: transformers.Exaone4ForCausalLM(
        transformers.Exaone4Config(**SMALL, sliding_window=None, layer_types=["full_attention"] * 3)
    ),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, logit_scale=0.5)),
    "cohere 2": lambda: transformers.Cohere2ForCausalLM(
        transformers.Cohere2Config(**SMALL, logit_scale=0.5, sliding_window=8, sliding_window_pattern=2)
    ),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**SMALL, head_dim=32)),
    "gemma, biased, untied": lambda: transformers.GemmaForCausalLM(
        transformers.GemmaConfig(**SMALL, head_dim=16, attention_bias=True, tie_word_embeddings=False)
    ),
    "gemma 2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GEMMA2)),
    "gemma 2, no soft caps": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None})
    ),
    "gemma 3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**GEMMA3, rope_parameters=GEMMA3_ROPE)
    ),
    "gemma 3, every other layer global": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(
            **GEMMA3, layer_types=["full_attention", "sliding_attention"] * 3 + ["full_attention"]
        )
    ),
}
MAX_LENS = {"phi 3, within the original context": 128}  # of engines whose context is not the model's

Step = list[tuple[int, int]]  # (slot, number of its next tokens)
SCHEDULES: dict[str, list[Step]] = {
    "one prefill": [[(0, 50)]],
    "prefill in chunks": [[(0, 7)], [(0, 16)], [(0, 27)]],
    "decoding from the cache": [[(0, 20)], *([[(0, 1)]] * 30)],
    "mixed batches": [[(0, 20)], [(1, 30), (0, 1)], [(2, 3), (0, 1), (1, 1)], [(0, 28), (1, 6), (2, 1)], [(2, 1)]],
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matmuls finish before a second thread wakes up."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Pair:
    theirs: transformers.PreTrainedModel
    ours: Decoder


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    torch.manual_seed(seeds.seed_of(request.param))
    directory = tmp_path_factory.mktemp("model")
    theirs = FAMILIES[request.param]().float().eval()
    randomize(theirs)
    theirs.save_pretrained(directory)
    return Pair(theirs=theirs, ours=load(directory, MAX_LENS.get(request.param)))


def randomize(model: transformers.PreTrainedModel) -> None:
    """Fresh models have biases of zero and norms of one, which would hide mistakes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if is_gain(name) else 0.0, 0.2)


def is_gain(name: str) -> bool:
    return name.endswith("weight") and ("norm" in name or ".ln_" in name)


def load(directory: Path, max_len: int | None = None) -> Decoder:
    return load_decoder(open_checkpoint(str(directory)), dtype=torch.float32, device="cpu", max_len=max_len)


class PagedRun:
    """Feeds texts to a decoder step by step, over blocks scattered through a cache that starts as NaN."""

    def __init__(self, decoder: Decoder, texts: list[Tensor]) -> None:
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3))
        self.decoder, self.texts = decoder, texts
        self.done = [0] * len(texts)
        self.logits: list[list[Tensor]] = [[] for _ in texts]
        self.tables = order[: len(texts) * MAX_BLOCKS].view(len(texts), MAX_BLOCKS).int()
        self.caches = decoder.allocate_caches(NUM_BLOCKS + 1, BLOCK_SIZE, num_slots=len(texts))
        for cache in self.caches:
            state = cache.state
            parts = [cache.keys, cache.values, *(() if state is None else (state.conv, state.matrices))]
            for part in parts:
                if part is not None:
                    part.fill_(float("nan"))
        self.steps = StepGraphs(decoder, self.caches, padding_block=NUM_BLOCKS)

    def step(self, step: Step) -> None:
        pieces = [torch.arange(self.done[row], self.done[row] + count) for row, count in step]
        tokens = torch.cat([self.texts[row][piece] for (row, _), piece in zip(step, pieces, strict=True)])
        out = self.steps.logits(tokens, self.layout(step, pieces)).clone()
        for (row, count), part in zip(step, out.split([count for _, count in step]), strict=True):
            self.logits[row].append(part)
            self.done[row] += count

    def layout(self, step: Step, pieces: list[Tensor]) -> ops.StepLayout:
        rows, counts = [row for row, _ in step], [count for _, count in step]
        ends = [self.done[row] + count for row, count in step]
        slot_mapping = [
            self.tables[row, piece // BLOCK_SIZE].long() * BLOCK_SIZE + piece % BLOCK_SIZE
            for row, piece in zip(rows, pieces, strict=True)
        ]
        return ops.StepLayout(
            positions=torch.cat(pieces),
            slot_mapping=torch.cat(slot_mapping),
            query_starts=torch.tensor([0, *counts]).cumsum(0).int(),
            context_lens=torch.tensor(ends, dtype=torch.int32),
            slots=torch.tensor(rows, dtype=torch.int32),
            block_tables=self.tables,
            max_query_len=max(counts),
            max_context_len=max(ends),
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_equal_transformers_however_the_tokens_are_split_into_steps(pair: Pair, schedule: str) -> None:
    texts = [torch.randint(VOCAB_SIZE, (length,)) for length in TEXT_LENS]
    run = PagedRun(pair.ours, texts)
    for step in SCHEDULES[schedule]:
        run.step(step)
    for text, parts in zip(texts, run.logits, strict=True):
        if not parts:
            continue
        expected = assert_logits(torch.cat(parts), pair.theirs, text)
        assert expected.std() > 0.5  # else closeness would mean little


def test_a_sharded_checkpoint_gives_the_same_model(tmp_path: Path) -> None:
    theirs = FAMILIES["qwen2"]().float().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    run = PagedRun(load(tmp_path), [torch.arange(20)])
    run.step([(0, 20)])
    assert_logits(run.logits[0][0], theirs, torch.arange(20))


def test_a_bare_gpt_2_with_its_old_masks_loads(tmp_path: Path) -> None:
    """The first checkpoints omit the model's prefix and contain causal masks besides the weights."""
    theirs = FAMILIES["gpt-2"]().float().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    weights = {name.removeprefix("transformer."): each for name, each in load_file(tmp_path / MODEL_FILE).items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 256, 256), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(weights, tmp_path / MODEL_FILE)
    run = PagedRun(load(tmp_path), [torch.arange(20)])
    run.step([(0, 20)])
    assert_logits(run.logits[0][0], theirs, torch.arange(20))


def test_the_text_model_of_a_llama_4_that_takes_images_is_read_out_of_its_checkpoint(tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision |= dict.fromkeys(("intermediate_size", "vision_output_dim", "projector_input_dim"), 32)
    theirs = transformers.Llama4ForConditionalGeneration(
        transformers.Llama4Config(text_config=LLAMA4, vision_config=vision | {"projector_output_dim": 32})
    ).float().eval()  # fmt: skip
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    names = load_file(tmp_path / MODEL_FILE).keys()
    assert {name.split(".")[0] for name in names} == {"language_model", "vision_model", "multi_modal_projector"}
    run = PagedRun(load(tmp_path), [torch.arange(40)])
    run.step([(0, 40)])
    assert_logits(run.logits[0][0], theirs, torch.arange(40))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("llama 4", "model.layers.1.feed_forward.experts.down_proj", "is for 3 experts; its config says 4"),
        ("phi 3", "model.layers.1.self_attn.qkv_proj.weight", r"\[127, 64\]; its config implies 128 rows"),
        ("gpt-2", "transformer.h.1.mlp.c_fc.weight", r"'model.layers.1.mlp.up_proj.weight' has shape \[256, 63\]"),
        ("gpt-2", "transformer.h.1.attn.c_proj.bias", r"\[63\]; its config implies 64 rows"),
    ],
)
def test_a_stored_tensor_of_another_shape_is_named(name: str, tensor: str, message: str, tmp_path: Path) -> None:
    FAMILIES[name]().save_pretrained(tmp_path)
    weights = load_file(tmp_path / MODEL_FILE)
    weights[tensor] = weights[tensor][:-1].contiguous()
    save_file(weights, tmp_path / MODEL_FILE)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_a_tensor_that_no_weight_of_ours_is_read_from_is_refused(tmp_path: Path) -> None:
    FAMILIES["phi 3"]().save_pretrained(tmp_path)
    weights = load_file(tmp_path / MODEL_FILE)
    save_file(weights | {"model.layers.0.self_attn.qkv_proj.bias": torch.ones(128)}, tmp_path / MODEL_FILE)
    with pytest.raises(ModelError, match=r"'model.layers.0.self_attn.qkv_proj.bias' .*ignored"):
        load(tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_weights_fit_every_family(name: str, tmp_path: Path) -> None:
    FAMILIES[name]().config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    architecture = type(FAMILIES[name]()).__name__
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    checkpoint = open_checkpoint(str(tmp_path), load_format="random")
    decoder = load_decoder(checkpoint, dtype=torch.float32, load_format="random")
    assert decoder.num_bytes == 4 * decoder.spec.num_params == 4 * sum(p.numel() for p in FAMILIES[name]().parameters())


def test_a_decoder_in_bfloat16_gives_logits_near_those_in_float32(tmp_path: Path) -> None:
    FAMILIES["qwen3"]().bfloat16().save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    hidden = torch.randn(4, 64)
    wide, narrow = (load_decoder(checkpoint, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    logits = narrow.logits(hidden.bfloat16())
    shapes = checkpoint.spec.tensor_shapes()
    num_norm_weights = sum(shape[0] for name, shape in shapes.items() if "norm" in name)
    assert checkpoint.spec.dtype == "bfloat16"
    assert narrow.num_bytes == wide.num_bytes // 2 + num_norm_weights * 2  # norms stay in float32
    torch.testing.assert_close(logits.float(), wide.logits(hidden), atol=0.02, rtol=0.05)


@pytest.mark.parametrize(
    "name",
    ["granite", "olmo 2", "glm 4", "starcoder 2", "gpt-neox", "gpt-2", "cohere", "llama 4", "mixtral", "qwen3 moe"],
)
def test_in_bfloat16_we_are_as_near_the_exact_logits_as_transformers(name: str, tmp_path: Path) -> None:
    """What was folded into the weights at load must not lose precision."""
    exact = FAMILIES[name]().float().eval()
    randomize(exact)
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().float()
    texts = torch.arange(40).view(10, 4)
    with torch.no_grad():
        expected = exact(texts).logits
        rounded = exact.bfloat16()
        theirs = rounded(texts).logits
    rounded.save_pretrained(tmp_path)
    run = PagedRun(load_decoder(open_checkpoint(str(tmp_path)), dtype=torch.bfloat16), list(texts))
    run.step([(row, 4) for row in range(10)])
    ours = torch.stack([parts[0] for parts in run.logits])
    # The median of short texts: rounding can send a token to another expert, in our model or in theirs, which changes
    # it and the rest of its text.
    our_error, their_error = ((x - expected).norm(dim=2).div(expected.norm(dim=2)).median() for x in (ours, theirs))
    assert our_error < 1.5 * their_error + 1e-3


def test_gemma_in_bfloat16_rounds_where_transformers_rounds(tmp_path: Path) -> None:
    config = transformers.GemmaConfig(
        **SMALL | {"hidden_size": 72}, head_dim=32
    )  # the root of 72 is not a bfloat16 number
    theirs = transformers.GemmaForCausalLM(config).bfloat16().eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(open_checkpoint(str(tmp_path)), dtype=torch.bfloat16)
    tokens, first = torch.arange(20), theirs.model.layers[0].input_layernorm
    with torch.no_grad():
        embedded = theirs.model.embed_tokens(tokens)
        assert torch.equal(ours.embeddings(tokens), embedded)
        norm = ours.layers[0].attention_norm
        assert norm is not None and torch.equal(norm.plain(embedded), first(embedded))
