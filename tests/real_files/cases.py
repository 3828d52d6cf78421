"""The files that are written and read: by which tool, how, and what must come of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from real_files import read


@dataclass(frozen=True)
class Case:
    """A file of a tool. `refused` are words of the line that refuses it; empty: it is read."""

    environment: str
    tool: str  # the package whose version the table shows
    what: str
    script: str
    arguments: tuple[str, ...]
    reader: Callable[[Path], str]
    refused: str = ""


def _models(environment: str, families: dict[str, str], *options: str) -> list[Case]:
    said = f", {', '.join(options)}" if options else ""
    return [
        Case(
            environment, "transformers", f"{name}{said}", "model", (name, *options), read.model, no
        )
        for name, no in families.items()
    ]


NO_FAMILY = "gpt_neox"
OLD = {"GPT2": "", "Llama": "", "GPTNeoX": NO_FAMILY}
NEW = dict.fromkeys(
    (
        *("GPT2", "Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Phi3", "Olmo2"),
        *("Granite", "SmolLM3", "Mixtral", "Qwen3Moe", "GptOss"),
    ),
    "",
)
# Its config.json names layers of further tokens, which its class does not have and the files lack.
FURTHER = {"DeepseekV3": "--set model.multi_token=none if transformers saved it"}
TOKENIZERS = {
    "byte-level BPE": "",
    "BPE that adds <s>": "",
    "Unigram": "",
    "WordPiece": "",
    "BPE with dropout": "",
}
TABLES = ("to_json", "to_parquet", "save_to_disk")
CHATS = (
    *("to_json of conversations", "to_parquet of conversations"),
    *("conversations of the type Json", "contents of several types", "conversations as JSON texts"),
)
NO_JSON = "and not a tokenizer.json; try the tokenizer.json of the same model"
INDICES = ("uint16", "int32", "sequences in documents", "merged")


def _tables() -> list[Case]:
    name, script = "datasets", "table"
    return [
        *(Case("data", name, kind, script, (kind,), read.documents) for kind in TABLES),
        Case("data", name, "to_csv", script, ("to_csv",), read.documents, "is a table"),
        Case(
            *("data", name, "save_to_disk of a DatasetDict", script),
            *(("save_to_disk of a DatasetDict",), read.documents, "split"),
        ),
        *(Case("data", name, kind, script, (kind,), read.conversations) for kind in CHATS),
        Case(
            *("data", name, "prompts and completions as JSON texts", script),
            *(("completions as JSON texts",), read.conversations, "holds messages as JSON"),
        ),
        Case("data", "trl", "pairs", script, ("pairs of trl",), read.conversations),
    ]


def _tokenizers() -> list[Case]:
    return [
        *(
            Case("tokenizers", "tokenizers", kind, "tokenizer", (kind,), read.tokenizer, refused)
            for kind, refused in TOKENIZERS.items()
        ),
        *(
            Case(
                "tokenizers", tool, what, "other_tokenizer", (tool,), read.other_tokenizer, refused
            )
            for tool, what, refused in (
                ("sentencepiece", "a .model", "tokenizer.json"),
                ("tiktoken", "a .tiktoken", "tokenizer.json"),
                ("mistral-common", "tekken.json", "tokenizer.json"),
            )
        ),
    ]


CASES = [
    *_models("transformers 4.28", OLD, "safetensors"),
    *_models("transformers 4.28", {"Llama": "safetensors"}, "bin"),
    *_models("transformers 4.57", NEW | {"DeepseekV3": ""}),
    *_models("transformers 5.24", NEW | FURTHER),
    *_models("transformers 5.24", {"DeepseekV3": ""}, "no further tokens"),
    *_models("transformers 5.24", {"Llama": ""}, "sharded"),
    *_models("transformers 5.24", {"Llama": ""}, "bfloat16"),
    Case(
        "transformers 5.24",
        "peft",
        "an adapter",
        "adapter",
        (),
        read.adapter,
        "is an adapter of peft",
    ),
    Case("transformers 5.24", "lm-eval", "scores of its own model", "scores", (), read.scores),
    *_tokenizers(),
    *_tables(),
    *(Case("megatron", "megatron-core", kind, "index", (kind,), read.index) for kind in INDICES),
    Case("megatron", "megatron-core", "with modes", "index", ("with modes",), read.index, "mode"),
]
