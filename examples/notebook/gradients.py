from dataclasses import replace

import jax

import spmdtrain as st

setup = st.shard(st.run_config("runs/quickstart"))
state = st.restore("runs/quickstart", setup)
with st.batches(setup, st.open_data(setup.config)[1], step=0, sample=0) as batches:
    value, gradients = jax.value_and_grad(st.make_loss(setup))(state.params, next(batches))
params = {path: x - 0.1 * gradients[path] for path, x in state.params.items()}
changed = replace(state, params=params)
st.save(setup, changed, "runs/by_hand")  # or st.run(config, "runs/more", state=changed)
print(f"loss {float(value):.3f}")
