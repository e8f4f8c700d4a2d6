/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job with several sequences in the engine: its start, its passes, and what happens when memory is short.
 *
 * Memory: caches of idle sessions and of lower classes give way first; then the model steps down the ladder (ladder.c); then the pass is
 * halved, down to one sequence; then the job gives its caches up and waits, when others hold some; else it fails with the numbers.
 */

#include "daemon/engine/engine-internal.h"

#include <string.h>

typedef struct BatchPass {
    ModelItem items[ENGINE_MAX_ACTIVE];
    BatchPrompt *prompts[ENGINE_MAX_ACTIVE];
    uint32_t sequences[ENGINE_MAX_ACTIVE];
    uint32_t n, n_rows;
    bool any_logits;
} BatchPass;

/* ---- start -------------------------------------------------------------------------------------------------------------------- */

static EngineResult encode_prompt(Job *job, size_t index, TokenList *ret, ErrorDetail *reterr)
{
    char role[] = "user";
    ChatMessage message = {.role = role};
    EngineResult result;

    if (!job->prompts)
        return generate_prompt_ids(job, job->messages, job->n_messages, job->raw, ret, reterr);
    message.content = (char *)(uintptr_t)job->prompts[index];
    if (job->prompts_raw)
        result = generate_prompt_ids(job, NULL, 0, job->prompts[index], ret, reterr);
    else
        result = generate_prompt_ids(job, &message, 1, NULL, ret, reterr);
    if (result != ENGINE_RESULT_DONE)
        error_detail_prefix(reterr, "prompt %zu", index + 1);
    return result;
}

static EngineResult encode_prompts(Job *job, TokenList *prompts, size_t n, uint32_t *ret_n_tokens, ErrorDetail *reterr)
{
    *ret_n_tokens = 0;
    for (size_t i = 0; i < n; i++) {
        EngineResult result = encode_prompt(job, i, &prompts[i], reterr);

        if (result != ENGINE_RESULT_DONE)
            return result;
        if (prompts[i].n >= job->context) {
            (void)error_detail_set(reterr, -E2BIG, "prompt %zu has %zu tokens, which leaves no room for an answer in the context of %u",
                                   i + 1, prompts[i].n, job->context);
            return ENGINE_RESULT_CONTEXT_EXCEEDED;
        }
        *ret_n_tokens += (uint32_t)prompts[i].n;
    }
    return ENGINE_RESULT_DONE;
}

static EngineResult make_batch(Job *job, const KvPolicy *policy, uint32_t *ret_n_tokens, ErrorDetail *reterr)
{
    const ModelFile *file = slot_file(job->slot);
    size_t n_prompts = MAX(job->n_prompts, (size_t)1);
    TokenList *prompts = calloc(n_prompts, sizeof(*prompts));
    EngineResult result;

    if (!prompts)
        return ENGINE_RESULT_OUT_OF_MEMORY;
    result = generate_constraints(job, reterr);
    if (result == ENGINE_RESULT_DONE)
        result = encode_prompts(job, prompts, n_prompts, ret_n_tokens, reterr);
    if (result == ENGINE_RESULT_DONE)
        result = result_from_errno(batch_new(job, model_file_tokenizer(file), policy, prompts, n_prompts,
                                             model_file_params(file)->n_vocab, &job->batch, reterr));
    for (size_t i = 0; i < n_prompts; i++)
        token_list_clear(&prompts[i]);
    free(prompts);
    return result;
}

EngineResult batch_start(Engine *engine, Job *job, ErrorDetail *reterr)
{
    const KvPolicy *policy = job->has_policy ? &job->policy : &job->slot->config.policy;
    uint32_t n_tokens = 0;
    StoreSlot *store;
    EngineResult result;

    if (job->session) {
        (void)error_detail_set(reterr, -EINVAL, "a session has one sequence: ask for several without a session");
        return ENGINE_RESULT_INVALID_ARGS;
    }
    if (policy->is_compatible && job->sampling.num_beams > 1 && !kv_quant_rows_are_apart(&policy->compatible)) {
        (void)error_detail_set(reterr, -EINVAL, "num-beams %u: with quant.compatibility %s codes the rows of all beams together, which sequences "
                               "of their own do not: use quanto with axis 0, or fp8", job->sampling.num_beams,
                               kv_backend_to_string(policy->compatible.backend));
        return ENGINE_RESULT_INVALID_ARGS;
    }
    result = make_batch(job, policy, &n_tokens, reterr);
    if (result == ENGINE_RESULT_DONE)
        result = slot_store(engine, job->slot, policy, true, &store, reterr);
    if (result == ENGINE_RESULT_DONE)
        generate_begin(engine, job, store, n_tokens);
    return result;
}

/* ---- caches ------------------------------------------------------------------------------------------------------------------- */

/* Its next logits are still to come. */
static bool wants(const BatchSequence *sequence)
{
    return !sequence->ended && !sequence->taken;
}

static uint32_t cached(const BatchSequence *sequence)
{
    return sequence->cache ? kv_cache_length(sequence->cache) : 0;
}

/* Begins where somebody else was; false: nobody was. */
static bool fork_prefix(Job *job, BatchPrompt *prompt, BatchSequence *sequence)
{
    size_t common = 0;

    if (job->batch->policy.strategy != KV_STRATEGY_NONE)
        common = prefixes_fork(&job->batch->store->prefixes, job->owner, prompt->ids.ids, prompt->ids.n, &sequence->cache);
    if (common >= PREFIXES_MIN_TOKENS)
        prompt->fork_tokens = MAX(prompt->fork_tokens, (uint32_t)common);
    if (!sequence->cache)
        return false;
    if (prompt->n_steps == 0) {
        job->usage.reused_tokens += cached(sequence) - prompt->n_reused;
        prompt->n_reused = cached(sequence);
    }
    return true;
}

static EngineResult warm_one(Engine *engine, Job *job, BatchPrompt *prompt, BatchSequence *sequence, ErrorDetail *reterr)
{
    Batch *batch = job->batch;
    EngineResult result;
    int r;

    if (batch->policy.is_compatible && sequence->ids.n > prompt->ids.n)
        return sessions_refuse_rerun(reterr);
    if (!batch->store) {
        result = slot_store(engine, job->slot, &batch->policy, true, &batch->store, reterr);
        if (result != ENGINE_RESULT_DONE)
            return result;
    }
    if (fork_prefix(job, prompt, sequence))
        return ENGINE_RESULT_DONE;
    do
        r = kv_cache_new(batch->store->store, &sequence->cache, reterr);
    while ((r == KV_E_DEVICE_MEMORY || r == KV_E_HOST_MEMORY) && sessions_evict_one(engine, batch->store, r == KV_E_HOST_MEMORY, job));
    return result_from_kv(r);
}

/* The sequence that runs the prompt for all, when it has not ended yet; else NULL. */
static BatchSequence *find_leader(const Batch *batch, BatchPrompt *prompt)
{
    for (uint32_t i = 0; i < batch->n_sequences; i++)
        if (prompt->sequences[i].cache && wants(&prompt->sequences[i]) && cached(&prompt->sequences[i]) <= prompt->ids.n)
            return &prompt->sequences[i];
    return NULL;
}

/* Whether the caches were all lost, or are not there yet. */
static bool is_cold(const Batch *batch, const BatchPrompt *prompt)
{
    for (uint32_t i = 0; i < batch->n_sequences; i++)
        if (prompt->sequences[i].cache)
            return false;
    return true;
}

/* Every sequence that wants logits gets a cache, by fork where the prompt has been run; while it has not, one of them. */
static EngineResult warm_prompt(Engine *engine, Job *job, BatchPrompt *prompt, ErrorDetail *reterr)
{
    const Batch *batch = job->batch;
    BatchSequence *leader = find_leader(batch, prompt);
    bool cold = is_cold(batch, prompt);

    for (uint32_t i = 0; i < batch->n_sequences; i++) {
        BatchSequence *sequence = &prompt->sequences[i];
        EngineResult result = ENGINE_RESULT_DONE;

        if (sequence->cache || !wants(sequence))
            continue;
        if (leader && cached(leader) < prompt->ids.n)
            return ENGINE_RESULT_DONE; /* soon */
        if (!leader || (batch->policy.is_compatible && sequence->ids.n > prompt->ids.n) ||
            kv_cache_fork(leader->cache, &sequence->cache, reterr) != 0)
            result = warm_one(engine, job, prompt, sequence, reterr);
        if (result != ENGINE_RESULT_DONE || cold)
            return result;
    }
    return ENGINE_RESULT_DONE;
}

/* ---- one pass ------------------------------------------------------------------------------------------------------------------- */

/* Whether others wait for this one to reach the end of the prompt. */
static bool is_waited_for(const Batch *batch, const BatchPrompt *prompt, const BatchSequence *sequence)
{
    if (cached(sequence) >= prompt->ids.n)
        return false;
    for (uint32_t i = 0; i < batch->n_sequences; i++)
        if (wants(&prompt->sequences[i]) && !prompt->sequences[i].cache)
            return true;
    return false;
}

static void add_item(const Batch *batch, BatchPass *pass, BatchPrompt *prompt, uint32_t index, uint32_t max_rows)
{
    const BatchSequence *sequence = &prompt->sequences[index];
    uint32_t begin = cached(sequence), end = (uint32_t)sequence->ids.n;

    if (is_waited_for(batch, prompt, sequence))
        end = MIN(end, (uint32_t)prompt->ids.n);
    if (begin < prompt->fork_tokens)
        end = MIN(end, prompt->fork_tokens);
    end = MIN(end, begin + max_rows - pass->n_rows);
    pass->items[pass->n] = (ModelItem){.cache = sequence->cache, .tokens = sequence->ids.ids + begin, .n_tokens = end - begin,
                                          .more = end < sequence->ids.n};
    pass->prompts[pass->n] = prompt;
    pass->sequences[pass->n++] = index;
    pass->n_rows += end - begin;
    pass->any_logits |= end == sequence->ids.n;
}

/* What runs next: of all live prompts in order, as much as a pass takes. */
static void fill_pass(const Job *job, BatchPass *pass, uint32_t max_items)
{
    const Batch *batch = job->batch;
    uint32_t max_rows = slot_chunk_rows(job->slot);

    *pass = (BatchPass){.n = 0};
    max_items = MIN(max_items, (uint32_t)ENGINE_MAX_ACTIVE);
    for (size_t p = 0; p < batch->n_prompts; p++) {
        BatchPrompt *prompt = &batch->prompts[p];

        for (uint32_t i = 0; i < batch->n_sequences && prompt->sequences && pass->n < max_items && pass->n_rows < max_rows; i++)
            if (prompt->sequences[i].cache && wants(&prompt->sequences[i]))
                add_item(batch, pass, prompt, i, max_rows);
    }
}

/* 0, *ret_again when caches have moved or gone, or an error of the model. */
static int forward(Engine *engine, Job *job, BatchPass *pass, bool *ret_again, ErrorDetail *reterr)
{
    ModelSlot *slot = job->slot;
    StoreSlot *store = job->batch->store;
    uint32_t max_items = slot->max_items;

    for (;;) {
        uint64_t begun_usec = now_usec();
        int r;

        fill_pass(job, pass, max_items);
        r = model_forward(slot->model, store->store, pass->items, pass->n, pass->any_logits ? slot->logits : NULL, reterr);
        if (r == 0)
            slot_time_pass(slot, pass->n_rows, now_usec() - begun_usec);
        if (r != MODEL_E_DEVICE_MEMORY && r != MODEL_E_HOST_MEMORY)
            return r;
        if (sessions_evict_one(engine, store, r == MODEL_E_HOST_MEMORY, job) ||
            (r == MODEL_E_DEVICE_MEMORY && sessions_evict_one(engine, NULL, false, job)))
            continue;
        if (r == MODEL_E_DEVICE_MEMORY && ladder_for_pass(engine, slot, store)) {
            *ret_again = true;
            return 0;
        }
        if (pass->n == 1)
            return r;
        max_items = pass->n / 2;
    }
}

/* Leaves what was run of a prompt to those who begin alike. */
static void leave_past(const Job *job, const BatchPrompt *prompt, const BatchSequence *sequence)
{
    uint32_t n = cached(sequence), max = job->slot->config.n_prefixes;

    if (prompt->n_steps > 0 || max == 0 || job->batch->policy.strategy == KV_STRATEGY_NONE)
        return;
    /* Without a checkpoint less can be reused one day; nothing else. */
    if (n == prompt->fork_tokens || n == prompt->ids.n)
        (void)kv_cache_checkpoint(sequence->cache);
    if (n == prompt->ids.n)
        prefixes_keep(&job->batch->store->prefixes, job->owner, prompt->ids.ids, sequence->cache, max);
}

/* Gives the logits out.  0, SAMPLER_E_NUMERIC, negative errno. */
static int take_rows(Job *job, const BatchPass *pass, float *logits, ErrorDetail *reterr)
{
    Batch *batch = job->batch;
    int r = 0;

    for (uint32_t i = 0; i < pass->n && r == 0; i++) {
        BatchPrompt *prompt = pass->prompts[i];
        const BatchSequence *sequence = &prompt->sequences[pass->sequences[i]];

        leave_past(job, prompt, sequence);
        if (cached(sequence) == sequence->ids.n)
            r = batch_take(batch, prompt, pass->sequences[i], logits + (size_t)i * batch->n_vocab, reterr);
    }
    return r;
}

/* The most that was in use: at the end all caches are gone. */
static void note_bytes(Job *job)
{
    KvBytes bytes;

    batch_bytes(job->batch, &bytes);
    job->usage.cache_host_bytes = MAX(job->usage.cache_host_bytes, bytes.host + bytes.checkpoints);
    job->usage.cache_device_bytes = MAX(job->usage.cache_device_bytes, bytes.device + bytes.staging);
}

static int take_steps(Engine *engine, Job *job, ErrorDetail *reterr)
{
    Batch *batch = job->batch;
    int r = 0;

    for (size_t p = 0; p < batch->n_prompts && r == 0; p++) {
        BatchPrompt *prompt = &batch->prompts[p];

        if (!batch_step_is_complete(batch, prompt))
            continue;
        job->last_usec = now_usec();
        if (!job->first_usec)
            job->first_usec = job->last_usec;
        job->n_output += batch->n_sequences;
        note_bytes(job);
        job_set_state(job, engine->mailbox, ENGINE_JOB_DECODING);
        r = batch_step(batch, prompt, reterr);
        if (batch->policy.strategy == KV_STRATEGY_NONE)
            batch_clear_caches(batch, prompt);
    }
    return r;
}

static void show_progress(Engine *engine, Job *job)
{
    const Batch *batch = job->batch;
    uint64_t done = 0;

    for (size_t p = 0; p < batch->n_prompts; p++) {
        const BatchPrompt *prompt = &batch->prompts[p];
        uint32_t most = prompt->ended ? (uint32_t)prompt->ids.n : 0;

        for (uint32_t i = 0; i < batch->n_sequences && prompt->sequences; i++)
            most = MAX(most, cached(&prompt->sequences[i]));
        done += MIN(most, (uint32_t)prompt->ids.n);
    }
    job_set_progress(job, engine->mailbox, (double)done / (double)job->usage.prompt_tokens);
}

static void finish(Engine *engine, Job *job)
{
    int r = batch_take_results(job->batch, job->finished, &job->n_output);

    (void)snprintf(job->usage.stop_reason, sizeof(job->usage.stop_reason), "%s",
                   job->finished->n_sequences > 0 ? job->finished->sequences[0].stop_reason : "stop");
    jobs_finish(engine, job, result_from_errno(r), NULL);
}

/* The job gives up its caches and waits, or fails. */
static void run_out_of_memory(Engine *engine, Job *job, EngineResult result, const ErrorDetail *detail)
{
    if (!sessions_others_hold_memory(engine, job)) {
        jobs_finish(engine, job, result, detail);
        return;
    }
    job_drop_caches(job);
    job->memory_blocked = true;
}

static void fail(Engine *engine, Job *job, EngineResult result, const ErrorDetail *detail)
{
    if (result == ENGINE_RESULT_DEVICE_LOST || gpu_is_lost(engine->gpu))
        device_abandon(engine, detail);
    else if (result == ENGINE_RESULT_OUT_OF_DEVICE_MEMORY || result == ENGINE_RESULT_OUT_OF_MEMORY)
        run_out_of_memory(engine, job, result, detail);
    else
        jobs_finish(engine, job, result, detail);
}

static EngineResult prepare(Engine *engine, Job *job, ErrorDetail *reterr)
{
    Batch *batch = job->batch;
    EngineResult result = result_from_errno(batch_open_prompts(batch, reterr));

    for (size_t p = 0; p < batch->n_prompts && result == ENGINE_RESULT_DONE; p++)
        if (batch->prompts[p].sequences)
            result = warm_prompt(engine, job, &batch->prompts[p], reterr);
    return result;
}

void batch_run(Engine *engine, Job *job)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result;
    bool again = false;
    BatchPass pass;
    int r;

    job->in_pass = true;
    job->last_served = engine->pass_serial;
    result = prepare(engine, job, &detail);
    /* Caches that are reserved at once: what there is of them may have moved or gone. */
    if (result == ENGINE_RESULT_OUT_OF_DEVICE_MEMORY && job->batch->store && ladder_for_pass(engine, job->slot, job->batch->store))
        return;
    if (result != ENGINE_RESULT_DONE) {
        fail(engine, job, result, &detail);
        return;
    }
    r = forward(engine, job, &pass, &again, &detail);
    if (r)
        fail(engine, job, result_from_model(r), &detail);
    if (r || again)
        return;
    show_progress(engine, job);
    r = take_rows(job, &pass, job->slot->logits, &detail);
    if (r == SAMPLER_E_NUMERIC) {
        jobs_finish(engine, job, ENGINE_RESULT_NUMERIC, &detail);
        return;
    }
    if (r == 0)
        r = take_steps(engine, job, &detail);
    if (r)
        jobs_finish(engine, job, result_from_errno(r), &detail);
    else if (batch_is_over(job->batch))
        finish(engine, job);
}
