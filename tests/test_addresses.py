"""Any path that a person gives is a folder, or an address that is read, or it is refused."""

import argparse
import os
from pathlib import Path

import pytest

import spmdtrain as st
from spmdtrain.cli import main
from spmdtrain.cli.addresses import NO_PATHS
from spmdtrain.cli.parser import make_parser
from spmdtrain.config import ConfigError, json_schema

ADDRESSES = ("gs://bucket/model", "s3://bucket/a", "https://host/x", "file:///tmp/x", "hdfs://h/x")
# Settings of texts that are no paths; then those that may be addresses.
NO_PATHS_OF_SETTINGS = {
    *("finetune.targets", "finetune.also_train", "sparsity.pattern", "sparsity.weights"),
    *("precision.wide", "data.field", "data.begin_of_text", "eval.tasks"),
    *("own.optimizer", "own.learning_rate", "own.loss", "own.data", "own.sinks", "own.hooks"),
    "data.mix[].name",
    "extends",  # a file of settings, which is read before there are any
}
READ = {"data.path", "data.validation_path", "data.mix[].path"}


def parsers(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()):
    """Each command's words and its parser."""
    subs = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not subs:
        yield words, parser
    for name, inner in (pair for each in subs for pair in each.choices.items()):
        yield from parsers(inner, (*words, name))


def takes_text(action: argparse.Action) -> bool:
    is_number = getattr(action.type, "__name__", "") in ("positive_int", "whole", "duration")
    return action.nargs != 0 and not action.choices and not is_number and action.type is not float


COMMANDS = list(parsers(make_parser()))
PATHS = [
    (words, action.dest)
    for words, parser in COMMANDS
    for action in parser._actions
    if takes_text(action) and action.dest not in NO_PATHS and action.type in (None, Path)
]


def filled(words: tuple[str, ...], dest: str, address: str) -> list[str]:
    """A command with an address for one argument, and a word for the others that it needs."""
    parser = dict(COMMANDS)[words]
    typed, places = list(words), []
    for action in parser._actions:
        value = address if action.dest == dest else (action.choices or ["1"])[0]
        if action.option_strings and (action.required or action.dest == dest):
            typed += [f"{action.option_strings[-1]}={value}"]
        elif not action.option_strings and (action.nargs != "?" or action.dest == dest):
            places.append(value)
    return [*typed, *places]


@pytest.mark.parametrize(("words", "dest"), PATHS, ids=lambda each: str(each))
def test_an_address_for_any_argument_is_refused(words, dest, tmp_path, monkeypatch, capsys):
    """Also for one that a command will get: what is no path has a name in the list."""
    monkeypatch.chdir(tmp_path)
    for address in ADDRESSES:
        assert main(filled(words, dest, address)) == 4
        said = capsys.readouterr().err
        assert f"{address} is an address" in said and said.count("\n") == 1
    assert not os.listdir(tmp_path)


def test_the_list_of_what_is_no_path_names_arguments():
    dests = {action.dest for _, parser in COMMANDS for action in parser._actions}
    assert dests | {"options", "settable"} >= NO_PATHS
    assert len(PATHS) > 50


def texts_of(node: dict, name: str = ""):
    """The settings that hold a text or several, by their names."""
    for key, value in node.get("properties", {}).items():
        inner = value
        if "$ref" in value:
            inner = json_schema()
            for part in value["$ref"].split("/")[1:]:
                inner = inner[part]
        items = inner.get("items", {})
        if "$ref" in items:
            items = json_schema()["$defs"][items["$ref"].rpartition("/")[2]]
        yield from texts_of(inner, f"{name}{key}.")
        yield from texts_of(items, f"{name}{key}[].")
        kinds = inner.get("anyOf", [inner])
        if any(
            kind.get("type") == "string" and "enum" not in kind and "const" not in kind
            for kind in [*kinds, *(kind.get("items", {}) for kind in kinds)]
        ):
            yield name + key


def test_every_setting_of_a_text_is_refused_or_known():
    names = set(texts_of(json_schema()))
    assert {"islands.directory", "train.init_from"} <= names
    known = NO_PATHS_OF_SETTINGS | READ
    assert names > known
    for name in sorted(names - known | {"model.from"}):
        for address in ADDRESSES[::4]:
            with pytest.raises(ConfigError, match="an address is not one|is an address"):
                st.load("configs/quickstart.toml", [f"{name}={address}"])


@pytest.mark.parametrize("corpus", ["text", "tokens"])
def test_an_address_that_a_corpus_does_not_read_is_refused(corpus, tmp_path, monkeypatch, capsys):
    config = Path("configs/quickstart.toml").absolute()
    monkeypatch.chdir(tmp_path)
    command = ["train", str(config), "--set", f"data.corpus={corpus}", "--set"]
    for address in ADDRESSES:
        assert main([*command, f"data.path={address}"]) == 5
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "gs:").exists()
