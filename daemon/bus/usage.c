/* SPDX-License-Identifier: Apache-2.0 */
/* Usage to a{sv} and to JSON. */

#include "daemon/bus/usage.h"
#include "daemon/bus/bus-text.h"
#include "daemon/text/utf8.h"

#include <assert.h>
#include <math.h>
#include <string.h>

typedef struct UsageField {
    const char *key;
    char type; /* D-Bus: u, t, d, s */
    size_t offset;
} UsageField;

#define FIELD(key, type, member) {key, type, offsetof(EngineUsage, member)}

static const UsageField usage_fields[] = {
    FIELD("prompt-tokens", 'u', prompt_tokens),
    FIELD("reused-tokens", 'u', reused_tokens),
    FIELD("output-tokens", 'u', output_tokens),
    FIELD("stop-reason", 's', stop_reason),
    FIELD("strategy", 's', strategy),
    FIELD("form", 's', form),
    FIELD("home", 's', home),
    FIELD("transfer", 's', transfer),
    FIELD("seed", 't', seed),
    FIELD("queue-usec", 't', queue_usec),
    FIELD("load-usec", 't', load_usec),
    FIELD("first-token-usec", 't', first_token_usec),
    FIELD("prefill-usec", 't', prefill_usec),
    FIELD("decode-usec", 't', decode_usec),
    FIELD("prefill-rate", 'd', prefill_rate),
    FIELD("decode-rate", 'd', decode_rate),
    FIELD("cache-host-bytes", 't', cache_host_bytes),
    FIELD("cache-device-bytes", 't', cache_device_bytes),
    FIELD("upload-bytes", 't', upload_bytes),
    FIELD("download-bytes", 't', download_bytes),
    FIELD("copy-usec", 't', copy_usec),
    FIELD("hidden-share", 'd', hidden_share),
    FIELD("ladder", 's', ladder),
    FIELD("device", 's', device),
};

/* A rate over no time at all is not a number; JSON has no word for it. */
static double usage_finite(double value)
{
    return isfinite(value) ? value : 0;
}

/* The field's text, scrubbed, in @buffer (that of the widest field). */
static const char *usage_text(const void *place, char buffer[sizeof(((EngineUsage *)NULL)->device)])
{
    (void)snprintf(buffer, sizeof(((EngineUsage *)NULL)->device), "%s", (const char *)place);
    bus_text_scrub(buffer);
    return buffer;
}

int usage_append_entries(sd_bus_message *m, const EngineUsage *usage)
{
    for (size_t i = 0; i < N_ELEMENTS(usage_fields); i++) {
        const UsageField *field = &usage_fields[i];
        const void *place = (const char *)usage + field->offset;
        char buffer[sizeof(usage->device)];
        int r = -EINVAL;

        if (field->type == 'u')
            r = sd_bus_message_append(m, "{sv}", field->key, "u", *(const uint32_t *)place);
        else if (field->type == 't')
            r = sd_bus_message_append(m, "{sv}", field->key, "t", *(const uint64_t *)place);
        else if (field->type == 'd')
            r = sd_bus_message_append(m, "{sv}", field->key, "d", usage_finite(*(const double *)place));
        else if (field->type == 's')
            r = sd_bus_message_append(m, "{sv}", field->key, "s", usage_text(place, buffer));
        if (r < 0)
            return error_trace(r);
    }
    return 0;
}

static int usage_append_ids(sd_bus_message *m, const int32_t *ids, size_t n_ids)
{
    int r;

    if ((r = sd_bus_message_open_container(m, 'e', "sv")) < 0 || (r = sd_bus_message_append(m, "s", "ids")) < 0 ||
        (r = sd_bus_message_open_container(m, 'v', "ai")) < 0 ||
        (r = sd_bus_message_append_array(m, 'i', ids, n_ids * sizeof(*ids))) < 0 || (r = sd_bus_message_close_container(m)) < 0 ||
        (r = sd_bus_message_close_container(m)) < 0)
        return error_trace(r);
    return 0;
}

static int usage_append_sequence(sd_bus_message *m, const EngineSequence *sequence)
{
    _cleanup_(freep) char *text = utf8_clean_copy(sequence->text, sequence->text_length);
    int r;

    if (!text)
        return error_origin(-ENOMEM);
    r = sd_bus_message_open_container(m, 'a', "{sv}");
    if (r >= 0)
        r = sd_bus_message_append(m, "{sv}{sv}{sv}{sv}{sv}", "prompt", "u", sequence->prompt, "text", "s", text, "score", "d",
                                  usage_finite((double)sequence->score), "tokens", "u", sequence->n_tokens, "stop-reason", "s",
                                  sequence->stop_reason);
    if (r >= 0 && sequence->ids)
        r = usage_append_ids(m, sequence->ids, sequence->n_tokens);
    return r < 0 ? r : sd_bus_message_close_container(m);
}

static int usage_append_sequences(sd_bus_message *m, const EngineSequence *sequences, size_t n)
{
    int r;

    if ((r = sd_bus_message_open_container(m, 'e', "sv")) < 0 || (r = sd_bus_message_append(m, "s", "sequences")) < 0 ||
        (r = sd_bus_message_open_container(m, 'v', "aa{sv}")) < 0 || (r = sd_bus_message_open_container(m, 'a', "a{sv}")) < 0)
        return error_trace(r);
    for (size_t i = 0; i < n; i++)
        if ((r = usage_append_sequence(m, &sequences[i])) < 0)
            return error_trace(r);
    for (int i = 0; i < 3 && r >= 0; i++)
        r = sd_bus_message_close_container(m);
    return r;
}

int usage_append(sd_bus_message *m, const EngineUsage *usage, const UsageExtra *extra)
{
    const UsageExtra none = {.ids = NULL};
    int r = sd_bus_message_open_container(m, 'a', "{sv}");

    extra = extra ? extra : &none;
    if (r >= 0)
        r = usage_append_entries(m, usage);
    if (r >= 0 && extra->ids)
        r = usage_append_ids(m, extra->ids, extra->n_ids);
    if (r >= 0 && extra->n_sequences > 0)
        r = usage_append_sequences(m, extra->sequences, extra->n_sequences);
    if (r >= 0 && extra->text)
        r = sd_bus_message_append(m, "{sv}", "error-text", "s", extra->text);
    if (r >= 0)
        r = sd_bus_message_close_container(m);
    return r < 0 ? error_trace(r) : 0;
}

static json_t *usage_field_to_json(const UsageField *field, const EngineUsage *usage)
{
    const void *place = (const char *)usage + field->offset;
    char buffer[sizeof(usage->device)];

    if (field->type == 'u')
        return json_integer(*(const uint32_t *)place);
    if (field->type == 't') /* JSON integers are signed here: a seed above 2^63 would turn negative */
        return *(const uint64_t *)place <= INT64_MAX ? json_integer((json_int_t) * (const uint64_t *)place)
                                                     : json_real((double)*(const uint64_t *)place);
    if (field->type == 'd')
        return json_real(usage_finite(*(const double *)place));
    return json_string(usage_text(place, buffer));
}

json_t *usage_to_json(const EngineUsage *usage)
{
    json_t *object = json_object();

    for (size_t i = 0; object && i < N_ELEMENTS(usage_fields); i++)
        if (json_object_set_new(object, usage_fields[i].key, usage_field_to_json(&usage_fields[i], usage)) < 0) {
            json_decref(object);
            return NULL;
        }
    return object;
}
