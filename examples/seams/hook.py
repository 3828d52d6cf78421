"""A custom hook: it stops the run when the loss is low enough, and prints what was saved.

python examples/seams/hook.py
"""

import spmdtrain as st

CONFIG = st.RunConfig(
    model={"name": "gpt", "layers": 2, "embed": 32},
    mesh={"data": -1},
    train={"steps": 500},
    data={"corpus": "synthetic"},
)
ENOUGH = 3.5


def stop_when_good(event, step, figures):
    """Runs in every process after each step, evaluation and save. True stops the run."""
    if event == "saved":
        print(f"step {step} is safe on disk")
    return event == "step" and figures["loss"] < ENOUGH


if __name__ == "__main__":
    outcome = st.run(CONFIG, "runs/good_enough", hooks=[stop_when_good])
    print(f"{outcome.status} after {outcome.step} of {CONFIG.train.steps} steps")
