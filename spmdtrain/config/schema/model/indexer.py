"""[model.indexer]: the indexers of sparse attention, which are kept and not run."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from spmdtrain.config.settings import Count, Settings


class IndexerConfig(Settings):
    """The indexers of DeepSeek sparse attention (arXiv:2512.02556).

    An indexer chooses for each token the `kept` earlier ones that attention reads. Up to so many
    tokens it chooses all of them, and attention is dense: longer sequences are refused here.
    Indexers come in and go out with the same bits, and training leaves them as they are.
    """

    of_no_array: ClassVar = ("kept",)

    heads: Count = Field(description="heads of an indexer's queries")
    dim: Count = Field(description="channels of a head, and of the key that heads share")
    kept: Count = Field(description="tokens that attention reads; no sequence is longer")
    layers: Annotated[tuple[bool, ...], Field(strict=False)] = Field(
        default=(),
        description="which layers have an indexer, and the others the choice of the last one; "
        "repeats over the layers; default: all",
    )

    def refusals_of_length(self, tokens: int) -> Iterator[str]:
        """Yields a refusal of sequences for which an indexer would have to choose."""
        if tokens > self.kept:
            yield (
                f"train.sequence_length={tokens}: attention would read only the "
                f"model.indexer.kept={self.kept} tokens that an indexer chooses, and indexers "
                f"are not run; set train.sequence_length={self.kept}"
            )
