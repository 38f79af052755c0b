"""Evidence of a planned command line, which is not run: `vllm serve`, `headrace serve` or `headrace run`, with its file
of settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from headrace.config import EMBEDDED_MODEL, EngineConfig
from headrace.doctor.evidence import Evidence
from headrace.doctor.readers import vllm_flags
from headrace.doctor.readers.config_file import read_config_file
from headrace.engine.memory_budget import GPU_BATCHED_TOKENS, GPU_MEMORY_SHARE
from headrace.errors import ConfigError, HeadraceError
from headrace.plan.gpus import Gpu
from headrace.plan.shape import ModelShape
from headrace.plan.source import find_shape

# The flag that means the same: vLLM's own aliases.
ALIASES = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--kv-cache-memory": "--kv-cache-memory-bytes",
    **vllm_flags.SHORT,
}
_SWITCH_PREFIXES = ("--enable-", "--disable-", "--no-")
_SWITCHES = frozenset(
    {
        *("--enforce-eager", "--trust-remote-code", "--async-scheduling", "--skip-tokenizer-init"),
        *("--check", "--overwrite", "--keep-order", "--retry-errors", "--quiet", "--chat"),  # of headrace run
    }
)
_SECRET = frozenset({"--api-key", "--admin-key", "--hf-token"})  # their values are shown nowhere
_SECRET_VARIABLE = re.compile(r"\w*(TOKEN|KEY|SECRET|PASSWORD)\w*")  # of docker run -e NAME=value
HIDDEN = "***"
FlagsOf = Callable[[str], Collection[str]]  # the flags of `headrace serve` or `headrace run`, by the action
_IMAGE = "vllm/vllm-openai"  # of docker run; its arguments are those of vllm serve
COMMANDS = (("vllm", "serve"), ("headrace", "serve"), ("headrace", "run"))
_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag as it was written. `name` is the long one, without `no-`; a switch has the value True or False."""

    written: str
    name: str
    value: str | bool

    @property
    def plain_name(self) -> str:
        """Without the key of a nested setting: --speculative-config of --speculative-config.method."""
        return self.name.partition(".")[0]

    @property
    def setting(self) -> str:
        return self.plain_name.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class CommandLine:
    program: str  # "vllm" or "headrace"
    action: str  # "serve" or "run"
    words: tuple[str, ...]
    flags: tuple[Flag, ...]
    positional: tuple[str, ...] = ()
    comments: tuple[str, ...] = ()  # what the line says of itself after '#'
    known_flags: frozenset[str] = field(default=frozenset())  # of the program; empty: not known
    file_flags: tuple[Flag, ...] = ()  # keys of the file of --config, which the command's flags override

    @property
    def text(self) -> str:
        """The command without keys."""
        shown = []
        follows_secret = False  # a flag may have several keys
        for word in self.words:
            flag, has_value, _ = word.partition("=")
            if follows_secret and not word.startswith("--"):
                shown.append(HIDDEN)
            else:
                follows_secret = word.replace("_", "-") in _SECRET
                is_secret = flag.replace("_", "-") in _SECRET or _SECRET_VARIABLE.fullmatch(flag)
                shown.append(f"{flag}={HIDDEN}" if has_value and is_secret else word)
        return " ".join(word if word == HIDDEN or word.endswith(f"={HIDDEN}") else shlex.quote(word) for word in shown)

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """In the order in which they count: the last of a name does."""
        return (*self.file_flags, *self.flags)

    def values(self, name: str) -> list[str | bool]:
        return [flag.value for flag in self.flags if flag.name == name]


def read_command(
    words: Sequence[str],
    *,
    headrace_flags: FlagsOf = lambda action: (),
    gpu: Gpu | None = None,
    model: ModelShape | None = None,
    prompt_len: float | None = None,
    output_len: float | None = None,
) -> Evidence:
    """The settings of a command and its file, with the defaults of its program. `headrace_flags`: the flags of
    `headrace serve` or `headrace run`."""
    command, remarks = _with_file(parse_command(words, headrace_flags=headrace_flags))
    given = _given(command)
    settings = {**_defaults(command, gpu), **given}
    if model is None:
        name = _model_of(command)
        try:
            model = find_shape(name)
        except (HeadraceError, ValueError) as error:
            remarks.append(f"the model's shape is not known: {error}")
    return Evidence(
        source="command",
        origin=command.text,
        engine=command.program,
        settings=settings,
        given=frozenset(given),
        is_on_cpu=settings.get("device") == "cpu" if command.program == "headrace" else None,
        model=model,
        gpu=gpu,
        command=command,
        prompt_len=prompt_len,
        output_len=output_len,
        remarks=tuple(remarks),
    )


def _with_file(command: CommandLine) -> tuple[CommandLine, list[str]]:
    """The command with the settings of its file, and what to say about the file."""
    paths = [value for value in command.values("--config") if isinstance(value, str)]
    if not paths:
        return command, []
    path = paths[-1]
    values = read_config_file(Path(path).expanduser(), command.program)
    if values is None:
        return command, [f"{path} does not exist here, so the settings in it are not known"]
    flags = [replace(_flag(f"--{key}={value}", []), written=f"{key} in {path}") for key, value in values.items()]
    return replace(command, file_flags=tuple(flags)), []


def parse_command(words: Sequence[str], *, headrace_flags: FlagsOf = lambda action: ()) -> CommandLine:
    """Split a command line into flags. One word is a quoted line. Comments and line ends with backslashes are read."""
    parts, comments = _split(words)
    while parts and "=" in parts[0] and not parts[0].startswith("-"):
        parts.pop(0)  # NAME=value of the environment
    program, action, rest = _program(parts)
    known = vllm_flags.VLLM_FLAGS if program == "vllm" else frozenset(headrace_flags(action))
    flags: list[Flag] = []
    positional: list[str] = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or _is_number(word):
            positional.append(word)
            continue
        flags.append(_flag(word, rest))
    return CommandLine(program, action, tuple(parts), tuple(flags), tuple(positional), tuple(comments), known)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words and comments. A quoted line is split as a shell does."""
    if len(words) > 1:
        return [word for word in words if word.strip() != "\\"], []
    text = words[0] if words else ""
    parts: list[str] = []
    comments: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            for word in lexer:
                if word.startswith("#"):
                    comments.append(line[line.index("#") + 1 :].strip())
                    break
                parts.append(word)
        except ValueError as error:
            raise ConfigError(f"the command line cannot be read: {error}") from None
    return parts, comments


def _program(parts: Sequence[str]) -> tuple[str, str, list[str]]:
    """The program, its action and the words after them."""
    names = [part.rpartition("/")[2] for part in parts[:3]]
    if tuple(names[:2]) in COMMANDS:
        return names[0], names[1], list(parts[2:])
    image = next((place for place, part in enumerate(parts) if part.startswith(_IMAGE)), None)
    if image is not None:
        return "vllm", "serve", list(parts[image + 1 :])
    if len(parts) > 2 and names[0].startswith("python") and parts[1] == "-m":
        if parts[2] in _MODULES:
            return "vllm", "serve", list(parts[3:])
        if parts[2] in ("vllm", "headrace"):
            return _program([parts[2], *parts[3:]])
    shown = shlex.join(parts[:3]) or "nothing"
    known = ", ".join(f"'{program} {action} ...'" for program, action in COMMANDS)
    raise ConfigError(f"doctor reads {known}, and this is {shown!r}")


def _flag(word: str, rest: list[str]) -> Flag:
    """The flag with its value, which is taken off `rest`."""
    written, has_value, text = word.partition("=")
    plain = written.replace("_", "-") if written.startswith("--") else written
    name = ALIASES.get(plain, plain)
    is_off = name.startswith("--no-")
    name = "--" + name.removeprefix("--no-") if is_off else name
    if has_value:
        value = _switch(text) if is_off or _is_switch(name) else text
        return Flag(written, name, not value if is_off and isinstance(value, bool) else value)
    if is_off:
        return Flag(written, name, False)
    if _is_switch(name):
        return Flag(written, name, _switch(rest.pop(0)) if rest and rest[0].lower() in ("true", "false") else True)
    if rest and (not rest[0].startswith("-") or _is_number(rest[0])):
        return Flag(written, name, rest.pop(0))
    return Flag(written, name, True)


def _is_switch(name: str) -> bool:
    return name.startswith(_SWITCH_PREFIXES) or name in _SWITCHES


def _switch(text: str) -> str | bool:
    return {"true": True, "false": False}.get(text.lower(), text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _model_of(command: CommandLine) -> str:
    named = [str(value) for value in command.values("--model")]
    positional = list(command.positional) if command.action == "serve" else []  # of a run, it is the input
    in_file = [str(flag.value) for flag in command.file_flags if flag.name == "--model"]
    return (named or positional or in_file or [EMBEDDED_MODEL])[0]


def _given(command: CommandLine) -> dict[str, Any]:
    """Settings as given; of one that is given twice, the last, as argparse does."""
    return {flag.setting: HIDDEN if flag.name in _SECRET else _typed(flag.value) for flag in command.all_flags}


def _typed(value: str | bool) -> Any:
    if isinstance(value, bool):
        return value
    short = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", value)
    if short is not None:  # as vLLM reads them: 8k is 8,000, 8K is 8,192
        return round(float(short[1]) * {"k": 1e3, "K": 2**10, "m": 1e6, "M": 2**20}[short[2]])
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _defaults(command: CommandLine, gpu: Gpu | None) -> dict[str, Any]:
    settings: dict[str, Any]
    if command.program == "headrace":
        own = {each.name: each.default for each in fields(EngineConfig)}
        settings = {name: value for name, value in own.items() if value is not None}
        if gpu is not None and not gpu.is_cpu:
            settings |= {"gpu_memory_utilization": GPU_MEMORY_SHARE, "max_num_batched_tokens": GPU_BATCHED_TOKENS}
        return settings
    settings = dict(vllm_flags.DEFAULTS)
    if gpu is not None and not gpu.is_cpu:
        is_big = gpu.memory_bytes >= vllm_flags.BIG_GPU_BYTES and not gpu.name.startswith("A100")
        settings["max_num_seqs"] = vllm_flags.DEFAULT_SEQS_BIG if is_big else vllm_flags.DEFAULT_SEQS
        settings["max_num_batched_tokens"] = vllm_flags.DEFAULT_TOKENS_BIG if is_big else vllm_flags.DEFAULT_TOKENS
    return settings
