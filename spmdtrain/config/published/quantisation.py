"""Says how the matrices of a published model are quantised, by its config.json."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdtrain.config.errors import CheckpointError

SCALED = "scaled"  # matrices of 8- or 4-bit floats beside their scales, in any family
SQUARES = "fp8"  # the method with a scale for each square of 128 x 128
# Methods whose floats are read, if every group of matrices is of a known kind.
IN_GROUPS = ("compressed-tensors", "modelopt", "fbgemm_fp8")
# The bits of a float, and how many numbers of a row share a scale.
KINDS = ((8, None), (4, 16))
INPUT_SCALES = "pre_quant_scale"  # of a group whose inputs are multiplied before its matmuls
# The file by which ModelOpt says it where config.json does not.
OF_MODELOPT = "hf_quant_config.json"


def packing_of(folder: Path, values: Mapping[str, Any], of_family: str) -> str:
    """Returns how matrices are packed: `SCALED`, the packing of the family, or "".

    Raises CheckpointError if they are quantised in a way that is not read.
    """
    quantised = values.get("quantization_config")
    if older := values.get("compression_config"):
        raise _refused(folder, older if isinstance(older, dict) else {})
    if not quantised:
        return SCALED if (folder / OF_MODELOPT).is_file() else ""
    known = quantised if isinstance(quantised, dict) else {}
    method = known.get("quant_method")
    if method == SQUARES:
        _check_squares(folder, known)
        return SCALED
    if method in IN_GROUPS and all(map(_is_read, _groups(known))):
        return SCALED
    if method is None or method != of_family:
        raise _refused(folder, known)
    return of_family


def _groups(quantised: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yields what is said of the weights of each group of matrices."""
    groups = quantised.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            yield {}
        else:
            yield {**weights, INPUT_SCALES: group.get(INPUT_SCALES)}


def _is_read(weights: Mapping[str, Any]) -> bool:
    kind = (weights.get("num_bits"), weights.get("group_size"))
    is_plain = weights.get("symmetric", True) and not weights.get(INPUT_SCALES)
    return weights.get("type") == "float" and kind in KINDS and is_plain


def _check_squares(folder: Path, quantised: Mapping[str, Any]) -> None:
    """Refuses 8-bit matrices unless they have one scale for each square of 128 x 128."""
    for name, *known in (("weight_block_size", [128, 128]), ("fmt", "e4m3", "float8_e4m3fn", None)):
        if quantised.get(name) not in known:
            raise CheckpointError(
                f"{folder} is quantised (fp8) with {name}={quantised.get(name)!r:.40}",
                asked=f"{name}={known[0]!r}",
                fix="the model it was made from",
            )


def _refused(folder: Path, quantised: Mapping[str, Any]) -> CheckpointError:
    method = quantised.get("quant_method", "by a method without a name")
    unread = next((group for group in _groups(quantised) if not _is_read(group)), {})
    bits = quantised.get("bits", unread.get("num_bits"))
    how = [f"{method}", str(unread.get("type", "")), f"{bits} bits" if bits else ""]
    return CheckpointError(
        f"{folder} is quantised ({', '.join(filter(None, how))}): its weights cannot be trained",
        fix="the model it was made from",
    )
