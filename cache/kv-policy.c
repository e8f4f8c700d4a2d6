/* SPDX-License-Identifier: Apache-2.0 */
/* The named strategies: presets of growth, home and form. */

#include "cache/kv-store.h"

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
