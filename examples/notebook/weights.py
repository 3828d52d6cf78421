import spmdtrain as st

weights = st.weights("runs/quickstart")  # numpy arrays by path; no model, no mesh
for path, x in weights.items():
    print(f"{path:35} {x.shape} {x.dtype}")  # layers are stacked: [layers, ...]
