import spmdtrain as st

config = st.load("configs/llama3_8b.toml")
found = st.estimate(config, 8, "h200")
print(f"{found.time.seconds:.2f} s a step, {found.memory.total / 1e9:.0f} GB a device")

best = st.plan(config, 8, "h200")[0]
print(" ".join(f"--set {setting}" for setting in best.settings))
