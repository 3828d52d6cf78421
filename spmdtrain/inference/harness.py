"""Runs tasks of lm-evaluation-harness on a trained run: scores continuations and generates texts.

`likelihoods` needs only the run. `evaluate_tasks` needs the package `lm_eval`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain.config.errors import ConfigError
from spmdtrain.config.given import shown
from spmdtrain.config.near import near
from spmdtrain.inference.sample import Choice, make_generate, make_logits, refuse_corrupting
from spmdtrain.inference.trained_run import OpenedRun, open_run
from spmdtrain.models.choose import MakeModel
from spmdtrain.train.setup import Setup

BATCH = 8  # sequences per batch
# Tokens of a row. Lengths are rounded up to powers of two, so that few programs are compiled.
SHORTEST = 16
NEW_TOKENS = 256  # of a generated text, if the task does not say
SIMILAR = 3  # names suggested for an unknown task

Ids = np.ndarray


@dataclass(frozen=True)
class Programs:
    """The programs that answer requests with any weights of one model, compiled once for each
    length.
    """

    score: Callable[..., tuple[jax.Array, jax.Array]]  # see `_make_score`
    generate: Callable[[int], Callable[..., list[Ids]]]  # by the number of new tokens


def make_programs(setup: Setup, end_of_text: int | None) -> Programs:
    """Returns the programs for a setup.

    Raises ConfigError if it has a pipeline, which cannot answer.
    """
    ends = () if end_of_text is None else (end_of_text,)

    @functools.cache
    def generate(length: int) -> Callable[..., list[Ids]]:
        return make_generate(setup, length, Choice(temperature=0), ends)

    return Programs(_make_score(setup), generate)


def likelihoods(
    opened: OpenedRun, pairs: Sequence[tuple[Ids, Ids]], programs: Programs | None = None
) -> list[tuple[float, bool]]:
    """Returns (log-likelihood in nats, whether it is the likeliest) of each (context,
    continuation).

    A continuation is scored given its context. The model sees the last `max_length` tokens of the
    two together, the length it was trained for. Both must have at least one token. `programs` are
    those of the run's setup, if already made.
    """
    limit = opened.config.model.max_length
    score = (programs or make_programs(opened.setup, opened.end_of_text)).score
    lengths = [len(context) + len(continuation) for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lengths.__getitem__)  # groups similar lengths
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        rows = [np.concatenate(pairs[at])[-(limit + 1) :] for at in chosen]
        counted = [
            min(len(pairs[at][1]), len(row) - 1) for at, row in zip(chosen, rows, strict=True)
        ]
        length = _rounded(max(len(row) for row in rows) - 1, limit)
        tokens = np.zeros((BATCH, length), np.int32)
        targets = np.zeros((BATCH, length), np.int32)
        mask = np.zeros((BATCH, length), bool)
        for line, (row, count) in enumerate(zip(rows, counted, strict=True)):
            last = len(row) - 1
            tokens[line, :last] = row[:-1]
            targets[line, :last] = row[1:]
            mask[line, last - count : last] = True
        sums, are_likeliest = jax.device_get(score(opened.params, tokens, targets, mask))
        for line, at in enumerate(chosen):
            found[at] = (float(sums[line]), bool(are_likeliest[line]))
    return found


def rolling_windows(ids: Ids, first: int, limit: int) -> list[tuple[Ids, Ids]]:
    """Returns (context, continuation) pairs whose continuations concatenate to `ids`.

    They are those of the harness (`get_rolling_token_windows`, `make_disjoint_window`): each window
    scores `limit` tokens given the previous one, which is `first` at the start. The last, shorter
    window has as many tokens of context as fit.
    """
    row = np.concatenate([[first], ids]).astype(np.int32)  # ids[at] is row[at + 1]
    windows = []
    for at in range(0, len(ids), limit):
        end = min(at + limit, len(ids))
        seen = max(end - limit, 0)
        windows.append((row[seen : at + 1], row[at + 1 : end + 1]))
    return windows


def _make_score(setup: Setup) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns `(params, tokens, targets, mask [batch, time]) -> (sums, all likeliest) [batch]`."""
    refuse_corrupting(setup)
    logits_of = make_logits(setup)
    everywhere = NamedSharding(setup.mesh, PartitionSpec())

    @partial(jax.jit, out_shardings=everywhere)  # each process reads all of them
    def judged(logits, targets, mask):
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        likeliest = (logits.argmax(-1) == targets) | ~mask
        return jnp.where(mask, chosen, 0).sum(-1), likeliest.all(-1)

    return lambda params, tokens, targets, mask: judged(logits_of(params, tokens), targets, mask)


def _rounded(length: int, limit: int) -> int:
    """Rounds a length up to a power of two, at least SHORTEST and at most `limit`."""
    size = SHORTEST
    while size < length:
        size *= 2
    return min(size, limit)


def evaluate_tasks(
    run: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    step: int | None = None,
    overrides: Sequence[str] = (),
    make: MakeModel | str | None = None,
    ema: bool = False,
) -> dict[str, Any]:
    """Runs `tasks` of lm-evaluation-harness on `run`. Returns its results, by task.

    `limit` is the number of examples per task. The harness fetches its own data. With `ema` the
    average of the weights is evaluated. Raises ConfigError if the harness is not installed or does
    not know a task.
    """
    check_tasks(tasks)
    opened = open_run(run, step=step, make=make, overrides=overrides, ema=ema)
    return results_of(harness_model(opened), tasks, limit)


def import_harness() -> Any:
    """Returns the package. Raises ConfigError if it is not installed."""
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]  in no extra of ours
    except ImportError:
        raise ConfigError("lm_eval is not installed", fix="pip install lm-eval") from None
    return lm_eval


def check_tasks(tasks: Sequence[str]) -> None:
    """Raises ConfigError if the harness is not installed, or does not know one of the tasks.

    A task may also be a file of YAML that describes one.
    """
    import_harness()
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  as above

    known = TaskManager().all_tasks
    for task in tasks:
        if task not in known and not Path(task).is_file():
            similar = near(task, known, SIMILAR)
            what = f"lm_eval knows no task {shown(task)}"
            raise ConfigError(what, fix=", ".join(similar) or "lm-eval ls tasks")


def results_of(model: Any, tasks: Sequence[str], limit: int | None) -> dict[str, Any]:
    """Returns the harness's results by task. It must know them all: see `check_tasks`."""
    return import_harness().simple_evaluate(model, tasks=list(tasks), limit=limit)["results"]


def harness_model(opened: OpenedRun, programs: Programs | None = None) -> Any:
    """Returns the run as a `lm_eval.api.model.LM`; `programs` as in `likelihoods`."""
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]  in no extra of ours

    encode = opened.tokenizer.encode
    programs = programs or make_programs(opened.setup, opened.end_of_text)

    def pair(context: str, continuation: str) -> tuple[Ids, Ids]:
        """Encodes both as the harness does: the ids of the whole, split after the context's.

        Trailing spaces of the context belong to the continuation; an empty context is the end of a
        text.
        """
        stripped = context.rstrip()
        whole = encode(context + continuation)
        if not stripped:
            return _before_a_text(opened), whole
        whole, before = opened.begun(whole), opened.begun(encode(stripped))
        return before, whole[len(before) :]

    class TrainedRun(LM):
        """A trained run as the harness sees it.

        It answers requests, which are texts, in their order.
        """

        def loglikelihood(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            asked = [pair(*request.args) for request in requests]
            return likelihoods(opened, asked, programs)

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            limit = opened.config.model.max_length
            found = []
            for request in requests:
                first = int(_before_a_text(opened)[-1])
                windows = rolling_windows(encode(request.args[0]), first, limit)
                scored = likelihoods(opened, windows, programs)
                found.append(sum(score for score, _ in scored))
            return found

        def generate_until(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            return [_text_until(opened, *request.args, programs=programs) for request in requests]

    return TrainedRun()


def _before_a_text(opened: OpenedRun) -> Ids:
    """Returns the token that precedes a text: the one that begins it, the end of another text, or
    else a line break.
    """
    for token in (opened.begin_of_text, opened.end_of_text):
        if token is not None:
            return np.array([token], np.int32)
    return opened.tokenizer.encode("\n")


def _text_until(
    opened: OpenedRun, context: str, options: dict[str, Any], programs: Programs | None = None
) -> str:
    """Returns the likeliest text after `context`, up to `options["until"]` or its own end.

    Of a long context the model sees the last tokens, as many as leave room for the text.
    """
    tokenizer = opened.tokenizer
    length = int(options.get("max_gen_toks", NEW_TOKENS))
    ids = opened.begun(tokenizer.encode(context)) if context else _before_a_text(opened)
    room = opened.config.model.max_length - length
    ids = ids[-room:] if room > 0 else ids
    ends = () if opened.end_of_text is None else (opened.end_of_text,)
    programs = programs or make_programs(opened.setup, opened.end_of_text)
    generate = programs.generate(length)
    made = generate(opened.params, [ids], jax.random.key(0))[0][len(ids) :]
    is_end = np.isin(made, ends)
    text = tokenizer.decode(made[: int(is_end.argmax())] if is_end.any() else made)
    until = options.get("until", [])
    if isinstance(until, str):
        until = [until]
    places = [text.find(each) for each in until if each]
    end = min((at for at in places if at >= 0), default=len(text))
    return text[:end]
