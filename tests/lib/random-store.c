/* SPDX-License-Identifier: Apache-2.0 */
/* Random programs: stores, moves between them, images of sequences. */

#include "tests/lib/random-world-internal.h"

#include "cache/kv-file.h"
#include "cache/kv-migrate.h"

#include <math.h>
#include <string.h>
#include <sys/mman.h>

#define failed random_failed

/* What the store is told of the layers; forms in @forms. */
static void describe_layers(const RandomConfig *c, const Reference *reference, KvForm *forms, KvLayer *ret)
{
    static const KvLayerKind kinds[] = {
        [RANDOM_FULL] = KV_LAYER_FULL,   [RANDOM_SLIDING] = KV_LAYER_SLIDING, [RANDOM_CHUNKED] = KV_LAYER_CHUNKED,
        [RANDOM_CROSS] = KV_LAYER_CROSS, [RANDOM_SHARED] = KV_LAYER_SHARED,   [RANDOM_NONE] = KV_LAYER_NONE,
    };

    for (uint32_t l = 0; l < c->n_layers; l++) {
        const RandomLayer *layer = &c->layers[l];

        forms[l] = random_form(random_form_of(c, l));
        ret[l] = (KvLayer){
            .kind = kinds[layer->kind],
            .window = layer->window,
            .source = layer->source,
            .shape = random_shape(c, l),
            .scale = 1.0f / sqrtf((float)random_shape(c, l).k_head_dim),
            .inv_freq = reference_inv_freq(reference, l),
            .form = layer->form > 0 ? &forms[l] : NULL,
            .conv_bytes = layer->state ? CONV_BYTES : 0,
            .recurrent_bytes = layer->state ? RECURRENT_BYTES : 0,
        };
    }
}

int random_store_new(Gpu *gpu, const RandomConfig *c, const Reference *reference, KvStore **ret, ErrorDetail *reterr)
{
    KvLayer layers[RANDOM_MAX_LAYERS];
    KvForm forms[RANDOM_MAX_LAYERS];
    KvPolicy policy = {
        .strategy = KV_STRATEGY_DYNAMIC,
        .growth = c->growth,
        .home = c->home,
        .offload_only_non_sliding = c->only_non_sliding,
        .form = random_form(c->form),
        .transfer = c->transfer,
        .n_slots = c->n_slots,
        .tile_blocks = c->tile_blocks,
        .max_cache_tokens = c->max_tokens,
        .host_budget_bytes = (uint64_t)c->host_budget_kib << 10,
    };
    KvModel model = {
        .n_layers = c->n_layers,
        .layers = layers,
        .shape = random_shape(c, 0),
        .inv_freq = reference_inv_freq(reference, 0),
        .calibration = reference_calibration(reference),
        .exact = c->exact,
        .max_rows = RANDOM_MAX_ROWS,
        .max_sequences = c->max_sequences,
        .max_cross_tokens = random_has_cross(c) ? RANDOM_MAX_CROSS : 0,
        .max_state_steps = MAX_STEPS,
    };

    KvPlan plan;
    int r;

    describe_layers(c, reference, forms, layers);
    model.scale = 1.0f / sqrtf((float)model.shape.k_head_dim);
    r = kv_store_plan(gpu_info(gpu), &model, &policy, &plan, reterr);
    if (r)
        return r;
    if (c->device_more_kib > 0) /* home host, copied: what is more holds a resident share */
        policy.device_budget_bytes = plan.staging_bytes + plan.tail_bytes + plan.device_page_bytes + ((uint64_t)c->device_more_kib << 10);
    return kv_store_new(gpu, &model, &policy, ret, reterr);
}

/* ---- moves and images --------------------------------------------------------------------------------------------------------------- */

/* Into a store of another policy; with the same forms that must be possible, and changes nothing. */
bool random_migrate(Run *run, const RandomOp *op)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    RandomConfig before = run->config;
    KvStore *to = NULL;
    bool same, refused, any = false;
    int r;

    for (uint32_t s = 0; s < RANDOM_MAX_SEQUENCES; s++)
        any = any || run->sequences[s].cache;
    if (!any)
        return true;
    random_policy_vary(&run->config, op->seed, gpu_info(run->world->gpu)->unified_memory);
    same = random_config_key(&run->config) == run->config_key;
    r = random_store_new(run->world->gpu, &run->config, run->reference, &to, &detail);
    if (r)
        return failed(run, "no store to migrate to: %d, %s", r, detail.text);
    if (kv_store_is_same(run->store, to) != same)
        return failed(run, "stores are%s the same", same ? " not" : "");
    r = kv_store_migrate(run->store, to, false, &detail);
    refused = random_may_refuse(run, r) || (r == -EINVAL && !same);
    if (r && !refused)
        return failed(run, "migration: %d, %s", r, detail.text);
    if (!r && !same)
        return failed(run, "migration between forms");
    if (r) {
        run->config = before;
        (void)kv_store_free(to);
        run->world->counts.refused++;
        return random_check_lengths(run);
    }
    (void)kv_store_free(run->store);
    run->store = to;
    run->world->counts.migrations++;
    for (uint32_t s = 0; s < RANDOM_MAX_SEQUENCES; s++)
        run->sequences[s].recording = false;
    return random_check_lengths(run);
}

void random_drop_image(Image *image)
{
    if (image->tokens)
        (void)close(image->fd);
    image->tokens = ref_sequence_free(image->tokens);
}

static const uint8_t no_digest[KV_IMAGE_DIGEST];

bool random_save(Run *run, const RandomOp *op)
{
    const Sequence *sequence = &run->sequences[op->args[0].sequence];
    Image *image = &run->images[op->args[0].value % RANDOM_MAX_IMAGES];
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvSave *save = NULL;
    int r;

    if (!sequence->cache || sequence->tokens->n_tokens == 0)
        return true;
    random_drop_image(image);
    r = kv_save_begin(sequence->cache, no_digest, "extra", 5, &save, &detail);
    if (random_may_refuse(run, r))
        return random_check_lengths(run);
    if (r)
        return failed(run, "saving: %d, %s", r, detail.text);
    image->fd = memfd_create("image", MFD_CLOEXEC);
    must(image->fd < 0, "memfd");
    must(kv_save_write(save, image->fd), "save");
    (void)kv_save_end(save);
    image->tokens = ref_sequence_copy(sequence->tokens);
    return random_check_lengths(run);
}

bool random_restore(Run *run, const RandomOp *op)
{
    Sequence *sequence = &run->sequences[op->args[0].sequence];
    const Image *image = &run->images[op->args[0].value % RANDOM_MAX_IMAGES];
    KvImageFacts facts = {.layout = kv_store_layout(run->store)};
    _cleanup_(kv_image_freep) KvImage *opened = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvCache *cache = NULL;
    size_t n_extra = 0;
    int r;

    if (!image->tokens)
        return true;
    must(lseek(image->fd, 0, SEEK_SET) < 0, "seek");
    r = kv_image_open(image->fd, "image", &facts, op->seed % 2, &opened, &detail);
    if (r)
        return failed(run, "an image cannot be opened: %d, %s", r, detail.text);
    (void)kv_image_extra(opened, &n_extra);
    if (n_extra != 5)
        return failed(run, "%zu bytes beside the image", n_extra);
    r = kv_restore(run->store, opened, &cache, &detail);
    if (random_may_refuse(run, r))
        return random_check_lengths(run);
    if (r)
        return failed(run, "restoring: %d, %s", r, detail.text);
    random_close(sequence);
    *sequence = (Sequence){.cache = cache, .tokens = ref_sequence_copy(image->tokens)};
    run->world->counts.restored++;
    return random_check_lengths(run);
}
