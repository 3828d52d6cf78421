"""`spmdtrain sample`: generates text with a trained run."""

import argparse

from spmdtrain.cli.run.prompts import TALK, as_json, check_alone, questions, read_prompts
from spmdtrain.cli.run.waiting import waiting
from spmdtrain.cli.shared_arguments import (
    WHOLE,
    add_devices,
    add_ema,
    add_make,
    add_set,
    add_step,
    of_run,
    positive_int,
    typed,
    whole,
)
from spmdtrain.config import DONE, ConfigError
from spmdtrain.config.schema import SEEDS
from spmdtrain.config.settable import OF_DEVICES


def add_sample(commands) -> None:
    """Adds the command `sample` and its arguments."""
    sample = commands.add_parser("sample", help="generate text with a trained run")
    sample.add_argument("run", metavar="RUN", help="run directory")
    add_make(sample)
    add_ema(sample)
    add_step(sample)
    sample.add_argument(
        "--prompt",
        type=typed,
        help=r"text to continue; \n is a line break, \\n a backslash and an n "
        "(default: a line break)",
    )
    sample.add_argument(
        "--prompts",
        metavar="FILE",
        help="a prompt per line, generated as one batch; "
        "a line of a .jsonl is a text, or an object with prompt or messages",
    )
    sample.add_argument(
        "--chat",
        nargs="?",
        const=TALK,
        type=typed,
        metavar="TEXT",
        help="ask a run that was trained on conversations, in its template, and print the "
        "answer; without TEXT, hold a conversation: one question per line until the input "
        "ends",
    )
    sample.add_argument(
        "--parse-special",
        action="store_true",
        help="read a special token spelled in a prompt as that token (default: as text)",
    )
    sample.add_argument(
        "--length",
        type=positive_int,
        help="tokens to add (default: as many as the model has positions for, at most 200)",
    )
    sample.add_argument(
        "--stop",
        action="append",
        type=typed,
        default=[],
        metavar="TEXT",
        help="end before this text; end-of-text: before the token that ends a document; "
        "may be repeated",
    )
    sample.add_argument(
        "--json", action="store_true", help='print JSON: {"prompt", "text"} per line'
    )
    sample.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0: always the likeliest token (default: %(default)s)",
    )
    sample.add_argument("--top-k", type=whole, help="choose only among the k likeliest tokens")
    sample.add_argument(
        "--top-p",
        type=float,
        help="choose only among the likeliest tokens that together reach probability p",
    )
    sample.add_argument(
        "--seed",
        type=_seed_number,
        default=0,
        help="a different seed gives a different text",
    )
    add_set(
        sample,
        "e.g. mesh.tensor=2 (default: one device); only mesh.*, rules.* and model.attention",
        OF_DEVICES,
    )
    add_devices(sample)
    sample.set_defaults(command=run_sample)


def _seed_number(text: str) -> int:
    """Reads a seed: a whole number below `SEEDS`."""
    if not WHOLE.fullmatch(text) or int(text) >= SEEDS:
        raise argparse.ArgumentTypeError(f"{text:.40} is not a whole number from 0 to {SEEDS - 1}")
    return int(text)


def run_sample(parsed: argparse.Namespace) -> int:
    """Prints text that a trained run generates."""
    if parsed.chat is TALK:
        return _talk(parsed)
    prompts = read_prompts(parsed)
    with waiting(parsed, f"reading {parsed.run} and generating"):
        from spmdtrain.inference import sample

        choice = sample.Choice(parsed.temperature, parsed.top_k, parsed.top_p)
        texts = sample.generate(
            parsed.run,
            prompts,
            parsed.length,
            choice=choice,
            seed=parsed.seed,
            stop=parsed.stop,
            **of_run(parsed),
            parse_special=parsed.parse_special,
        )
    if parsed.json:
        for prompt, text in zip(prompts, texts, strict=True):
            print(as_json(prompt, text))
    else:
        print("\n\n".join(texts))
    return DONE


def _talk(parsed: argparse.Namespace) -> int:
    """Answers the questions on standard input, each with the whole conversation so far."""
    check_alone(parsed)
    with waiting(parsed, f"reading {parsed.run}"):
        import jax

        from spmdtrain.inference import sample
        from spmdtrain.inference.chat import Chat

        if jax.process_count() > 1:
            raise ConfigError("several processes have several inputs", fix='--chat "TEXT"')
        chat = Chat(
            parsed.run,
            parsed.length,
            choice=sample.Choice(parsed.temperature, parsed.top_k, parsed.top_p),
            seed=parsed.seed,
            stop=parsed.stop,
            **of_run(parsed),
        )
    with chat:
        for question in questions():
            messages = [*chat.messages, {"role": "user", "content": question}]
            text = chat.ask(question)
            print(as_json(messages, text) if parsed.json else text, flush=True)
    return DONE
