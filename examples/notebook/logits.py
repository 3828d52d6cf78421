import numpy as np

import spmdtrain as st

st.simulate_devices(8)  # leave this out where there are 8 GPUs
config = st.run_config("runs/quickstart")
setup = st.shard(config)
state = st.restore("runs/quickstart", setup)  # onto this mesh, whatever the run's was

logits = st.make_logits(setup)
_, data = st.open_data(config)
tokens = data.train_samples(config)(np.arange(2))["tokens"]  # of samples 0 and 1
print(logits(state.params, tokens).shape)  # (2, sequence length, vocabulary)
