/* SPDX-License-Identifier: Apache-2.0 */
/* A toy model and a script, run while something fails. */

#include "tests/lib/fault-script.h"
#include "tests/lib/sim-rig.h"

#include <execinfo.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>

/* ---- saying -------------------------------------------------------------------------------------------------------- */

static char now[512];

#ifndef __SANITIZE_ADDRESS__ /* which tells more */
static void crashed(int number)
{
    void *frames[32];

    (void)!write(STDERR_FILENO, now, strlen(now));
    (void)!write(STDERR_FILENO, ": crashed\n", 10);
    backtrace_symbols_fd(frames, backtrace(frames, 32), STDERR_FILENO);
    (void)signal(number, SIG_DFL);
    (void)raise(number);
}
#endif

void script_init(void)
{
    fault_init();
#ifndef __SANITIZE_ADDRESS__
    (void)signal(SIGSEGV, crashed);
    (void)signal(SIGBUS, crashed);
    (void)signal(SIGABRT, crashed);
#endif
}

void script_say(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(now, sizeof(now), format, arguments);
    va_end(arguments);
    if (getenv("LEAT_FAULT_VERBOSE")) {
        (void)fputs(now, stdout);
        (void)fputc('\n', stdout);
        (void)fflush(stdout);
    }
}

void script_fail(const char *file, int line, const char *format, ...)
{
    char text[1200];
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    (void)fprintf(stderr, "while %s:\n", now);
    sim_rig_fail(file, line, text);
}

/* ---- operations: each may be tried again after it has failed ------------------------------------------------------- */

typedef struct Run {
    ScriptWorld *world;
    const ScriptShape *shape;
    const ScriptOp *op;
    uint32_t index;
    KvCache *caches[SCRIPT_CACHES];
    int32_t ids[SCRIPT_CACHES][SCRIPT_TOKENS];
    uint32_t n[SCRIPT_CACHES]; /* tokens it should have; it may have fewer after a crop */
    float logits[SCRIPT_CACHES][SCRIPT_VOCAB];
    ErrorDetail detail;
} Run;

static const uint8_t digest[KV_IMAGE_DIGEST] = {3, 1, 4};

/* The tokens from n[a] on: the same each time that this operation is tried. */
static void plan_ids(Run *run, uint32_t a, uint32_t n)
{
    MUST(run->n[a] + n <= SCRIPT_TOKENS);
    rig_random_ids(100 * run->index + a + 1, SCRIPT_VOCAB, run->ids[a] + run->n[a], n);
}

static int run_pass(Run *run, const ModelItem *items, uint32_t n_items, float *logits)
{
    FaultItem with_ids[SCRIPT_CACHES];

    if (run->world->model)
        return model_forward(run->world->model, run->world->store, items, n_items, logits, &run->detail);
    for (uint32_t i = 0; i < n_items; i++)
        with_ids[i] = (FaultItem){.cache = items[i].cache, .ids = items[i].tokens - kv_cache_length(items[i].cache), .n_tokens = items[i].n_tokens};
    return fault_layers_forward(run->world->layers, run->world->store, with_ids, n_items, logits, SCRIPT_VOCAB, &run->detail);
}

/* A pass; when it fails the lengths are as they were, or, of more than one token, shorter. */
static int forward(Run *run, const ModelItem *items, uint32_t n_items, float *logits)
{
    uint32_t before[SCRIPT_CACHES];
    int r;

    for (uint32_t i = 0; i < n_items; i++)
        before[i] = kv_cache_length(items[i].cache);
    r = run_pass(run, items, n_items, logits);
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t after = kv_cache_length(items[i].cache);

        if (r == 0)
            MUST(after == before[i] + items[i].n_tokens);
        else if (!gpu_is_lost(run->world->gpu))
            MUST(after == before[i] || (after < before[i] && items[i].n_tokens > 1));
    }
    return r;
}

/* Up to @target tokens, the logits of the last. */
static int forward_to(Run *run, uint32_t a, uint32_t target)
{
    uint32_t max_rows = run->shape->options.max_rows;

    for (uint32_t done; (done = kv_cache_length(run->caches[a])) < target;) {
        ModelItem item = {.cache = run->caches[a], .tokens = run->ids[a] + done, .n_tokens = MIN(target - done, max_rows)};
        int r;

        item.more = done + item.n_tokens < target;
        r = forward(run, &item, 1, item.more ? NULL : run->logits[a]);
        if (r)
            return r;
    }
    return 0;
}

static int op_encode(Run *run)
{
    uint32_t a = run->op->a, n = run->op->n;

    for (uint32_t done; (done = kv_cache_cross_length(run->caches[a])) < n;) {
        FaultItem item = {.cache = run->caches[a], .n_tokens = done == 0 ? (n + 1) / 2 : n - done, .encoder = run->index};
        int r = fault_layers_encode(run->world->layers, run->world->store, &item, &run->detail);

        if (r)
            return r;
        MUST(kv_cache_cross_length(run->caches[a]) == done + item.n_tokens);
    }
    return 0;
}

static int op_forward(Run *run)
{
    uint32_t a = run->op->a, n = run->op->n;
    int r;

    plan_ids(run, a, n);
    r = forward_to(run, a, run->n[a] + n);
    if (r == 0)
        run->n[a] += n;
    return r;
}

static int op_decode(Run *run)
{
    float logits[SCRIPT_CACHES][SCRIPT_VOCAB];
    ModelItem items[SCRIPT_CACHES];
    uint32_t n_items = 0;
    int r = 0;

    for (uint32_t a = 0; a < SCRIPT_CACHES && !r; a++)
        if (run->op->n >> a & 1) {
            plan_ids(run, a, 1);
            r = forward_to(run, a, run->n[a]); /* what a crop has taken beyond what was asked */
            items[n_items++] = (ModelItem){.cache = run->caches[a], .tokens = run->ids[a] + run->n[a], .n_tokens = 1};
        }
    if (!r)
        r = forward(run, items, n_items, logits[0]);
    for (uint32_t a = 0, i = 0; a < SCRIPT_CACHES && !r; a++)
        if (run->op->n >> a & 1) {
            memcpy(run->logits[a], logits[i++], sizeof(logits[0]));
            run->n[a]++;
        }
    return r;
}

static void copy_plan(Run *run, uint32_t to, const Run *from, uint32_t a)
{
    run->n[to] = from->n[a];
    memcpy(run->ids[to], from->ids[a], sizeof(run->ids[to]));
}

static int op_fork(Run *run)
{
    int r = kv_cache_fork(run->caches[run->op->a], &run->caches[run->op->b], &run->detail);

    if (r == 0)
        copy_plan(run, run->op->b, run, run->op->a);
    return r;
}

static int op_crop(Run *run)
{
    uint32_t length, expected = kv_cache_crop_length(run->caches[run->op->a], run->op->n);
    int r = kv_cache_crop(run->caches[run->op->a], run->op->n, &length, &run->detail);

    if (r)
        return r;
    MUST(length == expected && length <= run->op->n && length == kv_cache_length(run->caches[run->op->a]));
    run->n[run->op->a] = run->op->n;
    return 0;
}

static int op_take_back(Run *run)
{
    uint32_t a = run->op->a;
    int r = kv_caches_crop(&run->caches[a], 1, -(int64_t)run->op->n, &run->detail);

    if (r == 0)
        run->n[a] -= run->op->n;
    return r;
}

static int take_rows(Run *run, const uint32_t *rows, uint32_t n_rows, int r)
{
    static Run old;

    if (r)
        return r;
    old = *run;
    for (uint32_t i = 0; i < n_rows; i++)
        copy_plan(run, i, &old, rows[i]);
    return 0;
}

static int op_select(Run *run)
{
    uint32_t rows[SCRIPT_CACHES];

    for (uint32_t i = 0; i < run->op->n; i++)
        rows[i] = i / 2;
    return take_rows(run, rows, run->op->n, kv_caches_select(run->caches, run->op->a, rows, run->op->n, &run->detail));
}

static int op_reorder(Run *run)
{
    uint32_t rows[SCRIPT_CACHES];

    for (uint32_t i = 0; i < run->op->n; i++)
        rows[i] = i ^ 1;
    return take_rows(run, rows, run->op->n, kv_caches_reorder(run->caches, run->op->n, rows, &run->detail));
}

static int op_save(Run *run)
{
    _cleanup_(kv_save_endp) KvSave *save = NULL;
    int r = kv_save_begin(run->caches[run->op->a], digest, "ids", 3, &save, &run->detail);

    if (r)
        return r;
    MUST(lseek(run->world->fd, 0, SEEK_SET) == 0 && ftruncate(run->world->fd, 0) == 0);
    r = kv_save_write(save, run->world->fd);
    return r ? error_detail_set(&run->detail, r, "kv_save_write: %s", strerror(-r)) : 0;
}

static int op_restore(Run *run)
{
    KvImageFacts facts = {.layout = kv_store_layout(run->world->store)};
    _cleanup_(kv_image_freep) KvImage *image = NULL;
    int r;

    memcpy(facts.model, digest, sizeof(digest));
    r = kv_image_open(run->world->fd, "saved", &facts, true, &image, &run->detail);
    if (!r)
        r = kv_restore(run->world->store, image, &run->caches[run->op->b], &run->detail);
    if (!r)
        copy_plan(run, run->op->b, run, run->op->a);
    return r;
}

static int op_migrate(Run *run)
{
    ScriptWorld *world = run->world;
    int r = kv_store_migrate(world->store, world->other, false, &run->detail);

    if (r == 0) {
        KvStore *from = world->store;

        world->store = world->other;
        world->other = from;
    }
    return r;
}

static int op_move(Run *run)
{
    ScriptWorld *world = run->world;
    uint32_t policy = 1 - world->policy;
    KvStore *to = NULL;
    int r = fault_layers_store(world->layers, &run->shape->layers[policy], &to, &run->detail);

    if (!r)
        r = kv_store_migrate(world->store, to, false, &run->detail);
    if (r) {
        (void)kv_store_free(to);
        return r;
    }
    (void)kv_store_free(world->store);
    world->store = to;
    world->policy = policy;
    return 0;
}

static int perform(Run *run)
{
    KvCache **cache = &run->caches[run->op->a];

    run->detail = ERROR_DETAIL_NULL;
    switch (run->op->verb) {
    case SCRIPT_ENCODE:
        return op_encode(run);
    case SCRIPT_FORWARD:
        return op_forward(run);
    case SCRIPT_DECODE:
        return op_decode(run);
    case SCRIPT_FORK:
        return op_fork(run);
    case SCRIPT_CHECKPOINT:
        return kv_cache_checkpoint(*cache);
    case SCRIPT_CROP:
        return op_crop(run);
    case SCRIPT_RECORD:
        return kv_cache_record(*cache, true);
    case SCRIPT_TAKE_BACK:
        return op_take_back(run);
    case SCRIPT_SELECT:
        return op_select(run);
    case SCRIPT_REORDER:
        return op_reorder(run);
    case SCRIPT_SAVE:
        return op_save(run);
    case SCRIPT_RESTORE:
        return op_restore(run);
    case SCRIPT_MIGRATE:
        return op_migrate(run);
    case SCRIPT_MOVE:
        return op_move(run);
    case SCRIPT_CLEAR:
        run->n[run->op->a] = 0;
        return kv_cache_clear(*cache);
    case SCRIPT_DROP:
        run->n[run->op->a] = 0;
        *cache = kv_cache_free(*cache);
        return 0;
    }
    return -EINVAL;
}

/* ---- running ------------------------------------------------------------------------------------------------------- */

static void lengths_of(const Run *run, uint32_t ret[SCRIPT_CACHES])
{
    for (uint32_t a = 0; a < SCRIPT_CACHES; a++)
        ret[a] = run->caches[a] ? kv_cache_length(run->caches[a]) : 0;
}

static bool has_detail(ScriptVerb verb)
{
    return verb != SCRIPT_CHECKPOINT && verb != SCRIPT_RECORD && verb != SCRIPT_CLEAR;
}

/* What holds after an operation has failed with @r; whether the device is lost. */
static bool check_failure(Run *run, int r, const uint32_t *before, bool may_fail, ScriptEnd *end)
{
    uint32_t after[SCRIPT_CACHES];

    (void)snprintf(end->said, sizeof(end->said), "operation %u fails with %d: %s", run->index, r, run->detail.text);
    if (!may_fail)
        script_fail(__FILE__, __LINE__, "%s", end->said);
    gpu_explain(run->world->gpu, &run->detail); /* as the engine does */
    if (r > 0 && r != MODEL_E_HOST_MEMORY && r != KV_E_HOST_MEMORY && has_detail(run->op->verb) && !run->detail.text[0])
        script_fail(__FILE__, __LINE__, "operation %u fails with %d and does not say why", run->index, r);
    if (gpu_is_lost(run->world->gpu))
        return true;
    lengths_of(run, after);
    if (run->op->verb != SCRIPT_FORWARD && run->op->verb != SCRIPT_DECODE)
        MUST(memcmp(before, after, sizeof(after)) == 0);
    return false;
}

/* Against the tape, or onto it. */
static void check_success(const Run *run, ScriptTape *tape)
{
    uint32_t lengths[SCRIPT_CACHES];

    lengths_of(run, lengths);
    if (!tape->recorded) {
        memcpy(tape->logits[run->index], run->logits, sizeof(run->logits));
        memcpy(tape->lengths[run->index], lengths, sizeof(lengths));
        return;
    }
    if (run->op->verb != SCRIPT_CROP)
        for (uint32_t a = 0; a < SCRIPT_CACHES; a++)
            if (lengths[a] != tape->lengths[run->index][a])
                script_fail(__FILE__, __LINE__, "operation %u: cache %u has %u tokens, not %u", run->index, a, lengths[a],
                            tape->lengths[run->index][a]);
    if (memcmp(tape->logits[run->index], run->logits, sizeof(run->logits)) != 0)
        script_fail(__FILE__, __LINE__, "operation %u: other logits", run->index);
}

void script_run(ScriptWorld *world, const ScriptShape *shape, ScriptTape *tape, bool may_fail, ScriptEnd *ret)
{
    static Run run;
    uint32_t before[SCRIPT_CACHES];

    run = (Run){.world = world, .shape = shape};
    *ret = (ScriptEnd){.lost = false};
    MUST(shape->n_ops <= SCRIPT_OPS);
    for (uint32_t a = 0; a < 1; a++)
        for (int r; (r = kv_cache_new(world->store, &run.caches[a], &run.detail)) != 0;)
            MUST(may_fail && ret->n_failed++ == 0);
    for (run.index = 0; run.index < shape->n_ops && !ret->lost; run.index++) {
        int r;

        run.op = &shape->ops[run.index];
        lengths_of(&run, before);
        r = perform(&run);
        if (r) {
            ret->n_failed++;
            ret->lost = check_failure(&run, r, before, may_fail, ret);
            if (!ret->lost && (r = perform(&run)) != 0)
                script_fail(__FILE__, __LINE__, "%s; once more: %d: %s", ret->said, r, run.detail.text);
        }
        if (!ret->lost)
            check_success(&run, tape);
        if (!ret->lost && shape->refuses)
            script_refuse(world->gpu, world->store, run.caches);
    }
    /* What befell the device after the last operation is known now, not when the world is closed. */
    if (!ret->lost && gpu_drain(world->gpu, &run.detail)) {
        ret->n_failed++;
        ret->lost = check_failure(&run, GPU_E_LOST, before, may_fail, ret);
    }
    for (uint32_t a = 0; a < SCRIPT_CACHES; a++)
        run.caches[a] = kv_cache_free(run.caches[a]);
    tape->recorded = true;
}
