"""`headrace chat`: a chat with a model in the terminal, or one question per line from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.cli.engine_flags import add_engine_flags, engine_config
from headrace.cli.messages import print_line
from headrace.cli.parser import CommandParser
from headrace.cli.sampling_flags import add_sampling_flags, sampling_defaults

if TYPE_CHECKING:
    from headrace.cli.conversation import Conversation

TEMPERATURE = 0.7  # more varied than greedy, more coherent than 1

COMMANDS = {
    "/clear": "clear the conversation",
    "/help": "list these commands",
    "/exit": "leave (or press Ctrl-D)",
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
        print_line(f"loading {config.model} ...")
    with Conversation.start(config, SamplingParams(**defaults), system=given.system) as conversation:
        if is_terminal:
            chat_in_terminal(conversation)
        else:
            answer_lines(conversation)
    return 0


def build_parser() -> CommandParser:
    parser = CommandParser(
        prog="headrace chat",
        usage="headrace chat [options]",
        description="Chat with a model. Ctrl-C stops an answer; /help lists the commands.",
        epilog='examples:\n  headrace chat --system "Answer in one sentence."\n'
        '  echo "What is the capital of France?" | headrace chat --temperature 0',
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message at the start of the conversation")
    add_sampling_flags(
        parser,
        "apply to every answer",
        max_tokens="maximum answer length in tokens (default: the rest of the context)",
        temperature=f"0 is greedy: always the most likely token (default: {TEMPERATURE})",
    )
    add_engine_flags(parser)
    return parser


def chat_in_terminal(conversation: Conversation) -> None:
    """Answer questions until the user leaves. Ctrl-C at the prompt only discards the typed text."""
    _enable_line_editing()
    print(f"headrace: {conversation.greeting}; /help for help", file=sys.stderr)
    while True:
        try:
            question = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(type /exit or press Ctrl-D to leave)")
            continue
        if question == "/exit":
            return
        if question.startswith("/"):
            run_command(question, conversation)
        elif question:
            _answer(question, conversation, show_stats=True)


def run_command(command: str, conversation: Conversation) -> None:
    from headrace.errors import nearest

    if command == "/clear":
        conversation.clear()
        print("(conversation cleared)")
    elif command == "/help":
        print("\n".join(f"{name:<8}{help}" for name, help in COMMANDS.items()))
    else:
        print(f"unknown command {command}{nearest(command, COMMANDS)} (/help lists them)")


def answer_lines(conversation: Conversation) -> None:
    """Answer the questions on stdin, one per line, as one conversation."""
    for line in sys.stdin:
        question = line.strip()
        if question == "/exit":
            return
        if question == "/clear":
            conversation.clear()
        elif question:
            _answer(question, conversation, show_stats=False)


def _answer(question: str, conversation: Conversation, *, show_stats: bool) -> None:
    from headrace.errors import RequestError

    try:
        turn = conversation.ask(question, _show)
    except RequestError as error:
        print(f"headrace: error: {error}; /clear starts a new conversation", file=sys.stderr)
        return
    print(" [stopped]" if turn.was_stopped else "")
    if show_stats:
        print(_dim(turn.stats), file=sys.stderr)


def _show(piece: str) -> None:
    print(piece.replace("\x1b", "�"), end="", flush=True)  # no escape sequences from the model to the terminal


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - importing it gives input() history and arrow keys
    except ImportError:
        pass
