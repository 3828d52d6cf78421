"""Sizes the exchange of tokens between the experts of a layer (`spmdtrain.parallel.experts`).

Buckets and tiles are those that a run makes, by the same functions.
"""

import math
from dataclasses import dataclass

from spmdtrain.config.schema import ExpertsConfig
from spmdtrain.parallel.experts.rounds import tile_of
from spmdtrain.parallel.experts.sending import Bucket, bucket_of

# Large all-to-alls of a layer. The backward sends the tokens again, and does not keep them.
FORWARD_EXCHANGES = 2  # tokens there, results back
BACKWARD_EXCHANGES = 3  # tokens and gradients there, gradients back
# Bytes of a row in addition to its token: message, expert and gate there, in both passes, and the
# gradient of the gate back.
ROUTING_BYTES = 12 + 12 + 4


@dataclass(frozen=True)
class Dispatch:
    """A layer's exchange of one device's `tokens` with the `devices` that own the experts.

    `imbalance` is the ratio of the fullest device's rows to the mean, as is that of its buckets.
    """

    experts: ExpertsConfig
    tokens: int
    devices: int
    imbalance: float

    @property
    def own(self) -> int:
        """The experts of a device."""
        return max(1, self.experts.count // self.devices)

    @property
    def bucket(self) -> Bucket:
        experts = self.experts
        return bucket_of(self.tokens, experts.chosen, self.devices, self.own, experts.bucket_factor)

    @property
    def is_one_round(self) -> bool:
        """True if one round is enough, whatever the router chooses."""
        return self.bucket.holds_all(self.tokens, self.experts.chosen, self.own)

    @property
    def rounds(self) -> int:
        """The rounds until the fullest bucket is empty."""
        if self.is_one_round:
            return 1
        return max(1, math.ceil(self.imbalance / self.experts.bucket_factor))

    @property
    def messages(self) -> int:
        """The messages that a device has room for in one round, including its own."""
        return self.devices * self.bucket.messages

    @property
    def places(self) -> int:
        """The rows that a device has room for in one round, without padding to tiles."""
        return self.devices * self.bucket.rows

    @property
    def padded(self) -> int:
        """The number of `places`, with room to pad each expert's rows to whole tiles."""
        return self.places + min(self.own, self.places) * self.tile

    @property
    def rows_of_expert(self) -> int:
        """The rows that an expert of the fullest device multiplies, padded to whole tiles.

        Half a tile is wasted on average. A device that owns all experts has only its own rows.
        """
        imbalance = self.imbalance if self.devices > 1 else 1.0
        rows = imbalance * self.tokens * self.experts.chosen / self.own
        return math.ceil(rows + self.tile / 2)

    @property
    def tile(self) -> int:
        return tile_of(self.tokens * self.experts.chosen // self.own)

    def sent_bytes(self, width: int, size: int) -> float:
        """Returns the bytes that a device sends for one large all-to-all, in all of its rounds.

        width: that of a token, in elements of `size` bytes.
        """
        return self.rounds * (self.devices - 1) * self.bucket.messages * width * size

    def row_bytes(self, width: int, size: int) -> float:
        """Returns the bytes that a device sends if each of a token's experts gets its own copy."""
        share = (self.devices - 1) / self.devices
        return share * self.tokens * self.experts.chosen * width * size

    def host_bytes(self, hosts: int, width: int, size: int) -> float:
        """Returns the bytes that a device sends to other hosts if each gets a token once.

        As in `bucket_of`, all sets of experts are equally likely.
        """
        count, chosen = self.experts.count, self.experts.chosen
        absent = math.comb(count - count // hosts, chosen) / math.comb(count, chosen)
        return (hosts - 1) * self.tokens * (1 - absent) * width * size

    @property
    def routing_bytes(self) -> float:
        """The bytes that a device sends with rows beside their tokens, in both passes."""
        return self.rounds * (self.devices - 1) * self.bucket.rows * ROUTING_BYTES
