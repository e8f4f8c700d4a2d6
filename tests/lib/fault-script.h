#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A toy model, or layers of every kind without one, and a script of all that their caches can do, run while something fails
 * (tests/lib/fault.h).  The first run, without faults, is the tape; all later ones are held against it, bit for bit.
 */

#include "cache/kv-file.h"
#include "cache/kv-migrate.h"
#include "tests/lib/fault-layers.h"
#include "tests/lib/fault.h"
#include "tests/lib/model-rig.h"

enum { SCRIPT_CACHES = 4, SCRIPT_TOKENS = 640, SCRIPT_VOCAB = 320, SCRIPT_OPS = 48 };

typedef enum ScriptVerb {
    SCRIPT_ENCODE,     /* a, which is empty: n tokens of encoder output, in two passes */
    SCRIPT_FORWARD,    /* cache a: n more tokens, in passes of at most max_rows */
    SCRIPT_DECODE,     /* one more token of each cache in the mask n, in one pass */
    SCRIPT_FORK,       /* a to b, which is free */
    SCRIPT_CHECKPOINT, /* a */
    SCRIPT_CROP,       /* a to its first n tokens */
    SCRIPT_RECORD,     /* a */
    SCRIPT_TAKE_BACK,  /* a: n tokens of what was recorded */
    SCRIPT_SELECT,     /* the first a caches become n rows: 0, 0, 1, 1 … */
    SCRIPT_REORDER,    /* the first n caches change places with their neighbours */
    SCRIPT_SAVE,       /* a to the file */
    SCRIPT_RESTORE,    /* the file to b, which is free */
    SCRIPT_MIGRATE,    /* all to the other store */
    SCRIPT_MOVE,       /* layers: all to a new store of the other policy, and the old one goes */
    SCRIPT_CLEAR,      /* a */
    SCRIPT_DROP,       /* a */
} ScriptVerb;

typedef struct ScriptOp {
    ScriptVerb verb;
    uint32_t a, b, n;
} ScriptOp;

typedef struct ScriptShape {
    const char *name, *file;
    ModelOptions options;
    uint64_t deadline_usec; /* of the device */
    KvPolicy policy, other; /* other: where everything moves to and comes back from */
    bool has_other;
    RandomConfig layers[2]; /* instead of all that, when there are any, and of options the rows hold: the second differs in its policy */
    const ScriptOp *ops;
    size_t n_ops;
    bool refuses; /* script_refuse() after each operation */
} ScriptShape;

typedef struct ScriptWorld {
    Gpu *gpu;
    Model *model;
    FaultLayers *layers; /* or this */
    KvStore *store, *other;
    uint32_t policy; /* layers: the store's */
    int fd; /* of the saved sequence */
} ScriptWorld;
#define SCRIPT_WORLD_NULL ((ScriptWorld){.fd = -1})

typedef struct ScriptTape {
    float logits[SCRIPT_OPS][SCRIPT_CACHES][SCRIPT_VOCAB];
    uint32_t lengths[SCRIPT_OPS][SCRIPT_CACHES];
    bool recorded;
} ScriptTape;

/* 0, or what it failed with; then there is nothing to close. */
int script_world_open(const ScriptShape *shape, ScriptWorld *ret, ErrorDetail *reterr);
/* Every byte of the device is given back. */
void script_world_close(ScriptWorld *world);

/* Before anything else. */
void script_init(void);
/* What runs now, in words; said when something is wrong. */
void script_say(const char *format, ...) __attribute__((__format__(__printf__, 1, 2)));
_Noreturn void script_fail(const char *file, int line, const char *format, ...) __attribute__((__format__(__printf__, 3, 4)));
#define MUST(condition)                                                                                                                 \
    do {                                                                                                                                \
        if (!(condition))                                                                                                               \
            script_fail(__FILE__, __LINE__, "%s", #condition);                                                                          \
    } while (0)

/* Tries on all caches (SCRIPT_CACHES, some NULL) what must be refused; that ends the test when it is not, or changes what can be seen. */
void script_refuse(Gpu *gpu, KvStore *store, KvCache *const *caches);

typedef struct ScriptEnd {
    bool lost;         /* the device is, and the script ended there */
    uint32_t n_failed; /* operations that failed and then succeeded */
    char said[600];    /* by the last that failed */
} ScriptEnd;
/* An error is in order only while @may_fail. */
void script_run(ScriptWorld *world, const ScriptShape *shape, ScriptTape *tape, bool may_fail, ScriptEnd *ret);
