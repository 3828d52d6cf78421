"""The templates for clusters: shells and schedulers take them, and so do the launcher and the
command line.
"""

import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from spmdtrain.cli.parser import make_parser
from spmdtrain.launch.place import HOST, find_place

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
KUBERNETES = "1.30"


def test_the_shell_finds_nothing_wrong_with_the_batch_script():
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, CLUSTER / "slurm.sbatch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def job_of(jobset: dict) -> dict:
    [replicated] = jobset["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "host"},
        **replicated["template"],
    }


@pytest.fixture
def jobset() -> dict:
    return yaml.safe_load((CLUSTER / "jobset.yaml").read_text())


def test_the_jobs_of_the_jobset_are_valid(jobset):
    kubernetes_validate.validate(job_of(jobset), KUBERNETES, strict=True)
    assert set(jobset) == {"apiVersion", "kind", "metadata", "spec"}
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(jobset["spec"]) <= {
        "failurePolicy",
        "network",
        "replicatedJobs",
        "successPolicy",
        "suspend",
    }
    broken = job_of(jobset)
    broken["spec"]["completionMod"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_its_hosts_find_their_places(jobset):
    job = job_of(jobset)["spec"]
    [container] = job["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value", "1") for each in container["env"]}
    assert HOST in environment
    place = find_place(environment, 1)
    assert (place.hosts, place.host) == (job["completions"], 1) and job["parallelism"] == job[
        "completions"
    ]
    set_name, job_name = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"][0]["name"]
    assert place.coordinator.startswith(f"{set_name}-{job_name}-0-0.{set_name}:")


@pytest.mark.parametrize("template", ["jobset.yaml", "slurm.sbatch"])
def test_their_commands_are_ours(template, jobset):
    if template == "jobset.yaml":
        [container] = job_of(jobset)["spec"]["template"]["spec"]["containers"]
        words = [*container["command"], *container["args"]]
    else:
        [line] = [
            line
            for line in (CLUSTER / template).read_text().splitlines()
            if line.startswith("srun ")
        ]
        words = line[line.index("spmdtrain") :].partition(' "$@"')[0].split() + [
            "configs/llama3_8b.toml"
        ]
    parsed = make_parser().parse_args(words[1:])
    assert parsed.command_line[0] == "train"
    inner = make_parser().parse_args(parsed.command_line)
    assert (CLUSTER.parents[1] / inner.config).is_file()
