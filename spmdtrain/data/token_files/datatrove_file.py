"""Opens a token file of datatrove without conversion (datatrove/pipeline/tokens/tokenizer.py).

NAME.ds         ids, little endian, uint16 or uint32
NAME.ds.index   the end of each document in tokens, uint64
NAME.ds.loss    a mark for each token, if some are not learned; such a file is refused
"""

from pathlib import Path

import numpy as np

from spmdtrain.config.errors import DataError
from spmdtrain.data.token_files.foreign_tokens import ForeignTokens
from spmdtrain.data.token_files.rows import reading, require_file
from spmdtrain.data.token_files.tokens import DTYPES

ENDING = ".ds"
WIDTHS = {2: "uint16", 4: "uint32"}  # bytes of an id
END = np.dtype("<u8")


def open_datatrove(path: Path, vocab: int, dtype: str | None) -> ForeignTokens:
    """Opens a file of datatrove whose ids are below `vocab`.

    `dtype` is the type of the ids, if the user gave it. Raises DataError if something does not fit.
    """
    for file in (path, _beside(path, ".index")):
        require_file(file)
        if not file.exists():
            raise DataError(f"no {file}", fix="the files that datatrove wrote together")
    if _beside(path, ".loss").exists():
        raise DataError(
            f"{path} has marks of what is learned, which are not read",
            found=f"{_beside(path, '.loss')}",
            fix="spmdtrain data prepare FILE --chat --out NAME",
        )
    with reading(path):
        size = path.stat().st_size
        ends = np.fromfile(_beside(path, ".index"), END).astype(np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if total < 1 or ends[0] < 0 or (np.diff(ends) < 0).any():
        raise DataError(f"{_beside(path, '.index')} is damaged: its documents do not rise")
    name = WIDTHS.get(size // total) if size % total == 0 else None
    if name is None or (dtype and dtype != name):
        raise DataError(
            f"{path} does not have the size that its index states",
            asked=f"{total} ids of {dtype or ' or '.join(WIDTHS.values())}",
            found=f"{size} bytes",
            fix="the files that datatrove wrote together",
        )
    starts = np.unique(np.append(0, ends[ends < total]))
    source = ForeignTokens(str(path), DTYPES[name], total, starts)
    source.check(vocab, is_bare=False)
    return source


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)
