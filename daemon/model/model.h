#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A loaded model: hyper-parameters, tokenizer, weights on the device, calibration, and the forward pass.
 *
 * ModelFile is what a worker thread prepares without touching the device (map, checks, hyper-parameters, tokenizer, digest,
 * repacked weights in host memory).  Model is made from it by the engine thread, which owns the device.
 */

#include "cache/kv-store.h"
#include "daemon/model/gguf.h"
#include "daemon/text/tokenizer.h"
#include "opencl/ops.h"

typedef enum ModelError {
    MODEL_E_OK,
    MODEL_E_NOT_FOUND,
    MODEL_E_CORRUPT,
    MODEL_E_UNSUPPORTED,
    MODEL_E_DEVICE_MEMORY, /* needed, available, what to change, in the detail */
    MODEL_E_HOST_MEMORY,
    MODEL_E_DEVICE,        /* lost or hung */
    MODEL_E_CONTEXT,       /* a pass would make a cache longer than its policy or the context allows */
} ModelError;

typedef struct ModelParams {
    char architecture[32], name[128], license[64], quantization[16];
    uint32_t n_layers, n_embd, n_ff, n_vocab, context_length;
    KvShape attention;
    float norm_eps, rope_freq_base;
    bool tied_embeddings;
    uint64_t n_parameters;
} ModelParams;

typedef struct ModelFile ModelFile;
typedef struct Model Model;

/* Any thread.  @state_dir: where digests by (device, inode, size, mtime), calibrations and bits by digest are kept; NULL: nowhere. */
int model_file_open(const char *path, const char *state_dir, ModelFile **ret, ErrorDetail *reterr);
ModelFile *model_file_free(ModelFile *file);
DEFINE_CLEANUP(ModelFile, model_file_free)
const ModelParams *model_file_params(const ModelFile *file);
const Tokenizer *model_file_tokenizer(const ModelFile *file);
const char *model_file_chat_template(const ModelFile *file); /* UTF-8 source, or NULL */
const char *model_file_digest(const ModelFile *file);        /* 64 hex digits (SHA-256 of the file) */
uint64_t model_file_bytes(const ModelFile *file);

/* How weights that do not fit come to the device. */
typedef struct ModelWeights {
    uint64_t budget_bytes; /* of the device, for weights and what they stream through; 0: all weights stay there */
    uint32_t n_slots;      /* staging buffers, 1 to 8; 0: two */
    KvTransfer transfer;   /* auto: read in place where the device does so at full speed, else copied */
    bool limit_layers;     /* at most max_layers stay on the device, whatever fits */
    uint32_t max_layers;
    bool all_layers;       /* model_fit(): refuse rather than stream */
} ModelWeights;

typedef struct ModelOptions {
    bool exact;
    uint32_t context;       /* 0: the model's */
    uint32_t max_rows;      /* prefill chunk */
    uint32_t max_sequences; /* sessions with a tail on the device at once */
    KvBudget *host_memory;  /* shared by the caches of all models; borrowed; NULL: none */
    ModelWeights weights;
} ModelOptions;

/* Bytes by purpose before loading; equal what the allocator shows after model_new() + one store. */
typedef struct ModelPlan {
    uint64_t weight_bytes, weight_staging_bytes, activation_bytes; /* of the device */
    uint64_t weight_total_bytes;
    uint64_t weight_in_place_bytes, weight_streamed_bytes;         /* of the host, read by every token */
    uint64_t weight_streamed_head_bytes;                           /* of these what a pass without logits does not read */
    uint64_t weight_slot_bytes;
    uint32_t weight_slots, n_layers, n_layers_resident;            /* slots 0: no ring */
    KvPlan kv;
    uint64_t device_total_bytes, device_budget_bytes;
    bool fits;
} ModelPlan;
int model_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy, ModelPlan *ret,
               ErrorDetail *reterr);

/* Steps of the ladder, in order; none changes a bit of an answer. */
typedef enum ModelStep {
    MODEL_STEP_ROWS = 1 << 0,    /* smaller batch */
    MODEL_STEP_STAGING = 1 << 1, /* one tile of one block for the cache's ring */
    MODEL_STEP_HOME = 1 << 2,    /* the cache's home moves to the host */
    MODEL_STEP_WEIGHTS = 1 << 3, /* weights stream */
} ModelStep;

/* How a model and a store for it fit into @available_bytes of the device: as asked for, else by the first steps of the ladder that
 * suffice.  Weights that stream get what the rest leaves; then the batch is the largest that leaves them three quarters, because each
 * batch reads them all.  MODEL_E_DEVICE_MEMORY with the numbers when nothing fits. */
typedef struct ModelFit {
    ModelOptions options;
    KvPolicy policy;
    ModelPlan plan;
    unsigned steps; /* ModelStep */
} ModelFit;
int model_fit(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *policy, uint64_t available_bytes,
              ModelFit *ret, ErrorDetail *reterr);

/* Engine thread: uploads the weights, builds the kernels.  @file is taken on success; after a failure it is the caller's, to be freed (its
 * repacked weights may be gone). */
int model_new(Gpu *gpu, ModelFile *file, const ModelOptions *options, Model **ret, ErrorDetail *reterr);
Model *model_free(Model *model);
DEFINE_CLEANUP(Model, model_free)
const ModelFile *model_file(const Model *model);
/* With every zero replaced by its meaning, and context and max_rows no more than the model has. */
const ModelOptions *model_options(const Model *model);
/* Weights, what they stream through, and activations. */
uint64_t model_device_bytes(const Model *model);
/* Between passes: buffers for fewer rows.  Answers stay the same.  -EINVAL when they are not fewer; after another error the model cannot be
 * used any more. */
int model_shrink_rows(Model *model, uint32_t max_rows, ErrorDetail *reterr);
/* Between passes: weights leave the device until they take at least @bytes less there, and stream from then on.  Answers stay the same.
 * MODEL_E_DEVICE_MEMORY when they cannot; after another error the model cannot be used any more. */
int model_stream_more(Model *model, uint64_t bytes, ErrorDetail *reterr);
/* The other way, to a budget as in ModelWeights.  MODEL_E_DEVICE_MEMORY when that is not free; after another error call model_stream_more(),
 * which makes whole again what can be. */
int model_place_weights(Model *model, uint64_t budget_bytes, ErrorDetail *reterr);
/* Where its weights are; weight fields and n_layers only. */
void model_weights_plan(const Model *model, ModelPlan *ret);

/* Engine thread, between passes: reads the stored calibration or measures it, when a store of @form wants it and there is none yet. */
int model_prepare_form(Model *model, const KvForm *form, ErrorDetail *reterr);
/* A store for caches of this model; the caller frees it before the model.  The first one whose form is `leat` reads the stored calibration
 * or measures it (a second or two), so no pass may be open.  Bits of KV_BITS_AUTO become those that were measured for this model, or are
 * measured now (nbits.h: the cost); kv_store_policy() has them.  max_cache_tokens 0 or beyond the context means the context. */
int model_store_new(Model *model, const KvPolicy *policy, KvStore **ret, ErrorDetail *reterr);

/* One sequence's part of a pass. */
typedef struct ModelItem {
    KvCache *cache;
    const int32_t *tokens; /* (n_tokens) */
    uint32_t n_tokens;
    bool all_logits;       /* logits of every row, else of the last only */
    bool more;             /* the prompt goes on in another pass (cache/kv-store.h) */
} ModelItem;

/* Runs the pass (all items' rows share it, at most max_rows: else -EINVAL), waits with a deadline, commits the caches.  @logits: float32
 * [rows with logits, n_vocab], in item order, host memory of the caller; NULL: none wanted.  Whether they are finite is the caller's to see.
 * On error the caches are as before, unless a long prefill had begun to overwrite what it needs to go on (kv_pass_abort()): ask
 * kv_cache_length(). */
int model_forward(Model *model, KvStore *store, const ModelItem *items, uint32_t n_items, float *logits, ErrorDetail *reterr);
