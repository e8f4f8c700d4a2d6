/* SPDX-License-Identifier: Apache-2.0 */
/* Questions of the main thread. */

#include "daemon/engine/query.h"
#include "daemon/engine/engine-internal.h"

#include <jansson.h>
#include <string.h>

int query_new(const EngineQuery *query, Query **ret)
{
    _cleanup_(query_freep) Query *copy = calloc(1, sizeof(*copy));
    int r;

    if (!copy)
        return error_origin(-ENOMEM);
    copy->fd = -1;
    copy->kind = query->kind;
    copy->cookie = query->cookie;
    copy->owner = query->owner;
    copy->session = query->session;
    copy->n = query->n;
    copy->want_ids = query->want_ids;
    copy->parse_special = query->parse_special;
    copy->has_policy = query->policy != NULL;
    if (query->policy)
        copy->policy = *query->policy;
    copy->reply = event_new(ENGINE_EVENT_REPLY);
    copy->model = strdup(query->model ? query->model : "");
    if (!copy->reply || !copy->model)
        return error_origin(-ENOMEM);
    if (query->text) {
        copy->text = strdup(query->text);
        if (!copy->text)
            return error_origin(-ENOMEM);
    }
    if (query->messages) {
        r = messages_copy(query->messages, query->n_messages, &copy->messages);
        if (r < 0)
            return error_trace(r);
        copy->n_messages = query->n_messages;
    }
    /* Zero is a valid descriptor, but callers that have none leave the field zero. */
    if (query->kind == ENGINE_QUERY_TRACE_STOP || query->kind == ENGINE_QUERY_SAVE_SESSION || query->kind == ENGINE_QUERY_RESTORE_SESSION)
        copy->fd = query->fd;
    *ret = TAKE_PTR(copy);
    return 0;
}

Query *query_free(Query *query)
{
    if (!query)
        return NULL;
    free(query->model);
    free(query->text);
    messages_free(query->messages, query->n_messages);
    if (query->fd >= 0)
        (void)close(query->fd);
    engine_event_free(query->reply);
    free(query);
    return NULL;
}

void query_answer(Engine *engine, Query *query, EngineResult result, const ErrorDetail *detail)
{
    EngineEvent *reply = TAKE_PTR(query->reply);

    reply->cookie = query->cookie;
    reply->result = result;
    if (result != ENGINE_RESULT_DONE && detail)
        reply->detail = *detail;
    result_explain(result, &reply->detail);
    mailbox_emit(engine->mailbox, reply);
    query_free(query);
}

/* The answer is @json (taken), or that memory did not suffice. */
static void query_answer_json(Engine *engine, Query *query, char *json)
{
    query->reply->json = json;
    query_answer(engine, query, json ? ENGINE_RESULT_DONE : ENGINE_RESULT_OUT_OF_MEMORY, NULL);
}

static char *json_number(const char *key, json_int_t value)
{
    json_t *object = json_pack("{s:I}", key, value);
    char *text = object ? json_dumps(object, JSON_COMPACT) : NULL;

    json_decref(object);
    return text;
}

/* ---- sessions -------------------------------------------------------------------------------------------------------------- */

static void query_open(Engine *engine, Query *query)
{
    ModelSlot *slot = models_find(engine, query->model);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Session *session;

    if (!slot) {
        (void)error_detail_set(&detail, -ENOENT, "there is no model '%s'", query->model);
        query_answer(engine, query, ENGINE_RESULT_NO_SUCH_MODEL, &detail);
        return;
    }
    session = sessions_open(engine, slot, query->has_policy ? &query->policy : &slot->config.policy, query->owner);
    if (!session) {
        (void)error_detail_set(&detail, -ENOMEM, "%u sessions are open, no more can be", engine->n_sessions);
        query_answer(engine, query, ENGINE_RESULT_QUEUE_FULL, &detail);
        return;
    }
    query->reply->session = session->id;
    query_answer(engine, query, ENGINE_RESULT_DONE, NULL);
}

/* The copy shares pages and tail.  When there is no room for another warm cache, the clone is cold and runs its ids again. */
static void query_clone(Engine *engine, Query *query, Session *session)
{
    Session *clone = sessions_open(engine, session->slot, &session->policy, query->owner ? query->owner : session->owner);
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (!clone || token_list_append(&clone->ids, session->ids.ids, session->ids.n) < 0) {
        if (clone)
            sessions_close(engine, clone);
        (void)error_detail_set(&detail, -ENOMEM, "the session cannot be cloned: out of memory, or too many sessions");
        query_answer(engine, query, ENGINE_RESULT_OUT_OF_MEMORY, &detail);
        return;
    }
    clone->recording = session->recording;
    if (session->cache && kv_cache_fork(session->cache, &clone->cache, NULL) == 0) {
        clone->store = session->store;
        session_trim(clone);
    }
    query->reply->session = clone->id;
    query_answer(engine, query, ENGINE_RESULT_DONE, NULL);
}

static void query_crop(Engine *engine, Query *query, Session *session)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint32_t length = (uint32_t)session->ids.n, keep, left;
    int r;

    if (session->job) {
        (void)error_detail_set(&detail, -EBUSY, "session %llu is busy", (unsigned long long)session->id);
        query_answer(engine, query, ENGINE_RESULT_SESSION_BUSY, &detail);
        return;
    }
    if (query->n > 0 || query->n < -(int64_t)length) {
        (void)error_detail_set(&detail, -EINVAL, "n is %lld, it must be from -%u to 0", (long long)query->n, length);
        query_answer(engine, query, ENGINE_RESULT_INVALID_ARGS, &detail);
        return;
    }
    keep = length - (uint32_t)-query->n;
    if (session_cached(session) > keep) {
        r = kv_cache_crop(session->cache, keep, &left, &detail);
        if (r) {
            query_answer(engine, query, result_from_kv(r), &detail);
            return;
        }
    }
    /* What a packed cache could not keep is among the ids still, and is run again before the next answer. */
    session->ids.n = keep;
    if (session->recording && session->cache) { /* anew from here */
        (void)kv_cache_record(session->cache, false);
        (void)kv_cache_record(session->cache, true);
    }
    query_answer_json(engine, query, json_number("length", keep));
}

/* A cold session begins to record when it is warmed. */
static void query_record(Engine *engine, Query *query, Session *session)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (session->job) {
        (void)error_detail_set(&detail, -EBUSY, "session %llu is busy", (unsigned long long)session->id);
        query_answer(engine, query, ENGINE_RESULT_SESSION_BUSY, &detail);
        return;
    }
    session->recording = query->n != 0;
    if (session->cache)
        (void)kv_cache_record(session->cache, session->recording); /* refused in a pass only */
    query_answer(engine, query, ENGINE_RESULT_DONE, NULL);
}

static void query_cache(Engine *engine, Query *query, Session *session)
{
    const KvPolicy *policy = session->store ? kv_store_policy(session->store->store) : &session->policy;
    KvBytes b = {0};
    char form[32];
    json_t *json;

    if (session->cache)
        kv_cache_bytes(session->cache, &b);
    status_form(policy, form, sizeof(form));
    json = json_pack("{s:s, s:s, s:s, s:s, s:b, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "strategy",
                     kv_strategy_to_string(policy->strategy), "form", form, "home",
                     policy->home == KV_HOME_HOST || policy->is_compatible ? "host" : "device", "transfer", status_transfer(policy->transfer), "warm",
                     session->cache != NULL, "recording", session->recording, "length", (json_int_t)session->ids.n, "cached-length",
                     (json_int_t)b.length,
                     "context", (json_int_t)slot_context(session->slot, policy), "host-bytes", (json_int_t)b.host, "device-bytes",
                     (json_int_t)b.device, "staging-bytes", (json_int_t)b.staging, "checkpoint-bytes", (json_int_t)b.checkpoints,
                     "pages", (json_int_t)b.n_pages, "pages-shared", (json_int_t)b.n_pages_shared);
    query_answer_json(engine, query, json ? json_dumps(json, JSON_COMPACT) : NULL);
    json_decref(json);
}

static void query_session(Engine *engine, Query *query)
{
    Session *session = sessions_find(engine, query->session, query->owner);
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (!session) {
        (void)error_detail_set(&detail, -ENOENT, "there is no session %llu of this caller", (unsigned long long)query->session);
        query_answer(engine, query, ENGINE_RESULT_NO_SUCH_SESSION, &detail);
        return;
    }
    if (query->kind == ENGINE_QUERY_CLOSE_SESSION) {
        sessions_close(engine, session);
        query_answer(engine, query, ENGINE_RESULT_DONE, NULL);
    } else if (query->kind == ENGINE_QUERY_CLONE_SESSION) {
        query_clone(engine, query, session);
    } else if (query->kind == ENGINE_QUERY_CROP_SESSION) {
        query_crop(engine, query, session);
    } else if (query->kind == ENGINE_QUERY_RECORD_SESSION) {
        query_record(engine, query, session);
    } else if (query->kind == ENGINE_QUERY_SAVE_SESSION) {
        files_save(engine, query, session);
    } else if (query->kind == ENGINE_QUERY_RESTORE_SESSION) {
        files_restore(engine, query, session);
    } else {
        query_cache(engine, query, session);
    }
}

/* ---- models ---------------------------------------------------------------------------------------------------------------- */

/* The slot that a question is about, through its session or by name; NULL: answered that there is none. */
static ModelSlot *query_slot(Engine *engine, Query *query)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    Session *session;
    ModelSlot *slot;

    if (query->session) {
        session = sessions_find(engine, query->session, query->owner);
        if (session)
            return session->slot;
        (void)error_detail_set(&detail, -ENOENT, "there is no session %llu of this caller", (unsigned long long)query->session);
        query_answer(engine, query, ENGINE_RESULT_NO_SUCH_SESSION, &detail);
        return NULL;
    }
    slot = models_find(engine, query->model);
    if (!slot) {
        (void)error_detail_set(&detail, -ENOENT, "there is no model '%s'", query->model);
        query_answer(engine, query, ENGINE_RESULT_NO_SUCH_MODEL, &detail);
    }
    return slot;
}

static void query_count(Engine *engine, Query *query, const ModelSlot *slot)
{
    _cleanup_(token_list_clearp) TokenList list = TOKEN_LIST_NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result;

    if (query->messages)
        result = generate_encode(slot, query->messages, query->n_messages, NULL, &list, &detail);
    else
        result = result_from_errno(error_fold(tokenizer_encode(model_file_tokenizer(slot_file(slot)), query->text ? query->text : "",
                                                               query->text ? strlen(query->text) : 0, query->parse_special, &list)));
    if (result != ENGINE_RESULT_DONE) {
        query_answer(engine, query, result, &detail);
        return;
    }
    if (query->want_ids) {
        query->reply->n_ids = list.n;
        query->reply->ids = TAKE_PTR(list.ids);
    }
    query_answer_json(engine, query, json_number("tokens", (json_int_t)list.n));
}

static void query_estimate(Engine *engine, Query *query, ModelSlot *slot)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char *json = NULL;
    EngineResult result;

    result = estimate_json(engine, slot, query->has_policy ? &query->policy : &slot->config.policy, query->n, &json, &detail);
    query->reply->json = json;
    query_answer(engine, query, result, &detail);
}

void query_with_file(Engine *engine, Query *query)
{
    ModelSlot *slot = query_slot(engine, query);

    if (!slot)
        return;
    if (!slot_file(slot)) /* the session's model changed meanwhile */
        slot_want_file(engine, slot, query);
    else if (query->kind == ENGINE_QUERY_ESTIMATE)
        query_estimate(engine, query, slot);
    else
        query_count(engine, query, slot);
}

static void query_unload(Engine *engine, Query *query, ModelSlot *slot)
{
    /* Nothing is cancelled: running jobs end first, and sessions keep their ids. */
    if (slot->state == SLOT_LOADED || slot->state == SLOT_LOADING)
        slot->unload_wanted = true;
    else
        slot->file = model_file_free(slot->file);
    engine->admission_due = true;
    query_answer(engine, query, ENGINE_RESULT_DONE, NULL);
}

/* ---- trace ----------------------------------------------------------------------------------------------------------------- */

static void query_trace(Engine *engine, Query *query)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result = device_ensure(engine, &detail);
    int r;

    if (result != ENGINE_RESULT_DONE) {
        query_answer(engine, query, result, &detail);
        return;
    }
    r = query->kind == ENGINE_QUERY_TRACE_START ? gpu_trace_start(engine->gpu) : gpu_trace_stop(engine->gpu, query->fd);
    if (r)
        (void)error_detail_set(&detail, r, "the trace cannot be %s: %s",
                               query->kind == ENGINE_QUERY_TRACE_START ? "started" : "written", strerror(r < 0 ? -r : EIO));
    query_answer(engine, query, result_from_errno(error_fold(r)), &detail);
}

void query_handle(Engine *engine, Query *query)
{
    ModelSlot *slot;

    query->next = NULL;
    switch (query->kind) {
    case ENGINE_QUERY_OPEN_SESSION:
        query_open(engine, query);
        return;
    case ENGINE_QUERY_CLOSE_SESSION:
    case ENGINE_QUERY_CLONE_SESSION:
    case ENGINE_QUERY_CROP_SESSION:
    case ENGINE_QUERY_RECORD_SESSION:
    case ENGINE_QUERY_SAVE_SESSION:
    case ENGINE_QUERY_RESTORE_SESSION:
    case ENGINE_QUERY_SESSION_CACHE:
        query_session(engine, query);
        return;
    case ENGINE_QUERY_COUNT_TOKENS:
    case ENGINE_QUERY_ESTIMATE:
        slot = query_slot(engine, query);
        if (slot)
            slot_want_file(engine, slot, query);
        return;
    case ENGINE_QUERY_UNLOAD:
        slot = query_slot(engine, query);
        if (slot)
            query_unload(engine, query, slot);
        return;
    case ENGINE_QUERY_STATUS:
        query_answer_json(engine, query, status_json(engine));
        return;
    case ENGINE_QUERY_TRACE_START:
    case ENGINE_QUERY_TRACE_STOP:
        query_trace(engine, query);
        return;
    }
    query_answer(engine, query, ENGINE_RESULT_INVALID_ARGS, NULL);
}
