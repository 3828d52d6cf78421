"""Converts the config.json of a published model to settings of [model], and back.

`keys` reads a JSON table and refuses unknown keys, `families` has a record of each model_type,
`rope_keys` converts rotary positions in both forms that transformers writes, and `read_config` and
`write_config` convert the whole file. No code of a directory is ever run: its `model_type` decides.
"""
