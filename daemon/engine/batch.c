/* SPDX-License-Identifier: Apache-2.0 */
/* Several sequences of one job: their ids, caches and choices.  See the header. */

#include "daemon/engine/batch-text.h"
#include "daemon/engine/log-softmax.h"

#include <string.h>

/* ---- life --------------------------------------------------------------------------------------------------------------------- */

int batch_new(Job *job, const Tokenizer *tokenizer, const KvPolicy *policy, TokenList *prompts, size_t n_prompts, uint32_t n_vocab,
              Batch **ret, ErrorDetail *reterr)
{
    _cleanup_(batch_freep) Batch *batch = calloc(1, sizeof(*batch));
    const EngineSampling *s = &job->sampling;

    if (batch) {
        batch->n_sequences = MAX(MAX(s->num_beams, s->num_return_sequences), 1u);
        batch->prompts = calloc(n_prompts, sizeof(*batch->prompts));
        batch->n_prompts = batch->prompts ? n_prompts : 0;
        batch->next = calloc(batch->n_sequences, sizeof(*batch->next));
        batch->row = calloc(n_vocab, sizeof(*batch->row));
        batch->scratch = calloc(n_vocab, sizeof(*batch->scratch));
    }
    for (size_t i = 0; i < n_prompts; i++) {
        if (batch && batch->prompts)
            batch->prompts[i].ids = prompts[i];
        else
            token_list_clear(&prompts[i]);
        prompts[i] = TOKEN_LIST_NULL;
    }
    if (!batch || !batch->prompts || !batch->next || !batch->row || !batch->scratch)
        return error_detail_set(reterr, -ENOMEM, "out of memory for %zu prompts", n_prompts);
    batch->job = job;
    batch->tokenizer = tokenizer;
    batch->policy = *policy;
    batch->n_vocab = n_vocab;
    batch->context = job->context;
    *ret = TAKE_PTR(batch);
    return 0;
}

static void sequence_clear(BatchSequence *sequence)
{
    token_list_clear(&sequence->ids);
    kv_cache_free(sequence->cache);
    sampler_free(sequence->sampler);
    text_stream_free(sequence->stream);
    *sequence = (BatchSequence){0};
}

void batch_clear_prompt(const Batch *batch, BatchPrompt *prompt)
{
    for (uint32_t i = 0; i < batch->n_sequences && prompt->sequences; i++)
        sequence_clear(&prompt->sequences[i]);
    free(prompt->sequences);
    prompt->sequences = NULL;
    prompt->search = beam_search_free(prompt->search);
}

static void results_free(EngineSequence *results, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        free(results[i].text);
        free(results[i].ids);
    }
    free(results);
}

Batch *batch_free(Batch *batch)
{
    if (!batch)
        return NULL;
    for (size_t i = 0; i < batch->n_prompts; i++) {
        batch_clear_prompt(batch, &batch->prompts[i]);
        token_list_clear(&batch->prompts[i].ids);
        results_free(batch->prompts[i].results, batch->prompts[i].n_results);
    }
    free(batch->prompts);
    free(batch->next);
    free(batch->row);
    free(batch->scratch);
    free(batch->bytes);
    free(batch);
    return NULL;
}

/* ---- caches ------------------------------------------------------------------------------------------------------------------- */

void batch_drop_caches(Batch *batch)
{
    for (size_t p = 0; p < batch->n_prompts; p++)
        for (uint32_t i = 0; i < batch->n_sequences && batch->prompts[p].sequences; i++) {
            BatchSequence *sequence = &batch->prompts[p].sequences[i];

            sequence->cache = kv_cache_free(sequence->cache);
        }
    batch->store = NULL;
}

void batch_clear_caches(Batch *batch, BatchPrompt *prompt)
{
    for (uint32_t i = 0; i < batch->n_sequences && prompt->sequences; i++)
        if (prompt->sequences[i].cache)
            (void)kv_cache_clear(prompt->sequences[i].cache);
}

bool batch_has_cache(const Batch *batch)
{
    for (size_t p = 0; p < batch->n_prompts; p++)
        for (uint32_t i = 0; i < batch->n_sequences && batch->prompts[p].sequences; i++)
            if (batch->prompts[p].sequences[i].cache)
                return true;
    return false;
}

/* What forks share counts once, as the first's. */
static void add_bytes(const KvCache *cache, bool first, KvBytes *sum)
{
    double own = 1;
    KvBytes bytes;

    kv_cache_bytes(cache, &bytes);
    if (!first && bytes.n_pages > 0)
        own = (double)(bytes.n_pages - bytes.n_pages_shared) / bytes.n_pages;
    sum->host += (uint64_t)((double)bytes.host * own);
    sum->device += (uint64_t)((double)bytes.device * own);
    sum->checkpoints += first ? bytes.checkpoints : 0;
    sum->staging = bytes.staging;
}

void batch_bytes(const Batch *batch, KvBytes *ret)
{
    *ret = (KvBytes){0};
    for (size_t p = 0; p < batch->n_prompts; p++)
        for (uint32_t i = 0; i < batch->n_sequences && batch->prompts[p].sequences; i++) {
            const KvCache *cache = batch->prompts[p].sequences[i].cache;

            if (cache)
                add_bytes(cache, i == 0, ret);
        }
}

/* ---- start ---------------------------------------------------------------------------------------------------------------------- */

static uint32_t max_new_tokens(const Batch *batch, const BatchPrompt *prompt)
{
    uint32_t room = batch->context - (uint32_t)prompt->ids.n, wanted = batch->job->sampling.max_tokens;

    return wanted > 0 ? MIN(wanted, room) : room;
}

static int open_search(Batch *batch, BatchPrompt *prompt, ErrorDetail *reterr)
{
    const EngineSampling *s = &batch->job->sampling;
    BeamOptions options = {
        .n_beams = s->num_beams,
        .n_vocab = batch->n_vocab,
        .max_new_tokens = max_new_tokens(batch, prompt),
        .eos = batch->job->eos,
        .n_eos = batch->job->n_eos,
        .early_stopping = s->early_stopping,
        .length_penalty = s->length_penalty,
        .sample = engine_sampling_draws(s),
        .seed = batch->job->usage.seed,
        .stops = s->n_stop > 0 ? batch_stops : NULL,
        .userdata = batch,
    };

    return beam_search_new(&options, &prompt->search, reterr);
}

static ProcessorsState processors_state(const Batch *batch, const BatchPrompt *prompt)
{
    const Job *job = batch->job;

    return (ProcessorsState){
        .sampling = &job->sampling,
        .eos = job->eos,
        .n_eos = job->n_eos,
        .bad_words = job->bad_words.ids,
        .n_bad_words = job->bad_words.n,
        .n_prompt = prompt->ids.n,
        .draws = engine_sampling_draws(&job->sampling),
    };
}

static int open_sequence(Batch *batch, BatchPrompt *prompt, uint32_t index, ErrorDetail *reterr)
{
    BatchSequence *sequence = &prompt->sequences[index];
    const EngineSampling *s = &batch->job->sampling;
    ProcessorsState state = processors_state(batch, prompt);
    int r;

    r = token_list_append(&sequence->ids, prompt->ids.ids, prompt->ids.n);
    if (r < 0 || s->num_beams > 1)
        return r;
    r = sampler_new(s, batch->job->usage.seed + index, batch->n_vocab, &sequence->sampler, reterr);
    if (r == 0)
        r = text_stream_new(s->stop, s->n_stop, &sequence->stream);
    if (r == 0)
        sampler_constrain(sequence->sampler, &state);
    return r;
}

static int open_prompt(Batch *batch, BatchPrompt *prompt, ErrorDetail *reterr)
{
    int r = 0;

    prompt->sequences = calloc(batch->n_sequences, sizeof(*prompt->sequences));
    if (!prompt->sequences)
        return error_origin(-ENOMEM);
    for (uint32_t i = 0; i < batch->n_sequences && r == 0; i++)
        r = open_sequence(batch, prompt, i, reterr);
    if (r == 0 && batch->job->sampling.num_beams > 1)
        r = open_search(batch, prompt, reterr);
    return error_trace(r);
}

int batch_open_prompts(Batch *batch, ErrorDetail *reterr)
{
    uint32_t n_live = 0;

    for (size_t i = 0; i < batch->n_prompts; i++)
        n_live += batch->prompts[i].sequences ? batch->n_sequences : 0;
    for (size_t i = 0; i < batch->n_prompts && (n_live == 0 || n_live + batch->n_sequences <= BATCH_MAX_LIVE); i++) {
        int r;

        if (batch->prompts[i].ended || batch->prompts[i].sequences)
            continue;
        r = open_prompt(batch, &batch->prompts[i], reterr);
        if (r < 0)
            return error_trace(r);
        n_live += batch->n_sequences;
    }
    return 0;
}

/* ---- a step --------------------------------------------------------------------------------------------------------------------- */

/* 0, or SAMPLER_E_NUMERIC. */
static int take_beam(Batch *batch, BatchPrompt *prompt, uint32_t index, float *logits, ErrorDetail *reterr)
{
    const BatchSequence *sequence = &prompt->sequences[index];
    ProcessorsState state = processors_state(batch, prompt);

    if (!log_softmax(logits, batch->n_vocab))
        return sampler_check_finite(logits, batch->n_vocab, reterr); /* says which */
    processors_run(logits, batch->n_vocab, sequence->ids.ids, sequence->ids.n, &state, batch->scratch);
    beam_search_row(prompt->search, index, logits);
    return 0;
}

static void end_sequence(BatchSequence *sequence, const char *reason)
{
    sequence->ended = true;
    sequence->cache = kv_cache_free(sequence->cache);
    (void)snprintf(sequence->stop_reason, sizeof(sequence->stop_reason), "%s", reason);
}

/* Without beams a sequence moves on at once. */
static int take_draw(Batch *batch, BatchPrompt *prompt, uint32_t index, float *logits, ErrorDetail *reterr)
{
    BatchSequence *sequence = &prompt->sequences[index];
    const EngineSampling *s = &batch->job->sampling;
    const char *bytes, *text;
    size_t n, length;
    int32_t id;
    int r;

    r = sampler_pick(sequence->sampler, logits, sequence->ids.ids, sequence->ids.n, &id, reterr);
    if (r)
        return r;
    if (tokenizer_is_eog(batch->tokenizer, id) && !s->ignore_eos) {
        end_sequence(sequence, "stop");
        return 0;
    }
    r = token_list_append(&sequence->ids, &id, 1);
    if (r < 0)
        return r;
    bytes = tokenizer_token_bytes(batch->tokenizer, id, false, &n);
    r = text_stream_push(sequence->stream, bytes, n, &text, &length);
    if (r == 1)
        end_sequence(sequence, "stop_string");
    else if (sequence->ids.n - prompt->ids.n >= max_new_tokens(batch, prompt))
        end_sequence(sequence, s->max_tokens > 0 && sequence->ids.n - prompt->ids.n >= s->max_tokens ? "length" : "context_full");
    return MIN(r, 0);
}

static int take_one(Batch *batch, BatchPrompt *prompt, uint32_t index, float *logits, ErrorDetail *reterr)
{
    prompt->sequences[index].taken = true;
    if (prompt->search)
        return take_beam(batch, prompt, index, logits, reterr);
    return take_draw(batch, prompt, index, logits, reterr);
}

int batch_take(Batch *batch, BatchPrompt *prompt, uint32_t sequence, float *logits, ErrorDetail *reterr)
{
    int r = 0;

    if (prompt->n_steps > 0)
        return take_one(batch, prompt, sequence, logits, reterr);
    /* Draws go on from here each by itself; beams are forked when it is known which ones go on. */
    for (uint32_t i = 0; i < batch->n_sequences && !prompt->search; i++)
        if (i != sequence)
            (void)kv_cache_fork(prompt->sequences[sequence].cache, &prompt->sequences[i].cache, NULL);
    for (uint32_t i = 0; i < batch->n_sequences && r == 0; i++) {
        memcpy(batch->row, logits, batch->n_vocab * sizeof(*logits));
        r = take_one(batch, prompt, i, batch->row, reterr);
    }
    return r;
}

bool batch_step_is_complete(const Batch *batch, const BatchPrompt *prompt)
{
    if (!prompt->sequences)
        return false;
    for (uint32_t i = 0; i < batch->n_sequences; i++)
        if (!prompt->sequences[i].taken && !prompt->sequences[i].ended)
            return false;
    return true;
}

/* New beam @index of batch->next; @first: nobody has continued its source yet, so ids and cache move over. */
static int continue_beam(Batch *batch, BatchPrompt *prompt, uint32_t index, bool first, ErrorDetail *reterr)
{
    BatchSequence *source = &prompt->sequences[beam_search_source(prompt->search, index)], *sequence = &batch->next[index];
    int32_t token = beam_search_token(prompt->search, index);
    int r = 0;

    if (first) {
        *sequence = *source;
        *source = (BatchSequence){0};
        sequence->taken = false;
        return token_list_append(&sequence->ids, &token, 1);
    }
    r = token_list_append(&sequence->ids, source->ids.ids, source->ids.n);
    if (r == 0)
        r = token_list_append(&sequence->ids, &token, 1);
    if (r == 0 && source->cache)
        r = kv_cache_fork(source->cache, &sequence->cache, reterr);
    return MIN(r, 0); /* without memory for a fork it stays cold, and runs its ids again when there is some */
}

/* Which new beam takes each source over, the first that continues it, or n_sequences. */
static void find_heirs(const Batch *batch, const BatchPrompt *prompt, uint32_t *ret_heirs)
{
    for (uint32_t i = 0; i < batch->n_sequences; i++)
        ret_heirs[i] = batch->n_sequences;
    for (uint32_t i = batch->n_sequences; i-- > 0;)
        ret_heirs[beam_search_source(prompt->search, i)] = i;
}

/* Frees what nobody continues, forks what several continue, moves the rest; then all have one token more. */
static int reorder(Batch *batch, BatchPrompt *prompt, ErrorDetail *reterr)
{
    uint32_t heirs[ENGINE_MAX_BEAMS];
    int r = 0;

    find_heirs(batch, prompt, heirs);
    for (uint32_t i = 0; i < batch->n_sequences; i++)
        if (heirs[i] == batch->n_sequences)
            sequence_clear(&prompt->sequences[i]);
    for (uint32_t i = 0; i < batch->n_sequences && r == 0; i++)
        if (heirs[beam_search_source(prompt->search, i)] != i)
            r = continue_beam(batch, prompt, i, false, reterr);
    for (uint32_t i = 0; i < batch->n_sequences && r == 0; i++)
        if (heirs[beam_search_source(prompt->search, i)] == i)
            r = continue_beam(batch, prompt, i, true, reterr);
    for (uint32_t i = 0; i < batch->n_sequences; i++) {
        sequence_clear(&prompt->sequences[i]);
        prompt->sequences[i] = batch->next[i];
        batch->next[i] = (BatchSequence){0};
    }
    return r;
}

int batch_step(Batch *batch, BatchPrompt *prompt, ErrorDetail *reterr)
{
    bool over = true;
    int r;

    prompt->n_steps++;
    if (prompt->search) {
        batch->judged = prompt;
        r = beam_search_step(prompt->search);
        if (r < 0)
            return error_trace(r);
        return r == 1 ? batch_close_prompt(batch, prompt) : reorder(batch, prompt, reterr);
    }
    for (uint32_t i = 0; i < batch->n_sequences; i++) {
        prompt->sequences[i].taken = false;
        over = over && prompt->sequences[i].ended;
    }
    return over ? batch_close_prompt(batch, prompt) : 0;
}

bool batch_is_over(const Batch *batch)
{
    for (size_t i = 0; i < batch->n_prompts; i++)
        if (!batch->prompts[i].ended)
            return false;
    return true;
}
