"""Mistakes with published models that were made in public, and the tests that see each.

Of converters, trainers and servers: most were silent. A test that is renamed or removed fails here.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

from spmdtrain.config.published.families.all_families import FAMILIES as KNOWN

TESTS = Path(__file__).parents[1]
HF = "interop/test_against_transformers.py"
EXPORT = "interop/test_import_and_export.py"
REFUSED = "interop/test_refused_models.py"
FAMILIES = "models/test_families.py"
LAYOUTS = "interop/test_expert_layouts.py"
MTP = "interop/test_further_apart.py"
ROUTER = "models/test_router.py"
CHAT = "data/test_chat_templates.py"
MIXERS = "models/test_mixers.py"
RECURRENCE = "models/test_recurrence.py"
KINDS = "models/test_layers_of_kinds.py"
STATES = "interop/test_state_spaces.py"
INDEXERS = "interop/test_indexers.py"
GEMMA4 = "interop/test_gemma4.py"
SHARED_KEYS = "models/test_shared_keys.py"
LOGITS = f"{HF}::test_logits_are_those_of_transformers_and_the_export_loads"
SETTING = f"{FAMILIES}::test_a_mistake_in_one_setting_shows_in_the_logits"
FORMULA = f"{FAMILIES}::test_a_mistake_in_a_formula_shows_in_the_logits"
SEEN_BY = {
    "rope is written in the shape of transformers 5 alone": (
        f"{EXPORT}::test_rope_is_written_for_transformers_4_and_5",
        LOGITS,
    ),
    "Gemma 3 loses the factor of its full layers in transformers 4": (LOGITS,),
    "Qwen3-MoE gets another number of experts in transformers 4": (LOGITS,),
    "the tokenizer is saved anew, under a class that others do not know": (
        "interop/test_imported_chat.py::test_a_template_comes_in_is_talked_to_and_goes_out",
    ),
    "a window is longer by one": (SETTING,),
    "the scaling of rope is left out": (SETTING,),
    "the check of a conversion has the conversion's own mistake": (
        f"{FAMILIES}::test_a_family_has_the_logits_of_its_definition",
        LOGITS,
    ),
    "pairs that turn are read as halves, or permuted twice": (
        FORMULA,
        "interop/test_deepseek.py::test_scores_of_channels_that_lie_in_pairs_are_those_of_halves",
    ),
    "heads are permuted within a shard": (f"{EXPORT}::test_any_mesh_holds_what_one_device_holds",),
    "the 1 of Gemma's norms is missing, or added twice": (SETTING,),
    "another activation is written than was read": (
        f"{EXPORT}::test_what_is_imported_is_exported_as_it_was",
    ),
    "gelu is the exact one, or is not": (SETTING, FORMULA),
    "a tied table is trained and another one exported": (
        f"{EXPORT}::test_what_was_changed_on_top_is_in_the_exported_config",
    ),
    "a tied model has a head in its files too": (
        f"{REFUSED}::test_a_tied_head_is_the_embedding_or_refused",
    ),
    "a head of its own is missing, and drawn at random": (
        f"{REFUSED}::test_a_tied_head_is_the_embedding_or_refused",
    ),
    "a weight is missing, and drawn at random": (
        f"{REFUSED}::test_a_missing_tensor_and_one_too_many",
    ),
    "a file is left out of an export": (f"{EXPORT}::test_what_is_imported_is_exported_as_it_was",),
    "tensors of an adapter are dropped": (
        "interop/test_peft.py::test_what_is_not_the_adapter_that_is_asked_for_costs_one_line",
        f"{HF}::test_adapters_load_in_peft_and_give_the_logits_of_the_merged_model",
    ),
    "the vocabulary is that of the tokenizer, not of the table": (
        f"{REFUSED}::test_the_rows_of_the_file_are_the_vocabulary",
    ),
    "padding is the end of text, which is then never learned": (
        f"{CHAT}::test_a_family_writes_and_masks_as_by_hand",
    ),
    "the first token is written by the template and by the tokenizer": (
        f"{CHAT}::test_ids_are_the_text_and_the_learned_ones_the_answers",
    ),
    "no token of a conversation is learned": (
        "data/test_chat.py::test_conversations_without_an_answer_are_refused",
    ),
    "a template writes earlier answers otherwise": (
        f"{CHAT}::test_what_a_template_writes_around_an_answer_is_tried_out",
    ),
    "thoughts that the prompt supplies are learned": (
        f"{CHAT}::test_thoughts_that_the_prompt_supplies_are_not_learned",
    ),
    "a text spells a special token": (
        "data/test_chat.py::test_no_text_of_others_makes_a_special_token",
    ),
    "frequencies of rope are rounded to 16 bits": (
        f"{FAMILIES}::test_far_positions_turn_as_exactly_as_near_ones",
    ),
    "defaults of ours replace those of the file or the family": (
        f"{REFUSED}::test_defaults_of_absent_keys_are_those_of_the_family",
        f"{EXPORT}::test_no_setting_of_a_model_is_lost_on_the_way_out",
    ),
    "a key is ignored that changes the model": (
        f"{REFUSED}::test_a_config_that_means_something_else_is_refused",
    ),
    "adapters are merged in 16 bits, or with a quantised base": (
        f"{EXPORT}::test_adapters_are_merged_with_the_weights_that_were_quantised",
    ),
    "a conversion holds the whole model": (
        f"{EXPORT}::test_an_export_reads_a_layer_at_a_time_where_layers_are_large",
        "checkpoints/test_fingerprint.py::test_devices_hold_a_block_of_an_array_at_a_time",
    ),
    "rank and alpha are asked for anew, and are others": (
        "interop/test_peft.py::test_what_is_written_is_read_back_to_the_bit",
    ),
    "an index names what its files lack": (
        f"{REFUSED}::test_an_index_that_names_a_missing_file",
        f"{REFUSED}::test_an_index_that_says_otherwise_than_its_files",
    ),
    "a file has bytes behind its data, or too few": (
        f"{REFUSED}::test_bytes_behind_the_data_and_a_short_file_are_damage",
    ),
    "an answer ends at one of several ends": (
        "inference/test_prompts.py::test_a_template_of_jinja_asks_and_each_of_its_ends_ends_an_answer",
    ),
    "a pickle runs code": (f"{REFUSED}::test_pickles_alone_are_refused",),
    "code of a folder is run": (f"{REFUSED}::test_code_of_a_directory_is_never_run",),
    "quantised weights are read as weights": (
        f"{REFUSED}::test_quantised_weights_are_no_matrices_to_train",
        f"{REFUSED}::test_integers_are_no_weights",
    ),
    "router's gates are not normalised, or hold the bias that chooses": (SETTING, FORMULA),
    "experts in one tensor for a layer are not recognised, and drawn at random": (
        f"{LAYOUTS}::test_three_layouts_of_one_model_are_one_model_and_go_out_as_they_came",
        f"{LAYOUTS}::test_experts_of_two_layouts_in_one_folder_are_refused",
    ),
    "layers of further tokens are announced, and lost on the way out": (
        f"{LAYOUTS}::test_three_layouts_of_one_model_are_one_model_and_go_out_as_they_came",
        "interop/test_deepseek.py::test_layers_of_further_tokens_come_in_and_go_out",
        f"{MTP}::test_the_block_comes_in_and_goes_out_beside_any_layout",
        f"{MTP}::test_without_its_tensors_the_key_is_told_and_goes",
    ),
    "a trained block of further tokens is exported as it was imported": (
        f"{MTP}::test_training_keeps_the_block_or_learns_it",
    ),
    "a block of further tokens reads the stream in front of a norm": (
        f"{MTP}::test_logits_of_the_further_token_are_those_of_the_files",
    ),
    "files that share a left-out tensor are left out with it": (
        f"{MTP}::test_without_its_tensors_the_key_is_told_and_goes",
        "interop/test_deepseek.py::test_what_is_left_out_takes_nothing_of_its_files_with_it",
    ),
    "a bias that chooses experts is rounded to 16 bits": (
        f"{LAYOUTS}::test_a_bias_that_chooses_is_never_rounded",
        f"{LAYOUTS}::test_what_was_wide_in_narrow_files_stays_wide_and_files_stay_apart",
        f"{ROUTER}::test_a_bias_chooses_and_is_in_no_gate_however_large_it_is",
    ),
    "a router multiplies in 16 bits, or its gradient does": (
        f"{ROUTER}::test_a_router_multiplies_in_float32_in_both_directions",
    ),
    "a policy is compared with itself": (
        "data/test_pairs.py::test_a_run_learns_pairs_from_its_reference",
    ),
    "documents of a window see each other": (
        "train/test_layouts.py::test_documents_are_apart_in_the_step",
    ),
    # States and documents.
    "a state or a convolution runs on into the next document": (
        f"{MIXERS}::test_a_document_does_not_depend_on_the_one_before",
        "models/test_packed_families.py::test_documents_in_a_row_are_as_each_apart",
    ),
    "a convolution is told of documents, and the state behind it is not": (
        f"{RECURRENCE}::test_outputs_and_states_are_those_of_the_definition",
        f"{RECURRENCE}::test_the_convolution_is_that_of_the_definition",
    ),
    "documents get lost between the batch and the mixer": (
        "train/test_layouts.py::test_documents_are_apart_in_the_step",
    ),
    "documents end where devices share a sequence, or do not where they end": (
        f"{MIXERS}::test_over_devices_of_a_sequence_it_is_as_on_one",
        "train/test_context_mixers.py::test_every_mixer_has_the_gradients_of_one_device",
    ),
    "one way to compute a state forgets documents, and another does not": (
        f"{RECURRENCE}::test_outputs_and_states_are_those_of_the_definition",
        f"{RECURRENCE}::test_gradients_are_those_of_the_definition",
    ),
    "fast random decays hide a state that is not reset": (
        f"{MIXERS}::test_a_document_does_not_depend_on_the_one_before",
    ),
    "a step with a state is not what all tokens at once are": (
        f"{MIXERS}::test_with_a_cache_tokens_get_the_outputs_of_a_pass_over_all",
        f"{KINDS}::test_token_by_token_with_a_cache_gives_the_logits_of_the_whole",
    ),
    "chunks are added up along the wrong axis": (f"{RECURRENCE}::test_any_number_of_tokens",),
    "the time of a token is clamped by another key": (
        f"{STATES}::test_the_times_of_tokens_are_clamped_as_the_key_says",
        SETTING,
    ),
    "packing makes the loss 0, or that of other tokens": (
        "train/test_layouts.py::test_documents_are_apart_in_the_step",
    ),
    # Weights, names, routers and precision.
    "an export has names that transformers alone reads": (
        "interop/test_renamed_tensors.py::test_they_are_the_published_model_and_go_out_as_it",
    ),
    "layers share keys only where there is a cache": (
        f"{FAMILIES}::test_decoding_from_a_cache_has_the_logits_of_the_whole",
    ),
    "a layer that is recomputed has lost the keys that it shares": (
        f"{SHARED_KEYS}::test_gradients_are_the_same_whatever_is_recomputed",
    ),
    "tensors of layers that share keys are asked for, or too many": (
        f"{GEMMA4}::test_idle_keys_of_files_go_out_as_they_came_in_and_compute_nothing",
        f"{GEMMA4}::test_idle_keys_may_be_left_out_and_others_are_still_refused",
    ),
    "the bias behind an expert is not weighted by its gate": (FORMULA,),
    "decays are rounded by mixed precision": (
        f"{MIXERS}::test_decays_and_their_biases_stay_in_full_precision",
        f"{RECURRENCE}::test_decays_are_summed_in_float32_under_bfloat16",
    ),
    "the 1 of norms is added to the gated norm too, or rounded away": (
        FORMULA,
        f"{EXPORT}::test_what_is_imported_is_exported_as_it_was",
    ),
    "rows of queries, keys, values and gates are cut evenly over devices": (
        f"{KINDS}::test_gradients_on_a_mesh_are_those_of_one_device",
    ),
    "a gate is not cut with its query head": (
        f"{FAMILIES}::test_every_setting_has_the_gradients_of_one_device",
        "interop/test_pieces.py::test_the_gates_of_a_query_head_follow_its_query",
        "test_bad_input.py::test_a_mistake_costs_one_line_that_says_what_and_the_documented_exit_code",
    ),
    "an indexer turns by the other pairs, which shows where it leaves tokens out": (
        f"{INDEXERS}::test_longer_sequences_are_one_line_wherever_they_come_from",
    ),
    "an indexer gets wrong gradients from a shard without a loss": (
        f"{INDEXERS}::test_training_on_a_mesh_changes_all_but_them",
    ),
    "the limit of an activation is not passed on": (
        FORMULA,
        "interop/test_family_keys.py::test_gpt_oss_is_read_as_transformers_5_saves_it",
    ),
    "adapters reach no layer of a mixer, or are dropped on the way in": (
        f"{KINDS}::test_every_matmul_of_a_mixer_has_an_adapter",
        "interop/test_peft.py::test_what_is_written_is_read_back_to_the_bit",
    ),
    "4 bits are read as 8, or without their scale": (
        f"{EXPORT}::test_experts_of_four_bits_are_read",
        "interop/test_deepseek.py::test_eight_bits_and_their_scales_are_read",
        "interop/test_scaled_matrices.py::test_one_matrix_is_the_same_in_each_format",
        f"{REFUSED}::test_quantised_weights_are_no_matrices_to_train",
    ),
    "what is right for one type is done to another of a like name": (
        f"{GEMMA4}::test_another_type_of_a_like_name_is_refused",
    ),
    "the gradient of a norm is that of one device's tokens": (
        f"{KINDS}::test_gradients_on_a_mesh_are_those_of_one_device",
    ),
}
# Mistakes that cannot be made here, and why.
CANNOT_OCCUR = {
    "documents of a batch are known only if an optional argument is given": (
        "segment ids are a field of every batch, and no caller of a model may leave them out"
    ),
    "the streams of hyper-connections are mixed by a transposed matrix": (
        "no family has them: their types are refused as unknown"
    ),
    "two tables of the vocabulary are summed in one buffer": (
        "each gradient is summed alone, there are no buffers of several"
    ),
}


OF_STREAMS = ("deepseek_v4", "qwen4_exp", "glm5_next", "hy_v4")  # hyper-connections


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mistake", SEEN_BY)
def test_a_public_mistake_has_its_tests(mistake):
    for each in SEEN_BY[mistake]:
        file, _, name = each.partition("::")
        assert name in names_in(file), each


def test_what_cannot_occur_is_not_there():
    assert not CANNOT_OCCUR.keys() & SEEN_BY.keys()
    assert not set(OF_STREAMS) & KNOWN.keys()
