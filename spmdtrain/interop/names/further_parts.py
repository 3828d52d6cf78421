"""The names of the blocks that predict further tokens."""

from collections.abc import Mapping
from typing import NamedTuple

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.interop import latent_attention, pieces
from spmdtrain.interop.names.entry import EMBED, HEAD, LAYER, Entry, Part, entry, in_layers
from spmdtrain.interop.names.layer_parts import PREFIX


class FurtherNames(NamedTuple):
    """The names of the blocks that predict further tokens, in full but for their numbers.

    `prefix` is that of the layer of a block, `own` has the other tensors of a block, and `copies`
    those that files may repeat. The numbers go on after those of the layers, or begin at 0.
    `mlp_prefix` is that of its mlp, if files have a layer of its own for it.
    """

    prefix: str
    own: Part
    copies: Mapping[str, str]
    begin_at_0: bool
    mlp_prefix: str = ""

    def numbers(self, model: TransformerConfig) -> range:
        """Returns the numbers, in the files, of the blocks of model.multi_token."""
        depth = model.multi_token.depth if model.multi_token else 0
        first = 0 if self.begin_at_0 else model.layers
        return range(first, first + depth)

    def in_layer(self, layer: Part) -> dict[str, Entry]:
        """Returns the entries of the layer of a block."""
        entries = in_layers(self.prefix, layer)
        if not self.mlp_prefix:
            return entries
        of_mlp = {path: one for path, one in layer.items() if path.startswith("mlp")}
        return entries | in_layers(self.mlp_prefix, of_mlp)

    def copies_of(self, number: int) -> dict[str, str]:
        """Returns the names, in one block, of the copies of tensors, by our paths."""
        return {ours: name.replace(LAYER, str(number)) for ours, name in self.copies.items()}


def _own(token_norm: str, stream_norm: str, join: str, norm: str) -> Part:
    return {
        "token_norm.scale_e": entry(pieces.copy, f"{token_norm}.weight"),
        "stream_norm.scale_e": entry(pieces.copy, f"{stream_norm}.weight"),
        "join_2ee": entry(latent_attention.joined, f"{join}.weight"),
        "norm.scale_e": entry(pieces.copy, f"{norm}.weight"),
    }


# In the layers that follow the last one.
AFTER_THE_LAST = FurtherNames(
    PREFIX,
    _own(*(PREFIX + name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))),
    {EMBED: PREFIX + "embed_tokens.weight", HEAD: PREFIX + "shared_head.head.weight"},
    begin_at_0=False,
)
# Qwen's, of which there is one.
APART = FurtherNames(
    "mtp.layers.{}.",
    _own("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
    {},
    begin_at_0=True,
)
# Nemotron's, of which there is one: two layers, of attention and of its mlp.
IN_TWO = FurtherNames(
    "mtp.layers.0.",
    _own(
        "mtp.layers.0.enorm",
        "mtp.layers.0.hnorm",
        "mtp.layers.0.eh_proj",
        "mtp.layers.1.final_layernorm",
    ),
    {},
    begin_at_0=True,
    mlp_prefix="mtp.layers.1.",
)
