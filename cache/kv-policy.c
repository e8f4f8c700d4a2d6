/* SPDX-License-Identifier: Apache-2.0 */
/* The named strategies: presets of growth, home and form. */

#include "cache/kv-store.h"

#include <stdio.h>
#include <string.h>

static const char *const strategy_names[KV_STRATEGY_X_MAX] = {
    [KV_STRATEGY_DYNAMIC] = "dynamic",
    [KV_STRATEGY_STATIC] = "static",
    [KV_STRATEGY_OFFLOADED] = "offloaded",
    [KV_STRATEGY_OFFLOADED_STATIC] = "offloaded_static",
    [KV_STRATEGY_QUANTIZED] = "quantized",
    [KV_STRATEGY_OFFLOADED_QUANTIZED] = "offloaded_quantized",
    [KV_STRATEGY_NONE] = "none",
};

const char *kv_strategy_to_string(KvStrategy strategy)
{
    return strategy >= 0 && strategy < KV_STRATEGY_X_MAX ? strategy_names[strategy] : NULL;
}

KvStrategy kv_strategy_from_string(const char *name)
{
    for (size_t i = 0; name && i < N_ELEMENTS(strategy_names); i++)
        if (strcmp(name, strategy_names[i]) == 0)
            return (KvStrategy)i;
    return KV_STRATEGY_X_INVALID;
}

KvPolicy kv_policy_preset(KvStrategy strategy, bool exact)
{
    /* Two slots are the least that overlap a copy with compute; K is the more sensitive side (README, bits against KLD). */
    const KvForm plain = kv_form_default(exact ? KV_FORM_F32 : KV_FORM_F16), packed = kv_form_default(KV_FORM_LEAT);
    KvPolicy policy = {.strategy = strategy, .form = plain, .n_slots = 2, .kld_budget = KV_KLD_BUDGET};

    switch (strategy) {
    case KV_STRATEGY_STATIC:
        policy.growth = KV_GROWTH_STATIC;
        break;
    case KV_STRATEGY_OFFLOADED:
        policy.home = KV_HOME_HOST;
        break;
    case KV_STRATEGY_OFFLOADED_STATIC:
        policy.growth = KV_GROWTH_STATIC;
        policy.home = KV_HOME_HOST;
        policy.offload_only_non_sliding = true;
        break;
    case KV_STRATEGY_QUANTIZED:
        policy.form = packed;
        break;
    case KV_STRATEGY_OFFLOADED_QUANTIZED:
        policy.home = KV_HOME_HOST;
        policy.form = packed;
        policy.offload_only_non_sliding = true;
        break;
    case KV_STRATEGY_DYNAMIC:
    case KV_STRATEGY_NONE:
    case KV_STRATEGY_X_MAX:
    case KV_STRATEGY_X_INVALID:
        break;
    }
    return policy;
}

KvForm kv_policy_layer_form(const KvPolicy *policy, uint32_t layer)
{
    KvForm form = policy->form;

    for (uint32_t i = 0; i < policy->n_layer_bits && kv_form_is_coded(form); i++)
        if (layer >= policy->layer_bits[i].first && layer <= policy->layer_bits[i].last) {
            form.k_bits = policy->layer_bits[i].k_bits;
            form.v_bits = policy->layer_bits[i].v_bits;
        }
    return form;
}

bool kv_layer_bits_equal(const KvPolicy *a, const KvPolicy *b)
{
    bool equal = a->n_layer_bits == b->n_layer_bits;

    for (uint32_t i = 0; i < a->n_layer_bits && equal; i++) {
        const KvLayerBits *x = &a->layer_bits[i], *y = &b->layer_bits[i];

        equal = x->first == y->first && x->last == y->last && x->k_bits == y->k_bits && x->v_bits == y->v_bits;
    }
    return equal;
}

void kv_layer_bits_to_text(const KvLayerBits *bits, uint32_t n, char *ret, size_t size)
{
    size_t length = 0;

    ret[0] = 0;
    for (uint32_t i = 0; i < n && length < size; i++) {
        char range[24];

        if (bits[i].first == bits[i].last)
            (void)snprintf(range, sizeof(range), "%u", bits[i].first);
        else
            (void)snprintf(range, sizeof(range), "%u-%u", bits[i].first, bits[i].last);
        length += (size_t)snprintf(ret + length, size - length, "%s%s:%u/%u", i ? " " : "", range, bits[i].k_bits, bits[i].v_bits);
    }
}
