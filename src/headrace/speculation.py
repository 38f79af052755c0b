"""The settings of speculative decoding: which method drafts tokens, and how many.

`speculative_config` has vLLM's keys. `speculative_model` and `num_speculative_tokens` are short forms of two of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, get_args

from headrace.errors import ConfigError, nearest

Method = Literal["ngram", "draft_model", "early_exit"]

DEFAULT_TOKENS = 4
DEFAULT_LOOKUP = (2, 4)  # shortest and longest n-gram
MAX_TOKENS = 64
_KEYS = (
    *("method", "model", "revision", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"),
    *("num_layers", "draft_tensor_parallel_size"),
)
_KEYS_OF: dict[Method, tuple[str, ...]] = {  # those that only one method has
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "draft_model": ("revision", "draft_tensor_parallel_size"),
    "early_exit": ("num_layers",),
}
_NGRAM_MODELS = ("ngram", "[ngram]")  # older versions of vLLM take these in the place of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What the user asked for, checked and complete."""

    method: Method
    num_tokens: int = DEFAULT_TOKENS  # most drafted tokens of a sequence in one step
    lookup_min: int = DEFAULT_LOOKUP[0]  # shortest n-gram that is looked up
    lookup_max: int = DEFAULT_LOOKUP[1]
    model: str | None = None  # of `draft_model`
    revision: str | None = None
    draft_tensor_parallel_size: int | None = None  # None: that of the model, which is the only one that is supported
    num_layers: int | None = None  # of `early_exit`: the model's first layers, which draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The same with what `resolve` knows of the device. A step of n rows is taken to cost 1 + n / free_rows."""

    config: SpeculativeConfig
    max_seqs: int  # with more decoding sequences nothing is drafted
    max_rows: int  # of a step that verifies drafts
    free_rows: float  # rows whose computation takes as long as all that a step does once
    draft_cost: float = 0.0  # of drafting one token of each sequence, in steps of one row
    wait_cost: float = 0.0  # of a step that is not submitted ahead of the one before, likewise

    def waiting_tokens(self, num_seqs: int) -> float:
        """How many tokens so many sequences would get in the time that waiting takes."""
        step_cost = (1.0 + num_seqs / self.free_rows) / (1.0 + 1.0 / self.free_rows)
        return self.wait_cost * num_seqs / step_cost

    @property
    def drafts_on_device(self) -> bool:
        return self.config.method != "ngram"


def speculative_config(
    given: Mapping[str, Any] | None, model: str | None = None, num_tokens: int | None = None
) -> SpeculativeConfig | None:
    """Join `speculative_config` with its short forms; None if speculation is off."""
    values = _joined({} if given is None else given, model, num_tokens)
    if not values or values.get("num_speculative_tokens") == 0:
        return None
    method = _method(values)
    _check_keys(values, method)
    lookup_min, lookup_max = _lookup(values)
    return SpeculativeConfig(
        method=method,
        num_tokens=_number(values, "num_speculative_tokens", DEFAULT_TOKENS, MAX_TOKENS),
        lookup_min=lookup_min,
        lookup_max=lookup_max,
        model=str(values["model"]) if method == "draft_model" else None,
        revision=values.get("revision"),
        draft_tensor_parallel_size=_number(values, "draft_tensor_parallel_size", None, 1 << 20),
        num_layers=_number(values, "num_layers", None, 1 << 20) if method == "early_exit" else None,
    )


def _joined(given: Mapping[str, Any], model: str | None, num_tokens: int | None) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be an object, got {given!r}")
    for key in given:
        if key not in _KEYS:
            hint = nearest(str(key), _KEYS) or f"; it has {', '.join(_KEYS)}"
            raise ConfigError(f"speculative_config has no key {key!r}{hint}")
    values = {key: value for key, value in given.items() if value is not None}
    for name, key, value in (
        ("speculative_model", "model", model),
        ("num_speculative_tokens", "num_speculative_tokens", num_tokens),
    ):
        if value is not None and values.setdefault(key, value) != value:
            raise ConfigError(f"{name}={value!r} and speculative_config's {key}={values[key]!r} differ; give one")
    return values


def _method(values: Mapping[str, Any]) -> Method:
    model = values.get("model")
    if model is not None and (not isinstance(model, (str, PathLike)) or not str(model)):
        raise ConfigError(f"the model of speculative_config must be text or a path, got {model!r}")
    method = values.get("method")
    if method is None:
        return "ngram" if model is None or model in _NGRAM_MODELS else "draft_model"
    if method not in get_args(Method):
        raise ConfigError(
            f"speculative_config's method={method!r} is not supported; it is one of {', '.join(get_args(Method))}"
        )
    if method == "draft_model" and model is None:
        raise ConfigError("speculative_config's method='draft_model' needs a model")
    if method != "draft_model" and model is not None and model not in _NGRAM_MODELS:
        raise ConfigError(f"speculative_config's method={method!r} takes no model, got {str(model)!r}")
    return method  # type: ignore[no-any-return]


def _check_keys(values: Mapping[str, Any], method: Method) -> None:
    for other, keys in _KEYS_OF.items():
        for key in keys:
            if key in values and other != method:
                raise ConfigError(
                    f"speculative_config's {key} belongs to method {other!r}, and the method is {method!r}"
                )
    if not isinstance(values.get("revision", ""), str):
        raise ConfigError(f"speculative_config's revision must be text, got {values['revision']!r}")
    if method == "early_exit" and "num_layers" not in values:
        raise ConfigError(
            "speculative_config's method='early_exit' needs num_layers: how many of the first layers draft"
        )


def _lookup(values: Mapping[str, Any]) -> tuple[int, int]:
    """The shortest and the longest n-gram. As in vLLM, one that is given alone is both."""
    shortest, longest = (_number(values, f"prompt_lookup_{name}", None, MAX_TOKENS) for name in ("min", "max"))
    if shortest is None and longest is None:
        return DEFAULT_LOOKUP
    low, high = shortest or longest or 0, longest or shortest or 0
    if low > high:
        raise ConfigError(f"speculative_config's prompt_lookup_min={low} is more than prompt_lookup_max={high}")
    return low, high


def _number(values: Mapping[str, Any], key: str, default: Any, most: int) -> Any:
    value = values.get(key, default)
    is_number = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
    if value is not None and not is_number:
        raise ConfigError(f"{key} must be an integer between 1 and {most:,}, got {value!r}")
    return value
