/* SPDX-License-Identifier: Apache-2.0 */
/* What the sequences of a batch say: stop strings while they grow, text and reasons at the end. */

#include "daemon/engine/batch-text.h"

#include <string.h>

/* ---- stop strings --------------------------------------------------------------------------------------------------------------- */

static int push_bytes(Batch *batch, size_t *length, const char *bytes, size_t n)
{
    if (*length + n > batch->bytes_capacity) {
        size_t capacity = 2 * (*length + n) + 64;
        char *grown = realloc(batch->bytes, capacity);

        if (!grown)
            return error_origin(-ENOMEM);
        batch->bytes = grown;
        batch->bytes_capacity = capacity;
    }
    if (n > 0)
        memcpy(batch->bytes + *length, bytes, n);
    *length += n;
    return 0;
}

/* The bytes of the answer's last tokens, at least @n of them when there are so many, in batch->bytes. */
static int push_end(Batch *batch, const BatchSequence *sequence, size_t n_prompt, size_t n, size_t *ret_length)
{
    size_t first = sequence->ids.n, have = 0, length;

    while (first > n_prompt && have < n) {
        (void)tokenizer_token_bytes(batch->tokenizer, sequence->ids.ids[--first], false, &length);
        have += length;
    }
    *ret_length = 0;
    for (; first < sequence->ids.n; first++) {
        const char *bytes = tokenizer_token_bytes(batch->tokenizer, sequence->ids.ids[first], false, &length);
        int r = push_bytes(batch, ret_length, bytes, length);

        if (r < 0)
            return r;
    }
    return 0;
}

bool batch_stops(void *userdata, uint32_t beam, int32_t token)
{
    Batch *batch = userdata;
    const EngineSampling *s = &batch->job->sampling;
    const BatchPrompt *prompt = batch->judged;
    size_t longest = 0, before, length, n;
    const char *bytes;

    for (size_t i = 0; i < s->n_stop; i++)
        longest = MAX(longest, strlen(s->stop[i]));
    if (longest == 0 || push_end(batch, &prompt->sequences[beam], prompt->ids.n, longest - 1, &before) < 0)
        return false;
    bytes = tokenizer_token_bytes(batch->tokenizer, token, false, &n);
    length = before;
    if (push_bytes(batch, &length, bytes, n) < 0)
        return false;
    for (size_t i = 0; i < s->n_stop; i++) {
        size_t size = strlen(s->stop[i]);

        for (size_t end = MAX(before + 1, size); end <= length; end++)
            if (memcmp(batch->bytes + end - size, s->stop[i], size) == 0)
                return true;
    }
    return false;
}

/* ---- results ---------------------------------------------------------------------------------------------------------------------- */

/* Text, ids and count of an answer (n ids without end token). */
static int fill_result(const Batch *batch, const int32_t *ids, uint32_t n, EngineSequence *ret)
{
    _cleanup_(text_stream_freep) TextStream *stream = NULL;
    const EngineSampling *s = &batch->job->sampling;
    const char *text;
    size_t length;
    int r;

    ret->n_tokens = n;
    if (batch->job->want_ids) {
        ret->ids = calloc(n + 1, sizeof(*ids));
        if (!ret->ids)
            return error_origin(-ENOMEM);
        memcpy(ret->ids, ids, n * sizeof(*ids));
    }
    r = text_stream_new(s->stop, s->n_stop, &stream);
    for (uint32_t i = 0; i <= n && r >= 0; i++) {
        char *grown;

        if (i < n) {
            size_t n_bytes;
            const char *bytes = tokenizer_token_bytes(batch->tokenizer, ids[i], false, &n_bytes);

            r = text_stream_push(stream, bytes, n_bytes, &text, &length);
        } else {
            r = text_stream_finish(stream, &text, &length);
        }
        if (r < 0)
            break;
        grown = realloc(ret->text, ret->text_length + length + 1);
        if (!grown)
            return error_origin(-ENOMEM);
        ret->text = grown;
        memcpy(ret->text + ret->text_length, text, length);
        ret->text_length += length;
        ret->text[ret->text_length] = 0;
    }
    return MIN(r, 0);
}

static const char *beam_stop_reason(const Batch *batch, const BeamResult *result)
{
    switch (result->stop) {
    case BEAM_STOP_EOS:
        return "stop";
    case BEAM_STOP_CRITERION:
        return "stop_string";
    case BEAM_STOP_LENGTH:
        return batch->job->sampling.max_tokens > 0 && result->n_tokens >= batch->job->sampling.max_tokens ? "length" : "context_full";
    case BEAM_STOP_NONE:
        break;
    }
    return "error";
}

static int fill_beam_result(const Batch *batch, const BatchPrompt *prompt, uint32_t index, EngineSequence *ret)
{
    _cleanup_(freep) int32_t *ids = NULL;
    BeamResult result;

    beam_search_result(prompt->search, index, &result);
    ids = calloc(result.n_tokens + 1, sizeof(*ids));
    if (!ids)
        return error_origin(-ENOMEM);
    beam_search_tokens(prompt->search, index, ids, NULL);
    ret->score = result.score;
    (void)snprintf(ret->stop_reason, sizeof(ret->stop_reason), "%s", beam_stop_reason(batch, &result));
    return fill_result(batch, ids, result.n_tokens - (result.stop == BEAM_STOP_EOS), ret);
}

int batch_close_prompt(Batch *batch, BatchPrompt *prompt)
{
    uint32_t n = MAX(batch->job->sampling.num_return_sequences, 1u);
    int r = 0;

    if (prompt->search)
        n = MIN(n, beam_search_n_results(prompt->search));
    prompt->results = calloc(n + 1, sizeof(*prompt->results));
    if (!prompt->results)
        return error_origin(-ENOMEM);
    prompt->n_results = n;
    for (uint32_t i = 0; i < n && r == 0; i++) {
        EngineSequence *result = &prompt->results[i];
        const BatchSequence *sequence = &prompt->sequences[i];

        result->prompt = (uint32_t)(prompt - batch->prompts);
        if (prompt->search) {
            r = fill_beam_result(batch, prompt, i, result);
            continue;
        }
        (void)snprintf(result->stop_reason, sizeof(result->stop_reason), "%s", sequence->stop_reason);
        r = fill_result(batch, sequence->ids.ids + prompt->ids.n, (uint32_t)(sequence->ids.n - prompt->ids.n), result);
    }
    if (r == 0) {
        prompt->ended = true;
        batch_clear_prompt(batch, prompt);
    }
    return r;
}

int batch_take_results(Batch *batch, EngineEvent *event, uint32_t *ret_n_tokens)
{
    size_t n = 0;

    for (size_t p = 0; p < batch->n_prompts; p++)
        n += batch->prompts[p].n_results;
    event->sequences = calloc(n + 1, sizeof(*event->sequences));
    if (!event->sequences)
        return error_origin(-ENOMEM);
    *ret_n_tokens = 0;
    for (size_t p = 0; p < batch->n_prompts; p++) {
        BatchPrompt *prompt = &batch->prompts[p];

        for (size_t i = 0; i < prompt->n_results; i++) {
            *ret_n_tokens += prompt->results[i].n_tokens;
            event->sequences[event->n_sequences++] = prompt->results[i];
        }
        free(prompt->results);
        prompt->results = NULL;
        prompt->n_results = 0;
    }
    return 0;
}
