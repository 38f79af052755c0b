"""`headrace chat`: a talk with a model in the terminal, or one question a line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.parser import CommandParser
from headrace.cli.sampling_flags import add_sampling_flags, sampling_defaults

if TYPE_CHECKING:
    from headrace.cli.conversation import Conversation

TEMPERATURE = 0.7  # livelier than greedy, steadier than 1

COMMANDS = {
    "/clear": "forget the talk so far",
    "/help": "this list",
    "/exit": "leave (so does Ctrl-D)",
}


def main(arguments: Sequence[str]) -> int:
    parser = build_parser()
    given = parser.parse_args(arguments)
    defaults: Mapping[str, Any] = {
        "max_tokens": None,
        "temperature": TEMPERATURE,
        **sampling_defaults(parser, given),
    }
    config = engine_config(parser, given)

    from headrace.cli.conversation import Conversation
    from headrace.cli.fetching import fetch_if_missing
    from headrace.types import SamplingParams

    fetch_if_missing(config.model)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"headrace: loading {config.model} ...", file=sys.stderr, flush=True)
    with Conversation.start(config, SamplingParams(**defaults), system=given.system) as conversation:
        if is_terminal:
            _talk(conversation)
        else:
            _answer_lines(conversation)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace chat",
        usage="headrace chat [options]",
        description="Talk with a model. Ctrl-C stops an answer; /help lists what else can be typed.",
        epilog='examples:\n  headrace chat --system "Answer in one sentence."\n'
        '  echo "What is the capital of France?" | headrace chat --temperature 0',
    )
    parser.add_argument("--system", metavar="TEXT", help="the instruction that stands before the talk")
    add_sampling_flags(
        parser,
        "for every answer",
        max_tokens="longest answer, in tokens (default: to the end of the context)",
        temperature=f"0 always takes the likeliest token (default: {TEMPERATURE})",
    )
    add_engine_flags(parser)
    return parser


def _talk(conversation: Conversation) -> None:
    """Until the user leaves. Ctrl-C at the prompt only drops what was typed."""
    _enable_line_editing()
    print(f"headrace: {conversation.greeting}; /help for help", file=sys.stderr)
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
            continue
        if question == "/exit":
            return
        if question.startswith("/"):
            _obey(question, conversation)
        elif question:
            _answer(question, conversation, show_figures=True)


def _obey(command: str, conversation: Conversation) -> None:
    from headrace.errors import nearest

    if command == "/clear":
        conversation.clear()
        print("(forgotten)")
    elif command == "/help":
        print("\n".join(f"{name:<8}{help}" for name, help in COMMANDS.items()))
    else:
        print(f"unknown command {command}{nearest(command, COMMANDS)} (/help lists them)")


def _answer_lines(conversation: Conversation) -> None:
    """One question a line, one answer each; the talk goes on from line to line."""
    for line in sys.stdin:
        question = line.strip()
        if question == "/exit":
            return
        if question == "/clear":
            conversation.clear()
        elif question:
            _answer(question, conversation, show_figures=False)


def _answer(question: str, conversation: Conversation, *, show_figures: bool) -> None:
    from headrace.errors import RequestError

    try:
        turn = conversation.ask(question, _show)
    except RequestError as error:
        print(f"headrace: error: {error}; /clear starts anew", file=sys.stderr)
        return
    print(" [stopped]" if turn.was_stopped else "")
    if show_figures:
        print(_dim(turn.figures), file=sys.stderr)


def _show(piece: str) -> None:
    print(piece.replace("\x1b", "�"), end="", flush=True)  # a model may not steer the terminal


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - its import gives input() history and arrow keys
    except ImportError:
        pass
