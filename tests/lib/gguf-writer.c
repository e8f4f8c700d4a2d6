/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF bytes for tests. */

#include "tests/lib/gguf-writer.h"

#include <string.h>

void gguf_writer_clear(GgufWriter *writer)
{
    free(writer->data);
    *writer = GGUF_WRITER_NULL;
}

void gguf_writer_bytes(GgufWriter *writer, const void *data, size_t size)
{
    if (writer->capacity - writer->size < size) {
        writer->capacity = 2 * writer->capacity + size + 256;
        writer->data = realloc(writer->data, writer->capacity);
        if (!writer->data)
            abort();
    }
    if (size)
        memcpy(writer->data + writer->size, data, size);
    writer->size += size;
}

void gguf_writer_u32(GgufWriter *writer, uint32_t value)
{
    gguf_writer_bytes(writer, &value, sizeof(value));
}

void gguf_writer_u64(GgufWriter *writer, uint64_t value)
{
    gguf_writer_bytes(writer, &value, sizeof(value));
}

void gguf_writer_string(GgufWriter *writer, const char *text)
{
    gguf_writer_u64(writer, strlen(text));
    gguf_writer_bytes(writer, text, strlen(text));
}

void gguf_writer_header(GgufWriter *writer, uint32_t version, uint64_t n_tensors, uint64_t n_keys)
{
    gguf_writer_bytes(writer, "GGUF", 4);
    gguf_writer_u32(writer, version);
    gguf_writer_u64(writer, n_tensors);
    gguf_writer_u64(writer, n_keys);
}

void gguf_writer_key(GgufWriter *writer, const char *key, uint32_t type)
{
    gguf_writer_string(writer, key);
    gguf_writer_u32(writer, type);
}

void gguf_writer_key_string(GgufWriter *writer, const char *key, const char *value)
{
    gguf_writer_key(writer, key, GGUF_TYPE_STRING);
    gguf_writer_string(writer, value);
}

void gguf_writer_key_u32(GgufWriter *writer, const char *key, uint32_t value)
{
    gguf_writer_key(writer, key, GGUF_TYPE_U32);
    gguf_writer_u32(writer, value);
}

void gguf_writer_key_f32(GgufWriter *writer, const char *key, float value)
{
    gguf_writer_key(writer, key, GGUF_TYPE_F32);
    gguf_writer_bytes(writer, &value, sizeof(value));
}

void gguf_writer_key_array(GgufWriter *writer, const char *key, uint32_t element_type, uint64_t n)
{
    gguf_writer_key(writer, key, GGUF_TYPE_ARRAY);
    gguf_writer_u32(writer, element_type);
    gguf_writer_u64(writer, n);
}

void gguf_writer_tensor(GgufWriter *writer, const char *name, uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset)
{
    gguf_writer_string(writer, name);
    gguf_writer_u32(writer, n_dims);
    for (uint32_t i = 0; i < n_dims && i < 4; i++)
        gguf_writer_u64(writer, dims[i]);
    gguf_writer_u32(writer, type);
    gguf_writer_u64(writer, offset);
}

void gguf_writer_zeros(GgufWriter *writer, size_t n)
{
    static const uint8_t zero[64];

    for (; n > sizeof(zero); n -= sizeof(zero))
        gguf_writer_bytes(writer, zero, sizeof(zero));
    gguf_writer_bytes(writer, zero, n);
}

void gguf_writer_align(GgufWriter *writer, size_t alignment)
{
    gguf_writer_zeros(writer, (alignment - writer->size % alignment) % alignment);
}

void gguf_writer_save(const GgufWriter *writer, const char *path, size_t size)
{
    _cleanup_(close_filep) FILE *file = fopen(path, "we");

    if (!file || (size && fwrite(writer->data, 1, size, file) != size) || fflush(file) != 0)
        abort();
}
