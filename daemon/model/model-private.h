#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of ModelFile and Model, shared by the files of this folder. */

#include "daemon/model/digest.h"
#include "daemon/model/weights-device.h"

typedef struct NbitsKept NbitsKept;

struct ModelFile {
    Gguf *gguf;
    Tokenizer *tokenizer;
    HParams hparams;
    Weights weights;
    char *state_dir, *chat_template;
    uint8_t digest[DIGEST_BYTES];
    char digest_hex[2 * DIGEST_BYTES + 1];
    NbitsKept *nbits; /* of the recipe whose bits were measured last; NULL: none were */
};

/* Rows whose logits are computed at once: enough to read the head's weights rarely, few enough that the buffer stays small. */
#define MODEL_LOGIT_ROWS 32
/* Rows of a pass below which nothing is gained. */
#define MODEL_MIN_ROWS 32

struct Model {
    Gpu *gpu;        /* borrowed */
    ModelFile *file;
    ModelOptions options; /* complete */
    Ops *ops;
    WeightsDevice weights;
    GpuBuffer *x;       /* f32 (max_rows, n_embd): the residual stream */
    GpuBuffer *qkv;     /* f32 (max_rows, kv_row_values()) */
    GpuBuffer *attended; /* f32 (max_rows, n_heads * v_head_dim) */
    GpuBuffer *hidden;  /* f32 (max_rows, n_ff) */
    GpuBuffer *logits;  /* f32 (n_logit_rows, n_vocab) */
    GpuBuffer *input;   /* int32 (2, max_rows): token ids, then rows whose logits are wanted */
    int32_t *host_input; /* int32 (3, max_rows): the same on the host, then the ids as they are in the vocabulary */
    KvCalibration *calibration; /* (n_layers), or NULL when not calibrated yet */
    float *means;               /* what it points into */
};

/* Complete options: every zero replaced by its meaning. */
ModelOptions model_complete_options(const ModelFile *file, const ModelOptions *options);
KvModel model_kv(const ModelFile *file, const ModelOptions *options, const KvCalibration *calibration);
KvPolicy model_complete_policy(const KvPolicy *policy, const ModelOptions *options);
OpsOptions model_ops_options(const ModelFile *file, const ModelOptions *options);
/* Where the weights are, for complete options. */
int model_placement(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, Placement *ret, ErrorDetail *reterr);
void model_plan_placement(const Weights *weights, const Placement *placement, ModelPlan *plan);
/* The device's buffers of struct Model and of its products. */
int model_activation_bytes(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, uint64_t *ret);

/* Sizes of the buffers of struct Model, in bytes. */
typedef struct ModelSizes {
    uint64_t x, qkv, attended, hidden, logits, input;
    uint32_t n_logit_rows;
} ModelSizes;
ModelSizes model_sizes(const ModelFile *file, const ModelOptions *options);

/* Folds what opencl/ and cache/ return into ModelError. */
int model_fold_gpu(int r);
int model_fold_kv(int r);

/* Copies of every layer's qkv of a pass, for calibration. */
typedef struct ModelTap {
    float *qkv; /* (n_layers, n_rows, kv_row_values()), host memory */
} ModelTap;
int model_run(Model *model, KvStore *store, const ModelItem *items, uint32_t n_items, float *logits, const ModelTap *tap,
              ErrorDetail *reterr);

/* Device bytes that measuring automatic bits of @asked takes for a while, before the store is made. */
int model_nbits_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, const KvPolicy *asked, uint64_t *ret_bytes,
                     ErrorDetail *reterr);
/* Device bytes that measuring it takes for a while, before the store that wants it is made. */
int model_calibration_plan(const GpuInfo *info, const ModelFile *file, const ModelOptions *options, uint64_t *ret_bytes, ErrorDetail *reterr);
/* Counts changes of its text or recipe. */
#define MODEL_CALIBRATION_VERSION 3
/* Reads the stored calibration of the model, or measures and stores it.  ModelError or negative errno. */
int model_calibrate(Model *model, ErrorDetail *reterr);
/* The built-in text. */
extern const char model_calibration_text[];
