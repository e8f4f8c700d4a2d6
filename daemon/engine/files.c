/* SPDX-License-Identifier: Apache-2.0 */
/* Saving and restoring sessions. */

#include "daemon/engine/files-internal.h"
#include "daemon/model/digest.h"

#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <sys/sendfile.h>
#include <unistd.h>

void file_task_free(FileTask *task)
{
    kv_save_end(task->save);
    kv_image_free(task->image);
    (void)command_free(task->task.answer);
    if (!task->query && task->fd >= 0)
        (void)close(task->fd);
    if (task->copy_fd >= 0)
        (void)close(task->copy_fd);
    free(task->folder);
    free(task);
}

FileTask *file_task_new(FileTaskKind kind, const Session *session, const StoreSlot *store)
{
    FileTask *task = calloc(1, sizeof(*task));

    if (task)
        *task = (FileTask){.kind = kind, .fd = -1, .copy_fd = -1, .session = session->id, .store = store,
                           .used_usec = session->last_used_usec};
    return task;
}

static int copy_file(int from, int to)
{
    off_t at = 0;
    ssize_t n;

    do
        n = sendfile(to, from, &at, 1 << 30);
    while (n > 0 || (n < 0 && errno == EINTR));
    return n < 0 ? -errno : 0;
}

static int write_client_file(const FileTask *task)
{
    int r;

    if (lseek(task->fd, 0, SEEK_SET) < 0 || ftruncate(task->fd, 0) < 0)
        return -errno;
    r = task->copy_fd >= 0 ? copy_file(task->copy_fd, task->fd) : kv_save_write(task->save, task->fd);
    return r == 0 && fsync(task->fd) < 0 ? -errno : r;
}

/* On the worker's thread. */
static void file_task_run(Task *base)
{
    FileTask *task = (FileTask *)base;

    if (task->kind == FILE_TASK_SPILL) {
        file_task_spill(task);
        return;
    }
    if (task->kind == FILE_TASK_FETCH) {
        task->code = kv_image_open(task->fd, "the spilled session", &task->expected, true, &task->image, &task->detail);
        return;
    }
    if (task->kind == FILE_TASK_RESTORE) {
        /* Whoever sent the descriptor may write to the file or cut it: it is read, never mapped. */
        task->code = kv_image_open(task->fd, "the file", &task->expected, false, &task->image, &task->detail);
        return;
    }
    task->code = write_client_file(task);
    if (task->code)
        (void)error_detail_set(&task->detail, task->code, "the session cannot be written: %s", strerror(-task->code));
}

static EngineResult result_from_file(int code)
{
    switch (code) {
    case 0:
        return ENGINE_RESULT_DONE;
    case KV_IMAGE_E_DIFFERENT:
        return ENGINE_RESULT_DIGEST_MISMATCH;
    case KV_IMAGE_E_DAMAGED:
    case -EBADMSG:
        return ENGINE_RESULT_INVALID_ARGS;
    default:
        return result_from_errno(error_fold(code));
    }
}

void file_task_answer(Engine *engine, FileTask *task, EngineResult result, const ErrorDetail *detail)
{
    Session *session = sessions_find(engine, task->session, 0);

    for (FileTask **t = &engine->file_tasks; *t; t = &(*t)->next)
        if (*t == task) {
            *t = task->next;
            break;
        }
    if (task->query)
        query_answer(engine, task->query, result, detail);
    else if (session)
        session->in_file_task = false;
    engine->admission_due = true;
    file_task_free(task);
}

void file_task_post(Engine *engine, FileTask *task)
{
    task->task.run = file_task_run;
    task->id = ++engine->last_file_task;
    if (task->query)
        task->fd = task->query->fd;
    task->task.answer = command_new(COMMAND_FILE_DONE, task->id);
    task->next = engine->file_tasks;
    engine->file_tasks = task;
    if (task->task.answer)
        worker_post(engine->file_worker, &task->task);
    else
        file_task_answer(engine, task, ENGINE_RESULT_OUT_OF_MEMORY, NULL);
}

static bool refuse_busy(Engine *engine, Query *query, const Session *session)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    if (!session->job && !session->in_file_task)
        return false;
    (void)error_detail_set(&detail, -EBUSY, "session %llu is busy", (unsigned long long)session->id);
    query_answer(engine, query, ENGINE_RESULT_SESSION_BUSY, &detail);
    return true;
}

/* It is handled again when the model has been loaded, or answered when that fails. */
static void wait_for_slot(Engine *engine, Query *query, ModelSlot *slot)
{
    Query **last;

    for (last = &slot->restores; *last; last = &(*last)->next)
        continue;
    query->next = NULL;
    *last = query;
    slot_want_loaded(engine, slot);
}

/* ---- save -------------------------------------------------------------------------------------------------------------------- */

void files_save(Engine *engine, Query *query, Session *session)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint8_t model[KV_IMAGE_DIGEST];
    FileTask *task;
    int r;

    if (refuse_busy(engine, query, session))
        return;
    if (digest_from_hex(session->slot->facts.digest, model) < 0) {
        if (!slot_is_ready(session->slot)) { /* it was never loaded, so the session is empty */
            wait_for_slot(engine, query, session->slot);
            return;
        }
        (void)error_detail_set(&detail, -EBADMSG, "the model of session %llu has no digest", (unsigned long long)session->id);
        query_answer(engine, query, ENGINE_RESULT_FAILED, &detail);
        return;
    }
    task = file_task_new(FILE_TASK_SAVE, session, session->store);
    if (!task) {
        query_answer(engine, query, ENGINE_RESULT_OUT_OF_MEMORY, NULL);
        return;
    }
    task->query = query;
    if (!session->cache && session->spill_fd >= 0 && (task->copy_fd = fcntl(session->spill_fd, F_DUPFD_CLOEXEC, 3)) >= 0) {
        file_task_post(engine, task);
        return;
    }
    r = kv_save_begin(session_cached(session) > 0 ? session->cache : NULL, model, session->ids.ids, session->ids.n * sizeof(int32_t), &task->save, &detail);
    if (r) {
        query_answer(engine, query, result_from_kv(r), &detail);
        file_task_free(task);
        return;
    }
    file_task_post(engine, task);
}

static void saved(Engine *engine, FileTask *task)
{
    off_t bytes = lseek(task->fd, 0, SEEK_END);
    json_t *json = json_pack("{s:I}", "bytes", (json_int_t)bytes);

    task->query->reply->json = json ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    file_task_answer(engine, task, task->query->reply->json ? ENGINE_RESULT_DONE : ENGINE_RESULT_OUT_OF_MEMORY, NULL);
}

/* ---- restore ----------------------------------------------------------------------------------------------------------------- */

/* A descriptor may name a sparse file of any size, which would fill our memory with zeros. */
static uint64_t most_file_bytes(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);

    return pages > 0 && page_bytes > 0 ? (uint64_t)pages / 2 * (uint64_t)page_bytes : 0;
}

static void start_restore(Engine *engine, Query *query, Session *session)
{
    FileTask *task = file_task_new(FILE_TASK_RESTORE, session, NULL);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    EngineResult result = ENGINE_RESULT_OUT_OF_MEMORY;
    StoreSlot *store;

    if (task)
        result = slot_store(engine, session->slot, &session->policy, true, &store, &detail);
    if (result != ENGINE_RESULT_DONE) {
        free(task);
        query_answer(engine, query, result, &detail);
        return;
    }
    task->query = query;
    task->store = store;
    task->expected.layout = kv_store_layout(store->store);
    task->expected.max_bytes = most_file_bytes();
    (void)digest_from_hex(session->slot->facts.digest, task->expected.model);
    file_task_post(engine, task);
}

void files_restore(Engine *engine, Query *query, Session *session)
{
    if (refuse_busy(engine, query, session))
        return;
    if (slot_is_ready(session->slot))
        start_restore(engine, query, session);
    else
        wait_for_slot(engine, query, session->slot);
}

void files_slot_ready(Engine *engine, ModelSlot *slot, EngineResult result, const ErrorDetail *detail)
{
    Query *queries = TAKE_PTR(slot->restores);

    while (queries) {
        Query *query = queries;

        queries = query->next;
        query->next = NULL;
        if (result == ENGINE_RESULT_DONE)
            query_handle(engine, query);
        else
            query_answer(engine, query, result, detail);
    }
}

/* The ids that came with the image, checked; none of a session that was empty. */
static int take_ids(const FileTask *task, const Session *session, TokenList *ids, ErrorDetail *reterr)
{
    uint32_t n_vocab = model_file_params(slot_file(session->slot))->n_vocab;
    size_t bytes, n;
    const int32_t *from = kv_image_extra(task->image, &bytes);

    n = bytes / sizeof(int32_t);
    if (bytes % sizeof(int32_t) != 0 || n < task->image->facts.n_tokens)
        return error_detail_set(reterr, -EBADMSG, "the file: %zu bytes of token ids for %u cached tokens", bytes,
                                task->image->facts.n_tokens);
    if (n > slot_context(session->slot, &session->policy))
        return error_detail_set(reterr, KV_E_CONTEXT, "the file: %zu tokens, the context holds %u", n,
                                slot_context(session->slot, &session->policy));
    for (size_t i = 0; i < n; i++)
        if (from[i] < 0 || (uint32_t)from[i] >= n_vocab)
            return error_detail_set(reterr, -EBADMSG, "the file: id %d at place %zu is outside the vocabulary of %u", (int)from[i], i,
                                    n_vocab);
    return token_list_append(ids, from, n);
}

static int restore_session(Engine *engine, FileTask *task, Session *session, ErrorDetail *reterr)
{
    _cleanup_(token_list_clearp) TokenList ids = TOKEN_LIST_NULL;
    StoreSlot *store = slot_find_store(session->slot, &session->policy);
    KvCache *cache = NULL;
    int r;

    if (store != task->store)
        return error_detail_set(reterr, -EBUSY, "the session's cache was configured anew meanwhile");
    r = take_ids(task, session, &ids, reterr);
    if (r)
        return r;
    if (task->image->facts.n_tokens > 0) {
        do
            r = kv_restore(store->store, task->image, &cache, reterr);
        while ((r == KV_E_DEVICE_MEMORY || r == KV_E_HOST_MEMORY) && sessions_evict_one(engine, store, r == KV_E_HOST_MEMORY, NULL));
        if (r)
            return r;
        (void)kv_cache_checkpoint(cache); /* a place for the next turn to come back to; without it that turn runs a little more */
    }
    session_drop_cache(session);
    session_forget_file(session);
    session->cache = cache;
    session->store = cache ? store : NULL;
    token_list_clear(&session->ids);
    session->ids = ids;
    ids = TOKEN_LIST_NULL;
    session->last_used_usec = store->last_used_usec = now_usec();
    return 0;
}

static void restored(Engine *engine, FileTask *task)
{
    Session *session = sessions_find(engine, task->session, task->query->owner);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    json_t *json;
    int r;

    if (!session) {
        file_task_answer(engine, task, ENGINE_RESULT_NO_SUCH_SESSION, NULL);
        return;
    }
    if (session->job) {
        (void)error_detail_set(&detail, -EBUSY, "session %llu became busy meanwhile", (unsigned long long)session->id);
        file_task_answer(engine, task, ENGINE_RESULT_SESSION_BUSY, &detail);
        return;
    }
    r = restore_session(engine, task, session, &detail);
    if (r) {
        file_task_answer(engine, task, r > 0 ? result_from_kv(r) : result_from_file(r), &detail);
        return;
    }
    json = json_pack("{s:I, s:I}", "length", (json_int_t)session->ids.n, "cached-length", (json_int_t)session_cached(session));
    task->query->reply->json = json ? json_dumps(json, JSON_COMPACT) : NULL;
    json_decref(json);
    file_task_answer(engine, task, task->query->reply->json ? ENGINE_RESULT_DONE : ENGINE_RESULT_OUT_OF_MEMORY, NULL);
}

/* ---- the end ----------------------------------------------------------------------------------------------------------------- */

void files_done(Engine *engine, uint64_t id)
{
    FileTask *task = engine->file_tasks;

    while (task && task->id != id)
        task = task->next;
    if (!task)
        return; /* its store went first */
    if (!task->query)
        file_task_spill_done(engine, task);
    else if (task->code)
        file_task_answer(engine, task, result_from_file(task->code), &task->detail);
    else if (task->kind == FILE_TASK_RESTORE)
        restored(engine, task);
    else
        saved(engine, task);
}

void files_drop_store(Engine *engine, const StoreSlot *store)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;

    (void)error_detail_set(&detail, -ECANCELED, "the model was unloaded meanwhile");
    for (FileTask *task = engine->file_tasks, *next; task; task = next) {
        next = task->next;
        if (task->store != store)
            continue;
        worker_cancel(engine->file_worker, &task->task);
        file_task_answer(engine, task, ENGINE_RESULT_CANCELLED, &detail);
    }
}
