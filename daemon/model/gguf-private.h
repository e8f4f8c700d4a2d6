#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* The parsed form of a GGUF file, shared by gguf.c (opening, lookups) and gguf-parse.c. */

#include "daemon/model/gguf.h"

typedef struct GgufEntry {
    GgufString key;
    GgufType type;
    GgufType element_type; /* of an array */
    uint64_t n;            /* elements of an array; 1 otherwise */
    const uint8_t *data;   /* the value, or the first element, inside the map */
    GgufString *strings;   /* index of a string or of an array of strings; owned */
} GgufEntry;

struct Gguf {
    const uint8_t *data; /* the whole file */
    uint64_t size;
    void *map;           /* to unmap, or NULL when the bytes are borrowed */
    uint64_t header_bytes;
    GgufIdentity identity;
    GgufEntry *entries;  /* sorted by key */
    size_t n_entries;
    GgufTensor *tensors; /* in file order */
    size_t n_tensors;
    uint32_t *by_name;   /* tensor indices sorted by name */
};

/* Longest key (the specification's) and tensor name (ggml's is 64) that we accept. */
#define GGUF_KEY_MAX  65535
#define GGUF_NAME_MAX 255

/* Parses @gguf->data; GgufError or negative errno.  On error the caller frees what was allocated so far. */
int gguf_parse_bytes(Gguf *gguf, ErrorDetail *reterr);

/* Bytes of a scalar in the file; 0 for strings and arrays. */
size_t gguf_type_bytes(GgufType type);
int gguf_string_compare(GgufString a, GgufString b);
