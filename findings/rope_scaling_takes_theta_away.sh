#!/usr/bin/env bash
# GUESS: to stretch a model that transformers 5 saved, the table `rope_scaling` of its model card (yarn, factor 4) is added to
#        config.json: it says how positions are scaled, and theta stays what `rope_parameters` says.
# TRUTH: where `rope_scaling` is, transformers 5 reads nothing of `rope_parameters`, without a word: theta falls from 1,000,000 to
#        the 10,000 of the class, and so does the share of channels that turn, whatever the file says. A file of transformers 4, with
#        `rope_theta` beside the table, keeps both.
# SEEN:  2026-11-28, transformers 5.24.0, Python 3.11:
#          qwen3        theta 1000000 -> 10000; with rope_theta beside it 1000000
#          llama        theta 1000000 -> 10000; with rope_theta beside it 1000000
#          qwen3_5_text theta 1000000 -> 10000; with rope_theta beside it 1000000; share 0.5 -> 0.25
# COST:  our exports wrote the older keys beside the newer ones without the share, so a Qwen 3.5 of another share than 0.25
#        went out with wrong logits (6.7e-2); now both forms say all, and an import refuses two tables that differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.24.0 numpy==2.4.6
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - << 'PYTHON'
import json
import tempfile
from pathlib import Path

import transformers

SHARE = "partial_rotary_factor"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
for family in ("qwen3", "llama", "qwen3_5_text"):
    said = {"rope_type": "default", "rope_theta": 1e6}
    said |= {SHARE: 0.5} if family == "qwen3_5_text" else {}
    folder = Path(tempfile.mkdtemp())
    config = transformers.CONFIG_MAPPING[family](rope_parameters=said, max_position_embeddings=4096)
    config.save_pretrained(folder)
    file = folder / "config.json"
    saved = json.loads(file.read_text())

    def read(**more):
        file.write_text(json.dumps(saved | more))
        return transformers.AutoConfig.from_pretrained(folder).rope_parameters

    before, after = read(), read(rope_scaling=YARN)
    beside = read(rope_scaling=YARN, rope_theta=1e6)
    line = f"theta {before['rope_theta']:.0f} -> {after['rope_theta']:.0f}"
    line += f"; with rope_theta beside it {beside['rope_theta']:.0f}"
    line += f"; share {before[SHARE]} -> {after[SHARE]}" if SHARE in said else ""
    print(f"{family:12} {line}")
    assert before["rope_theta"] == beside["rope_theta"] == 1e6, "no longer so"
    assert after["rope_theta"] == 1e4 and after["rope_type"] == "yarn", "no longer so"
    assert SHARE not in said or after[SHARE] == 0.25, "no longer so"
PYTHON
