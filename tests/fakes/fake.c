/* SPDX-License-Identifier: Apache-2.0 */
/* What a test sets and reads of the stand-in, and an engine on it. */

#include "tests/fakes/fake.h"

Fake fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

void fake_reset(void)
{
    pthread_mutex_lock(&fake.lock);
    fake.no_device = fake.lose = fake.hang = fake.hold = fake.packed = false;
    fake.eog_at = 0;
    fake.nan_for = 0;
    fake.pass_usec = fake.open_usec = fake.room_tokens = 0;
    fake.budget = 1000;
    fake.device_tokens = 0;
    fake.n_streams = 0;
    fake.n_bits_steps = 0;
    fake.bits_error = 0;
    fake.can_stream = false;
    fake.n_moves = 0;
    fake.n_opens = fake.n_passes = fake.n_forked = fake.n_rows = 0;
    pthread_mutex_unlock(&fake.lock);
}

EngineModel fake_model(const char *name, const char *path)
{
    return (EngineModel){
        .name = name,
        .path = path,
        .policy = {.strategy = KV_STRATEGY_OFFLOADED_QUANTIZED,
                   .home = KV_HOME_HOST,
                   .form = kv_form_default(KV_FORM_LEAT),
                   .transfer = KV_TRANSFER_COPY,
                   .n_slots = 2},
        .parallel = 4,
        .keep_alive_usec = UINT64_MAX,
    };
}

Talk *talk_start(const EngineModel *models, size_t n_models, uint32_t max_queue)
{
    EngineOptions options = {
        .models = models, .n_models = n_models, .max_queue = max_queue};

    return talk_new(&options);
}

void talk_stop(Talk *talk)
{
    talk_free(talk);
    assert_int_equal(FAKE_GET(n_files), 0);
    assert_int_equal(FAKE_GET(n_models), 0);
    assert_int_equal(FAKE_GET(n_stores), 0);
    assert_int_equal(FAKE_GET(n_caches), 0);
    assert_int_equal(FAKE_GET(n_nbits), 0);
}

const char *expected_text(const char *prompt, uint32_t n_tokens, char *text)
{
    int32_t ids[FAKE_CONTEXT + 1];
    uint32_t n = (uint32_t)strlen(prompt);

    for (uint32_t i = 0; i < n; i++)
        ids[i] = (unsigned char)prompt[i];
    for (uint32_t i = 0; i < n_tokens; i++) {
        ids[n] = fake_next(ids, n, 0);
        text[i] = (char)ids[n++];
    }
    text[n_tokens] = 0;
    return text;
}
