"""The tests that try each hostile input of docs/FAULTS.md, section 4, by its number.

`tests/system/test_hostile_inputs.py` sends those of the wire and of HTTP to a real
broker, beside a witness, `test_hostile_users.py` there those of users. Others have
tests where they belong.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_faults import PAGE, section

TESTS = Path(__file__).parent
SYSTEM = tuple(TESTS / "system" / f"test_hostile_{what}.py" for what in ("inputs", "users"))
# files whose tests have a broker in a process of its own
REAL = (*(TESTS / "system").glob("test_*.py"), TESTS / "admin" / "test_console.py")
# 69 is about a consumer's disk, 70 about Spark; the others try very many requests
NOT_AT_A_PROCESS = {69, 70, 79, 80, 81}
ELSEWHERE: dict[int, tuple[str, ...]] = {
    5: ("test_whoever_is_slow_with_a_large_frame_is_cut_when_others_wait",),
    6: ("test_a_frame_has_a_time_by_its_length", "test_a_connection_that_never_greets_is_cut"),
    7: ("test_a_frame_that_drips_in_is_copied_once_however_small_the_drops",),
    12: ("test_plain_text_on_the_tls_port_gets_nothing", "test_other_protocols_are_named"),
    14: ("test_every_flipped_bit_is_noticed_or_waits_for_more",),
    15: ("test_no_truncated_frame_is_given",),
    19: ("test_strangers_beyond_their_number_push_out_the_oldest",),
    23: ("test_a_login_that_is_not_right_ends_the_connection",),
    24: (
        "test_a_login_cannot_be_replayed_and_comes_once",
        "test_a_first_message_that_is_not_valid_is_refused",
        "test_a_login_that_is_not_right_ends_the_connection",
    ),
    25: (
        "test_a_wrong_password_and_an_unknown_user_get_the_same_answer",
        "test_the_challenge_to_an_unknown_user_looks_like_any_other_and_stays_the_same",
    ),
    26: ("test_a_login_cannot_be_replayed_and_comes_once",),
    27: (
        "test_a_broker_with_another_certificate_is_not_trusted",
        "test_a_certificate_is_a_login_by_its_common_name",
    ),
    28: (
        "test_http_asks_for_a_login_and_answers_by_the_same_table",
        "test_a_token_ends_by_the_broker_s_time_and_its_open_streams_with_it",
        "test_who_guesses_tokens_locks_nobody_out",
    ),
    29: ("test_hostile_29_a_flood_of_key_updates_disturbs_nobody",),
    41: ("test_selectors_have_limits", "test_no_pattern_takes_long"),
    43: ("test_partitions_are_bounded_per_join_and_over_all_groups_and_topics",),
    44: ("test_a_bomb_takes_no_more_memory_than_it_claims", "test_noise_is_no_batch"),
    45: ("test_ambiguous_json_is_refused",),
    46: (
        "test_headers_must_be_a_small_map_of_text_to_text",
        "test_headers_over_the_limit_are_refused",
    ),
    47: ("test_no_time_may_be_negative_or_beyond_the_calendar",),
    48: ("test_hostile_48_no_call_takes_the_history_of_a_letter_from_its_caller",),
    50: (
        "test_hostile_50_bodies_keys_and_headers_are_texts_with_visible_signs",
        "test_hostile_50_and_75_no_text_of_a_message_or_an_operator_becomes_markup",
    ),
    51: (
        "test_one_row_over_the_limit_is_refused_however_small_the_rest",
        "test_no_column_may_have_offsets_that_fall_or_leave_it",
    ),
    52: (
        "test_a_service_decides_its_own_transactions_only",
        "test_without_users_a_check_back_is_answered_by_its_service_only",
    ),
    55: ("test_a_user_with_too_many_undecided_halves_decides_some_first",),
    59: ("test_what_is_not_to_the_letter_ours_is_foreign", "test_no_text_is_too_strange"),
    62: ("test_hostile_62_a_topic_of_undecided_messages_without_keys_is_not_deleted",),
    63: ("test_parts_that_could_not_be_are_refused",),
    64: ("test_a_member_cannot_ack_for_another_member", "test_impossible_acks_are_refused"),
    65: ("test_a_reset_to_an_impossible_offset_is_refused",),
    66: ("test_the_number_of_members_is_limited",),
    67: ("test_hostile_67_a_huge_reason_is_cut_or_refused",),
    68: ("test_hostile_68_letters_that_are_given_in_a_circle_are_not_multiplied",),
    69: (
        "test_whatever_lies_in_place_of_a_file_is_refused",
        "test_whatever_lies_in_place_of_a_directory_is_refused",
        "test_random_damage_shows_no_wrong_message",
    ),
    70: (
        "test_a_query_with_other_columns_or_with_effects_is_refused",
        "test_a_name_is_a_name_and_nothing_else",
    ),
    71: (
        "test_hostile_71_a_form_of_another_origin_does_nothing",
        "test_only_a_form_of_a_page_of_the_console_acts",
    ),
    72: ("test_slow_requests_are_cut_off", "test_a_body_without_measure_is_not_read"),
    74: ("test_no_path_reaches_a_file_that_is_not_in_the_table",),
    75: ("test_hostile_75_every_page_opens_and_shows_texts_as_texts",),
    77: (
        "test_every_request_is_denied_to_a_user_without_permissions",
        "test_every_call_is_denied_to_a_user_without_permissions",
        "test_every_action_is_denied_to_a_user_without_permissions",
    ),
    78: ("test_hostile_78_a_line_of_the_audit_topic_is_one_line",),
    79: ("test_a_number_at_the_end_of_its_type_gets_a_typed_answer",),
    80: (
        "test_unpacked_retries_are_bounded_by_their_real_bytes",
        "test_pieces_of_a_large_batch_are_bounded_too",
    ),
    81: ("test_an_alteration_and_a_deletion_at_one_moment_both_have_replies",),
    82: ("test_a_hostile_schema_fetches_nothing_and_ends",),
    83: (
        "test_no_body_is_too_hostile_to_be_judged",
        "test_a_path_that_is_none_is_refused_with_its_place",
        "test_a_circle_of_causes_ends",
    ),
    84: ("test_bodies_are_searched_only_by_those_who_may_read_them",),
}  # fmt: skip


def numbers_in(name: str) -> set[int]:
    """Return the inputs that the name of a test has: `_30_to_42_` are all between."""
    span = re.search(r"_(\d\d)_to_(\d\d)_", name)
    if span is not None:
        return {*range(int(span[1]), int(span[2]) + 1)}
    return {int(number) for number in re.findall(r"_(\d\d)(?=_)", name)}


def names_in(file: Path) -> list[str]:
    return re.findall(r"^def (test_\w+)\(", file.read_text("utf-8"), re.MULTILINE)


def listed_inputs() -> set[int]:
    """Return the numbers of the page."""
    text = section(PAGE.read_text("utf-8"), "Hostile input")
    return {int(number) for number in re.findall(r"^- \*\*(\d+)\.\*\* ", text, re.MULTILINE)}


def test_every_hostile_input_of_the_page_has_a_test() -> None:
    listed = listed_inputs()
    names = [name for file in SYSTEM for name in names_in(file)]
    tried = {number for name in names for number in numbers_in(name)}
    assert listed - tried - ELSEWHERE.keys() == set()
    assert (tried | ELSEWHERE.keys()) - listed == set()


def test_every_hostile_input_is_tried_at_a_broker_s_process() -> None:
    names = {name for file in REAL for name in names_in(file)}
    tried = {number for name in names if "hostile" in name for number in numbers_in(name)}
    tried |= {number for number, tests in ELSEWHERE.items() if names & {*tests}}
    assert listed_inputs() - tried == NOT_AT_A_PROCESS


def test_every_test_of_a_hostile_input_is_there() -> None:
    there = {name for file in TESTS.rglob("test_*.py") for name in names_in(file)}
    missing = {number: {*names} - there for number, names in ELSEWHERE.items()}
    assert {number: names for number, names in missing.items() if names} == {}
