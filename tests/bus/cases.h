#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Cases that hold for every engine: run with the fake one (test-bus-protocol) and with the real one (test-bus-daemon). */

void a_stream_begins_with_its_version_and_ends_with_usage_and_reason(void **state);
void ask_answers_with_text_and_usage(void **state);
void two_clients_at_once_hear_only_their_own(void **state);
void a_killed_client_ends_its_job(void **state);
void closing_the_stream_cancels_the_job(void **state);
void a_slow_reader_is_ended_and_others_go_on(void **state);
void a_reader_that_comes_back_hears_everything(void **state);
void cancel_ends_the_job_and_the_session_goes_on(void **state);
void unload_during_a_generation_keeps_the_daemon(void **state);
void a_broken_reload_keeps_the_old_configuration(void **state);
void a_thousand_random_calls_leave_the_daemon_alive(void **state);
void unknown_things_have_their_error(void **state);
void a_prompt_by_descriptor_is_the_prompt(void **state);
void a_service_is_invoked_with_its_inputs(void **state);
void a_damaged_model_is_an_error_and_harms_nobody(void **state);
void ask_for_beams_answers_with_every_sequence_and_its_score(void **state);
void ask_for_several_prompts_answers_each(void **state);
void wrong_values_of_beam_options_are_refused_by_name_value_and_range(void **state);
void a_stream_refuses_several_sequences_by_name(void **state);

/* To be called first by main(): the program runs itself as a client that can be killed.  -1: this is no such run. */
int case_client(int argc, char **argv);

#define SHARED_CASES                                                                                                                        \
    cmocka_unit_test(a_stream_begins_with_its_version_and_ends_with_usage_and_reason), cmocka_unit_test(ask_answers_with_text_and_usage),  \
        cmocka_unit_test(two_clients_at_once_hear_only_their_own), cmocka_unit_test(a_killed_client_ends_its_job),                         \
        cmocka_unit_test(closing_the_stream_cancels_the_job), cmocka_unit_test(a_slow_reader_is_ended_and_others_go_on),                   \
        cmocka_unit_test(a_reader_that_comes_back_hears_everything), cmocka_unit_test(cancel_ends_the_job_and_the_session_goes_on),        \
        cmocka_unit_test(unload_during_a_generation_keeps_the_daemon), cmocka_unit_test(a_broken_reload_keeps_the_old_configuration),      \
        cmocka_unit_test(unknown_things_have_their_error), cmocka_unit_test(a_prompt_by_descriptor_is_the_prompt),                         \
        cmocka_unit_test(a_service_is_invoked_with_its_inputs), cmocka_unit_test(a_damaged_model_is_an_error_and_harms_nobody),            \
        cmocka_unit_test(ask_for_beams_answers_with_every_sequence_and_its_score), cmocka_unit_test(ask_for_several_prompts_answers_each), \
        cmocka_unit_test(wrong_values_of_beam_options_are_refused_by_name_value_and_range),                                               \
        cmocka_unit_test(a_stream_refuses_several_sequences_by_name),                                                                     \
        cmocka_unit_test(a_thousand_random_calls_leave_the_daemon_alive)
