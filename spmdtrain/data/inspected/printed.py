"""Renders the output of `data inspect`: counts in sentences, and windows with marks or colours."""

from collections.abc import Sequence

from spmdtrain.data.inspected.counts import RARE, CorpusCounts
from spmdtrain.data.inspected.passages import Kind, Window

# The strings around the text of a passage: in a terminal with colours, and elsewhere.
COLOURS: dict[Kind, tuple[str, str]] = {
    "counts": ("\x1b[32m", "\x1b[0m"),
    "masked": ("\x1b[2m", "\x1b[0m"),
    "padding": ("\x1b[2m", "\x1b[0m"),
}
MARKS: dict[Kind, tuple[str, str]] = {
    "counts": ("", ""),
    "masked": ("[-", "-]"),
    "padding": ("", ""),
}


def counts_text(counts: CorpusCounts) -> str:
    """Returns the counts of a corpus, a line for each thing that was counted."""
    share = counts.masked / max(counts.counted, 1)
    lines = [f"tokens     {counts.tokens:,}, {share:.1%} of them masked"]
    if counts.documents is None:
        lines.append("documents  the token file does not say where they start")
    else:
        lines += [
            f"documents  {counts.documents:,}, the longest {counts.longest:,} tokens, "
            f"the median {counts.median:,}",
            f"repeated   {counts.repeated:,} documents of {counts.repeated_tokens:,} tokens equal "
            "an earlier one",
        ]
    used = counts.vocab - counts.unused
    lines.append(
        f"ids        {used:,} of {counts.vocab:,} occur, {counts.rare:,} of them fewer than "
        f"{RARE} times"
    )
    if counts.unknown is not None:
        lines.append(f"unknown    {counts.unknown:,} tokens that the tokenizer does not know")
    if counts.counted < counts.tokens:
        lines.append(f"           counted in the first {counts.counted:,} tokens")
    head = [f"source {counts.name}"] if counts.name else []
    return "\n".join([*head, *lines])


def step_text(windows: Sequence[Window]) -> str:
    """Returns the counts of all windows of a step in one line."""
    of_kind: dict[Kind, int] = {
        kind: sum(window.tokens_of(kind) for window in windows) for kind in COLOURS
    }
    total = sum(of_kind.values())
    documents = sum(window.documents for window in windows)
    return (
        f"{len(windows):,} samples of {documents:,} documents: {of_kind['counts'] / total:.1%} of "
        f"the tokens count, {of_kind['masked'] / total:.1%} are masked, "
        f"{of_kind['padding'] / total:.1%} are padding"
    )


def window_text(window: Window, *, colours: bool) -> str:
    """Returns a window: a line above each document, and masked tokens dimmed, or in [- -]."""
    around = COLOURS if colours else MARKS
    of_source = f" of {window.source}" if window.source else ""
    texts = [f"=== sample {window.sample}{of_source}"]
    document = None
    for passage in window.passages:
        if passage.document != document and passage.kind != "padding":
            texts.append(f"\n--- document {passage.document + 1}\n")
        document = passage.document
        text = f"\n--- {passage.tokens:,} tokens of padding" if passage.kind == "padding" else None
        before, after = around[passage.kind]
        texts.append(before + (passage.text if text is None else text) + after)
    return "".join(texts)
