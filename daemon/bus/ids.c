/* SPDX-License-Identifier: Apache-2.0 */
/* Token ids from bytes. */

#include "daemon/bus/ids.h"

#include <inttypes.h>
#include <string.h>

static const char ids_separators[] = " \t\r\n,";

static bool ids_is_text(const char *bytes, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++)
        if (bytes[i] == 0 || (!strchr(ids_separators, bytes[i]) && (bytes[i] < '0' || bytes[i] > '9')))
            return false;
    return true;
}

/* @ids has room for half of the bytes, rounded up: a number and a separator each. */
static int ids_parse_text(const char *bytes, size_t n_bytes, int32_t *ids, size_t *ret_n, ErrorDetail *reterr)
{
    size_t n = 0, i = 0;

    while (i < n_bytes) {
        int64_t value = 0;
        size_t start = i;

        while (i < n_bytes && bytes[i] >= '0' && bytes[i] <= '9') {
            value = value * 10 + (bytes[i++] - '0');
            if (value > INT32_MAX)
                return error_detail_set(reterr, -EINVAL, "the number at byte %zu is more than %d", start, INT32_MAX);
        }
        if (i > start)
            ids[n++] = (int32_t)value;
        if (i < n_bytes && (bytes[i] == 0 || !strchr(ids_separators, bytes[i])))
            return error_detail_set(reterr, -EINVAL, "byte %zu is neither a digit nor a separator", i);
        i++;
    }
    *ret_n = n;
    return 0;
}

static int ids_parse_int32(const char *bytes, size_t n_bytes, int32_t *ids, size_t *ret_n, ErrorDetail *reterr)
{
    const unsigned char *from = (const unsigned char *)bytes;

    if (n_bytes % 4)
        return error_detail_set(reterr, -EINVAL, "%zu bytes are not a whole number of int32", n_bytes);
    for (size_t i = 0; i < n_bytes / 4; i++, from += 4) {
        ids[i] = (int32_t)((uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24);
        if (ids[i] < 0)
            return error_detail_set(reterr, -EINVAL, "element %zu is %" PRId32, i, ids[i]);
    }
    *ret_n = n_bytes / 4;
    return 0;
}

int ids_parse(const char *bytes, size_t n_bytes, CallIdsFormat format, int32_t **ret, size_t *ret_n, ErrorDetail *reterr)
{
    bool text = format == CALL_IDS_TEXT || (format == CALL_IDS_AUTO && ids_is_text(bytes, n_bytes));
    _cleanup_(freep) int32_t *ids = malloc((n_bytes / 2 + 1) * sizeof(*ids));
    size_t n = 0;
    int r;

    if (!ids)
        return error_origin(-ENOMEM);
    r = text ? ids_parse_text(bytes, n_bytes, ids, &n, reterr) : ids_parse_int32(bytes, n_bytes, ids, &n, reterr);
    if (r < 0)
        return error_trace(r);
    if (n == 0)
        return error_detail_set(reterr, -EINVAL, "there are no ids");
    *ret = TAKE_PTR(ids);
    *ret_n = n;
    return 0;
}
