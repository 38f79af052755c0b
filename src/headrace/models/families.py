"""The model families, one row each, and how a config or a GGUF file finds its row. A new family of a known shape is a
new row in `family_rows_*.py`, with a parity test in tests/models."""

from __future__ import annotations

from difflib import get_close_matches

from headrace.errors import UnsupportedModelError
from headrace.models.family import Config, Family
from headrace.models.family_rows_dense import DENSE
from headrace.models.family_rows_gemma import GEMMA
from headrace.models.family_rows_hybrids import HYBRIDS
from headrace.models.family_rows_llama import LLAMA
from headrace.models.family_rows_mixtures import MIXTURES
from headrace.models.family_rows_qwen import QWEN

FAMILIES: tuple[Family, ...] = (*LLAMA, *QWEN, *GEMMA, *DENSE, *MIXTURES, *HYBRIDS)
GENERATING = frozenset(name for family in FAMILIES for name in family.architectures)  # architectures with an LM head

_UNKNOWN_MIXTURE = ": it is a mixture of experts of a kind that Headrace does not know"
# Keys of config.json that tell why a model is not supported, the first reason that applies.
_REASONS = {
    (
        "linear_num_value_heads",
        "linear_attn_config",
        "mamba_num_heads",
        "mamba_d_state",
        "ssm_state_size",
        "hybrid_override_pattern",
        "rescale_every",
        "time_step_rank",
        "conv_L_cache",
    ): ": it has recurrent layers of a kind that Headrace does not know",
    ("index_topk",): ": it has sparse attention, which is not supported yet",
    ("kv_lora_rank",): ": it has multi-head latent attention in a model of a kind that Headrace does not know",
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): _UNKNOWN_MIXTURE,
}


def family_of_config(config: Config) -> Family:
    names = config.get("architectures") or []
    if not names:
        return _by_model_type(config)
    known = {name: family for family in FAMILIES for name in family.architectures}
    for name in names:
        if (found := next((known[each] for each in (name, *_with_lm_head(name)) if each in known), None)) is not None:
            return found
    raise _unknown("architecture", names[0], list(known), _why_unknown(config))


def _with_lm_head(name: str) -> tuple[str, ...]:
    """Returns what the architecture of the model that generates may be called, for one with another head or none."""
    for ending in POOLING_ENDINGS:
        if name.endswith(ending):
            stem = name.removesuffix(ending)
            return (stem + _ENDING, stem + "LMHeadModel", stem.removesuffix("Text") + _ENDING)
    return ()


def _by_model_type(config: Config) -> Family:
    known = {family.name: family for family in FAMILIES}
    model_type = config.get("model_type")
    if model_type not in known:
        raise _unknown("model_type", model_type, list(known), _why_unknown(config))
    return known[str(model_type)]


def family_of_gguf(metadata: Config) -> Family:
    """Returns the family. If several share the architecture: the one whose mark is set, or else the one without a
    mark."""
    architecture = metadata.get("general.architecture")
    named = [family for family in FAMILIES if architecture in family.gguf_architectures]
    for family in sorted(named, key=lambda family: family.gguf_mark is None):
        mark = None if family.gguf_mark is None else metadata.get(f"{architecture}.{family.gguf_mark}")
        is_marked = bool(mark) if family.gguf_mark_value is None else mark == family.gguf_mark_value
        if family.gguf_mark is None or is_marked:
            return family
    known = dict.fromkeys(name for family in FAMILIES for name in family.gguf_architectures)
    reason = _UNKNOWN_MIXTURE if metadata.get(f"{architecture}.expert_count") else ""
    raise _unknown("GGUF architecture", architecture, list(known), reason)


def _why_unknown(config: Config) -> str:
    """Returns the reason, even inside a multimodal model, where there is a better one than a similar name."""
    inner = config.get("text_config") or {}
    for keys, reason in _REASONS.items():
        if any(config.get(key) or inner.get(key) for key in keys):
            return reason
    return ""


def _unknown(what: str, name: object, known: list[str], reason: str) -> UnsupportedModelError:
    reason = reason or _suggested(str(name), known)
    return UnsupportedModelError(f"{what} {name!r} is not supported{reason} (supported: {', '.join(known)})")


def _suggested(name: str, known: list[str]) -> str:
    """Suggests a known name by what is before the common ending: Mamba is not a misspelt Llama."""
    stems = {each.removesuffix(_ENDING): each for each in known}
    matches = get_close_matches(name.removesuffix(_ENDING), stems, n=1, cutoff=0.75)
    return f", did you mean {stems[matches[0]]!r}?" if matches else ""


_ENDING = "ForCausalLM"
POOLING_ENDINGS = ("ForSequenceClassification", "Model")
