"""The settings of published families: what fits together, what is refused, and the table inside of
a section.
"""

import pytest

from spmdtrain.config import ConfigError, RunConfig, from_resolved, load, resolved, to_toml

YARN = (
    "model.rope_scaling.kind=yarn",
    "model.rope_scaling.factor=4",
    "model.rope_scaling.original_length=32",
)
EXPERTS = ("model.experts.count=8", "model.experts.chosen=3")
GROUPS = ("model.experts.groups=4",)


def llama(*overrides: str) -> RunConfig:
    return from_resolved(resolved(RunConfig(model={"name": "llama"})), overrides)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model.rope_scaling.factor=4"], "model.rope_scaling.kind is missing (from --set)"),
        (["model.rope_scaling.kind=linear"], "model.rope_scaling.factor is missing (from --set)"),
        (["model.rope_scaling.kind=lineal"], "did you mean 'linear'?"),
        (["model.rope_scaling.facto=4"], "did you mean model.rope_scaling.factor?"),
        (["model.rope_scaling=4"], "is a section, not a value; try model.rope_scaling.kind=..."),
        (["model.rope_scaling.kind.x=4"], "model.rope_scaling.kind is a value, not a section"),
        (YARN[:2], "kind='yarn' needs model.rope_scaling.original_length"),
        (
            [*YARN, "model.rope_scaling.low_factor=2"],
            "low_factor belongs to kind 'llama3', not 'yarn'",
        ),
        ([*YARN, "model.rope_scaling.factor=0.5"], "factor=0.5 is below 1"),
        ([*YARN, "model.rope_scaling.beta_fast=1"], "beta_fast=1 is not above beta_slow=1"),
        ([*YARN, "model.rope_theta=1"], "yarn needs falling frequencies"),
        (
            [
                "model.rope_scaling.kind=longrope",
                *YARN[1:],
                "model.rope_scaling.short=1,2",
                "model.rope_scaling.use=short",
            ],
            "short has 2 factors, and 32 channels turn in 16 pairs",
        ),
        (
            ["model.rope_scaling.kind=longrope", *YARN[1:], "model.rope_scaling.short=1,2"],
            "kind='longrope' needs model.rope_scaling.long",
        ),
        (["model.windows=3,-1"], "must be greater than or equal to 0"),
        (["model.rope_theta_window=1e4"], "model.windows has none"),
        (["model.rope_share=0.3", "model.head_dim=6"], "so 1 channels must be even"),
        (["model.norm=layernorm", "model.norm_offset=1"], "set model.norm='rmsnorm'"),
        (["model.positions=learned", "model.rope_share=0.5"], "needs model.positions='rope'"),
        (["model.embed_scale=squrt"], "did you mean 'sqrt'?"),
        (["model.experts.count=4"], "model.experts.chosen is missing (from --set)"),
        ([*EXPERTS, "model.experts.chosen=9"], "chosen=9 is more than model.experts.count=8"),
        ([*EXPERTS, "model.experts.chosen=1"], "set model.experts.normalise=false"),
        ([*EXPERTS, "model.experts.groups=3"], "is not a multiple of model.experts.groups=3"),
        ([*EXPERTS, *GROUPS, "model.experts.groups_kept=5"], "groups_kept=5 is more than"),
        ([*EXPERTS, *GROUPS, "model.experts.groups_kept=1"], "hold fewer than"),
        (
            [*EXPERTS, "model.experts.groups=8", "model.experts.groups_kept=4"],
            "groups=8 have one expert each",
        ),
        ([*EXPERTS, "model.experts.first_dense=4"], "leaves none of model.layers=4"),
        ([*EXPERTS, "model.experts.every=3"], "every=3 does not divide the 4 layers"),
        ([*EXPERTS, "model.experts.balance_over=batch"], "set model.experts.balance=0.001"),
        ([*EXPERTS, "model.experts.jitter=1"], "must be less than 1"),
    ],
)
def test_what_does_not_fit_is_one_line(overrides, line):
    with pytest.raises(ConfigError) as refusal:
        llama(*overrides)
    assert line in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_table_inside_of_a_section_comes_back_from_toml_and_json_and_can_be_taken_away(tmp_path):
    config = llama(*YARN, "model.windows=3,0", "model.embed_scale=sqrt")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    for again in (load(file), from_resolved(resolved(config))):
        assert again.model_dump() == config.model_dump()
        assert again.model.rope_scaling.truncate is True
    assert "[model.rope_scaling]" in file.read_text(encoding="utf-8")
    without = load(file, ["model.rope_scaling=none"])
    assert without.model.rope_scaling is None
    assert not any("rope_scaling." in key for key in without.origin)


def test_patterns_repeat_over_the_layers_and_are_cut_at_the_last():
    model = llama(
        "model.layers=5",
        "model.windows=3,0",
        "model.rope_layers=true,true,false",
        "model.rope_theta_window=7",
        *YARN,
    ).model
    assert [tuple(kind[:3]) for kind in model.layer_kinds] == [
        (3, 7.0, False),
        (0, 10_000.0, True),
        (3, None, False),
        (0, 10_000.0, True),
        (3, 7.0, False),
    ]
