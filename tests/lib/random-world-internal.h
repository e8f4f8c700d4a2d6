#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A random program while it runs: random-pass.c has what is done in passes, random-world.c the other operations. */

#include "tests/lib/random-reference.h"
#include "tests/lib/random-world.h"

#define CONV_BYTES      RANDOM_CONV_BYTES
#define RECURRENT_BYTES RANDOM_RECURRENT_BYTES
#define MAX_STEPS       RANDOM_MAX_STEPS
#define N_BITS          (1u << 18) /* places of the table of outputs seen */

typedef struct Bits {
    uint64_t key, value; /* key 0: free */
} Bits;

struct RandomWorld {
    Gpu *gpu;
    GpuBuffer *qkv[RANDOM_MAX_LAYERS], *out[RANDOM_MAX_LAYERS];
    float *qkv_memory[RANDOM_MAX_LAYERS], *out_memory[RANDOM_MAX_LAYERS];
    uint32_t row_values; /* room for one row */
    Bits *bits;
    uint32_t n_bits;
    RandomCounts counts;
    bool has_defect;
};

typedef struct Sequence {
    KvCache *cache;
    RefSequence *tokens;
    bool is_fork, is_cropped_fork; /* for the seeded defect */
    bool recording; /* for sure, since record_from */
    uint32_t record_from;
    uint8_t ends[RANDOM_MAX_TOKENS + 1]; /* whether it must be able to go back there since */
} Sequence;

/* What a pass read and wrote of one layer's states for one item. */
typedef struct States {
    uint8_t old_conv[CONV_BYTES], old_recurrent[RECURRENT_BYTES], new_conv[CONV_BYTES], new_recurrent[RECURRENT_BYTES];
    uint8_t steps_conv[MAX_STEPS][CONV_BYTES], steps_recurrent[MAX_STEPS][RECURRENT_BYTES];
} States;

/* A sequence in a file. */
typedef struct Image {
    int fd;
    RefSequence *tokens; /* NULL: none */
} Image;

typedef struct Run {
    RandomWorld *world;
    RandomConfig config; /* the program's, until it migrates */
    Reference *reference;
    KvStore *store;
    uint64_t config_key;
    Sequence sequences[RANDOM_MAX_SEQUENCES];
    Image images[RANDOM_MAX_IMAGES];
    States *states; /* (RANDOM_MAX_LAYERS, RANDOM_MAX_ARGS) */
    uint32_t op;
    RandomFailure *failure;
} Run;

/* New tokens of one sequence in a pass. */
typedef struct Item {
    Sequence *sequence;
    uint32_t n_tokens;
    const uint32_t *ids;
    uint32_t n_steps; /* states that were kept between its tokens */
} Item;

static inline void must(int r, const char *what)
{
    if (r) {
        fprintf(stderr, "%s: error %d\n", what, r);
        abort();
    }
}

static inline uint64_t random_mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 31);
}

/* Notes the failure; returns false. */
bool random_failed(Run *run, const char *format, ...) _printf_(2, 3);
/* A refusal that a budget explains; nothing has changed then. */
bool random_may_refuse(const Run *run, int r);
bool random_check_lengths(Run *run);

/* Everything that outputs may depend on beside the tokens. */
uint64_t random_config_key(const RandomConfig *config);
/* Begins a pass; *@ret is NULL when it was refused as it may be. */
bool random_begin(Run *run, const Item *items, uint32_t n_items, KvPass **ret);
/* On failure the pass is given up. */
bool random_queue_layers(Run *run, KvPass *pass, uint32_t n_layers, Item *items, uint32_t n_items);
/* A whole pass, and its outputs compared. */
bool random_run_items(Run *run, Item *items, uint32_t n_items);
/* Runs tokens again that going back has lost: as in the first run. */
bool random_run_again(Run *run, Sequence *sequence, const uint32_t *ids, uint32_t end);
/* Encoder output of a sequence that has none, in two passes; *@ret_there is false when memory is refused for it. */
bool random_run_cross(Run *run, Sequence *sequence, uint32_t seed, bool *ret_there);

void random_close(Sequence *sequence);
void random_drop_image(Image *image);
/* Operations. */
bool random_migrate(Run *run, const RandomOp *op);
bool random_save(Run *run, const RandomOp *op);
bool random_restore(Run *run, const RandomOp *op);
