/* SPDX-License-Identifier: Apache-2.0 */
/* From a method call to a job. */

#include "daemon/bus/request.h"
#include "daemon/bus/bus-text.h"
#include "daemon/bus/ids.h"
#include "quant/base/checked.h"

#include <assert.h>
#include <inttypes.h>
#include <string.h>

BusRequest *bus_request_free(BusRequest *request)
{
    BusClient *client;

    if (!request)
        return NULL;
    client = bus_client_find(request->bus, request->owner);
    if (request->has_job)
        bus_client_give_job(client);
    bus_client_give_prompt(request->bus, client, request->n_prompt_bytes);
    input_free(request->input);
    sd_bus_message_unref(request->call);
    call_options_clear(&request->options);
    messages_clear(&request->messages);
    close_fdp(&request->npy_fd);
    free(request->model);
    free(request->service);
    free(request->prompt);
    free(request);
    return NULL;
}

int bus_request_new(Bus *bus, sd_bus_message *call, BusJobKind kind, const ConfigModel *model, BusRequest **ret, sd_bus_error *error)
{
    _cleanup_(bus_request_freep) BusRequest *request = calloc(1, sizeof(*request));
    BusClient *client;
    int r;

    if (!request)
        return error_origin(-ENOMEM);
    request->bus = bus;
    request->npy_fd = -1;
    request->options = CALL_OPTIONS_NULL;
    if (!(request->model = strdup(model->name)))
        return error_origin(-ENOMEM);
    if ((r = bus_client_get(bus, call, &client, error)) < 0 || (r = bus_client_take_job(client, error)) < 0)
        return error_trace(r);
    request->has_job = true;
    request->owner = client->owner;
    request->call = sd_bus_message_ref(call);
    request->kind = kind;
    request->priority = ENGINE_PRIORITY_NORMAL;
    *ret = TAKE_PTR(request);
    return 0;
}

/* ---- the prompt ---------------------------------------------------------------------------------------------------------------- */

/* What was given besides ids, raw text and the descriptor. */
static bool bus_request_has_argument(const BusRequest *request)
{
    return request->messages.n > 0 || (request->prompt && request->prompt[0]);
}

/* A stream carries one text as it grows. */
static int bus_request_check_stream(const CallOptions *options, sd_bus_error *error)
{
    if (options->sampling.num_beams > 1)
        return bus_error_invalid(error, "option num-beams: %" PRIu32 ": a stream cannot show beams, which have no text before the end; use Ask",
                                 options->sampling.num_beams);
    if (options->sampling.num_return_sequences > 1)
        return bus_error_invalid(error, "option num-return-sequences: %" PRIu32 ": a stream carries one sequence; use Ask",
                                 options->sampling.num_return_sequences);
    if (options->prompts)
        return bus_error_invalid(error, "option prompts: a stream answers one prompt; use Ask");
    return 0;
}

/* What says how beams end and are ranked. */
static int bus_request_check_beams(const CallOptions *options, sd_bus_error *error)
{
    const char *name = call_options_have(options, CALL_OPTION_EARLY_STOPPING)  ? "early-stopping"
                       : call_options_have(options, CALL_OPTION_LENGTH_PENALTY) ? "length-penalty"
                                                                                : NULL;

    if (!name || options->sampling.num_beams > 1)
        return 0;
    return bus_error_invalid(error, "option %s has no meaning without num-beams from 2 to %d", name, ENGINE_MAX_BEAMS);
}

/* Sources that exclude each other. */
static int bus_request_check(const BusRequest *request, sd_bus_error *error)
{
    const CallOptions *options = &request->options;
    bool has_fd = options->prompt_fd >= 0, has_ids = options->ids != NULL;
    int r;

    if (request->kind == BUS_JOB_EVALUATE || request->kind == BUS_JOB_LOAD)
        return 0;
    if ((request->kind != BUS_JOB_ASK && (r = bus_request_check_stream(options, error)) < 0) ||
        (r = bus_request_check_beams(options, error)) < 0)
        return r;
    if (options->prompts && (has_ids || has_fd || bus_request_has_argument(request)))
        return bus_error_invalid(error, "with option prompts the prompt must be empty, and options ids and prompt-fd are excluded");
    if (options->prompts)
        return 0;
    if (has_ids && (has_fd || options->raw))
        return bus_error_invalid(error, "option ids excludes prompt-fd and raw");
    if (has_ids && bus_request_has_argument(request))
        return bus_error_invalid(error, "with option ids the prompt must be empty");
    if (has_fd && options->raw && bus_request_has_argument(request))
        return bus_error_invalid(error, "with options raw and prompt-fd the prompt must be empty");
    if (has_fd && request->prompt && request->prompt[0])
        return bus_error_invalid(error, "with option prompt-fd the prompt must be empty");
    if (options->raw && !has_fd && !request->prompt && request->messages.n != 1)
        return bus_error_invalid(error, "option raw takes exactly one message, not %zu", request->messages.n);
    if (!has_fd && !has_ids && !bus_request_has_argument(request))
        return bus_error_invalid(error, "the prompt is empty");
    return 0;
}

/* The quota for @n_bytes more of prompt. */
static int bus_request_charge(BusRequest *request, uint64_t n_bytes, sd_bus_error *error)
{
    BusClient *client = bus_client_find(request->bus, request->owner);
    int r;

    if (!client)
        return sd_bus_error_set(error, SD_BUS_ERROR_DISCONNECTED, "the caller has left");
    if ((r = bus_client_take_prompt(client, n_bytes, error)) < 0)
        return error_trace(r);
    request->n_prompt_bytes += n_bytes;
    return 0;
}

/* What the descriptor held. */
static int bus_request_take_input(BusRequest *request, char *bytes, size_t n, sd_bus_error *error)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    size_t offset;
    int r;

    if (request->kind == BUS_JOB_EVALUATE) {
        r = ids_parse(bytes, n, request->options.ids_format, &request->options.ids, &request->options.n_ids, &detail);
        return r == -EINVAL ? bus_error_invalid(error, "ids: %s", detail.text) : r;
    }
    if (!bus_text_is_valid(bytes, n, &offset))
        return bus_error_invalid(error, "option prompt-fd: byte %zu is %s", offset, bytes[offset] ? "not valid UTF-8" : "NUL");
    if (n == 0)
        return bus_error_invalid(error, "option prompt-fd: the prompt is empty");
    if (!request->options.raw)
        return messages_add(&request->messages, "user", bytes);
    free(request->prompt);
    request->prompt = strdup(bytes);
    return request->prompt ? 0 : error_origin(-ENOMEM);
}

/* Exactly one of messages, raw text, ids. */
static int bus_request_fill_prompt(BusRequest *request, EngineRequest *ret)
{
    int r;

    if (request->options.prompts) {
        ret->prompts = request->options.prompts;
        ret->n_prompts = request->options.n_prompts;
        ret->prompts_raw = request->options.raw;
        return 0;
    }
    if (request->options.ids) {
        ret->ids = request->options.ids;
        ret->n_ids = request->options.n_ids;
        return 0;
    }
    if (request->options.raw) {
        ret->raw = request->prompt && request->prompt[0] ? request->prompt : request->messages.messages[0].content;
        return 0;
    }
    if (request->prompt && request->prompt[0] && (r = messages_add(&request->messages, "user", request->prompt)) < 0)
        return error_trace(r);
    ret->messages = request->messages.messages;
    ret->n_messages = request->messages.n;
    ret->n_shared = request->n_shared;
    return 0;
}

/* ---- the job ------------------------------------------------------------------------------------------------------------------- */

/* From microseconds to go to a time of CLOCK_MONOTONIC. */
static uint64_t bus_request_deadline(const BusRequest *request)
{
    uint64_t deadline;

    if (request->options.deadline_usec == 0)
        return 0;
    return checked_add(bus_now_usec(), request->options.deadline_usec, &deadline) ? deadline : UINT64_MAX;
}

/* The defaults of the service or model, then what the call gave.  Looked up only now: the configuration may have changed while the
 * descriptor was read. */
static int bus_request_sampling(const BusRequest *request, EngineSampling *ret)
{
    const Config *config = request->bus->config;
    const ConfigService *service = request->service ? config_find_service(config, request->service) : NULL;
    const ConfigModel *model = config_find_model(config, request->model);

    if (request->service && !service)
        return ENGINE_RESULT_NO_SUCH_SERVICE;
    if (!model)
        return ENGINE_RESULT_NO_SUCH_MODEL;
    *ret = model->sampling;
    if (service)
        config_service_sampling(config, service, ret);
    call_options_sampling(&request->options, ret);
    return 0;
}

/* 0, an EngineResult, or a negative errno. */
static int bus_request_start(BusRequest *request, uint64_t *ret_job)
{
    Engine *engine = request->bus->engine;
    EngineRequest generation = {
        .owner = request->owner,
        .session = request->session,
        .model = request->model,
        .policy = request->has_policy ? &request->policy : NULL,
        .priority = request->priority,
        .deadline_usec = bus_request_deadline(request),
        .want_ids = request->options.want_ids,
    };
    int r;

    if (request->kind == BUS_JOB_LOAD)
        return engine_load(engine, request->owner, request->model, ret_job);
    if (request->kind == BUS_JOB_EVALUATE) {
        r = engine_evaluate(engine, request->owner, request->model, generation.policy, request->options.ids, request->options.n_ids,
                            request->npy_fd, ret_job);
        if (r == 0)
            request->npy_fd = -1; /* taken */
        return r;
    }
    if ((r = bus_request_sampling(request, &generation.sampling)) != 0)
        return r;
    if ((r = bus_request_fill_prompt(request, &generation)) < 0)
        return error_trace(r);
    return engine_generate(engine, &generation, ret_job);
}

/* The quota goes from the request to the job. */
static int bus_request_make_job(BusRequest *request, BusJob **ret)
{
    BusClient *client = bus_client_find(request->bus, request->owner);
    BusJob *job = NULL;
    int r = client ? bus_job_new(request->bus, client, request->kind, request->model, request->n_prompt_bytes, &job) : -ENOTCONN;

    if (r < 0)
        return error_trace(r);
    request->n_prompt_bytes = 0;
    request->has_job = false;
    job->session = request->session;
    job->priority = request->priority;
    job->want_ids = request->options.want_ids;
    if (request->service && !(job->service = strdup(request->service))) {
        bus_job_free(job);
        return error_origin(-ENOMEM);
    }
    *ret = job;
    return 0;
}

static bool bus_request_has_stream(const BusRequest *request)
{
    switch (request->kind) {
    case BUS_JOB_GENERATE:
    case BUS_JOB_INVOKE:
        return true;
    case BUS_JOB_ASK:
    case BUS_JOB_LOAD:
    case BUS_JOB_EVALUATE:
    case BUS_JOB_X_MAX:
        break;
    }
    return false;
}

/* Starts the job and answers the call (Ask's waits for the end). */
static int bus_request_run(BusRequest *request, sd_bus_error *error)
{
    _cleanup_(bus_job_freep) BusJob *job = NULL;
    _cleanup_(close_fdp) int reader = -1;
    bool has_stream = bus_request_has_stream(request);
    char path[BUS_ID_PATH_BYTES];
    uint64_t id;
    int r;

    if ((r = bus_request_make_job(request, &job)) < 0 || (has_stream && (r = bus_job_open_stream(job, &reader)) < 0))
        return error_trace(r);
    if (request->kind == BUS_JOB_ASK)
        job->ask = sd_bus_message_ref(request->call);
    r = bus_request_start(request, &id);
    if (r != 0)
        return bus_error_set(error, bus_error_result(r), NULL);
    if ((r = bus_job_started(TAKE_PTR(job), id)) < 0)
        return error_trace(r);
    bus_id_to_path(BUS_JOB_ROOT, id, path);
    if (request->kind == BUS_JOB_ASK)
        return 1;
    if (has_stream)
        return sd_bus_reply_method_return(request->call, "oh", path, reader);
    return sd_bus_reply_method_return(request->call, "o", path);
}

/* The descriptor was read, or could not be. */
static void bus_request_on_input(void *userdata, int r, char *bytes, size_t n, const ErrorDetail *detail)
{
    _cleanup_(bus_request_freep) BusRequest *request = userdata;
    __attribute__((__cleanup__(sd_bus_error_free))) sd_bus_error error = SD_BUS_ERROR_NULL;

    (void)id_table_remove(&request->bus->requests, request->cookie);
    if (r == -ENOMEM)
        r = bus_error_set(&error, ENGINE_RESULT_OUT_OF_MEMORY, detail);
    else if (r < 0)
        r = bus_error_invalid(&error, "%s: %s", request->kind == BUS_JOB_EVALUATE ? "ids" : "option prompt-fd", detail->text);
    else
        r = bus_request_charge(request, n, &error);
    if (r >= 0)
        r = bus_request_take_input(request, bytes, n, &error);
    if (r >= 0)
        r = bus_request_run(request, &error);
    if (r < 0)
        (void)sd_bus_reply_method_errno(request->call, r, &error);
}

/* Keeps the request until its descriptor has been read. */
static int bus_request_read_input(BusRequest *request, sd_bus_error *error)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Bus *bus = request->bus;
    int r;

    request->cookie = ++bus->last_cookie;
    r = input_new(bus->event, TAKE_FD(request->options.prompt_fd), INPUT_MAX_BYTES, bus_request_on_input, request, &request->input, &detail);
    if (r < 0)
        return detail.text[0] ? bus_error_invalid(error, "%s: %s", request->kind == BUS_JOB_EVALUATE ? "ids" : "option prompt-fd", detail.text)
                              : error_trace(r);
    return id_table_add(&bus->requests, request->cookie, request);
}

int bus_request_submit(BusRequest *taken, sd_bus_error *error)
{
    _cleanup_(bus_request_freep) BusRequest *request = taken;
    uint64_t n_bytes = request->messages.n_bytes + request->options.n_ids * sizeof(int32_t) + (request->prompt ? strlen(request->prompt) : 0);
    int r;

    for (size_t i = 0; i < request->options.n_prompts; i++)
        n_bytes += strlen(request->options.prompts[i]);
    if (call_options_have(&request->options, CALL_OPTION_PRIORITY))
        request->priority = request->options.priority;
    if ((r = bus_request_check(request, error)) < 0 || (r = bus_request_charge(request, n_bytes, error)) < 0)
        return error_trace(r);
    if (request->options.prompt_fd < 0)
        return bus_request_run(request, error);
    if ((r = bus_request_read_input(request, error)) < 0)
        return error_trace(r);
    request = NULL; /* the table's */
    return 1;
}

void bus_requests_owner_gone(Bus *bus, uint64_t owner)
{
    for (size_t i = bus->requests.n; i-- > 0;) {
        BusRequest *request = bus->requests.entries[i].object;

        if (request->owner != owner)
            continue;
        (void)id_table_remove(&bus->requests, request->cookie);
        bus_request_free(request);
    }
}

void bus_requests_clear(Bus *bus)
{
    while (bus->requests.n > 0)
        bus_request_free(id_table_remove(&bus->requests, bus->requests.entries[0].id));
    id_table_clear(&bus->requests);
}
