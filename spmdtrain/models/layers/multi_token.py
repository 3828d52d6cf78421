"""Defines the part of a model that predicts tokens after the next one, only in training."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.schema import TransformerConfig
from spmdtrain.models.context import ForwardContext
from spmdtrain.models.layers.norm import Norm
from spmdtrain.models.layers.router import ENTROPY
from spmdtrain.models.layers.weights import hidden_std, matmul_weight
from spmdtrain.models.stack import MakeBlock, SideLosses, Stack, sum_losses
from spmdtrain.parallel.axes import STREAM


class FurtherToken(nnx.Module):
    """A block that predicts a token one place further than the stream does (arXiv:2412.19437,
    section 2.2).

    It normalises the stream and the embedding of the next token, projects both together to the
    width of the stream, and runs a block. `norm` normalises the result, before the head of the
    model.
    """

    any_order = True

    def __init__(
        self,
        config: TransformerConfig,
        rngs: nnx.Rngs,
        make_block: MakeBlock,
        make_norm: Callable[[TransformerConfig], nnx.Module] = Norm,
    ):
        self.token_norm = make_norm(config)
        self.stream_norm = make_norm(config)
        # One half reads the token, the other the stream.
        shape = (2, config.embed, config.embed)
        self.join_2ee = matmul_weight(rngs, shape, (None, None, "embed"), hidden_std(config))
        self.block = Stack(make_block, 1, rngs)
        self.norm = make_norm(config)

    def __call__(
        self, x_bte: jax.Array, token_bte: jax.Array, ctx: ForwardContext
    ) -> tuple[jax.Array, SideLosses]:
        """Returns the stream of the token after `token_bte`, and the side losses of the block."""
        both = (self.token_norm(token_bte, ctx), self.stream_norm(x_bte, ctx))
        x_bte = ctx.row_parallel(jnp.stack(both, 2), self.join_2ee, (None, None))
        return self.block(ctx.constrain(x_bte, *STREAM), ctx)


def predict_further(
    parts: Sequence[FurtherToken],
    x_bte: jax.Array,
    embeddings: Sequence[jax.Array],
    contexts: Sequence[ForwardContext],
    *,
    after_norm: bool,
) -> tuple[list[jax.Array], SideLosses]:
    """Returns (the hidden states of each depth, which the head reads, and all side losses).

    `embeddings` and `contexts` have an entry for each depth; a context's mask has the tokens with a
    loss at that depth. With `after_norm` a depth reads what the head reads of the one before. The
    entropy of routers is left out: it is reported for the model's own layers.
    """
    hidden, total = [], {}
    for part, token_bte, ctx in zip(parts, embeddings, contexts, strict=True):
        x_bte, losses = part(x_bte, token_bte, ctx)
        hidden.append(ctx.constrain(part.norm(x_bte, ctx), *STREAM))
        x_bte = hidden[-1] if after_norm else x_bte
        total = sum_losses(total, losses)
    return hidden, {name: loss for name, loss in total.items() if name != ENTROPY}
