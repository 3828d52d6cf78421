"""Which programs take little of the compiler."""

from spmdtrain.processes.xla_flags import LLVM_LEVEL, options_of_one_run


def test_a_program_that_runs_once_takes_little_of_the_compiler_unless_a_person_says(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    assert options_of_one_run("cpu") == {LLVM_LEVEL: 1}
    assert options_of_one_run("cuda") is None
    monkeypatch.setenv("XLA_FLAGS", f"--{LLVM_LEVEL}=2")
    assert options_of_one_run("cpu") is None
