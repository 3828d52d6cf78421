"""Writes the files around the weights of an export: config.json, tokenizer, template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.writing import writing
from spmdtrain.data.chats.template_folder import TEMPLATE, folder_template, jinja_text
from spmdtrain.data.tokenizers.tokenizer import from_spec
from spmdtrain.interop.directory import CONFIG, TOKENIZER, copy_files, files_to_keep, kept_in
from spmdtrain.interop.target import Target


def write_around(folder: Path, target: Target, saved: Mapping[str, Any], run: Path) -> str:
    """Writes config.json, the tokenizer and the chat template.

    Returns remarks about them.
    """
    with writing(folder):
        text = json.dumps(target.keys, indent=2, ensure_ascii=False)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    said = _write_tokenizer(folder, saved, run)
    template = saved.get("template")
    published = folder_template(folder, {})
    if isinstance(template, dict) and not (published and published.text == template["jinja"]):
        with writing(folder):
            (folder / TEMPLATE).write_text(jinja_text(template).text, encoding="utf-8")
    return said


def _write_tokenizer(folder: Path, saved: Mapping[str, Any], run: Path) -> str:
    """Writes the files of the tokenizer. Returns a remark about them."""
    spec = saved.get("tokenizer")
    kept = kept_in(run)
    if kept and (spec is None or _is_same(kept / TOKENIZER, spec)):
        copy_files(files_to_keep(kept), folder)
        return "tokenizer as imported" if (kept / TOKENIZER).is_file() else "no tokenizer"
    if not spec or spec.get("kind") != "huggingface":
        return "no tokenizer: the run's is not a Hugging Face tokenizer"
    from_spec(spec)  # raises if it is damaged
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
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
