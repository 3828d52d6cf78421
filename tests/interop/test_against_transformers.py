"""Published models compute here what transformers computes, and exports are what it loads.

`make test-hf` runs this, where torch and transformers are installed: version 4 or 5.
"""

import os
import re
from contextlib import closing
from pathlib import Path

import directories
import gemma4_files
import in_use
import jax
import numpy as np
import pytest
from chat_templates import FAMILIES, TOKENS

from spmdtrain.cli.published.check import check_logits, class_in_transformers
from spmdtrain.config.published.families.all_families import FAMILIES as KNOWN
from spmdtrain.config.published.read_config import OF_VISION, read_published
from spmdtrain.data.chats.conversation import of_messages
from spmdtrain.data.chats.encode_conversation import encode_conversation
from spmdtrain.data.chats.jinja_template import JinjaTemplate, JinjaText
from spmdtrain.data.source import open_data
from spmdtrain.data.tokenizers.tokenizer import ByteTokenizer
from spmdtrain.interop.names.spellings import SAY_NOTHING
from spmdtrain.interop.safetensors_files import open_tensors
from spmdtrain.running.device_batches import batches
from spmdtrain.running.published.export_run import export_run
from spmdtrain.running.published.import_model import import_model
from spmdtrain.train.compared.in_order import plain_arrays
from spmdtrain.train.gradients.differentiable import make_gradients

pytestmark = pytest.mark.hf
CASES = directories.CONFIGS | directories.VARIANTS
GRADIENTS = 5e-6  # rms of the difference of any tensor's gradient, relative
# Norms of a state's small outputs enlarge rounding: two ways through transformers differ by 1e-5.
OF_STATES = 4e-5


def theirs(folder):
    """The model in transformers, and what it says of loading it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return class_in_transformers(folder).from_pretrained(
        folder, output_loading_info=True, local_files_only=True, attn_implementation="eager"
    )


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_and_the_export_loads(name, tmp_path, record_property):
    import torch
    import transformers

    if name.endswith("by rope_parameters") and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 ignores rope_parameters without a word")
    directories.skip_unless_known(CASES[name]["model_type"])
    directories.write(tmp_path / "model", CASES[name])
    imported = import_model(tmp_path / "model", tmp_path / "run")
    said = check_logits(tmp_path / "model", imported.setup, imported.params)
    record_property("logits", said)
    print(f"\n{name}: {said}")
    export_run(tmp_path / "run", tmp_path / "out")
    before, _ = theirs(tmp_path / "model")
    after, loading = theirs(tmp_path / "out")
    assert not any(loading.values()), loading
    tokens = 3 * torch.arange(40)[None] % directories.VOCAB
    with torch.no_grad():
        assert torch.equal(before(tokens).logits, after(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_a_wrapper_with_a_vision_tower_has_the_logits_of_its_text_part(tied, tmp_path):
    import transformers

    if transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 has no Ministral 3")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    vision = {"model_type": "pixtral", "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = transformers.Mistral3Config(
        text_config=CASES["ministral3"] | {"tie_word_embeddings": not tied},
        vision_config=vision | sizes,
        image_token_index=directories.VOCAB - 1,
        tie_word_embeddings=tied,
    )
    whole = transformers.Mistral3ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path / "model")
    imported = import_model(tmp_path / "model", tmp_path / "run")
    assert imported.setup.config.model.tied == tied
    print(check_logits(tmp_path / "model", imported.setup, imported.params))


@pytest.mark.parametrize("model_type", OF_VISION)
def test_what_a_wrapper_has_beside_its_text_is_passed_over(model_type):
    import torch
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    of_gemma4 = {"vision_config": {}, "audio_config": {}} if "gemma4" in model_type else {}
    config = transformers.AutoConfig.for_model(model_type, **of_gemma4)
    with torch.device("meta"):
        whole = transformers.AutoModelForImageTextToText.from_config(config)
    names = whole.state_dict().keys()
    beside = [name for name in names if not re.search(r"language_model|^lm_head", name)]
    assert beside
    assert [name for name in beside if not SAY_NOTHING.fullmatch(name)] == []


def test_a_run_at_the_original_length_has_the_short_factors(tmp_path):
    """transformers takes them for a sequence of that length."""
    directories.write(tmp_path / "model", CASES["phi3"])
    length = CASES["phi3"]["original_max_position_embeddings"]
    overrides = [f"model.max_length={length}"]
    imported = import_model(tmp_path / "model", tmp_path / "run", overrides=overrides)
    print(check_logits(tmp_path / "model", imported.setup, imported.params))
    export_run(tmp_path / "run", tmp_path / "out")
    check_logits(tmp_path / "out", imported.setup, imported.params)


def test_a_head_alone_is_the_shared_matrix(tmp_path):
    import transformers

    if transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 leaves such a table on the meta device")
    config = CASES["llama"] | {"tie_word_embeddings": True}
    tensors = directories.write(tmp_path / "model", config)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    directories.write(tmp_path / "model", config, tensors)
    imported = import_model(tmp_path / "model", tmp_path / "run")
    print(check_logits(tmp_path / "model", imported.setup, imported.params))


@pytest.mark.parametrize(
    "name", [name for name, family in FAMILIES.items() if "{%- generation %}" in family.template]
)
def test_what_a_template_marks_is_what_transformers_marks(name):
    import tokenizers
    import transformers

    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bytewise = tokenizers.Tokenizer(
        tokenizers.models.BPE({x: i for i, x in enumerate(letters)}, [])
    )
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    bytewise.decoder = tokenizers.decoders.ByteLevel()
    family = FAMILIES[name]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=bytewise, **TOKENS)
    found = theirs.apply_chat_template(
        family.messages,
        chat_template=family.template,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    with closing(JinjaTemplate(JinjaText(family.template, tokens=TOKENS))) as template:
        asked = of_messages(family.messages, "here")
        ids, loss, *_ = encode_conversation(asked, template, ByteTokenizer(), "here")
    assert theirs.decode(found["input_ids"]) == bytes(ids.tolist()).decode()
    special = set(theirs.all_special_ids)
    # Their </s> is one token, ours four.
    width = [len(theirs.decode([each])) if each in special else 1 for each in found["input_ids"]]
    assert np.repeat(found["assistant_masks"], width).tolist() == loss.tolist()


def as_theirs(folder: Path, values, setup) -> dict[str, np.ndarray]:
    """Arrays by our paths as tensors by their names."""
    from spmdtrain.config.published.read_config import read_published
    from spmdtrain.interop.target import Target

    published = read_published(folder)
    target = Target(setup.config.model, published.family, {}, "float32", setup.config.finetune)
    found = {}
    for path, value in values.items():
        entry, mapped, layers = target.mapped(path, value.shape)
        for layer in layers:
            one = np.asarray(value if layer is None else value[layer])
            directories.put(found, entry.of_layer(layer), mapped.write(one))
    return found


@pytest.mark.parametrize("name", [*directories.CONFIGS, *gemma4_files.KINDS])
def test_gradients_are_those_of_transformers(name, tmp_path):
    """Of the mean loss over all tokens but the first, for every tensor of the files."""
    import torch

    directories.skip_unless_known(CASES[name]["model_type"])
    directories.write(tmp_path / "model", CASES[name])
    short = ("train.sequence_length=39", "train.global_batch=2")
    imported = import_model(tmp_path / "model", tmp_path / "run", overrides=short)
    setup = imported.setup
    tokens = np.random.default_rng(1).integers(0, directories.VOCAB, (2, 40))
    tokens[:, 3] = 0  # which pads in some families
    _, data = open_data(setup.config, lambda seed, index: tokens[index % 2])  # noqa: ARG005
    with batches(setup, data, 0, 0) as ahead:
        gradients = make_gradients(setup)(imported.params, next(ahead))
    ours = as_theirs(tmp_path / "model", gradients, setup)
    model, _ = theirs(tmp_path / "model")
    directories.learn_all_tokens(model)
    model = model.double() if name in directories.IN_DOUBLE else model
    model(torch.tensor(tokens), labels=torch.tensor(tokens)).loss.backward()
    worst, bound = 0.0, OF_STATES if setup.config.model.delta else GRADIENTS
    for tensor, want in directories.gradients_in_torch(model).items():
        difference = directories.apart(ours[tensor], want)
        worst = max(worst, difference)
        assert difference < bound, (tensor, difference)
    print(f"\n{name}: worst gradient {worst:.1e}")


@pytest.mark.parametrize("stacked", [False, True], ids=["each", "stacked"])
@pytest.mark.parametrize("family", directories.EXPERTS)
def test_what_transformers_saves_goes_out_as_it_came_in(family, stacked, tmp_path):
    """Experts one by one or all in one tensor, in 16 bits and in three files."""
    import transformers

    if transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 has but one layout")
    directories.write(tmp_path / "model", CASES[family])
    model, _ = theirs(tmp_path / "model")
    model = model.bfloat16()
    size = sum(x.numel() * x.element_size() for x in model.parameters())
    options = {"save_original_format": not stacked, "max_shard_size": size // 3}
    model.save_pretrained(tmp_path / "saved", **options)
    imported = import_model(tmp_path / "saved", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    before, after = open_tensors(tmp_path / "saved"), open_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert any(name.endswith("experts.gate_up_proj") for name in before) == stacked
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.path.name) == (after[name].dtype, after[name].path.name), name
        assert np.array_equal(tensor.map(), after[name].map()), name
    assert len({tensor.path for tensor in before.values()}) > 2
    _, loading = theirs(tmp_path / "out")
    assert not any(loading.values()), loading
    assert imported.setup.config.model.multi_token is None


BETA, WINDOW = 0.5, 24
# Tokens of the two answers with their prompts, for each pair of a sequence.
PAIRS = [[(12, 9)], [(5, 7), (4, 6)], [(3, 20)], [(11, 11)]] * 2
MESHES = {
    "one device": (),
    "data 2 fsdp 2 tensor 2": ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"),
    "pipeline 2 tensor 2": ("mesh.pipeline=2", "mesh.tensor=2", "train.microbatch=2"),
}


def answers():
    """[sequence][pair](chosen, rejected), each (ids, learned, log-probability by a reference)."""
    random = np.random.default_rng(0)

    def answer(size: int):
        learned = np.arange(size) >= size // 2
        return random.integers(0, directories.VOCAB, size), learned, -40.0 * random.random()

    return [[tuple(map(answer, pair)) for pair in pairs] for pairs in PAIRS]


def packed(indices: np.ndarray) -> dict[str, np.ndarray]:
    """The sequences of these pairs, as packing makes them."""
    ints, floats = ("tokens", "targets", "positions", "segment_ids"), ("mask", "reference")
    shape = (len(indices), WINDOW)
    batch = {name: np.zeros(shape, np.int32) for name in ints}
    batch |= {name: np.zeros(shape, np.float32) for name in floats}
    batch["segment_ids"][:] = 99
    for row, index in enumerate(indices.tolist()):
        at = 0
        halves = [half for pair in answers()[index] for half in pair]
        for segment, (ids, learned, reference) in enumerate(halves):
            place = (row, slice(at, at + len(ids) - 1))
            batch["tokens"][place], batch["targets"][place] = ids[:-1], ids[1:]
            batch["positions"][place] = np.arange(len(ids) - 1)
            batch["segment_ids"][place] = segment
            batch["mask"][place] = learned[1:]
            batch["reference"][row, at] = reference
            at += len(ids) - 1
    return batch | {"sample": indices.astype(np.uint32)}


@pytest.mark.parametrize("mesh", MESHES)
def test_preferences_have_the_gradients_of_torch(mesh, tmp_path):
    """DPO of packed pairs, against torch's own log-sigmoid of each answer alone."""
    import torch

    directories.write(tmp_path / "model", CASES["mistral"])
    asked = (
        "data.corpus=tokens",
        "data.path=pairs.bin",
        "data.packing=best_fit",
        "train.preference=dpo",
        f"train.preference_beta={BETA}",
        f"train.sequence_length={WINDOW}",
        f"train.global_batch={len(PAIRS)}",
    )
    overrides = (*asked, *MESHES[mesh])
    imported = import_model(tmp_path / "model", tmp_path / "run", overrides=overrides)
    setup = imported.setup
    batch = setup.to_devices(packed, np.arange(len(PAIRS)))
    gradients = make_gradients(setup)(imported.params, batch)
    ours = as_theirs(tmp_path / "model", plain_arrays(setup, jax.device_get(gradients)), setup)

    model, _ = theirs(tmp_path / "model")

    def gained(answer) -> torch.Tensor:
        ids, learned, reference = answer
        tokens = torch.tensor(ids)
        log = model(tokens[None, :-1]).logits[0].log_softmax(-1)
        of_tokens = log.gather(-1, tokens[1:, None])[:, 0]
        return of_tokens[torch.tensor(learned[1:])].sum() - reference

    losses = [
        -torch.nn.functional.logsigmoid(BETA * (gained(chosen) - gained(rejected)))
        for pairs in answers()
        for chosen, rejected in pairs
    ]
    torch.stack(losses).mean().backward()
    worst = 0.0
    for tensor, want in directories.gradients_in_torch(model).items():
        difference = directories.apart(ours[tensor], want)
        worst = max(worst, difference)
        assert difference < 1e-5, (tensor, difference)
    print(f"\nDPO, {mesh}: worst gradient {worst:.1e}")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", ("finetune.kind=lora", "finetune.also_train=norm.*")),
        ("qwen3", ("finetune.kind=dora", "finetune.rank_stabilised=true", "finetune.targets=q,v")),
        ("gpt2", ("finetune.kind=lora",)),
        ("phi3", ("finetune.kind=lora", "finetune.targets=gate,up,down,q,k,v")),
        ("qwen3_5_text", ("finetune.kind=dora",)),
        ("qwen3_next", ("finetune.kind=lora",)),
        ("deepseek_v3", ("finetune.kind=lora",)),
    ],
)
def test_adapters_load_in_peft_and_give_the_logits_of_the_merged_model(family, settings, tmp_path):
    directories.write(tmp_path / "model", CASES[family])
    in_peft, base = in_use.adapters(tmp_path / "model", tmp_path, settings)
    print(f"\n{family}: peft {in_peft:.1e} from the merged model, the base {base:.1e}")
    assert in_peft < 2e-6
    assert base > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_three_steps_are_those_of_torch(family, tmp_path):
    """import -> 3 steps of AdamW -> export is what torch's AdamW makes of the same batches."""
    directories.skip_unless_known(CASES[family]["model_type"])
    directories.write(tmp_path / "model", CASES[family])
    assert in_use.three_steps(tmp_path / "model", tmp_path) < 1e-5


# Without which the class of a family makes no model.
NEEDED = {
    "dots1": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    }
}


@pytest.mark.parametrize("family", KNOWN)
def test_the_keys_that_transformers_writes_by_itself_are_read(family, tmp_path):
    """A class with its own defaults, as `save_pretrained` saves it: no key of it is unknown."""
    import transformers

    directories.skip_unless_known(family)
    transformers.CONFIG_MAPPING[family](**NEEDED.get(family, {})).save_pretrained(tmp_path)
    assert read_published(tmp_path).family == family
