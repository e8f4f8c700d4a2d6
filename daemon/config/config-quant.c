/* SPDX-License-Identifier: Apache-2.0 */
/* The quant: keys of a cache block, and the form that results. */

#include "daemon/config/config-quant.h"

#include "daemon/config/config-value.h"

#include <stdio.h>
#include <string.h>

/* Below, nothing that we can measure; above, the cache is of another model. */
#define MIN_KLD_BUDGET 0.000001
#define MAX_KLD_BUDGET 1.0

/* A key takes one of some words, or a number of a range when it has none; the budget has a range of its own.  Values are the words' own where these differ from their places. */
typedef struct QuantKey {
    const char *name;
    const char *const *words;
    const int32_t *values;
    size_t n_words;
    uint64_t min, max;
} QuantKey;

static const char *const backend_words[] = {"leat", "hqq", "quanto", "fp8"};
static const int32_t backend_values[] = {KV_FORM_LEAT, KV_FORM_HQQ, KV_FORM_QUANTO, KV_FORM_FP8};
static const char *const nbits_words[] = {"auto", "8", "6", "5", "4", "3", "2", "1"};
static const int32_t nbits_values[] = {KV_BITS_AUTO, 8, 6, 5, 4, 3, 2, 1};
static const char *const axis_words[] = {"0", "1", "-1"};
static const int32_t axis_values[] = {0, 1, -1};
static const char *const centre_words[] = {"none", "before-rope", "after-rope"};
static const char *const bool_words[] = {"false", "true"};
static const char *const levels_words[] = {"searched", "plain"};

#define WORDS(name, words, values) {name, words, values, N_ELEMENTS(words), 0, 0}
#define RANGE(name, min, max)      {name, NULL, NULL, 0, min, max}

static const QuantKey quant_keys[CONFIG_QUANT_X_MAX] = {
    [CONFIG_QUANT_BACKEND] = WORDS("backend", backend_words, backend_values),
    [CONFIG_QUANT_NBITS_KEY] = WORDS("nbits_key", nbits_words, nbits_values),
    [CONFIG_QUANT_NBITS_VALUE] = WORDS("nbits_value", nbits_words, nbits_values),
    [CONFIG_QUANT_AXIS_KEY] = WORDS("axis_key", axis_words, axis_values),
    [CONFIG_QUANT_AXIS_VALUE] = WORDS("axis_value", axis_words, axis_values),
    /* As in Transformers; pages take fewer of them (quant_check_pages). */
    [CONFIG_QUANT_GROUP] = RANGE("q_group_size", 1, 1 << 20),
    [CONFIG_QUANT_RESIDUAL] = RANGE("residual_length", 0, 1 << 24),
    [CONFIG_QUANT_SINKS] = RANGE("sinks", 0, KV_PAGE_TOKENS),
    [CONFIG_QUANT_CENTRE] = WORDS("centre", centre_words, NULL),
    [CONFIG_QUANT_ROTATE] = WORDS("rotate", bool_words, NULL),
    [CONFIG_QUANT_PAIR_SCALE] = WORDS("pair-scale", bool_words, NULL),
    [CONFIG_QUANT_LEVELS] = WORDS("levels", levels_words, NULL),
    [CONFIG_QUANT_COMPATIBILITY] = WORDS("compatibility", bool_words, NULL),
    [CONFIG_QUANT_KLD_BUDGET] = RANGE("kld-budget", 0, 0),
    [CONFIG_QUANT_NBITS_LAYERS] = RANGE("nbits_layers", 0, 0),
};

const char *const config_quant_names[] = {"quant.backend",     "quant.nbits",        "quant.nbits_key",       "quant.nbits_value", "quant.axis_key",
                                          "quant.axis_value",  "quant.q_group_size", "quant.residual_length", "quant.sinks",       "quant.centre",
                                          "quant.rotate",      "quant.pair-scale",   "quant.levels",           "quant.compatibility",
                                          "quant.kld-budget",  "quant.nbits_layers"};
const size_t config_quant_n_names = N_ELEMENTS(config_quant_names);

const char *config_quant_name(ConfigQuantKey key)
{
    return quant_keys[key].name;
}

static int quant_parse(const QuantKey *key, const char *text, int32_t *ret, ErrorDetail *reterr)
{
    uint64_t number;
    size_t index;
    int r;

    if (key->n_words > 0) {
        r = config_value_word(text, key->words, key->n_words, &index, reterr);
        if (!r)
            *ret = key->values ? key->values[index] : (int32_t)index;
        return r;
    }
    r = config_value_u64(text, key->min, key->max, &number, reterr);
    if (!r)
        *ret = (int32_t)number;
    return r;
}

/* ---- bits of layers: "0-1:8/8, 29:6" ---------------------------------------------------------------------------------------- */

#define MAX_LAYER 4095

static int layers_refuse(const char *entry, size_t n, const char *why, ErrorDetail *reterr)
{
    return error_detail_set(reterr, -EINVAL, "'%.*s' %s: write a layer or a range, a colon, and bits of keys/values, as in '0-1:8/8, 29:6'",
                            (int)MIN(n, (size_t)60), entry, why);
}

/* A whole number up to @max at *@at, which moves behind it. */
static bool layers_number(const char **at, uint32_t max, uint32_t *ret)
{
    const char *c = *at;
    uint32_t value = 0;

    if (*c < '0' || *c > '9' || (c[0] == '0' && c[1] >= '0' && c[1] <= '9'))
        return false;
    for (; *c >= '0' && *c <= '9'; c++) {
        value = value * 10 + (uint32_t)(*c - '0');
        if (value > max)
            return false;
    }
    *at = c;
    *ret = value;
    return true;
}

static int layers_parse_one(const char *entry, size_t n, KvLayerBits *ret, ErrorDetail *reterr)
{
    uint32_t first, last, k, v;
    const char *at = entry;

    if (!layers_number(&at, MAX_LAYER, &first))
        return layers_refuse(entry, n, "names no layer of 0 to 4095", reterr);
    last = first;
    if (*at == '-') {
        at++;
        if (!layers_number(&at, MAX_LAYER, &last) || last < first)
            return layers_refuse(entry, n, "is no range of layers", reterr);
    }
    if (*at++ != ':' || !layers_number(&at, KV_MAX_BITS, &k) || k == 0)
        return layers_refuse(entry, n, "has no bits", reterr);
    v = k;
    if (*at == '/') {
        at++;
        if (!layers_number(&at, KV_MAX_BITS, &v) || v == 0)
            return layers_refuse(entry, n, "has no bits of values", reterr);
    }
    if (at != entry + n)
        return layers_refuse(entry, n, "has more than that", reterr);
    *ret = (KvLayerBits){(uint16_t)first, (uint16_t)last, (uint8_t)k, (uint8_t)v};
    return 0;
}

/* In its place among those before; two that overlap are refused. */
static int layers_insert(ConfigQuant *quant, KvLayerBits bits, ErrorDetail *reterr)
{
    uint32_t i = quant->n_layers;

    if (quant->n_layers == KV_MAX_LAYER_BITS)
        return error_detail_set(reterr, -EINVAL, "more than %d ranges of layers", KV_MAX_LAYER_BITS);
    while (i > 0 && quant->layers[i - 1].first > bits.last)
        i--;
    if (i > 0 && quant->layers[i - 1].last >= bits.first)
        return error_detail_set(reterr, -EINVAL, "layer %u has its bits twice", MAX(quant->layers[i - 1].first, bits.first));
    memmove(&quant->layers[i + 1], &quant->layers[i], (quant->n_layers - i) * sizeof(bits));
    quant->layers[i] = bits;
    quant->n_layers++;
    return 0;
}

static int layers_parse(const char *text, ConfigQuant *ret, ErrorDetail *reterr)
{
    ConfigQuant parsed = {.n_layers = 0};
    size_t n;
    int r = 0;

    for (const char *at = text + strspn(text, ", "); *at && !r; at += strspn(at, ", ")) {
        KvLayerBits bits = {0};

        n = strcspn(at, ", ");
        r = layers_parse_one(at, n, &bits, reterr);
        if (!r)
            r = layers_insert(&parsed, bits, reterr);
        at += n;
    }
    if (r)
        return r;
    ret->n_layers = parsed.n_layers; /* none: what was written further away does not hold */
    memcpy(ret->layers, parsed.layers, sizeof(ret->layers));
    return 0;
}

/* ---- keys ---------------------------------------------------------------------------------------------------------------------- */

static int quant_set_value(ConfigQuant *quant, ConfigQuantKey key, const char *text, ErrorDetail *reterr)
{
    switch (key) {
    case CONFIG_QUANT_KLD_BUDGET:
        return config_value_double(text, MIN_KLD_BUDGET, MAX_KLD_BUDGET, &quant->kld_budget, reterr);
    case CONFIG_QUANT_NBITS_LAYERS:
        return layers_parse(text, quant, reterr);
    case CONFIG_QUANT_BACKEND:
    case CONFIG_QUANT_NBITS_KEY:
    case CONFIG_QUANT_NBITS_VALUE:
    case CONFIG_QUANT_AXIS_KEY:
    case CONFIG_QUANT_AXIS_VALUE:
    case CONFIG_QUANT_GROUP:
    case CONFIG_QUANT_RESIDUAL:
    case CONFIG_QUANT_SINKS:
    case CONFIG_QUANT_CENTRE:
    case CONFIG_QUANT_ROTATE:
    case CONFIG_QUANT_PAIR_SCALE:
    case CONFIG_QUANT_LEVELS:
    case CONFIG_QUANT_COMPATIBILITY:
    case CONFIG_QUANT_X_MAX:
        break;
    }
    return quant_parse(&quant_keys[key], text, &quant->values[key], reterr);
}

static int quant_set_key(ConfigQuant *quant, ConfigQuantKey key, const char *text, ErrorDetail *reterr)
{
    int r = quant_set_value(quant, key, text, reterr);

    if (!r)
        quant->written |= 1u << key;
    return r;
}

int config_quant_set(ConfigQuant *quant, const char *name, const char *text, ErrorDetail *reterr)
{
    int r;

    if (strcmp(name, "nbits") == 0) {
        r = quant_set_key(quant, CONFIG_QUANT_NBITS_KEY, text, reterr);
        return r ? r : quant_set_key(quant, CONFIG_QUANT_NBITS_VALUE, text, reterr);
    }
    for (int key = 0; key < CONFIG_QUANT_X_MAX; key++)
        if (strcmp(name, quant_keys[key].name) == 0)
            return quant_set_key(quant, (ConfigQuantKey)key, text, reterr);
    return error_detail_set(reterr, -EINVAL, "quant key '%.60s' is not known", name);
}

void config_quant_print(const ConfigQuant *quant, ConfigQuantKey key, char *ret, size_t size)
{
    const QuantKey *k = &quant_keys[key];

    if (key == CONFIG_QUANT_KLD_BUDGET) {
        (void)snprintf(ret, size, "%g", quant->kld_budget);
        return;
    }
    if (key == CONFIG_QUANT_NBITS_LAYERS) {
        kv_layer_bits_to_text(quant->layers, quant->n_layers, ret, size);
        return;
    }
    for (size_t i = 0; i < k->n_words; i++)
        if (quant->values[key] == (k->values ? k->values[i] : (int32_t)i)) {
            (void)snprintf(ret, size, "%s", k->words[i]);
            return;
        }
    (void)snprintf(ret, size, "%d", quant->values[key]);
}

static int16_t quant_backend(const ConfigQuant *quant)
{
    return quant->written & 1u << CONFIG_QUANT_BACKEND ? quant->values[CONFIG_QUANT_BACKEND] : KV_FORM_LEAT;
}

void config_quant_overlay(ConfigQuant *to, const ConfigQuant *from)
{
    if (from->written & 1u << CONFIG_QUANT_BACKEND && quant_backend(from) != quant_backend(to))
        *to = (ConfigQuant){.written = to->written & 1u << CONFIG_QUANT_KLD_BUDGET, .kld_budget = to->kld_budget};
    for (int key = 0; key < CONFIG_QUANT_X_MAX; key++)
        if (from->written & 1u << key)
            to->values[key] = from->values[key];
    if (from->written & 1u << CONFIG_QUANT_KLD_BUDGET)
        to->kld_budget = from->kld_budget;
    if (from->written & 1u << CONFIG_QUANT_NBITS_LAYERS) {
        to->n_layers = from->n_layers;
        memcpy(to->layers, from->layers, sizeof(to->layers));
    }
    to->written |= from->written;
}

/* fp8 has one scale a layer and keeps no residual. */
static int quant_check_fp8(const ConfigQuant *quant, KvFormKind kind, ConfigQuantKey *ret_key, ErrorDetail *reterr)
{
    static const ConfigQuantKey refused[] = {CONFIG_QUANT_GROUP, CONFIG_QUANT_RESIDUAL};

    for (size_t i = 0; i < N_ELEMENTS(refused); i++)
        if (kind == KV_FORM_FP8 && quant->written & 1u << refused[i]) {
            *ret_key = refused[i];
            return error_detail_set(reterr, -EINVAL, "quant.%s has no meaning for backend fp8: it has neither groups nor a residual",
                                    quant_keys[refused[i]].name);
        }
    return 0;
}

/* Of numbers that Transformers takes as well: what pages do. */
static int quant_check_pages(const ConfigQuant *quant, ConfigQuantKey *ret_key, ErrorDetail *reterr)
{
    static const struct {
        ConfigQuantKey key;
        int min, max, step;
    } of_pages[] = {{CONFIG_QUANT_GROUP, 16, 128, 16}, {CONFIG_QUANT_RESIDUAL, 0, KV_MAX_TAIL_TOKENS, KV_PAGE_TOKENS}};

    for (size_t i = 0; i < N_ELEMENTS(of_pages); i++) {
        ConfigQuantKey key = of_pages[i].key;
        int32_t value = quant->values[key];

        if (!(quant->written & 1u << key) || (value >= of_pages[i].min && value <= of_pages[i].max && value % of_pages[i].step == 0))
            continue;
        *ret_key = key;
        return error_detail_set(reterr, -EINVAL, "quant.%s %d: must be a multiple of %d from %d to %d", quant_keys[key].name, value,
                                of_pages[i].step, of_pages[i].min, of_pages[i].max);
    }
    return 0;
}

/* Pages hold groups that lie within a token's head: the axis that gives these. */
static int quant_check_axes(const ConfigQuant *quant, KvFormKind kind, ConfigQuantKey *ret_key, ErrorDetail *reterr)
{
    int axis = kind == KV_FORM_QUANTO ? 0 : 1;

    for (int key = CONFIG_QUANT_AXIS_KEY; key <= CONFIG_QUANT_AXIS_VALUE; key++) {
        if (!(quant->written & 1u << key))
            continue;
        *ret_key = (ConfigQuantKey)key;
        if (kind != KV_FORM_QUANTO && kind != KV_FORM_HQQ)
            return error_detail_set(reterr, -EINVAL, "quant.%s has no meaning for backend %s: hqq and quanto have axes",
                                    quant_keys[key].name, kv_form_kind_to_string(kind));
        if (quant->values[key] != axis)
            return error_detail_set(reterr, -EINVAL, "quant.%s %d: pages of %s need %d, where a group lies within a token's head",
                                    quant_keys[key].name, quant->values[key], kv_form_kind_to_string(kind), axis);
    }
    return 0;
}

/* Bits that the backend's pages have not. */
static int quant_check_bits(KvFormKind kind, ConfigQuantKey key, uint8_t bits, ErrorDetail *reterr)
{
    uint32_t allowed = kv_form_bits(kind);
    char list[40] = "";

    if (bits == KV_BITS_AUTO || allowed & 1u << bits)
        return 0;
    for (unsigned b = 31; b > 0; b--)
        if (allowed & 1u << b)
            (void)snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s%u",
                           !list[0] ? "" : allowed & ((1u << b) - 1) ? ", " : " and ", b);
    return error_detail_set(reterr, -EINVAL, "quant.%s %u: backend %s keeps pages of %s bits", quant_keys[key].name, bits,
                            kv_form_kind_to_string(kind), list);
}

/* Automatic bits: whatever they will be. */
static int quant_check_form(KvForm form, ConfigQuantKey *ret_key, ErrorDetail *reterr)
{
    uint32_t allowed = kv_form_bits(form.kind);
    uint8_t most = allowed ? (uint8_t)(31 - __builtin_clz(allowed)) : 0;
    int r = quant_check_bits(form.kind, *ret_key = CONFIG_QUANT_NBITS_KEY, form.k_bits, reterr);

    if (!r)
        r = quant_check_bits(form.kind, *ret_key = CONFIG_QUANT_NBITS_VALUE, form.v_bits, reterr);
    if (r)
        return r;
    form.k_bits = form.k_bits == KV_BITS_AUTO ? most : form.k_bits;
    form.v_bits = form.v_bits == KV_BITS_AUTO ? most : form.v_bits;
    *ret_key = CONFIG_QUANT_LEVELS; /* all that is left */
    r = kv_form_check(form, reterr);
    if (r)
        error_detail_prefix(reterr, "quant.levels");
    return r;
}

bool config_quant_is_compatible(const ConfigQuant *quant)
{
    return quant->written & 1u << CONFIG_QUANT_COMPATIBILITY && quant->values[CONFIG_QUANT_COMPATIBILITY];
}

/* As Transformers' cache_config takes it; one number of bits for both sides. */
int config_quant_compatible(const ConfigQuant *quant, KvQuantOptions *ret, ConfigQuantKey *ret_key, ErrorDetail *reterr)
{
    static const ConfigQuantKey ours[] = {CONFIG_QUANT_SINKS, CONFIG_QUANT_CENTRE, CONFIG_QUANT_ROTATE, CONFIG_QUANT_PAIR_SCALE,
                                          CONFIG_QUANT_LEVELS, CONFIG_QUANT_NBITS_LAYERS};
    const int32_t *v = quant->values;
    bool has[CONFIG_QUANT_X_MAX];
    ErrorDetail detail = ERROR_DETAIL_NULL;
    KvQuantRequest request;
    int r;

    for (int key = 0; key < CONFIG_QUANT_X_MAX; key++)
        has[key] = quant->written & 1u << key;
    has[CONFIG_QUANT_NBITS_LAYERS] = quant->n_layers > 0;
    *ret_key = CONFIG_QUANT_COMPATIBILITY;
    if (!has[CONFIG_QUANT_BACKEND] || v[CONFIG_QUANT_BACKEND] == KV_FORM_LEAT)
        return error_detail_set(reterr, -EINVAL, "quant.compatibility needs quant.backend hqq, quanto or fp8");
    for (size_t i = 0; i < N_ELEMENTS(ours); i++)
        if (has[ours[i]]) {
            *ret_key = ours[i];
            return error_detail_set(reterr, -EINVAL, "quant.%s has no meaning with quant.compatibility", quant_keys[ours[i]].name);
        }
    *ret_key = has[CONFIG_QUANT_NBITS_VALUE] ? CONFIG_QUANT_NBITS_VALUE : CONFIG_QUANT_NBITS_KEY;
    if (has[CONFIG_QUANT_NBITS_KEY] != has[CONFIG_QUANT_NBITS_VALUE] ||
        (has[CONFIG_QUANT_NBITS_KEY] && v[CONFIG_QUANT_NBITS_KEY] != v[CONFIG_QUANT_NBITS_VALUE]))
        return error_detail_set(reterr, -EINVAL, "quant.compatibility has one number of bits for keys and values: use quant.nbits");
    if (has[CONFIG_QUANT_NBITS_KEY] && v[CONFIG_QUANT_NBITS_KEY] == KV_BITS_AUTO)
        return error_detail_set(reterr, -EINVAL, "quant.nbits auto has no meaning with quant.compatibility: give a number");
    request = (KvQuantRequest){
        .backend = kv_form_kind_to_string((KvFormKind)v[CONFIG_QUANT_BACKEND]),
        .has_nbits = has[CONFIG_QUANT_NBITS_KEY],
        .has_axis_key = has[CONFIG_QUANT_AXIS_KEY],
        .has_axis_value = has[CONFIG_QUANT_AXIS_VALUE],
        .has_q_group_size = has[CONFIG_QUANT_GROUP],
        .has_residual_length = has[CONFIG_QUANT_RESIDUAL],
        .nbits = v[CONFIG_QUANT_NBITS_KEY],
        .axis_key = v[CONFIG_QUANT_AXIS_KEY],
        .axis_value = v[CONFIG_QUANT_AXIS_VALUE],
        .q_group_size = v[CONFIG_QUANT_GROUP],
        .residual_length = v[CONFIG_QUANT_RESIDUAL],
    };
    r = kv_quant_options(&request, ret, &detail);
    if (!r)
        return 0;
    /* It begins with the key's name. */
    for (int key = 0; key < CONFIG_QUANT_X_MAX; key++)
        if (has[key] && strncmp(detail.text, quant_keys[key].name, strcspn(detail.text, " :")) == 0)
            *ret_key = (ConfigQuantKey)key;
    return error_detail_set(reterr, r, "quant.%s", detail.text);
}

/* Bits that are written, else the backend's own: leat's are chosen for the model. */
static uint8_t quant_bits(const ConfigQuant *quant, ConfigQuantKey key, KvFormKind kind, uint8_t usual)
{
    if (quant->written & 1u << key)
        return (uint8_t)quant->values[key];
    return kind == KV_FORM_LEAT ? KV_BITS_AUTO : usual;
}

/* What is not written stays as it is. */
static void quant_set_recipe(const ConfigQuant *quant, KvForm *f)
{
    const int32_t *v = quant->values;

    if (quant->written & 1u << CONFIG_QUANT_GROUP)
        f->group_dims = (uint32_t)v[CONFIG_QUANT_GROUP];
    if (quant->written & 1u << CONFIG_QUANT_RESIDUAL)
        f->tail_tokens = (uint32_t)v[CONFIG_QUANT_RESIDUAL];
    if (quant->written & 1u << CONFIG_QUANT_SINKS)
        f->sink_tokens = (uint32_t)v[CONFIG_QUANT_SINKS];
    if (quant->written & 1u << CONFIG_QUANT_CENTRE)
        f->centre = (KvCentre)v[CONFIG_QUANT_CENTRE];
    if (quant->written & 1u << CONFIG_QUANT_ROTATE)
        f->rotation = v[CONFIG_QUANT_ROTATE] ? KV_ROTATION_HADAMARD : KV_ROTATION_NONE;
    if (quant->written & 1u << CONFIG_QUANT_PAIR_SCALE)
        f->pair_scale = v[CONFIG_QUANT_PAIR_SCALE];
    if (quant->written & 1u << CONFIG_QUANT_LEVELS)
        f->levels = (KvLevels)v[CONFIG_QUANT_LEVELS];
}

static int quant_check_layers(const ConfigQuant *quant, KvForm form, ConfigQuantKey *ret_key, ErrorDetail *reterr)
{
    int r = 0;

    *ret_key = CONFIG_QUANT_NBITS_LAYERS;
    for (uint32_t i = 0; i < quant->n_layers && !r; i++) {
        char text[32];

        form.k_bits = quant->layers[i].k_bits;
        form.v_bits = quant->layers[i].v_bits;
        r = kv_form_check(form, reterr);
        kv_layer_bits_to_text(&quant->layers[i], 1, text, sizeof(text));
        if (r)
            error_detail_prefix(reterr, "quant.nbits_layers '%s'", text);
    }
    return r;
}

int config_quant_apply(const ConfigQuant *quant, KvPolicy *policy, ConfigQuantKey *ret_key, ErrorDetail *reterr)
{
    KvForm f = policy->form;
    int r;

    r = quant_check_pages(quant, ret_key, reterr);
    if (r)
        return r;
    if (quant->written & 1u << CONFIG_QUANT_BACKEND && quant->values[CONFIG_QUANT_BACKEND] != (int32_t)f.kind)
        f = kv_form_default((KvFormKind)quant->values[CONFIG_QUANT_BACKEND]);
    f.k_bits = quant_bits(quant, CONFIG_QUANT_NBITS_KEY, f.kind, f.k_bits);
    f.v_bits = quant_bits(quant, CONFIG_QUANT_NBITS_VALUE, f.kind, f.v_bits);
    quant_set_recipe(quant, &f);
    r = quant_check_axes(quant, f.kind, ret_key, reterr);
    if (!r)
        r = quant_check_fp8(quant, f.kind, ret_key, reterr);
    if (!r)
        r = quant_check_form(f, ret_key, reterr);
    if (!r)
        r = quant_check_layers(quant, f, ret_key, reterr);
    if (r)
        return r;
    policy->form = f;
    policy->n_layer_bits = quant->n_layers;
    memcpy(policy->layer_bits, quant->layers, sizeof(policy->layer_bits));
    if (quant->written & 1u << CONFIG_QUANT_KLD_BUDGET)
        policy->kld_budget = quant->kld_budget;
    return 0;
}
