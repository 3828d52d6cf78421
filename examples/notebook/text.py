import spmdtrain as st

print(st.generate("runs/quickstart", "def main(", 40, choice=st.Choice(temperature=0.5)))

ids = st.generate("runs/quickstart", [100, 101, 102, 32], 8)  # ids give ids
print(ids)
