"""[model.experts]: mlps, of which a router chooses a few for each token."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from spmdtrain.config.settings import (
    Count,
    CountOrZero,
    Derived,
    Fraction,
    NonNegative,
    Positive,
    Settings,
)


class ExpertsConfig(Settings):
    """The experts that replace a layer's mlp (arXiv:1701.06538), and the router that chooses them.

    A router scores all experts for each token, in float32. The token goes through the `chosen` best
    ones, and their outputs are summed, each weighted by its score, the *gate*.
    """

    of_no_array: ClassVar = (
        *("chosen", "score", "normalise", "smallest_sum", "sum_epsilon", "scale"),
        *("groups", "groups_kept", "gate_input"),
        *("bias_rate", "balance", "balance_over", "z_loss", "jitter", "bucket_factor"),
    )

    count: Count = Field(description="experts of a layer")
    chosen: Count = Field(description="experts that a token goes through")
    ffn: Derived[Count] = Field(
        default=None, description="hidden width of one expert; default: model.ffn"
    )
    shared: CountOrZero = Field(
        default=0, description="further experts of that width that all tokens go through"
    )
    shared_ffn: Count | None = Field(
        default=None,
        description="hidden width of the shared experts together; default: shared times ffn",
    )
    shared_gate: bool = Field(
        default=False,
        description="the output of the shared experts is multiplied by the sigmoid of a projection "
        "of the token to one number",
    )
    own_norms: bool = Field(
        default=False,
        description="the chosen experts and the shared ones have norms of their own, on input and "
        "output as model.norm_places says; the norm of the layer stands on the output of their sum "
        "alone, and the router reads the stream through a norm with a scale for each channel",
    )
    width: Count | None = Field(
        default=None,
        description="width of the space that the chosen experts work in, between a projection of "
        "the token and one back; the shared experts read the token itself; default: none, all read "
        "the token",
    )
    first_dense: CountOrZero = Field(
        default=0, description="number of first layers that have an mlp of width model.ffn instead"
    )
    every: Count = Field(
        default=1,
        description="one layer in this many has experts, after the first dense ones; the others "
        "have an mlp of width model.ffn",
    )
    score: Literal["softmax", "sigmoid"] = Field(
        default="softmax",
        description="function from the router's logits to scores, over all "
        "experts or of each alone",
    )
    normalise: bool = Field(default=True, description="a token's gates are divided by their sum")
    smallest_sum: Positive = Field(
        default=1e-20, description="the sum that gates are divided by is at least this"
    )
    sum_epsilon: NonNegative = Field(
        default=0.0, description="added to the sum that gates are divided by"
    )
    scale: Positive = Field(default=1.0, description="multiplies the gates")
    learned_scale: bool = Field(
        default=False, description="a learned factor of each expert multiplies its gates"
    )
    gate_input: bool = Field(
        default=False,
        description="a gate multiplies what an expert reads, and not what it returns",
    )
    logit_bias: bool = Field(default=False, description="a bias in the router's logits")
    groups: Count = Field(
        default=1,
        description="number of equal groups of experts; all of a token's experts belong to its "
        "groups_kept best groups, ranked by the sum of a group's two best scores",
    )
    groups_kept: Derived[Count] = Field(default=None, description="default: groups")
    bias_rate: NonNegative | None = Field(
        default=None,
        description="balances without a loss (arXiv:2408.15664): a bias is added to the scores "
        "when experts are chosen; after each step it moves by this, up for an expert "
        "with fewer tokens than the mean and down for one with more; 0: it stays "
        "constant; none: no bias",
    )
    balance: NonNegative = Field(
        default=0.0,
        description="weight of the balance loss, count * sum(share of choices * mean score), "
        "of each layer",
    )
    balance_over: Literal["sequence", "batch"] = Field(
        default="sequence",
        description="the tokens of which the balance loss counts choices: of each row of a batch "
        "(arXiv:2412.19437), or of all rows of a microbatch on all devices (arXiv:2501.11873), "
        "which depends on the accumulation",
    )
    z_loss: NonNegative = Field(
        default=0.0,
        description="weight of the mean square of the logarithm of the router's softmax "
        "denominator, of each layer (arXiv:2202.08906)",
    )
    jitter: Fraction = Field(
        default=0.0,
        description="in training, each number that a router reads is multiplied by noise between "
        "1 - jitter and 1 + jitter (arXiv:2101.03961)",
    )
    bucket_factor: Positive = Field(
        default=1.25,
        description="rows that one device may send another in a round, as a multiple of those "
        "with balanced experts; the rest follow in further rounds, and nothing is "
        "dropped",
    )

    def derived(self) -> dict[str, Any]:
        """Returns `groups_kept`; `ffn` follows from another section, see TransformerConfig."""
        return {"groups_kept": self.groups}

    @property
    def shared_width(self) -> int:
        """The hidden width of the mlp that the shared experts are; 0: there are none."""
        return self.shared_ffn or self.shared * (self.ffn or 0)

    @model_validator(mode="after")
    def _check(self):
        if self.chosen > self.count:
            raise ValueError(
                f"model.experts.chosen={self.chosen} is more than model.experts.count={self.count}"
            )
        if self.normalise and self.chosen == 1 and not self.is_given("normalise"):
            raise ValueError(
                "model.experts.normalise, true by default, makes the only gate of a token 1, so a "
                "router would never learn; set model.experts.normalise=false for "
                "model.experts.chosen=1, or true if that is meant"
            )
        for name in ("shared_ffn", "shared_gate", "own_norms"):
            if getattr(self, name) and not self.shared:
                raise ValueError(
                    f"model.experts.{name}={getattr(self, name)!r} is of shared experts; set "
                    "model.experts.shared=1"
                )
        if self.balance_over != "sequence" and not self.balance:
            raise ValueError(
                f"model.experts.balance_over={self.balance_over!r} needs a weight; set "
                "model.experts.balance=0.001"
            )
        self._check_groups()
        return self

    def check_layers(self, model: Any) -> None:
        """Refuses a pattern that does not fit into the layers, and an mlp that experts lack.

        Raises ValueError.
        """
        if model.mlp == "xielu":
            raise ValueError(
                "model.mlp='xielu' has learned slopes, which experts do not have; set "
                "model.mlp='relu2', or leave model.experts out"
            )
        for name in ("mlp_gate_factor", "mlp_out_factor"):
            if getattr(model, name) != 1:
                raise ValueError(
                    f"model.{name}={getattr(model, name):g} has no meaning with model.experts; "
                    "leave it out"
                )
        if self.own_norms and model.norm_places == "parallel":
            raise ValueError(
                "model.experts.own_norms has no meaning with model.norm_places='parallel', where "
                "all parts read one norm; leave it out"
            )
        others = model.layers - self.first_dense
        if others < 1:
            raise ValueError(
                f"model.experts.first_dense={self.first_dense} leaves none of "
                f"model.layers={model.layers}"
            )
        if others % self.every:
            raise ValueError(
                f"model.experts.every={self.every} does not divide the {others} layers of "
                "model.layers after model.experts.first_dense"
            )

    def _check_groups(self) -> None:
        """Refuses groups that no router could choose from."""
        if self.count % self.groups:
            raise ValueError(
                f"model.experts.count={self.count} is not a multiple of "
                f"model.experts.groups={self.groups}"
            )
        groups_kept = self.groups_kept
        if groups_kept > self.groups:
            raise ValueError(
                f"model.experts.groups_kept={groups_kept} is more than model.experts.groups="
                f"{self.groups}"
            )
        in_group = self.count // self.groups
        if groups_kept < self.groups and in_group < 2:
            raise ValueError(
                f"model.experts.groups={self.groups} have one expert each, and a group's score is "
                "the sum of its two best"
            )
        if groups_kept * in_group < self.chosen:
            raise ValueError(
                f"model.experts.groups_kept={groups_kept} of {in_group} experts hold fewer than "
                f"model.experts.chosen={self.chosen}"
            )
