"""Saves documents with datasets: FOLDER KIND. `expected.json` has them as they went in."""

import json
import pathlib
import sys

import datasets

folder, kind = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(parents=True)
TEXTS = ["to be or not to be", "naïve\r\ncafé", "日本語 🙂", " spaces ", 'quotes " and , commas']
CHATS = [
    [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": f"it is {n}"}]
    for n in range(4)
]
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"what is {n}?"}],
        "chosen": [{"role": "assistant", "content": f"it is {n}"}],
        "rejected": [{"role": "assistant", "content": f"it is {n + 1}"}],
    }
    for n in range(4)
]
texts = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
chats = datasets.Dataset.from_dict({"messages": CHATS})
expected = TEXTS
match kind:
    case "to_json":
        texts.to_json(folder / "text.jsonl")
    case "to_parquet":
        texts.to_parquet(folder / "text.parquet")
    case "to_csv":
        texts.to_csv(folder / "text.csv")
    case "save_to_disk":
        texts.save_to_disk(folder / "text", num_shards=2)
    case "save_to_disk of a DatasetDict":
        datasets.DatasetDict({"train": texts, "test": texts}).save_to_disk(folder / "text")
    case "to_json of conversations":
        chats.to_json(folder / "text.jsonl")
        expected = CHATS
    case "to_parquet of conversations":
        chats.to_parquet(folder / "text.parquet")
        expected = CHATS
    case "conversations as JSON texts":
        rows = {"messages": [json.dumps(chat) for chat in CHATS]}
        datasets.Dataset.from_dict(rows).to_parquet(folder / "text.parquet")
        expected = CHATS
    case "completions as JSON texts":
        rows = [(json.dumps(chat[:1]), json.dumps(chat[1:])) for chat in CHATS]
        made = [{"prompt": prompt, "completion": completion} for prompt, completion in rows]
        datasets.Dataset.from_list(made).to_parquet(folder / "text.parquet")
        expected = CHATS
    case "contents of several types":
        for chat in CHATS[::2]:
            chat[0]["content"] = [{"type": "text", "text": chat[0]["content"]}]
        rows = [{"messages": chat} for chat in CHATS]
        made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
        made.to_parquet(folder / "text.parquet")
        expected = [chat[1:] for chat in CHATS]
    case "conversations of the type Json":
        features = datasets.Features({"messages": datasets.Json()})
        made = datasets.Dataset.from_dict({"messages": CHATS}, features=features)
        made.to_parquet(folder / "text.parquet")
        expected = CHATS
    case "pairs of trl":
        from trl import maybe_extract_prompt

        whole = [
            {
                "chosen": pair["prompt"] + pair["chosen"],
                "rejected": pair["prompt"] + pair["rejected"],
            }
            for pair in PAIRS
        ]
        datasets.Dataset.from_list(whole).map(maybe_extract_prompt).to_json(folder / "text.jsonl")
        expected = PAIRS
(folder / "expected.json").write_text(json.dumps(expected))
