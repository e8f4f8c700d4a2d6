#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes GGUF bytes for tests, right or deliberately wrong: nothing is checked, counts are what the caller says.  Out of memory ends
 * the test program.
 */

#include "daemon/model/gguf.h"

typedef struct GgufWriter {
    uint8_t *data; /* owned */
    size_t size, capacity;
} GgufWriter;
#define GGUF_WRITER_NULL ((GgufWriter){NULL, 0, 0})

void gguf_writer_clear(GgufWriter *writer);
static inline void gguf_writer_clearp(GgufWriter *writer)
{
    gguf_writer_clear(writer);
}

void gguf_writer_bytes(GgufWriter *writer, const void *data, size_t size);
void gguf_writer_u32(GgufWriter *writer, uint32_t value);
void gguf_writer_u64(GgufWriter *writer, uint64_t value);
void gguf_writer_string(GgufWriter *writer, const char *text);

void gguf_writer_header(GgufWriter *writer, uint32_t version, uint64_t n_tensors, uint64_t n_keys);
/* Key and type; the value follows. */
void gguf_writer_key(GgufWriter *writer, const char *key, uint32_t type);
void gguf_writer_key_string(GgufWriter *writer, const char *key, const char *value);
void gguf_writer_key_u32(GgufWriter *writer, const char *key, uint32_t value);
void gguf_writer_key_f32(GgufWriter *writer, const char *key, float value);
/* Key, array, element type and count; the elements follow. */
void gguf_writer_key_array(GgufWriter *writer, const char *key, uint32_t element_type, uint64_t n);
void gguf_writer_tensor(GgufWriter *writer, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset);
/* Zero bytes up to a multiple. */
void gguf_writer_align(GgufWriter *writer, size_t alignment);
void gguf_writer_zeros(GgufWriter *writer, size_t n);
void gguf_writer_save(const GgufWriter *writer, const char *path, size_t size);
