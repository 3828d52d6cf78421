"""What a new user does first: trains the quickstart on one device, samples and evaluates."""

import subprocess
import sys
import tempfile

from training import ROOT

ONE = ["--set", "mesh.data=1", "--set", "mesh.fsdp=1", "--set", "mesh.tensor=1"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for words in (
            ["train", "configs/quickstart.toml", "--run", folder, *ONE, *sys.argv[1:]],
            ["sample", folder, "--length", "80", "--temperature", "0"],
            ["eval", folder],
        ):
            print("spmdtrain", *words, flush=True)
            done = subprocess.run(
                [sys.executable, "-m", "spmdtrain.cli", *words], cwd=ROOT, check=False
            )
            if done.returncode:
                raise SystemExit(f"spmdtrain {words[0]} ended with code {done.returncode}")


if __name__ == "__main__":
    main()
