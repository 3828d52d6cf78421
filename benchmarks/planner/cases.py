"""Published runs as workloads that the planner estimates.

What a source does not print is assumed here, and `ASSUMED` says so.
"""

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from frameworks import SoftwareTable

from spmdtrain.config.schema import (
    GPT,
    ExpertsConfig,
    LatentConfig,
    Llama,
    MultiTokenConfig,
    RunConfig,
    TransformerConfig,
)
from spmdtrain.planner.cost.flops import model_flops_per_token
from spmdtrain.planner.cost.hardware import DEVICES, Hardware
from spmdtrain.planner.cost.layer_time import layer_time
from spmdtrain.planner.cost.software import fitted_on
from spmdtrain.planner.cost.step_time import step_time
from spmdtrain.planner.cost.workload import MeshShape, Workload

HERE = Path(__file__).parent

Row = Mapping[str, Any]  # of a published table: column -> value

A100 = DEVICES["a100-80"]
H100 = DEVICES["h100"]
# Eight in a host share a card of 200 Gb/s.
A100_ONE_CARD = replace(A100, network_bandwidth=25e9 / A100.per_host)
# Llama 3.1 on the box that torchtitan used: 2.4 TB/s of HBM2e, 500 W.
H100_96 = replace(H100, name="h100-96", memory=96e9, memory_bandwidth=2.4e12, power_limit=500)


def ultra(below: Hardware, power: float, **changes: float) -> Hardware:
    """Blackwell Ultra as NVIDIA's data sheets of HGX B300 and GB300 NVL72 have it, dense.

    Nobody has published what its best matmul sustains. The tensor cores are those of the chip
    `below`, held back by its power: at more of it they are faster, as `Hardware.peak` says.
    """
    sustained = below.matmul * (power / below.power) ** 0.5
    return replace(below, memory=288e9, power=power, matmul=sustained, **changes)


# B300: 1,100 W (HGX), GB300: 1,400 W (NVL72).
ULTRA = {
    "b300": ultra(DEVICES["b200"], 1100, bfloat16=2250e12, memory_bandwidth=8e12),
    "gb300": ultra(DEVICES["gb200"], 1400),
}
ULTRA = {name: replace(device, name=name) for name, device in ULTRA.items()}

ASSUMED = {
    "sc21_table1": "network 25 GB/s per device; everything else printed",
    "sc21_table2": "PTD-P 175B: v 1 (unprinted), TP 8 PP 12; 530B: v 3 as in table 1, PP 35; "
    "network 25 GB/s",
    "korthikanti_table4": "one layer, TP 8 inside a host",
    "korthikanti_table5": "network 25 GB/s per device",
    "mcore_h100_weak_scaling": "microbatch 1, interleaving at its most (one layer per chunk, or "
    "two), no recomputation; network 50 GB/s",
    "zb_table9": "no communication in it",
    "zb_table4": "vocabulary 32000 (unprinted; its scripts name a SentencePiece tokenizer); "
    "network 25 GB/s",
    "hagemann_layouts": "vocabulary 128000 and global batch from the printed MFU; network 25 GB/s",
    "hagemann_sweeps": "vocabulary and global batch likewise; network 25 GB/s for all of a host",
    "llama3_table4": "v 8, microbatch 1, ZeRO-2-like; network 50 GB/s",
    "torchtitan_h100_2024": "8B, bfloat16 rows; power limit 500 W as stated; flash attention 2; "
    "network 50 GB/s",
    "jax_toolbox_pax": "sizes, vocabulary 50304 and PACKED_INPUT of google/paxml, "
    "contrib/gpu/scripts_gpu/configs.py: attention over packed documents was unfused; "
    "175B: fused, vocabulary 50257 padded; "
    "recomputation unprinted: none for 126M, all but matmuls for 5B, full for 175B; "
    "network 25 (A100) and 50 GB/s (H100)",
    **dict.fromkeys(
        ("megatron_bridge_moe_2511", "megatron_bridge_moe_2602", "megatron_bridge_moe_2608"),
        "sizes of the models from their published configs; no recomputation; interleaving as "
        "printed; how tokens travel from the recipes beside the page: `moe_software`; DeepSeek-V3 "
        "as 62 layers with experts: the block of its second token as one, and its dense layers, "
        "whose FLOPs are those of active experts, as well",
    ),
}


@dataclass(frozen=True)
class Case:
    """A measured time, and what predicts it with given constants of the software."""

    table: str
    name: str
    measured: float  # in the source's unit: seconds, or milliseconds of parts of a step
    group: str  # rows with the same one can be calibrated on each other
    predict: Callable[[SoftwareTable], float]


def cases(name: str) -> list[Case]:
    return list(MAKERS[name](tables()[name]))


def tables() -> dict[str, dict[str, Any]]:
    """Id -> table of published.json."""
    return {table["id"]: table for table in json.loads((HERE / "published.json").read_text())}


def rows(table: Row) -> Iterator[Row]:
    for row in table["rows"]:
        yield dict(zip(table["columns"], row, strict=True))


def gpt(
    layers: int,
    embed: int,
    heads: int,
    vocab: int = 51200,
    max_length: int = 2048,
    dropout: bool = True,
) -> TransformerConfig:
    """The Megatron model: tied, biases, learned positions, dropout."""
    return GPT(
        layers=layers,
        embed=embed,
        heads=heads,
        vocab=vocab,
        max_length=max_length,
        dropout=0.1 if dropout else 0.0,
    )


def llama(layers: int, embed: int, heads: int, ffn: int) -> TransformerConfig:
    """Llama 3.1: eight key-value heads, vocabulary 128256, untied."""
    return Llama(layers=layers, embed=embed, heads=heads, kv_heads=8, ffn=ffn, vocab=128256)


def llama1(layers: int, embed: int, heads: int, ffn: int) -> TransformerConfig:
    """Llama of 2023, whose queries all have keys of their own, with a vocabulary of 128000."""
    return Llama(layers=layers, embed=embed, heads=heads, ffn=ffn, vocab=128000)


HAGEMANN_MODELS = {
    "13B": llama1(40, 5120, 40, 13824),
    "30B": llama1(60, 6656, 52, 17920),
    "65B": llama1(80, 8192, 64, 22016),
}


def qwen3_moe(layers: int, embed: int, heads: int, ffn: int) -> TransformerConfig:
    """Qwen3 with 128 experts, of which a token goes through 8, in buckets of the needed size."""
    return Llama(
        layers=layers,
        embed=embed,
        heads=heads,
        kv_heads=4,
        head_dim=128,
        ffn=ffn,
        vocab=151936,
        query_norm="head",
        experts=ExpertsConfig(count=128, chosen=8, ffn=ffn, bucket_factor=1.0),
    )


def published_run(
    model: TransformerConfig,
    sequence_length: int,
    global_batch: int,
    matmul: str = "compute",
    **layout: Any,
) -> Workload:
    """A run of other software, in bfloat16: `layout` may be one that ours lacks."""
    train = {"sequence_length": sequence_length, "global_batch": global_batch}
    precision = {"compute": "bfloat16", "matmul": matmul}
    return Workload(RunConfig(model=model, train=train, precision=precision), **layout)


def interleaved(chunks: int) -> dict[str, Any]:
    """The schedule of a Megatron run with this many chunks per stage."""
    return {"schedule": "interleaved" if chunks > 1 else "1f1b", "chunks": chunks}


def predict_step(workload: Workload, hardware: Hardware, name: str, table: SoftwareTable) -> float:
    """Seconds of a step with the software of that name."""
    return step_time(workload, hardware, table[name][fitted_on(hardware.name)]).seconds


def predict_recipe(
    workload: Workload,
    hardware: Hardware,
    name: str,
    recipe: Mapping[str, Any],
    table: SoftwareTable,
) -> float:
    """Seconds of a step with the software of that name, as a recipe changes it."""
    software = replace(table[name][fitted_on(hardware.name)], **recipe)
    return step_time(workload, hardware, software).seconds


def predict_layers(workload: Workload, name: str, table: SoftwareTable) -> float:
    """Milliseconds of one microbatch in the layers of a stage, on an A100."""
    layer = layer_time(workload, A100, table[name]["a100"])
    return 1e3 * workload.layers_per_stage * sum(map(sum, layer.values()))


def predictor(
    workload: Workload, hardware: Hardware, name: str
) -> Callable[[SoftwareTable], float]:
    return partial(predict_step, workload, hardware, name)


# Tables that train the fitted constants


def sc21_table1(table: Row) -> Iterator[Case]:
    for row in rows(table):
        workload = published_run(
            model=gpt(row["layers"], row["hidden"], row["heads"]),
            sequence_length=2048,
            global_batch=row["global_batch"],
            microbatch=row["microbatch"],
            mesh=MeshShape(pipeline=row["pp"], data=row["dp"], tensor=row["tp"]),
            remat="full",
            **interleaved(row["virtual_stages"]),
        )
        yield Case(
            table["id"],
            row["model"],
            row["derived_iteration_s"],
            "megatron-2021",
            predictor(workload, A100, "megatron-2021"),
        )


def korthikanti_table5(table: Row) -> Iterator[Case]:
    for row in rows(table):
        for column, remat in (
            ("iter_s_full_recompute", "full"),
            ("iter_s_present_work", "attention"),
        ):
            workload = published_run(
                model=gpt(row["layers"], row["hidden"], row["heads"]),
                sequence_length=2048,
                global_batch=row["global_batch"],
                microbatch=row["microbatch"],
                mesh=MeshShape(pipeline=row["pp"], tensor=8),
                remat=remat,
                sequence_parallel=remat == "attention",
                **interleaved(row["virtual_stages"]),
            )
            yield Case(
                table["id"],
                f"{row['model']} {remat}",
                row[column],
                "megatron-2022",
                predictor(workload, A100, "megatron-2022"),
            )


def mcore_h100_weak_scaling(table: Row) -> Iterator[Case]:
    for row in rows(table):
        stages = row["pp"]
        microbatches = row["global_batch"] // row["dp"]
        can_interleave = stages > 1 and microbatches % stages == 0
        chunks = row["layers"] // stages if can_interleave else 1
        workload = published_run(
            model=gpt(row["layers"], row["hidden"], row["heads"], 131072, 4096, dropout=False),
            sequence_length=4096,
            global_batch=row["global_batch"],
            microbatch=1,
            mesh=MeshShape(pipeline=stages, data=row["dp"], tensor=row["tp"]),
            sequence_parallel=True,
            **interleaved(chunks),
        )
        seconds = row["derived_iteration_s_if_72BLsh2"]
        yield Case(
            table["id"],
            row["model"],
            seconds,
            "megatron-core",
            predictor(workload, H100, "megatron-core"),
        )


def zb_table9(table: Row) -> Iterator[Case]:
    shapes = _zb_shapes(tables())
    for row in rows(table):
        model, microbatch = shapes[row["model"]]
        workload = published_run(
            model=model,
            sequence_length=1024,
            global_batch=microbatch * row["microbatches"],
            microbatch=microbatch,
            mesh=MeshShape(pipeline=row["stages"]),
            short_ends=1,
        )
        yield Case(
            table["id"],
            f"{row['model']} {row['microbatches']}",
            row["T_F"] + row["T_B"] + row["T_W"],
            "megatron-2021",
            partial(predict_layers, workload, "megatron-2021"),
        )


# Tables that only judge


def korthikanti_table4(table: Row) -> Iterator[Case]:
    remat_and_sequence_parallel = {
        "baseline no recompute": ("none", False),
        "sequence parallelism": ("none", True),
        "full recompute": ("full", False),
        "selective recompute": ("attention", False),
        "selective + sequence": ("attention", True),
    }
    for row in rows(table):
        remat, sequence_parallel = remat_and_sequence_parallel[row["experiment"]]
        workload = published_run(
            model=gpt(1, 6144, 64),
            sequence_length=2048,
            global_batch=4,
            microbatch=4,
            mesh=MeshShape(tensor=8),
            remat=remat,
            sequence_parallel=sequence_parallel,
        )
        yield Case(
            table["id"],
            row["experiment"],
            row["combined_ms"],
            "megatron-2022",
            partial(predict_layers, workload, "megatron-2022"),
        )


# Billions of parameters -> (model, pipeline stages, chunks per stage).
SC21_TABLE2 = {174.6: (gpt(96, 12288, 96), 12, 1), 529.6: (gpt(105, 20480, 128), 35, 3)}


def sc21_table2(table: Row) -> Iterator[Case]:
    for row in rows(table):
        name = f"{row['scheme']} {row['params_B']:.0f}B {row['gpus']}"
        seconds = row["derived_iteration_s"]
        if row["scheme"] == "PTD-P":
            predict = predictor(ptdp_workload(row), A100, "megatron-2021")
            yield Case(table["id"], name, seconds, "megatron-2021", predict)
        else:
            predict = predictor(zero3_workload(row), A100, "zero3-2021")
            yield Case(f"{table['id']} ZeRO-3", name, seconds, "zero3-2021", predict)


def ptdp_workload(row: Row) -> Workload:
    """The workload of a PTD-P row of sc21_table2."""
    model, stages, chunks = SC21_TABLE2[row["params_B"]]
    return published_run(
        model=model,
        sequence_length=2048,
        global_batch=row["global_batch"],
        microbatch=row["microbatch"],
        mesh=MeshShape(pipeline=stages, data=row["gpus"] // row["model_parallel"], tensor=8),
        remat="full",
        **interleaved(chunks),
    )


def zero3_workload(row: Row) -> Workload:
    """The workload of a ZeRO-3 row of sc21_table2."""
    model, _, _ = SC21_TABLE2[row["params_B"]]
    return published_run(
        model=model,
        sequence_length=2048,
        global_batch=row["global_batch"],
        microbatch=row["microbatch"],
        mesh=MeshShape(fsdp=row["gpus"]),
        remat="full",
    )


ZB_SCHEDULES = {
    "1F1B": "1f1b",
    "1F1B-I": "interleaved",
    "ZB-1p": "zero_bubble",
    "ZB-2p": "zero_bubble_2p",
}


def zb_table4(table: Row) -> Iterator[Case]:
    for workload, row in zb_workloads(table):
        name = f"{row['model']} {row['schedule']} {row['microbatches']}"
        seconds = row["derived_iteration_ms"] / 1e3
        yield Case(
            table["id"], name, seconds, "megatron-2021", predictor(workload, A100, "megatron-2021")
        )


def zb_workloads(table: Row) -> Iterator[tuple[Workload, Row]]:
    shapes = _zb_shapes(tables())
    for row in rows(table):
        model, microbatch = shapes[row["model"]]
        schedule = ZB_SCHEDULES[row["schedule"]]
        one_layer_chunks = (model.layers + 2) // row["stages"]
        workload = published_run(
            model=model,
            sequence_length=1024,
            global_batch=microbatch * row["microbatches"],
            microbatch=microbatch,
            mesh=MeshShape(pipeline=row["stages"]),
            schedule=schedule,
            chunks=one_layer_chunks if schedule == "interleaved" else 1,
            short_ends=1,
        )
        yield workload, row


def _zb_shapes(all_tables: Mapping[str, Row]) -> dict[str, tuple[TransformerConfig, int]]:
    """Name -> (model, microbatch)."""
    return {
        row["model"]: (
            gpt(row["layers"], row["hidden"], row["heads"], 32000, 1024),
            row["microbatch"],
        )
        for row in rows(all_tables["zb_table3"])
    }


def hagemann_layouts(table: Row, hardware: Hardware = A100) -> Iterator[Case]:
    for row in rows(table):
        workload = published_run(
            model=HAGEMANN_MODELS[row["model"]],
            sequence_length=row["sequence"],
            global_batch=row["global_batch"],
            microbatch=row["microbatch"],
            mesh=MeshShape(
                pipeline=row["pp"], data=row["gpus"] // row["pp"] // row["tp"], tensor=row["tp"]
            ),
            zero=1,
            sequence_parallel=bool(row["sequence_parallel"]) and row["tp"] > 1,
        )
        group = f"{row['model']} {row['sequence']} on {row['gpus']}"
        split = " split" if row["sequence_parallel"] else ""
        layout = f"microbatch {row['microbatch']} tp {row['tp']} pp {row['pp']}{split}"
        predict = predictor(workload, hardware, "scaling-2023")
        yield Case(table["id"], f"{group} {layout}", row["step_s"], group, predict)


def hagemann_sweeps(table: Row) -> Iterator[Case]:
    return hagemann_layouts(table, A100_ONE_CARD)


def llama3_table4(table: Row) -> Iterator[Case]:
    for row in rows(table):
        workload = published_run(
            model=llama(126, 16384, 128, 53248),
            sequence_length=row["seq"],
            global_batch=row["dp"] * row["batch_per_dp"],
            microbatch=1,
            mesh=MeshShape(pipeline=row["pp"], data=row["dp"], context=row["cp"], tensor=row["tp"]),
            sequence_parallel=True,
            short_ends=1,
            **interleaved(8),
        )
        name = f"{row['gpus']} cp {row['cp']}"
        yield Case(
            table["id"],
            name,
            row["derived_step_s"],
            "megatron-core",
            predictor(workload, H100, "megatron-core"),
        )


def torchtitan_h100_2024(table: Row) -> Iterator[Case]:
    for row in rows(table):
        if row["model"] != "8B" or "float8" in row["techniques"]:
            continue
        workload = published_run(
            model=llama(32, 4096, 32, 14336),
            sequence_length=row["seq"],
            global_batch=row["global_batch"],
            microbatch=row["local_batch"],
            mesh=MeshShape(fsdp=row["fsdp"]),
            remat="half",
        )
        tokens_per_gpu = row["global_batch"] * row["seq"] / row["gpus"]
        software = "torchtitan" if "compile" in row["techniques"] else "torchtitan-eager"
        yield Case(
            table["id"],
            f"{row['techniques']} {row['gpus']}",
            tokens_per_gpu / row["tokens_per_s_per_gpu"],
            software,
            predictor(workload, H100_96, software),
        )


# Layers, embed, heads.
PAX_SIZES = {"126M": (12, 768, 12), "5B": (24, 4096, 32), "175B": (96, 12288, 96)}
PAX_REMAT = {"126M": "none", "5B": "matmuls", "175B": "full"}


def jax_toolbox_pax(table: Row) -> Iterator[Case]:
    # The 5B rows come first: they are the ones to calibrate on.
    for row in sorted(rows(table), key=lambda row: row["model"] != "5B"):
        if "FP8" in row["precision"]:
            continue
        hardware = A100 if row["gpu"] == "A100" else H100
        workload = published_run(
            model=gpt(*PAX_SIZES[row["model"]], vocab=50304, dropout=False),
            sequence_length=2048,
            global_batch=row["batch_per_gpu"] * row["gpus"],
            microbatch=row["batch_per_gpu"],
            mesh=MeshShape(data=row["dp"], fsdp=row["fsdp"], tensor=row["tp"]),
            remat=PAX_REMAT[row["model"]],
        )
        software = "pax" if row["model"] == "175B" else "pax-unfused"
        yield Case(
            table["id"],
            f"{row['model']} {row['gpu']} {row['precision']}",
            row["derived_step_s"],
            f"{row['precision']} {row['gpu']}",
            predictor(workload, hardware, software),
        )


# Published names -> models with experts.
MOE_MODELS = {
    "Qwen3-30B-A3B": qwen3_moe(48, 2048, 32, 768),
    "Qwen3-235B-A22B": qwen3_moe(94, 4096, 64, 1536),
    "GPT-OSS-120B": Llama(
        layers=36,
        embed=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        ffn=2880,
        vocab=201088,
        bias=True,
        sinks=True,
        windows=(128, 0),
        experts=ExpertsConfig(count=128, chosen=4, ffn=2880, bucket_factor=1.0, logit_bias=True),
    ),
    "DeepSeek-V3": Llama(
        layers=61,
        embed=7168,
        heads=128,
        ffn=18432,
        vocab=129280,
        latent=LatentConfig(rank=512, query_rank=1536, plain_dim=128, rope_dim=64, value_dim=128),
        experts=ExpertsConfig(count=256, chosen=8, ffn=2048, shared=1, bucket_factor=1.0),
        multi_token=MultiTokenConfig(),
    ),
}


def megatron_bridge_moe_2511(table: Row) -> Iterator[Case]:
    return _megatron_bridge(table)


def megatron_bridge_moe_2602(table: Row) -> Iterator[Case]:
    return _megatron_bridge(table)


def megatron_bridge_moe_2608(table: Row) -> Iterator[Case]:
    return _megatron_bridge(table)


def _megatron_bridge(table: Row) -> Iterator[Case]:
    # The pages say that loads are even, by force.
    release = int(table["id"].rsplit("_", 1)[1])
    for row in rows(table):
        hardware = (DEVICES | ULTRA)[row["hardware"]]
        name = moe_software(row, release)
        yield Case(
            table["id"],
            f"{row['model']} {row['hardware']} {row['precision']}",
            row["derived_step_s"],
            f"{row['hardware']} {name}",
            partial(predict_recipe, moe_workload(row), hardware, name, moe_recipe(row, release)),
        )


def moe_workload(row: Row) -> Workload:
    """Returns the workload of a row; `tensor` splits attention, and owns whole experts."""
    model, stages, tensor = moe_model(row), row["pp"], row["tp"]
    mesh = MeshShape(
        pipeline=stages,
        data=row["gpus"] // stages // row["ep"],
        expert=row["ep"] // tensor,
        tensor=tensor,
    )
    return published_run(
        model=model,
        sequence_length=row["sequence"],
        global_batch=row["global_batch"],
        microbatch=row["microbatch"],
        mesh=mesh,
        matmul="compute" if row["precision"] == "bf16" else "float8",
        # Qwen3-235B's embedding and head take the places of layers; DeepSeek-V3's last stage has
        # what the others leave (the map of layouts in its recipe).
        short_ends=0 if model.latent else -model.layers % (stages * row["virtual_stages"]) // 2,
        last_takes_rest=model.latent is not None,
        sequence_parallel=tensor > 1,
        experts_over_tensor=tensor > 1,
        **interleaved(row["virtual_stages"]),
    )


def moe_model(row: Row) -> TransformerConfig:
    """Returns the model of a row: some ran DeepSeek-V3 without the block of its second token.

    The page does not say which, but its FLOPs a token do: 0.2497 T without, 0.260 T with it.
    """
    model = MOE_MODELS[row["model"]]
    if not model.multi_token:
        return model
    return min(
        (model.model_copy(update={"multi_token": None}), model),
        key=lambda one: abs(
            model_flops_per_token(one, row["sequence"]) / 1e12 - row["derived_tflop_per_token"]
        ),
    )


def moe_recipe(row: Row, release: int) -> dict[str, Any]:
    """Returns what recipes.toml says of a row, as fields of `Software`."""
    for recipe in tomllib.loads((HERE / "recipes.toml").read_text())["recipe"]:
        if (
            recipe["release"] == release
            and recipe["model"] == row["model"]
            and row["hardware"] in recipe["hardware"]
        ):
            narrow = {f"narrow_{part}": True for part in recipe.get("narrow", ())}
            return narrow | {"again": tuple(recipe.get("again", ()))}
    return {}


def moe_software(row: Row, release: int) -> str:
    """Returns the name of the software of a row of the container of year and month `release`.

    On hosts with x86, recipes of 2025 exchange rows by NCCL, and those of Qwen3-235B still do in
    February 2026: beside the other direction's work where stages are interleaved. All others use
    Hybrid-EP or DeepEP. Those since June 2026 run whole steps as CUDA graphs, with fused kernels.
    gpt-oss clamps, which had no kernel before.
    """
    if release >= 2606:
        return "megatron-moe-graphs"
    if row["model"].startswith("GPT-OSS"):
        return "megatron-moe-clamps"
    by_rows = release < 2602 or row["model"].startswith("Qwen3-235B")
    if row["hardware"].startswith("gb") or not by_rows:
        return "megatron-moe"
    return "megatron-moe-beside" if row["virtual_stages"] > 1 else "megatron-moe-rows"


MAKERS: Mapping[str, Callable[[Row], Iterator[Case]]] = {
    maker.__name__: maker
    for maker in (
        sc21_table1,
        korthikanti_table5,
        mcore_h100_weak_scaling,
        zb_table9,
        korthikanti_table4,
        sc21_table2,
        zb_table4,
        hagemann_layouts,
        hagemann_sweeps,
        llama3_table4,
        torchtitan_h100_2024,
        jax_toolbox_pax,
        megatron_bridge_moe_2511,
        megatron_bridge_moe_2602,
        megatron_bridge_moe_2608,
    )
}
