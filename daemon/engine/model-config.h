#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* Owned copies of what the main thread describes by borrowed pointers: models, sampling, messages. */

#include "daemon/engine/engine.h"
#include "daemon/text/chat-template.h"

/* NULL strings stay NULL. */
int strings_copy(const char *const *strings, size_t n, const char ***ret);
void strings_free(const char **strings, size_t n);
int sampling_copy(const EngineSampling *sampling, EngineSampling *ret);
void sampling_clear(EngineSampling *sampling);

int messages_copy(const EngineMessage *messages, size_t n, ChatMessage **ret);
ChatMessage *messages_free(ChatMessage *messages, size_t n);

int model_configs_copy(const EngineModel *models, size_t n, EngineModel **ret);
EngineModel *model_configs_free(EngineModel *models, size_t n);
/* Frees what @model owns, not itself. */
void model_config_clear(EngineModel *model);
/* Whether a model loaded by @a serves @b as well: path, compute, context, parallel, template. */
bool model_config_same_load(const EngineModel *a, const EngineModel *b);

bool policy_equal(const KvPolicy *a, const KvPolicy *b);

/* Copies a device choice; the strings of @matches go with it. */
int gpu_options_copy(const GpuOptions *options, GpuOptions *ret);
void gpu_options_clear(GpuOptions *options);
