import spmdtrain as st

st.simulate_devices(8)  # leave this out where there are 8 GPUs
source = "runs/quickstart"  # a run, an imported model among them
config = st.run_config(source, [f"train.init_from={source}", "mesh.data=2", "mesh.fsdp=4"])
setup = st.shard(config)
state = st.init_state(setup)  # its weights, on this mesh, with fresh moments
print(f"step {int(state.step)}: {setup.model.size:,} parameters")
