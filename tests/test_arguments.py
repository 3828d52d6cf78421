"""What public functions are given is checked on the host, once: one line that names the argument,
and nothing is compiled or written.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmdtrain as st
from pallas_kernels.attention import attention
from pallas_kernels.loss import linear_cross_entropy
from pallas_kernels.norm import rmsnorm
from spmdtrain.config.arguments import as_flag, as_number, as_path, as_step, as_texts, as_whole

ONE = jax.devices()[:1]
CONFIG = st.RunConfig(
    model={"name": "gpt", "layers": 2, "embed": 16, "heads": 2, "vocab": 32},
    train={"steps": 2, "global_batch": 4, "sequence_length": 8},
    optimizer={"name": "sgd"},
    data={"corpus": "synthetic"},
)
NAN = float("nan")
ROW = np.arange(9)


class Given(NamedTuple):
    """Right arguments, of which a case replaces one."""

    setup: st.Setup
    data: Any
    state: st.TrainState
    batch: dict[str, np.ndarray]

    @property
    def params(self) -> dict[str, jax.Array]:
        return self.state.params

    def with_path(self, path: str, x: Any) -> dict[str, Any]:
        return {**self.params, path: x}

    def with_entry(self, name: str, x: Any) -> dict[str, Any]:
        return {**self.batch, name: x}


@pytest.fixture(scope="module")
def given() -> Given:
    config, data = st.open_data(CONFIG)
    setup = st.shard(config, devices=ONE)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), setup.state)
    batch = {name: np.zeros(x.shape, x.dtype) for name, x in setup.batch.items()}
    batch["mask"] += 1
    return Given(setup, data, zeros, batch)


TABLE = "tokens.table_ve"
Q = jnp.ones((1, 4, 2, 8))
X, WEIGHT, TARGETS = jnp.ones((2, 4, 8)), jnp.ones((16, 8)), np.zeros((2, 4), int)


def loss(**changed: Any) -> Any:
    return linear_cross_entropy(**{"x": X, "weight": WEIGHT, "targets": TARGETS, **changed})


def shard(**changed: Any) -> Any:
    return st.shard(**{"config": CONFIG, "devices": ONE, **changed})


def rule(*arguments: Any) -> Any:
    return shard(optimizer=lambda *_: st.Rule(*arguments))


def ids(g: Given, **changed: Any) -> Any:
    usual = {"setup": g.setup, "params": g.params, "prompt": [1], "length": 1}
    return st.generate_ids(**{**usual, **changed})


def batches(g: Given, **changed: Any) -> Any:
    return st.batches(**{"setup": g.setup, "data": g.data, "step": 0, "sample": 0, **changed})


def step(g: Given, state: Any = None, **batch: Any) -> Any:
    return st.make_step(g.setup)(g.state if state is None else state, {**g.batch, **batch})


# What the line says -> the call that it refuses.
REFUSED: dict[str, Any] = {
    # a config, a file
    "path=3 is not a path": lambda _: st.load(3),
    "overrides='train.steps=2' is one text": lambda _: st.load("x", "train.steps=2"),
    "overrides has 3, which is not a text": lambda _: st.load("x", [3]),
    "train.steps=0 must be greater than 0": lambda _: st.RunConfig(train={"steps": 0}),
    "RunConfig has no setting trian, did you mean train?": lambda _: st.RunConfig(trian={}),
    "optimizer.momentum=2.0 must be": lambda _: st.RunConfig(
        optimizer={"name": "sgd", "momentum": 2.0}
    ),
    "model.embed=5 is not divisible": lambda _: st.RunConfig(model={"name": "gpt", "embed": 5}),
    "vocab=1.5 is not a whole number": lambda _: CONFIG.with_vocab(1.5),
    # data
    "config= takes a RunConfig; found dict": lambda _: st.open_data({}),
    "Source(tokens=3) is not a function": lambda _: st.Source(3),
    "validation_samples=1.5 is not a whole": lambda _: st.Source(len, len, 1.5),
    "validation_samples=-1 is not a whole": lambda _: st.Source(len, len, -1),
    "step=1.5 is not a whole": lambda g: batches(g, step=1.5),
    "sample=-1 is not a whole": lambda g: batches(g, sample=-1),
    "sample=4611686018427387905 is no": lambda g: batches(g, sample=2**62 + 1),
    "data= takes a CorpusData": lambda g: batches(g, data=CONFIG),
    # a setup
    "config= takes a RunConfig; found str": lambda _: shard(config="x.toml"),
    "make='' makes no model": lambda _: shard(make=""),
    "make=3 makes no model": lambda _: shard(make=3),
    "devices=[] is not a list of devices": lambda _: shard(devices=[]),
    "devices=2 is not a list of devices": lambda _: shard(devices=2),
    "more than once": lambda _: shard(devices=ONE * 2),
    "learning_rate= gives 'x', not a rate": lambda _: shard(learning_rate=lambda _: "x"),
    "learning_rate= gives nan for step 0": lambda _: shard(learning_rate=lambda _: NAN),
    "learning_rate= gives -1.0 for step 1": lambda _: shard(learning_rate=lambda at: -1.0 * at),
    "learning_rate= asks for the value": lambda _: shard(learning_rate=np.cos),
    "loss= asks for the value": lambda _: shard(loss=lambda x, _: float(x.sum())),
    "loss= gives 'loss' of int32": lambda _: shard(loss=lambda _, targets: targets),
    "rate=nan is not a number": lambda _: rule(optax.scale_by_adam(), NAN),
    "rate=-1 is not a number": lambda _: rule(optax.scale_by_adam(), -1),
    "Rule(3) has no optax": lambda _: rule(3),
    "gradient_point=3 is not a function": lambda _: rule(optax.scale_by_adam(), 1, 3),
    "config= takes a Adafactor or": lambda _: st.make_optimizer("adamw"),
    "setup= takes a Setup; found RunConfig": lambda _: st.init_state(CONFIG),
    "setup= takes a Setup; found int": lambda _: st.make_step(1),
    "setup= takes a Setup; found str": lambda _: st.make_eval_step("x"),
    "setup= takes a Setup; found list": lambda _: st.make_loss([]),
    "setup= takes a Setup; found tuple": lambda _: st.make_gradients(()),
    "setup= takes a Setup; found set": lambda _: st.make_logits(set()),
    "setup= takes a Setup; found float": lambda g: st.make_evaluate(1.0, g.data),
    "data= takes a CorpusData or": lambda g: st.make_evaluate(g.setup, None),
    # a state, weights
    "state is dict, not a TrainState": lambda g: step(g, g.params),
    "step of the state is float32": lambda g: step(g, replace(g.state, step=np.float32(1))),
    "the state has no opt_state": lambda g: step(g, replace(g.state, opt_state={})),
    f"params['{TABLE}'] of the state is float16": lambda g: step(
        g, replace(g.state, params=g.with_path(TABLE, np.ones((32, 16), np.float16)))
    ),
    "is not on the devices of the setup": lambda g: step(
        g, replace(g.state, step=jax.device_put(jnp.int32(0), jax.devices()[1]))
    ),
    "params=3 is not a dict": lambda g: st.make_loss(g.setup)(3, g.batch),
    "params has no 'blocks": lambda g: st.make_gradients(g.setup)({}, g.batch),
    f"params['{TABLE}'] is float32 (1, 16)": lambda g: st.make_eval_step(g.setup)(
        g.with_path(TABLE, np.ones((1, 16), np.float32)), g.batch
    ),
    f"params['{TABLE}'] is str, not": lambda g: st.make_logits(g.setup)(
        g.with_path(TABLE, "x"), [[1]]
    ),
    "params has 'x', which": lambda g: ids(g, params=g.with_path("x", Q)),
    # a batch
    "a batch is a dict of arrays, not list": lambda g: st.make_step(g.setup)(g.state, []),
    "batch['targets'] has 32": lambda g: step(g, targets=g.batch["targets"] + 32),
    "batch['targets'] has -1": lambda g: step(g, targets=g.batch["targets"] - 1),
    "batch['tokens'] has 1099511627776": lambda g: step(
        g, tokens=np.full(g.batch["tokens"].shape, 2**40)
    ),
    "batch['tokens'] is list, not": lambda g: step(g, tokens=g.batch["tokens"].tolist()),
    "batch['positions'] has 8": lambda g: step(g, positions=g.batch["tokens"] + 8),
    "batch['mask'] has nan": lambda g: step(g, mask=g.batch["mask"] * NAN),
    "batch['mask'] has -1.0": lambda g: step(g, mask=-g.batch["mask"]),
    "batch['notes'] is str": lambda g: step(g, notes="x"),
    "batch['notes'] is float32 (3,)": lambda g: step(g, notes=np.ones(3)),
    "the batch has 9 tokens in a row": lambda g: st.make_eval_step(g.setup)(
        g.params, {name: np.ones((1, 4, 9), np.int32) for name in g.batch}
    ),
    # a run
    "directory=3 is not a path": lambda _: st.run(CONFIG, 3),
    "directory='' is not a path": lambda _: st.run(CONFIG, ""),
    "fresh='no' is neither": lambda _: st.run(CONFIG, "run", fresh="no"),
    "step='x' is not a whole number": lambda _: st.run(CONFIG, "run", step="x"),
    "step=True is not a whole number": lambda g: st.restore("run", g.setup, True),
    "prediction= takes": lambda _: st.run(CONFIG, "run", prediction=3),
    "devices={} is not a list": lambda _: st.run(CONFIG, "run", devices={}),
    "state.step=-1 is no": lambda g: st.run(
        CONFIG, "run", devices=ONE, state=replace(g.state, step=np.int32(-1))
    ),
    "run=b'x' is not a path": lambda _: st.weights(b"x"),
    "ema=0 is neither": lambda _: st.weights("run", ema=0),
    "setup= takes a Setup; found NoneType": lambda _: st.restore("run", None),
    "run=3 is not a path": lambda _: st.run_config(3),
    "overrides=3 is not a list": lambda _: st.run_config("run", 3),
    "make=[1] makes no model": lambda _: st.open_run("run", make=[1]),
    "settable='mesh.' is one text": lambda _: st.open_run("run", settable="mesh."),
    "paths='a.txt' is one text": lambda _: st.evaluate("run", "a.txt"),
    "field= takes a str": lambda _: st.evaluate("run", field=3),
    "parse_special=1 is neither": lambda _: st.generate("run", "x", parse_special=1),
    "choice= takes a Choice": lambda _: st.generate("run", "x", choice=0.5),
    "--stop is not a text": lambda _: st.generate("run", "x", stop=3),
    "--seed -1 is": lambda _: st.generate("run", "x", seed=-1),
    "--length 1099511627776 is": lambda g: ids(g, length=2**40),
    "not a number": lambda g: ids(g, params=g.with_path(TABLE, g.params[TABLE] * NAN)),
    "a number of thousands of digits is not 0": lambda _: st.Choice(temperature=10**5000),
    "setup= takes a Setup; found bytes": lambda g: st.save(b"", g.state, "run"),
    "directory=1.5 is not a path": lambda g: st.save(g.setup, g.state, 1.5),
    "sample=9223372036854775808 is no": lambda g: st.save(g.setup, g.state, "run", sample=2**63),
    "state.step=-2 is no": lambda g: st.save(g.setup, replace(g.state, step=np.int32(-2)), "run"),
    # plans, devices
    "config= takes a RunConfig; found int": lambda _: st.estimate(3, 1, "h100"),
    "devices=0 is not a whole": lambda _: st.estimate(CONFIG, 0, "h100"),
    "devices=1180591620717411303424 is no": lambda _: st.estimate(CONFIG, 2**70, "h100"),
    "devices=1.5 is not a whole": lambda _: st.plan(CONFIG, 1.5, "h100"),
    "hardware=3 is not hardware": lambda _: st.plan(CONFIG, 1, 3),
    "count=True is not a whole": lambda _: st.simulate_devices(True),
    "deviceless='no' is neither": lambda _: st.set_xla_flags(deviceless="no"),
    # kernels
    "attention: q is 3, not an array": lambda _: attention(3, Q, Q),
    "attention: causal='no'": lambda _: attention(Q, Q, Q, causal="no"),
    "attention: scale=nan": lambda _: attention(Q, Q, Q, scale=NAN),
    "attention: softcap='x'": lambda _: attention(Q, Q, Q, softcap="x"),
    "attention: a side of window=1.5": lambda _: attention(Q, Q, Q, window=(1.5, 0)),
    "attention: segment_ids has 1099511627776": lambda _: attention(
        Q, Q, Q, segment_ids=np.full((1, 4), 2**40)
    ),
    "rmsnorm: eps=nan": lambda _: rmsnorm(X, WEIGHT[0], eps=NAN),
    "rmsnorm: x is [1], not an array": lambda _: rmsnorm([1], WEIGHT[0]),
    "rmsnorm: no implementation 3": lambda _: rmsnorm(X, WEIGHT[0], implementation=3),
    "targets has 1099511627776": lambda _: loss(targets=TARGETS + 2**40),
    "targets is float32, not integers": lambda _: loss(targets=jnp.ones((2, 4))),
    "x is int32, not floating": lambda _: loss(x=X.astype(int)),
    "vocab=0 is no": lambda _: loss(vocab=0),
    "vocab=17 is no": lambda _: loss(vocab=17),
    "chunk_logits=0 is no": lambda _: loss(chunk_logits=0),
    "ignore_index=1.5 is no": lambda _: loss(ignore_index=1.5),
    "z_loss=inf is no": lambda _: loss(z_loss=float("inf")),
    "scale=0 must be above 0": lambda _: loss(scale=0),
    "softcap=0 must be above 0": lambda _: loss(softcap=0),
    "axis_name=3 is no": lambda _: loss(axis_name=3),
    "parts must be": lambda _: loss(parts=jnp.ones((3, 2))),
}


@pytest.mark.parametrize("line", REFUSED)
def test_is_refused_in_one_line(line, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refused:
        REFUSED[line](given)
    said = str(refused.value)
    assert line in said and "\n" not in said and len(said) < 500
    assert not list(tmp_path.iterdir())


def test_numbers_of_numpy_and_jax_and_paths_are_taken_as_what_they_are():
    assert as_path(Path("a"), "x") == as_path("a", "x") == Path("a")
    for three in (3, np.int64(3), np.array(3, np.uint8), jnp.int32(3)):
        assert as_whole(three, "x", 3, 3) == as_step(three) == 3
        assert as_number(three, "x", 3) == 3.0
    assert as_number(np.float32(0.5), "x", 0) == as_number(jnp.float32(0.5), "x", 0) == 0.5
    assert as_flag(np.bool_(True), "x") is True
    assert as_texts((Path("a"), "b"), "x", "c") == ("a", "b")
    assert as_step(None) is None


@pytest.mark.seconds
def test_a_state_that_a_step_has_taken_is_named_and_what_does_not_count_may_be_anything(given):
    stepping = st.make_step(given.setup)
    ignored = given.batch | {
        "mask": np.zeros_like(given.batch["mask"]),
        "targets": given.batch["targets"] - 100,
    }
    state = jax.device_put(given.state, ONE[0])
    after, metrics = stepping(state, ignored)
    assert int(metrics["tokens"]) == 0
    with pytest.raises(
        ValueError, match=r"has been deleted: a step reuses .* state, metrics = step"
    ):
        stepping(state, ignored)
    assert int(after.step) == 1
