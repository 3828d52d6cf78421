"""Reads the keys of a config.json, and refuses those that nothing has read."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from spmdtrain.config.errors import ConfigError

# Keys that do not change what a model computes, such as `pretraining_tp` and the settings of
# generation that transformers writes.
HARMLESS = re.compile(
    "|".join(
        (
            "_.*",
            "architectures|model_type|auto_map|transformers_version|torch_dtype|dtype",
            "use_cache|cache_implementation|initializer_.*|attention_dropout|.*_pdrop|.*_dropout",
            "pretraining_tp|output_.*|router_.*_coef|return_dict.*|torchscript|use_bfloat16",
            "(bos|eos|pad|sep|unk|cls|mask|decoder_start|forced_bos|forced_eos)_token_id",
            "id2label|label2id|problem_type|num_labels|finetuning_task|task_specific_params",
            "summary_.*|n_ctx|reorder_and_upcast_attn|gradient_checkpointing|tokenizer_class",
            "prefix|chunk_size_feed_forward|is_decoder|attn_implementation|embd_layer",
            "temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|min_length",
            "max_length|num_beams.*|no_repeat_ngram_size|early_stopping|diversity_penalty",
            "do_sample|num_return_sequences|bad_words_ids|suppress_tokens|begin_suppress_tokens",
            "encoder_no_repeat_ngram_size|exponential_decay_length_penalty|remove_invalid_values",
            # How numbers are computed, and with what a training begins.
            "use_mamba_kernels|mamba_ssm_cache_dtype|(mamba_)?chunk_size|num_logits_to_keep",
            "time_step_(min|max|floor)|rescale_prenorm_residual|moe_shared_expert_overlap",
            "enable_moe_fp32_combine|mrope_.*|block_(mlp|out)_init_scale|.*_use_xavier_init",
        )
    )
)
# Keys of noise and of losses in training, which are switched off by a 0.
SWITCHED_OFF = re.compile(r".*(jitter|drop|coef|loss).*")


# The largest whole number of a key, and of the keys whose number of things is listed one by one.
# Published models have up to 126 layers and 512 experts in each.
LARGEST = 2**31 - 1
LONGEST = 80  # characters of a value in an error
LARGEST_FLOAT = 3e38  # of 32 bits
LARGEST_OF = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_nextn_predict_layers"), 10_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 10_000),
}


class Keys:
    """The keys of the config.json at `where`, with the defaults that its family gives them.

    `unread`: the keys that the family's class in transformers ignores. They are ignored here too,
    and refused if they are set to anything.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        where: str,
        unread: Collection[str] = (),
    ):
        self.values = values
        self._defaults = defaults
        self._unread = unread
        self._taken: set[str] = set()
        self.where = where

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def take(self, name: str, default: Any = None) -> Any:
        """Returns the value of a key: from the file, else the family's default, else `default`."""
        by_default = self._defaults.get(name, default)
        if name in self._unread:
            return by_default
        self._taken.add(name)
        return self.values.get(name, by_default)

    def pass_over(self, *names: str) -> None:
        """Accepts any value of keys that published files have, and that nothing reads."""
        self._taken.update(names)

    def agrees(self, name: str, *values: Any) -> None:
        """Refuses a key that says again what others say, or what the family's class does anyway,
        unless it is one of `values`.
        """
        if self.values.get(name) not in (None, *values):
            raise self.unknown(name, self.values[name])
        self._taken.add(name)

    def number(self, name: str, default: Any = None) -> float | None:
        """Returns a finite number, or None if it is null."""
        value = self.take(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refused(name, value, "a number")
        if not is_within_bounds(value):
            raise self.refused(name, value, "a number that a computation can hold")
        return value

    def positive(self, name: str, default: Any = None) -> float | None:
        """Returns a number above 0, or None if it is null: 0 does not mean absent."""
        value = self.number(name, default)
        if value is not None and value <= 0:
            raise self.refused(name, value, "above 0")
        return value

    def whole(self, name: str, default: Any = None) -> int | None:
        """Returns a whole number of at least 0, or None if it is null."""
        value = self.number(name, default)
        if value is None:
            return None
        if value != int(value) or value < 0:
            raise self.refused(name, value, "a whole number")
        largest = LARGEST_OF.get(name, LARGEST)
        if value > largest:
            raise self.refused(name, value, f"at most {largest:,}")
        return int(value)

    def some(self, name: str, default: Any = None) -> int | None:
        """Returns a whole number of at least 1, or None if it is null: 0 does not mean absent."""
        value = self.whole(name, default)
        if value == 0:
            raise self.refused(name, value, "at least 1")
        return value

    def count(self, name: str) -> int:
        """Returns a whole number of at least 1. Raises ConfigError if there is none."""
        value = self.some(name)
        if value is None:
            raise ConfigError(
                f"{self.where} lacks {name}",
                found=f"{name}=None" if name in self else "no such key",
                fix="the config.json that the weights were published with",
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Returns true or false; null counts as false."""
        value = self.take(name, default)
        if not isinstance(value, bool | None):
            raise self.refused(name, value, "true or false")
        return bool(value)

    def table(self, name: str) -> Mapping[str, Any] | None:
        """Returns a table, or None if it is null."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise self.refused(name, value, "a table")
        return value

    def must_be(self, name: str, *allowed: Any) -> None:
        """Refuses all values of a key but `allowed`, which our settings can express."""
        value = self.take(name, allowed[0])
        if value not in allowed:
            raise self.unknown(name, value)

    def check_numbers(self) -> None:
        """Raises ConfigError if a number, even one inside a list or table, is NaN or infinite."""
        unchecked = [(name, value) for name, value in self.values.items() if not is_harmless(name)]
        while unchecked:
            name, value = unchecked.pop()
            if isinstance(value, dict):
                unchecked += [(f"{name}.{inner}", item) for inner, item in value.items()]
            elif isinstance(value, list):
                unchecked += [(name, item) for item in value]
            elif isinstance(value, int | float) and not is_within_bounds(value):
                raise self.refused(name, value, "a number that a computation can hold")

    def check_all_taken(self) -> None:
        """Raises ConfigError if a key that may change the model has not been read."""
        for name, value in self.values.items():
            says_nothing = value is None or value is False or value == [] or value == {}
            is_off = value == 0 and SWITCHED_OFF.fullmatch(name) is not None
            if name in self._taken or says_nothing or is_off or is_harmless(name):
                continue
            raise self.unknown(name, value)

    def unknown(self, name: str, value: Any) -> ConfigError:
        """Returns the error for an unknown key that may change the model."""
        return ConfigError(
            f"{self.where}: {name}={_shown(value)} has no setting here",
            found=self._family,
            fix="another model, or an issue that names it",
        )

    def refused(self, name: str, value: Any, wanted: str) -> ConfigError:
        """Returns the error for a value of the wrong type, or that does not fit the others."""
        what = f"{self.where}: {name}={_shown(value)} must be {wanted}"
        fix = "the config.json that the weights were published with"
        return ConfigError(what, found=self._family, fix=fix)

    @property
    def _family(self) -> str:
        """The family as an error says it; empty for a table inside of a config.json."""
        family = self.values.get("model_type")
        return f"model_type={family!r:.40}" if family else ""


def _shown(value: Any) -> str:
    """Returns a value as Python writes it, cut visibly where it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def is_harmless(name: str) -> bool:
    """Returns True for a key that does not change what a model computes."""
    return HARMLESS.fullmatch(name) is not None


def is_within_bounds(value: float) -> bool:
    """Returns True for a number that float32 can hold: neither a NaN nor an infinity."""
    return -LARGEST_FLOAT <= value <= LARGEST_FLOAT
