#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * GGUF v2 and v3 on a read-only map.  The file is untrusted: every length, count, offset and type is checked before use, against
 * the bytes that remain; an error names the key or the tensor.
 */

#include "quant/weight.h"

#include <stdbool.h>

typedef enum GgufError {
    GGUF_E_OK,
    GGUF_E_NOT_FOUND,   /* open failed: the detail says why, naming the first path part that fails */
    GGUF_E_CORRUPT,     /* not GGUF, cut, inconsistent */
    GGUF_E_UNSUPPORTED, /* well-formed, but a version, a tensor type or a shape that we do not have, by name */
} GgufError;

typedef struct Gguf Gguf;

typedef enum GgufType {
    GGUF_TYPE_U8, GGUF_TYPE_I8, GGUF_TYPE_U16, GGUF_TYPE_I16, GGUF_TYPE_U32, GGUF_TYPE_I32, GGUF_TYPE_F32, GGUF_TYPE_BOOL,
    GGUF_TYPE_STRING, GGUF_TYPE_ARRAY, GGUF_TYPE_U64, GGUF_TYPE_I64, GGUF_TYPE_F64,
    GGUF_TYPE_X_MAX,
} GgufType;

/* Points into the map; not NUL-terminated; may hold any bytes. */
typedef struct GgufString {
    const char *data;
    size_t length;
} GgufString;

typedef struct GgufTensor {
    GgufString name;
    uint32_t n_dims;
    uint64_t dims[4]; /* fastest first, as in the file; unused 1 */
    const WeightTypeInfo *type;
    const void *data; /* inside the map */
    uint64_t bytes;
} GgufTensor;

/* Returns 0, a GgufError, or a negative errno.  A file without tensors (vocabulary only) opens; model_file_open() refuses it. */
int gguf_open(const char *path, Gguf **ret, ErrorDetail *reterr);
/* The same from @size bytes at @data, borrowed as long as the Gguf lives. */
int gguf_parse(const void *data, uint64_t size, Gguf **ret, ErrorDetail *reterr);
Gguf *gguf_free(Gguf *gguf);
DEFINE_CLEANUP(Gguf, gguf_free)
uint64_t gguf_file_bytes(const Gguf *gguf);
const void *gguf_file_data(const Gguf *gguf);
/* Which file it is, as it was when opened; no padding.  False when it was parsed from memory. */
typedef struct GgufIdentity {
    uint64_t device, inode, bytes;
    int64_t modified_nsec;
} GgufIdentity;
bool gguf_identity(const Gguf *gguf, GgufIdentity *ret);
/* The tensor data will not be read again soon: gives its pages back. */
void gguf_release_data(const Gguf *gguf);

/* Lookups by key: true when present with a fitting type (integers of any width that fit; floats f32 or f64). */
bool gguf_has(const Gguf *gguf, const char *key);
bool gguf_get_u64(const Gguf *gguf, const char *key, uint64_t *ret);
bool gguf_get_double(const Gguf *gguf, const char *key, double *ret);
bool gguf_get_bool(const Gguf *gguf, const char *key, bool *ret);
bool gguf_get_string(const Gguf *gguf, const char *key, GgufString *ret);
/* Arrays: element type and count, then elements. */
bool gguf_get_array(const Gguf *gguf, const char *key, GgufType *ret_type, uint64_t *ret_n);
/* Strings of an array are found through an index that gguf_open() built; O(1). */
bool gguf_array_string(const Gguf *gguf, const char *key, uint64_t index, GgufString *ret);
/* For hot loops: the whole index of a string array, borrowed. */
const GgufString *gguf_array_strings(const Gguf *gguf, const char *key, uint64_t *ret_n);
/* Integer or float elements converted to double; false when out of range or of another type. */
bool gguf_array_number(const Gguf *gguf, const char *key, uint64_t index, double *ret);

size_t gguf_n_tensors(const Gguf *gguf);
const GgufTensor *gguf_tensor_at(const Gguf *gguf, size_t index);
const GgufTensor *gguf_tensor(const Gguf *gguf, const char *name); /* NULL when absent */

/* A name from a file, made fit for an error text: printable ASCII, at most 64 characters. */
typedef struct GgufPrintable {
    char text[72];
} GgufPrintable;
GgufPrintable gguf_printable(GgufString string);
