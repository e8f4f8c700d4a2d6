/* SPDX-License-Identifier: Apache-2.0 */
/* Values from text, the strict way. */

#include "daemon/config/config-value.h"
#include "daemon/config/config.h"
#include "quant/base/checked.h"

#include <locale.h>
#include <math.h>
#include <string.h>

int config_value_bool(const char *text, bool *ret, ErrorDetail *reterr)
{
    if (!strcmp(text, "true") || !strcmp(text, "false")) {
        *ret = text[0] == 't';
        return 0;
    }
    return error_detail_set(reterr, -EINVAL, "'%s' is not a truth value: write true or false", text);
}

/* The digits at the start of @text; *ret_end is what follows. */
static int config_value_digits(const char *text, uint64_t *ret, const char **ret_end, ErrorDetail *reterr)
{
    const char *c = text;
    uint64_t value = 0;

    if (*c < '0' || *c > '9')
        return error_detail_set(reterr, -EINVAL, "'%s' is not a whole number", text);
    if (c[0] == '0' && c[1] >= '0' && c[1] <= '9')
        return error_detail_set(reterr, -EINVAL, "'%s' begins with a zero: write the decimal number without it", text);
    for (; *c >= '0' && *c <= '9'; c++)
        if (!checked_mul(value, 10, &value) || !checked_add(value, (uint64_t)(*c - '0'), &value))
            return error_detail_set(reterr, -EINVAL, "'%.40s' is out of range", text);
    *ret = value;
    *ret_end = c;
    return 0;
}

int config_value_u64(const char *text, uint64_t min, uint64_t max, uint64_t *ret, ErrorDetail *reterr)
{
    const char *end;
    uint64_t value;
    int r = config_value_digits(text, &value, &end, reterr);

    if (r)
        return r;
    if (*end)
        return error_detail_set(reterr, -EINVAL, "'%s' is not a whole number", text);
    if (value < min || value > max)
        return error_detail_set(reterr, -EINVAL, "%s is out of range: %llu to %llu", text, (unsigned long long)min,
                                (unsigned long long)max);
    *ret = value;
    return 0;
}

int config_value_double(const char *text, double min, double max, double *ret, ErrorDetail *reterr)
{
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    double value;
    char *end;

    if (!c_locale)
        return error_origin(-ENOMEM);
    value = strtod_l(text, &end, c_locale);
    freelocale(c_locale);
    if (end == text || *end || strspn(text, "+-.0123456789eE") != strlen(text))
        return error_detail_set(reterr, -EINVAL, "'%s' is not a number", text);
    if (!isfinite(value) || value < min || value > max)
        return error_detail_set(reterr, -EINVAL, "%s is out of range: %g to %g", text, min, max);
    *ret = value;
    return 0;
}

int config_value_bytes(const char *text, uint64_t *ret, ErrorDetail *reterr)
{
    static const struct {
        const char *name;
        uint64_t factor;
    } units[] = {
        {"", 1},           {"B", 1},          {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30},
        {"TiB", 1ull << 40}, {"KB", 1000},    {"MB", 1000000},     {"GB", 1000000000},  {"TB", 1000000000000},
    };
    const char *end = text;
    uint64_t value = 0;
    int r = *text >= '0' && *text <= '9' ? config_value_digits(text, &value, &end, reterr) : 0;

    if (r)
        return r;
    end += strspn(end, " ");
    for (size_t i = 0; i < N_ELEMENTS(units) && end > text; i++)
        if (!strcmp(end, units[i].name)) {
            if (!checked_mul(value, units[i].factor, ret))
                return error_detail_set(reterr, -EINVAL, "'%s' is out of range: 64 bits do not hold it", text);
            return 0;
        }
    return error_detail_set(reterr, -EINVAL, "'%s' is not a size: write bytes, or a number with KiB, MiB or GiB", text);
}

int config_value_duration(const char *text, uint64_t *ret_usec, ErrorDetail *reterr)
{
    static const struct {
        const char *name;
        uint64_t factor;
    } units[] = {
        {"", 1000000}, {"s", 1000000}, {"ms", 1000}, {"min", 60000000}, {"h", 3600000000}, {"d", 86400000000},
    };
    const char *end;
    uint64_t value;
    int r;

    if (!strcmp(text, "never")) {
        *ret_usec = UINT64_MAX;
        return 0;
    }
    r = config_value_digits(text, &value, &end, reterr);
    if (r)
        return r;
    end += strspn(end, " ");
    for (size_t i = 0; i < N_ELEMENTS(units); i++)
        if (!strcmp(end, units[i].name)) {
            if (!checked_mul(value, units[i].factor, ret_usec))
                return error_detail_set(reterr, -EINVAL, "'%s' is out of range", text);
            return 0;
        }
    return error_detail_set(reterr, -EINVAL, "'%s' is not a time span: write seconds, or a number with ms, s, min, h or d, or never",
                            text);
}

int config_value_word(const char *text, const char *const *words, size_t n_words, size_t *ret, ErrorDetail *reterr)
{
    char list[200] = "";
    size_t used = 0;
    const char *nearest;

    for (size_t i = 0; i < n_words; i++)
        if (!strcmp(text, words[i])) {
            *ret = i;
            return 0;
        }
    for (size_t i = 0; i < n_words && used < sizeof(list); i++)
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "", words[i]);
    nearest = config_nearest(text, words, n_words);
    if (nearest)
        return error_detail_set(reterr, -EINVAL, "'%s' is not known; did you mean '%s'? (%s)", text, nearest, list);
    return error_detail_set(reterr, -EINVAL, "'%s' is not one of %s", text, list);
}
