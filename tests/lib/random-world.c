/* SPDX-License-Identifier: Apache-2.0 */
/* Random programs on the real cache beside the reference: operations, and a whole program. */

#include "tests/lib/random-world-internal.h"

#include <stdarg.h>
#include <string.h>

#define failed random_failed

static void *zeroed(size_t n, size_t size)
{
    void *memory = calloc(n > 0 ? n : 1, size);

    must(memory ? 0 : -ENOMEM, "calloc");
    return memory;
}

RandomWorld *random_world_new(Gpu *gpu)
{
    RandomWorld *world = zeroed(1, sizeof(*world));

    world->gpu = gpu;
    world->row_values = random_max_row_values();
    for (uint32_t l = 0; l < RANDOM_MAX_LAYERS; l++) {
        size_t n = (size_t)RANDOM_MAX_ROWS * world->row_values;

        world->qkv_memory[l] = zeroed(n, sizeof(float));
        world->out_memory[l] = zeroed(n, sizeof(float));
        must(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, n * sizeof(float), &world->qkv[l], NULL), "buffer");
        must(gpu_buffer_new(gpu, GPU_PURPOSE_OTHER, n * sizeof(float), &world->out[l], NULL), "buffer");
    }
    world->bits = zeroed(N_BITS, sizeof(Bits));
    return world;
}

RandomWorld *random_world_free(RandomWorld *world)
{
    if (!world)
        return NULL;
    for (uint32_t l = 0; l < RANDOM_MAX_LAYERS; l++) {
        (void)gpu_buffer_free(world->qkv[l]);
        (void)gpu_buffer_free(world->out[l]);
        free(world->qkv_memory[l]);
        free(world->out_memory[l]);
    }
    free(world->bits);
    free(world);
    return NULL;
}

const RandomCounts *random_world_counts(const RandomWorld *world)
{
    return &world->counts;
}

void random_world_forget(RandomWorld *world)
{
    memset(world->bits, 0, N_BITS * sizeof(Bits));
    world->n_bits = 0;
}

void random_world_seed_defect(RandomWorld *world, bool on)
{
    world->has_defect = on;
}

bool random_failed(Run *run, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(run->failure->text, sizeof(run->failure->text), format, args);
    va_end(args);
    run->failure->op = run->op;
    run->failure->kind = format;
    return false;
}

/* ---- operations ------------------------------------------------------------------------------------------------------------------------ */

void random_close(Sequence *sequence)
{
    (void)kv_cache_free(sequence->cache);
    (void)ref_sequence_free(sequence->tokens);
    *sequence = (Sequence){0};
}

/* It has been cut: what was recorded may be gone. */
static void forget_record(Sequence *sequence)
{
    sequence->recording = false;
    memset(sequence->ends, 0, sizeof(sequence->ends));
}

/* Makes it when it is not there, with encoder output where the layers need that; *@ret_there is false when memory is refused. */
static bool open_sequence(Run *run, Sequence *sequence, uint32_t seed, bool *ret_there)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    *ret_there = false;
    if (!sequence->cache) {
        r = kv_cache_new(run->store, &sequence->cache, &detail);
        if (random_may_refuse(run, r)) {
            sequence->cache = NULL;
            return true;
        }
        if (r)
            return failed(run, "no new cache: %d, %s", r, detail.text);
        sequence->tokens = ref_sequence_new(run->reference);
    }
    *ret_there = true;
    if (!random_has_cross(&run->config) || sequence->tokens->n_cross > 0)
        return true;
    if (!random_run_cross(run, sequence, seed, ret_there))
        return false;
    if (!*ret_there)
        random_close(sequence);
    return true;
}

/* The items of an operation with their ids in @ids; false after a failure.  *@ret_n is 0 when there is nothing to do. */
static bool make_items(Run *run, const RandomOp *op, uint32_t *ids, Item *items, uint32_t *ret_n)
{
    uint32_t row = 0, n = 0;

    *ret_n = 0;
    for (uint32_t a = 0; a < op->n_args; a++) {
        Sequence *sequence = &run->sequences[op->args[a].sequence];
        bool there;

        if (op->args[a].value == 0 || row + op->args[a].value > RANDOM_MAX_ROWS)
            continue;
        if (!open_sequence(run, sequence, op->seed, &there))
            return false;
        if (!there)
            continue;
        items[n++] = (Item){.sequence = sequence, .n_tokens = op->args[a].value, .ids = ids + row};
        for (uint32_t t = 0; t < op->args[a].value; t++, row++)
            ids[row] = (uint32_t)(random_mix(random_mix(op->seed * 64ull + op->args[a].sequence, 1), sequence->tokens->n_tokens + t) & 0xffffff);
    }
    *ret_n = n;
    return true;
}

static bool op_pass(Run *run, const RandomOp *op)
{
    uint32_t ids[RANDOM_MAX_ROWS], n;
    Item items[RANDOM_MAX_ARGS];

    if (!make_items(run, op, ids, items, &n))
        return false;
    return n == 0 || random_run_items(run, items, n);
}

/* What is left of each after a pass was given up; then what was lost, again. */
static bool recover(Run *run, const Item *items, uint32_t n_items)
{
    uint32_t ids[RANDOM_MAX_ARGS][RANDOM_MAX_TOKENS], ends[RANDOM_MAX_ARGS];
    bool good = true;

    for (uint32_t i = 0; i < n_items && good; i++) {
        RefSequence *tokens = items[i].sequence->tokens;
        uint32_t length = kv_cache_length(items[i].sequence->cache);

        ends[i] = tokens->n_tokens;
        memcpy(ids[i], tokens->ids, sizeof(ids[i]));
        if (length < ends[i])
            forget_record(items[i].sequence);
        if (length > ends[i])
            return failed(run, "a pass that was given up left %u tokens of %u", length, ends[i]);
        ref_sequence_cut(tokens, length);
    }
    for (uint32_t i = 0; i < n_items && good; i++)
        good = random_run_again(run, items[i].sequence, ids[i], ends[i]);
    return good;
}

static bool op_abort(Run *run, const RandomOp *op)
{
    uint32_t ids[RANDOM_MAX_ROWS], n;
    Item items[RANDOM_MAX_ARGS];
    KvPass *pass;

    if (!make_items(run, op, ids, items, &n))
        return false;
    if (n == 0)
        return true;
    if (!random_begin(run, items, n, &pass))
        return false;
    if (!pass)
        return true;
    if (!random_queue_layers(run, pass, MIN(op->n, run->config.n_layers), items, n))
        return false;
    (void)kv_pass_abort(pass);
    if (op->n == 0 && !random_check_lengths(run))
        return false;
    return recover(run, items, n);
}

static bool op_crop(Run *run, const RandomOp *op)
{
    Sequence *sequence = &run->sequences[op->args[0].sequence];
    uint32_t keep, announced, length = 0, ids[RANDOM_MAX_TOKENS];
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    if (!sequence->cache)
        return true;
    keep = sequence->tokens->n_tokens - MIN(op->args[0].value, sequence->tokens->n_tokens);
    memcpy(ids, sequence->tokens->ids, sizeof(ids));
    announced = kv_cache_crop_length(sequence->cache, keep);
    r = kv_cache_crop(sequence->cache, keep, &length, &detail);
    if (random_may_refuse(run, r))
        return random_check_lengths(run);
    if (r)
        return failed(run, "crop to %u: %d, %s", keep, r, detail.text);
    if (length > keep || length != kv_cache_length(sequence->cache))
        return failed(run, "crop to %u left %u, says %u", keep, kv_cache_length(sequence->cache), length);
    if (length != announced)
        return failed(run, "crop to %u left %u, %u was announced", keep, length, announced);
    forget_record(sequence);
    sequence->is_cropped_fork = sequence->is_fork && op->args[0].value > 0;
    ref_sequence_cut(sequence->tokens, length);
    return random_run_again(run, sequence, ids, keep);
}

static bool op_checkpoint(Run *run, const RandomOp *op)
{
    Sequence *sequence = &run->sequences[op->args[0].sequence];
    int r = sequence->cache ? kv_cache_checkpoint(sequence->cache) : 0;

    return r == 0 || random_may_refuse(run, r) || failed(run, "checkpoint: %d", r);
}

/* A fork of @from in *@ret, or nothing there when memory is refused. */
static bool fork_sequence(Run *run, const Sequence *from, Sequence *ret)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r = kv_cache_fork(from->cache, &ret->cache, &detail);

    if (random_may_refuse(run, r)) {
        *ret = (Sequence){0};
        return true;
    }
    if (r)
        return failed(run, "fork: %d, %s", r, detail.text);
    ret->tokens = ref_sequence_copy(from->tokens);
    ret->is_fork = true;
    return true;
}

static bool op_fork(Run *run, const RandomOp *op)
{
    Sequence *from = &run->sequences[op->args[0].sequence], *to = &run->sequences[op->args[0].value % RANDOM_MAX_SEQUENCES];

    if (from == to || !from->cache)
        return true;
    random_close(to);
    return fork_sequence(run, from, to) && random_check_lengths(run);
}

static bool op_reorder(Run *run, const RandomOp *op)
{
    Sequence made[RANDOM_MAX_ARGS] = {{0}};
    bool good = true, all = true;

    for (uint32_t a = 0; a < op->n_args; a++)
        if (!run->sequences[op->args[a].value % RANDOM_MAX_SEQUENCES].cache)
            return true;
    for (uint32_t a = 0; a < op->n_args && good && all; a++) {
        good = fork_sequence(run, &run->sequences[op->args[a].value % RANDOM_MAX_SEQUENCES], &made[a]);
        all = made[a].cache != NULL;
    }
    for (uint32_t a = 0; a < op->n_args; a++) {
        if (!good || !all) {
            random_close(&made[a]);
            continue;
        }
        random_close(&run->sequences[op->args[a].sequence]);
        run->sequences[op->args[a].sequence] = made[a];
    }
    return good && random_check_lengths(run);
}

/* Caches of the operation's sequences, which must all be there and differ; else 0. */
static uint32_t gather(const Run *run, const RandomOp *op, KvCache **caches, RefSequence **tokens)
{
    for (uint32_t a = 0; a < op->n_args; a++) {
        const Sequence *sequence = &run->sequences[op->args[a].sequence];

        for (uint32_t b = 0; b < a; b++)
            if (op->args[b].sequence == op->args[a].sequence)
                return 0;
        if (!sequence->cache)
            return 0;
        caches[a] = sequence->cache;
        tokens[a] = sequence->tokens;
    }
    return op->n_args;
}

/* Puts the first @n_rows caches in the sequences' places, and further ones in free places. */
static void scatter(Run *run, const RandomOp *op, KvCache **caches, RefSequence *const *before, const uint32_t *rows, uint32_t n_rows)
{
    RefSequence *tokens[RANDOM_MAX_ARGS];
    uint32_t place = 0;

    for (uint32_t r = 0; r < n_rows; r++)
        tokens[r] = ref_sequence_copy(before[rows[r]]);
    for (uint32_t a = 0; a < op->n_args; a++) {
        (void)ref_sequence_free(before[a]);
        run->sequences[op->args[a].sequence] = (Sequence){0};
    }
    for (uint32_t r = 0; r < n_rows; r++) {
        Sequence made = {.cache = caches[r], .tokens = tokens[r]};

        if (r < op->n_args) {
            run->sequences[op->args[r].sequence] = made;
            continue;
        }
        while (place < RANDOM_MAX_SEQUENCES && run->sequences[place].cache)
            place++;
        if (place < RANDOM_MAX_SEQUENCES)
            run->sequences[place] = made;
        else
            random_close(&made);
    }
}

static bool op_rows(Run *run, const RandomOp *op, bool select)
{
    KvCache *caches[RANDOM_MAX_ARGS] = {NULL};
    RefSequence *tokens[RANDOM_MAX_ARGS] = {NULL};
    uint32_t n = gather(run, op, caches, tokens), n_rows = select ? MIN(op->n, (uint32_t)RANDOM_MAX_ARGS) : n, rows[RANDOM_MAX_ARGS];
    bool repeat = select && op->seed % 4 == 3 && 2 * n <= RANDOM_MAX_ARGS;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    n_rows = repeat ? 2 * n : n_rows;
    if (n == 0 || n_rows == 0)
        return true;
    for (uint32_t i = 0; i < n_rows; i++)
        rows[i] = repeat ? i / 2 : op->args[i % n].value % n;
    if (repeat)
        r = kv_caches_repeat(caches, n, 2, &detail);
    else
        r = select ? kv_caches_select(caches, n, rows, n_rows, &detail) : kv_caches_reorder(caches, n, rows, &detail);
    if (random_may_refuse(run, r))
        return random_check_lengths(run);
    if (r)
        return failed(run, "%u rows of %u: %d, %s", n_rows, n, r, detail.text);
    scatter(run, op, caches, tokens, rows, n_rows);
    return random_check_lengths(run);
}

static bool op_record(Run *run, const RandomOp *op)
{
    Sequence *sequence = &run->sequences[op->args[0].sequence];
    int r = sequence->cache ? kv_cache_record(sequence->cache, true) : 0;

    if (r)
        return failed(run, "recording: %d", r);
    if (!sequence->cache || sequence->recording)
        return true;
    forget_record(sequence);
    sequence->recording = true;
    sequence->record_from = sequence->tokens->n_tokens;
    sequence->ends[sequence->record_from] = 1;
    return true;
}

/* Whether all of them must be able to take @n tokens back, all the way. */
static bool must_undo(const Run *run, const RandomOp *op, uint32_t n)
{
    for (uint32_t a = 0; a < op->n_args; a++) {
        const Sequence *sequence = &run->sequences[op->args[a].sequence];
        uint32_t keep = sequence->tokens->n_tokens - n;

        if (!sequence->recording || keep < sequence->record_from || !sequence->ends[keep])
            return false;
    }
    return run->config.host_budget_kib == 0;
}

static bool settle_undo(Run *run, const RandomOp *op, uint32_t n)
{
    for (uint32_t a = 0; a < op->n_args; a++) {
        Sequence *sequence = &run->sequences[op->args[a].sequence];
        uint32_t keep = sequence->tokens->n_tokens - n;

        ref_sequence_cut(sequence->tokens, keep);
        memset(sequence->ends, 0, sizeof(sequence->ends));
        sequence->record_from = keep;
        sequence->ends[keep] = 1;
        sequence->recording = sequence->recording && keep > 0;
    }
    return random_check_lengths(run);
}

/* Exactly so many tokens from all, or from none with the reason. */
static bool op_undo(Run *run, const RandomOp *op)
{
    KvCache *caches[RANDOM_MAX_ARGS];
    RefSequence *tokens[RANDOM_MAX_ARGS];
    uint32_t n = gather(run, op, caches, tokens);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    bool enough = true, announced = true, must, refused;
    int r;

    if (n == 0)
        return true;
    for (uint32_t i = 0; i < n; i++)
        enough = enough && tokens[i]->n_tokens >= op->n;
    must = enough && must_undo(run, op, op->n);
    for (uint32_t i = 0; i < n && enough; i++)
        announced = announced && kv_cache_crop_length(caches[i], tokens[i]->n_tokens - op->n) == tokens[i]->n_tokens - op->n;
    r = kv_caches_crop(caches, n, -(int64_t)op->n, &detail);
    refused = (r == KV_E_ROLLBACK && !(enough && announced)) || (r == -EINVAL && !enough) || random_may_refuse(run, r);
    if (r ? must || !refused : !enough || !announced)
        return failed(run, "taking %u tokens back: %d, %s", op->n, r, detail.text);
    if (r) {
        run->world->counts.not_undone++;
        return detail.text[0] ? random_check_lengths(run) : failed(run, "refused without a word");
    }
    run->world->counts.undone++;
    return settle_undo(run, op, op->n);
}

static bool op_clear(Run *run, const RandomOp *op)
{
    Sequence *sequence = &run->sequences[op->args[0].sequence];

    if (!sequence->cache)
        return true;
    forget_record(sequence);
    (void)ref_sequence_free(sequence->tokens); /* encoder output goes too */
    sequence->tokens = ref_sequence_new(run->reference);
    return kv_cache_clear(sequence->cache) == 0 ? random_check_lengths(run) : failed(run, "clear is refused");
}

static bool run_op(Run *run, const RandomOp *op)
{
    if (op->n_args == 0)
        return true;
    switch (op->kind) {
    case RANDOM_PASS:
        return op_pass(run, op);
    case RANDOM_ABORT:
        return op_abort(run, op);
    case RANDOM_CROP:
        return op_crop(run, op);
    case RANDOM_CHECKPOINT:
        return op_checkpoint(run, op);
    case RANDOM_FORK:
        return op_fork(run, op);
    case RANDOM_REORDER:
        return op->n % 2 ? op_rows(run, op, false) : op_reorder(run, op);
    case RANDOM_SELECT:
        return op_rows(run, op, true);
    case RANDOM_RECORD:
        return op_record(run, op);
    case RANDOM_UNDO:
        return op_undo(run, op);
    case RANDOM_MIGRATE:
        return random_migrate(run, op);
    case RANDOM_SAVE:
        return random_save(run, op);
    case RANDOM_RESTORE:
        return random_restore(run, op);
    case RANDOM_CLEAR:
        return op_clear(run, op);
    case RANDOM_FREE:
        random_close(&run->sequences[op->args[0].sequence]);
        return random_check_lengths(run);
    case RANDOM_OP_X_MAX:
        break;
    }
    return true;
}

/* ---- the whole -------------------------------------------------------------------------------------------------------------------------- */

bool random_world_run(RandomWorld *world, const RandomProgram *program, RandomFailure *ret)
{
    Run run = {.world = world, .config = program->config, .config_key = random_config_key(&program->config), .failure = ret};
    uint64_t before[GPU_PURPOSE_X_MAX], after[GPU_PURPOSE_X_MAX], total_before, total_after;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    bool good = true;
    int r;

    *ret = (RandomFailure){0};
    gpu_memory_used(world->gpu, before, &total_before);
    run.reference = reference_new(&program->config);
    run.states = zeroed((size_t)RANDOM_MAX_LAYERS * RANDOM_MAX_ARGS, sizeof(States));
    r = random_store_new(world->gpu, &run.config, run.reference, &run.store, &detail);
    if (r == -ENOTSUP) {
        world->counts.unsupported++; /* refused by name */
    } else if (r) {
        good = failed(&run, "no store: %d, %s", r, detail.text);
    }
    for (; good && run.store && run.op < program->n_ops; run.op++, world->counts.operations++)
        if (!run_op(&run, &program->ops[run.op])) {
            good = false;
            break;
        }
    for (uint32_t s = 0; s < RANDOM_MAX_SEQUENCES; s++)
        random_close(&run.sequences[s]);
    for (uint32_t i = 0; i < RANDOM_MAX_IMAGES; i++)
        random_drop_image(&run.images[i]);
    (void)kv_store_free(run.store);
    (void)reference_free(run.reference);
    free(run.states);
    gpu_memory_used(world->gpu, after, &total_after);
    if (good && total_after != total_before)
        good = failed(&run, "the store leaves %lld bytes of device memory", (long long)(total_after - total_before));
    world->counts.programs++;
    return good;
}
