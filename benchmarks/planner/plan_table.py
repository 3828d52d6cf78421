"""The README's table of the planner: the published trillion-parameter run among all layouts of 3072 A100s.

python benchmarks/planner/plan_table.py [--top 8]
"""

import argparse
import time

from cases import A100, gpt, rows, tables

from spmdtrain.planner.job import Job
from spmdtrain.planner.search import Plan, search
from spmdtrain.planner.stack import stack

HEAD = "| | step | pipeline | data | tensor | microbatch | chunks | remat | memory | why not |"


def line(name: str, plan: Plan) -> str:
    job, layout = plan.job, plan.job.layout
    cells = (layout.pipeline, layout.data, layout.tensor, job.microbatch, job.chunks, job.remat)
    held = f"{plan.memory.total / 1e9:.0f} GB"
    return f"| {name} | {plan.price.step:.1f} s | {' | '.join(map(str, cells))} | {held} | {plan.why} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--top", type=int, default=8)
    parsed = parser.parse_args()
    (published,) = [row for row in rows(tables()["sc21_table1"]) if row["model"] == "1T"]
    shape = gpt(published["layers"], published["hidden"], published["heads"])
    job = Job(shape, 2048, published["global_batch"], 1)
    start = time.perf_counter()
    plans = search(job, published["gpus"], A100, stack("megatron-2021", A100.name))
    seconds = time.perf_counter() - start
    fit = sum(plan.fits for plan in plans)
    print(f"{fit} layouts fit, {len(plans) - fit} meshes do not; searched in {seconds:.2f} s.", end=" ")
    print(f"Measured: {published['derived_iteration_s']} s.\n")
    print(HEAD + "\n" + "|---" * 10 + "|")
    for at, plan in enumerate(plans[: parsed.top]):
        same = (
            plan.job.layout.pipeline,
            plan.job.layout.tensor,
            plan.job.microbatch,
            plan.job.chunks,
            plan.job.remat,
        ) == (*(published["pp"], published["tp"], published["microbatch"], published["virtual_stages"], "full"),)
        print(line(f"{at + 1}" + (", published" if same else ""), plan))


if __name__ == "__main__":
    main()
