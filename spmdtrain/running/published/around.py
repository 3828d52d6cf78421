"""Writes the files around the weights of an export: config.json, tokenizer, template, and where
generated text stops.
"""

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from spmdtrain.config.writing import writing
from spmdtrain.data.chats.simple_template import SimpleTemplate
from spmdtrain.data.chats.stops import stop_of_closing
from spmdtrain.data.chats.template_folder import (
    TEMPLATE,
    folder_template,
    jinja_text,
    template_from_spec,
)
from spmdtrain.data.tokenizers.tokenizer import from_spec
from spmdtrain.interop.companion_files import (
    CONFIG,
    TOKENIZER,
    copy_files,
    files_to_keep,
    original_folder,
)
from spmdtrain.interop.target import Target

GENERATION = "generation_config.json"


def write_around(folder: Path, target: Target, saved: Mapping[str, Any], run: Path) -> str:
    """Writes config.json, the tokenizer, and for a run of conversations how its answers end.

    Returns remarks about them.
    """
    with writing(folder):
        text = json.dumps(target.keys, indent=2, ensure_ascii=False)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    remark = _write_tokenizer(folder, saved, run)
    if saved.get("template") is None or not saved.get("tokenizer"):
        return remark
    return remark + _write_conversations(folder, saved)


def _write_conversations(folder: Path, saved: Mapping[str, Any]) -> str:
    """Writes the chat template, and generation settings that stop where `sample --chat` does.

    Returns a remark about an end that only a text has, which transformers takes as an argument.
    """
    spec = saved["template"]
    tokenizer = from_spec(saved["tokenizer"])
    begin, end = saved.get("begin_of_text"), saved.get("end_of_text")
    with closing(template_from_spec(spec)) as template:
        stop = stop_of_closing(template.frame.closing, tokenizer)
        ids = [*template.ends, *([] if end is None else [end])]
    if isinstance(spec, str):
        text = SimpleTemplate.parse(spec).jinja("" if begin is None else tokenizer.decode([begin]))
    else:
        text = jinja_text(spec).text
    if isinstance(stop, int):
        ids.append(stop)
    published = folder_template(folder, {})
    with writing(folder):
        if not (published and published.text == text):
            (folder / TEMPLATE).write_text(text, encoding="utf-8")
        _stop_at(folder / GENERATION, list(dict.fromkeys(ids)), begin)
    if isinstance(stop, str):
        return f"; answers end with the text {stop!r}: generate(stop_strings=[...], tokenizer=...)"
    return ""


def _stop_at(file: Path, ids: list[int], begin: int | None) -> None:
    """Writes generation settings that stop at `ids`; others stay as they were published.

    A published file that stops there already is left as it is, to the byte.
    """
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    published = settings.get("eos_token_id")
    if set(published if isinstance(published, list) else [published]) == set(ids):
        return
    settings.setdefault("bos_token_id", begin)
    if ids:
        settings["eos_token_id"] = ids if len(ids) > 1 else ids[0]
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(folder: Path, saved: Mapping[str, Any], run: Path) -> str:
    """Writes the files of the tokenizer. Returns a remark about them."""
    spec = saved.get("tokenizer")
    original = original_folder(run)
    if original and (spec is None or _is_same(original / TOKENIZER, spec)):
        copy_files(files_to_keep(original), folder)
        return "tokenizer as imported" if (original / TOKENIZER).is_file() else "no tokenizer"
    if not spec or spec.get("kind") != "huggingface":
        return "no tokenizer: the run's is not a Hugging Face tokenizer"
    from_spec(spec)  # raises if it is damaged
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # By default transformers 4 adds token_type_ids, which `generate` refuses, and takes spaces
        # before punctuation away.
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos_token", "begin_of_text"), ("eos_token", "end_of_text")):
        number = saved.get(key)
        if number is not None and (token := from_spec(spec).decode([number])):
            described[name] = token
    described["add_bos_token"] = saved.get("begin_of_text") is not None
    with writing(folder):
        (folder / TOKENIZER).write_text(spec["json"], encoding="utf-8")
        text = json.dumps(described, indent=2, ensure_ascii=False)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return "tokenizer of the run"


def _is_same(path: Path, spec: Mapping[str, Any]) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == spec.get("json")
