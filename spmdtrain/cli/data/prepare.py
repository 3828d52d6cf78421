"""`spmdtrain data prepare`: converts documents to token files."""

import argparse

from spmdtrain.cli.shared_arguments import add_documents, positive_int, unescaped
from spmdtrain.config import DONE, ConfigError
from spmdtrain.data.chats.tool_calls import PARSE_ARGUMENTS
from spmdtrain.processes import signals


def add_prepare(commands) -> None:
    """Adds the command `data prepare` and its arguments."""
    prepare = commands.add_parser("prepare", help="convert documents to token files")
    add_documents(prepare)
    prepare.add_argument(
        "--out", required=True, metavar="NAME", help="write NAME.bin and its sidecars"
    )
    prepare.add_argument(
        "--tokenizer",
        default="bytes",
        help="bytes | characters | a tokenizer.json or its folder (default: bytes)",
    )
    prepare.add_argument(
        "--end-of-text",
        default="auto",
        metavar="TOKEN",
        help="token written after each document: a token, auto (the tokenizer's own) or none "
        "(default: auto)",
    )
    prepare.add_argument(
        "--begin-of-text",
        default="auto",
        metavar="TOKEN",
        help="token written before each document: a token, auto (as the tokenizer's own files say) "
        "or none (default: auto)",
    )
    prepare.add_argument(
        "--chat",
        action="store_true",
        help="documents are conversations (messages, ShareGPT, or prompt and completion); only "
        "the answers count in the loss",
    )
    prepare.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template for conversations (default: the one in the tokenizer's folder)",
    )
    prepare.add_argument(
        "--chat-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable of the Jinja template, e.g. enable_thinking=false; may be repeated",
    )
    prepare.add_argument(
        "--template",
        type=unescaped,
        help="how a message is written, with {role} and {content}, instead of by a Jinja template "
        "(default without one: ChatML)",
    )
    prepare.add_argument(
        "--last-answer-only",
        action="store_true",
        help="train only on the last answer of each conversation and drop what follows it",
    )
    prepare.add_argument(
        "--pairs",
        action="store_true",
        help="with --chat: rows have chosen and rejected answers, for train.preference",
    )
    prepare.add_argument(
        PARSE_ARGUMENTS,
        action="store_true",
        help="read the arguments of a tool call that are a text as the object that the text "
        "describes (default: a Jinja template sees the text, as in transformers)",
    )
    prepare.add_argument(
        "--parse-special",
        action="store_true",
        help="read a special token spelled in a text, such as <|endoftext|>, as that token "
        "(default: as text)",
    )
    prepare.add_argument(
        "--workers",
        type=positive_int,
        default=1,
        metavar="N",
        help="number of processes that tokenize (default: 1)",
    )
    prepare.add_argument(
        "--shard-tokens",
        type=positive_int,
        metavar="N",
        help="write NAME-00000.bin and so on, of N tokens each; "
        "after a kill, continue after the last complete one",
    )
    prepare.set_defaults(command=run_prepare)


def run_prepare(parsed: argparse.Namespace) -> int:
    """Writes documents as token files."""
    from spmdtrain.data.prepare.prepare_corpus import Job
    from spmdtrain.data.prepare.prepare_corpus import prepare as write

    of_chats = (
        *("template", "chat_template", "chat_set", "last_answer_only", "pairs"),
        "parse_arguments",
    )
    chat_options = [name for name in of_chats if getattr(parsed, name)]
    if chat_options and not parsed.chat:
        option = f"--{chat_options[0].replace('_', '-')}"
        raise ConfigError(f"{option} is for conversations", fix=f"--chat {option}")
    if parsed.pairs and parsed.field:
        raise ConfigError("--pairs reads chosen and rejected, not --field", fix="one of them")
    job = Job(
        paths=parsed.paths,
        out=parsed.out,
        tokenizer=parsed.tokenizer,
        end_of_text=parsed.end_of_text,
        begin_of_text=parsed.begin_of_text,
        field=parsed.field,
        split_on=parsed.split_on,
        chat=parsed.chat,
        template=parsed.template,
        chat_template=parsed.chat_template,
        variables=parsed.chat_set,
        last_answer_only=parsed.last_answer_only,
        pairs=parsed.pairs,
        parse_special=parsed.parse_special,
        parse_arguments=parsed.parse_arguments,
        workers=parsed.workers,
        shard_tokens=parsed.shard_tokens,
    )
    with signals.cleaning_up():
        write(job)
    return DONE
