/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's sessions: finding, closing, and whose cache stays when memory is short. */

#include "daemon/engine/engine-internal.h"

Session *sessions_find(Engine *engine, uint64_t id, uint64_t owner)
{
    for (Session *s = engine->sessions; s; s = s->next)
        if (s->id == id)
            return owner == 0 || s->owner == owner ? s : NULL; /* another's session looks like none */
    return NULL;
}

Session *sessions_open(Engine *engine, ModelSlot *slot, const KvPolicy *policy, uint64_t owner)
{
    Session *session;

    if (engine->n_sessions >= ENGINE_MAX_SESSIONS)
        return NULL;
    session = session_new(slot, policy, engine->last_session + 1, owner);
    if (!session)
        return NULL;
    engine->last_session++;
    engine->n_sessions++;
    session->next = engine->sessions;
    engine->sessions = session;
    return session;
}

void sessions_close(Engine *engine, Session *session)
{
    EngineEvent *event;

    if (session->job)
        jobs_finish(engine, session->job, ENGINE_RESULT_CANCELLED, NULL);
    for (Session **s = &engine->sessions; *s; s = &(*s)->next)
        if (*s == session) {
            *s = session->next;
            break;
        }
    engine->n_sessions--;
    event = event_new(ENGINE_EVENT_SESSION_CLOSED);
    if (event) {
        event->session = session->id;
        mailbox_emit(engine->mailbox, event);
    }
    session_free(session);
    jobs_unblock(engine);
}

void sessions_close_owner(Engine *engine, uint64_t owner)
{
    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        for (StoreSlot *store = slot->stores; store; store = store->next)
            prefixes_drop_owner(&store->prefixes, owner);
    for (Session *s = engine->sessions, *next; s; s = next) {
        next = s->next;
        if (s->owner == owner)
            sessions_close(engine, s);
    }
}

void sessions_close_slot(Engine *engine, const ModelSlot *slot)
{
    for (Session *s = engine->sessions, *next; s; s = next) {
        next = s->next;
        if (s->slot == slot)
            sessions_close(engine, s);
    }
}

void sessions_drop_caches(Engine *engine, const ModelSlot *slot, const StoreSlot *store)
{
    for (StoreSlot *s = slot->stores; s; s = s->next)
        if (!store || s == store)
            prefixes_clear(&s->prefixes);
    for (Session *s = engine->sessions; s; s = s->next)
        if (s->slot == slot && s->cache && (!store || s->store == store))
            session_drop_cache(s);
    for (Job *job = engine->jobs; job; job = job->next)
        if (job->slot == slot && job_store(job) && (!store || job_store(job) == store))
            job_drop_caches(job);
}

/* Whose caches may give way: those of one store, or of all that keep pages in host memory, or of all. */
typedef struct Claim {
    const StoreSlot *store;
    bool host;
} Claim;

static bool claims(const Claim *claim, const StoreSlot *store)
{
    const KvPolicy *policy = kv_store_policy(store->store);

    if (claim->host)
        return policy->home == KV_HOME_HOST || policy->is_compatible;
    return !claim->store || claim->store == store;
}

/* The prefix that was used longest ago, when that was before @before_usec. */
static bool drop_oldest_prefix(Engine *engine, const Claim *claim, uint64_t before_usec)
{
    Prefixes *oldest = NULL;

    for (ModelSlot *slot = engine->slots; slot; slot = slot->next)
        for (StoreSlot *s = slot->stores; s; s = s->next)
            if (claims(claim, s) && prefixes_oldest_usec(&s->prefixes) < before_usec) {
                oldest = &s->prefixes;
                before_usec = prefixes_oldest_usec(oldest);
            }
    return oldest && prefixes_drop_oldest(oldest);
}

bool sessions_evict_one(Engine *engine, const StoreSlot *store, bool host, const Job *claimant)
{
    const Claim claim = {store, host && (!store || kv_store_others_can_help(store->store))};
    Session *idle = NULL;
    Job *lower = NULL;

    for (Session *s = engine->sessions; s; s = s->next)
        if (s->cache && !s->job && claims(&claim, s->store) && (!idle || s->last_used_usec < idle->last_used_usec))
            idle = s;
    if (drop_oldest_prefix(engine, &claim, idle ? idle->last_used_usec : UINT64_MAX))
        return true;
    if (idle) {
        session_drop_cache(idle);
        return true;
    }
    for (Job *job = engine->jobs; job && claimant; job = job->next)
        if (job->active && !job->in_pass && job != claimant && job_store(job) && claims(&claim, job_store(job)) &&
            !kv_store_policy(job_store(job)->store)->is_compatible && job->priority > claimant->priority && (!lower || job->priority >= lower->priority))
            lower = job;
    if (!lower)
        return false;
    job_drop_caches(lower);
    return true;
}

bool sessions_others_hold_memory(const Engine *engine, const Job *job)
{
    for (const Job *other = engine->jobs; other; other = other->next)
        if (other != job && other->active && job_store(other) && other->slot == job->slot)
            return true;
    return false;
}

EngineResult sessions_refuse_rerun(ErrorDetail *reterr)
{
    (void)error_detail_set(reterr, -ENOMEM, "memory ran out, and with quant.compatibility a lost cache cannot be made again with the same numbers: "
                           "they depend on which tokens came together");
    return ENGINE_RESULT_OUT_OF_MEMORY;
}

static EngineResult warm(Engine *engine, Job *job, ErrorDetail *reterr)
{
    Session *session = job->session;
    StoreSlot *store;
    EngineResult result;
    size_t common;
    int r;

    if (session->cache)
        return ENGINE_RESULT_DONE;
    if (job->n_output > 0 && session->policy.is_compatible)
        return sessions_refuse_rerun(reterr);
    result = slot_store(engine, session->slot, &session->policy, true, &store, reterr);
    if (result != ENGINE_RESULT_DONE)
        return result;
    if (job->kind != JOB_EVALUATE) { /* which wants every row's logits */
        common = prefixes_fork(&store->prefixes, job->owner, session->ids.ids, session->ids.n, &session->cache);
        job->fork_tokens = MAX(job->fork_tokens, common >= PREFIXES_MIN_TOKENS ? (uint32_t)common : 0);
    }
    if (session->cache) {
        session->store = store;
        return ENGINE_RESULT_DONE;
    }
    do
        r = kv_cache_new(store->store, &session->cache, reterr);
    while ((r == KV_E_DEVICE_MEMORY || r == KV_E_HOST_MEMORY) && sessions_evict_one(engine, store, r == KV_E_HOST_MEMORY, job));
    if (r == KV_E_DEVICE_MEMORY && ladder_for_pass(engine, session->slot, store))
        return warm(engine, job, reterr); /* it ends where the ladder does */
    if (r)
        return result_from_kv(r);
    session->store = store;
    return ENGINE_RESULT_DONE;
}

EngineResult sessions_warm(Engine *engine, Job *job, ErrorDetail *reterr)
{
    EngineResult result = warm(engine, job, reterr);

    if (result == ENGINE_RESULT_DONE)
        (void)kv_cache_record(job->session->cache, job->session->recording); /* refused in a pass only */
    return result;
}
