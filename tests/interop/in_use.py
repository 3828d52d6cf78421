"""Measures what a published model does in use: packed, cached, trained, tuned with adapters.

Errors are roots of mean squares, relative, unless something else is said.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import directories
import jax
import jax.numpy as jnp
import numpy as np

from spmdtrain.cli.published.check import class_in_transformers
from spmdtrain.config import load
from spmdtrain.inference.sample import Choice, make_generate, make_logits
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.counted_flops import counted_flops_per_token
from spmdtrain.models.layers import empty_cache
from spmdtrain.models.logits import logit_shape, logits_of
from spmdtrain.planner.cost import shape
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.running.loop import run
from spmdtrain.running.published.export_adapters import export_adapters
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model
from spmdtrain.train.setup import Setup

DOCUMENTS = (13, 1, 25)  # tokens of each in a row
PREFILLS = (1, 5, 12, 20, 38)
PROMPTS, SAMPLED = (3, 9, 17), 12  # tokens of prompts, and after each
CHUNKS = 64  # tokens of a sequence whose FLOPs are counted
STEPS, ROWS, LENGTH = 3, 4, 32
RATE = 1e-3
LEAST_STEP = 0.6 * RATE  # of Adam, if the first gradient, of an expert for one, is that of step 3


def theirs(folder: Path) -> Any:
    """The model in transformers."""
    return class_in_transformers(folder).from_pretrained(
        folder, local_files_only=True, attn_implementation="eager"
    )


def packed(
    setup: Setup, params: dict[str, jax.Array], documents: Sequence[int] = DOCUMENTS
) -> float:
    """How far documents of one row, of so many tokens, are from each of them alone.

    Raises AssertionError if the last token of the first document changes a bit of the others.
    """
    lengths = np.array(documents)
    segments = np.repeat(np.arange(len(lengths)), lengths)[None]
    positions = np.concatenate([np.arange(length) for length in lengths])[None]
    tokens = np.random.default_rng(5).integers(0, setup.config.vocab, (1, lengths.sum()))

    @jax.jit
    def logits(tokens_bt: jax.Array, positions_bt: jax.Array, segments_bt: jax.Array) -> jax.Array:
        module: Any = setup.model.bind(params)
        ctx = ForwardContext(positions_bt, segment_ids_bt=segments_bt, ids_bt=tokens_bt)
        x_bte, _ = module.blocks(module.embed(tokens_bt, ctx), ctx)
        return logits_of(*module.head(x_bte, ctx), **logit_shape(setup.config.model))

    in_a_row = np.asarray(logits(tokens, positions, segments))
    changed = tokens.copy()
    changed[0, lengths[0] - 1] += 1
    changed %= setup.config.vocab
    others = np.asarray(logits(changed, positions, segments))[:, lengths[0] :]
    assert np.array_equal(others, in_a_row[:, lengths[0] :]), "a document changes the next one"
    alone = [
        logits(tokens[:, stop - length : stop], np.arange(length)[None], np.zeros((1, length), int))
        for length, stop in zip(lengths, np.cumsum(lengths), strict=True)
    ]
    return directories.apart(in_a_row, np.concatenate([np.asarray(x) for x in alone], 1))


def cached(setup: Setup, params: dict[str, jax.Array], prefills: Sequence[int] = PREFILLS) -> float:
    """How far the logits of the token after each prefill are, behind a cache, from the whole's."""
    length = max(prefills) + 1
    tokens = np.random.default_rng(6).integers(0, setup.config.vocab, (2, length))
    whole = np.asarray(make_logits(setup)(params, tokens))

    @jax.jit
    def extend(tokens_bt: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        module: Any = setup.model.bind(params)
        positions = cache.length + jnp.arange(tokens_bt.shape[1])
        ctx = ForwardContext(jnp.broadcast_to(positions, tokens_bt.shape))
        return module.extend(tokens_bt, ctx, cache)

    errors = []
    for prefill in prefills:
        _, cache = extend(tokens[:, :prefill], empty_cache(setup.config.model, (2, length)))
        logits, _ = extend(tokens[:, prefill : prefill + 1], cache)
        following = np.asarray(logits)[:, : whole.shape[-1]]
        errors.append(directories.apart(following, whole[:, prefill]))
    return max(errors)


def sampled(setup: Setup, params: dict[str, jax.Array]) -> str:
    """Says whether prompts of three lengths in a batch get the likeliest tokens of each alone."""
    random = np.random.default_rng(8)
    prompts = [random.integers(0, directories.VOCAB, length) for length in PROMPTS]
    room = max(PROMPTS) + SAMPLED
    # One program for each number of prompts.
    generate = make_generate(setup, SAMPLED, Choice(0), shapes=lambda *_: (min(PROMPTS), room))
    key = jax.random.key(0)
    in_a_batch = generate(params, prompts, key)
    for prompt, ids in zip(prompts, in_a_batch, strict=True):
        (alone,) = generate(params, [prompt], key)
        assert np.array_equal(ids, alone), "a prompt is continued otherwise in a batch"
    return "as each alone"


def planned(setup: Setup) -> str:
    """How far the planner's FLOPs are from those counted in the program.

    Raises AssertionError if its number of parameters is another.
    """
    model = setup.config.model
    assert shape.parameters(model) == setup.model.size
    # Recurrences take whole chunks, and compute those of a part whole.
    train = setup.config.train.model_copy(update={"sequence_length": CHUNKS})
    counted = counted_flops_per_token(setup.config.model_copy(update={"train": train}), setup.model)
    assert counted is not None
    return f"{100 * abs(model_flops_per_token(model, CHUNKS) / counted - 1):.1g} %"


def three_steps(model: Path, folder: Path) -> float:
    """How far the weights are after three steps of AdamW, ours from those of torch.

    That is the rms of the difference, of a step of `RATE`. An element whose gradient is near 0 may
    move the other way: Adam divides by its size.
    """
    import torch

    rows = np.random.default_rng(2).integers(0, directories.VOCAB, (STEPS * ROWS, LENGTH + 1))
    file = folder / "c.toml"
    file.write_text(
        f'[model]\nfrom = "{model}"\n[train]\ninit_from = "{model}"\n'
        f"steps = {STEPS}\nglobal_batch = {ROWS}\nsequence_length = {LENGTH}\nclip = 'none'\n"
        f"[optimizer]\nwarmup = 0\nlearning_rate = {RATE}\nschedule = 'constant'\n"
        "weight_decay = 0.0\nbeta1 = 0.9\nbeta2 = 0.95\nepsilon = 1e-8\n[eval]\nevery = 0\n"
    )
    run(
        load(file),
        folder / "trained",
        devices=jax.devices()[:1],
        data=lambda seed, index: rows[index].astype(np.int32),  # noqa: ARG005 - of every seed
    )
    export_run(folder / "trained", folder / "out")
    in_torch = theirs(model)
    directories.learn_all_tokens(in_torch)
    adam = torch.optim.AdamW(in_torch.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        tokens = torch.tensor(rows[ROWS * step : ROWS * (step + 1)])
        logits = in_torch(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    in_torch.save_pretrained(folder / "in_torch")
    # By way of a run: some families have other names in transformers than in published files.
    import_model(folder / "in_torch", folder / "as_published")
    export_run(folder / "as_published", folder / "published")
    ours, expected = open_tensors(folder / "out"), open_tensors(folder / "published")
    began = open_tensors(model)
    assert ours.keys() == expected.keys(), sorted(ours.keys() ^ expected.keys())[:4]
    errors = []
    for name, tensor in expected.items():
        moved = np.abs(tensor.map() - began[name].map()).max()
        difference = np.sqrt(np.mean((ours[name].map() - tensor.map()) ** 2))
        assert moved > LEAST_STEP or tensor.map().size == 1 or difference == 0, name
        errors.append(difference)
    return float(max(errors))


def adapters(model: Path, folder: Path, settings: tuple[str, ...]) -> tuple[float, float]:
    """How far peft's logits are from those of the merged model, and those without adapters."""
    import peft
    import torch

    file = folder / "adapters.toml"
    file.write_text(
        f'[model]\nfrom = "{model}"\n[train]\ninit_from = "{model}"\nsteps = 2\n'
        "global_batch = 2\nsequence_length = 16\n[optimizer]\nwarmup = 0\nlearning_rate = 1e-2\n"
        "schedule = 'constant'\n[eval]\nevery = 0\n[data]\ncorpus = 'synthetic'\n"
    )
    run(load(file, settings), folder / "tuned", devices=jax.devices()[:1])
    export_adapters(folder / "tuned", folder / "adapter")
    export_run(folder / "tuned", folder / "merged", dtype="float32")
    tokens = 3 * torch.arange(40)[None] % directories.VOCAB
    base, merged = theirs(model), theirs(folder / "merged")
    with torch.no_grad():
        plain = base(tokens).logits.double().numpy()
        expected = merged(tokens).logits.double().numpy()
        adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
        in_peft = adapted(tokens).logits.double().numpy()
    return directories.apart(in_peft, expected), directories.apart(plain, expected)
