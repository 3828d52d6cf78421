import spmdtrain as st

st.simulate_devices(8)  # leave this out where there are 8 GPUs
config = st.load("configs/quickstart.toml")
config, data = st.open_data(config)  # the corpus decides the vocabulary
setup = st.shard(config)  # mesh, rules, model and state: shapes, no memory yet
state = st.init_state(setup)  # every leaf is born in its shards
step = st.make_step(setup)

with st.batches(setup, data, step=0, sample=0) as batches:
    state, metrics = step(state, next(batches))
print(f"loss {float(metrics['loss']):.3f} after step {int(state.step)}")
