"""Mistakes with published models that were made in public, and the tests that see each.

Of converters, trainers and servers: most were silent. A test that is renamed or removed fails here.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
HF = "interop/test_against_transformers.py"
EXPORT = "interop/test_import_and_export.py"
REFUSED = "interop/test_refused_models.py"
FAMILIES = "models/test_families.py"
LAYOUTS = "interop/test_expert_layouts.py"
MTP = "interop/test_qwen_further.py"
ROUTER = "models/test_router.py"
CHAT = "data/test_chat_templates.py"
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
}


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mistake", SEEN_BY)
def test_a_public_mistake_has_its_tests(mistake):
    for each in SEEN_BY[mistake]:
        file, _, name = each.partition("::")
        assert name in names_in(file), each
