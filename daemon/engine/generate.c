/* SPDX-License-Identifier: Apache-2.0 */
/* One generation: prompt to ids, reuse of what is cached, one token after another, the usage at the end. */

#include "daemon/engine/engine-internal.h"
#include "daemon/engine/evaluate.h"
#include "daemon/text/text-stream.h"
#include "quant/base/log.h"

#include <string.h>
#include <sys/random.h>

/* ---- prompt ---------------------------------------------------------------------------------------------------------------- */

static EngineResult encode_messages(const ModelSlot *slot, const ChatMessage *messages, size_t n_messages, TokenList *list,
                                    ErrorDetail *reterr)
{
    const Tokenizer *tokenizer = model_file_tokenizer(slot_file(slot));
    const char *source = slot->config.chat_template ? slot->config.chat_template : model_file_chat_template(slot_file(slot));
    _cleanup_(chat_template_freep) ChatTemplate *own = NULL;
    const ChatTemplate *chat_template = slot->chat_template;
    ChatPieces pieces = CHAT_PIECES_NULL;
    int r = slot->template_error;

    if (!chat_template) {
        /* Not loaded (a question about an opened file), or the template did not compile: then it says why again. */
        if (!source) {
            (void)error_detail_set(reterr, -ENOENT, "model '%s' has no chat template: set `template`, or send raw text",
                                   slot->config.name);
            return ENGINE_RESULT_TEMPLATE_FAILED;
        }
        r = chat_template_new(source, &own, reterr);
        chat_template = own;
    }
    if (r == 0)
        r = chat_template_render(chat_template, messages, n_messages, true, tokenizer_bos_text(tokenizer),
                                 tokenizer_eos_text(tokenizer), &pieces, reterr);
    if (r > 0)
        return ENGINE_RESULT_TEMPLATE_FAILED;
    if (r == 0)
        r = chat_pieces_encode(&pieces, tokenizer, list);
    chat_pieces_clear(&pieces);
    return result_from_errno(r);
}

EngineResult generate_encode(const ModelSlot *slot, const ChatMessage *messages, size_t n_messages, const char *raw, TokenList *list,
                             ErrorDetail *reterr)
{
    const Tokenizer *tokenizer = model_file_tokenizer(slot_file(slot));
    int32_t bos = tokenizer_bos(tokenizer);
    int r = 0;

    if (messages)
        return encode_messages(slot, messages, n_messages, list, reterr);
    if (tokenizer_add_bos(tokenizer) && bos >= 0)
        r = token_list_append(list, &bos, 1);
    if (r == 0)
        r = tokenizer_encode(tokenizer, raw, strlen(raw), false, list);
    return result_from_errno(error_fold(r));
}

/* How many of @list's ids follow from the shared messages alone: those that stay when the others say something else.  A template that
 * has nothing to say to that shares nothing. */
static uint32_t shared_tokens(const Job *job, const TokenList *list)
{
    _cleanup_(token_list_clearp) TokenList other = TOKEN_LIST_NULL;
    _cleanup_(freep) ChatMessage *messages = NULL;
    uint32_t shared = 0;

    if (job->n_shared == 0 || job->slot->config.n_prefixes == 0)
        return 0;
    messages = calloc(job->n_messages, sizeof(*messages));
    if (!messages)
        return 0;
    for (size_t i = 0; i < job->n_messages; i++)
        messages[i] = (ChatMessage){job->messages[i].role, i < job->n_shared ? job->messages[i].content : "\x02"};
    if (encode_messages(job->slot, messages, job->n_messages, &other, NULL) != ENGINE_RESULT_DONE)
        return 0;
    shared = (uint32_t)ids_common_prefix(list->ids, list->n, other.ids, other.n);
    return shared < PREFIXES_MIN_TOKENS || shared == list->n ? 0 : shared;
}

static EngineResult check_ids(const Job *job, uint32_t n_vocab, ErrorDetail *reterr)
{
    for (size_t i = 0; i < job->n_ids; i++)
        if (job->ids[i] < 0 || (uint32_t)job->ids[i] >= n_vocab) {
            (void)error_detail_set(reterr, -EINVAL, "id %d at place %zu is outside the vocabulary of %u", (int)job->ids[i], i, n_vocab);
            return ENGINE_RESULT_INVALID_ARGS;
        }
    return ENGINE_RESULT_DONE;
}

EngineResult generate_prompt_ids(Job *job, const ChatMessage *messages, size_t n_messages, const char *raw, TokenList *list,
                                 ErrorDetail *reterr)
{
    const ModelParams *params = model_file_params(slot_file(job->slot));
    EngineResult result;

    if (!messages && !raw) {
        result = check_ids(job, params->n_vocab, reterr);
        if (result == ENGINE_RESULT_DONE)
            result = result_from_errno(token_list_append(list, job->ids, job->n_ids));
    } else {
        result = generate_encode(job->slot, messages, n_messages, raw, list, reterr);
    }
    if (result != ENGINE_RESULT_DONE)
        return result;
    if (list->n == 0) {
        (void)error_detail_set(reterr, -EINVAL, "the prompt is empty");
        return ENGINE_RESULT_INVALID_ARGS;
    }
    if (list->n > job->context) {
        (void)error_detail_set(reterr, -E2BIG, "the prompt has %zu tokens, the context holds %u", list->n, job->context);
        return ENGINE_RESULT_CONTEXT_EXCEEDED;
    }
    return ENGINE_RESULT_DONE;
}

/* ---- start ----------------------------------------------------------------------------------------------------------------- */

static uint64_t system_seed(void)
{
    uint64_t seed = 0;

    if (getrandom(&seed, sizeof(seed), GRND_NONBLOCK) != (ssize_t)sizeof(seed) || seed == 0)
        seed = now_usec() | 1;
    return seed;
}

static int find_end_tokens(Job *job, const Tokenizer *tokenizer)
{
    uint32_t n_vocab = tokenizer_n_vocab(tokenizer), n = 0;

    if (job->sampling.ignore_eos)
        return 0;
    for (uint32_t id = 0; id < n_vocab; id++)
        n += tokenizer_is_eog(tokenizer, (int32_t)id);
    job->eos = calloc(n + 1, sizeof(*job->eos));
    if (!job->eos)
        return error_origin(-ENOMEM);
    for (uint32_t id = 0; id < n_vocab; id++)
        if (tokenizer_is_eog(tokenizer, (int32_t)id))
            job->eos[job->n_eos++] = (int32_t)id;
    return 0;
}

static int encode_bad_words(Job *job, const Tokenizer *tokenizer)
{
    const int32_t end = -1;
    int r = 0;

    for (size_t i = 0; i < job->sampling.n_bad_words && r == 0; i++) {
        r = tokenizer_encode(tokenizer, job->sampling.bad_words[i], strlen(job->sampling.bad_words[i]), false, &job->bad_words);
        if (r == 0)
            r = token_list_append(&job->bad_words, &end, 1);
    }
    return r;
}

EngineResult generate_constraints(Job *job, ErrorDetail *reterr)
{
    const Tokenizer *tokenizer = model_file_tokenizer(slot_file(job->slot));
    int r = 0;

    (void)reterr;
    job->usage.seed = job->sampling.seed ? job->sampling.seed : system_seed();
    if (job_is_batch(job) || job->sampling.min_tokens > 0 || job->sampling.n_bad_words > 0)
        r = find_end_tokens(job, tokenizer);
    if (r == 0)
        r = encode_bad_words(job, tokenizer);
    return result_from_errno(error_fold(r));
}

static EngineResult make_sampling(Job *job, size_t n_prompt, ErrorDetail *reterr)
{
    uint32_t n_vocab = model_file_params(slot_file(job->slot))->n_vocab;
    EngineResult result;
    int r;

    result = generate_constraints(job, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    r = sampler_new(&job->sampling, job->usage.seed, n_vocab, &job->sampler, reterr);
    if (r == 0)
        sampler_constrain(job->sampler, &(ProcessorsState){.eos = job->eos,
                                                          .n_eos = job->n_eos,
                                                          .bad_words = job->bad_words.ids,
                                                          .n_bad_words = job->bad_words.n,
                                                          .n_prompt = n_prompt});
    if (r == 0)
        r = text_stream_new(job->sampling.stop, job->sampling.n_stop, &job->stream);
    return result_from_errno(r);
}

static EngineResult make_evaluation(Job *job, const TokenList *ids, ErrorDetail *reterr)
{
    int r = evaluation_new(job->fd, ids->n, model_file_params(slot_file(job->slot))->n_vocab, &job->evaluation, reterr);

    return result_from_errno(r);
}

/* What the usage says about where things are. */
static void describe_store(Job *job, const StoreSlot *store)
{
    const KvPolicy *policy = kv_store_policy(store->store);
    EngineUsage *u = &job->usage;

    (void)snprintf(u->strategy, sizeof(u->strategy), "%s", kv_strategy_to_string(policy->strategy));
    status_form(policy, u->form, sizeof(u->form));
    (void)snprintf(u->home, sizeof(u->home), "%s", policy->home == KV_HOME_HOST || policy->is_compatible ? "host" : "device");
    (void)snprintf(u->transfer, sizeof(u->transfer), "%s", status_transfer(policy->transfer));
    engine_ladder_text(job->slot->steps | store->steps, u->ladder, sizeof(u->ladder));
}

static void describe(const Engine *engine, Job *job, const StoreSlot *store)
{
    EngineUsage *u = &job->usage;
    GpuCounters counters;

    describe_store(job, store);
    (void)snprintf(u->device, sizeof(u->device), "%s", gpu_info(engine->gpu)->name);
    gpu_counters(engine->gpu, &counters);
    job->uploads_before = counters.upload_bytes;
    job->downloads_before = counters.download_bytes;
}

/* The session's cache with as much of the past as agrees with @ids. */
static EngineResult reuse(Engine *engine, Job *job, const TokenList *ids, ErrorDetail *reterr)
{
    size_t common = session_common_prefix(job->session, ids->ids, ids->n);
    EngineResult result;
    int r;

    /* A cold one may begin where somebody else was. */
    if (!job->session->cache && (r = session_rebase(job->session, ids->ids, ids->n, reterr)))
        return result_from_kv(r);
    result = sessions_warm(engine, job, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    r = session_rebase(job->session, ids->ids, ids->n, reterr);
    if (r)
        return result_from_kv(r);
    common = MIN(common, ids->n - 1);
    if (session_cached(job->session) < common)
        job->fork_tokens = MAX(job->fork_tokens, (uint32_t)common);
    job->usage.reused_tokens = session_cached(job->session);
    log_debug("Job %llu: %u of %zu prompt tokens reused, the first %zu are those of the session", (unsigned long long)job->id,
              job->usage.reused_tokens, ids->n, common);
    return ENGINE_RESULT_DONE;
}

void generate_begin(Engine *engine, Job *job, const StoreSlot *store, uint32_t n_prompt_tokens)
{
    uint64_t now = now_usec();

    job->usage.prompt_tokens = n_prompt_tokens;
    job->usage.load_usec = job->loading_usec ? now - job->loading_usec : 0;
    job->usage.queue_usec = now - job->submitted_usec - job->usage.load_usec;
    job->started_usec = now;
    job->active = true;
    describe(engine, job, store);
    job_set_state(job, engine->mailbox, ENGINE_JOB_PREFILL);
}

EngineResult generate_start(Engine *engine, Job *job, ErrorDetail *reterr)
{
    const KvPolicy *policy = job->session ? &job->session->policy : job->has_policy ? &job->policy : &job->slot->config.policy;
    _cleanup_(token_list_clearp) TokenList ids = TOKEN_LIST_NULL;
    EngineResult result;

    job->context = slot_context(job->slot, policy);
    if (job_is_batch(job))
        return batch_start(engine, job, reterr);
    result = generate_prompt_ids(job, job->messages, job->n_messages, job->raw, &ids, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    result = job->kind == JOB_EVALUATE ? make_evaluation(job, &ids, reterr) : make_sampling(job, ids.n, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    if (!job->session) {
        job->session = session_new(job->slot, policy, 0, job->owner);
        if (!job->session)
            return ENGINE_RESULT_OUT_OF_MEMORY;
        job->session->job = job;
    }
    job->shared_tokens = shared_tokens(job, &ids);
    result = reuse(engine, job, &ids, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;

    generate_begin(engine, job, job->session->store, (uint32_t)ids.n);
    if (job->kind == JOB_GENERATE && ids.n == job->context)
        (void)snprintf(job->usage.stop_reason, sizeof(job->usage.stop_reason), "context_full");
    return ENGINE_RESULT_DONE;
}

/* ---- one token -------------------------------------------------------------------------------------------------------------- */

static void finish_text(Engine *engine, Job *job, const char *reason)
{
    const char *text;
    size_t length;

    if (text_stream_finish(job->stream, &text, &length) == 0 && job_emit_text(job, engine->mailbox, text, length) < 0) {
        jobs_finish(engine, job, ENGINE_RESULT_OUT_OF_MEMORY, NULL);
        return;
    }
    (void)snprintf(job->usage.stop_reason, sizeof(job->usage.stop_reason), "%s", reason);
    jobs_finish(engine, job, ENGINE_RESULT_DONE, NULL);
}

/* Tells the token and its text; 1 when a stop string is complete. */
static int tell_token(Engine *engine, Job *job, int32_t id)
{
    const Tokenizer *tokenizer = model_file_tokenizer(slot_file(job->slot));
    const char *bytes, *text;
    size_t n, length;
    int stopped, r;

    r = job_emit_token(job, engine->mailbox, id);
    if (r < 0)
        return r;
    bytes = tokenizer_token_bytes(tokenizer, id, false, &n);
    stopped = text_stream_push(job->stream, bytes, n, &text, &length);
    if (stopped < 0)
        return error_trace(stopped);
    r = job_emit_text(job, engine->mailbox, text, length);
    return r < 0 ? r : stopped;
}

void generate_step(Engine *engine, Job *job, float *logits)
{
    const Tokenizer *tokenizer = model_file_tokenizer(slot_file(job->slot));
    Session *session = job->session;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int32_t id;
    int r;

    r = sampler_pick(job->sampler, logits, session->ids.ids, session->ids.n, &id, &detail);
    if (r == SAMPLER_E_NUMERIC) {
        jobs_finish(engine, job, ENGINE_RESULT_NUMERIC, &detail);
        return;
    }
    job->last_usec = now_usec();
    if (!job->first_usec)
        job->first_usec = job->last_usec;
    job_set_state(job, engine->mailbox, ENGINE_JOB_DECODING);
    if (tokenizer_is_eog(tokenizer, id) && !job->sampling.ignore_eos) {
        finish_text(engine, job, "stop");
        return;
    }
    r = token_list_append(&session->ids, &id, 1);
    if (r == 0) {
        job->n_output++;
        r = tell_token(engine, job, id);
    }
    if (r < 0) {
        jobs_finish(engine, job, result_from_errno(r), NULL);
    } else if (r == 1) {
        (void)snprintf(job->usage.stop_reason, sizeof(job->usage.stop_reason), "stop_string");
        jobs_finish(engine, job, ENGINE_RESULT_DONE, NULL);
    } else if (job->sampling.max_tokens > 0 && job->n_output >= job->sampling.max_tokens) {
        finish_text(engine, job, "length");
    } else if (session->ids.n >= job->context) {
        finish_text(engine, job, "context_full");
    }
}

bool generate_leaves_past(const Job *job)
{
    return job->kind == JOB_GENERATE && (job->session->id || job->slot->config.n_prefixes > 0);
}

/* ---- end ------------------------------------------------------------------------------------------------------------------- */

static double rate(uint64_t n, uint64_t usec)
{
    return usec > 0 ? (double)n * 1e6 / (double)usec : 0;
}

/* Adds what was measured while the job ran alone. */
void generate_measure_stop(Engine *engine, Job *job)
{
    GpuOverlap o;

    if (engine->overlap_job != job->id)
        return;
    engine->overlap_job = 0;
    if (!engine->gpu || gpu_overlap_end(engine->gpu, &o) != 0)
        return;
    job->overlap.kernel_usec += o.kernel_usec;
    job->overlap.upload_usec += o.upload_usec;
    job->overlap.download_usec += o.download_usec;
    job->overlap.overlap_usec += o.overlap_usec;
}

static void fill_bytes(Engine *engine, Job *job)
{
    EngineUsage *u = &job->usage;
    KvBytes bytes;
    GpuCounters counters;

    if (job_store(job))
        describe_store(job, job_store(job)); /* it may have moved meanwhile */
    if (job->session && job->session->cache) {
        kv_cache_bytes(job->session->cache, &bytes);
        u->cache_host_bytes = bytes.host + bytes.checkpoints;
        u->cache_device_bytes = bytes.device + bytes.staging;
    }
    if (engine->gpu) {
        gpu_counters(engine->gpu, &counters);
        u->upload_bytes = counters.upload_bytes - job->uploads_before;
        u->download_bytes = counters.download_bytes - job->downloads_before;
    }
    u->copy_usec = job->overlap.upload_usec + job->overlap.download_usec;
    u->hidden_share = u->copy_usec > 0 ? MIN(1.0, (double)job->overlap.overlap_usec / (double)u->copy_usec) : 1;
}

void generate_end(Engine *engine, Job *job)
{
    EngineUsage *u = &job->usage;

    generate_measure_stop(engine, job);
    fill_bytes(engine, job);
    u->output_tokens = job->n_output;
    if (job->first_usec) {
        u->first_token_usec = job->first_usec - job->submitted_usec;
        u->prefill_usec = job->first_usec - job->started_usec;
        u->decode_usec = job->last_usec - job->first_usec;
        u->prefill_rate = rate(u->prompt_tokens - u->reused_tokens, u->prefill_usec);
        if (u->output_tokens > 1)
            u->decode_rate = rate(u->output_tokens - 1, u->decode_usec);
    }
    if (!job->session)
        return;
    session_trim(job->session);
    if (!generate_leaves_past(job) || !job->session->cache || !engine->gpu || gpu_is_lost(engine->gpu))
        return;
    /* A place to come back to for the next turn; without it that turn runs a little more, so a failure changes nothing else. */
    (void)kv_cache_checkpoint(job->session->cache);
    if (!job->session->id)
        prefixes_keep(&job->session->store->prefixes, job->owner, job->session->ids.ids, job->session->cache,
                      job->slot->config.n_prefixes);
}
