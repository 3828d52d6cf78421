import spmdtrain as st

st.simulate_devices(8)  # leave this out where there are 8 GPUs
source = "runs/quickstart"  # a run, an imported model among them
mesh = ["mesh.data=1", "mesh.fsdp=4", "mesh.tensor=2"]
config = st.run_config(source, [f"train.init_from={source}", *mesh])
setup = st.shard(config)
state = st.init_state(setup)  # its weights, on this mesh, with fresh moments
print(f"step {int(state.step)}: {setup.model.size:,} parameters")
