"""Lists the features that take part in a step. A new one is a line here.

Items are updated, batches changed and losses chosen in this order.
"""

from spmdtrain.train.compression.feedback_part import COMPRESSION
from spmdtrain.train.corrupt import CORRUPT
from spmdtrain.train.distillation.saved import SAVED_LOGITS
from spmdtrain.train.distillation.taught import TEACHER
from spmdtrain.train.gradients.further_losses import MULTI_TOKEN
from spmdtrain.train.gradients.pair_head import PAIRS
from spmdtrain.train.islands.outer_step import OUTER_STEP
from spmdtrain.train.items.ema import EMA
from spmdtrain.train.items.items import Items
from spmdtrain.train.items.loss_scale import LOSS_SCALE
from spmdtrain.train.items.spikes import SPIKES
from spmdtrain.train.part import Parts
from spmdtrain.train.scaling.magnitudes import MAGNITUDES
from spmdtrain.train.sparsity.masks import SPARSITY

PARTS: Parts = (
    EMA,
    SPIKES,
    LOSS_SCALE,
    OUTER_STEP,
    SPARSITY,
    COMPRESSION,
    MAGNITUDES,
    TEACHER,
    SAVED_LOGITS,
    PAIRS,
    MULTI_TOKEN,
    CORRUPT,
)


def all_items() -> Items:
    """Returns the items of all parts."""
    return Items(tuple(item for part in PARTS for item in part.items))
