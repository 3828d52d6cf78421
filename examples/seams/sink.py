"""A custom sink: writes the losses of a run to a CSV file next to its metrics.jsonl.

    python examples/seams/sink.py

W&B fits in the same way: `wandb.init` in the constructor, `wandb.log` in `metrics`.
"""

import csv

import spmdtrain as st

CONFIG = st.RunConfig(
    model={"name": "gpt", "layers": 2, "embed": 32},
    mesh={"data": -1},
    train={"steps": 20},
    data={"corpus": "synthetic"},
)


class CsvSink:
    """The file RUN/losses.csv: step, loss. Process 0 opens it after `step` steps of a run."""

    def __init__(self, directory, config, step):
        self._file = (directory / "losses.csv").open("a" if step else "w", newline="")

    def metrics(self, step, figures):
        if "loss" in figures:  # an evaluation has eval_loss instead
            csv.writer(self._file).writerow([step, figures["loss"]])

    def event(self, event, step, values):
        self._file.flush()

    def close(self):
        self._file.close()


if __name__ == "__main__":
    st.run(CONFIG, "runs/csv", sinks=[CsvSink])
