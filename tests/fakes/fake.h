#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for what is below the engine, so that its threads, queues and every fault can be tested in
 * milliseconds and without a device: fake-gpu.c plays opencl/, fake-text.c daemon/text/, fake-model.c and
 * fake-nbits.c daemon/model/, fake-cache.c cache/, and fake-pass.c what a pass of the model gives.  These
 * objects are linked before the library, whose own are then not taken from it.
 *
 * The model "speaks" a hash of its whole history: token t + 1 is a function of all ids that the cache was
 * really given, so a wrong crop, a lost token or another session's cache changes the text.  Ids 0..255 are
 * bytes, 256 ends a turn.
 */

#include "tests/lib/engine-talk.h"

#include <pthread.h>

#define FAKE_VOCAB   260
#define FAKE_EOG     256
#define FAKE_CONTEXT 4096
#define FAKE_PASSES  65536

typedef struct FakePass {
    uint32_t n_items, n_rows;
    int32_t first_ids[8]; /* the first id that each item's cache holds: tells whose it is */
} FakePass;

/* What the test sets and reads; under the lock. */
typedef struct Fake {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool no_device, lose, hang;    /* of the next open, the next pass */
    uint32_t eog_at;               /* length at which the model ends its turn; 0: never */
    int32_t nan_for;               /* histories that begin with this id give NaN; 0: none */
    uint64_t pass_usec, open_usec; /* how long a pass and opening a file take */
    uint64_t room_tokens;          /* what all caches together may hold; 0: any number */
    uint64_t budget;               /* of the device */
    /* What caches at home there may hold; 0: any number.  Each halving of the batch gives 10 more, */
    uint64_t device_tokens;
    uint32_t n_streams;    /* and each eighth of the weights that streams 100, so many times */
    bool can_stream;       /* a model may load with half of its weights on the device */
    uint32_t n_moves;      /* of stores */
    bool hold;             /* passes wait */
    uint32_t n_bits_steps; /* passes that measuring automatic bits takes */
    int bits_error;        /* how the last of them ends */
    bool packed;           /* crop goes back to checkpoints only */
    uint32_t n_files, n_models, n_stores, n_caches, n_nbits; /* that there are */
    uint32_t n_opens, n_passes, n_forked;
    uint32_t n_rows; /* run, not refused */
    FakePass passes[FAKE_PASSES];
} Fake;

extern Fake fake;

/* Nothing is asked for, and nothing has happened; what there is stays counted. */
void fake_reset(void);

#define FAKE_SET(member, value)                                                                              \
    do {                                                                                                     \
        pthread_mutex_lock(&fake.lock);                                                                      \
        fake.member = (value);                                                                               \
        pthread_cond_broadcast(&fake.changed);                                                               \
        pthread_mutex_unlock(&fake.lock);                                                                    \
    } while (0)
#define FAKE_GET(member)                                                                                     \
    ({                                                                                                       \
        pthread_mutex_lock(&fake.lock);                                                                      \
        __auto_type _value = fake.member;                                                                    \
        pthread_mutex_unlock(&fake.lock);                                                                    \
        _value;                                                                                              \
    })

/* Of the @i-th cache, which must be there. */
bool fake_cache_is_recording(size_t i);

/* What the model says after a history: the token, and its row of FAKE_VOCAB logits. */
int32_t fake_next(const int32_t *ids, uint32_t n, uint32_t eog_at);
void fake_logits(const int32_t *ids, uint32_t n, float *row);

/* What the model says to @prompt, written to @text (n_tokens + 1). */
const char *expected_text(const char *prompt, uint32_t n_tokens, char *text);
#define assert_speaks(seen, prompt, n)                                                                       \
    assert_string_equal((seen)->text, expected_text((prompt), (n), (char[8192]){0}))

/* ---- an engine on it ------------------------------------------------------------------------------- */

EngineModel fake_model(const char *name, const char *path);
Talk *talk_start(const EngineModel *models, size_t n_models, uint32_t max_queue);
/* Ends the engine; nothing may be left of what it made. */
void talk_stop(Talk *talk);
