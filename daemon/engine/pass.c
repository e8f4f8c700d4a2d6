/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One pass over the weights: the scheduler's choice becomes rows, the rows' results go to their jobs.
 *
 * A pass that fails for want of memory takes caches from idle sessions, then, when it is the device's, steps down the ladder (ladder.c)
 * and is planned anew, then leaves jobs out of the pass (they wait until another ends), and fails a job only when it is alone.  A pass that fails because of the device fails all running jobs.
 */

#include "daemon/engine/engine-internal.h"
#include "daemon/engine/evaluate.h"

#include <string.h>

/* Tokens of a long prompt between two places that a later edit can go on from. */
#define PASS_CHECKPOINT_TOKENS 1024

typedef struct Pass {
    Job *jobs[ENGINE_MAX_ACTIVE];
    ModelItem items[ENGINE_MAX_ACTIVE];
    uint32_t n;
    bool any_logits;
} Pass;

/* ---- choice ---------------------------------------------------------------------------------------------------------------- */

static uint32_t rows_left(const Job *job)
{
    return (uint32_t)job->session->ids.n - session_cached(job->session);
}

static SchedulerActive describe(const Job *job, uint32_t fallback_group)
{
    StoreSlot *store = slot_find_store(job->slot, job_policy(job));
    uint32_t n_rows = job->batch ? 1 : rows_left(job);

    return (SchedulerActive){
        .id = job->id,
        .priority = job->priority,
        .group = store ? store->group : UINT32_MAX - fallback_group,
        .n_rows = job->kind == JOB_EVALUATE ? MIN(n_rows, (uint32_t)EVALUATE_ROWS) : n_rows,
        .prefill = job->batch ? !job->first_usec : job->n_output == 0 || n_rows > 1,
        .runnable = !job->reader_paused && !job->memory_blocked,
        .exclusive = job->kind == JOB_EVALUATE || job->batch,
        .last_served = job->last_served,
        .limits = {slot_chunk_rows(job->slot), job->slot->max_items},
    };
}

/* Tells who stands still and who goes on. */
static void show_states(Engine *engine, Job *const *jobs, const SchedulerActive *active, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool paused = jobs[i]->reader_paused || scheduler_yields(active, n, jobs[i]->priority);

        job_set_state(jobs[i], engine->mailbox,
                      paused              ? ENGINE_JOB_PAUSED
                      : active[i].prefill ? ENGINE_JOB_PREFILL
                                          : ENGINE_JOB_DECODING);
    }
}

static size_t choose(Engine *engine, Job **ret_jobs, SchedulerPick *ret_picks)
{
    SchedulerActive active[ENGINE_MAX_ACTIVE];
    size_t n = 0;

    for (Job *job = engine->jobs; job && n < ENGINE_MAX_ACTIVE; job = job->next)
        if (job->active) {
            active[n] = describe(job, (uint32_t)n);
            ret_jobs[n++] = job;
        }
    show_states(engine, ret_jobs, active, n);
    return scheduler_pick(active, n, ret_picks);
}

/* ---- measuring ------------------------------------------------------------------------------------------------------------- */

/* Copies and kernels are attributed to a job only while it is the only one. */
static void measure(Engine *engine, Job *job)
{
    uint32_t n_active = 0;

    for (Job *other = engine->jobs; other; other = other->next)
        n_active += other->active;
    if (n_active > 1) {
        for (Job *other = engine->jobs; other; other = other->next)
            generate_measure_stop(engine, other);
    } else if (engine->overlap_job != job->id && gpu_overlap_begin(engine->gpu) == 0) {
        engine->overlap_job = job->id;
    }
}

/* ---- one pass -------------------------------------------------------------------------------------------------------------- */

static void leave_out(Pass *pass, uint32_t index)
{
    Job *job = pass->jobs[index];

    session_drop_cache(job->session);
    job->memory_blocked = true;
    job->in_pass = false;
    pass->n--;
    memmove(&pass->jobs[index], &pass->jobs[index + 1], (pass->n - index) * sizeof(pass->jobs[0]));
    memmove(&pass->items[index], &pass->items[index + 1], (pass->n - index) * sizeof(pass->items[0]));
}

static void add_item(Pass *pass, Job *job, uint32_t n_rows)
{
    uint32_t cached = session_cached(job->session), to_border = PASS_CHECKPOINT_TOKENS - cached % PASS_CHECKPOINT_TOKENS;

    if (cached < job->shared_tokens)
        to_border = MIN(to_border, job->shared_tokens - cached);
    if (cached < job->fork_tokens)
        to_border = MIN(to_border, job->fork_tokens - cached);
    n_rows = MIN(n_rows, to_border);
    pass->items[pass->n] = (ModelItem){
        .cache = job->session->cache,
        .tokens = job->session->ids.ids + cached,
        .n_tokens = n_rows,
        .all_logits = job->kind == JOB_EVALUATE,
        .more = cached + n_rows < job->session->ids.n,
    };
    pass->jobs[pass->n++] = job;
    pass->any_logits |= job->kind == JOB_EVALUATE || cached + n_rows == job->session->ids.n;
}

/* Who waits for memory when not all can go on: the lowest class, of these the last to come. */
static uint32_t weakest(const Pass *pass)
{
    uint32_t weakest = 0;

    for (uint32_t i = 1; i < pass->n; i++)
        if (pass->jobs[i]->priority > pass->jobs[weakest]->priority ||
            (pass->jobs[i]->priority == pass->jobs[weakest]->priority && pass->jobs[i]->id > pass->jobs[weakest]->id))
            weakest = i;
    return weakest;
}

/* The picked jobs with caches.  True when one of them ended or had to stand back: then the choice is made anew. */
static bool gather(Engine *engine, Job *const *jobs, const SchedulerPick *picks, size_t n_picks, Pass *pass)
{
    uint64_t serial = engine->ladder_serial;

    for (size_t i = 0; i < n_picks; i++)
        jobs[picks[i].index]->in_pass = true;
    for (size_t i = 0; i < n_picks; i++) {
        Job *job = jobs[picks[i].index];
        ErrorDetail detail = ERROR_DETAIL_NULL;
        EngineResult result = sessions_warm(engine, job, &detail);

        if (result == ENGINE_RESULT_DONE && engine->ladder_serial == serial) {
            add_item(pass, job, picks[i].n_rows);
            continue;
        }
        if (result == ENGINE_RESULT_DONE)
            return true; /* those before it have lost their caches */
        if (result == ENGINE_RESULT_DEVICE_LOST)
            device_abandon(engine, &detail);
        else if ((result == ENGINE_RESULT_OUT_OF_DEVICE_MEMORY || result == ENGINE_RESULT_OUT_OF_MEMORY) &&
                 sessions_others_hold_memory(engine, job))
            job->memory_blocked = true;
        else
            jobs_finish(engine, job, result, &detail);
        return true;
    }
    return false;
}

/* Where the caches are now: a pass that failed half-way may have taken one back a little. */
static void refresh_items(Pass *pass)
{
    Pass old = *pass;

    pass->n = 0;
    pass->any_logits = false;
    for (uint32_t i = 0; i < old.n; i++)
        add_item(pass, old.jobs[i], old.items[i].n_tokens);
}

static uint32_t n_rows_of(const Pass *pass)
{
    uint32_t n_rows = 0;

    for (uint32_t i = 0; i < pass->n; i++)
        n_rows += pass->items[i].n_tokens;
    return n_rows;
}

/* 0, *ret_again when the pass is to be planned anew, or an error of the model. */
static int forward(Engine *engine, Pass *pass, bool *ret_again, ErrorDetail *reterr)
{
    for (;;) {
        Job *first = pass->jobs[0];
        float *logits = first->evaluation ? evaluation_logits(first->evaluation) : first->slot->logits;
        uint64_t begun_usec = now_usec();
        int r;

        r = model_forward(first->slot->model, first->session->store->store, pass->items, pass->n, pass->any_logits ? logits : NULL,
                          reterr);
        if (r == 0)
            slot_time_pass(first->slot, n_rows_of(pass), now_usec() - begun_usec);
        if (r != MODEL_E_DEVICE_MEMORY && r != MODEL_E_HOST_MEMORY)
            return r;
        if (sessions_evict_one(engine, first->session->store, r == MODEL_E_HOST_MEMORY, first) ||
            (r == MODEL_E_DEVICE_MEMORY && sessions_evict_one(engine, NULL, false, first))) {
            refresh_items(pass);
            continue;
        }
        if (r == MODEL_E_DEVICE_MEMORY && ladder_for_pass(engine, first->slot, first->session->store)) {
            *ret_again = true;
            return 0;
        }
        if (pass->n == 1)
            return r;
        leave_out(pass, weakest(pass));
        refresh_items(pass);
    }
}

static void take_evaluation(Engine *engine, Job *job, uint32_t n_rows)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r = evaluation_write(job->evaluation, session_cached(job->session) - n_rows, n_rows, &detail);

    if (r < 0)
        jobs_finish(engine, job, ENGINE_RESULT_FAILED, &detail);
    else if (rows_left(job) == 0)
        jobs_finish(engine, job, ENGINE_RESULT_DONE, NULL);
    else
        job_set_progress(job, engine->mailbox, (double)session_cached(job->session) / (double)job->session->ids.n);
}

/* The results of the item that had @n_rows; the job may end. */
static void take(Engine *engine, Job *job, uint32_t n_rows, float *logits)
{
    uint32_t cached = session_cached(job->session), reused = job->usage.reused_tokens;

    job->last_served = engine->pass_serial;
    if (job->kind == JOB_EVALUATE) {
        take_evaluation(engine, job, n_rows);
        return;
    }
    if (job->n_output == 0) {
        /* Without a checkpoint less can be reused one day; nothing else. */
        if (generate_leaves_past(job) && (rows_left(job) == 0 || cached == job->fork_tokens || cached % PASS_CHECKPOINT_TOKENS == 0))
            (void)kv_cache_checkpoint(job->session->cache);
        if (cached == job->shared_tokens)
            prefixes_keep(&job->session->store->prefixes, 0, job->session->ids.ids, job->session->cache, job->slot->config.n_prefixes);
        job_set_progress(job, engine->mailbox,
                         job->usage.prompt_tokens > reused && cached > reused
                             ? (double)(cached - reused) / (double)(job->usage.prompt_tokens - reused)
                             : 0);
    }
    if (rows_left(job) != 0)
        return;
    /* Without a cache the next token runs all that is before it again. */
    if (job->session->policy.strategy == KV_STRATEGY_NONE)
        (void)kv_cache_clear(job->session->cache);
    generate_step(engine, job, logits);
}

static void fail(Engine *engine, Pass *pass, int r, ErrorDetail *detail)
{
    EngineResult result = result_from_model(r);

    if (result == ENGINE_RESULT_DEVICE_LOST || gpu_is_lost(engine->gpu)) {
        device_abandon(engine, detail);
        return;
    }
    for (uint32_t i = 0; i < pass->n; i++)
        jobs_finish(engine, pass->jobs[i], result, detail);
}

bool pass_run(Engine *engine)
{
    Job *jobs[ENGINE_MAX_ACTIVE];
    SchedulerPick picks[ENGINE_MAX_ACTIVE];
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Pass pass = {.n = 0};
    bool again = false;
    size_t n_picks;
    int r;

    n_picks = choose(engine, jobs, picks);
    if (n_picks == 0)
        return false;
    for (Job *job = engine->jobs; job; job = job->next)
        job->in_pass = false;
    if (jobs[picks[0].index]->batch) {
        measure(engine, jobs[picks[0].index]);
        engine->pass_serial++;
        batch_run(engine, jobs[picks[0].index]);
        return true;
    }
    if (gather(engine, jobs, picks, n_picks, &pass))
        return true;
    measure(engine, pass.jobs[0]);
    engine->pass_serial++;
    r = forward(engine, &pass, &again, &detail);
    if (r)
        fail(engine, &pass, r, &detail);
    if (r || again)
        return true;
    for (uint32_t i = 0; i < pass.n; i++) {
        Job *job = pass.jobs[i];
        float *logits = job->slot->logits + (size_t)i * model_file_params(slot_file(job->slot))->n_vocab;

        take(engine, job, pass.items[i].n_tokens, logits);
    }
    return true;
}
