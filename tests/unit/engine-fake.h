#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for model/, cache/, opencl/ and the tokenizer below the engine, so that its threads, queues and every fault can be tested in
 * milliseconds and without a device.  Included once by a test program: these definitions come before the library's, whose files are
 * then not linked.
 *
 * The model "speaks" a hash of its whole history: token t + 1 is a function of all ids that the cache was really given, so a wrong crop,
 * a lost token or another session's cache changes the text.  Ids 0..255 are bytes, 256 ends a turn.
 */

#include "cache/kv-file.h"
#include "cache/kv-migrate.h"
#include "daemon/engine/engine.h"
#include "daemon/model/nbits.h"
#include "daemon/model/speed.h"
#include "daemon/text/chat-template.h"
#include "tests/lib/engine-talk.h"

#include <pthread.h>
#include <time.h>

#define FAKE_VOCAB   260
#define FAKE_EOG     256
#define FAKE_CONTEXT 4096
#define FAKE_PASSES  65536

typedef struct FakePass {
    uint32_t n_items, n_rows;
    int32_t first_ids[8]; /* the first id that each item's cache holds: tells whose it is */
} FakePass;

/* What the test sets and reads; under the lock. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool no_device, lose, hang;     /* of the next open, the next pass */
    uint32_t eog_at;                /* length at which the model ends its turn; 0: never */
    int32_t nan_for;                /* histories that begin with this id give NaN; 0: none */
    uint64_t pass_usec, open_usec;  /* how long a pass and opening a file take */
    uint64_t room_tokens;           /* what all caches together may hold; 0: any number */
    uint64_t budget;                /* of the device */
    uint64_t device_tokens;         /* what caches at home there may hold; 0: any number.  Each halving of the batch gives 10 more, */
    uint32_t n_streams;             /* and each eighth of the weights that streams 100, so many times */
    bool can_stream;                /* a model may load with half of its weights on the device */
    uint32_t n_moves;               /* of stores */
    bool hold;                      /* passes wait */
    uint32_t n_bits_steps;          /* passes that measuring automatic bits takes */
    int bits_error;                 /* how the last of them ends */
    bool packed;                    /* crop goes back to checkpoints only */
    uint32_t n_opens, n_files, n_models, n_stores, n_caches, n_passes, n_forked, n_nbits, n_rows; /* n_rows: run, not refused */
    FakePass passes[FAKE_PASSES];
} fake = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void fake_reset(void)
{
    pthread_mutex_lock(&fake.lock);
    fake.no_device = fake.lose = fake.hang = fake.hold = fake.packed = false;
    fake.eog_at = 0;
    fake.nan_for = 0;
    fake.pass_usec = fake.open_usec = fake.room_tokens = 0;
    fake.budget = 1000;
    fake.device_tokens = 0;
    fake.n_streams = 0;
    fake.n_bits_steps = 0;
    fake.bits_error = 0;
    fake.can_stream = false;
    fake.n_moves = 0;
    fake.n_opens = fake.n_passes = fake.n_forked = fake.n_rows = 0;
    pthread_mutex_unlock(&fake.lock);
}

#define FAKE_SET(member, value)                                                                                                        \
    do {                                                                                                                               \
        pthread_mutex_lock(&fake.lock);                                                                                                \
        fake.member = (value);                                                                                                         \
        pthread_cond_broadcast(&fake.changed);                                                                                         \
        pthread_mutex_unlock(&fake.lock);                                                                                              \
    } while (0)
#define FAKE_GET(member)                                                                                                               \
    ({                                                                                                                                 \
        pthread_mutex_lock(&fake.lock);                                                                                                \
        __auto_type _value = fake.member;                                                                                              \
        pthread_mutex_unlock(&fake.lock);                                                                                              \
        _value;                                                                                                                        \
    })

/* ---- opencl/ ------------------------------------------------------------------------------------------------------------------ */

struct Gpu {
    GpuInfo info;
    bool lost, hung;
    uint64_t used;
    bool overlap;
};

int gpu_open(const GpuOptions *options, Gpu **ret, ErrorDetail *reterr)
{
    Gpu *gpu;

    (void)options;
    pthread_mutex_lock(&fake.lock);
    fake.n_opens++;
    pthread_mutex_unlock(&fake.lock);
    if (FAKE_GET(no_device))
        return error_detail_set(reterr, GPU_E_NO_PLATFORM, "no OpenCL platform: install pocl-opencl-icd");
    gpu = calloc(1, sizeof(*gpu));
    assert_non_null(gpu);
    gpu->info.budget_bytes = FAKE_GET(budget);
    (void)snprintf(gpu->info.name, sizeof(gpu->info.name), "Fake");
    *ret = gpu;
    return 0;
}

Gpu *gpu_free(Gpu *gpu)
{
    if (gpu)
        assert_true(gpu->lost || gpu->used == 0); /* everything on it was freed before */
    free(gpu);
    return NULL;
}

const GpuInfo *gpu_info(const Gpu *gpu)
{
    return &gpu->info;
}

bool gpu_is_lost(const Gpu *gpu)
{
    return gpu->lost;
}

void gpu_explain(const Gpu *gpu, ErrorDetail *reterr)
{
    if (gpu->lost && !reterr->text[0])
        (void)error_detail_set(reterr, -ENODEV, "played: lost");
}

bool gpu_is_hung(const Gpu *gpu)
{
    return gpu->hung;
}

const char *gpu_purpose_to_string(GpuPurpose purpose)
{
    static const char *const names[] = {"weights", "activations", "staging", "tail", "pages", "other"};

    return names[purpose];
}

const char *gpu_device_type_to_string(GpuDeviceType type)
{
    (void)type;
    return "gpu";
}

void gpu_memory_used(const Gpu *gpu, uint64_t ret_bytes[GPU_PURPOSE_X_MAX], uint64_t *ret_total)
{
    memset(ret_bytes, 0, GPU_PURPOSE_X_MAX * sizeof(*ret_bytes));
    ret_bytes[GPU_PURPOSE_WEIGHTS] = *ret_total = gpu->used;
}

void gpu_counters(const Gpu *gpu, GpuCounters *ret)
{
    (void)gpu;
    *ret = (GpuCounters){0};
}

/* The budget is too small for the planner's measuring, which would need these. */
int gpu_step_begin(Gpu *gpu)
{
    (void)gpu;
    fail_msg("not played");
    return -ENOTSUP;
}

int gpu_buffer_new(Gpu *gpu, GpuPurpose purpose, uint64_t bytes, GpuBuffer **ret, ErrorDetail *reterr)
{
    (void)gpu, (void)purpose, (void)bytes, (void)ret, (void)reterr;
    fail_msg("not played");
    return -ENOTSUP;
}

GpuBuffer *gpu_buffer_free(GpuBuffer *buffer)
{
    return buffer;
}

int gpu_upload(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t offset, const void *from, uint64_t bytes, GpuWait wait,
               const char *label, GpuEvent **ret_event)
{
    (void)gpu, (void)queue, (void)to, (void)offset, (void)from, (void)bytes, (void)wait, (void)label, (void)ret_event;
    fail_msg("not played");
    return -ENOTSUP;
}

int gpu_copy(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t to_offset, const GpuBuffer *from, uint64_t from_offset, uint64_t bytes,
             GpuWait wait, const char *label, GpuEvent **ret_event)
{
    (void)gpu, (void)queue, (void)to, (void)to_offset, (void)from, (void)from_offset, (void)bytes, (void)wait, (void)label;
    (void)ret_event;
    fail_msg("not played");
    return -ENOTSUP;
}

int gpu_flush(Gpu *gpu, GpuQueue queue)
{
    (void)gpu, (void)queue;
    fail_msg("not played");
    return -ENOTSUP;
}

GpuEvent *gpu_event_unref(GpuEvent *event)
{
    return event;
}

int gpu_event_wait(Gpu *gpu, GpuEvent *event, uint64_t timeout_usec, ErrorDetail *reterr)
{
    (void)gpu, (void)event, (void)timeout_usec, (void)reterr;
    fail_msg("not played");
    return -ENOTSUP;
}

int gpu_trace_start(Gpu *gpu)
{
    (void)gpu;
    return 0;
}

int gpu_trace_stop(Gpu *gpu, int fd)
{
    (void)gpu;
    return write(fd, "{}", 2) == 2 ? 0 : -errno;
}

int gpu_overlap_begin(Gpu *gpu)
{
    assert_false(gpu->overlap);
    gpu->overlap = true;
    return 0;
}

int gpu_overlap_end(Gpu *gpu, GpuOverlap *ret)
{
    assert_true(gpu->overlap);
    gpu->overlap = false;
    *ret = (GpuOverlap){.kernel_usec = 10, .upload_usec = 4, .overlap_usec = 3};
    return 0;
}

/* ---- text/ -------------------------------------------------------------------------------------------------------------------- */

int token_list_append(TokenList *list, const int32_t *ids, size_t n)
{
    if (list->n + n > list->capacity) {
        int32_t *grown = realloc(list->ids, (list->n + n) * 2 * sizeof(*grown));

        assert_non_null(grown);
        list->ids = grown;
        list->capacity = (list->n + n) * 2;
    }
    if (n > 0)
        memcpy(list->ids + list->n, ids, n * sizeof(*ids));
    list->n += n;
    return 0;
}

void token_list_clear(TokenList *list)
{
    free(list->ids);
    *list = TOKEN_LIST_NULL;
}

int tokenizer_encode(const Tokenizer *tokenizer, const char *text, size_t length, bool parse_special, TokenList *list)
{
    (void)tokenizer;
    (void)parse_special;
    for (size_t i = 0; i < length; i++)
        (void)token_list_append(list, &(int32_t){(unsigned char)text[i]}, 1);
    return 0;
}

const char *tokenizer_token_bytes(const Tokenizer *tokenizer, int32_t id, bool special, size_t *ret_length)
{
    static const char bytes[] = "abcdefghijklmnopqrstuvwxyz";

    (void)tokenizer;
    (void)special;
    *ret_length = id >= 'a' && id <= 'z';
    return id >= 'a' && id <= 'z' ? &bytes[id - 'a'] : "";
}

uint32_t tokenizer_n_vocab(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return FAKE_VOCAB;
}

int32_t tokenizer_bos(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return -1;
}

bool tokenizer_add_bos(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return false;
}

bool tokenizer_is_eog(const Tokenizer *tokenizer, int32_t id)
{
    (void)tokenizer;
    return id == FAKE_EOG;
}

const char *tokenizer_bos_text(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return "";
}

const char *tokenizer_eos_text(const Tokenizer *tokenizer)
{
    (void)tokenizer;
    return "";
}

int chat_template_new(const char *source, ChatTemplate **ret, ErrorDetail *reterr)
{
    if (strcmp(source, "broken") == 0)
        return error_detail_set(reterr, CHAT_TEMPLATE_E_SYNTAX, "line 1: broken");
    *ret = malloc(1);
    return *ret ? 0 : -ENOMEM;
}

ChatTemplate *chat_template_free(ChatTemplate *template_)
{
    free(template_);
    return NULL;
}

/* "[role:content]" for each message. */
int chat_template_render(const ChatTemplate *template_, const ChatMessage *messages, size_t n_messages, bool add_generation_prompt,
                         const char *bos_token, const char *eos_token, ChatPieces *ret, ErrorDetail *reterr)
{
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);

    (void)template_, (void)add_generation_prompt, (void)bos_token, (void)eos_token, (void)reterr;
    assert_non_null(f);
    for (size_t i = 0; i < n_messages; i++)
        (void)fprintf(f, "[%s:%s]", messages[i].role, messages[i].content);
    (void)fclose(f);
    ret->pieces = calloc(1, sizeof(*ret->pieces));
    assert_non_null(ret->pieces);
    ret->pieces[0] = (ChatPiece){text, n, true};
    ret->n = ret->capacity = 1;
    return 0;
}

void chat_pieces_clear(ChatPieces *pieces)
{
    for (size_t i = 0; i < pieces->n; i++)
        free(pieces->pieces[i].text);
    free(pieces->pieces);
    *pieces = CHAT_PIECES_NULL;
}

int chat_pieces_encode(const ChatPieces *pieces, const Tokenizer *tokenizer, TokenList *list)
{
    for (size_t i = 0; i < pieces->n; i++)
        (void)tokenizer_encode(tokenizer, pieces->pieces[i].text, pieces->pieces[i].length, true, list);
    return 0;
}

/* ---- model/ ------------------------------------------------------------------------------------------------------------------- */

struct ModelFile {
    ModelParams params;
    uint64_t bytes; /* on the device */
    bool no_template, used, other, has_bits;
};

struct Model {
    Gpu *gpu;
    ModelFile *file;
    ModelOptions options;
};

struct KvStore {
    Model *model;
    KvPolicy policy;
    uint32_t n_caches;
};

struct KvCache {
    KvStore *store;
    int32_t ids[FAKE_CONTEXT];
    uint32_t n, checkpoints[64], n_checkpoints;
    bool recording;
};

/* Every cache that there is, for the sum of their tokens. */
static KvCache *fake_caches[256];

/* The path says what happens: missing, corrupt, unsupported, or the device bytes as a number at its end. */
int model_file_open(const char *path, const char *state_dir, ModelFile **ret, ErrorDetail *reterr)
{
    ModelFile *file;

    (void)state_dir;
    talk_sleep(FAKE_GET(open_usec));
    if (strstr(path, "missing"))
        return error_detail_set(reterr, MODEL_E_NOT_FOUND, "'%s' does not exist", path);
    if (strstr(path, "corrupt"))
        return error_detail_set(reterr, MODEL_E_CORRUPT, "'%s' is cut", path);
    if (strstr(path, "unsupported"))
        return error_detail_set(reterr, MODEL_E_UNSUPPORTED, "architecture 'x' is not known");
    file = calloc(1, sizeof(*file));
    assert_non_null(file);
    file->params.n_vocab = FAKE_VOCAB;
    file->params.context_length = FAKE_CONTEXT;
    file->bytes = strpbrk(path, "0123456789") ? strtoull(strpbrk(path, "0123456789"), NULL, 10) : 100;
    file->other = strstr(path, "other") != NULL;
    file->no_template = strstr(path, "plain") != NULL;
    pthread_mutex_lock(&fake.lock);
    fake.n_files++;
    pthread_mutex_unlock(&fake.lock);
    *ret = file;
    return 0;
}

ModelFile *model_file_free(ModelFile *file)
{
    if (file) {
        pthread_mutex_lock(&fake.lock);
        fake.n_files--;
        pthread_mutex_unlock(&fake.lock);
    }
    free(file);
    return NULL;
}

const ModelParams *model_file_params(const ModelFile *file)
{
    return &file->params;
}

const Tokenizer *model_file_tokenizer(const ModelFile *file)
{
    return (const Tokenizer *)(const void *)file;
}

const char *model_file_chat_template(const ModelFile *file)
{
    return file->no_template ? NULL : "template";
}

const char *model_file_digest(const ModelFile *file)
{
    return file->other ? "d1ce000000000000000000000000000000000000000000000000000000000001"
                           : "d1ce000000000000000000000000000000000000000000000000000000000000";
}

uint64_t model_file_bytes(const ModelFile *file)
{
    return file->bytes;
}

static uint64_t fake_weight_bytes(const ModelFile *file, const ModelOptions *options)
{
    return options->weights.budget_bytes ? options->weights.budget_bytes : file->bytes;
}

static uint64_t fake_model_bytes(const ModelFile *file, const ModelOptions *options)
{
    return fake_weight_bytes(file, options) + options->max_rows / 32;
}

int model_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy, ModelPlan *ret,
               ErrorDetail *reterr)
{
    (void)policy, (void)reterr;
    *ret = (ModelPlan){.weight_bytes = fake_weight_bytes(file, options),
                       .activation_bytes = options->max_rows / 32,
                       .device_total_bytes = fake_model_bytes(file, options),
                       .device_budget_bytes = info->budget_bytes};
    ret->fits = ret->device_total_bytes <= ret->device_budget_bytes;
    return 0;
}

int model_fit(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy, uint64_t available_bytes,
              ModelFit *ret, ErrorDetail *reterr)
{
    ModelFit fit = {.options = *options, .policy = *policy};

    for (; fit.options.max_rows >= 32; fit.options.max_rows /= 2) {
        (void)model_plan(info, file, &fit.options, policy, &fit.plan, NULL);
        fit.steps = fit.options.max_rows < options->max_rows ? MODEL_STEP_ROWS : 0;
        if (fit.plan.device_total_bytes <= available_bytes) {
            *ret = fit;
            return 0;
        }
    }
    fit.options.max_rows = 32;
    fit.options.weights.budget_bytes = file->bytes / 2;
    (void)model_plan(info, file, &fit.options, policy, &fit.plan, NULL);
    fit.steps = MODEL_STEP_ROWS | MODEL_STEP_WEIGHTS;
    if (!FAKE_GET(can_stream) || fit.plan.device_total_bytes > available_bytes)
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "model needs %llu, %llu are free", (unsigned long long)file->bytes,
                                (unsigned long long)available_bytes);
    *ret = fit;
    return 0;
}

int model_new(Gpu *gpu, ModelFile *file, const ModelOptions *options, Model **ret, ErrorDetail *reterr)
{
    uint64_t bytes = fake_model_bytes(file, options);
    Model *model;

    assert_false(file->used);
    file->used = true;
    if (gpu->used + bytes > gpu->info.budget_bytes)
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "needs %llu", (unsigned long long)bytes);
    model = calloc(1, sizeof(*model));
    assert_non_null(model);
    *model = (Model){gpu, file, *options};
    gpu->used += bytes;
    pthread_mutex_lock(&fake.lock);
    fake.n_models++;
    pthread_mutex_unlock(&fake.lock);
    *ret = model;
    return 0;
}

int model_prepare_form(Model *model, const KvForm *form, ErrorDetail *reterr)
{
    (void)model, (void)form, (void)reterr;
    return 0;
}

/* Automatic bits: K 3, V 2 once they were measured. */
int model_nbits_table(const ModelFile *file, bool exact, const KvPolicy *policy, NbitsTable *ret, ErrorDetail *reterr)
{
    (void)exact, (void)policy, (void)reterr;
    *ret = (NbitsTable){.n = 1, .entries = {{.k_bits = 3, .v_bits = 2, .state = file->has_bits ? NBITS_MEASURED : NBITS_OPEN, .kld = 0.001}}};
    return 0;
}

KvPolicy model_nbits_resolve(const ModelFile *file, bool exact, const KvPolicy *policy, bool *ret_known)
{
    KvPolicy resolved = *policy;

    (void)exact;
    *ret_known = !kv_form_is_auto(policy->form) || file->has_bits;
    if (kv_form_is_auto(policy->form))
        resolved.form = file->has_bits ? kv_form_leat(3, 2) : kv_form_default(KV_FORM_LEAT);
    return resolved;
}

struct Nbits {
    Model *model;
    uint32_t n_left;
};

int nbits_new(Model *model, const KvPolicy *policy, Nbits **ret, ErrorDetail *reterr)
{
    Nbits *nbits = calloc(1, sizeof(*nbits));

    (void)policy, (void)reterr;
    assert_non_null(nbits);
    *nbits = (Nbits){model, FAKE_GET(n_bits_steps)};
    FAKE_SET(n_nbits, fake.n_nbits + 1);
    *ret = nbits;
    return 0;
}

Nbits *nbits_free(Nbits *nbits)
{
    if (nbits)
        FAKE_SET(n_nbits, fake.n_nbits - 1);
    free(nbits);
    return NULL;
}

int nbits_step(Nbits *nbits, bool *ret_done, ErrorDetail *reterr)
{
    talk_sleep(FAKE_GET(pass_usec));
    *ret_done = nbits->n_left == 0;
    if (nbits->n_left-- > 0)
        return 0;
    if (FAKE_GET(bits_error)) {
        nbits->model->gpu->lost = FAKE_GET(bits_error) == MODEL_E_DEVICE;
        return error_detail_set(reterr, FAKE_GET(bits_error), "bits cannot be measured");
    }
    nbits->model->file->has_bits = true;
    return 0;
}

int model_speed(Gpu *gpu, const ModelFile *file, const ModelFit *fit, bool may_measure, ModelSpeed *ret, ErrorDetail *reterr)
{
    (void)gpu, (void)file, (void)fit, (void)reterr;
    *ret = (ModelSpeed){.layer_sec = 0.001};
    return may_measure ? 0 : -ENOENT;
}

void model_predict(const ModelSpeed *speed, const ModelFit *fit, uint32_t depth, ModelPrediction *ret)
{
    (void)fit;
    *ret = (ModelPrediction){.token_sec = speed->layer_sec * (1 + depth), .prefill_rate = 5};
}

KvRates model_speed_rates(const ModelSpeed *speed, const ModelFit *fit)
{
    (void)speed, (void)fit;
    return (KvRates){0, 0, 0};
}

Model *model_free(Model *model)
{
    if (!model)
        return NULL;
    model->gpu->used -= fake_model_bytes(model->file, &model->options);
    pthread_mutex_lock(&fake.lock);
    fake.n_models--;
    pthread_mutex_unlock(&fake.lock);
    model_file_free(model->file);
    free(model);
    return NULL;
}

const ModelFile *model_file(const Model *model)
{
    return model->file;
}

const ModelOptions *model_options(const Model *model)
{
    return &model->options;
}

uint64_t model_device_bytes(const Model *model)
{
    return fake_weight_bytes(model->file, &model->options);
}

void model_weights_plan(const Model *model, ModelPlan *ret)
{
    *ret = (ModelPlan){.weight_bytes = fake_weight_bytes(model->file, &model->options)};
}

int model_shrink_rows(Model *model, uint32_t max_rows, ErrorDetail *reterr)
{
    (void)reterr;
    if (!FAKE_GET(device_tokens) || max_rows >= model->options.max_rows)
        return MODEL_E_DEVICE_MEMORY;
    model->gpu->used -= model->options.max_rows / 32;
    model->options.max_rows = max_rows;
    model->gpu->used += model->options.max_rows / 32;
    FAKE_SET(device_tokens, fake.device_tokens + 10);
    return 0;
}

int model_stream_more(Model *model, uint64_t bytes, ErrorDetail *reterr)
{
    (void)model, (void)bytes, (void)reterr;
    if (!FAKE_GET(n_streams))
        return MODEL_E_DEVICE_MEMORY;
    FAKE_SET(n_streams, fake.n_streams - 1);
    FAKE_SET(device_tokens, fake.device_tokens + 100);
    return 0;
}

int model_store_new(Model *model, const KvPolicy *policy, KvStore **ret, ErrorDetail *reterr)
{
    KvStore *store = calloc(1, sizeof(*store));

    (void)reterr;
    assert_non_null(store);
    *store = (KvStore){.model = model, .policy = *policy};
    if (kv_form_is_auto(policy->form))
        store->policy.form = kv_form_leat(3, 2);
    pthread_mutex_lock(&fake.lock);
    fake.n_stores++;
    pthread_mutex_unlock(&fake.lock);
    *ret = store;
    return 0;
}

KvStore *kv_store_free(KvStore *store)
{
    if (!store)
        return NULL;
    assert_int_equal(store->n_caches, 0);
    pthread_mutex_lock(&fake.lock);
    fake.n_stores--;
    pthread_mutex_unlock(&fake.lock);
    free(store);
    return NULL;
}

const KvPolicy *kv_store_policy(const KvStore *store)
{
    return &store->policy;
}

int model_place_weights(Model *model, uint64_t budget_bytes, ErrorDetail *reterr)
{
    (void)model, (void)budget_bytes, (void)reterr;
    return 0;
}

int kv_store_migrate(KvStore *from, KvStore *to, bool lossy, ErrorDetail *reterr)
{
    (void)reterr;
    assert_false(lossy);
    pthread_mutex_lock(&fake.lock);
    for (size_t i = 0; i < N_ELEMENTS(fake_caches); i++)
        if (fake_caches[i] && fake_caches[i]->store == from) {
            fake_caches[i]->store = to;
            from->n_caches--;
            to->n_caches++;
        }
    fake.n_moves++;
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

int kv_cache_new(KvStore *store, KvCache **ret, ErrorDetail *reterr)
{
    KvCache *cache = calloc(1, sizeof(*cache));
    size_t i = 0;

    (void)reterr;
    assert_non_null(cache);
    cache->store = store;
    store->n_caches++;
    pthread_mutex_lock(&fake.lock);
    fake.n_caches++;
    while (i < N_ELEMENTS(fake_caches) && fake_caches[i])
        i++;
    assert_true(i < N_ELEMENTS(fake_caches));
    fake_caches[i] = cache;
    pthread_mutex_unlock(&fake.lock);
    *ret = cache;
    return 0;
}

KvCache *kv_cache_free(KvCache *cache)
{
    if (!cache)
        return NULL;
    cache->store->n_caches--;
    pthread_mutex_lock(&fake.lock);
    fake.n_caches--;
    for (size_t i = 0; i < N_ELEMENTS(fake_caches); i++)
        if (fake_caches[i] == cache)
            fake_caches[i] = NULL;
    pthread_mutex_unlock(&fake.lock);
    free(cache);
    return NULL;
}

int kv_cache_fork(KvCache *cache, KvCache **ret, ErrorDetail *reterr)
{
    int r = kv_cache_new(cache->store, ret, reterr);

    if (r)
        return r;
    memcpy((*ret)->ids, cache->ids, sizeof(cache->ids));
    memcpy((*ret)->checkpoints, cache->checkpoints, sizeof(cache->checkpoints));
    (*ret)->n = cache->n;
    (*ret)->n_checkpoints = cache->n_checkpoints;
    pthread_mutex_lock(&fake.lock);
    fake.n_forked++;
    pthread_mutex_unlock(&fake.lock);
    return 0;
}

uint32_t kv_cache_length(const KvCache *cache)
{
    return cache->n;
}

bool kv_cache_is_as_cold(const KvCache *cache)
{
    return cache != NULL;
}

int kv_cache_crop(KvCache *cache, uint32_t n_keep, uint32_t *ret_length, ErrorDetail *reterr)
{
    uint32_t best = 0;

    (void)reterr;
    assert_true(n_keep <= cache->n);
    if (FAKE_GET(packed) && n_keep + 32 < cache->n) {
        for (uint32_t i = 0; i < cache->n_checkpoints; i++)
            if (cache->checkpoints[i] <= n_keep && cache->checkpoints[i] > best)
                best = cache->checkpoints[i];
        n_keep = best;
    }
    while (cache->n_checkpoints > 0 && cache->checkpoints[cache->n_checkpoints - 1] > n_keep)
        cache->n_checkpoints--;
    cache->n = *ret_length = n_keep;
    return 0;
}

int kv_cache_record(KvCache *cache, bool on)
{
    cache->recording = on;
    return 0;
}

int kv_cache_clear(KvCache *cache)
{
    cache->n = cache->n_checkpoints = 0;
    return 0;
}

void kv_cache_set_more(KvCache *cache, bool more)
{
    (void)cache, (void)more;
}

int kv_cache_checkpoint(KvCache *cache)
{
    if (cache->n_checkpoints < N_ELEMENTS(cache->checkpoints))
        cache->checkpoints[cache->n_checkpoints++] = cache->n;
    return 0;
}

void kv_cache_bytes(const KvCache *cache, KvBytes *ret)
{
    *ret = (KvBytes){.host = cache->n, .device = 1, .length = cache->n};
}

/* ---- cache/kv-file.h: the container is the real one ------------------------------------------------------------------------------- */

struct KvSave {
    KvImage *image;
    int32_t ids[FAKE_CONTEXT];
    uint8_t extra[4 * FAKE_CONTEXT];
};

uint64_t kv_store_layout(const KvStore *store)
{
    return 1000 + store->policy.form.k_bits;
}

int kv_save_begin(KvCache *cache, const uint8_t model[static KV_IMAGE_DIGEST], const void *extra, size_t n_extra, KvSave **ret,
                  ErrorDetail *reterr)
{
    KvImageFacts facts = {.layout = cache ? kv_store_layout(cache->store) : 0, .n_tokens = cache ? cache->n : 0};
    KvSave *save = calloc(1, sizeof(*save));

    (void)reterr;
    assert_non_null(save);
    assert_true(n_extra <= sizeof(save->extra));
    memcpy(facts.model, model, sizeof(facts.model));
    memcpy(save->extra, extra, n_extra);
    save->image = kv_image_new(&facts);
    assert_int_equal(kv_image_chunk(save->image, 1, 0, 0), 0);
    if (cache) {
        memcpy(save->ids, cache->ids, sizeof(save->ids));
        assert_int_equal(kv_image_piece(save->image, save->ids, cache->n * sizeof(int32_t)), 0);
    }
    assert_int_equal(kv_image_chunk(save->image, 2, 0, 0), 0);
    assert_int_equal(kv_image_piece(save->image, save->extra, n_extra), 0);
    *ret = save;
    return 0;
}

uint64_t kv_save_bytes(const KvSave *save)
{
    return kv_image_bytes(save->image);
}

int kv_save_write(const KvSave *save, int fd)
{
    return kv_image_write(save->image, fd);
}

KvSave *kv_save_end(KvSave *save)
{
    if (save)
        kv_image_free(save->image);
    free(save);
    return NULL;
}

int kv_restore(KvStore *store, const KvImage *image, KvCache **ret, ErrorDetail *reterr)
{
    const KvImageChunk *chunk = kv_image_find(image, 1, 0, 0);
    int r = kv_cache_new(store, ret, reterr);

    if (r)
        return r;
    memcpy((*ret)->ids, chunk->data, chunk->bytes);
    (*ret)->n = image->facts.n_tokens;
    return 0;
}

const void *kv_image_extra(const KvImage *image, size_t *ret_n)
{
    const KvImageChunk *chunk = kv_image_find(image, 2, 0, 0);

    *ret_n = chunk->bytes;
    return chunk->data;
}

/* What the model says after a history. */
static int32_t fake_next(const int32_t *ids, uint32_t n, uint32_t eog_at)
{
    uint32_t hash = 2166136261u;

    if (eog_at && n >= eog_at)
        return FAKE_EOG;
    for (uint32_t i = 0; i < n; i++)
        hash = (hash ^ (uint32_t)ids[i]) * 16777619u;
    return 'a' + (int32_t)((hash >> 8) % 26);
}

static void fake_logits(const KvCache *cache, uint32_t n, float *row)
{
    for (int i = 0; i < FAKE_VOCAB; i++)
        row[i] = (float)i / FAKE_VOCAB;
    row[fake_next(cache->ids, n, FAKE_GET(eog_at))] = 10;
    if (FAKE_GET(nan_for) && cache->ids[0] == FAKE_GET(nan_for))
        row[3] = __builtin_nanf("");
}

/* Waits while passes are held, notes the pass; MODEL_E_… when a fault was asked for. */
static int fake_begin_pass(Model *model, const ModelItem *items, uint32_t n_items, ErrorDetail *reterr)
{
    uint64_t tokens = 0, on_device = 0;
    FakePass *pass;

    pthread_mutex_lock(&fake.lock);
    while (fake.hold)
        pthread_cond_wait(&fake.changed, &fake.lock);
    for (size_t i = 0; i < N_ELEMENTS(fake_caches); i++) {
        tokens += fake_caches[i] ? fake_caches[i]->n : 0;
        on_device += fake_caches[i] && fake_caches[i]->store->policy.home == KV_HOME_DEVICE ? fake_caches[i]->n : 0;
    }
    assert_true(fake.n_passes < FAKE_PASSES);
    pass = &fake.passes[fake.n_passes++];
    *pass = (FakePass){.n_items = n_items};
    for (uint32_t i = 0; i < n_items; i++) {
        tokens += items[i].n_tokens;
        on_device += items[i].cache->store->policy.home == KV_HOME_DEVICE ? items[i].n_tokens : 0;
        pass->n_rows += items[i].n_tokens;
        if (i < N_ELEMENTS(pass->first_ids))
            pass->first_ids[i] = items[i].cache->n > 0 ? items[i].cache->ids[0] : items[i].tokens[0];
    }
    assert_true(pass->n_rows <= model->options.max_rows);
    assert_true(n_items <= model->options.max_sequences);
    pthread_cond_broadcast(&fake.changed);
    pthread_mutex_unlock(&fake.lock);
    talk_sleep(FAKE_GET(pass_usec));
    if (FAKE_GET(lose) || FAKE_GET(hang)) {
        model->gpu->hung = FAKE_GET(hang);
        model->gpu->lost = true;
        FAKE_SET(lose, false);
        FAKE_SET(hang, false);
        return error_detail_set(reterr, MODEL_E_DEVICE, "'Fake' is gone");
    }
    if (FAKE_GET(room_tokens) && tokens > FAKE_GET(room_tokens))
        return error_detail_set(reterr, MODEL_E_HOST_MEMORY, "%llu tokens do not fit", (unsigned long long)tokens);
    if (FAKE_GET(device_tokens) && on_device > FAKE_GET(device_tokens))
        return error_detail_set(reterr, MODEL_E_DEVICE_MEMORY, "%llu tokens do not fit on the device", (unsigned long long)on_device);
    return 0;
}

int model_forward(Model *model, KvStore *store, const ModelItem *items, uint32_t n_items, float *logits, ErrorDetail *reterr)
{
    int r = fake_begin_pass(model, items, n_items, reterr);

    if (r)
        return r;
    for (uint32_t i = 0; i < n_items; i++) {
        KvCache *cache = items[i].cache;

        assert_ptr_equal(cache->store, store);
        assert_true(cache->n + items[i].n_tokens <= FAKE_CONTEXT);
        pthread_mutex_lock(&fake.lock);
        memcpy(cache->ids + cache->n, items[i].tokens, items[i].n_tokens * sizeof(int32_t));
        cache->n += items[i].n_tokens;
        fake.n_rows += items[i].n_tokens;
        pthread_mutex_unlock(&fake.lock);
        for (uint32_t t = items[i].all_logits ? 0 : items[i].n_tokens - 1; logits && t < items[i].n_tokens; t++) {
            fake_logits(cache, cache->n - items[i].n_tokens + t + 1, logits);
            logits += FAKE_VOCAB;
        }
    }
    return 0;
}

/* ---- an engine on it ---------------------------------------------------------------------------------------------------------- */

static EngineModel fake_model(const char *name, const char *path)
{
    return (EngineModel){
        .name = name,
        .path = path,
        .policy = {.strategy = KV_STRATEGY_OFFLOADED_QUANTIZED,
                   .home = KV_HOME_HOST,
                   .form = kv_form_default(KV_FORM_LEAT),
                   .transfer = KV_TRANSFER_COPY,
                   .n_slots = 2},
        .parallel = 4,
        .keep_alive_usec = UINT64_MAX,
    };
}

static Talk *talk_start(const EngineModel *models, size_t n_models, uint32_t max_queue)
{
    EngineOptions options = {.models = models, .n_models = n_models, .max_queue = max_queue, .watchdog_usec = 1000000};

    return talk_new(&options);
}

/* Ends the engine; nothing may be left of what it made. */
static void talk_stop(Talk *talk)
{
    talk_free(talk);
    assert_int_equal(FAKE_GET(n_files), 0);
    assert_int_equal(FAKE_GET(n_models), 0);
    assert_int_equal(FAKE_GET(n_stores), 0);
    assert_int_equal(FAKE_GET(n_caches), 0);
    assert_int_equal(FAKE_GET(n_nbits), 0);
}

/* What the model says to @prompt, computed here. */
static const char *expected_text(const char *prompt, uint32_t n_tokens, char *text)
{
    int32_t ids[FAKE_CONTEXT + 1];
    uint32_t n = (uint32_t)strlen(prompt);

    for (uint32_t i = 0; i < n; i++)
        ids[i] = (unsigned char)prompt[i];
    for (uint32_t i = 0; i < n_tokens; i++) {
        ids[n] = fake_next(ids, n, 0);
        text[i] = (char)ids[n++];
    }
    text[n_tokens] = 0;
    return text;
}

#define assert_speaks(seen, prompt, n) assert_string_equal((seen)->text, expected_text((prompt), (n), (char[8192]){0}))
