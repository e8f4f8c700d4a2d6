/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for daemon/model/nbits.h: automatic bits are K 3, V 2 after as many steps as the test wants. */

#include "daemon/model/nbits.h"
#include "tests/fakes/fake-internal.h"

int model_nbits_table(const ModelFile *file, bool exact, const KvPolicy *policy, NbitsTable *ret,
                      ErrorDetail *reterr)
{
    (void)exact, (void)policy, (void)reterr;
    *ret = (NbitsTable){
        .n = 1,
        .entries = {
            {.k_bits = 3, .v_bits = 2, .state = file->has_bits ? NBITS_MEASURED : NBITS_OPEN, .kld = 0.001}}};
    return 0;
}

KvPolicy model_nbits_resolve(const ModelFile *file, bool exact, const KvPolicy *policy, bool *ret_known)
{
    KvPolicy resolved = *policy;

    (void)exact;
    *ret_known = !kv_form_is_auto(policy->form) || file->has_bits;
    if (kv_form_is_auto(policy->form))
        resolved.form = file->has_bits ? kv_form_leat(3, 2) : kv_form_default(KV_FORM_LEAT);
    return resolved;
}

struct Nbits {
    Model *model;
    uint32_t n_left;
};

int nbits_new(Model *model, const KvPolicy *policy, Nbits **ret, ErrorDetail *reterr)
{
    Nbits *nbits = calloc(1, sizeof(*nbits));

    (void)policy, (void)reterr;
    assert_non_null(nbits);
    *nbits = (Nbits){model, FAKE_GET(n_bits_steps)};
    FAKE_SET(n_nbits, fake.n_nbits + 1);
    *ret = nbits;
    return 0;
}

Nbits *nbits_free(Nbits *nbits)
{
    if (nbits)
        FAKE_SET(n_nbits, fake.n_nbits - 1);
    free(nbits);
    return NULL;
}

int nbits_step(Nbits *nbits, bool *ret_done, ErrorDetail *reterr)
{
    talk_sleep(FAKE_GET(pass_usec));
    *ret_done = nbits->n_left == 0;
    if (nbits->n_left-- > 0)
        return 0;
    if (FAKE_GET(bits_error)) {
        nbits->model->gpu->lost = FAKE_GET(bits_error) == MODEL_E_DEVICE;
        return error_detail_set(reterr, FAKE_GET(bits_error), "bits cannot be measured");
    }
    nbits->model->file->has_bits = true;
    return 0;
}
