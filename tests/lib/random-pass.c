/* SPDX-License-Identifier: Apache-2.0 */
/* Random programs: passes, and what comes out of them. */

#include "tests/lib/random-world-internal.h"

#include <math.h>
#include <string.h>

#define failed random_failed

/* Everything that outputs may depend on beside the tokens. */
uint64_t random_config_key(const RandomConfig *c)
{
    uint64_t key = random_mix(1, (uint64_t)c->exact << 1 | c->calibrated);

    for (uint32_t l = 0; l < c->n_layers; l++) {
        const RandomLayer *layer = &c->layers[l];

        key = random_mix(random_mix(random_mix(key, layer->kind), layer->window), layer->source);
        key = random_mix(random_mix(key, layer->shape), random_form_of(c, l));
    }
    return key;
}

static bool has_keys(const Run *run, uint32_t layer)
{
    return run->config.layers[layer].kind != RANDOM_NONE;
}

/* ---- outputs ------------------------------------------------------------------------------------------------------------------------ */

static uint64_t hash_outputs(const Run *run, uint32_t row)
{
    uint64_t hash = 0;

    for (uint32_t l = 0; l < run->config.n_layers; l++) {
        uint32_t width = reference_out_values(run->reference, l);

        for (uint32_t i = 0; i < width && has_keys(run, l); i++) {
            uint32_t bits;

            memcpy(&bits, &run->world->out_memory[l][(size_t)row * width + i], sizeof(bits));
            hash = random_mix(hash, bits);
        }
    }
    return hash;
}

static bool same_bits_as_before(Run *run, const RefSequence *tokens, uint32_t position, uint32_t row)
{
    uint64_t key = random_mix(run->config_key, tokens->hashes[position]) | 1, value = hash_outputs(run, row);
    RandomWorld *world = run->world;
    uint32_t at = (uint32_t)(key >> 20) % N_BITS;

    if (world->n_bits > N_BITS / 2)
        random_world_forget(world);
    while (world->bits[at].key != 0 && world->bits[at].key != key)
        at = (at + 1) % N_BITS;
    if (world->bits[at].key == 0) {
        world->bits[at] = (Bits){key, value};
        world->n_bits++;
        return true;
    }
    world->counts.bits_compared++;
    if (world->bits[at].value == value)
        return true;
    return failed(run, "position %u: other bits than in an earlier run of the same tokens", position);
}

static bool layer_is_near(Run *run, RefSequence *tokens, uint32_t l, uint32_t position, uint32_t row)
{
    const RandomConfig *c = &run->config;
    uint32_t width = reference_out_values(run->reference, l), dim = random_shape(c, l).v_head_dim;
    double wanted[2 * KV_MAX_HEAD_DIM], tolerance = c->exact ? RANDOM_TOLERANCE_EXACT : RANDOM_TOLERANCE_FAST;
    double *worst = c->exact ? &run->world->counts.worst_exact : &run->world->counts.worst_fast;
    const float *got = run->world->out_memory[l] + (size_t)row * width;

    ref_sequence_attend(tokens, l, position, wanted);
    for (uint32_t h = 0; h < width; h += dim) {
        double largest = 0, error = 0;

        for (uint32_t d = h; d < h + dim; d++) {
            largest = fmax(largest, fabs(wanted[d]));
            error = isfinite(got[d]) ? fmax(error, fabs(got[d] - wanted[d])) : INFINITY;
        }
        if (!(error <= tolerance * largest))
            return failed(run, "position %u, layer %u, head %u: off the reference by %.3g of %.3g", position, l, h / dim, error,
                          largest);
        *worst = fmax(*worst, error / largest);
    }
    return true;
}

static bool near_reference(Run *run, RefSequence *tokens, uint32_t position, uint32_t row)
{
    for (uint32_t l = 0; l < run->config.n_layers; l++)
        if (has_keys(run, l) && !layer_is_near(run, tokens, l, position, row))
            return false;
    return true;
}

/* ---- passes -------------------------------------------------------------------------------------------------------------------------- */

/* The seeded defect: what a lost write would do. */
static void spoil(const Run *run, uint32_t layer, const Item *items, uint32_t n_items)
{
    uint32_t width = reference_row_values(run->reference, layer), row = 0;
    KvShape shape = random_shape(&run->config, layer);

    for (uint32_t i = 0; i < n_items; row += items[i++].n_tokens)
        if (items[i].sequence->is_cropped_fork && items[i].sequence->tokens->n_tokens > 0)
            run->world->qkv_memory[layer][(size_t)row * width + shape.n_heads * shape.k_head_dim] += 1.0f;
}

static void fill_inputs(Run *run, const Item *items, uint32_t n_items)
{
    for (uint32_t l = 0; l < run->config.n_layers; l++) {
        uint32_t width = reference_row_values(run->reference, l), row = 0;

        for (uint32_t i = 0; i < n_items; i++)
            for (uint32_t t = 0; t < items[i].n_tokens; t++, row++)
                reference_row(run->reference, l, items[i].ids[t], items[i].sequence->tokens->n_tokens + t,
                              run->world->qkv_memory[l] + (size_t)row * width);
        if (run->world->has_defect && run->config.layers[l].kind == RANDOM_FULL)
            spoil(run, l, items, n_items);
        must(gpu_upload(run->world->gpu, GPU_QUEUE_COMPUTE, run->world->qkv[l], 0, run->world->qkv_memory[l],
                        (uint64_t)row * width * sizeof(float), GPU_WAIT_NONE, "random qkv", NULL),
             "upload");
    }
}

static void finish_step(Run *run)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r = gpu_step_finish(run->world->gpu, &detail);

    if (r)
        fprintf(stderr, "%s\n", detail.text);
    must(r, "finish");
}

static bool check_outputs(Run *run, const Item *items, uint32_t n_items)
{
    uint32_t row = 0;

    for (uint32_t i = 0; i < n_items; i++)
        for (uint32_t t = 0; t < items[i].n_tokens; t++, row++) {
            RefSequence *tokens = items[i].sequence->tokens;
            uint32_t position = tokens->n_tokens;

            ref_sequence_append(tokens, items[i].ids[t]);
            if (!near_reference(run, tokens, position, row) || !same_bits_as_before(run, tokens, position, row))
                return false;
        }
    run->world->counts.rows += row;
    return true;
}

bool random_check_lengths(Run *run)
{
    for (uint32_t s = 0; s < RANDOM_MAX_SEQUENCES; s++) {
        const Sequence *sequence = &run->sequences[s];
        KvBytes bytes;

        if (!sequence->cache)
            continue;
        kv_cache_bytes(sequence->cache, &bytes);
        if (kv_cache_length(sequence->cache) != sequence->tokens->n_tokens || bytes.length != sequence->tokens->n_tokens)
            return failed(run, "sequence %u: length %u and %u, must be %u", s, kv_cache_length(sequence->cache), bytes.length,
                          sequence->tokens->n_tokens);
    }
    return true;
}

bool random_may_refuse(const Run *run, int r)
{
    return (r == KV_E_HOST_MEMORY && run->config.host_budget_kib > 0) || (r == KV_E_DEVICE_MEMORY && run->config.device_more_kib > 0);
}

static int expected_code(const Run *run, const Item *items, uint32_t n_items)
{
    for (uint32_t i = 0; i < n_items; i++)
        if (items[i].sequence->tokens->n_tokens + items[i].n_tokens > run->config.max_tokens)
            return KV_E_CONTEXT;
    return 0;
}

bool random_begin(Run *run, const Item *items, uint32_t n_items, KvPass **ret)
{
    KvPassItem pass_items[RANDOM_MAX_ARGS];
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r, expected = expected_code(run, items, n_items);

    *ret = NULL;
    for (uint32_t i = 0; i < n_items; i++)
        pass_items[i] = (KvPassItem){items[i].sequence->cache, items[i].n_tokens};
    r = gpu_step_begin(run->world->gpu);
    if (r)
        return failed(run, "no step can begin (%d), so the device is lost", r);
    r = kv_pass_begin(run->store, pass_items, n_items, ret, &detail);
    if (r == expected && r == 0)
        return true;
    run->world->counts.refused++;
    if (r == expected || random_may_refuse(run, r)) {
        *ret = NULL;
        return detail.text[0] ? random_check_lengths(run) : failed(run, "refused without a word: %d", r);
    }
    return failed(run, "a pass begins with %d, not %d: %s", r, expected, detail.text);
}

/* ---- states ---------------------------------------------------------------------------------------------------------------------- */

static States *states_at(Run *run, uint32_t layer, uint32_t item)
{
    return &run->states[layer * RANDOM_MAX_ARGS + item];
}

/* Those between the tokens of a sequence that can be taken back. */
static bool queue_steps(Run *run, KvPass *pass, uint32_t layer, const Item *items, uint32_t i, GpuBuffer *buffer)
{
    Gpu *gpu = run->world->gpu;
    States *s = states_at(run, layer, i);

    if (items[i].n_steps > MAX_STEPS)
        return failed(run, "%u states between tokens, at most %u", items[i].n_steps, MAX_STEPS);
    for (uint32_t t = 0; t < items[i].n_steps; t++) {
        uint64_t hash = ref_sequence_hash(items[i].sequence->tokens, items[i].ids, t + 1), conv, recurrent;
        ErrorDetail detail = ERROR_DETAIL_NULL;
        int r = kv_pass_state_step(pass, layer, i, t + 1, &conv, &recurrent, &detail);

        if (r)
            return failed(run, "state of layer %u after %u tokens: %d, %s", layer, t + 1, r, detail.text);
        reference_state(layer, 0, hash, s->steps_conv[t], CONV_BYTES);
        reference_state(layer, 1, hash, s->steps_recurrent[t], RECURRENT_BYTES);
        must(gpu_upload(gpu, GPU_QUEUE_COMPUTE, buffer, conv, s->steps_conv[t], CONV_BYTES, GPU_WAIT_NONE, "conv", NULL), "conv");
        must(gpu_upload(gpu, GPU_QUEUE_COMPUTE, buffer, recurrent, s->steps_recurrent[t], RECURRENT_BYTES, GPU_WAIT_NONE, "recurrent",
                        NULL),
             "recurrent");
    }
    return true;
}

/* Reads what was there, writes what comes: as a layer's kernels would. */
static bool queue_states(Run *run, KvPass *pass, uint32_t layer, Item *items, uint32_t n_items)
{
    Gpu *gpu = run->world->gpu;

    for (uint32_t i = 0; i < n_items; i++) {
        States *s = states_at(run, layer, i);
        ErrorDetail detail = ERROR_DETAIL_NULL;
        uint64_t hash = ref_sequence_hash(items[i].sequence->tokens, items[i].ids, items[i].n_tokens);
        KvState at;
        int r = kv_pass_state(pass, layer, i, &at, &detail);

        if (r)
            return failed(run, "state of layer %u: %d, %s", layer, r, detail.text);
        reference_state(layer, 0, hash, s->new_conv, CONV_BYTES);
        reference_state(layer, 1, hash, s->new_recurrent, RECURRENT_BYTES);
        must(gpu_download(gpu, GPU_QUEUE_COMPUTE, at.buffer, at.conv_from, s->old_conv, CONV_BYTES, GPU_WAIT_NONE, "conv", NULL), "conv");
        must(gpu_download(gpu, GPU_QUEUE_COMPUTE, at.buffer, at.recurrent_from, s->old_recurrent, RECURRENT_BYTES, GPU_WAIT_NONE,
                          "recurrent", NULL),
             "recurrent");
        must(gpu_upload(gpu, GPU_QUEUE_COMPUTE, at.buffer, at.conv_to, s->new_conv, CONV_BYTES, GPU_WAIT_NONE, "conv", NULL), "conv");
        must(gpu_upload(gpu, GPU_QUEUE_COMPUTE, at.buffer, at.recurrent_to, s->new_recurrent, RECURRENT_BYTES, GPU_WAIT_NONE, "recurrent",
                        NULL),
             "recurrent");
        items[i].n_steps = at.n_steps;
        if (!queue_steps(run, pass, layer, items, i, at.buffer))
            return false;
    }
    return true;
}

static bool check_states(Run *run, const Item *items, uint32_t n_items)
{
    for (uint32_t l = 0; l < run->config.n_layers; l++)
        for (uint32_t i = 0; i < n_items && run->config.layers[l].state; i++) {
            const States *s = states_at(run, l, i);
            uint64_t hash = ref_sequence_hash(items[i].sequence->tokens, NULL, 0);
            uint8_t conv[CONV_BYTES], recurrent[RECURRENT_BYTES];

            reference_state(l, 0, hash, conv, CONV_BYTES);
            reference_state(l, 1, hash, recurrent, RECURRENT_BYTES);
            if (memcmp(conv, s->old_conv, CONV_BYTES) != 0 || memcmp(recurrent, s->old_recurrent, RECURRENT_BYTES) != 0)
                return failed(run, "layer %u, item %u: another state than that after %u tokens", l, i,
                              items[i].sequence->tokens->n_tokens);
            run->world->counts.states++;
        }
    return true;
}

/* ---- running -------------------------------------------------------------------------------------------------------------------- */

static bool queue_layer(Run *run, KvPass *pass, uint32_t l, Item *items, uint32_t n_items, uint32_t n_rows)
{
    RandomWorld *world = run->world;
    uint64_t bytes = (uint64_t)n_rows * reference_out_values(run->reference, l) * sizeof(float);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    if (run->config.layers[l].state && !queue_states(run, pass, l, items, n_items))
        return false;
    if (!has_keys(run, l))
        return true;
    r = kv_pass_layer(pass, l, world->qkv[l], world->out[l], &detail);
    if (r)
        return failed(run, "layer %u: %d, %s", l, r, detail.text);
    must(gpu_download(world->gpu, GPU_QUEUE_COMPUTE, world->out[l], 0, world->out_memory[l], bytes, GPU_WAIT_NONE, "random out", NULL),
         "download");
    return true;
}

bool random_queue_layers(Run *run, KvPass *pass, uint32_t n_layers, Item *items, uint32_t n_items)
{
    uint32_t n_rows = 0;

    fill_inputs(run, items, n_items);
    for (uint32_t i = 0; i < n_items; i++)
        n_rows += items[i].n_tokens;
    for (uint32_t l = 0; l < n_layers; l++)
        if (!queue_layer(run, pass, l, items, n_items, n_rows)) {
            (void)kv_pass_abort(pass);
            return false;
        }
    return true;
}

/* It can go back to the end of the pass, and of a short one to any token of it, unless states were kept at the end only. */
static void note_ends(const Run *run, const Item *item)
{
    uint32_t end = item->sequence->tokens->n_tokens;
    bool states = false;

    for (uint32_t l = 0; l < run->config.n_layers; l++)
        states = states || run->config.layers[l].state;
    item->sequence->ends[end] = 1;
    if (item->n_tokens <= KV_PAGE_TOKENS && (!states || item->n_steps > 0))
        memset(item->sequence->ends + end - item->n_tokens, 1, item->n_tokens);
}

bool random_run_items(Run *run, Item *items, uint32_t n_items)
{
    KvPass *pass;

    if (!random_begin(run, items, n_items, &pass))
        return false;
    if (!pass)
        return true;
    if (!random_queue_layers(run, pass, run->config.n_layers, items, n_items))
        return false;
    must(kv_pass_prefetch(pass), "prefetch");
    finish_step(run);
    must(kv_pass_commit(pass), "commit");
    run->world->counts.passes++;
    if (!check_states(run, items, n_items) || !check_outputs(run, items, n_items))
        return false;
    for (uint32_t i = 0; i < n_items; i++)
        note_ends(run, &items[i]);
    return random_check_lengths(run);
}

static uint32_t cross_id(uint32_t seed, uint32_t position)
{
    return (uint32_t)(random_mix(seed + 77, position) & 0xffffff);
}

static bool queue_cross(Run *run, KvPass *pass, uint32_t seed, uint32_t first, uint32_t n)
{
    RandomWorld *world = run->world;

    for (uint32_t l = 0; l < run->config.n_layers; l++) {
        uint32_t width = reference_cross_values(run->reference, l);
        ErrorDetail detail = ERROR_DETAIL_NULL;
        int r;

        if (width == 0)
            continue;
        for (uint32_t t = 0; t < n; t++)
            reference_cross_row(run->reference, l, cross_id(seed, first + t), first + t, world->qkv_memory[l] + (size_t)t * width);
        must(gpu_upload(world->gpu, GPU_QUEUE_COMPUTE, world->qkv[l], 0, world->qkv_memory[l], (uint64_t)n * width * sizeof(float),
                        GPU_WAIT_NONE, "random cross", NULL),
             "upload");
        r = kv_cross_layer(pass, l, world->qkv[l], &detail);
        if (r)
            return failed(run, "encoder output of layer %u: %d, %s", l, r, detail.text);
    }
    return true;
}

bool random_run_cross(Run *run, Sequence *sequence, uint32_t seed, bool *ret_there)
{
    uint32_t total = 1 + seed % RANDOM_MAX_CROSS;

    *ret_there = true;
    while (sequence->tokens->n_cross < total) {
        uint32_t first = sequence->tokens->n_cross;
        KvPassItem item = {sequence->cache, first == 0 ? (total + 1) / 2 : total - first};
        ErrorDetail detail = ERROR_DETAIL_NULL;
        KvPass *pass;
        int r;

        r = gpu_step_begin(run->world->gpu);
        if (r)
            return failed(run, "no step can begin (%d), so the device is lost", r);
        r = kv_cross_begin(run->store, &item, 1, &pass, &detail);
        if (random_may_refuse(run, r)) {
            *ret_there = false;
            return true;
        }
        if (r)
            return failed(run, "a pass of encoder output begins with %d: %s", r, detail.text);
        if (!queue_cross(run, pass, seed, first, item.n_tokens)) {
            (void)kv_pass_abort(pass);
            return false;
        }
        finish_step(run);
        must(kv_pass_commit(pass), "commit");
        for (uint32_t t = 0; t < item.n_tokens; t++)
            ref_sequence_append_cross(sequence->tokens, cross_id(seed, first + t));
        if (kv_cache_cross_length(sequence->cache) != sequence->tokens->n_cross)
            return failed(run, "%u tokens of encoder output, must be %u", kv_cache_cross_length(sequence->cache),
                          sequence->tokens->n_cross);
    }
    return true;
}

bool random_run_again(Run *run, Sequence *sequence, const uint32_t *ids, uint32_t end)
{
    while (sequence->tokens->n_tokens < end) {
        uint32_t before = sequence->tokens->n_tokens, n = MIN(end - before, (uint32_t)RANDOM_MAX_ROWS);

        run->world->counts.reruns++;
        if (!random_run_items(run, &(Item){.sequence = sequence, .n_tokens = n, .ids = ids + before}, 1))
            return false;
        if (sequence->tokens->n_tokens == before)
            break; /* refused for its memory */
    }
    return true;
}

