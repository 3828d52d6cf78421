"""Published runs as jobs that the planner prices. What a source does not print is assumed here, and said beside it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdtrain.planner.cost import layer_work, price
from spmdtrain.planner.hardware import DEVICES, Hardware
from spmdtrain.planner.job import Job, Layout, Shape
from spmdtrain.planner.stack import Stack

HERE = Path(__file__).parent
Stacks = dict[str, dict[str, Stack]]

A100, H100 = DEVICES["a100-80"], DEVICES["h100"]
# Llama 3.1 on the box that torchtitan used: 2.4 TB/s of HBM2e, 500 W.
H100_96 = replace(H100, name="h100-96", memory=96e9, memory_bandwidth=2.4e12, power_limit=500)

ASSUMED = {
    "sc21_table1": "network 25 GB/s per device; everything else printed",
    "sc21_table2": "PTD-P 175B: v 1 (unprinted), TP 8 PP 12; 530B: v 3 as in table 1, PP 35; network 25 GB/s",
    "korthikanti_table4": "one layer, TP 8 inside a host",
    "korthikanti_table5": "network 25 GB/s per device",
    "mcore_h100_weak_scaling": "microbatch 1, interleaving at its most (one layer per chunk, or two), no recomputation;"
    " network 50 GB/s",
    "zb_table9": "no communication in it",
    "zb_table4": "vocabulary 32000 (unprinted; its scripts name a SentencePiece tokenizer); network 25 GB/s",
    "llama3_table4": "v 8, microbatch 1, ZeRO-2-like; network 50 GB/s",
    "torchtitan_h100_2024": "8B, bfloat16 rows; power limit 500 W as stated; flash attention 2; network 50 GB/s",
    "jax_toolbox_pax": "sizes, vocabulary 50304 and PACKED_INPUT of google/paxml, contrib/gpu/scripts_gpu/configs.py: "
    "attention over packed documents was unfused; 175B: fused, vocabulary 50257 padded; recomputation unprinted: none "
    "for 126M, all but matmuls for 5B, full for 175B; network 25 (A100) and 50 GB/s (H100)",
}


@dataclass(frozen=True)
class Case:
    """A measured time and what predicts it at given stacks."""

    table: str
    name: str
    measured: float  # seconds
    stack: str  # rows with the same one can be calibrated on each other
    predict: Callable[[Stacks], float]


def tables() -> dict[str, dict[str, Any]]:
    return {table["id"]: table for table in json.loads((HERE / "published.json").read_text())}


def rows(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in table["rows"]:
        yield dict(zip(table["columns"], row, strict=True))


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200, sequence: int = 2048, dropout: bool = True) -> Shape:
    """The Megatron model: tied, biases, learned positions, dropout."""
    sizes = {"kv_heads": heads, "head_dim": hidden // heads, "hidden": 4 * hidden, "vocab": vocab}
    return Shape(layers, hidden, heads, **sizes, positions=sequence, dropout=dropout)


def llama(layers: int, embed: int, heads: int, hidden: int) -> Shape:
    """Llama 3.1: eight key-value heads, vocabulary 128256, untied."""
    sizes = {"kv_heads": 8, "head_dim": embed // heads, "hidden": hidden, "vocab": 128256}
    return Shape(layers, embed, heads, **sizes, gated=True, tied=False, bias=False, centred=False)


def _priced(job: Job, device: Hardware, name: str) -> Callable[[Stacks], float]:
    generation = "a100" if device.name.startswith("a100") else "h100"
    return lambda stacks: price(job, device, stacks[name][generation]).step


def sc21_table1(table) -> Iterator[Case]:
    for row in rows(table):
        layout = Layout(row["pp"], row["dp"], tensor=row["tp"])
        v = row["virtual_stages"]
        shape = gpt(row["layers"], row["hidden"], row["heads"])
        kind = "interleaved" if v > 1 else "1f1b"
        job = Job(shape, 2048, row["global_batch"], row["microbatch"], layout, kind, v, "full")
        yield Case(
            table["id"], row["model"], row["derived_iteration_s"], "megatron-2021", _priced(job, A100, "megatron-2021")
        )


SC21_TABLE2 = {174.6: (gpt(96, 12288, 96), 12, 1), 529.6: (gpt(105, 20480, 128), 35, 3)}  # shape, stages, chunks


def zero3_job(row: dict[str, Any]) -> Job:
    """Of a ZeRO-3 row of sc21_table2."""
    sizes = (2048, row["global_batch"], row["microbatch"], Layout(fsdp=row["gpus"]))
    return Job(SC21_TABLE2[row["params_B"]][0], *sizes, remat="full")


def sc21_table2(table) -> Iterator[Case]:
    for row in rows(table):
        shape, p, v = SC21_TABLE2[row["params_B"]]
        name = f"{row['scheme']} {row['params_B']:.0f}B {row['gpus']}"
        if row["scheme"] == "PTD-P":
            layout = Layout(p, row["gpus"] // row["model_parallel"], tensor=8)
            kind = "interleaved" if v > 1 else "1f1b"
            job = Job(shape, 2048, row["global_batch"], row["microbatch"], layout, kind, v, "full")
            yield Case(
                table["id"], name, row["derived_iteration_s"], "megatron-2021", _priced(job, A100, "megatron-2021")
            )
        else:
            predict = _priced(zero3_job(row), A100, "zero3-2021")
            yield Case(f"{table['id']} ZeRO-3", name, row["derived_iteration_s"], "zero3-2021", predict)


def korthikanti_table4(table) -> Iterator[Case]:
    shape = gpt(1, 6144, 64)
    ways = {
        "baseline no recompute": ("none", False),
        "sequence parallelism": ("none", True),
        "full recompute": ("full", False),
        "selective recompute": ("attention", False),
        "selective + sequence": ("attention", True),
    }
    for row in rows(table):
        remat, split = ways[row["experiment"]]
        job = Job(shape, 2048, 4, 4, Layout(tensor=8), remat=remat, sequence_parallel=split)

        def predict(stacks, job=job):
            return 1e3 * sum(map(sum, layer_work(job, A100, stacks["megatron-2022"]["a100"]).values()))

        yield Case(table["id"], row["experiment"], row["combined_ms"], "megatron-2022", predict)


def korthikanti_table5(table) -> Iterator[Case]:
    for row in rows(table):
        layout, v = Layout(row["pp"], tensor=8), row["virtual_stages"]
        kind = "interleaved" if v > 1 else "1f1b"
        shape = gpt(row["layers"], row["hidden"], row["heads"])
        for column, remat in (("iter_s_full_recompute", "full"), ("iter_s_present_work", "attention")):
            sizes = (2048, row["global_batch"], row["microbatch"], layout, kind, v, remat)
            job = Job(shape, *sizes, sequence_parallel=remat == "attention")
            yield Case(
                table["id"],
                f"{row['model']} {remat}",
                row[column],
                "megatron-2022",
                _priced(job, A100, "megatron-2022"),
            )


def mcore_h100_weak_scaling(table) -> Iterator[Case]:
    for row in rows(table):
        p = row["pp"]
        v = row["layers"] // p if p > 1 else 1
        m = row["global_batch"] // row["dp"]
        kind = "interleaved" if v > 1 and m % p == 0 else "1f1b"
        v = v if kind == "interleaved" else 1
        shape = gpt(row["layers"], row["hidden"], row["heads"], 131072, 4096, dropout=False)
        layout = Layout(p, row["dp"], tensor=row["tp"])
        job = Job(shape, 4096, row["global_batch"], 1, layout, kind, v, sequence_parallel=True)
        seconds = row["derived_iteration_s_if_72BLsh2"]
        yield Case(table["id"], row["model"], seconds, "megatron-core", _priced(job, H100, "megatron-core"))


def _zb_shapes(all_tables) -> dict[str, tuple[Shape, int]]:
    return {
        row["model"]: (gpt(row["layers"], row["hidden"], row["heads"], 32000, 1024), row["microbatch"])
        for row in rows(all_tables["zb_table3"])
    }


def zb_table9(table) -> Iterator[Case]:
    shapes = _zb_shapes(tables())
    for row in rows(table):
        shape, b = shapes[row["model"]]
        job = Job(shape, 1024, b * row["microbatches"], b, Layout(row["stages"]), short_ends=1)

        def predict(stacks, job=job):
            work = layer_work(job, A100, stacks["megatron-2021"]["a100"])
            return 1e3 * job.layers_per_stage * sum(map(sum, work.values()))

        name = f"{row['model']} {row['microbatches']}"
        yield Case(table["id"], name, row["T_F"] + row["T_B"] + row["T_W"], "megatron-2021", predict)


ZB_KINDS = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zero_bubble", "ZB-2p": "zero_bubble_2p"}


def zb_table4(table) -> Iterator[Case]:
    for job, row in zb_jobs(table):
        name = f"{row['model']} {row['schedule']} {row['microbatches']}"
        seconds = row["derived_iteration_ms"] / 1e3
        yield Case(table["id"], name, seconds, "megatron-2021", _priced(job, A100, "megatron-2021"))


def zb_jobs(table) -> Iterator[tuple[Job, dict[str, Any]]]:
    shapes = _zb_shapes(tables())
    for row in rows(table):
        shape, b = shapes[row["model"]]
        kind = ZB_KINDS[row["schedule"]]
        v = (shape.layers + 2) // row["stages"] if kind == "interleaved" else 1  # one layer per chunk
        sizes = (1024, b * row["microbatches"], b, Layout(row["stages"]), kind, v)
        yield Job(shape, *sizes, short_ends=1), row


def llama3_table4(table) -> Iterator[Case]:
    for row in rows(table):
        layout = Layout(row["pp"], row["dp"], context=row["cp"], tensor=row["tp"])
        batch = row["dp"] * row["batch_per_dp"]
        sizes = (row["seq"], batch, 1, layout, "interleaved", 8)
        job = Job(llama(126, 16384, 128, 53248), *sizes, sequence_parallel=True, short_ends=1)
        name = f"{row['gpus']} cp {row['cp']}"
        yield Case(table["id"], name, row["derived_step_s"], "megatron-core", _priced(job, H100, "megatron-core"))


def torchtitan_h100_2024(table) -> Iterator[Case]:
    for row in rows(table):
        if row["model"] != "8B" or "float8" in row["techniques"]:
            continue
        layout = Layout(fsdp=row["fsdp"])
        sizes = (row["seq"], row["global_batch"], row["local_batch"], layout)
        job = Job(llama(32, 4096, 32, 14336), *sizes, remat="half")
        tokens = row["global_batch"] * row["seq"] / row["gpus"]
        stack = "torchtitan" if "compile" in row["techniques"] else "torchtitan-eager"
        name = f"{row['techniques']} {row['gpus']}"
        yield Case(table["id"], name, tokens / row["tokens_per_s_per_gpu"], stack, _priced(job, H100_96, stack))


def jax_toolbox_pax(table) -> Iterator[Case]:
    shapes = {"126M": (12, 768, 12), "5B": (24, 4096, 32), "175B": (96, 12288, 96)}
    remat = {"126M": "none", "5B": "matmuls", "175B": "full"}
    # The 5B rows come first: they are the ones to calibrate on.
    for row in sorted(rows(table), key=lambda row: row["model"] != "5B"):
        if "FP8" in row["precision"]:
            continue
        device = A100 if row["gpu"] == "A100" else H100
        layout = Layout(data=row["dp"], fsdp=row["fsdp"], tensor=row["tp"])
        batch = row["batch_per_gpu"] * row["gpus"]
        shape = gpt(*shapes[row["model"]], vocab=50304, dropout=False)
        job = Job(shape, 2048, batch, row["batch_per_gpu"], layout, remat=remat[row["model"]])
        stack = "pax" if row["model"] == "175B" else "pax-unfused"
        name = f"{row['model']} {row['gpu']} {row['precision']}"
        yield Case(
            table["id"], name, row["derived_step_s"], f"{row['precision']} {row['gpu']}", _priced(job, device, stack)
        )


MAKERS = {
    maker.__name__: maker
    for maker in (
        *(sc21_table1, korthikanti_table5, mcore_h100_weak_scaling, zb_table9),
        *(korthikanti_table4, sc21_table2, zb_table4, llama3_table4, torchtitan_h100_2024, jax_toolbox_pax),
    )
}


def cases(name: str) -> list[Case]:
    return list(MAKERS[name](tables()[name]))
