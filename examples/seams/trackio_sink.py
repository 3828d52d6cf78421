"""A sink for trackio, of Hugging Face: charts of a run without an account. It needs `trackio`.

    python examples/seams/trackio_sink.py; trackio show --project spmdtrain

In a config: own.sinks = ["examples/seams/trackio_sink.py:TrackioSink"].
"""

import trackio  # pyright: ignore[reportMissingImports]  in no extra of ours

import spmdtrain as st

CONFIG = st.RunConfig(
    model={"name": "gpt", "layers": 2, "embed": 32},
    mesh={"data": -1},
    train={"steps": 20},
    data={"corpus": "synthetic"},
)


class TrackioSink:
    """A run of trackio with the name of the run's directory, which a resumed run continues."""

    def __init__(self, directory, config, step, project="spmdtrain"):
        settings = {name: dict(section) for name, section in config}
        self._run = trackio.init(project, directory.name, config=settings, resume="allow")

    def metrics(self, step, figures):
        self._run.log({name: x for name, x in figures.items() if x is not None}, step=step)

    def event(self, event, step, values):
        pass

    def close(self):
        self._run.finish()


if __name__ == "__main__":
    st.run(CONFIG, "runs/trackio", sinks=[TrackioSink])
