/* SPDX-License-Identifier: Apache-2.0 */
/* Idle sessions in files of our own. */

#include "daemon/engine/files-internal.h"
#include "daemon/model/digest.h"
#include "quant/base/log.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* A file without a name. */
static int open_unnamed(const char *folder, ErrorDetail *reterr)
{
    int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

    if (fd < 0 && errno == EOPNOTSUPP) { /* not every file system has them */
        _cleanup_(freep) char *path = NULL;

        if (asprintf(&path, "%s/leat-XXXXXX", folder) < 0)
            return error_origin(-ENOMEM);
        fd = mkostemp(path, O_CLOEXEC);
        if (fd >= 0)
            (void)unlink(path);
    }
    return fd < 0 ? error_detail_set(reterr, -errno, "'%s': %s", folder, strerror(errno)) : fd;
}

void file_task_spill(FileTask *task)
{
    task->fd = open_unnamed(task->folder, &task->detail);
    task->code = task->fd < 0 ? task->fd : kv_save_write(task->save, task->fd);
}

static bool is_idle(const Session *session)
{
    return session->cache && !session->job && !session->in_file_task && session->slot->config.spill_dir && session->id;
}

static void spill(Engine *engine, Session *session)
{
    FileTask *task = file_task_new(FILE_TASK_SPILL, session, session->store);
    ErrorDetail detail = ERROR_DETAIL_NULL;
    uint8_t model[KV_IMAGE_DIGEST];

    if (!task)
        return;
    task->folder = strdup(session->slot->config.spill_dir);
    session_trim(session);
    if (!task->folder || digest_from_hex(session->slot->facts.digest, model) < 0 ||
        kv_save_begin(session->cache, model, session->ids.ids, session->ids.n * sizeof(int32_t), &task->save, &detail) != 0) {
        file_task_free(task);
        return;
    }
    session->in_file_task = true;
    file_task_post(engine, task);
}

uint64_t files_spill_idle(Engine *engine, uint64_t now)
{
    uint64_t next = UINT64_MAX;

    for (Session *session = engine->sessions; session; session = session->next) {
        uint64_t due, after = session->slot->config.spill_after_usec;

        if (!is_idle(session))
            continue;
        due = after > UINT64_MAX - session->last_used_usec ? UINT64_MAX : session->last_used_usec + after;
        if (due <= now)
            spill(engine, session);
        else
            next = MIN(next, due);
    }
    return next;
}

/* What was written stands for the cache, unless the session went on meanwhile. */
static void spilled(FileTask *task, Session *session)
{
    session_forget_file(session);
    if (session->job || !session->cache || session->last_used_usec != task->used_usec)
        return;
    session->spill_fd = task->fd;
    task->fd = -1;
    task->save = kv_save_end(task->save);
    session_drop_cache(session);
}

bool files_fetch(Engine *engine, Session *session)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    StoreSlot *store;
    FileTask *task;

    if (session->in_file_task)
        return session->spill_fd >= 0; /* what is only being written is still there */
    if (session->cache || session->spill_fd < 0)
        return false;
    task = file_task_new(FILE_TASK_FETCH, session, NULL);
    if (task)
        task->fd = fcntl(session->spill_fd, F_DUPFD_CLOEXEC, 3);
    if (!task || task->fd < 0 || slot_store(engine, session->slot, &session->policy, true, &store, &detail) != ENGINE_RESULT_DONE) {
        if (task)
            file_task_free(task);
        session_forget_file(session);
        return false;
    }
    task->store = store;
    task->expected.layout = kv_store_layout(store->store);
    (void)digest_from_hex(session->slot->facts.digest, task->expected.model);
    session->in_file_task = true;
    file_task_post(engine, task);
    return true;
}

/* The cache back in its place, as far as it agrees with what the session's ids are now. */
static void fetched(Engine *engine, FileTask *task, Session *session)
{
    StoreSlot *store = slot_find_store(session->slot, &session->policy);
    KvCache *cache = NULL;
    size_t bytes, keep;
    const int32_t *ids = kv_image_extra(task->image, &bytes);
    uint32_t left;
    int r;

    if (session->cache || store != task->store)
        return;
    do
        r = kv_restore(store->store, task->image, &cache, NULL);
    while ((r == KV_E_DEVICE_MEMORY || r == KV_E_HOST_MEMORY) && sessions_evict_one(engine, store, r == KV_E_HOST_MEMORY, NULL));
    if (r)
        return;
    keep = MIN(session_common_prefix(session, ids, bytes / sizeof(int32_t)), (size_t)kv_cache_length(cache));
    (void)kv_cache_checkpoint(cache);
    if (keep < kv_cache_length(cache) && kv_cache_crop(cache, (uint32_t)keep, &left, NULL) != 0) {
        kv_cache_free(cache);
        return;
    }
    session->cache = cache;
    session->store = store;
}

void file_task_spill_done(Engine *engine, FileTask *task)
{
    Session *session = sessions_find(engine, task->session, 0);

    if (task->code && !engine->spill_failed)
        log_warning("Sessions stay in memory: %s", task->detail.text[0] ? task->detail.text : strerror(EIO));
    engine->spill_failed = task->code != 0; /* the same reason once, not at every try */
    if (session && !task->code && task->kind == FILE_TASK_SPILL)
        spilled(task, session);
    else if (session && task->kind == FILE_TASK_SPILL)
        session->last_used_usec = now_usec(); /* not again at once */
    if (session && task->kind == FILE_TASK_FETCH) {
        if (!task->code)
            fetched(engine, task, session);
        session_forget_file(session);
    }
    file_task_answer(engine, task, ENGINE_RESULT_DONE, NULL);
}
