/* SPDX-License-Identifier: Apache-2.0 */
/* What is kept of the probe, and what follows from it. */

#include "daemon/model/speed-probe.h"
#include "daemon/model/speed-schedule.h"
#include "daemon/model/model-private.h"
#include "daemon/model/nbits.h"
#include "quant/base/log.h"

#include <string.h>
#include <time.h>

/* Weights that are run over: small models as they are; beyond the caches of most CPUs, a tenth of a second to upload. */
#define PROBE_BYTES (UINT64_C(128) << 20)

/* The version counts changes of what is measured. */
const StateKind SPEED_KIND = {"speeds", {'L', 'E', 'A', 'T', 'S', 'P', 'E', 'D'}, 9};

/* Facts are of the machine as it was: other work, heat or a hypervisor change it.  After so long a token is timed again. */
#define TRUSTED_SECONDS 60
#define MOVED           1.15

/* ---- what it is stored by ---------------------------------------------------------------------------------------------------- */

/* Everything that the facts depend on, in words. */
static void make_key(const GpuInfo *info, const ModelFile *file, const ModelFit *fit, char ret[static SPEED_KEY_BYTES])
{
    const ModelParams *p = &file->hparams.model;
    const WeightsMatrix *tensors = file->weights.layers[file->weights.n_layers / 2].tensors;
    const KvForm *form = &fit->policy.form;
    int n;

    n = snprintf(ret, SPEED_KEY_BYTES, "%s|%s|%s|%s|%d|%u|%u %u %u %u %u %u %u %u|%d|%d %u %u %d %d %d %d %u %u %u|%d|%u|%llu %llu %u|%u %u|",
                 info->name, info->driver, info->platform, info->opencl_c, (int)info->simd, info->compute_units, p->n_layers, p->n_embd, p->n_ff,
                 p->n_vocab, p->attention.n_heads, p->attention.n_kv_heads, p->attention.k_head_dim, p->attention.v_head_dim,
                 fit->options.exact, (int)form->kind, form->k_bits, form->v_bits, (int)form->centre, (int)form->rotation,
                 (int)form->levels, form->pair_scale, form->group_dims, form->sink_tokens, form->tail_tokens, (int)speed_probe_home(fit),
                 speed_probe_rows(fit), (unsigned long long)fit->plan.weight_streamed_bytes, (unsigned long long)fit->plan.weight_in_place_bytes,
                 fit->plan.weight_slots, speed_probe_tiles(fit) ? fit->plan.kv.n_slots : 0, speed_probe_tiles(fit) ? fit->plan.kv.tile_blocks : 0);
    for (WeightsTensor i = 0; i < WEIGHTS_TENSOR_X_MAX; i++)
        n += snprintf(ret + n, (size_t)(SPEED_KEY_BYTES - n), "%s ", tensors[i].tensor->type->name);
    (void)snprintf(ret + n, (size_t)(SPEED_KEY_BYTES - n), "%s", file->weights.output.tensor->type->name);
}

static void make_name(const char *key, char ret[static 17])
{
    uint64_t hash = 0xcbf29ce484222325u;

    for (; *key; key++)
        hash = (hash ^ (uint8_t)*key) * 0x100000001b3u;
    (void)snprintf(ret, 17, "%016llx", (unsigned long long)hash);
}

static uint64_t bytes_to_run(Gpu *gpu)
{
    uint64_t used[GPU_PURPOSE_X_MAX], total, budget = gpu_info(gpu)->budget_bytes;

    gpu_memory_used(gpu, used, &total);
    return budget > total ? MIN((budget - total) / 2, PROBE_BYTES) : 0;
}

static void keep(const ModelFile *file, const char *name, SpeedFile *facts)
{
    facts->checked = (int64_t)time(NULL);
    if (file->state_dir && state_file_write(file->state_dir, &SPEED_KIND, name, facts, sizeof(*facts)))
        log_debug("The measured speed of this device is not kept: it will be measured again");
}

/* Whether the machine is about as fast as when they were measured, as far as can be seen. */
static bool still_hold(Gpu *gpu, const ModelFile *file, const ModelFit *fit, const char *name, SpeedFile *facts)
{
    int64_t age = (int64_t)time(NULL) - facts->checked;
    double token_sec;

    if ((age >= 0 && age < TRUSTED_SECONDS) || bytes_to_run(gpu) < facts->run_bytes ||
        speed_probe_again(gpu, file, fit, facts->run_bytes, &token_sec, NULL) != 0)
        return true;
    if (token_sec > facts->token_sec * MOVED || token_sec < facts->token_sec / MOVED) {
        log_debug("A token that took %.2f ms when this device was measured takes %.2f now: it is measured again", 1e3 * facts->token_sec,
                  1e3 * token_sec);
        return false;
    }
    keep(file, name, facts);
    return true;
}

int model_speed(Gpu *gpu, const ModelFile *file, const ModelFit *fit, bool may_measure, ModelSpeed *ret, ErrorDetail *reterr)
{
    uint64_t bytes = bytes_to_run(gpu);
    ModelFit resolved = *fit;
    SpeedFile stored, wanted;
    char name[17];
    bool known;
    int r;

    /* The bits that it has, or would have as far as is known: a model of zeros has no text to choose them by. */
    resolved.policy = model_nbits_resolve(file, fit->options.exact, &fit->policy, &known);
    fit = &resolved;
    memset(&wanted, 0, sizeof(wanted));
    make_key(gpu_info(gpu), file, fit, wanted.key);
    make_name(wanted.key, name);
    known = file->state_dir && state_file_read(file->state_dir, &SPEED_KIND, name, &stored, sizeof(stored)) == 0 &&
            memcmp(stored.key, wanted.key, sizeof(stored.key)) == 0;
    if (known && (!may_measure || still_hold(gpu, file, fit, name, &stored))) {
        *ret = stored.speed;
        return 0;
    }
    if (!may_measure)
        return -ENOENT;
    do {
        wanted.run_bytes = bytes;
        r = speed_probe(gpu, file, fit, bytes, &wanted.speed, &wanted.token_sec, reterr);
        bytes /= 2;
    } while (r == MODEL_E_DEVICE_MEMORY && bytes >= SPEED_PROBE_MIN_BYTES);
    if (r)
        return r;
    *ret = wanted.speed;
    keep(file, name, &wanted);
    return 0;
}

/* ---- prediction ------------------------------------------------------------------------------------------------------------- */

KvRates model_speed_rates(const ModelSpeed *speed, const ModelFit *fit)
{
    double per_layer = (double)fit->plan.kv.host_bytes_per_token / MAX(fit->plan.n_layers, 1u), deep = 4096;
    double per_token = (speed_past(speed, 2 * deep) - speed_past(speed, deep)) / deep, rate;

    if (per_token <= 0 || speed->tile_rate <= 0)
        return (KvRates){0, 0, 0};
    rate = per_layer / per_token;
    return (KvRates){
        .device_bytes_per_second = (uint64_t)rate,
        .link_bytes_per_second = (uint64_t)speed->tile_rate,
        .weight_bytes_per_layer = (uint64_t)(speed->layer_sec * rate), /* as many as take as long at that rate */
    };
}

static SpeedStep linked_step(const ModelSpeed *speed, const ModelFit *fit, double depth, const ModelLink *link, bool logits)
{
    SpeedStep step = speed_step(fit, (uint32_t)depth, MAX(speed->tile_rate, 1.0), MAX(speed->upload_rate, 1.0), logits);

    return speed_step_slower(&step, link->share);
}

static double predict_token(const ModelSpeed *speed, const ModelFit *fit, uint32_t depth, ModelPrediction *ret)
{
    ModelLink link = speed_link(speed->links, MIN(speed->n_links, (uint64_t)MODEL_SPEED_PASTS), depth);
    SpeedStep step = linked_step(speed, fit, depth, &link, true);
    double kernels, copies, sec, most;

    step.layer_sec = speed->layer_sec;
    step.past_sec = speed_past(speed, depth);
    step.head_sec = speed->head_sec;
    kernels = speed_step_kernels(&step);
    copies = speed_step_copies(&step);
    sec = speed_schedule(&step, link.beside);
    most = MIN(kernels, copies);
    ret->bus_limited = copies > kernels;
    ret->hidden_share = most > 0 ? MIN(MAX((kernels + copies - sec) / most, 0.0), 1.0) : 1;
    return sec;
}

/* A pass of more rows than were timed takes longer in proportion, and has a longer past within itself; but it brings weights and past once. */
static double predict_prefill(const ModelSpeed *speed, const ModelFit *fit, uint32_t depth)
{
    ModelLink link = speed_link(speed->chunk_links, MIN(speed->n_chunk_links, (uint64_t)MODEL_SPEED_CHUNK_LINKS), depth);
    SpeedStep step = linked_step(speed, fit, depth, &link, false);
    double rows = MAX((double)fit->options.max_rows, speed->chunk_rows), scale = rows / MAX(speed->chunk_rows, 1.0), sec;

    step.layer_sec = scale * speed->chunk_layer_sec;
    step.past_sec = scale * speed->chunk_layer_past_sec * (depth + (rows - speed->chunk_rows) / 2);
    step.head_sec = scale * speed->chunk_sec;
    sec = speed_schedule(&step, link.beside);
    return sec > 0 ? rows / sec : 0;
}

void model_predict(const ModelSpeed *speed, const ModelFit *fit, uint32_t depth, ModelPrediction *ret)
{
    ModelPrediction prediction = {.prefill_rate = predict_prefill(speed, fit, depth)};

    prediction.token_sec = predict_token(speed, fit, depth, &prediction);
    *ret = prediction;
}
