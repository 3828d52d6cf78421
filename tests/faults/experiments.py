"""The ways in which a run may go wrong, and the case or plain test that breaks it so.

A proof is the name of a case of cases.py, or FILE::TEST below tests/.
"""

RESUME = "running/test_resume.py"
STORAGE = "checkpoints/test_storage.py"
LAUNCH = "launch/test_launch.py"

EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "SIGKILL at any instant, with saves under way": ("SIGKILL",),
    "SIGKILL of one of two processes": ("SIGKILL of a rank",),
    "SIGKILL between data, metadata and rename": ("SIGKILL while saving",),
    "process 0 or the coordinator dies": (
        "failures",
        "train/test_lost_peer.py::"
        "test_after_a_kill_9_the_other_says_so_and_nothing_that_was_saved_is_lost",
    ),
    "SIGSTOP": ("failures", "soak"),
    "a process sleeps for ever": (
        "failures",
        f"{LAUNCH}::test_after_a_fault_the_run_goes_on_from_what_it_saved",
    ),
    "a process hangs and holds Python's lock": (
        "failures",
        f"{LAUNCH}::test_after_a_fault_the_run_goes_on_from_what_it_saved",
    ),
    "an exception in one process": (
        "failures",
        "train/test_lost_peer.py::test_the_other_ends_whatever_it_waits_for",
    ),
    "a segmentation fault, an abort, an early exit with 0": ("failures", "soak"),
    "SIGTERM to one of two processes": (
        "asked to end",
        f"{RESUME}::test_two_processes_train_as_one_and_stop_together",
    ),
    "SIGTERM twice, amid a save, amid compiling": (
        "asked to end",
        "processes/test_interrupts.py::test_code_that_is_deaf_to_signals_is_ended_all_the_same",
    ),
    "a run in two parts": (
        f"{RESUME}::"
        "test_a_signal_stops_after_the_step_in_flight_and_the_resumed_run_is_bit_identical",
    ),
    "a run in many parts, over shuffled and packed texts": (
        "SIGKILL",
        f"{RESUME}::test_a_run_that_was_resumed_twice_is_bit_identical",
    ),
    "another mesh, another number of processes": (
        "fewer",
        f"{RESUME}::test_a_run_goes_on_on_another_mesh_or_with_its_layers_written_out",
    ),
    "a bit flips in a checkpoint": ("bit flips", "damage for two"),
    "files of a checkpoint are cut or missing": ("cuts",),
    "a full disk": (f"{STORAGE}::test_a_full_disk_costs_the_steps_since_the_last_save",),
    "a slow disk, one that cannot be written": (
        "slow disk",
        f"{STORAGE}::test_a_full_disk_costs_the_steps_since_the_last_save",
    ),
    "a batch gives NaN": (
        "bad steps",
        "running/guards/test_guard.py::test_a_skipped_step_leaves_weights_and_optimizer_as_they_were",
    ),
    "a spike of the loss, and several": (
        "bad steps",
        "running/test_rollback.py::test_it_is_as_if_the_samples_had_never_been",
    ),
    "a bit flips on a device": ("flipped copies", "watched"),
    "a process is slow": (
        "watched",
        "running/guards/test_replicas.py::test_a_slow_process_is_reported_once_without_its_waits",
    ),
    "other settings or other code on resume": (
        f"{RESUME}::test_a_checkpoint_that_does_not_fit_is_refused_by_name",
        "checkpoints/test_identity.py::test_another_class_is_refused_wherever_weights_are_read",
    ),
    "two runs in one directory": (f"{RESUME}::test_two_runs_in_one_directory_are_one_too_many",),
    "bad data": (
        "data/test_token_files.py::"
        "test_an_id_beyond_the_vocabulary_is_refused_with_file_and_offset_when_it_is_read",
        "data/test_token_files.py::test_one_of_many_files_that_goes_while_it_is_in_use_is_named",
    ),
    "bad settings": (
        "test_bad_input.py::"
        "test_what_needs_no_device_is_refused_before_jax_is_imported_and_within_a_second",
    ),
    "a hostile run directory": ("hostile",),
    "all of it, one after the other": ("soak",),
}
