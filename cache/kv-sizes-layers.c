/* SPDX-License-Identifier: Apache-2.0 */
/* Which section, plane and place in a slot of states each layer of a model has. */

#include "cache/kv-sizes.h"

#include <string.h>

KvLayer kv_model_layer(const KvModel *model, uint32_t l)
{
    KvLayer layer = model->layers ? model->layers[l] : (KvLayer){.kind = KV_LAYER_FULL};

    if (layer.shape.n_heads == 0)
        layer.shape = model->shape;
    if (layer.scale == 0)
        layer.scale = model->scale;
    if (!layer.inv_freq)
        layer.inv_freq = model->inv_freq;
    return layer;
}

static bool same_frequencies(const AttendOptions *a, const AttendOptions *b)
{
    return a->inv_freq == b->inv_freq ||
           (a->inv_freq && b->inv_freq &&
            memcmp(a->inv_freq, b->inv_freq, a->shape.rotary_dim / 2 * sizeof(float)) == 0);
}

static bool same_section(const KvSectionSizes *a, const KvSectionSizes *b)
{
    const KvShape *x = &a->attend.shape, *y = &b->attend.shape;

    return a->kind == b->kind && a->home == b->home && kv_form_equal(&a->attend.form, &b->attend.form) &&
           x->n_heads == y->n_heads && x->n_kv_heads == y->n_kv_heads && x->k_head_dim == y->k_head_dim &&
           x->v_head_dim == y->v_head_dim &&
           x->rotary_dim == y->rotary_dim && a->attend.scale == b->attend.scale &&
           a->attend.visibility.window == b->attend.visibility.window && a->attend.softcap == b->attend.softcap &&
           a->attend.sink_logits == b->attend.sink_logits && same_frequencies(&a->attend, &b->attend);
}

static AttendVisibility visibility_of(const KvLayer *layer)
{
    switch (layer->kind) {
    case KV_LAYER_SLIDING:
        return (AttendVisibility){ATTEND_MASK_SLIDING, layer->window};
    case KV_LAYER_CHUNKED:
        return (AttendVisibility){ATTEND_MASK_CHUNKED, layer->window};
    case KV_LAYER_CROSS:
        return (AttendVisibility){ATTEND_MASK_CROSS, 0};
    case KV_LAYER_FULL:
    case KV_LAYER_SHARED:
    case KV_LAYER_NONE:
        break;
    }
    return (AttendVisibility){ATTEND_MASK_CAUSAL, 0};
}

/* What says which section a layer belongs to. */
static KvSectionSizes describe(const KvModel *model, const KvPolicy *policy, const KvLayer *layer, uint32_t l)
{
    bool windowed = layer->kind == KV_LAYER_SLIDING || layer->kind == KV_LAYER_CHUNKED;
    bool stays = windowed && policy->home == KV_HOME_HOST && policy->offload_only_non_sliding;
    KvForm form = kv_policy_layer_form(policy, l);

    if (stays)
        form = kv_form_default(model->exact ? KV_FORM_F32 : KV_FORM_F16);
    if (layer->form)
        form = *layer->form;
    return (KvSectionSizes){
        .kind = layer->kind,
        .home = stays ? KV_HOME_DEVICE : policy->home,
        .max_tokens = layer->kind == KV_LAYER_CROSS ? model->max_cross_tokens : policy->max_cache_tokens,
        .attend =
            {
                .form = form,
                .shape = layer->shape,
                .exact = model->exact,
                .tail_bits = form.kind == KV_FORM_F32 ? 32 : 16,
                .scale = layer->scale,
                .visibility = visibility_of(layer),
                .softcap = layer->softcap,
                .sink_logits = layer->sink_logits != NULL,
                .max_rows = model->max_rows,
                .inv_freq = layer->inv_freq,
            },
    };
}

static int check_layer(const KvModel *model, const KvLayer *layer, uint32_t l, ErrorDetail *reterr)
{
    bool windowed = layer->kind == KV_LAYER_SLIDING || layer->kind == KV_LAYER_CHUNKED;

    if (windowed && (layer->window == 0 || layer->window > ATTEND_WINDOW_MAX))
        return error_detail_set(reterr, -EINVAL, "cache: layer %u has a window of %u tokens", l, layer->window);
    if (layer->kind == KV_LAYER_CROSS && (model->max_cross_tokens == 0 || model->max_cross_tokens > 1u << 28))
        return error_detail_set(reterr, -EINVAL, "cache: layer %u reads encoder output of %u tokens", l, model->max_cross_tokens);
    if (layer->kind == KV_LAYER_CROSS && layer->shape.rotary_dim > 0)
        return error_detail_set(reterr, -EINVAL, "cache: layer %u reads encoder output, which has no positions to rotate by", l);
    if (layer->conv_bytes > UINT32_MAX || layer->recurrent_bytes > UINT32_MAX)
        return error_detail_set(reterr, -EINVAL, "cache: layer %u has a state of %llu and %llu bytes", l,
                                (unsigned long long)layer->conv_bytes, (unsigned long long)layer->recurrent_bytes);
    return 0;
}

static int place_shared(KvSizes *sizes, const KvLayer *layer, uint32_t l, ErrorDetail *reterr)
{
    if (layer->source >= l || sizes->layers[layer->source].section == KV_NO_SECTION ||
        sizes->layers[layer->source].owner != layer->source)
        return error_detail_set(reterr, -EINVAL, "cache: layer %u shares with layer %u, which keeps nothing before it", l,
                                layer->source);
    sizes->layers[l] = sizes->layers[layer->source];
    sizes->layers[l].last = true;
    for (uint32_t i = layer->source; i < l; i++)
        if (sizes->layers[i].owner == layer->source)
            sizes->layers[i].last = false;
    return 0;
}

static void place_keys(KvSizes *sizes, const KvModel *model, const KvLayer *layer, uint32_t l)
{
    const KvSectionSizes described = describe(model, &sizes->policy, layer, l);
    uint32_t s = 0;

    while (s < sizes->n_sections && !same_section(&sizes->sections[s], &described))
        s++;
    if (s == sizes->n_sections)
        sizes->sections[sizes->n_sections++] = described;
    sizes->layers[l] =
        (KvLayerPlace){.section = s, .plane = sizes->sections[s].n_planes++, .owner = l, .last = true};
}

static void place_state(KvSizes *sizes, const KvLayer *layer, uint32_t l)
{
    KvLayerPlace *place = &sizes->layers[l];

    place->has_state = layer->conv_bytes > 0 || layer->recurrent_bytes > 0;
    place->conv_offset = sizes->state_slot_bytes;
    place->recurrent_offset = place->conv_offset + ((layer->conv_bytes + 63) & ~(uint64_t)63);
    sizes->state_slot_bytes = place->recurrent_offset + ((layer->recurrent_bytes + 63) & ~(uint64_t)63);
}

static int place_layer(KvSizes *sizes, const KvModel *model, uint32_t l, ErrorDetail *reterr)
{
    const KvLayer layer = kv_model_layer(model, l);
    int r;

    if (sizes->policy.is_compatible) { /* it is kept elsewhere: cache/kv-host.h */
        sizes->layers[l] = (KvLayerPlace){.section = KV_NO_SECTION, .owner = l, .last = true};
        return 0;
    }
    r = check_layer(model, &layer, l, reterr);
    if (r)
        return error_trace(r);
    switch (layer.kind) {
    case KV_LAYER_NONE:
        sizes->layers[l] = (KvLayerPlace){.section = KV_NO_SECTION, .owner = l, .last = true};
        break;
    case KV_LAYER_SHARED:
        r = place_shared(sizes, &layer, l, reterr);
        break;
    case KV_LAYER_FULL:
    case KV_LAYER_SLIDING:
    case KV_LAYER_CHUNKED:
    case KV_LAYER_CROSS:
        place_keys(sizes, model, &layer, l);
        break;
    }
    if (r)
        return error_trace(r);
    place_state(sizes, &layer, l);
    return 0;
}

int kv_sizes_place_layers(KvSizes *sizes, const KvModel *model, ErrorDetail *reterr)
{
    const KvPolicy *policy = &sizes->policy;
    int r;

    for (uint32_t i = 0; i < policy->n_layer_bits; i++)
        if (policy->layer_bits[i].last >= model->n_layers)
            return error_detail_set(reterr, -EINVAL, "cache: bits for layer %u (quant.nbits_layers), the model's layers are 0 to %u",
                                    policy->layer_bits[i].last, model->n_layers - 1);
    sizes->layers = calloc(model->n_layers, sizeof(KvLayerPlace));
    sizes->sections = calloc(model->n_layers, sizeof(KvSectionSizes));
    if (!sizes->layers || !sizes->sections)
        return error_origin(KV_E_HOST_MEMORY);
    for (uint32_t l = 0; l < model->n_layers; l++) {
        r = place_layer(sizes, model, l, reterr);
        if (r)
            return error_trace(r);
    }
    for (uint32_t s = 0; s < sizes->n_sections; s++)
        if (sizes->sections[s].attend.sink_logits)
            sizes->logits_stride = MAX(sizes->logits_stride, sizes->sections[s].attend.shape.n_heads);
    sizes->logits_bytes = (uint64_t)model->n_layers * sizes->logits_stride * sizeof(float);
    if (sizes->n_sections == 0 && sizes->state_slot_bytes == 0 && !sizes->policy.is_compatible)
        return error_detail_set(reterr, -EINVAL, "cache: no layer keeps anything");
    return 0;
}
