#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The quant: keys of a cache block: which form the pages take.  What is not written is the backend's default. */

#include "cache/kv-store.h"
#include "quant/kv-quant-options.h"

typedef enum ConfigQuantKey {
    CONFIG_QUANT_BACKEND, /* a KvFormKind */
    CONFIG_QUANT_NBITS_KEY,
    CONFIG_QUANT_NBITS_VALUE,
    CONFIG_QUANT_AXIS_KEY,
    CONFIG_QUANT_AXIS_VALUE,
    CONFIG_QUANT_GROUP,
    CONFIG_QUANT_RESIDUAL,
    CONFIG_QUANT_SINKS,
    CONFIG_QUANT_CENTRE,
    CONFIG_QUANT_ROTATE,
    CONFIG_QUANT_PAIR_SCALE,
    CONFIG_QUANT_LEVELS,
    CONFIG_QUANT_COMPATIBILITY,
    CONFIG_QUANT_KLD_BUDGET,   /* in kld_budget, not in values */
    CONFIG_QUANT_NBITS_LAYERS, /* in layers */
    CONFIG_QUANT_X_MAX,
} ConfigQuantKey;

typedef struct ConfigQuant {
    uint32_t written; /* 1 << key */
    int32_t values[CONFIG_QUANT_X_MAX]; /* of bits: KV_BITS_AUTO for auto */
    double kld_budget;
    uint32_t n_layers;
    KvLayerBits layers[KV_MAX_LAYER_BITS];
} ConfigQuant;

/* Names as in YAML, without "quant."; "nbits" sets both sides. */
extern const char *const config_quant_names[];
extern const size_t config_quant_n_names;

/* 0, or -EINVAL with what was expected. */
int config_quant_set(ConfigQuant *quant, const char *name, const char *text, ErrorDetail *reterr);
/* The written form of a key's value, which KV_LAYER_BITS_TEXT has room for. */
void config_quant_print(const ConfigQuant *quant, ConfigQuantKey key, char *ret, size_t size);
const char *config_quant_name(ConfigQuantKey key);
/* Each written key of @from, the nearer one, replaces that of @to; another backend drops what was meant for the first. */
void config_quant_overlay(ConfigQuant *to, const ConfigQuant *from);
/* Compatibility mode (cache/kv-host.h), and what it takes; -EINVAL names a combination that is none, *ret_key a key to blame. */
bool config_quant_is_compatible(const ConfigQuant *quant);
int config_quant_compatible(const ConfigQuant *quant, KvQuantOptions *ret, ConfigQuantKey *ret_key, ErrorDetail *reterr);
/* The form and the budget of its bits that result, starting from a policy's; -EINVAL likewise.  Bits of leat that are not written are
 * KV_BITS_AUTO, those of the others their defaults. */
int config_quant_apply(const ConfigQuant *quant, KvPolicy *policy, ConfigQuantKey *ret_key, ErrorDetail *reterr);
