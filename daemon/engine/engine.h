#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine: one thread that owns the device, the models and the sessions, and runs jobs.  It knows no D-Bus.
 *
 * The main thread calls engine_* functions (they only enqueue and return at once) and reads EngineEvents, which it finds after the
 * engine's eventfd became readable.  Nothing else is shared.  Loading (map, hash, repack) runs on worker threads that hand finished
 * ModelFiles to the engine thread.
 *
 * Names: sessions and jobs have ids that are never reused.  Owners are opaque numbers (the bus maps unique names to them): when an
 * owner leaves, engine_owner_gone() cancels its jobs and closes its sessions.  A session is found only for its owner, and for owner 0,
 * which stands for a caller whose rights were checked already.
 */

#include "cache/kv-store.h"
#include "daemon/engine/beam.h"
#include "daemon/model/model.h"

typedef struct Engine Engine;

/* What became of a call or a job; each has its D-Bus error name in daemon/bus/bus-error.c. */
typedef enum EngineResult {
    ENGINE_RESULT_DONE,
    ENGINE_RESULT_CANCELLED,
    ENGINE_RESULT_NO_SUCH_MODEL,
    ENGINE_RESULT_NO_SUCH_SESSION,
    ENGINE_RESULT_NO_SUCH_JOB,
    ENGINE_RESULT_NO_SUCH_SERVICE,
    ENGINE_RESULT_MODEL_NOT_INSTALLED,
    ENGINE_RESULT_MODEL_CORRUPT,
    ENGINE_RESULT_DIGEST_MISMATCH,    /* a saved session of another model, form of cache or version */
    ENGINE_RESULT_UNSUPPORTED_MODEL,
    ENGINE_RESULT_OUT_OF_DEVICE_MEMORY,
    ENGINE_RESULT_OUT_OF_MEMORY,
    ENGINE_RESULT_DEVICE_LOST,
    ENGINE_RESULT_DEVICE_HUNG,
    ENGINE_RESULT_NO_DEVICE,          /* NotSupported on the bus: no OpenCL device; names the packages */
    ENGINE_RESULT_CONTEXT_EXCEEDED,   /* the prompt is longer than the context */
    ENGINE_RESULT_SESSION_BUSY,
    ENGINE_RESULT_QUEUE_FULL,
    ENGINE_RESULT_TEMPLATE_FAILED,
    ENGINE_RESULT_DEADLINE_EXCEEDED,
    ENGINE_RESULT_SLOW_READER,
    ENGINE_RESULT_INVALID_ARGS,
    ENGINE_RESULT_NUMERIC,            /* logits are NaN or infinite */
    ENGINE_RESULT_SHUTTING_DOWN,
    ENGINE_RESULT_FAILED,             /* internal; the text says what */
    ENGINE_RESULT_X_MAX,
} EngineResult;

typedef enum EnginePriority { ENGINE_PRIORITY_INTERACTIVE, ENGINE_PRIORITY_NORMAL, ENGINE_PRIORITY_BACKGROUND, ENGINE_PRIORITY_X_MAX } EnginePriority;

typedef enum EngineJobState {
    ENGINE_JOB_QUEUED, ENGINE_JOB_LOADING, ENGINE_JOB_PREFILL, ENGINE_JOB_DECODING, ENGINE_JOB_PAUSED, ENGINE_JOB_DONE, ENGINE_JOB_FAILED,
    ENGINE_JOB_CANCELLED, ENGINE_JOB_X_MAX,
} EngineJobState;
const char *engine_job_state_to_string(EngineJobState state);

/* Sequences that one prompt may have at most. */
#define ENGINE_MAX_BEAMS     40
#define ENGINE_MAX_RETURN    20
/* Prompts of one call. */
#define ENGINE_MAX_PROMPTS   64

/* Whether tokens are drawn, or the best one is taken. */
typedef enum EngineDraw {
    ENGINE_DRAW_AUTO, /* drawn when the temperature is above 0 and there are no beams */
    ENGINE_DRAW_NO,
    ENGINE_DRAW_YES,
    ENGINE_DRAW_X_MAX,
} EngineDraw;

/* Sampling and limits of one generation; the defaults of ENGINE_SAMPLING_DEFAULT unless model or service parameters say otherwise. */
typedef struct EngineSampling {
    uint32_t max_tokens;   /* 0: until the context is full */
    float temperature;     /* 0: greedy */
    uint32_t top_k;        /* 0: off */
    float top_p;           /* 1: off */
    float min_p;           /* 0: off */
    float repeat_penalty;  /* 1: off */
    uint64_t seed;         /* 0: from the system; the one in effect is in the usage */
    bool ignore_eos;
    const char **stop;     /* n_stop strings */
    size_t n_stop;
    uint32_t min_tokens;   /* end tokens are forbidden before so many; 0: off */
    uint32_t no_repeat_ngram; /* no run of so many tokens occurs twice; 0: off */
    const char **bad_words; /* n_bad_words texts whose tokens may not be said in a row */
    size_t n_bad_words;
    EngineDraw draw;
    uint32_t num_beams, num_return_sequences; /* 0 is 1 */
    BeamEarly early_stopping; /* this and the next: of beams only */
    double length_penalty;
} EngineSampling;

static inline bool engine_sampling_draws(const EngineSampling *s)
{
    return s->draw == ENGINE_DRAW_YES || (s->draw == ENGINE_DRAW_AUTO && s->num_beams <= 1 && s->temperature > 0);
}

/* A model as configured. */
typedef struct EngineModel {
    const char *name, *path;
    bool exact;
    uint32_t context;     /* 0: the model's */
    KvPolicy policy;
    ModelWeights weights; /* how they come to the device when not all fit; its budget is the planner's */
    uint32_t parallel;    /* sessions with state on the device at once */
    uint32_t n_prefixes;  /* pasts kept for those who begin alike, per policy; 0: none */
    const char *spill_dir; /* caches of sessions that are idle for spill_after_usec go to unnamed files there; NULL: they stay */
    uint64_t spill_after_usec;
    uint64_t keep_alive_usec; /* idle time before unloading; UINT64_MAX: never */
    bool preload;
    EngineSampling sampling;
    const char *chat_template; /* overrides the file's, or NULL */
} EngineModel;

typedef struct EngineOptions {
    GpuOptions gpu;
    const char *state_dir;      /* digests, calibrations; NULL: nowhere */
    const EngineModel *models;  /* borrowed during the call; copied */
    size_t n_models;
    uint32_t max_queue;         /* jobs waiting; more: QUEUE_FULL */
    uint64_t host_memory_bytes; /* for the caches of all models together; 0: half of what is available now */
} EngineOptions;

int engine_new(const EngineOptions *options, Engine **ret, ErrorDetail *reterr);
/* Cancels everything, joins the thread. */
Engine *engine_free(Engine *engine);
DEFINE_CLEANUP(Engine, engine_free)
/* Readable when events wait. */
int engine_event_fd(const Engine *engine);
/* A number that grows whenever the engine thread made progress or is idle: the watchdog is fed only when it moved.  Any thread. */
uint64_t engine_heartbeat(const Engine *engine);
/* New configuration of models; running jobs keep what they started with. */
int engine_reconfigure(Engine *engine, const EngineModel *models, size_t n_models);

/* The steps (ModelStep) as words with a space between: "smaller-batch smaller-staging host-home streamed-weights"; empty: none. */
void engine_ladder_text(unsigned steps, char *ret, size_t size);

/* One finished sequence of a generation that has several. */
typedef struct EngineSequence {
    uint32_t prompt;       /* which of the prompts */
    float score;           /* of beams: the sum of log-probabilities by length^length_penalty; else 0 */
    char *text;            /* owned, UTF-8 */
    size_t text_length;
    int32_t *ids;          /* owned; end token left out; NULL unless asked for */
    uint32_t n_tokens;     /* end token left out */
    char stop_reason[24];  /* as in EngineUsage */
} EngineSequence;

/* What a generation did, for Finished, Ask and the U frame. */
typedef struct EngineUsage {
    uint32_t prompt_tokens, reused_tokens, output_tokens;
    char stop_reason[24]; /* "stop", "stop_string", "length", "context_full", "cancelled", "error" */
    char strategy[32], form[32], home[8], transfer[12];
    uint64_t seed, queue_usec, load_usec, first_token_usec, prefill_usec, decode_usec;
    double prefill_rate, decode_rate; /* tokens a second */
    uint64_t cache_host_bytes, cache_device_bytes, upload_bytes, download_bytes, copy_usec;
    double hidden_share;  /* of copy time behind compute; 1 when nothing was copied */
    char ladder[72];      /* what was given up for want of device memory, in words of engine_ladder_text(); none changed an answer */
    char device[128];
} EngineUsage;

typedef enum EngineEventKind {
    ENGINE_EVENT_JOB_STATE,     /* state changed, or queue position */
    ENGINE_EVENT_TEXT,          /* text: valid UTF-8 */
    ENGINE_EVENT_TOKENS,        /* raw ids, when asked for */
    ENGINE_EVENT_PROGRESS,      /* progress 0..1 of prefill or load */
    ENGINE_EVENT_FINISHED,      /* the last event of a job */
    ENGINE_EVENT_REPLY,         /* answer to engine_query(): cookie */
    ENGINE_EVENT_MODEL_STATE,   /* a model's state changed */
    ENGINE_EVENT_SESSION_CLOSED,
    ENGINE_EVENT_DEVICE_STATE,
} EngineEventKind;

typedef struct EngineEvent EngineEvent;
struct EngineEvent {
    EngineEventKind kind;
    uint64_t job, session, cookie;
    EngineJobState state;
    uint32_t queue_position;
    double progress;
    char *text;             /* owned by the event */
    size_t text_length;
    int32_t *ids;           /* owned */
    size_t n_ids;
    EngineResult result;
    ErrorDetail detail;
    EngineUsage usage;      /* FINISHED: complete; earlier events of a job: the token counts so far */
    EngineSequence *sequences; /* owned; FINISHED of a job with several: by prompt, the best first */
    size_t n_sequences;
    char model[128];
    char *json;             /* owned: REPLY payloads that are key-value facts (status, plan, bytes) */
};
/* The next event, or NULL; the caller frees it. */
EngineEvent *engine_next_event(Engine *engine);
EngineEvent *engine_event_free(EngineEvent *event);
DEFINE_CLEANUP(EngineEvent, engine_event_free)

/* ---- jobs ------------------------------------------------------------------------------------------------------------------ */

typedef struct EngineMessage {
    const char *role, *content;
} EngineMessage;

/* One generation.  Exactly one of messages, raw text, ids, prompts.  With beams, several sequences or several prompts there are no TEXT and
 * TOKENS events: FINISHED has all sequences.  Each prompt gives what it would give alone.  Sequence i of a prompt that is drawn several times
 * is what a call with seed + i draws. */
typedef struct EngineRequest {
    uint64_t owner;
    uint64_t session;        /* 0: a session of its own that ends with the job */
    const char *model;       /* when session is 0 */
    const KvPolicy *policy;  /* NULL: the model's */
    EnginePriority priority;
    const EngineMessage *messages;
    size_t n_messages;
    size_t n_shared;         /* leading messages that come again in other requests and hold no secret: run once, kept for everyone */
    const char *raw;         /* no template applied */
    const int32_t *ids;
    size_t n_ids;
    const char *const *prompts; /* n_prompts user messages, each a conversation of its own; with prompts_raw: raw texts */
    size_t n_prompts;
    bool prompts_raw;
    EngineSampling sampling; /* complete (engine_model_sampling() merged with options by the bus) */
    uint64_t deadline_usec;  /* CLOCK_MONOTONIC; 0: none */
    bool want_ids;           /* ENGINE_EVENT_TOKENS as well */
} EngineRequest;

/* All strings are copied.  The job id is valid at once; refusals that need the engine thread arrive as FINISHED. */
int engine_generate(Engine *engine, const EngineRequest *request, uint64_t *ret_job);
int engine_load(Engine *engine, uint64_t owner, const char *model, uint64_t *ret_job);
/* Teacher-forced logits of ids under a policy, written as an .npy file (float32 [n, vocab]) to @fd (taken). */
int engine_evaluate(Engine *engine, uint64_t owner, const char *model, const KvPolicy *policy, const int32_t *ids, size_t n_ids, int fd,
                    uint64_t *ret_job);
void engine_cancel(Engine *engine, uint64_t job);
/* Flow control: a paused job generates nothing until resumed (slow reader). */
void engine_pause(Engine *engine, uint64_t job, bool paused);
void engine_owner_gone(Engine *engine, uint64_t owner);

/* ---- sessions and questions: answered by ENGINE_EVENT_REPLY with the cookie ----------------------------------------------------- */

typedef enum EngineQueryKind {
    ENGINE_QUERY_OPEN_SESSION,  /* model, policy → session */
    ENGINE_QUERY_CLOSE_SESSION,
    ENGINE_QUERY_CLONE_SESSION, /* → session */
    ENGINE_QUERY_CROP_SESSION,  /* n (<= 0) → json {"length"} */
    ENGINE_QUERY_RECORD_SESSION, /* n: 1 from now on what a crop needs is kept, 0 no longer */
    ENGINE_QUERY_SAVE_SESSION,    /* fd (taken): an ordinary file, overwritten → json {"bytes"} */
    ENGINE_QUERY_RESTORE_SESSION, /* fd (taken): what was saved → json {"length", "cached-length"} */
    ENGINE_QUERY_SESSION_CACHE, /* → json of Session.Cache */
    ENGINE_QUERY_COUNT_TOKENS,  /* model or session; messages or text → json {"tokens"}; with want_ids: ids in the event */
    ENGINE_QUERY_ESTIMATE,      /* model, policy, n (a depth, or negative) → json of Model.Estimate */
    ENGINE_QUERY_UNLOAD,
    ENGINE_QUERY_STATUS,        /* → json: device, budget, bytes by purpose, counters, models, sessions, jobs */
    ENGINE_QUERY_TRACE_START,
    ENGINE_QUERY_TRACE_STOP,    /* fd (taken): the trace is written there */
} EngineQueryKind;

typedef struct EngineQuery {
    EngineQueryKind kind;
    uint64_t cookie, owner, session;
    const char *model;
    const KvPolicy *policy;
    int64_t n;
    const EngineMessage *messages;
    size_t n_messages;
    const char *text;
    bool want_ids, parse_special;
    int fd;
} EngineQuery;
/* All strings are copied.  When it fails the descriptor is still the caller's. */
int engine_query(Engine *engine, const EngineQuery *query);

/* A snapshot that the main thread may read at once (kept up to date by the engine under a lock): for bus properties. */
typedef struct EngineModelStatus {
    char name[128], path[512], digest[65], architecture[32], quantization[16], license[64], state[16] /* unloaded, loading, loaded, failed */;
    uint64_t parameters, file_bytes, device_bytes, host_bytes;
    uint32_t context;
    ErrorDetail error;
} EngineModelStatus;
typedef struct EngineDeviceStatus {
    bool open;
    GpuInfo info;
    uint64_t used_bytes[GPU_PURPOSE_X_MAX], total_used_bytes;
    uint64_t host_memory_bytes, host_used_bytes; /* of the host: what the caches of all models may have, and have */
    GpuCounters counters;
    ErrorDetail error; /* why it is not open */
} EngineDeviceStatus;
size_t engine_n_models(const Engine *engine);
bool engine_model_status(const Engine *engine, size_t index, EngineModelStatus *ret);
bool engine_model_status_by_name(const Engine *engine, const char *name, EngineModelStatus *ret);
void engine_device_status(const Engine *engine, EngineDeviceStatus *ret);
void engine_queue_status(const Engine *engine, uint32_t *ret_n_jobs, uint32_t *ret_n_queued);
