/* SPDX-License-Identifier: Apache-2.0 */
/* The linear part of a compatibility layer. */

#include "cache/kv-compat-linear.h"

#include <string.h>

typedef struct Conv {
    KvHeld columns; /* (rows, channels, columns, 1); the last is of position - 1 */
    uint32_t kernel_size;
    uint64_t position;
} Conv;

typedef struct Recurrent {
    KvHeld states;  /* (rows, 1, states, width) */
    uint64_t *ends; /* (states held): tokens before each */
    uint64_t position;
} Recurrent;

struct KvLinear {
    uint32_t n_states;
    bool recording;
    struct {
        Conv conv;
        Recurrent recurrent;
    } states[];
};

int kv_linear_new(uint32_t n_states, KvLinear **ret)
{
    KvLinear *linear = calloc(1, sizeof(*linear) + n_states * sizeof(linear->states[0]));

    if (!linear)
        return error_origin(-ENOMEM);
    linear->n_states = n_states;
    *ret = linear;
    return 0;
}

static void clear(KvLinear *linear)
{
    for (uint32_t i = 0; i < linear->n_states; i++) {
        Conv *conv = &linear->states[i].conv;
        Recurrent *recurrent = &linear->states[i].recurrent;

        kv_held_deinit(&conv->columns);
        kv_held_deinit(&recurrent->states);
        free(recurrent->ends);
        recurrent->ends = NULL;
        conv->position = recurrent->position = 0;
    }
}

KvLinear *kv_linear_free(KvLinear *linear)
{
    if (linear) {
        clear(linear);
        free(linear);
    }
    return NULL;
}

static int check_state(const KvLinear *linear, uint32_t state, ErrorDetail *reterr)
{
    if (state >= linear->n_states)
        return error_detail_set(reterr, KV_COMPAT_E_INDEX, "state %u of a layer with %u", state, linear->n_states);
    return 0;
}

static int refuse_shape(const KvHeld *held, const KvTensor *given, ErrorDetail *reterr)
{
    return error_detail_set(reterr, KV_COMPAT_E_SHAPE, "a state of (%u, %u, %u) cannot follow one of (%u, %u, %u)", given->n_rows,
                            given->n_heads, given->width, held->n_rows, held->n_heads, held->width);
}

int kv_linear_update_conv(KvLinear *linear, uint32_t state, uint32_t kernel_size, const KvTensor *x, KvTensor *ret,
                          ErrorDetail *reterr)
{
    int r = check_state(linear, state, reterr);
    Conv *conv = r == 0 ? &linear->states[state].conv : NULL;
    uint32_t n = x->n_tokens, k;

    if (r != 0)
        return r;
    k = conv->kernel_size > 0 ? conv->kernel_size : kernel_size > 0 ? kernel_size : n;
    if (conv->position == 0) {
        KvHeld columns;

        if (n > UINT32_MAX / 4 || k > UINT32_MAX / 4)
            return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%u columns for a kernel of %u are too many", n, k);
        r = kv_held_init(&columns, x, k + n);
        if (r < 0)
            return error_detail_set(reterr, error_trace(r), "no memory for %u columns", k + n);
        kv_held_deinit(&conv->columns);
        conv->columns = columns;
        conv->kernel_size = k;
        /* A short beginning has zeros before it, from the first call on unless everything is recorded. */
        if (!linear->recording && n < k)
            conv->columns.n_tokens = k - n;
    } else if (!kv_held_is_like(&conv->columns, x)) {
        return refuse_shape(&conv->columns, x, reterr);
    }
    r = kv_held_reserve(&conv->columns, n);
    if (r < 0)
        return error_detail_set(reterr, error_trace(r), "no memory for %u columns", n);
    kv_held_append(&conv->columns, x);
    conv->position += n;
    *ret = kv_held_view(&conv->columns, 0, conv->columns.n_tokens);
    if (!linear->recording && conv->columns.n_tokens > k)
        kv_held_drop_front(&conv->columns, conv->columns.n_tokens - k);
    return 0;
}

static void drop_states(Recurrent *recurrent, uint32_t n)
{
    kv_held_drop_front(&recurrent->states, n);
    memmove(recurrent->ends, recurrent->ends + n, recurrent->states.n_tokens * sizeof(recurrent->ends[0]));
}

int kv_linear_update_recurrent(KvLinear *linear, uint32_t state, uint32_t n_tokens, const KvTensor *states, ErrorDetail *reterr)
{
    int r = check_state(linear, state, reterr);
    Recurrent *recurrent = r == 0 ? &linear->states[state].recurrent : NULL;
    uint32_t n = states->n_tokens, before;
    uint64_t *ends;

    if (r != 0)
        return r;
    if (n_tokens == 0 || (n != 1 && n != n_tokens))
        return error_detail_set(reterr, KV_COMPAT_E_VALUE, "%u states for %u tokens: one for each, or only the last", n, n_tokens);
    if (recurrent->position > 0 && !kv_held_is_like(&recurrent->states, states))
        return refuse_shape(&recurrent->states, states, reterr);
    ends = realloc(recurrent->ends, ((size_t)recurrent->states.n_tokens + n) * sizeof(*ends));
    if (!ends)
        return error_detail_set(reterr, error_origin(-ENOMEM), "no memory for %u states", n);
    recurrent->ends = ends;
    if (recurrent->position == 0) {
        KvHeld held;

        r = kv_held_init(&held, states, n);
        if (r == 0) {
            kv_held_deinit(&recurrent->states);
            recurrent->states = held;
        }
    } else {
        r = kv_held_reserve(&recurrent->states, n);
    }
    if (r < 0)
        return error_detail_set(reterr, error_trace(r), "no memory for %u states", n);

    before = recurrent->states.n_tokens;
    for (uint32_t i = 0; i < n; i++)
        ends[before + i] = recurrent->position + (n == 1 ? n_tokens : i + 1);
    kv_held_append(&recurrent->states, states);
    recurrent->position += n_tokens;
    if (!linear->recording)
        drop_states(recurrent, recurrent->states.n_tokens - 1);
    return 0;
}

int kv_linear_conv(const KvLinear *linear, uint32_t state, KvTensor *ret, ErrorDetail *reterr)
{
    int r = check_state(linear, state, reterr);
    const Conv *conv = r == 0 ? &linear->states[state].conv : NULL;

    if (r != 0)
        return r;
    if (conv->position == 0)
        return error_detail_set(reterr, KV_COMPAT_E_NO_STATE, "no columns have come yet");
    *ret = kv_held_view(&conv->columns, 0, conv->columns.n_tokens);
    return 0;
}

int kv_linear_recurrent(const KvLinear *linear, uint32_t state, KvTensor *ret, ErrorDetail *reterr)
{
    int r = check_state(linear, state, reterr);
    const Recurrent *recurrent = r == 0 ? &linear->states[state].recurrent : NULL;

    if (r != 0)
        return r;
    if (recurrent->position == 0)
        return error_detail_set(reterr, KV_COMPAT_E_NO_STATE, "no state has come yet");
    *ret = kv_held_view(&recurrent->states, recurrent->states.n_tokens - 1, 1);
    return 0;
}

bool kv_linear_has_previous(const KvLinear *linear)
{
    return linear->states[0].conv.position > 0 || linear->states[0].recurrent.position > 0;
}

/* A recurrent state can only go back to one that was recorded. */
bool kv_linear_is_croppable(const KvLinear *linear)
{
    for (uint32_t i = 0; i < linear->n_states; i++)
        if (!kv_linear_has_previous(linear) || (linear->states[i].recurrent.position > 0 && !linear->recording))
            return false;
    return true;
}

bool kv_linear_is_recording(const KvLinear *linear)
{
    return linear->recording;
}

uint32_t kv_linear_n_rows(const KvLinear *linear)
{
    for (uint32_t i = 0; i < linear->n_states; i++) {
        if (linear->states[i].conv.position > 0)
            return linear->states[i].conv.columns.n_rows;
        if (linear->states[i].recurrent.position > 0)
            return linear->states[i].recurrent.states.n_rows;
    }
    return 0;
}

uint64_t kv_linear_bytes(const KvLinear *linear)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < linear->n_states; i++)
        bytes += kv_held_bytes(&linear->states[i].conv.columns) + kv_held_bytes(&linear->states[i].recurrent.states);
    return bytes;
}

void kv_linear_record(KvLinear *linear)
{
    linear->recording = true;
}

static int check_conv(const Conv *conv, uint64_t n_remove, ErrorDetail *reterr)
{
    int64_t first = (int64_t)conv->position - conv->columns.n_tokens, left = (int64_t)(conv->position - n_remove);

    if (conv->position == 0 || left == 0)
        return 0;
    if (n_remove > conv->position || (first > 0 && left - (int64_t)conv->kernel_size < first))
        return error_detail_set(reterr, KV_COMPAT_E_GONE, "%llu columns cannot be removed: %u before position %llu are held",
                                (unsigned long long)n_remove, conv->columns.n_tokens, (unsigned long long)conv->position);
    return 0;
}

/* The number of states up to the one after @position tokens, or 0. */
static uint32_t find_state(const Recurrent *recurrent, uint64_t position)
{
    for (uint32_t i = recurrent->states.n_tokens; i > 0; i--)
        if (recurrent->ends[i - 1] == position)
            return i;
    return 0;
}

static int check_recurrent(const Recurrent *recurrent, uint64_t n_remove, ErrorDetail *reterr)
{
    if (recurrent->position == 0 || recurrent->position == n_remove)
        return 0;
    if (n_remove > recurrent->position || find_state(recurrent, recurrent->position - n_remove) == 0)
        return error_detail_set(reterr, KV_COMPAT_E_GONE, "no recurrent state from %llu tokens before position %llu is held",
                                (unsigned long long)n_remove, (unsigned long long)recurrent->position);
    return 0;
}

int kv_linear_check_crop(const KvLinear *linear, uint64_t n_remove, ErrorDetail *reterr)
{
    int r = 0;

    if (!linear->recording)
        return error_detail_set(reterr, KV_COMPAT_E_NOT_RECORDING,
                                "a state cannot go back: recording was not activated before");
    for (uint32_t i = 0; i < linear->n_states && r == 0; i++) {
        r = check_conv(&linear->states[i].conv, n_remove, reterr);
        if (r == 0)
            r = check_recurrent(&linear->states[i].recurrent, n_remove, reterr);
    }
    return r;
}

/* The last kernel_size columns, zeros where there are fewer; room for them was made by the first update. */
static void settle_columns(Conv *conv)
{
    KvHeld *held = &conv->columns;
    uint32_t k = conv->kernel_size, n = MIN(held->n_tokens, k);

    kv_held_drop_front(held, held->n_tokens - n);
    if (n < k) {
        for (size_t c = 0; c < (size_t)held->n_rows * held->n_heads; c++) {
            float *column = held->values + c * held->capacity;

            memmove(column + k - n, column + held->n_first, n * sizeof(float));
            memset(column, 0, (k - n) * sizeof(float));
        }
        held->n_first = 0;
        held->n_tokens = k;
    }
    kv_held_trim(held);
}

static void crop_conv(Conv *conv, uint64_t n_remove)
{
    conv->position -= n_remove;
    if (conv->position == 0) {
        kv_held_deinit(&conv->columns);
        return;
    }
    kv_held_drop_back(&conv->columns, (uint32_t)n_remove);
    settle_columns(conv);
}

static void crop_recurrent(Recurrent *recurrent, uint64_t n_remove)
{
    uint32_t n;

    recurrent->position -= n_remove;
    if (recurrent->position == 0) {
        kv_held_deinit(&recurrent->states);
        return;
    }
    n = find_state(recurrent, recurrent->position);
    kv_held_drop_back(&recurrent->states, recurrent->states.n_tokens - n);
    drop_states(recurrent, n - 1);
    kv_held_trim(&recurrent->states);
}

void kv_linear_crop(KvLinear *linear, uint64_t n_remove)
{
    for (uint32_t i = 0; i < linear->n_states; i++) {
        if (linear->states[i].conv.position > 0)
            crop_conv(&linear->states[i].conv, n_remove);
        if (linear->states[i].recurrent.position > 0)
            crop_recurrent(&linear->states[i].recurrent, n_remove);
    }
}

static int copy_recurrent(const Recurrent *from, const uint32_t *rows, uint32_t n_rows, Recurrent *ret)
{
    size_t n_bytes = from->states.n_tokens * sizeof(from->ends[0]);
    int r = kv_held_copy_rows(&from->states, rows, n_rows, &ret->states);

    if (r < 0)
        return error_trace(r);
    ret->position = from->position;
    if (n_bytes > 0) {
        ret->ends = malloc(n_bytes);
        if (!ret->ends)
            return error_origin(-ENOMEM);
        memcpy(ret->ends, from->ends, n_bytes);
    }
    return 0;
}

int kv_linear_copy_rows(const KvLinear *linear, const uint32_t *rows, uint32_t n_rows, KvLinear **ret, ErrorDetail *reterr)
{
    _cleanup_(kv_linear_freep) KvLinear *copy = NULL;
    int r = kv_linear_new(linear->n_states, &copy);

    if (r < 0 || !copy)
        return error_detail_set(reterr, -ENOMEM, "no memory for a copy of %u rows", n_rows);
    copy->recording = linear->recording;
    for (uint32_t i = 0; i < linear->n_states && r == 0; i++) {
        copy->states[i].conv.kernel_size = linear->states[i].conv.kernel_size;
        copy->states[i].conv.position = linear->states[i].conv.position;
        r = kv_held_copy_rows(&linear->states[i].conv.columns, rows, n_rows, &copy->states[i].conv.columns);
        if (r == 0)
            r = copy_recurrent(&linear->states[i].recurrent, rows, n_rows, &copy->states[i].recurrent);
    }
    if (r < 0)
        return error_detail_set(reterr, error_trace(r), "no memory for a copy of %u rows", n_rows);
    *ret = TAKE_PTR(copy);
    return 0;
}

/* The kernel size stays. */
void kv_linear_reset(KvLinear *linear)
{
    clear(linear);
}
