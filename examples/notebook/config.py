import spmdtrain as st

# From a file, with settings on top as `--set` takes them ...
config = st.load("configs/quickstart.toml", ["train.steps=20"])

# ... or in code. A typo is refused either way.
same_model = st.RunConfig(
    model=config.model,
    train={"steps": 20, "sequence_length": 64},
    mesh={"data": -1},
)
