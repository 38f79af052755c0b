"""A tiny Qwen3 that writes what a script says: reasoning, then a text or calls of tools.

Tests of reasoning and tool calls need a model that writes some; what it writes does not matter to a server. The weights
are computed here and not trained:

- Each piece of a script is a token of its own, and the embedding of a token is a unit vector. The output layer maps it
  to the piece that follows. So the next token depends on the last one.
- The chat template names the script with a token before the answer. The one attention layer finds that token and adds
  its vector, which decides what follows </think>, a token that all scripts share.
- Any other token is followed by what closes JSON soonest, so answers under a grammar are short; without a script, as in
  /v1/completions, by the words of `PROSE`, which start again at their end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer

START, END, STOP, NEXT_LINE, EMPTY_LINE = "<think>", "</think>", "<|im_end|>", "\n", "\n\n"
CLOSING = (STOP, '"', "}", "]", ",", ":", "1", "{", "[", "a")  # after any other token, the most wanted first
OPENING = {"{": "}", "[": "]", "1": "\n"}  # what follows these if it may
HEAD_DIM, NUM_HEADS, FFN_DIM = 64, 2, 64
SLOWEST = HEAD_DIM // 2 - 1  # the dimension of a head that rotary embeddings turn least
FOLLOWS, CHOSEN, LESS = (
    20.0,
    10.0,
    1.5,
)  # logits: of what follows a piece; of the first piece of the chosen script; between wishes


PROSE = (
    " It was early in the morning when they left the harbour, and nobody on board had slept much. Fog lay over the "
    "bay; somewhere a bell rang twice. Old Martin stood at the bow, his hands in his pockets, humming an unknown tune."
)


@dataclass(frozen=True)
class Script:
    """What the model writes when a request has these tools."""

    tools: tuple[str, ...]
    reasoning: str
    answer: str


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SCRIPTS = (
    Script(
        (),
        "\nThe user asks something short, and I have no tools, so a short answer is enough; it should be friendly, and "
        "it must not claim anything that could be wrong. Numbers, names and places are better left out of it, since "
        "nobody can check them here.\n",
        "\n\nHello! This is a short answer, and there is nothing more to say about it.",
    ),
    Script(
        ("get_current_weather", "get_forecast"),
        "\nBoth the weather of today and a forecast are wanted, and a tool knows the first of them.\n",
        "\n\n" + call("get_current_weather", city="Berlin", country="Germany", unit="fahrenheit"),
    ),
    Script(
        ("get_current_weather",),
        "\nHere the weather of one city is wanted, which the only tool can tell.\n",
        "\n\n" + call("get_current_weather", location="New York"),
    ),
    Script(
        ("get_weather", "get_time"),
        "\nTwo tools are to be called, one for each of the cities, and no text is wanted.\n",
        "\n\n" + call("get_weather", location="Berlin") + "\n" + call("get_time", location="Tokyo"),
    ),
    Script(
        ("get_weather",),
        "\nThis can be answered by calling the tool that knows about weather.\n",
        "\n\n" + call("get_weather", location="Paris"),
    ),
    Script(
        ("add",),
        "\nA sum is to be computed, for which there is exactly one function.\n",
        "\n\n" + call("add", a=5, b=7),
    ),
    Script(
        ("sub",),
        "\nThe difference of two numbers is asked for; the function takes both.\n",
        "\n\n" + call("sub", int_a=5, int_b=7),
    ),
    Script(
        ("get_current_time",),
        "\nThe time is asked for, and a tool without parameters has it.\n",
        "\n\n" + call("get_current_time"),
    ),
)

# Tools and messages, as the templates of Qwen3 write them; `{scripts}` chooses the script.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content if message.content is string }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}
{%- set names = (tools or []) | map(attribute='function.name') | join(' ') %}
{%- if messages[-1].role == 'tool' %}{% set names = '' %}{% endif %}
SCRIPTS
{%- else %}<|script-0|>{% endif %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def template() -> str:
    chosen = [
        f"{{%- {'if' if i == 1 else 'elif'} names == '{' '.join(script.tools)}' %}}<|script-{i}|>"
        for i, script in enumerate(SCRIPTS)
        if i > 0
    ]
    return TEMPLATE.replace("SCRIPTS", "\n".join(chosen))


@dataclass
class _Chain:
    """The tokens of all scripts, and which follows which."""

    tokenizer: Tokenizer
    pieces: list[str] = field(default_factory=list)
    follows: list[tuple[str, str]] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)  # the first piece of each script's reasoning
    firsts: list[str] = field(default_factory=list)  # and of its answer
    first_word: str = ""  # of the prose

    def add(self, script: Script) -> None:
        reasoning, answer = self._split(script.reasoning), self._split(script.answer)
        self.firsts.append(answer[0])
        self.starts.append(reasoning[0])
        for run in ([*reasoning, END], [*answer, STOP]):
            self.follows += pairwise(run)

    def add_prose(self) -> None:
        """Text without an end. A quotation mark follows its last word, which ends a string in JSON."""
        words = self._split(PROSE)
        self.first_word = words[0]
        self.follows += pairwise([*words, '"'])

    def _split(self, text: str) -> list[str]:
        """Pieces of a text, each in no other place and no token of the tokenizer."""
        found, piece = [], ""
        for word in re.findall(r"\s*\w+|\s*\W", text):
            piece += word
            if self._is_new(piece):
                found.append(piece)
                self.pieces.append(piece)
                piece = ""
        found[-1] = self.pieces[-1] = found[-1] + piece  # what is left is no piece of its own
        return found

    def _is_new(self, piece: str) -> bool:
        bytes_as_letters = piece.replace(" ", "Ġ").replace("\n", "Ċ")
        is_known = self.tokenizer.token_to_id(bytes_as_letters) is not None or piece in self.pieces
        return not is_known and re.search(r"\w", piece) is not None


def write_scripted_model(folder: Path, tokenizer_json: str, special_tokens: dict[str, str]) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    chain = _Chain(tokenizer)
    for script in SCRIPTS:
        chain.add(script)
    chain.add_prose()
    names = [f"<|script-{i}|>" for i in range(len(SCRIPTS))]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in (START, END, *chain.pieces)])
    folder.mkdir(parents=True, exist_ok=True)
    tensors, config = _weights(tokenizer, chain, names)
    save_file(tensors, folder / "model.safetensors")
    stop = tokenizer.token_to_id(STOP)
    _write(folder / "config.json", {**config, "eos_token_id": stop})
    _write(folder / "generation_config.json", {"eos_token_id": stop})
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    more = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write(folder / "tokenizer_config.json", {**more, **special_tokens, "chat_template": template()})


def _weights(
    tokenizer: Tokenizer, chain: _Chain, names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """One dimension for each token of the scripts (`state`), one for all others, one that is always 1; then one for
    each script where its token says so (`said`), and one where attention has copied it (`known`)."""

    def token(text: str) -> int:
        found = tokenizer.token_to_id({NEXT_LINE: "Ċ", EMPTY_LINE: "ĊĊ"}.get(text, text))
        assert found is not None, f"no token for {text!r}"
        return int(found)

    states = [START, END, NEXT_LINE, EMPTY_LINE, *OPENING, *chain.pieces]
    state = {text: place for place, text in enumerate(states)}
    other, constant = len(states), len(states) + 1
    said, known = constant + 1, constant + 1 + len(names)
    hidden = -(-(known + len(names)) // 32) * 32
    num_tokens = tokenizer.get_vocab_size()

    embedding = torch.zeros(num_tokens, hidden)
    embedding[:, constant] = 1.0
    embedding[:, other] = 1.0
    for text, place in state.items():
        embedding[token(text), other] = 0.0
        embedding[token(text), place] = 1.0
    for index, name in enumerate(names):
        embedding[token(name), said + index] = 1.0

    output = torch.zeros(num_tokens, hidden)
    output[token(START), state[NEXT_LINE]] = FOLLOWS
    for before, after in chain.follows:
        output[token(after), state[before]] = FOLLOWS
    for index in range(len(names)):
        output[token(chain.starts[index]), [state[START], known + index]] = torch.tensor([FOLLOWS, CHOSEN])
        for before in (END, EMPTY_LINE):
            output[token(chain.firsts[index]), state[before]] = FOLLOWS
        output[token(chain.firsts[index]), known + index] = CHOSEN
    for place in (other, *(state[text] for text in (*OPENING, NEXT_LINE, EMPTY_LINE))):
        for rank, text in enumerate(CLOSING, start=1):
            output[token(text), place] = FOLLOWS - rank * LESS
    output[token(chain.first_word), other] = FOLLOWS
    output[token(chain.first_word), known : known + len(names)] = -FOLLOWS
    for opening, closing in OPENING.items():
        output[token(closing), state[opening]] = FOLLOWS

    query, key = torch.zeros(NUM_HEADS * HEAD_DIM, hidden), torch.zeros(HEAD_DIM, hidden)
    value, back = torch.zeros(HEAD_DIM, hidden), torch.zeros(hidden, NUM_HEADS * HEAD_DIM)
    query[[SLOWEST, HEAD_DIM + SLOWEST], constant] = 1.0
    for index in range(len(names)):
        key[SLOWEST, said + index] = 1.0
        value[index, said + index] = (3 / hidden) ** 0.5  # undoes the norm of three ones
        back[known + index, index] = 1.0  # of the first head
    layer = "model.layers.0"
    zeros = torch.zeros
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": output,
        "model.norm.weight": torch.ones(hidden),
        f"{layer}.input_layernorm.weight": torch.ones(hidden),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}.self_attn.q_proj.weight": query,
        f"{layer}.self_attn.k_proj.weight": key,
        f"{layer}.self_attn.v_proj.weight": value,
        f"{layer}.self_attn.o_proj.weight": back,
        f"{layer}.self_attn.q_norm.weight": torch.full((HEAD_DIM,), 8.0),
        f"{layer}.self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": zeros(FFN_DIM, hidden),
        f"{layer}.mlp.up_proj.weight": zeros(FFN_DIM, hidden),
        f"{layer}.mlp.down_proj.weight": zeros(hidden, FFN_DIM),
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": num_tokens,
        "hidden_size": hidden,
        "intermediate_size": FFN_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, config


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
