"""One of two processes with two devices each, which trains, and of which one is slow or has a
broken device.

python -m faults.two_processes KIND RUN PORT RANK     KIND: none | slow | flip
"""

import random
import sys
import time
from pathlib import Path

from spmdtrain.processes import processes

SLOW = 1  # the process
BROKEN = (1, 1)  # the process, and which of its devices
STEP = 5
STEPS = 24


def main(kind: str, run: str, port: str, rank: int) -> None:
    processes.simulate_devices(2)
    processes.start(f"localhost:{port}", 2, rank)
    import jax
    from helpers import tiny

    from faults.damage import flip_copy
    from spmdtrain.running import loop
    from spmdtrain.running.start import compiling

    compile_step = compiling.compile_step

    def compile_broken(setup, lowered):
        step, report = compile_step(setup, lowered)

        def broken(state, batch):
            state, metrics = step(state, batch)
            if int(state.step) == STEP and rank == BROKEN[0]:
                name = max(state.params)
                device = jax.local_devices()[BROKEN[1]]
                state.params[name] = flip_copy(
                    state.params[name], device, random.Random(0), low=True
                )
            return state, metrics

        return broken, report

    def sleep(event, step, _):
        if event == "step" and rank == SLOW and step > STEP:
            time.sleep(0.2)

    if kind == "flip":
        compiling.compile_step = compile_broken
    settings = (
        "model.layers=1",
        "train.global_batch=4",
        "mesh.data=4",
        f"train.steps={STEPS}",
        "log.every=4",
    )
    config = tiny(*settings, "guard.replica_check=2", "optimizer.schedule=constant")
    loop.run(config, Path(run), hooks=[sleep] if kind == "slow" else [])


if __name__ == "__main__":
    from spmdtrain.config.errors import UserError

    try:
        main(*sys.argv[1:4], int(sys.argv[4]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
