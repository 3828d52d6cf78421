"""Run the commands around data: `data prepare`, `tokenizer train`."""

import argparse

from spmdtrain.config import DONE
from spmdtrain.processes import signals


def prepare(parsed: argparse.Namespace) -> int:
    """Write documents as token files."""
    from spmdtrain.data.prepare.prepare import Job
    from spmdtrain.data.prepare.prepare import prepare as write
    from spmdtrain.data.tokenizers.chat import CHATML

    job = Job(
        paths=parsed.paths,
        out=parsed.out,
        tokenizer=parsed.tokenizer,
        end_of_text=parsed.end_of_text,
        field=parsed.field,
        split_on=parsed.split_on,
        chat=parsed.chat,
        template=parsed.template or CHATML,
        parse_special=parsed.parse_special,
        workers=parsed.workers,
        shard_tokens=parsed.shard_tokens,
    )
    with signals.cleaning_up():
        write(job)
    return DONE


def train_tokenizer(parsed: argparse.Namespace) -> int:
    """Make a tokenizer of documents."""
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
