/* SPDX-License-Identifier: Apache-2.0 */
/* Automatic bits: what is kept of a measurement, and what follows from it. */

#include "daemon/model/nbits-private.h"
#include "quant/base/log.h"

#include <math.h>
#include <string.h>

/* The version counts changes of the text and of how it is measured. */
static const StateKind NBITS_KIND = {"bits", {'L', 'E', 'A', 'T', 'B', 'I', 'T', 'S'}, 1};

/* Stands for a number in a file. */
#define KEPT_NONE    (-1.0f)
#define KEPT_REFUSED (-2.0f)

/* ---- what is kept ------------------------------------------------------------------------------------------------------------ */

static uint64_t hash_text(const char *text)
{
    uint64_t hash = 0xcbf29ce484222325u;

    for (; *text; text++)
        hash = (hash ^ (uint8_t)*text) * 0x100000001b3u;
    return hash;
}

/* Everything but the model that the numbers depend on, in words. */
static void write_recipe(const KvPolicy *policy, bool exact, char ret[static NBITS_RECIPE_BYTES])
{
    const KvForm *form = &policy->form;
    int length;

    memset(ret, 0, NBITS_RECIPE_BYTES);
    length = snprintf(ret, NBITS_RECIPE_BYTES, "%s %u centre %d rotation %d levels %d pair %d group %u sinks %u tail %u %s calibration %d",
                   kv_form_kind_to_string(form->kind), KV_FORM_VERSION, (int)form->centre, (int)form->rotation, (int)form->levels,
                   form->pair_scale, form->group_dims, form->sink_tokens, form->tail_tokens, exact ? "exact" : "fast",
                   MODEL_CALIBRATION_VERSION);
    if (policy->n_layer_bits > 0 && length > 0 && length < NBITS_RECIPE_BYTES) {
        char text[KV_LAYER_BITS_TEXT];

        kv_layer_bits_to_text(policy->layer_bits, policy->n_layer_bits, text, sizeof(text));
        (void)snprintf(ret + length, (size_t)(NBITS_RECIPE_BYTES - length), " layers %016llx", (unsigned long long)hash_text(text));
    }
}

static void write_name(const ModelFile *file, const char *recipe, char ret[static 96])
{
    (void)snprintf(ret, 96, "%s-%016llx", file->digest_hex, (unsigned long long)hash_text(recipe));
}

static bool is_sound(const NbitsKept *kept)
{
    if (!isfinite(kept->rounding) || kept->rounding < KEPT_NONE)
        return false;
    for (uint32_t i = 0; i < N_ELEMENTS(kept->kld); i++) {
        float kld = kept->kld[i];

        if (!isfinite(kld) || (kld < 0.0f && kld > KEPT_NONE) || kld < KEPT_REFUSED)
            return false;
    }
    return true;
}

/* What was measured before; else @ret has the recipe and no numbers. */
static void read_kept(const ModelFile *file, const char *recipe, NbitsKept *ret)
{
    char name[96];

    write_name(file, recipe, name);
    if (file->nbits && memcmp(file->nbits->recipe, recipe, NBITS_RECIPE_BYTES) == 0) {
        *ret = *file->nbits;
        return;
    }
    if (file->state_dir && state_file_read(file->state_dir, &NBITS_KIND, name, ret, sizeof(*ret)) == 0 &&
        memcmp(ret->recipe, recipe, NBITS_RECIPE_BYTES) == 0 && is_sound(ret))
        return;
    memcpy(ret->recipe, recipe, NBITS_RECIPE_BYTES);
    ret->rounding = KEPT_NONE;
    for (uint32_t i = 0; i < N_ELEMENTS(ret->kld); i++)
        ret->kld[i] = KEPT_NONE;
}

/* Layers with bits of their own cost those, whatever is chosen for the others: the order of the candidates stays. */
static void count_layer_bits(const ModelFile *file, const KvPolicy *policy, NbitsTable *table)
{
    const ModelParams *params = &file->hparams.model;
    double own = 0;
    uint32_t n_own = 0;

    for (uint32_t i = 0; i < policy->n_layer_bits; i++) {
        const KvLayerBits *bits = &policy->layer_bits[i];

        for (uint32_t l = bits->first; l <= bits->last && l < params->n_layers; l++, n_own++)
            own += kv_true_bits(kv_policy_layer_form(policy, l), &params->attention, NBITS_AT_TOKENS, 16);
    }
    for (uint32_t i = 0; i < table->n && n_own > 0; i++)
        table->entries[i].true_bits = (own + (params->n_layers - n_own) * table->entries[i].true_bits) / params->n_layers;
}

int nbits_load(const ModelFile *file, bool exact, const KvPolicy *policy, NbitsKept *ret_kept, NbitsTable *ret, ErrorDetail *reterr)
{
    char recipe[NBITS_RECIPE_BYTES];
    int r = nbits_table_init(ret, policy->form, &file->hparams.model.attention, reterr);

    if (r)
        return r;
    count_layer_bits(file, policy, ret);
    write_recipe(policy, exact, recipe);
    read_kept(file, recipe, ret_kept);
    ret->rounding = exact ? 0 : (double)ret_kept->rounding;
    for (uint32_t i = 0; i < ret->n; i++) {
        NbitsEntry *entry = &ret->entries[i];
        float kld = ret_kept->kld[NBITS_PLACE(entry)];

        if (entry->state == NBITS_REFUSED || kld == KEPT_NONE)
            continue;
        entry->state = kld == KEPT_REFUSED ? NBITS_REFUSED : NBITS_MEASURED;
        entry->kld = (double)MAX(kld, 0.0f);
        if (kld == KEPT_REFUSED)
            (void)snprintf(entry->reason, sizeof(entry->reason), "a store of it was refused when it was to be measured");
    }
    return 0;
}

void nbits_keep(ModelFile *file, NbitsKept *kept, const NbitsTable *table)
{
    char name[96];
    int r = 0;

    kept->rounding = (float)table->rounding;
    for (uint32_t i = 0; i < table->n; i++) {
        const NbitsEntry *entry = &table->entries[i];

        if (entry->state != NBITS_OPEN)
            kept->kld[NBITS_PLACE(entry)] = entry->state == NBITS_REFUSED ? KEPT_REFUSED : (float)entry->kld;
    }
    if (!file->nbits)
        file->nbits = malloc(sizeof(*file->nbits));
    if (file->nbits)
        *file->nbits = *kept;
    write_name(file, kept->recipe, name);
    if (file->state_dir)
        r = state_file_write(file->state_dir, &NBITS_KIND, name, kept, sizeof(*kept));
    if (r)
        log_warning("cannot store the model's bits in '%s': %s, ignoring", file->state_dir, strerror(-r));
}

/* ---- questions --------------------------------------------------------------------------------------------------------------- */

int model_nbits_table(const ModelFile *file, bool exact, const KvPolicy *policy, NbitsTable *ret, ErrorDetail *reterr)
{
    NbitsKept kept;

    return nbits_load(file, exact, policy, &kept, ret, reterr);
}

/* The backend's usual bits for the sides that are to be chosen. */
static void set_usual_bits(KvForm *form)
{
    KvForm usual = kv_form_default(form->kind);

    form->k_bits = form->k_bits == KV_BITS_AUTO ? usual.k_bits : form->k_bits;
    form->v_bits = form->v_bits == KV_BITS_AUTO ? usual.v_bits : form->v_bits;
}

KvPolicy model_nbits_resolve(const ModelFile *file, bool exact, const KvPolicy *policy, bool *ret_known)
{
    KvPolicy resolved = *policy;
    NbitsTable table;
    uint32_t choice;

    *ret_known = true;
    if (!kv_form_is_auto(policy->form))
        return resolved;
    choice = model_nbits_table(file, exact, policy, &table, NULL) == 0 ? nbits_choice(&table, policy->kld_budget) : NBITS_NO_CHOICE;
    *ret_known = choice != NBITS_NO_CHOICE;
    if (*ret_known) {
        resolved.form.k_bits = table.entries[choice].k_bits;
        resolved.form.v_bits = table.entries[choice].v_bits;
    } else {
        set_usual_bits(&resolved.form);
    }
    return resolved;
}
