from dataclasses import replace

import jax

import spmdtrain as st

st.simulate_devices(8)  # leave this out where there are 8 GPUs
config, data = st.open_data(st.load("configs/quickstart.toml", ["train.steps=2"]))
setup = st.shard(config)
state = st.init_state(setup)
with st.batches(setup, data, step=0, sample=0) as batches:
    batch = next(batches)

loss = st.make_loss(setup)  # loss(params, batch), what a step minimises
value, gradients = jax.value_and_grad(loss)(state.params, batch)
params = {path: x - 0.1 * gradients[path] for path, x in state.params.items()}
print(f"loss {float(value):.4f}, then {float(loss(params, batch)):.4f}")

changed = replace(state, params=params)
st.save(setup, changed, "runs/by_hand")  # st.weights, st.generate and st.run read it
st.run(config, "runs/from_changed", state=changed)
