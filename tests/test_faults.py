"""The tests that show, for each fault of docs/FAULTS.md, that txmq survives it.

The tests stand here by name, so that a test that is renamed or removed is missed. So do
the bugs that are planted to prove the checkers: a checker that passes one is broken.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "FAULTS.md"
MARKS = ("*Not built yet.*", "*Open: not survived yet.*")

KILLED_PRODUCER = "test_a_producer_that_dies_anywhere_leaves_rows_and_messages_in_agreement"
KILLED_SERVICES = "test_services_killed_at_every_crash_point"
KILLED_IN_COMMIT = "test_clients_backends_and_servers_killed_in_a_commit"
KILLED_COORDINATOR = (
    "test_a_coordinator_that_dies_anywhere_leaves_rows_and_messages_that_recovery_makes_agree"
)
AGREE_OR_TOLD = "test_rows_and_messages_agree_or_the_caller_is_told"
FAULTS: dict[int, tuple[str, ...]] = {
    # the producer dies or stands still
    1: (KILLED_PRODUCER, KILLED_SERVICES),
    2: (KILLED_PRODUCER, KILLED_SERVICES, "test_a_service_frozen_before_its_token_is_rolled_back"),
    3: (KILLED_PRODUCER, KILLED_SERVICES),
    4: (KILLED_IN_COMMIT,),
    5: (KILLED_PRODUCER, KILLED_SERVICES),
    6: (
        "test_a_service_frozen_before_its_commit_is_waited_for",
        "test_a_service_frozen_before_its_commit_loses_its_backend",
    ),
    # the producer makes mistakes
    7: (
        "test_a_swallowed_error_is_an_abort",
        "test_a_swallowed_sql_error_is_an_abort_and_nothing_is_sent",
    ),
    8: (
        "test_a_token_inside_a_savepoint_that_is_taken_back_is_gone",
        "test_a_savepoint_withdraws_rows_and_messages_together",
    ),
    9: (
        "test_the_same_decision_again_changes_nothing",
        "test_a_decision_whose_answer_is_lost_is_sent_again",
    ),
    10: ("test_the_other_decision_is_refused_and_kept",),
    11: ("test_the_same_token_again_gets_the_same_answer_and_other_contents_are_refused",),
    12: (
        "test_a_repeated_send_gets_its_first_receipt",
        "test_a_lost_connection_loses_and_doubles_nothing",
    ),
    13: (
        "test_a_producer_whose_clock_is_a_day_off_keeps_its_place",
        "test_a_token_of_the_future_waits_in_the_default_partition_and_moves",
    ),
    14: ("test_a_child_after_a_fork_has_connections_of_its_own",),
    15: (
        "test_fault_20_a_commit_in_a_black_hole_is_waited_for",
        "test_a_stuck_transaction_is_ended_if_the_policy_says_so",
        "test_a_stuck_transaction_whose_id_nobody_knows_is_ended",
        "test_a_backend_that_stands_still_with_its_token_is_ended_if_the_settings_say_so",
    ),
    # the network
    16: ("test_a_bundle_whose_answer_is_lost_is_stored_once",),
    17: ("test_fault_20_a_decision_that_does_not_reach_the_broker_is_read_off_the_row",),
    18: (
        "test_fault_18_a_send_into_a_black_hole_is_stored_once_when_it_heals",
        "test_fault_18_on_a_half_open_connection_a_send_is_made_again_on_another",
        "test_fault_18_byte_by_byte_a_conversation_goes_on",
        "test_fault_18_a_consumer_in_a_black_hole_is_missed_and_its_messages_go_to_another",
        "test_a_reply_that_drips_in_ends_with_the_time_out",
        "test_a_connection_that_never_greets_is_cut",
    ),
    264: (
        "test_a_blocking_client_goes_on_to_the_next_address",
        "test_a_client_of_asyncio_goes_on_to_the_next_address",
        "test_black_holes_only_are_an_unavailable_broker",
    ),
    19: ("test_an_older_incarnation_is_fenced_and_decides_what_it_stored",),
    20: (
        "test_fault_20_without_the_broker_nothing_is_committed",
        "test_fault_20_a_broker_without_the_database_decides_nothing",
        "test_fault_20_a_commit_in_a_black_hole_is_waited_for",
    ),
    21: ("test_fault_21_a_slow_narrow_network_that_loses_things_loses_no_message",),
    # the broker and its disk
    22: ("test_a_broker_killed_under_load_keeps_all_acknowledged_messages",),
    23: ("test_a_broker_killed_under_load_keeps_all_acknowledged_messages",),
    24: (
        "test_a_killed_process_leaves_the_last_commit",
        "test_no_power_cut_in_a_rebuild_of_the_index_changes_what_the_broker_has",
        "test_brokers_killed_under_transactions",
    ),
    25: (
        "test_every_invariant_holds_for_every_seed",
        "test_brokers_killed_under_transactions",
    ),
    26: (
        "test_a_broker_killed_in_its_recovery_recovers",
        "test_recovery_may_be_interrupted_at_every_change",
        "test_a_rebuild_that_is_killed_anywhere_leaves_a_broker_what_it_had",
    ),
    27: (
        "test_an_unfinished_segment_is_removed_but_proves_the_one_before",
        "test_every_crash_point_of_a_life_keeps_the_promises",
    ),
    28: (
        "test_no_power_cut_in_retention_loses_kept_messages",
        "test_a_killed_process_leaves_catalogues_that_find_all",
    ),
    29: ("test_every_crash_point_of_a_life_keeps_the_promises",),
    30: ("test_life_goes_on_after_each_of_many_crashes",),
    31: (
        "test_a_write_that_was_not_synced_may_be_lost_kept_or_torn_at_sectors",
        "test_a_log_cut_at_any_byte_of_its_last_kilobytes_keeps_all_records_before",
    ),
    32: (
        "test_after_a_failed_write_or_sync_nothing_is_tried_again",
        "test_a_failed_write_answers_nothing_and_stops_everything",
    ),
    33: (
        "test_a_full_disk_refuses_records_and_serves_until_there_is_space",
        "test_a_segment_that_could_not_be_made_is_made_when_there_is_space",
        "test_a_snapshot_that_finds_no_space_is_an_alarm_and_is_made_later",
        "test_retention_frees_a_disk_that_others_have_filled",
        "test_an_error_at_any_call_of_a_round_stops_the_broker_or_is_lived_with",
    ),
    34: ("test_a_write_that_the_kernel_cuts_short_is_finished",),
    35: (
        "test_a_flipped_bit_in_durable_data_is_refused",
        "test_a_reader_gets_messages_before_damage_then_an_error_with_the_next_offset",
        "test_a_damaged_letter_is_named_and_the_others_are_shown",
        "test_a_letter_whose_message_is_damaged_is_read_without_its_body",
    ),
    36: ("test_a_page_of_zeros_in_durable_data_is_damage",),
    37: (
        "test_an_older_copy_of_the_last_segment_is_refused_even_among_zeros",
        "test_a_log_known_to_have_lost_its_end_is_refused",
    ),
    260: (
        "test_a_log_whose_segment_is_deleted_acknowledges_nothing_more",
        "test_a_deleted_file_has_no_name_though_another_has_it",
    ),
    261: (
        "test_an_index_without_its_log_is_refused_and_left_alone",
        "test_a_snapshot_without_its_log_is_refused",
        "test_a_first_start_that_ended_before_its_log_is_begun_anew",
    ),
    38: (
        "test_a_cut_zeroed_or_too_long_snapshot_is_set_aside",
        "test_a_cache_from_the_future_is_discarded",
        "test_the_index_is_what_a_rebuild_makes_after_any_work",
        "test_catalogues_of_another_log_or_of_a_log_that_is_shorter_now_are_not_believed",
    ),
    39: (
        "test_time_goes_on_while_the_clock_is_behind_and_meets_it_again",
        "test_every_invariant_holds_for_every_seed",
    ),
    # the broker's process
    40: ("test_fault_40_a_broker_that_stood_still_keeps_its_members",),
    41: ("test_fault_41_without_free_file_handles_open_connections_go_on",),
    42: ("test_a_broker_killed_under_load_keeps_all_acknowledged_messages",),
    43: ("test_a_second_broker_is_refused_and_the_first_serves_on",),
    44: ("test_sigterm_under_load_drains",),
    45: (
        "test_a_segment_of_another_version_is_refused_unchanged",
        "test_a_record_of_another_version_is_refused_unchanged",
        "test_an_event_of_a_newer_version_is_named_and_never_a_traceback",
        "test_another_versions_cache_is_refused_and_kept",
    ),
    46: ("test_transactions_left_undecided_by_a_crash_end_as_their_rows_say",),
    # the resolver and PostgreSQL
    47: ("test_a_planted_resolver_bug_is_found",),
    48: ("test_one_undecided_token_does_not_delay_the_others",),
    49: (
        "test_another_database_decides_nothing",
        "test_a_standby_decides_nothing_and_a_promoted_one_does",
    ),
    50: (KILLED_IN_COMMIT, "test_a_crash_in_the_middle_of_commit_is_in_doubt_and_then_decided"),
    51: ("test_the_row_decides_and_not_the_xid_of_a_lost_commit", KILLED_IN_COMMIT),
    52: (
        "test_an_answer_makes_its_commit_durable",
        "test_a_commit_that_does_not_wait_for_the_disk_is_refused_unless_allowed",
    ),
    53: (
        "test_a_promoted_standby_decides_by_its_own_rows",
        "test_transactions_whose_rows_are_lost_are_named",
    ),
    54: (
        "test_nothing_is_decided_that_a_synchronous_standby_has_not_confirmed",
        "test_a_prepare_that_no_standby_has_confirmed_is_told",
        "test_a_branch_that_no_standby_has_confirmed_rolls_everything_back",
        "test_rows_of_the_outbox_that_no_standby_has_confirmed_wait",
    ),
    55: (
        "test_fault_55_a_transaction_that_finds_the_disk_full_is_rolled_back_whole",
        "test_fault_55_a_full_disk_decides_nothing_and_the_row_does_afterwards",
    ),
    56: (
        "test_an_unreachable_server_is_asked_less_and_less_often",
        "test_a_database_that_cannot_be_reached_leaves_everything_as_it_is",
    ),
    57: (
        "test_a_serialization_failure_at_commit_may_be_tried_again",
        "test_a_deadlock_ends_one_transaction_and_it_may_be_tried_again",
    ),
    58: (
        "test_an_unreadable_table_gives_unknown_until_it_is_repaired",
        "test_missing_tables_and_rights_are_reported_with_the_remedy",
    ),
    251: (
        "test_a_lost_branch_that_was_compared_before_the_failover_is_reported",
        "test_commits_are_compared_again_when_a_failover_may_have_lost_them",
        "test_a_longer_time_is_compared_where_all_of_the_last_minutes_is_lost",
        "test_what_could_not_be_compared_again_is_compared_later",
    ),
    252: (
        "test_what_a_failover_has_lost_hides_nothing_that_a_new_slot_has_missed",
        "test_messages_whose_rows_a_failover_has_lost_are_an_alarm_until_they_are_accepted",
    ),
    255: (
        "test_upkeep_finds_out_which_database_a_resolver_leads_to_and_makes_partitions",
        "test_a_bundle_of_a_primary_that_was_left_behind_is_refused",
        "test_a_primary_that_a_failover_has_left_behind_is_not_relayed",
    ),
    256: (
        "test_effects_that_a_failover_behind_a_pooler_has_lost_come_again",
        "test_a_role_is_not_set_in_a_session_that_others_get",
    ),
    262: (
        "test_a_token_whose_row_is_hidden_stays_undecided",
        "test_a_hidden_outbox_is_an_error_and_not_an_empty_one",
        "test_the_check_names_the_tables_whose_rows_are_hidden",
    ),
    263: (
        "test_the_floor_rises_whatever_isolation_the_database_has_as_its_default",
        "test_two_installations_at_once_take_turns",
    ),
    59: (
        "test_a_partition_that_a_broker_may_need_stays",
        "test_one_silent_broker_of_two_keeps_the_rows_of_both_until_it_is_forgotten",
    ),
    60: ("test_an_xid_is_no_more_than_a_hint",),
    61: (
        "test_transactions_with_messages",
        "test_transactions_over_two_databases",
        "test_a_resolver_behind_a_pool",
        "test_each_driver_through_the_pooler",
    ),
    # XA
    62: (KILLED_COORDINATOR, "test_a_server_that_dies_with_them_changes_nothing"),
    63: (KILLED_COORDINATOR,),
    64: (KILLED_COORDINATOR, "test_a_server_that_dies_after_the_decision_finds_it_carried_out"),
    65: (
        "test_a_failed_statement_is_never_prepared",
        "test_a_rollback_instead_of_prepare_is_seen_even_without_the_guard",
    ),
    66: (
        "test_a_connection_that_is_lost_in_prepare_rolls_everything_back",
        "test_a_database_that_is_lost_after_the_decision_is_left_to_recovery",
    ),
    67: (
        "test_a_branch_rolled_back_by_hand_is_reported_and_journalled",
        "test_a_branch_ended_the_other_way_between_two_passes_is_mixed",
    ),
    68: (
        "test_a_server_that_prepares_nothing_is_refused_at_the_beginning",
        "test_a_server_without_a_free_slot_rolls_everything_back",
    ),
    69: (
        "test_a_branch_of_an_unknown_log_is_left_alone_with_an_alarm",
        "test_foreign_branches_are_left_alone_for_ever",
    ),
    70: (
        "test_two_recoverers_at_once_agree_in_every_round",
        "test_two_recovering_processes_agree_in_every_round",
    ),
    71: (
        "test_a_branch_of_another_owner_is_finished_by_a_member_of_the_role",
        "test_a_branch_of_another_database_is_finished_there_or_reported",
    ),
    72: ("test_an_old_orphan_is_reported_with_its_locks",),
    # consumers
    73: ("test_consumers_killed_in_their_handlers",),
    74: (
        "test_fault_74_an_ack_of_a_frozen_member_settles_nothing",
        "test_fault_74_a_frozen_handler_and_the_one_that_takes_over_have_one_effect",
    ),
    75: ("test_only_the_message_that_kills_is_a_dead_letter",),
    76: (
        "test_fault_76_in_a_storm_of_joins_and_leaves_each_key_comes_once_and_in_order",
        "test_each_key_keeps_its_order_while_consumers_are_killed",
    ),
    77: (
        # the store on disk
        "test_an_error_of_any_call_loses_nothing",
        "test_an_error_of_the_disk_closes_the_store",
        "test_a_full_disk_takes_outcomes_only_until_there_is_space",
        "test_a_consumer_goes_on_when_not_even_outcomes_have_space",
        "test_a_kill_there_loses_nothing",
        "test_a_torn_tail_is_cut_and_kept",
        "test_a_lost_end_gives_back_what_the_index_knows",
        "test_a_damaged_body_is_given_back_when_it_is_read",
        "test_damage_without_an_index_is_quarantined_and_reported",
        "test_a_damaged_index_is_made_anew",
        "test_a_copy_is_a_store_of_its_own_owner",
        "test_of_two_copies_of_a_store_only_the_later_members_counts",
        "test_two_processes_cannot_share_a_store",
        "test_a_store_of_another_owner_is_refused",
        "test_threads_in_any_order_lose_nothing",
        # the consumer
        "test_a_failed_message_is_on_disk_before_the_broker_hears_of_it",
        "test_effects_come_while_the_broker_is_away_and_acks_follow",
        "test_a_second_consumer_is_told_that_the_directory_is_in_use",
        "test_a_full_store_stops_fetching_and_the_broker_takes_what_does_not_fit",
        "test_a_second_process_is_told_that_the_directory_is_in_use",
        "test_what_does_not_fit_while_the_broker_is_away_waits_for_it",
        "test_a_damaged_store_is_reported",
        "test_a_damaged_body_is_given_back_to_the_broker",
        "test_the_brokers_copy_of_a_lost_disk_is_adopted",
    ),
    198: (
        "test_what_does_not_fit_is_dead_lettered_before_any_handler",
        "test_a_flood_of_what_does_not_fit_passes",
        "test_batches_of_columns_have_values_and_leave_out_what_does_not_fit",
    ),
    197: (
        "test_a_nack_waits_for_earlier_messages_of_its_key_in_hand",
        "test_what_is_given_back_behind_a_nack_that_waits_goes_behind_it",
        "test_a_message_is_not_stored_before_earlier_ones_of_its_key_are_settled",
    ),
    162: (
        "test_an_attempt_that_no_handler_has_begun_does_not_count",
        "test_each_message_has_one_effect_wherever_its_process_dies",
        "test_the_outcome_of_an_attempt_that_killed_its_process_is_counted",
        "test_the_next_process_goes_on_with_what_is_stored",
        "test_a_store_is_not_kept_by_the_child_of_a_fork",
        "test_every_crash_point_of_a_life_keeps_the_promises",
        "test_every_invariant_holds_for_every_seed",
    ),
    163: (
        "test_effects_come_while_the_broker_is_away_and_acks_follow",
        "test_with_a_broker_it_takes_what_the_broker_cannot",
        "test_nothing_is_fetched_before_the_broker_knows_what_the_store_has",
        "test_later_messages_of_a_key_follow_into_the_store_when_the_broker_goes",
        "test_a_lost_report_is_told_again",
    ),
    164: (
        "test_a_message_that_its_store_has_lost_is_retried_with_its_attempts",
        "test_an_order_for_a_message_that_is_lost_here_gives_it_back",
        "test_the_brokers_copy_of_a_lost_disk_is_adopted",
        "test_a_message_that_is_elsewhere_is_taken_from_its_handler",
        "test_followers_of_a_message_that_others_have_wait_for_the_broker",
        "test_a_message_of_another_epoch_is_not_handled",
        "test_every_invariant_holds_for_every_seed",
    ),
    170: (
        "test_a_store_without_its_disk_is_adopted_by_the_brokers_copies",
        "test_a_copied_directory_tells_first_what_was_processed",
        "test_an_export_has_exact_bodies_and_can_be_adopted",
        "test_an_adopted_store_gives_its_messages_to_the_members",
    ),
    171: (
        "test_what_was_processed_under_another_name_is_settled_while_its_session_lasts",
        "test_a_store_without_what_it_shall_drop_ends_no_delivery",
        "test_flapping_consumers_with_stores_lose_and_double_nothing",
        "test_a_lapsed_session_does_not_double_an_effect",
        "test_a_reset_takes_messages_back_and_the_store_hears_of_it",
        "test_an_adopted_store_changes_nothing_when_it_comes_back",
        "test_a_message_that_a_store_in_adoption_may_not_keep_goes_back",
        "test_a_message_that_is_told_after_a_refused_one_goes_back",
        "test_a_message_goes_back_once_one_before_it_was_delivered_again",
        "test_a_store_does_not_overtake_an_earlier_message_of_its_partition",
        "test_a_verdict_on_an_old_copy_does_not_meet_the_next_delivery",
        "test_an_order_for_an_old_copy_does_not_meet_the_next_delivery",
        "test_a_put_comes_after_what_was_to_be_done_to_the_old_copy",
    ),
    176: (
        "test_waits_are_bounded_where_the_clock_was_ahead",
        "test_a_delay_that_was_asked_for_outlives_a_restart",
    ),
    177: ("test_an_exception_of_the_stores_callback_ends_the_consumer",),
    172: ("test_a_broker_killed_in_an_adoption_goes_on_with_it",),
    78: (
        "test_fault_78_messages_with_lost_acks_are_only_redelivered",
        "test_fault_78_a_position_beyond_the_end_is_refused",
    ),
    # dead letters, Spark, retention
    183: (
        "test_a_letter_is_in_one_unfinished_plan_and_only_that_one_replays_it",
        "test_each_letter_of_a_plan_is_in_one_place_and_has_one_outcome",
    ),
    184: (
        "test_a_plan_outlives_kills_of_the_broker_at_each_step",
        "test_a_replay_goes_on_without_the_command_that_began_it",
        "test_a_plan_of_a_policy_is_one_record",
        "test_a_plan_starts_though_the_power_failed_once_it_was_frozen",
        "test_a_start_finds_what_waits",
        "test_each_letter_of_a_plan_is_in_one_place_and_has_one_outcome",
    ),
    200: (
        "test_a_letter_behind_a_dead_one_that_is_not_replayed_stays_where_it_is",
        "test_a_dead_head_goes_back_with_the_letters_before_it_in_their_order",
        "test_a_letter_ends_in_its_plan_once_it_waits_for_a_letter_that_died_again",
        "test_a_letter_that_is_damaged_stands_in_nobodys_way",
        "test_a_plan_ends_though_the_log_has_lost_records_of_it",
        "test_letters_of_a_damaged_batch_are_set_aside_by_turns",
    ),
    201: (
        "test_another_group_gets_the_messages_themselves_once_each",
        "test_hostile_68_letters_that_are_given_in_a_circle_are_not_multiplied",
        "test_a_broker_killed_while_it_gives_letters_to_another_group_gives_each_once",
    ),
    185: (
        "test_a_plan_stops_where_its_letters_die_with_the_same_fingerprint",
        "test_an_open_circuit_breaker_pauses_a_plan",
        "test_the_first_failure_of_a_canary_stops_a_plan_before_its_letters_are_dead",
        "test_some_poison_does_not_stop_a_plan_and_a_canary_of_poison_does",
        "test_a_plan_with_poison_puts_each_letter_in_one_place_in_order",
        "test_an_alarm_is_raised_and_cleared",
    ),
    186: (
        "test_letters_that_change_meanwhile_are_skipped_with_the_reason",
        "test_a_reset_ends_letters_that_are_on_their_way",
        "test_a_deleted_group_ends_its_plans",
        "test_what_a_deleted_plan_has_put_back_is_still_delivered",
        "test_each_letter_of_a_plan_is_in_one_place_and_has_one_outcome",
    ),
    267: (
        "test_everybody_sees_at_once_what_the_rows_say_later",
        "test_a_letter_that_changes_is_swept_before",
        "test_a_deleted_plan_is_swept_though_the_log_has_lost_that",
    ),
    274: ("test_plans_that_abandon_and_are_swept_take_turns_with_a_pause_behind_each_step",),
    173: (
        "test_an_edited_letter_is_the_same_message_for_its_group_alone",
        "test_an_edited_letter_is_the_same_message_to_the_inbox",
        "test_a_letter_of_an_unfinished_plan_is_not_edited",
        "test_only_open_letters_are_edited_and_only_as_they_were_seen",
        "test_two_operators_cannot_edit_a_letter_over_one_another",
        "test_a_reset_gives_the_group_what_was_published_and_says_so",
    ),
    174: (
        "test_no_power_cut_tears_an_edit_from_its_letter",
        "test_a_broker_killed_in_an_edit_has_the_letter_as_it_was_or_as_it_is_told",
    ),
    175: (
        "test_all_versions_of_an_edited_letter_outlive_their_segments",
        "test_a_letter_outlives_a_batch_that_was_pinned_itself",
    ),
    188: (
        "test_a_letter_is_copied_once_unless_it_dies_again_or_again_is_said",
        "test_abandoned_letters_end_in_the_record_of_their_copies",
        "test_a_broker_killed_in_a_redrive_has_each_copy_once_with_its_letter_closed",
        "test_an_operator_killed_between_two_calls_of_a_redrive_can_repeat_it",
        "test_a_letter_that_cannot_be_copied_is_refused_alone",
    ),
    193: (
        "test_what_is_no_whole_export_is_refused",
        "test_an_export_that_is_not_finished_leaves_nothing",
        "test_only_what_is_in_the_file_is_noted_as_exported",
        "test_a_group_keeps_its_letters_until_they_are_exported",
    ),
    194: (
        "test_a_failed_trial_is_a_dead_letter_again_without_retries",
        "test_a_trial_without_an_answer_is_a_dead_letter_again",
        "test_only_the_chosen_member_gets_the_letter_and_may_process_it",
    ),
    79: (
        "test_a_broker_killed_as_a_message_dies_has_it_in_one_place",
        "test_every_message_is_in_one_place_and_keys_stay_in_order",
        "test_every_invariant_holds_for_every_seed",
    ),
    80: (
        "test_letters_are_put_back_once_and_their_keys_follow_in_order",
        "test_a_replay_whose_driver_dies_goes_on_when_it_is_run_again",
        "test_a_repeated_task_adds_its_letters_once_and_none_that_died_again",
        "test_a_broker_that_is_killed_while_letters_are_added_goes_on",
        "test_letters_are_sent_again_once_in_the_order_of_their_keys",
    ),
    81: (
        "test_a_plan_goes_on_past_letters_that_are_huge_damaged_or_not_of_their_schema",
        "test_pages_shrink_until_large_bodies_fit",
        "test_letters_with_large_bodies_come_in_pages_that_fit",
        "test_a_damaged_letter_is_named_and_the_others_are_shown",
        "test_a_letter_whose_message_is_damaged_is_read_without_its_body",
        "test_damaged_and_huge_letters_have_a_reason_of_their_own",
        "test_versions_and_queries_are_evidence_and_rows_without_messages_are_found",
    ),
    179: (
        "test_each_message_is_in_one_batch_over_restarts_and_growth",
        "test_a_planned_batch_outlives_the_broker",
        "test_spark_copies_a_topic_once_over_failed_tasks_a_dead_driver_and_growth",
    ),
    180: (
        "test_what_retention_removed_before_it_was_read_is_an_error_or_counted",
        "test_offsets_that_retention_has_removed_are_an_error_or_left_out",
        "test_a_topic_made_again_is_not_read_as_the_one_before",
        "test_a_partition_grown_and_passed_by_retention_before_it_was_seen_is_a_loss",
    ),
    181: (
        "test_what_is_lost_is_an_error_or_said",
        "test_a_stream_behind_a_restore_has_lost_nothing",
        "test_a_restored_log_is_read_on_by_a_stream_that_was_behind_it",
        "test_the_lowest_end_counts_over_several_restores",
        "test_another_log_is_refused_or_read_from_its_beginning",
    ),
    187: (
        "test_jobs_run_shipped_and_installed_and_send_once_though_stragglers_are_run_twice",
        "test_attempts_that_are_killed_behind_their_bundles_send_nothing",
        "test_jobs_whose_driver_was_killed_in_its_decision_send_once_when_they_run_again",
        "test_two_writes_with_one_key_at_once_send_once",
        "test_a_broker_killed_while_tasks_read_and_write_loses_and_doubles_nothing",
        "test_a_batch_is_published_once_however_often_and_in_whatever_order_it_is_run",
        "test_a_batch_that_failed_is_run_again",
        "test_a_batch_that_has_no_rows_any_more_leaves_nothing_undecided",
        "test_of_two_runs_of_one_batch_at_once_the_loser_raises_an_error",
        "test_spark_copies_a_topic_once_over_failed_tasks_a_dead_driver_and_growth",
    ),
    199: (
        "test_an_alert_is_there_once_though_its_sender_died_at_any_step",
        "test_a_crash_of_postgresql_while_alerts_are_added_is_survived",
        "test_a_batch_with_fewer_alerts_in_its_second_run_sends_those_of_the_first",
        "test_a_watch_tells_each_alert_once_over_its_runs",
        "test_two_watches_make_a_table_at_the_same_time",
    ),
    82: ("test_fault_82_a_group_behind_retention_gets_an_alarm_with_what_it_missed",),
    # administration, time
    86: (
        "test_a_topic_with_undecided_transactions_is_neither_grown_nor_deleted",
        "test_a_topic_that_a_job_writes_to_is_neither_grown_nor_deleted",
    ),
    87: (
        "test_a_renewed_certificate_serves_new_connections_and_ends_no_old_one",
        "test_a_new_password_is_the_one_that_counts",
    ),
    88: (
        "test_a_clock_put_back_and_right_again_makes_no_jump",
        "test_time_never_goes_back_between_two_comparisons_whatever_the_jumps",
        "test_a_datetime_of_any_zone_is_the_moment_it_names",
        "test_times_have_known_numbers",
    ),
    # identity
    95: (
        "test_a_copy_on_the_same_timeline_decides_nothing_that_it_is_behind_of",
        "test_a_copy_that_takes_the_originals_place_while_the_broker_is_down_decides_nothing",
        "test_a_report_is_remembered_when_the_broker_starts_anew",
        "test_a_transaction_on_another_copy_than_the_resolvers_is_refused",
        "test_two_resolvers_with_one_identity_decide_nothing",
    ),
    96: (
        "test_a_promoted_clone_decides_only_what_came_before_the_timelines_parted",
        "test_a_history_that_cannot_be_read_decides_nothing",
        "test_a_timeline_of_another_branch_does_not_succeed",
    ),
    97: ("test_after_a_switch_over_a_transaction_names_the_server_that_runs_it",),
    98: (
        "test_a_copy_of_the_data_touches_neither_outbox_nor_tokens_of_production",
        "test_a_copied_directory_gets_the_lease_by_an_operators_word_only",
        "test_a_restored_directory_in_an_earlier_boot_epoch_gets_no_lease",
        "test_a_restart_takes_the_lease_with_it_at_once",
        "test_a_directory_keeps_its_id_and_a_copy_has_another",
        "test_an_earlier_boot_epoch_of_a_log_is_refused_in_the_whole_process",
        "test_a_backup_in_the_originals_place_gets_the_lease_by_an_operators_word_only",
        "test_of_two_clones_of_a_data_directory_the_first_works",
        "test_a_report_of_unknown_outcome_locks_nobody_out",
    ),
    89: (
        "test_messages_of_a_topic_that_is_made_again_take_effect",
        "test_an_inbox_stored_by_name_is_taken_over_and_doubles_nothing",
        "test_an_inbox_stored_by_name_is_not_that_of_a_topic_that_was_made_later",
        "test_an_inbox_that_may_be_anothers_is_refused_until_an_operator_decides",
        "test_an_older_txmq_fails_at_the_new_tables",
    ),
    90: ("test_messages_of_a_broker_with_another_log_take_effect",),
    149: (
        "test_an_inbox_of_a_restored_log_that_has_outgrown_it_is_refused",
        "test_an_inbox_goes_on_over_restarts_of_its_broker",
        "test_a_running_member_is_refused_by_a_backup_in_the_same_boot_epoch",
    ),
    154: (
        "test_new_messages_at_offsets_of_lost_ones_take_effect",
        "test_messages_of_the_backup_take_effect_once",
        "test_a_log_that_is_restored_twice_from_one_backup_gives_offsets_of_both",
        "test_a_client_refuses_a_log_that_was_restored_meanwhile",
        "test_a_restore_is_an_alarm_until_an_operator_accepts_it",
        "test_a_restored_log_decides_nothing_in_a_database_before_an_operators_word",
        "test_what_may_have_been_decided_in_the_lost_part_is_not_made_up",
        "test_what_a_restored_broker_may_lack_is_an_alarm_until_the_restore_is_accepted",
        "test_a_reader_of_the_lost_part_is_refused_and_others_go_on",
        "test_a_segment_of_the_lost_part_of_a_restored_log_is_set_aside",
        "test_a_stored_message_of_the_lost_part_of_a_log_is_unknown",
        "test_a_consumers_store_does_not_take_a_new_message_for_a_lost_one",
        "test_a_spool_is_drained_into_a_log_that_has_lost_its_session",
    ),
    155: (
        "test_a_backup_that_is_killed_goes_on",
        "test_a_power_cut_at_any_change_of_a_first_backup",
        "test_a_power_cut_at_any_change_of_a_later_backup_leaves_the_earlier_one",
        "test_an_error_at_any_call_of_a_backup",
    ),
    156: (
        "test_a_restore_that_is_killed_is_run_again",
        "test_a_power_cut_at_any_change_of_a_restore",
        "test_an_error_at_any_call_of_a_restore",
    ),
    157: (
        "test_a_damaged_backup_is_refused_before_anything_is_written",
        "test_a_damaged_segment_of_a_backup_is_copied_again",
        "test_a_damaged_backup_is_found_by_verify",
        "test_a_file_of_a_backup_that_is_none_is_refused",
    ),
    158: (
        "test_a_broker_removes_no_segment_that_a_backup_reads",
        "test_a_hold_keeps_the_log_until_it_ends",
        "test_a_backup_beside_sends_has_all_that_was_acknowledged_before",
        "test_a_backup_has_what_is_durable_and_a_restore_brings_it_back",
    ),
    159: (
        "test_no_broker_starts_on_a_backup",
        "test_a_backup_of_something_else_is_refused",
        "test_an_older_state_that_has_gone_on_is_refused",
        "test_a_backup_of_a_restored_log_needs_a_directory_of_its_own",
    ),
    91: ("test_a_consumer_that_comes_back_with_two_brokers_doubles_nothing",),
    99: (
        "test_a_restored_database_gets_also_what_is_below_a_later_reprocess",
        "test_a_database_restored_to_before_the_first_row_gets_its_messages_again",
        "test_a_database_restored_beside_an_idle_consumer_gets_its_messages_again",
        "test_a_database_restored_to_before_the_retained_messages_raises_an_alarm",
        "test_what_an_inbox_lacks_is_delivered_again",
    ),
    105: (
        "test_what_an_operator_skipped_is_not_applied_after_all",
        "test_a_skip_beside_a_running_consumer_skips_what_it_has_prefetched",
        "test_expired_messages_and_letters_do_not_come_again",
        "test_retention_that_passes_a_slow_group_is_no_loss_of_the_database",
        "test_what_an_operator_skipped_is_not_restored",
        "test_failed_messages_have_no_effect_whatever_becomes_of_them",
    ),
    # operators' commands
    153: (
        "test_the_first_and_the_last_failures_are_kept",
        "test_a_replay_begins_no_new_history",
    ),
    160: (
        "test_a_walk_over_pages_beside_changes_lists_nothing_twice_and_all_that_stays",
        "test_a_selection_is_replayed_in_portions_and_what_dies_again_is_not_replayed_twice",
    ),
    161: (
        "test_a_step_reads_a_bounded_number_of_letters_and_of_their_text",
        "test_a_call_reads_a_bounded_number_of_letters_and_says_so",
        "test_ranges_that_never_meet_are_left_in_bounded_steps_that_get_on",
    ),
    150: ("test_a_reset_does_not_split_a_key_that_failed_before_the_growth",),
    106: (
        "test_a_reprocess_beside_a_running_consumer_acts_at_once_and_on_its_topic_alone",
        "test_a_handler_that_a_reprocess_overtakes_does_not_settle_the_message",
        "test_what_is_held_of_a_partition_that_was_reset_is_forgotten",
        "test_a_member_that_does_not_know_of_a_reset_gets_nothing",
        "test_messages_below_a_reprocess_keep_their_epoch",
        "test_what_was_not_to_be_processed_again_has_one_effect_after_a_reset_back",
    ),
    107: (
        "test_a_group_deleted_and_made_again_after_a_reprocess_doubles_nothing",
        "test_epochs_of_a_group_outlive_it",
        "test_the_inbox_of_a_group_made_again_begins_with_its_epoch",
    ),
    104: (
        "test_an_operator_s_rollback_fences_the_transaction_that_is_open",
        "test_a_rollback_by_force_is_compared_when_the_database_is_back",
        "test_an_operator_never_contradicts_the_database",
        "test_a_forced_decision_is_compared_and_a_contradiction_recorded",
    ),
    # an answer arrives after what it speaks of has changed
    92: (
        "test_a_consumer_goes_on_with_a_topic_that_is_made_again",
        "test_members_go_on_with_a_topic_that_is_made_again_from_its_first_message",
        "test_a_member_whose_topic_was_deleted_while_it_was_away_joins_when_it_is_made_again",
        "test_a_running_reader_refuses_a_topic_that_is_made_again",
        "test_a_waiting_reader_is_told_that_its_topic_is_deleted",
        "test_stored_positions_are_refused_by_a_topic_that_is_made_again",
        "test_a_reader_on_a_reactor_refuses_a_topic_that_is_made_again",
        "test_a_topic_that_is_made_again_has_a_later_epoch_and_another_id",
    ),
    93: (
        "test_positions_are_refused_by_a_log_that_was_restored_to_before_them",
        "test_positions_of_the_first_version_are_read_and_written_anew",
    ),
    109: (AGREE_OR_TOLD, "test_a_habitual_rollback_before_the_error_goes_on_hides_nothing"),
    110: (
        AGREE_OR_TOLD,
        "test_what_is_refused_says_what_to_do",
        "test_a_caller_who_ends_the_transaction_is_told",
    ),
    111: (
        AGREE_OR_TOLD,
        "test_raw_savepoints_withdraw_messages_with_their_rows",
        "test_a_savepoint_from_before_the_block_cannot_be_rolled_back_to",
        "test_an_inner_atomic_block_takes_its_messages_back",
    ),
    101: (
        "test_a_lost_branch_whose_id_is_used_again_is_reported",
        "test_each_command_reports_a_lost_branch",
        "test_a_trace_that_is_believed_blindly_would_be_detected",
        "test_a_prepare_that_is_lost_alone_is_reported_as_rolled_back",
        "test_the_status_of_another_timeline_is_not_believed",
        "test_recovery_does_not_believe_the_status_of_another_timeline",
    ),
    112: (
        "test_branches_and_messages_agree_or_the_caller_is_told",
        "test_a_notification_goes_out_with_the_decision",
        "test_no_notification_goes_out_of_a_transaction_that_is_rolled_back",
        "test_a_reader_that_is_lost_after_the_decision_is_logged",
    ),
    152: (
        "test_an_interrupt_in_the_commit_gives_the_connection_back_as_it_was",
        "test_the_child_of_a_fork_does_nothing_to_its_parent_s_block",
    ),
    151: (
        "test_the_caller_s_cursors_may_return_any_rows",
        "test_the_caller_s_own_class_of_cursors_is_kept",
        "test_an_asynchronous_connection_is_refused",
    ),
    115: (
        "test_hidden_warnings_do_not_hide_that_a_standby_is_missing",
        "test_a_commit_that_no_standby_has_confirmed_is_left_to_the_resolver",
    ),
    118: (
        "test_a_key_keeps_its_order_when_a_nack_follows_a_restart",
        "test_a_key_keeps_its_order_when_acks_are_lost_with_the_broker",
        "test_a_key_keeps_its_order_when_a_nack_follows_a_restart_on_a_reactor",
        "test_a_refused_nack_does_not_settle_what_was_delivered_anew_but_goes_to_its_lease",
        "test_a_late_handler_cannot_settle_the_delivery_of_another_handler",
        "test_nacks_and_acks_of_a_lost_connection_are_answered_before_anything_is_fetched",
        "test_a_message_in_hand_comes_again_behind_earlier_ones_that_come_again",
        "test_a_batch_in_hand_comes_again_behind_earlier_messages_that_come_again",
        "test_a_failed_message_comes_again_behind_earlier_ones_that_overtook_the_refusal",
        "test_a_nack_names_the_generation_of_the_delivery_that_failed",
    ),
    119: (
        "test_an_answer_that_the_full_disk_refuses_is_asked_for_again",
        "test_what_time_ends_is_ended_when_the_full_disk_has_space",
        "test_a_disk_that_is_full_at_the_first_of_many_checks_loses_none_of_them",
        "test_a_transaction_is_flagged_in_doubt_though_the_disk_was_full_at_its_time",
        "test_a_full_disk_only_puts_off_the_end_of_a_member_and_the_rebalance_of_its_group",
    ),
    120: (
        "test_a_block_that_is_open_answers_unknown_by_itself",
        "test_other_processes_are_not_asked_while_the_block_is_open",
        "test_a_block_that_was_left_undecided_is_asked_about",
        "test_work_is_open_until_its_end_or_as_long_as_somebody_can_end_it",
        "test_a_half_is_published_dropped_or_asked_about",
        "test_a_half_message_is_decided_by_its_block_or_by_a_checker",
    ),
    146: ("test_an_xa_transaction_cannot_overtake_rows_with_its_keys",),
    147: (
        "test_an_open_block_outlives_a_restart_of_the_broker",
        "test_after_a_start_of_the_broker_origins_have_time_to_return",
        "test_an_origin_whose_connection_is_lost_has_time_to_return",
    ),
    148: (
        "test_an_open_block_outlives_a_restart_of_the_broker",
        "test_a_slow_checker_does_not_hide_that_another_block_is_open",
        "test_an_origin_without_the_checker_passes_on_what_is_over",
        "test_a_process_without_the_checker_passes_on_what_it_has_left",
    ),
    121: (
        "test_a_transaction_goes_on_by_itself_where_its_topics_have_grown",
        "test_a_two_phase_commit_goes_on_by_itself",
        "test_a_job_goes_on_by_itself",
        "test_a_topic_that_grows_all_the_time_aborts_no_transaction",
        "test_a_local_transaction_on_a_reactor_goes_on_by_itself",
        "test_a_transaction_in_threads_goes_on_by_itself",
        "test_concurrent_transactions_are_not_aborted_by_a_stale_topic",
    ),
    122: (
        "test_a_half_message_of_several_parts_that_is_refused_frees_its_keys_at_once",
        "test_a_local_transaction_that_is_refused_frees_its_keys_at_once",
    ),
    # one reply holds up others
    129: (
        "test_a_reply_that_cannot_be_built_is_an_error_for_its_session_alone",
        "test_a_decision_that_raises_is_refused_and_nothing_is_recorded",
        "test_an_event_that_cannot_be_applied_is_not_written",
    ),
    131: (
        "test_an_alteration_and_a_deletion_at_one_moment_both_have_replies",
        "test_a_fetch_survives_the_deletion_of_its_topic",
    ),
    132: ("test_a_timer_that_raises_goes_on_and_the_others_with_it",),
    133: (
        "test_health_notices_a_broker_that_answers_nobody",
        "test_health_notices_a_write_that_hangs",
    ),
    130: (
        "test_unpacked_retries_are_bounded_by_their_real_bytes",
        "test_pieces_of_a_large_batch_are_bounded_too",
        "test_checkers_get_large_halves_in_several_replies",
        "test_pages_give_every_name_once_and_an_old_client_gets_the_whole_list",
        "test_a_list_of_transactions_is_made_in_steps_and_fits_in_a_reply",
        "test_only_the_most_frequent_kinds_of_letters_are_named",
        "test_each_request_has_one_reply",
        "test_each_request_has_one_reply_where_each_step_is_a_turn",
    ),
    # unbounded input per connection, vanished peers
    134: (
        "test_users_get_memory_for_large_frames_in_turn",
        "test_small_unfinished_frames_of_one_user_cost_others_nothing",
        "test_so_many_large_frames_grow_at_a_time_as_there_is_memory_for",
        "test_whoever_is_slow_with_a_large_frame_is_cut_when_others_wait",
        "test_a_frame_has_a_time_by_its_length",
        "test_very_many_small_unfinished_frames_cost_the_oldest",
        "test_a_witness_is_served_and_memory_is_bounded",
    ),
    135: (
        "test_one_connection_s_requests_wait_while_its_replies_are_unread",
        "test_requests_without_a_reply_are_bounded_per_connection",
        "test_a_witness_is_served_and_memory_is_bounded",
    ),
    136: (
        "test_a_read_has_no_more_than_its_bytes_whatever_it_asks_for",
        "test_partitions_are_bounded_per_join_and_over_all_groups_and_topics",
        "test_a_connection_with_many_long_reads_delays_another_by_a_step",
    ),
    137: (
        "test_a_new_connection_takes_the_place_of_the_oldest_without_a_request",
        "test_of_pipelined_requests_the_first_has_a_reply_and_the_connection_ends",
        "test_a_witness_is_served_and_memory_is_bounded",
        "test_a_long_page_leaves_turns_to_others_and_short_ones_overtake_it",
        "test_a_name_that_is_rare_is_sought_in_bounded_steps",
        "test_streams_are_bounded_and_end",
    ),
    138: (
        "test_deleted_topics_without_messages_give_up_their_partitions",
        "test_a_deleted_topic_keeps_its_partitions_while_a_transaction_may_publish_to_it",
        "test_refused_connections_are_logged_once_a_minute",
    ),
    139: ("test_fault_139_both_ends_probe_an_idle_connection_within_a_minute",),
    # order and progress
    124: (
        "test_sessions_over_rows_hold_up_no_other_tokens_and_databases_and_are_named",
        "test_a_session_over_the_broker_s_row_holds_up_the_upkeep_only",
        "test_a_session_over_a_row_of_the_outbox_holds_up_the_outbox_only",
        "test_a_session_over_the_tables_holds_up_no_call_for_long",
        "test_a_frozen_backend_is_left_for_another",
        "test_a_frozen_server_freezes_neither_the_call_nor_the_process",
        "test_tokens_whose_rows_were_locked_are_checked_again_soon",
    ),
    125: (
        "test_a_database_that_is_back_decides_long_before_the_next_check_is_due",
        "test_a_database_that_is_back_is_asked_at_once_about_what_it_was_asked_in_vain",
    ),
    126: (
        "test_a_resolver_of_its_own_finds_its_transactions_behind_very_many_others",
        "test_what_databases_are_to_decide_is_listed_page_by_page",
    ),
    # time: clocks that jump by days
    102: (
        "test_a_broker_whose_clock_is_days_ahead_for_a_moment_loses_and_refuses_nothing",
        "test_a_broker_that_starts_days_ahead_loses_and_refuses_nothing",
        "test_tokens_made_after_a_wrong_expiry_are_taken_and_earlier_ones_refused",
        "test_a_time_that_was_ahead_goes_back_once_it_is_confirmed",
        "test_every_invariant_holds_for_every_seed",
    ),
    145: (
        "test_fault_40_after_a_block_nothing_ends_for_a_second_and_everything_after_it",
        "test_databases_that_all_agree_for_a_minute_confirm_a_clock_but_what_cannot_be_undone_waits",
        "test_a_time_set_forward_ends_no_lease_and_lets_nothing_wait_for_longer",
    ),
    103: (
        "test_a_server_that_is_days_ahead_at_one_upkeep_drops_and_closes_nothing",
        "test_nothing_is_dropped_while_the_clocks_of_server_and_broker_are_apart",
        "test_what_a_wrong_clock_has_closed_is_opened_from_now_on",
    ),
    94: (
        "test_a_row_with_the_number_of_a_published_one_stays",
        "test_a_row_of_a_promoted_standby_outlives_the_published_one_with_its_number",
        "test_numbers_go_on_behind_the_rows_where_the_sequence_has_gone_back",
        "test_numbers_go_on_behind_the_floor_of_an_empty_outbox",
    ),
    100: (
        "test_a_relay_without_its_slot_waits_with_an_alarm_until_there_is_one",
        "test_what_a_new_slot_has_missed_is_an_alarm_until_it_is_accepted",
        "test_a_slot_of_another_name_knows_the_one_that_is_gone",
        "test_a_database_whose_log_ends_before_what_the_broker_has_is_refused",
    ),
    123: (
        "test_transactions_with_and_without_the_outbox_keep_the_order_of_a_row",
        "test_a_transaction_without_the_outbox_queues_behind_rows_with_its_keys",
        "test_a_row_that_came_and_went_unseen_is_a_conflict",
        "test_a_snapshot_that_may_hide_a_row_is_a_conflict",
    ),
    127: (
        "test_a_look_walks_over_few_deleted_rows_under_an_old_snapshot",
        "test_a_late_commit_of_a_smaller_number_is_not_passed_over",
    ),
    128: (
        "test_readers_are_told_of_what_was_recorded_during_a_write_once_that_is_durable",
        "test_a_reader_at_the_end_is_woken_by_a_transaction_of_several_parts",
    ),
    143: (
        "test_only_the_transactions_of_a_database_keep_its_token_rows",
        "test_upkeep_finds_out_which_database_a_resolver_leads_to_and_makes_partitions",
    ),
    265: (
        "test_a_nack_overtakes_no_ack_of_an_ordered_group",
        "test_a_report_overtakes_no_ack_of_an_ordered_group",
    ),
    242: (
        "test_a_message_that_went_back_is_received_before_later_ones_of_its_key",
        "test_a_message_that_went_back_is_not_kept_from_the_others_of_its_group",
    ),
    269: (
        "test_no_message_on_its_way_overtakes_one_that_is_given_back",
        "test_a_member_that_joins_anew_delivers_nothing_before_and_wakes_its_driver",
        "test_an_inbox_that_cannot_be_opened_is_tried_less_often_each_time",
    ),
    272: (
        "test_restored_messages_of_an_ordered_group_come_before_later_ones_of_their_keys",
        "test_restored_messages_of_an_ordered_group_come_before_later_ones",
    ),
    273: (
        "test_a_consumer_leaves_its_group_where_it_is_closed_while_it_joins_anew",
        "test_a_broker_is_not_away_whose_connection_a_member_has_ended_to_join_anew",
        "test_a_broker_is_away_where_a_member_cannot_join_anew",
    ),
    144: (
        "test_every_invariant_holds_for_every_seed",
        "test_the_row_of_a_large_bundle_from_before_its_begun_position_is_read",
    ),
    # misuse of a connection, a handler or a process
    108: (
        "test_a_handler_that_a_call_would_not_run_is_refused_at_once",
        "test_a_message_whose_handler_returns_work_to_be_done_is_no_success",
        "test_work_left_in_a_handlers_result_rolls_its_transaction_back",
        "test_a_generator_is_refused_and_work_left_in_a_result_fails_its_message",
    ),
    113: (
        "test_a_process_that_ends_without_close_sends_what_waits",
        "test_messages_without_a_receipt_at_the_end_of_their_process_are_named",
    ),
    114: (
        "test_a_consumer_in_the_child_of_a_fork_refuses_and_that_of_the_parent_goes_on",
        "test_a_child_closes_what_is_its_parents_and_has_a_consumer_of_its_own",
        "test_a_reader_in_the_child_of_a_fork_refuses_and_that_of_the_parent_goes_on",
    ),
    116: (
        "test_a_new_group_has_the_settings_of_the_broker_and_keeps_them",
        "test_times_that_no_group_may_have_are_refused",
        "test_every_setting_is_read_by_some_module",
    ),
    117: (
        "test_a_cancelled_run_ends_when_its_handlers_have_ended",
        "test_a_cancelled_run_cancels_its_handlers_and_their_messages_come_again",
    ),
    # bit rot in the index, two processes on one directory
    140: (
        "test_no_flipped_bit_changes_what_is_read",
        "test_a_row_that_is_lost_or_comes_back_is_damage",
        "test_a_snapshot_of_a_damaged_index_is_not_finished",
        "test_a_read_that_meets_a_damaged_row_says_so",
        "test_a_damaged_index_ends_the_broker_whoever_meets_it",
        "test_a_broker_makes_a_damaged_index_anew_and_has_everything",
    ),
    141: (
        "test_a_flipped_byte_in_the_last_record_is_damage_where_the_index_has_seen_it",
        "test_a_copy_whose_index_is_ahead_of_its_log_gets_another_index",
        "test_a_damaged_index_is_named_and_left_to_the_broker",
    ),
    142: (
        "test_a_directory_stays_locked_when_its_lock_file_is_removed",
        "test_a_holder_finds_out_that_another_process_has_replaced_its_file",
        "test_without_the_lock_file_a_second_broker_is_refused_and_the_first_goes_on",
        "test_a_broker_whose_directory_was_taken_over_acknowledges_nothing_more",
    ),
    165: (
        "test_sends_of_all_kinds_wait_on_disk_and_come_in_order",
        "test_batches_in_flight_when_the_broker_dies_are_stored_once",
        "test_new_sends_go_behind_what_waits",
        "test_every_seed_of_a_spool_loses_and_doubles_nothing",
    ),
    166: (
        "test_a_process_killed_at_each_point_loses_and_doubles_nothing",
        "test_a_power_cut_at_every_change_loses_and_invents_nothing",
        "test_damage_is_put_aside_with_a_report_and_the_rest_comes",
        "test_a_torn_tail_is_cut_with_a_report",
    ),
    167: (
        "test_at_the_limit_sends_are_refused_and_were_not_done",
        "test_a_full_disk_refuses_before_anything_is_staged_and_goes_on_later",
        "test_an_error_at_every_call_is_typed_and_loses_nothing",
        "test_an_input_error_of_the_disk_closes_the_spool_with_a_typed_error",
    ),
    168: (
        "test_a_spool_has_one_owner",
        "test_a_process_that_looks_for_spools_leaves_alone_those_being_made_or_removed",
        "test_a_copied_spool_doubles_nothing",
        "test_a_copy_that_is_drained_first_doubles_nothing_without_receipts",
        "test_a_copy_that_has_put_a_batch_aside_and_its_original_send_the_same",
        "test_a_spool_without_an_owner_goes_before_the_sends_of_the_next_process",
        "test_the_child_of_a_fork_has_its_own_spool",
        "test_the_child_of_a_fork_is_told_of_its_own_spool",
        "test_what_is_no_spool_of_this_version_is_left_alone",
        "test_files_are_private_and_links_are_not_followed",
    ),
    169: (
        "test_a_topic_that_grew_in_the_outage_gets_messages_by_its_new_partitions",
        "test_a_process_that_starts_in_the_outage_routes_or_stores_unrouted",
        "test_what_the_broker_refuses_for_good_is_kept_and_the_rest_goes_on",
        "test_a_search_that_is_refused_for_good_puts_the_message_aside",
        "test_every_seed_of_a_spool_loses_and_doubles_nothing",
    ),
    178: (
        "test_what_a_process_left_that_died_before_the_identity_is_removed",
        "test_a_spool_whose_log_is_gone_is_reported_and_stays",
        "test_a_store_that_was_begun_only_is_not_listed",
        "test_a_store_whose_log_is_gone_says_so",
    ),
    195: (
        "test_a_drain_says_what_it_leaves_alone",
        "test_a_place_that_is_no_directory_is_refused_with_what_to_do",
    ),
    196: (
        "test_what_may_wait_is_on_disk_once_it_is_settled",
        "test_failed_messages_are_retried_here_and_settled_at_the_broker",
    ),
    # operators' commands
    182: (
        "test_a_change_and_its_message_are_one_record",
        "test_what_changes_nothing_leaves_no_message",
        "test_nobody_else_changes_or_writes_what_is_the_brokers",
        "test_each_call_of_an_operator_is_audited",
        "test_audit_entries_outlive_their_segments_and_hold_up_nothing",
    ),
    189: (
        "test_a_key_is_followed_through_all_topics",
        "test_a_search_in_small_steps_finds_the_same",
        "test_the_page_is_one_file_and_no_text_becomes_markup",
        "test_on_a_terminal_no_text_is_a_control_sequence",
    ),
    202: (
        "test_a_cancellation_at_any_await_leaves_no_doubt_unnamed",
        "test_a_send_that_has_not_gone_out_is_taken_back",
        "test_a_send_without_an_answer_may_be_stored",
        "test_a_cancelled_receive_loses_nothing",
        "test_a_cancelled_run_gives_its_messages_back",
        "test_a_cancelled_inbox_loses_and_doubles_nothing",
        "test_a_cancelled_life_leaves_nothing_behind",
    ),
    203: (
        "test_another_loop_is_refused",
        "test_a_thread_without_a_loop_is_refused",
        "test_the_child_of_a_fork_is_refused",
    ),
    # somebody else commits
    190: (
        "test_a_hook_that_lies_publishes_nothing",
        "test_hooks_publish_a_phantom_and_txmq_does_not",
        "test_each_way_does_what_the_table_says",
        "test_a_commit_that_takes_nothing_along_calls_no_hook",
    ),
    191: (
        "test_a_service_killed_at_each_step_leaves_both_or_neither",
        "test_the_row_decides_whatever_the_hooks_say",
        "test_a_commit_without_its_hook_is_noticed",
    ),
    192: (
        "test_a_trigger_s_messages_are_those_of_committed_rows_in_their_order",
        "test_what_no_broker_could_publish_is_refused",
    ),
    204: (
        "test_a_swallowed_error_is_an_abort",
        "test_branches_are_prepared_or_refused",
        "test_each_way_does_what_the_table_says",
    ),
    205: ("test_a_task_that_is_cancelled_in_commit_knows_its_outcome_or_is_in_doubt",),
    224: (
        "test_a_cancellation_that_comes_when_all_is_stored",
        "test_a_cancellation_at_any_await_of_an_enlisted_transaction_is_named",
    ),
    222: ("test_a_pool_lends_no_messages_of_the_user_before",),
    223: (
        "test_sessions_that_share_a_connection_take_back_messages_of_their_own",
        "test_a_nested_session_of_two_engines_takes_back_the_messages_of_each",
    ),
    206: (
        "test_postgresql_that_dies_inside_a_copy_fails_the_job_and_not_its_rows",
        "test_rows_that_a_policy_hides_are_an_error",
        "test_a_partition_that_is_a_foreign_table_is_read",
        "test_a_standby_is_refused_unless_it_is_allowed",
        "test_a_name_is_a_name_and_nothing_else",
        "test_a_query_with_other_columns_or_with_effects_is_refused",
    ),
    207: (
        "test_letters_are_put_back_once_and_their_keys_follow_in_order",
        "test_the_incarnation_of_a_log_is_in_the_plan_where_it_has_one",
        "test_a_topic_that_is_made_again_meanwhile_ends_the_job",
    ),
    208: ("test_letters_are_sent_again_once_in_the_order_of_their_keys",),
    209: (
        "test_a_decision_waits_for_two_writes_with_one_budget_between_them",
        "test_decisions_take_few_turns_of_the_disk_while_sends_wait",
        "test_refused_sends_keep_no_payload_and_nobody_waits_behind_them",
        "test_who_ignores_the_pause_costs_no_memory_and_others_have_their_turn",
        "test_many_connections_of_one_host_are_no_more_than_one_of_another",
    ),
    210: (
        "test_a_user_with_too_many_failures_has_to_wait_and_others_need_not",
        "test_logins_that_begin_at_a_time_get_no_more_guesses",
        "test_an_ipv6_network_has_the_guesses_of_one_host",
        "test_many_names_neither_push_out_a_lock_nor_take_the_hashes_of_other_hosts",
        "test_a_verifier_of_many_rounds_costs_as_many_hashes",
        "test_nobody_else_has_the_rights_of_the_broker_s_own_parts_or_locks_them_out",
        "test_a_login_that_began_before_a_new_password_or_the_user_s_end_does_not_succeed",
    ),
    211: ("test_a_list_that_fails_is_applied_one_by_one_without_later_ones_of_a_nacked_key",),
    212: ("test_of_two_who_import_a_file_at_once_one_sends_it",),
    213: (
        "test_retention_that_is_faster_than_a_reply_is_said",
        "test_a_span_of_the_log_that_is_leapt_over_is_said",
        "test_reading_goes_on_behind_a_transaction_that_was_rolled_back",
    ),
    214: (
        "test_a_header_that_is_no_text_is_answered_and_keeps_no_connection",
        "test_a_request_that_meets_a_bug_is_answered_and_keeps_no_connection",
        "test_what_comes_behind_a_refused_request_is_not_read",
    ),
    215: (
        "test_files_that_could_not_be_read_are_tried_again_though_no_time_of_theirs_changes",
        "test_a_key_with_a_password_is_refused_and_nobody_is_asked",
        "test_a_file_that_cannot_be_used_is_named_and_the_old_ones_serve_on",
    ),
    245: ("test_a_saved_selection_is_replaced_and_removed_by_its_author_and_by_admins_only",),
    249: (
        "test_a_watermark_is_moved_by_who_may_write_the_service_of_relays_only",
        "test_a_job_is_decided_and_joined_by_who_may_write_the_service_of_its_bundles",
    ),
    248: (
        "test_a_throttled_call_is_made_again_after_the_pause",
        "test_a_call_waits_for_the_pause_that_the_broker_names_and_for_no_longer_one",
        "test_a_reader_on_a_loop_waits_as_long_as_the_broker_asks",
        "test_a_blocking_reader_waits_as_long_as_the_broker_asks",
    ),
    237: (
        "test_one_host_without_a_login_pushes_out_none_of_another_one",
        "test_connections_without_a_login_give_way_where_all_places_are_taken",
        "test_a_host_at_its_limit_pushes_out_its_own_connection_without_a_login",
        "test_a_connection_that_is_refused_begins_no_handshake",
        "test_a_lost_connection_leaves_nothing_to_the_collector",
        "test_a_handshake_that_does_not_end_is_cut",
    ),
    238: (
        "test_users_who_fill_all_live_pages_leave_each_other_user_a_share",
        "test_where_there_are_no_users_hosts_have_shares_of_live_pages",
        "test_a_live_page_that_gives_way_has_its_connection_ended",
    ),
    239: (
        "test_what_a_broker_makes_is_its_owners_alone_whatever_the_umask",
        "test_a_directory_that_every_user_may_write_is_refused",
    ),
    270: (
        "test_an_admin_is_not_made_by_another_user_than_the_broker_s",
        "test_a_file_of_another_user_is_found",
        "test_a_file_in_the_directory_that_this_user_may_not_read_fails",
        "test_an_error_of_the_system_says_what_to_do_about_it",
    ),
    271: (
        "test_a_file_of_tls_that_cannot_be_used_is_named",
        "test_a_file_of_tls_that_the_broker_could_not_use_is_named",
    ),
    240: (
        "test_a_broker_goes_on_whose_log_nobody_reads",
        "test_a_log_that_cannot_be_written_loses_lines_and_says_how_many",
        "test_a_log_whose_reader_stands_still_holds_nobody_up",
    ),
    247: ("test_a_user_neither_ends_the_alarms_of_others_nor_keeps_them_out",),
    246: (
        "test_a_port_accepts_few_connections_a_turn_however_many_wait",
        "test_a_host_that_connects_again_and_again_pushes_out_its_own_connections",
    ),
    225: (
        "test_requests_that_wait_end_when_their_user_loses_the_right",
        "test_a_client_whose_user_is_deleted_and_that_does_not_end_is_cut",
    ),
    226: ("test_denials_of_one_user_do_not_hide_those_of_others",),
    227: (
        "test_a_trace_of_a_large_log_ends_in_time_and_says_what_it_left_out",
        "test_few_thorough_traces_run_at_a_time",
        "test_one_user_has_a_part_of_the_thorough_traces",
        "test_a_user_with_many_requests_keeps_connections_for_others",
        "test_a_user_with_many_long_reads_delays_those_of_another_user_by_a_step",
    ),
    250: (
        "test_a_group_gets_every_other_message_once_by_its_own_offset",
        "test_a_group_goes_on_behind_what_a_repair_lost",
        "test_retention_and_the_floor_of_the_log_go_past_lost_messages",
        "test_a_reader_is_sent_on_behind_lost_messages_at_the_end",
        "test_a_bundle_whose_bytes_are_lost_is_published_without_them",
    ),
    253: ("test_a_repaired_log_is_whole_and_its_lost_messages_are_named",),
    254: (
        "test_an_idle_broker_that_reads_outboxes_reads_the_clock_of_their_database_as_well",
        "test_a_database_whose_clock_is_not_known_yet_is_named_with_the_reason",
    ),
    259: ("test_a_scan_lets_others_in_between",),
    258: ("test_a_page_of_another_site_leads_to_the_console_and_loads_nothing_of_it",),
    257: (
        "test_a_reader_cannot_use_up_the_sequences_of_another_user_s_producer",
        "test_nor_in_a_frame_of_several_sends",
        "test_nor_fence_the_producer_by_a_later_epoch_nor_skip_its_sequences",
        "test_nor_recall_its_delayed_messages",
        "test_the_owner_is_in_the_log_and_in_the_tables",
    ),
    231: (
        "test_a_stream_whose_reader_does_not_read_ends_and_gives_its_place_back",
        "test_the_connection_of_a_stream_that_nobody_reads_ends_too",
        "test_a_browser_that_vanishes_is_noticed_within_a_minute",
    ),
    216: (
        "test_a_letter_that_is_damaged_after_it_was_sent_is_abandoned_like_the_others",
        "test_a_letter_that_is_damaged_before_it_was_sent_stays_open",
        "test_letters_that_somebody_replays_are_not_sent_again",
    ),
    217: (
        "test_letters_that_are_held_or_closed_between_two_pages_are_read_as_they_are_then",
        "test_letters_with_large_bodies_come_in_pages_that_fit",
    ),
    218: (
        "test_a_topic_does_not_grow_while_bundles_are_open",
        "test_a_topic_that_grows_while_a_task_gathers_rows_gets_each_message_once",
    ),
    219: (
        "test_letters_that_a_plan_puts_back_together_outlive_their_batch",
        "test_letters_that_retention_has_copied_go_out_from_their_copies",
    ),
    220: (
        "test_a_policy_makes_no_plans_of_letters_that_wait_for_another_dead_one",
        "test_letters_that_wait_fill_no_bounded_plans_of_a_policy",
    ),
    228: ("test_a_directory_of_another_checkpoint_is_refused",),
    229: ("test_rows_may_be_wider_than_the_blocks_in_which_they_are_parsed",),
    243: (
        "test_each_key_is_in_one_task_in_the_order_of_publication",
        "test_letters_of_a_partition_keep_their_order_where_a_clock_was_set_back",
        "test_a_key_is_sent_in_order_though_its_topic_has_grown_between",
    ),
    266: ("test_an_open_bundle_is_due_some_time_after_its_latest_part",),
    244: (
        "test_letters_are_sent_once_though_their_task_is_killed",
        "test_letters_are_sent_once_though_each_task_runs_twice_at_once",
    ),
    230: (
        "test_a_failed_job_names_the_cause_that_spark_hides",
        "test_a_rename_that_is_refused_is_an_error",
        "test_each_message_lands_once_though_a_batch_is_run_again",
    ),
    232: (
        "test_a_checkpoint_with_as_many_batches_is_another_one",
        "test_two_first_runs_at_the_same_time_leave_one_id",
    ),
    233: ("test_foreach_batch_writes_each_batch_once_under_one_name_and_not_without_one",),
    234: (
        "test_a_table_is_changed_before_its_snapshot_or_behind_it",
        "test_the_tables_of_a_query_are_locked_as_far_as_the_role_may",
    ),
    241: ("test_a_limit_for_transactions_does_not_end_a_snapshot",),
    235: (
        "test_a_run_beside_another_one_of_its_checkpoint_is_told_so",
        "test_a_run_that_is_at_work_is_no_other_checkpoint",
        "test_two_first_runs_at_the_same_time_leave_one_id",
    ),
    268: (
        "test_a_failure_is_raised_at_once_and_the_jobs_of_other_actions_are_cancelled",
        "test_actions_have_the_properties_of_the_caller_and_none_of_one_another",
    ),
    236: (
        "test_a_read_whose_workers_are_killed_has_each_message_once",
        "test_a_reconciliation_whose_workers_are_killed_makes_the_same_plan",
        "test_a_watch_whose_workers_are_killed_tells_the_same_alerts",
    ),
    221: (
        "test_fences_that_wait_for_long_hold_up_no_key_of_another_partition",
        "test_a_slow_message_of_one_partition_holds_up_no_fence_of_another",
        "test_an_ack_of_many_heads_looks_once_for_what_they_wait_for",
    ),
}

# Each bug with the names under which it is planted, or the test that must find it.
BUGS = {
    "messages at consumers": (
        "followers_stay_in_the_store",
        "a_leave_frees_what_a_store_has",
        "a_reset_leaves_messages_at_consumers",
        "adoption_forgets_attempts",
        "an_ack_from_a_store_keeps_its_lease",
        "a_head_is_forgotten_by_a_store",
        "drop_makes_no_letter",
    ),
    "what operators do": ("an operator's change leaves no audit message",),
    "edits of letters": (
        "an edit leaves the letter where it was",
        "an edit concerns all groups",
    ),
    "a producer's spool": (
        "a batch is noted as drained when it is sent",
        "a doubtful batch of a forgotten session is sent without a search",
        "the spool is not synced",
        "a split batch is sent as a whole again",
        "a session is sent before the receipts of the one before",
        "a message is sent past the spool",
    ),
    "replay plans": (
        "an_ack_tells_no_plan",
        "a_second_death_keeps_the_plan",
        "plans_share_letters",
        "a_cancelled_plan_goes_on",
        "the_canary_has_no_end",
        "a_letter_is_put_back_again",
        "a_replay_leaves_the_plan_of_a_letter",
        "a_put_back_letter_is_forgotten_with_its_plan",
        "a_start_forgets_what_waits",
        "a_letter_stays_in_the_queue",
        "copies_are_read_as_one_batch",
        "a_letter_of_a_fenced_key_is_put_back",
        "a_reset_tells_that_it_processed",
        "a_policy_does_not_wait",
        "an ack tells no plan",
    ),
    "selections of dead letters": (
        "a letter that was replayed stays counted",
        "a scan finds letters that died after it began",
        "a letter that dies again is not indexed by its new error",
        "a page ends behind a letter that it has not shown",
        "a property without an index is not judged",
    ),
    "local stores of consumers": (
        "ack_before_fsync",
        "index_ahead_of_the_log",
        "outcomes_forgotten_at_rebuild",
        "segments_removed_too_early",
        "segments_removed_before_it_is_noted",
        "chains_by_due_time",
        "relocation_forgets_the_state",
    ),
    "backups": (
        "a backup copies behind what is durable",
        "a manifest is durable before its data",
        "an earlier backup is overwritten in place",
    ),
    "operators' words about a group with an inbox": (
        "an epoch rises without a generation",
        "a member keeps what was reset",
        "epochs of a deleted group are forgotten",
        "what was skipped is taken for lost effects",
        "a restored inbox gets nothing again",
    ),
    "believing a clock that jumps": (
        "a clock that jumps is believed",
        "a clock is believed at a start",
        "a restart ends a doubt",
        "check-backs do not go back with the time",
        "retries do not go back with the time",
    ),
    "a caller's end of a transaction that nobody sees": (
        "no look at the transaction before its rollback",
        "raw statements are not seen",
        "the token's INSERT proves nothing",
    ),
    "acknowledging before the sync": ("ack_before_fsync", "replies go out before the flush"),
    "no sync": ("a flush does not sync", "no_fsync_after_recovery", "no_sync_of_directories"),
    "no checksum": ("no_checksum",),
    "records in each other's place": ("test_a_record_of_another_position_is_refused",),
    "cutting a damaged middle": ("test_the_check_finds_a_recovery_that_cuts_the_damaged_middle",),
    "tables ahead of the log": ("a snapshot leads the log", "position_before_the_rows"),
    "tables named whole before they are": (
        "valid_before_its_rows",
        "snapshot_over_what_is_there",
        "open_without_sync",
    ),
    "tables that are not what the log says": (
        "topics_are_saved_once",
        "deleted_rows_stay",
        "replay_takes_other_times",
    ),
    "publishing before the flush": (
        "a piece becomes visible early",
        "replies go out before the flush",
    ),
    "storing twice": (
        "a repeated send is stored again",
        "a job decided again is carried out again",
    ),
    "a bundle without its end": ("a bundle is published in part",),
    "silence taken for a rollback": (
        "no answer is taken for a rollback",
        "absence is taken for a rollback",
    ),
    "the row before the status": ("row_before_status",),
    "no fence before ROLLBACK": ("without_fence",),
    "trusting tpc_prepare": (
        "test_a_prepare_that_is_believed_as_psycopg2_reports_it_would_be_detected",
    ),
    "committing without all votes": ("CommitsWithoutAVote",),
    "folding without locks": ("test_a_fold_without_locks_is_found",),
    "order by the decision": ("order tickets are ignored", "plain sends pass held keys"),
    "no look at the generation": ("no_look_at_the_generation",),
    "a topic that is made again": ("members keep a deleted topic",),
    "an answer about an old delivery": (
        "a refused nack settles the message that was delivered anew",
        "a member fetches before its repeated acks are answered",
    ),
    "a key's messages out of order behind a failed one": (
        "a fence releases messages before those of earlier pieces",
    ),
}


def section(page: str, title: str) -> str:
    """Return the text of a section of the page, without its heading."""
    heading = rf"^## \d+ {title}$(.*?)(?=^## |\Z)"
    (text,) = re.findall(heading, page, re.MULTILINE | re.DOTALL)
    return str(text)


def rows(page: str) -> Iterator[tuple[int, str]]:
    """Return the number and the text of each fault of the page."""
    item = r"^- \*\*(\d+)\. (.*?)(?=^- |^#|\Z)"
    faults = section(page, "Faults")
    for number, text in re.findall(item, faults, re.MULTILINE | re.DOTALL):
        yield int(number), text


# Numbers given to work that goes on at a time; those that were not needed stay free.
GIVEN_OUT = frozenset([267, 268])


def misnumbered(numbers: Collection[int]) -> list[str]:
    """Return what keeps the numbers from counting up from 1, each once."""
    counts = Counter(numbers)
    missing = sorted({*range(1, max(counts, default=1) + 1)} - counts.keys() - GIVEN_OUT)
    repeated = {number: times for number, times in counts.items() if times > 1}
    return [
        *(f"{number} is missing" for number in missing),
        *(f"{number} is there {times} times" for number, times in repeated.items()),
    ]


def exceptions(page: str) -> set[int]:
    """Return the faults that the page names as exceptions from another promise."""
    lists = re.findall(r"(?:Except|Open:)\s+rows?\s+([\d\s,andto]+)", page)
    return {int(number) for text in lists for number in re.findall(r"\d+", text)}


def disagreements(page: str, tested: Collection[int]) -> list[str]:
    """Return where the page and the table of tests contradict each other."""
    faults = dict(rows(page))
    marked = {number for number, text in faults.items() if any(mark in text for mark in MARKS)}
    there, shown = faults.keys(), {*tested}
    return [
        *misnumbered([number for number, _text in rows(page)]),
        *(f"{number} has tests and is not on the page" for number in sorted(shown - there)),
        *(f"{number} has neither tests nor a mark" for number in sorted(there - shown - marked)),
        *(f"{number} has tests and a mark" for number in sorted(shown & marked)),
        *(f"{number} is excepted without a mark" for number in sorted(exceptions(page) - marked)),
    ]


def test_every_fault_of_the_page_has_tests_or_a_mark() -> None:
    assert disagreements(PAGE.read_text("utf-8"), FAULTS) == []


@pytest.mark.parametrize(
    ("title", "item", "least"),
    [
        ("Invariants", r"^- \*\*I(\d+)\*\* ", 16),
        ("Hostile input", r"^- \*\*(\d+)\.\*\* ", 78),
    ],
)
def test_other_lists_of_the_page_are_numbered_without_gaps(
    title: str, item: str, least: int
) -> None:
    text = section(PAGE.read_text("utf-8"), title)
    numbers = [int(found) for found in re.findall(item, text, re.MULTILINE)]
    assert misnumbered(numbers) == []
    assert max(numbers) >= least


SMALL_PAGE = """
## 1 Words
- **9. Not a fault.**
## 2 Faults
### Broker
- **1. Killed.**
  Nothing is lost.
  Except row 3.
- **2. No replica.** *Not built yet.*
### Time
- **3. A clock that jumps.**
  Today all is lost.
  *Open: not survived yet.*
## 3 Invariants
- **9. Not a fault either.**
"""


@pytest.mark.parametrize(
    ("old", "new", "tested", "found"),
    [
        ("", "", {1}, []),
        ("", "", set(), ["1 has neither tests nor a mark"]),
        ("", "", {1, 2}, ["2 has tests and a mark"]),
        ("", "", {1, 4}, ["4 has tests and is not on the page"]),
        ("**2.", "**4.", {1}, ["2 is missing"]),
        ("**2.", "**3.", {1}, ["2 is missing", "3 is there 2 times"]),
        ("*Not built yet.*", "", {1}, ["2 has neither tests nor a mark"]),
        ("row 3.", "rows 2 and 5.", {1}, ["5 is excepted without a mark"]),
        ("*Open: not survived yet.*", "", {1, 3}, ["3 is excepted without a mark"]),
    ],
)
def test_a_page_that_contradicts_the_tests_is_found(
    old: str, new: str, tested: set[int], found: list[str]
) -> None:
    assert old in SMALL_PAGE
    assert disagreements(SMALL_PAGE.replace(old, new) if old else SMALL_PAGE, tested) == found


def test_every_test_that_shows_a_fault_is_there() -> None:
    there = {
        name
        for file in Path(__file__).parent.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text("utf-8"), re.MULTILINE)
    }
    missing = {fault: {*names} - there for fault, names in FAULTS.items()}
    assert {fault: names for fault, names in missing.items() if names} == {}


def test_every_bug_that_a_checker_must_find_is_planted() -> None:
    files = [file for file in Path(__file__).parent.rglob("*.py") if file != Path(__file__)]
    texts = [file.read_text("utf-8") for file in files]
    names = {name for planted in BUGS.values() for name in planted}
    assert {name for name in names if not any(name in text for text in texts)} == set()
