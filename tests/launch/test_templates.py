"""The templates for clusters: shells and schedulers take them, and so do the launcher, the command
line and pip.
"""

import json
import subprocess
import sys
import tomllib
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


@pytest.fixture
def cloud_task() -> dict:
    return yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())


@pytest.mark.parametrize("part", ["setup", "run"])
def test_the_shell_finds_nothing_wrong_with_the_cloud_task(part, cloud_task):
    shellcheck = Path(sys.executable).parent / "shellcheck"
    # Double quotes round ~/venv would be wrong, and STEPS comes from the task.
    command = [shellcheck, "--shell=bash", "--exclude=SC2086,SC2154", "-"]
    done = subprocess.run(command, input=cloud_task[part], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_container_has_what_it_copies_and_installs():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    root = CLUSTER.parents[1]
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert all((root / name).exists() for name in copied)
    project = tomllib.loads((root / "pyproject.toml").read_text())
    files = {project["project"]["readme"], *project["project"]["license-files"]}
    packages = project["tool"]["setuptools"]["package-data"]
    assert {"pyproject.toml", "constraints.txt", *files, *packages} <= set(copied)

    extras = project["project"]["optional-dependencies"]
    [asked] = [line for line in lines if line.startswith("RUN pip install")]
    [cuda] = [line.partition("=")[2] for line in lines if line.startswith("ARG CUDA=")]
    names = asked.partition("[")[2].partition("]")[0].replace("${CUDA}", cuda).split(",")
    assert set(names) <= set(extras)


def test_the_last_line_of_the_cloud_task_is_a_speed(tmp_path, cloud_task):
    last = cloud_task["run"].splitlines()[-1].split()
    lines = [{"step": n, "tokens_per_second": 1000.0 * n, "mfu": None} for n in range(1, 6)]
    lines.append({"step": 5, "eval_loss": 2.0})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    command = [sys.executable, CLUSTER.parents[1] / last[1], tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "4,000 tokens/s, median of 3 steps\n"


@pytest.mark.parametrize("template", ["jobset.yaml", "slurm.sbatch", "skypilot.yaml"])
def test_their_commands_are_ours(template, jobset, cloud_task):
    if template == "jobset.yaml":
        [container] = job_of(jobset)["spec"]["template"]["spec"]["containers"]
        words = [*container["command"], *container["args"]]
    elif template == "skypilot.yaml":
        [line] = [
            line
            for line in cloud_task["run"].replace("\\\n", "").splitlines()
            if " launch " in line
        ]
        words = line.split()
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
