"""[data]: the corpus, its sources, and how they are cut into sequences."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import (
    Count,
    Fraction,
    LocalPath,
    NonNegative,
    Positive,
    Settings,
    Strings,
    Tokens,
)


class MixSource(Settings):
    """One source of a mixture: token files. All sources must have the same tokenizer."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] = Field(
        description="letters, digits, _ and -; its losses are loss/NAME and eval_loss/NAME"
    )
    path: str | Strings = Field(description="files or globs, .bin")
    weight: Positive = Field(
        default=1.0, description="share of the samples, relative to the other weights"
    )


class MixPhase(Settings):
    """A phase at the beginning of a run, in which the sources of `data.mix` have other weights."""

    tokens: Tokens = Field(description="it ends with the sample in which the run has read so many")
    weights: Annotated[tuple[NonNegative, ...], Field(strict=False)] = Field(
        description="weight of each source, in the order of data.mix; 0: it is not read"
    )
    change: Literal["none", "linear"] = Field(
        default="none",
        description="none: the weights stay | linear: they become those of the next phase, or of "
        "data.mix after the last, in 32 equal steps",
    )

    @model_validator(mode="after")
    def _check(self):
        if not any(self.weights):
            raise ValueError("data.phases: the weights of a phase are all 0; set one above 0")
        return self


Mix = Annotated[tuple[MixSource, ...], Field(strict=False)]
Phases = Annotated[tuple[MixPhase, ...], Field(strict=False)]
STREAMED = ("jsonl", "parquet")
# Settings of streams alone.
OF_STREAMS = ("begin_of_text", "field", "workers", "shuffle_buffer", "cache", "cache_gb")


class DataConfig(Settings):
    """The data that a run trains on, and how it is cut into sequences."""

    corpus: Literal["stdlib", "synthetic", "text", "tokens", "jsonl", "parquet"] = Field(
        default="stdlib",
        description="Python's own library source | seeded noise with structure | "
        "text files | token files | documents that are tokenized as they are read, a stream",
    )
    path: str | Strings | None = Field(
        default=None,
        description="files or globs (text), .bin (tokens); streams also take gs://, s3:// and "
        "https:// addresses",
    )
    validation_path: str | Strings | None = Field(
        default=None,
        description="files of the same kind to validate on, instead of validation_fraction; "
        "a stream holds their tokens in memory",
    )
    mix: Mix = Field(
        default=(), description="weighted sources of token files, instead of corpus and path"
    )
    phases: Phases = Field(
        default=(), description="phases with other weights of data.mix, before those of data.mix"
    )
    tokenizer: LocalPath = Field(
        default="bytes", description="bytes | characters | a Hugging Face tokenizer.json"
    )
    dtype: Literal["uint16", "uint32"] | None = Field(
        default=None,
        description="type of the ids in .bin files that do not state it; "
        "default: the smallest that holds the vocabulary",
    )
    validation_fraction: Fraction = Field(
        default=0.1,
        description="share at the end of the token stream that is kept for evaluation; default "
        "for jsonl and parquet: 0, because their end is not known",
    )
    shuffle: bool = True
    packing: Literal["stream", "documents", "best_fit"] = Field(
        default="stream",
        description="stream: attend across document ends | documents: segments, positions reset, "
        "no loss across | best_fit: the same, and documents that fit into a sequence are not cut; "
        "the rest is padding",
    )
    read_ahead: Count = Field(
        default=4, description="batches made ahead of the step, to bridge delays of a disk"
    )

    field: str = Field(
        default="text",
        min_length=1,
        description="key (jsonl) or column (parquet) that holds the text",
    )
    begin_of_text: str = Field(
        default="auto",
        min_length=1,
        description="token before each document of jsonl and parquet: auto (as the tokenizer's own "
        "files say) | none | a token",
    )
    workers: Count = Field(
        default=1,
        description="processes that tokenize jsonl and parquet; 1: threads of the run itself",
    )
    shuffle_buffer: Count = Field(
        default=4096,
        description="sequences of jsonl and parquet that are held in memory and shuffled together",
    )
    cache: LocalPath | None = Field(
        default=None,
        min_length=1,
        description="folder for copies of remote files; default: ~/.cache/spmdtrain/copies",
    )
    cache_gb: Positive = Field(
        default=50.0, description="gigabytes (10^9 bytes) that these copies may take"
    )

    @property
    def is_streamed(self) -> bool:
        """Whether documents are tokenized while a run reads them."""
        return self.corpus in STREAMED

    @model_validator(mode="before")
    @classmethod
    def _stream_keeps_nothing(cls, values):
        if isinstance(values, dict) and values.get("corpus") in STREAMED:
            return {"validation_fraction": 0.0} | values
        return values

    @model_validator(mode="before")
    @classmethod
    def _mix_is_of_tokens(cls, values):
        if isinstance(values, dict) and values.get("mix") and "corpus" not in values:
            return values | {"corpus": "tokens"}
        return values

    @model_validator(mode="after")
    def _check(self):
        if self.phases:
            self._check_phases()
        if self.mix:
            self._check_mix()
        elif self.corpus in ("text", "tokens", *STREAMED) and not self.path:
            raise ValueError(f"data.path is needed for data.corpus={self.corpus!r}")
        if self.corpus in ("stdlib", "synthetic") and self.path:
            raise ValueError(
                f"data.path={self.path!r} is not read by data.corpus={self.corpus!r}; "
                "set data.corpus='text'"
            )
        if self.dtype and self.corpus != "tokens":
            raise ValueError(
                f"data.dtype={self.dtype!r} is for token files only; set data.corpus='tokens'"
            )
        if self.validation_path and (self.corpus not in ("tokens", *STREAMED) or self.mix):
            raise ValueError(
                f"data.validation_path={self.validation_path!r} needs data.path, not "
                "data.mix, and data.corpus='tokens', 'jsonl' or 'parquet'"
            )
        self._check_stream()
        return self

    def _check_stream(self):
        """Refuses settings that do not apply to streams, or that apply only to streams."""
        if not self.is_streamed:
            for name in OF_STREAMS:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"data.{name}={getattr(self, name)!r} is for data.corpus='jsonl' and "
                        f"'parquet', not {self.corpus!r}"
                    )
            return
        setting = f"data.corpus={self.corpus!r}"
        if self.validation_fraction:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction:g} takes the tail of a "
                f"corpus, and the end of {setting} is not known; set data.validation_path"
            )
        if self.packing == "best_fit":
            raise ValueError(
                f"data.packing='best_fit' packs all documents of a corpus together, and {setting} "
                "is streamed; set data.packing='documents'"
            )
        if self.tokenizer == "characters":
            raise ValueError(
                f"data.tokenizer='characters' is built from a whole corpus, and {setting} is "
                "streamed; set data.tokenizer='bytes'"
            )

    def _check_phases(self):
        """Refuses phases without sources, with other sources, or that end before they begin."""
        if not self.mix:
            raise ValueError(
                "data.phases have weights for the sources of data.mix, and there are none; set "
                "data.phases=[]"
            )
        before = 0
        for number, phase in enumerate(self.phases):
            where = f"data.phases[{number}]"
            if len(phase.weights) != len(self.mix):
                raise ValueError(
                    f"{where} has {len(phase.weights)} weights for the {len(self.mix)} sources of "
                    "data.mix; set one for each"
                )
            if phase.tokens <= before:
                raise ValueError(
                    f"{where}.tokens={phase.tokens}: the run has read {before} when it begins; "
                    "set more"
                )
            before = phase.tokens

    def _check_mix(self):
        if self.corpus != "tokens":
            raise ValueError(
                f"data.corpus={self.corpus!r}: data.mix has sources of token files; "
                "set data.mix=[] to train without it"
            )
        if self.path:
            raise ValueError(
                f"data.path={self.path!r} is not read if data.mix is set; "
                "set data.mix=[], or add the path to data.mix as a source"
            )
        names = [source.name for source in self.mix]
        if len(set(names)) < len(names):
            raise ValueError(f"data.mix has two sources with the same name: {', '.join(names)}")
