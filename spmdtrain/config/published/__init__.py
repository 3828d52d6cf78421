"""Converts the config.json of a published model to settings of [model], and back.

`keys` reads a JSON table and refuses unknown keys, `families` has a record of each model_type,
`rope` converts rotary positions in both forms that transformers writes, and `reading` and `writing`
convert the whole file. No code of a directory is ever run: its `model_type` decides.
"""
