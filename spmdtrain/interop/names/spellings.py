"""Other spellings of names in files, and the tensors that nothing needs."""

import re
from collections.abc import Collection, Sequence

from spmdtrain.interop.names.entry import EMBED, NORM, Entry
from spmdtrain.interop.names.family_names import NAMES

# Tensors that no parameter needs: masks and frequencies of older versions, and what turns pictures
# and sound into embeddings.
SAY_NOTHING = re.compile(
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
    r"|.*\.rotary_emb\.inv_freq"
    r"|(model\.)?(vision_tower|vision_model|multi_modal_projector|visual|audio_tower)\..*"
    r"|(model\.)?(vision_embedder|embed_vision|embed_audio)\..*"
)
# Other spellings of the same names: (our prefix, the prefix in other files).
SPELLINGS: Sequence[tuple[str, str]] = (
    ("", ""),
    ("transformer.", ""),
    ("", "language_model."),
    ("model.", "model.language_model."),
    ("backbone.", "model."),
)


def spelled(name: str, spelling: tuple[str, str]) -> str:
    """Returns a name of a table as a file spells it."""
    written, instead = spelling
    return instead + name.removeprefix(written) if name.startswith(written) else name


def respelled(entry: Entry, spelling: tuple[str, str]) -> Entry:
    """Returns an entry of a table with its names as a file spells them."""
    return entry._replace(names=tuple(spelled(name, spelling) for name in entry.names))


def name_in(names: Collection[str], name: str, family: str) -> str:
    """Returns the name by which files have a tensor: this one, or another one of its family."""
    if name in names:
        return name
    others = (name.replace(*renaming) for renaming in NAMES[family].renamed)
    return next((other for other in others if other in names), name)


def spelling_of(family: str, names: Collection[str]) -> tuple[str, str]:
    """Returns the spelling that files with these names use, judged by that of the embedding, or of
    the last norm if the files lack it.
    """
    table = NAMES[family].whole
    for path in (EMBED, NORM):
        for spelling in SPELLINGS:
            if spelled(table[path].names[0], spelling) in names:
                return spelling
    return SPELLINGS[0]
