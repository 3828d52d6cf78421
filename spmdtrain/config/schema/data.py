"""[data]: the corpus, its sources, and how they are cut into sequences."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import Count, Fraction, Positive, Settings, Strings


class MixSource(Settings):
    """One source of a mixture: token files. All sources must have the same tokenizer."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")] = Field(
        description="letters, digits, _ and -; its losses are loss/NAME and eval_loss/NAME"
    )
    path: str | Strings = Field(description="files or globs, .bin")
    weight: Positive = Field(
        default=1.0, description="share of the samples, relative to the other weights"
    )


Mix = Annotated[tuple[MixSource, ...], Field(strict=False)]


class DataConfig(Settings):
    """The data that a run trains on, and how it is cut into sequences."""

    corpus: Literal["stdlib", "synthetic", "text", "tokens"] = Field(
        default="stdlib",
        description="Python's own library source | seeded noise with structure | "
        "text files | token files",
    )
    path: str | Strings | None = Field(
        default=None, description="files or globs (text), .bin (tokens)"
    )
    validation_path: str | Strings | None = Field(
        default=None, description="token files to validate on, instead of validation_fraction"
    )
    mix: Mix = Field(
        default=(), description="weighted sources of token files, instead of corpus and path"
    )
    tokenizer: str = Field(
        default="bytes", description="bytes | characters | a Hugging Face tokenizer.json"
    )
    dtype: Literal["uint16", "uint32"] | None = Field(
        default=None,
        description="type of the ids in .bin files that do not state it; "
        "default: the smallest that holds the vocabulary",
    )
    validation_fraction: Fraction = Field(
        default=0.1, description="tail of the token stream kept for evaluation"
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

    @model_validator(mode="before")
    @classmethod
    def _mix_is_of_tokens(cls, values):
        if isinstance(values, dict) and values.get("mix") and "corpus" not in values:
            return values | {"corpus": "tokens"}
        return values

    @model_validator(mode="after")
    def _check(self):
        if self.mix:
            self._check_mix()
        elif self.corpus in ("text", "tokens") and not self.path:
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
        if self.validation_path and (self.corpus != "tokens" or self.mix):
            raise ValueError(
                f"data.validation_path={self.validation_path!r} needs data.path, not "
                "data.mix, and data.corpus='tokens'"
            )
        return self

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
            raise ValueError(f"data.mix has two sources of one name: {', '.join(names)}")
