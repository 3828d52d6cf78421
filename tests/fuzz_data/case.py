"""Draws what a case is: a few plain values, from which its files are made again anywhere."""

import json
from dataclasses import asdict, dataclass, replace
from random import Random

DOCUMENT_FORMATS = ("text", "jsonl", "parquet", "arrow_stream", "arrow_file", "dataset")
TOKEN_FORMATS = ("plain", "ours", "ours_chat", "nanogpt", "llmc", "llmc3", "megatron")
TOKENIZERS = ("bytes", "characters", "bytelevel", "metaspace", "unmarked")
SEPARATORS = ("<|endoftext|>", "\n\n", "aa", "\u2028", "\x00")
TEMPLATES = (
    "<|im_start|>{role}\n{content}<|im_end|>\n",
    "[{role}] {content}\n",
    "{role}: {content}</{role}>\n",
)
# What is done to one file of a case. LEGAL ones change nothing of what it holds.
LEGAL = ("none", "link", "members")
BYTES = ("cut", "flip", "insert", "delete", "zeros", "tail", "twice", "empty")
CONTENTS = (
    *("nested", "digits", "surrogate", "other_encoding", "bom", "crlf", "cr", "array"),
    *("other_format", "other_compression"),
)
# Of ids that say nothing of themselves.
RETYPED = ("<u4", "<i8", ">u2", ">u4", ">i8", "<f4", "npy", "header")
PLACES = ("fifo", "folder", "missing", "ending", "socket")
OUTS = ("fresh", "exists", "long", "below_a_file", "fifo")


@dataclass(frozen=True)
class Case:
    """One case of a campaign."""

    seed: int
    format: str
    compression: str = ""  # "", "gz" or "zst"
    tokenizer: str = "bytes"
    chat: bool = False
    template: str = TEMPLATES[0]
    documents: int = 3
    files: int = 1
    split_on: str | None = None
    end_of_text: str = "auto"
    shard_tokens: int | None = None
    chunk: int = 2**18  # bytes and rows that prepare takes at a time
    huge: bool = False  # one document is long
    out: str = "fresh"
    damage: str = "none"
    target: str = "input"  # or "tokenizer", "sidecar", "index", "loss": the file that is damaged
    packing: str = "stream"
    length: int = 8  # of a sequence
    fraction: float = 0.0  # of the tokens that validate
    shuffle: bool = False
    # How a run names the files: "path", "glob", "validation_path", "mix" or "shared", which is a
    # mixture of sources that share files.
    reads: str = "path"

    @property
    def is_prepared(self) -> bool:
        """Whether the case begins with documents, and not with token files."""
        return self.format in DOCUMENT_FORMATS

    @property
    def may_be_read(self) -> bool:
        """Whether nothing was done that would excuse a refusal."""
        return self.damage in LEGAL and self.out == "fresh"

    @property
    def reads_glob(self) -> bool:
        """Whether files are named by a pattern, which finds only those that are there."""
        return self.reads == "glob" and self.damage not in PLACES

    def random(self, purpose: str) -> Random:
        """Return the numbers of one purpose: others do not move when it takes more of them."""
        return Random(f"{self.seed} {purpose}")

    def spoken(self) -> str:
        """Return it as JSON, without what is as usual."""
        usual = asdict(Case(self.seed, self.format))
        unusual = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return json.dumps({"seed": self.seed, "format": self.format} | unusual)


def draw(seed: int) -> Case:
    """Return the case of a seed."""
    random = Random(seed)
    if random.random() < 0.65:
        case = _draw_documents(seed, random)
    else:
        case = _draw_tokens(seed, random)
    return replace(
        case,
        packing=random.choice(("stream", "stream", "documents", "best_fit")),
        length=random.choice((1, 2, 3, 5, 8, 16)),
        fraction=random.choice((0.0, 0.1, 0.3, 0.5)),
        shuffle=random.random() < 0.5,
    )


def _draw_documents(seed: int, random: Random) -> Case:
    format_ = random.choice(DOCUMENT_FORMATS)
    chat = format_ != "text" and random.random() < 0.35
    case = Case(
        seed,
        format_,
        compression=random.choice(("", "gz", "zst")) if format_ in ("text", "jsonl") else "",
        tokenizer=random.choice(TOKENIZERS),
        chat=chat,
        template=random.choice(TEMPLATES),
        documents=random.choice((0, 1, 2, 3, 5, 9, 30)),
        files=random.choice((1, 1, 1, 2, 3)) if format_ != "dataset" else 1,
        split_on=random.choice((None, *SEPARATORS)) if format_ == "text" else None,
        end_of_text=random.choice(("auto", "auto", "none")),
        shard_tokens=random.choice((None, None, None, 1, 7, 50, 1000)),
        chunk=random.choice((1, 2, 7, 100, 2**18)),
        huge=random.random() < 0.01,
        out="fresh" if random.random() < 0.95 else random.choice(OUTS[1:]),
        reads=random.choice(("path", "glob")),
    )
    if random.random() < 0.4:
        return replace(case, damage=random.choice(LEGAL))
    target = "tokenizer" if case.tokenizer in TOKENIZERS[2:] and random.random() < 0.4 else "input"
    if format_ == "dataset" and random.random() < 0.4:
        target = "sidecar"
    return replace(case, target=target, damage=_draw_damage(random))


def _draw_damage(random: Random) -> str:
    return random.choice(random.choice((BYTES, BYTES, CONTENTS, PLACES)))


def _draw_tokens(seed: int, random: Random) -> Case:
    format_ = random.choice(TOKEN_FORMATS)
    case = Case(
        seed,
        format_,
        tokenizer=random.choice(TOKENIZERS) if format_ in ("plain", "ours") else "bytes",
        chat=format_ == "ours_chat",
        documents=random.choice((1, 2, 5, 9, 30)),
        files=random.choice((1, 1, 2, 3)),
        reads=random.choice(("path", "glob", "validation_path", "mix")),
    )
    if format_ == "plain":
        case = replace(case, reads=random.choice(("path", "glob")))
    if format_ in ("nanogpt", "llmc") and random.random() < 0.3:
        case = replace(case, reads="shared", files=3)
    if random.random() < 0.4:
        return replace(case, damage=random.choice(LEGAL[:2]))
    beside = {"ours": ("sidecar", "index"), "ours_chat": ("sidecar", "index", "loss")}
    beside["megatron"] = ("index",)
    target = random.choice(("input", *beside.get(format_, ())))
    damage = "shrink" if random.random() < 0.05 else _draw_damage(random)
    if format_ == "nanogpt" and random.random() < 0.4:
        damage = random.choice(RETYPED)
    return replace(case, target=target, damage=damage)
