/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of quantised caches: what each backend takes. */

#include "quant/kv-quant-options.h"

#define MAX_GROUP_SIZE      (1 << 20)
#define MAX_RESIDUAL_LENGTH (1 << 24)

typedef struct Choice {
    uint32_t n;
    int8_t values[5];
    const char *text;
} Choice;

static const struct {
    Choice nbits, axis;
} choices[] = {
    [KV_BACKEND_QUANTO] = {{2, {2, 4}, "2 or 4"}, {2, {0, -1}, "0 or -1"}},
    [KV_BACKEND_HQQ] = {{5, {1, 2, 3, 4, 8}, "1, 2, 3, 4 or 8"}, {2, {0, 1}, "0 or 1"}},
};

static int check_choice(KvBackend backend, const char *key, const Choice *choice, int64_t value, ErrorDetail *reterr)
{
    for (uint32_t i = 0; i < choice->n; i++)
        if (choice->values[i] == value)
            return 0;
    return error_detail_set(reterr, -EINVAL, "%s %lld: backend %s takes %s", key, (long long)value, kv_backend_to_string(backend),
                            choice->text);
}

static int check_range(const char *key, int64_t value, int64_t low, int64_t high, ErrorDetail *reterr)
{
    if (value >= low && value <= high)
        return 0;
    return error_detail_set(reterr, -EINVAL, "%s %lld: must be from %lld to %lld", key, (long long)value, (long long)low,
                            (long long)high);
}

/* One scale for a whole tensor: no parameter of groups means anything. */
static int options_fp8(const KvQuantRequest *request, KvQuantOptions *ret, ErrorDetail *reterr)
{
    const bool given[] = {request->has_nbits, request->has_axis_key, request->has_axis_value, request->has_q_group_size,
                          request->has_residual_length};
    static const char *const keys[] = {"nbits", "axis_key", "axis_value", "q_group_size", "residual_length"};
    char text[96] = "";

    for (size_t i = 0; i < N_ELEMENTS(keys); i++)
        if (given[i]) {
            size_t n = strlen(text);

            (void)snprintf(text + n, sizeof(text) - n, "%s%s", n ? ", " : "", keys[i]);
        }
    if (text[0])
        return error_detail_set(reterr, -EINVAL, "%s: backend fp8 has one scale for a tensor and takes none of these; quanto and hqq do",
                                text);
    *ret = (KvQuantOptions){.backend = KV_BACKEND_FP8, .nbits = 8};
    return 0;
}

int kv_quant_options(const KvQuantRequest *request, KvQuantOptions *ret, ErrorDetail *reterr)
{
    KvBackend backend = request->backend ? kv_backend_from_string(request->backend) : KV_BACKEND_QUANTO;
    int64_t nbits = request->has_nbits ? request->nbits : 4, axis_key = request->has_axis_key ? request->axis_key : 0;
    int64_t axis_value = request->has_axis_value ? request->axis_value : 0;
    int64_t group = request->has_q_group_size ? request->q_group_size : 64;
    int64_t residual = request->has_residual_length ? request->residual_length : 128;
    int r;

    if (backend == KV_BACKEND_X_INVALID)
        return error_detail_set(reterr, -EINVAL, "backend '%s' is unknown: quanto, hqq and fp8 are known", request->backend);
    if (backend == KV_BACKEND_FP8)
        return options_fp8(request, ret, reterr);
    r = check_choice(backend, "nbits", &choices[backend].nbits, nbits, reterr);
    if (!r)
        r = check_choice(backend, "axis_key", &choices[backend].axis, axis_key, reterr);
    if (!r)
        r = check_choice(backend, "axis_value", &choices[backend].axis, axis_value, reterr);
    if (!r)
        r = check_range("q_group_size", group, 1, MAX_GROUP_SIZE, reterr);
    if (!r)
        r = check_range("residual_length", residual, 0, MAX_RESIDUAL_LENGTH, reterr);
    if (r)
        return error_trace(r);
    *ret = (KvQuantOptions){backend, (uint8_t)nbits, (int8_t)axis_key, (int8_t)axis_value, (uint32_t)group, (uint32_t)residual};
    return 0;
}

static bool seen_before(const char *const *types, uint32_t i)
{
    for (uint32_t j = 0; j < i; j++)
        if (strcmp(types[j], types[i]) == 0)
            return true;
    return false;
}

int kv_quant_check_layer_types(const char *const *types, uint32_t n_types, ErrorDetail *reterr)
{
    char text[240] = "";

    for (uint32_t i = 0; i < n_types; i++)
        if (strcmp(types[i], "full_attention") != 0 && !seen_before(types, i)) {
            size_t n = strlen(text);

            (void)snprintf(text + n, sizeof(text) - n, "%s%s", n ? ", " : "", types[i]);
        }
    if (text[0])
        return error_detail_set(reterr, -EINVAL, "layers of type %s: only models whose layers are all full_attention are quantised in "
                                "compatibility mode", text);
    return 0;
}
