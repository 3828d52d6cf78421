"""Runs tasks of lm-evaluation-harness on a trained run: scores continuations and generates texts.

`likelihoods` needs only the run. `evaluate_tasks` needs the package `lm_eval`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain.config.arguments import shown
from spmdtrain.config.errors import ConfigError
from spmdtrain.config.near import near
from spmdtrain.inference.requests import (
    Ids,
    Pair,
    TextRequest,
    generation,
    rolling_pairs,
    scored_pair,
)
from spmdtrain.inference.sample import Choice, make_generate, make_logits, refuse_corrupting
from spmdtrain.inference.trained_run import OpenedRun, open_run
from spmdtrain.models.choose import MakeModel
from spmdtrain.train.setup import Setup

BATCH = 8  # sequences per batch
# Tokens of a row. Lengths are rounded up to powers of two, so that few programs are compiled.
SHORTEST = 16
SIMILAR = 3  # names suggested for an unknown task


@dataclass(frozen=True)
class Programs:
    """The programs that answer requests with any weights of one model, compiled once for each
    length.
    """

    score: Callable[..., tuple[jax.Array, jax.Array]]  # see `_make_score`
    # By the number of new tokens, and how each is chosen.
    generate: Callable[[int, Choice], Callable[..., list[Ids]]]


def make_programs(setup: Setup, end_of_text: int | None) -> Programs:
    """Returns the programs for a setup.

    Raises ConfigError if it has a pipeline, which cannot answer.
    """
    ends = () if end_of_text is None else (end_of_text,)

    @functools.cache
    def generate(length: int, choice: Choice) -> Callable[..., list[Ids]]:
        return make_generate(setup, length, choice, ends)

    return Programs(_make_score(setup), generate)


def likelihoods(
    opened: OpenedRun, pairs: Sequence[Pair], programs: Programs | None = None
) -> list[tuple[float, bool]]:
    """Returns (log-likelihood in nats, whether it is the likeliest) of each (context,
    continuation).

    A continuation is scored given its context. The model sees the last `max_length` tokens of the
    two together, the length it was trained for. A context has at least one token, and a
    continuation at most that length. `programs`: the programs of the run's setup, if already made.
    """
    limit = opened.config.model.max_length
    assert all(0 < len(scored) <= limit for _, scored in pairs), "each has 1 to max_length tokens"
    score = (programs or make_programs(opened.setup, opened.end_of_text)).score
    lengths = [len(context) + len(continuation) for context, continuation in pairs]
    order = sorted(range(len(pairs)), key=lengths.__getitem__)  # groups similar lengths
    scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    for first in range(0, len(order), BATCH):
        chosen = order[first : first + BATCH]
        rows = [np.concatenate(pairs[at])[-(limit + 1) :] for at in chosen]
        length = _rounded(max(len(row) for row in rows) - 1, limit)
        tokens = np.zeros((BATCH, length), np.int32)
        targets = np.zeros((BATCH, length), np.int32)
        mask = np.zeros((BATCH, length), bool)
        for line, (at, row) in enumerate(zip(chosen, rows, strict=True)):
            last = len(row) - 1
            tokens[line, :last] = row[:-1]
            targets[line, :last] = row[1:]
            mask[line, last - len(pairs[at][1]) : last] = True
        sums, are_likeliest = jax.device_get(score(opened.params, tokens, targets, mask))
        for line, at in enumerate(chosen):
            scores[at] = (float(sums[line]), bool(are_likeliest[line]))
    return scores


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


def results_of(
    model: Any, tasks: Sequence[str], limit: int | None, **options: Any
) -> dict[str, Any]:
    """Returns the harness's results by task, which it must know: see `check_tasks`.

    `options`: further arguments of its `simple_evaluate`.
    """
    lm_eval = import_harness()
    return lm_eval.simple_evaluate(model, tasks=list(tasks), limit=limit, **options)["results"]


def harness_model(opened: OpenedRun, programs: Programs | None = None) -> Any:
    """Returns the run as a `lm_eval.api.model.LM`; `programs` as in `likelihoods`."""
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]  in no extra of ours

    compiled = programs or make_programs(opened.setup, opened.end_of_text)

    class TrainedRun(LM):
        """A trained run as the harness sees it.

        It answers requests, which are texts, in their order. One that cannot be answered is
        refused before any is answered.
        """

        def loglikelihood(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            pairs = [scored_pair(opened, *request.args) for request in requests]
            return likelihoods(opened, pairs, compiled)

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            texts = [rolling_pairs(opened, request.args[0]) for request in requests]
            scores = iter(likelihoods(opened, list(chain.from_iterable(texts)), compiled))
            return [sum(next(scores)[0] for _ in pairs) for pairs in texts]

        def generate_until(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            texts = [generation(opened, *request.args) for request in requests]
            return [
                generated(opened, text, compiled, jax.random.key(number))
                for number, text in enumerate(texts)
            ]

    return TrainedRun()


def rehearse(opened: OpenedRun, tasks: Sequence[str], limit: int | None) -> None:
    """Reads every request of `tasks`, and answers none: weights are not needed.

    Raises UserError for a request that could not be answered, so that no run ends on it later.
    """
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]  as above

    class Rehearsal(LM):
        """A reader of requests, as strict as a trained run."""

        def loglikelihood(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            for request in requests:
                scored_pair(opened, *request.args)
            return [(-1.0, False)] * len(requests)

        def loglikelihood_rolling(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            return [-1.0] * len(requests)

        def generate_until(self, requests, disable_tqdm: bool = False):  # noqa: ARG002
            for request in requests:
                generation(opened, *request.args)
            return [""] * len(requests)

    results_of(Rehearsal(), tasks, limit, bootstrap_iters=0)


def generated(opened: OpenedRun, request: TextRequest, programs: Programs, key: jax.Array) -> str:
    """Generates the text of a request, up to its own end or the first stop of the request."""
    generate = programs.generate(request.length, request.choice)
    ids = generate(opened.params, [request.context], key)[0][len(request.context) :]
    is_end = np.isin(ids, () if opened.end_of_text is None else (opened.end_of_text,))
    own = ids[: int(is_end.argmax())] if is_end.any() else ids
    return request.cut(opened.tokenizer.decode(own))
