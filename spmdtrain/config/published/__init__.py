"""The config.json of a published model as settings of [model], and such settings as a config.json.

`keys` reads a table of JSON and refuses what is not known, `families` has a record of each
model_type, `rope` the rotary positions in both shapes that transformers writes, `reading` and
`writing` the whole. No code of a directory is ever run: its `model_type` decides.
"""
