#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random programs of cache operations: made from a seed, printed and read as text, shrunk.  A program can lose any operation and
 * still be one: operations name sequences by number, and those on a sequence that is not there do nothing.
 */

#include "cache/kv-store.h"

#include <stdio.h>

#define RANDOM_MAX_LAYERS    6
#define RANDOM_MAX_SEQUENCES 6
#define RANDOM_MAX_ARGS      6
#define RANDOM_MAX_OPS       80
#define RANDOM_MAX_ROWS      256  /* of one pass */
#define RANDOM_MAX_TOKENS    1024 /* of one sequence */
#define RANDOM_MAX_IMAGES    2
#define RANDOM_MAX_CROSS     200  /* of one encoder output */

typedef struct Random {
    uint64_t state;
} Random;

/* 0 .. n - 1. */
uint32_t random_below(Random *random, uint32_t n);

typedef enum RandomKind {
    RANDOM_FULL,
    RANDOM_SLIDING,
    RANDOM_CHUNKED,
    RANDOM_CROSS,
    RANDOM_SHARED,
    RANDOM_NONE, /* a state, or nothing */
    RANDOM_KIND_X_MAX,
} RandomKind;

typedef struct RandomLayer {
    RandomKind kind;
    uint32_t window; /* sliding, chunked */
    uint32_t source; /* shared */
    uint32_t shape;  /* which */
    uint32_t form;   /* 0: the policy's; else which + 1 */
    bool state;      /* keeps a state beside, or instead */
} RandomLayer;

typedef struct RandomConfig {
    uint32_t n_layers;
    RandomLayer layers[RANDOM_MAX_LAYERS];
    uint32_t form;   /* which */
    bool exact, calibrated;
    KvGrowth growth;
    KvHome home;
    bool only_non_sliding;
    KvTransfer transfer;
    uint32_t n_slots, tile_blocks, max_tokens, max_sequences;
    uint32_t host_budget_kib; /* 0: none */
    uint32_t device_more_kib; /* budget beyond the least; 0: none */
} RandomConfig;

typedef enum RandomOpKind {
    RANDOM_PASS,       /* arguments: sequence (made when it is not there), tokens */
    RANDOM_ABORT,      /* the same, given up after op.n layers */
    RANDOM_CROP,       /* sequence, tokens to remove; what more was lost is run again */
    RANDOM_CHECKPOINT, /* sequence */
    RANDOM_FORK,       /* from, to (replaced) */
    RANDOM_FREE,       /* sequence */
    RANDOM_CLEAR,      /* sequence */
    RANDOM_REORDER,    /* sequence, the one whose past it gets: all at once; op.n odd: by kv_caches_reorder() */
    RANDOM_SELECT,     /* sequences, and op.n rows of them: kv_caches_select(); op.seed 3 above a multiple of 4: each twice, kv_caches_repeat() */
    RANDOM_RECORD,     /* sequence */
    RANDOM_UNDO,       /* sequences, op.n tokens of each: kv_caches_crop() */
    RANDOM_SAVE,       /* sequence, image */
    RANDOM_RESTORE,    /* sequence (replaced), image */
    RANDOM_MIGRATE,    /* everything, into a store with the policy that op.seed makes */
    RANDOM_OP_X_MAX,
} RandomOpKind;

typedef struct RandomArg {
    uint32_t sequence, value;
} RandomArg;

typedef struct RandomOp {
    RandomOpKind kind;
    uint32_t n;
    uint32_t seed;   /* pass, abort: of the tokens */
    uint32_t n_args;
    RandomArg args[RANDOM_MAX_ARGS];
} RandomOp;

typedef struct RandomProgram {
    RandomConfig config;
    uint32_t n_ops;
    RandomOp ops[RANDOM_MAX_OPS];
} RandomProgram;

/* Of the layer itself, or of its source. */
KvShape random_shape(const RandomConfig *config, uint32_t layer);
uint32_t random_form_of(const RandomConfig *config, uint32_t layer); /* which */
KvForm random_form(uint32_t index);
uint32_t random_source(const RandomConfig *config, uint32_t layer);
bool random_has_cross(const RandomConfig *config);
/* The most that any layer takes and gives for a token. */
uint32_t random_max_row_values(void);

/* What can be on this device; @wide: all shapes and forms, each of which costs a compilation. */
void random_program_make(RandomProgram *program, uint64_t seed, bool unified_memory, bool wide);
/* Another policy, of the same form. */
void random_policy_vary(RandomConfig *config, uint64_t seed, bool unified_memory);

void random_program_print(const RandomProgram *program, FILE *to);
/* The next program of a file; 1 when there is none left. */
int random_program_read(RandomProgram *ret, FILE *from, ErrorDetail *reterr);

/* The smallest program that shrinking finds for which @fails still holds, within @usec. */
void random_program_shrink(RandomProgram *program, bool (*fails)(const RandomProgram *program, void *userdata), void *userdata,
                           uint64_t usec);
