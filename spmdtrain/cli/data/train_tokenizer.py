"""`spmdtrain tokenizer train`: trains a byte-level BPE on documents."""

import argparse

from spmdtrain.cli.shared_arguments import add_documents, positive_int
from spmdtrain.config import DONE


def add_train_tokenizer(commands) -> None:
    """Adds the command `tokenizer train` and its arguments."""
    train = commands.add_parser("train", help="train a byte-level BPE on documents")
    add_documents(train)
    train.add_argument("--out", required=True, metavar="FILE", help="the tokenizer.json to write")
    train.add_argument(
        "--vocab",
        type=positive_int,
        required=True,
        metavar="N",
        help="tokens, e.g. 32000",
    )
    train.add_argument(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="a further token that is never split, in addition to <|endoftext|>; may be repeated",
    )
    train.set_defaults(command=run_train_tokenizer)


def run_train_tokenizer(parsed: argparse.Namespace) -> int:
    """Trains a tokenizer on documents."""
    from spmdtrain.data.tokenizers.train_tokenizer import train_tokenizer as train

    train(
        parsed.paths,
        parsed.out,
        parsed.vocab,
        field=parsed.field or "text",
        split_on=parsed.split_on,
        special=parsed.special,
    )
    return DONE
