"""The table on the docs' page of the planner: the published trillion-parameter run among all
layouts of 3072 A100s.

python benchmarks/planner/plan_table.py [--top 8]
"""

import argparse
import time

from cases import A100, Row, gpt, published_run, rows, tables
from frameworks import framework
from megatron_plan import search

from spmdtrain.planner.plan import Plan

HEAD = "| | step | pipeline | data | tensor | microbatch | chunks | remat | memory | why not |"


def line(name: str, plan: Plan) -> str:
    workload = plan.workload
    mesh = workload.mesh
    cells = (
        mesh.pipeline,
        mesh.data,
        mesh.tensor,
        workload.microbatch,
        workload.chunks,
        workload.remat,
    )
    held = f"{plan.memory.total / 1e9:.0f} GB"
    return (
        f"| {name} | {plan.seconds:.1f} s | {' | '.join(map(str, cells))} | {held} | {plan.why} |"
    )


def is_published(plan: Plan, row: Row) -> bool:
    workload = plan.workload
    layout = (workload.mesh.pipeline, workload.mesh.tensor, workload.microbatch, workload.chunks)
    published = (row["pp"], row["tp"], row["microbatch"], row["virtual_stages"])
    return layout == published and workload.remat == "full"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--top", type=int, default=8)
    parsed = parser.parse_args()
    (published,) = [row for row in rows(tables()["sc21_table1"]) if row["model"] == "1T"]
    workload = published_run(
        model=gpt(published["layers"], published["hidden"], published["heads"]),
        sequence_length=2048,
        global_batch=published["global_batch"],
        microbatch=1,
    )
    start = time.perf_counter()
    plans = search(workload, published["gpus"], A100, framework("megatron-2021", A100.name))
    seconds = time.perf_counter() - start
    fit = sum(plan.fits for plan in plans)
    print(
        f"{fit} layouts fit, {len(plans) - fit} meshes do not; searched in {seconds:.2f} s.",
        end=" ",
    )
    print(f"Measured: {published['derived_iteration_s']} s.\n")
    print(HEAD + "\n" + "|---" * 10 + "|")
    for rank, plan in enumerate(plans[: parsed.top], start=1):
        name = f"{rank}, published" if is_published(plan, published) else f"{rank}"
        print(line(name, plan))


if __name__ == "__main__":
    main()
