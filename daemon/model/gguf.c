/* SPDX-License-Identifier: Apache-2.0 */
/* Opening of GGUF files and lookups in them; parsing is in gguf-parse.c. */

#include "daemon/model/gguf-private.h"

#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* ---- opening -------------------------------------------------------------------------------------------------------------- */

/* "No such file" about a long path helps little: finds the first part of it that fails, and says how. */
static int explain_open_failure(const char *path, int failure, ErrorDetail *reterr)
{
    char part[PATH_MAX];
    struct stat st;

    if (strlen(path) < sizeof(part)) {
        for (const char *end = path; *end; end++) {
            if (end == path || (end[1] && end[1] != '/'))
                continue;
            memcpy(part, path, (size_t)(end - path) + 1);
            part[end - path + 1] = 0;
            if (stat(part, &st) < 0)
                return error_detail_set(reterr, GGUF_E_NOT_FOUND, "cannot open '%.200s': '%.200s': %s", path, part,
                                        strerror(errno));
            if (end[1] && !S_ISDIR(st.st_mode))
                return error_detail_set(reterr, GGUF_E_NOT_FOUND, "cannot open '%.200s': '%.200s' is not a directory", path, part);
        }
    }
    return error_detail_set(reterr, GGUF_E_NOT_FOUND, "cannot open '%.400s': %s", path, strerror(failure));
}

static int check_regular(const char *path, const struct stat *st, ErrorDetail *reterr)
{
    const char *what = S_ISDIR(st->st_mode)    ? "a directory"
                       : S_ISFIFO(st->st_mode) ? "a pipe"
                       : S_ISSOCK(st->st_mode) ? "a socket"
                                               : "a device";

    if (S_ISREG(st->st_mode))
        return 0;
    return error_detail_set(reterr, GGUF_E_NOT_FOUND, "'%.400s' is %s, not a model file", path, what);
}

static size_t header_pages(const Gguf *gguf)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return (gguf->header_bytes + page - 1) / page * page;
}

/* Puts a private copy of the header's pages at their place in the map: whoever shortens or rewrites the file later cannot
 * make reading its keys and token tables raise SIGBUS.  (Tensor data is read once, by the loader.) */
static int detach_header(Gguf *gguf)
{
    size_t bytes = header_pages(gguf);
    void *copy = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (copy == MAP_FAILED)
        return error_origin(-errno);
    memcpy(copy, gguf->data, MIN((uint64_t)bytes, gguf->size));
    if (mprotect(copy, bytes, PROT_READ) < 0 ||
        mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, gguf->map) == MAP_FAILED) {
        int failure = -errno;

        (void)munmap(copy, bytes);
        return error_origin(failure);
    }
    return 0;
}

int gguf_parse(const void *data, uint64_t size, Gguf **ret, ErrorDetail *reterr)
{
    _cleanup_(gguf_freep) Gguf *gguf = calloc(1, sizeof(*gguf));
    int r;

    if (!gguf)
        return error_origin(-ENOMEM);
    gguf->data = data;
    gguf->size = size;
    r = gguf_parse_bytes(gguf, reterr);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(gguf);
    return 0;
}

static int open_map(const char *path, void **ret_map, GgufIdentity *ret_identity, ErrorDetail *reterr)
{
    /* O_NONBLOCK: opening a pipe that nobody writes to must not wait. */
    _cleanup_(close_fdp) int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    int r;

    if (fd < 0)
        return explain_open_failure(path, errno, reterr);
    if (fstat(fd, &st) < 0)
        return error_origin(-errno);
    r = check_regular(path, &st, reterr);
    if (r)
        return r;
    if (st.st_size == 0)
        return error_detail_set(reterr, GGUF_E_CORRUPT, "the file is empty");
    *ret_map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (*ret_map == MAP_FAILED)
        return error_detail_set(reterr, error_origin(-errno), "cannot map the file: %s", strerror(errno));
    *ret_identity = (GgufIdentity){
        .device = st.st_dev,
        .inode = st.st_ino,
        .bytes = (uint64_t)st.st_size,
        .modified_nsec = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec,
    };
    return 0;
}

int gguf_open(const char *path, Gguf **ret, ErrorDetail *reterr)
{
    _cleanup_(gguf_freep) Gguf *gguf = NULL;
    GgufIdentity identity = {0};
    void *map = NULL;
    int r;

    r = open_map(path, &map, &identity, reterr);
    if (r)
        return error_trace(r);
    r = gguf_parse(map, identity.bytes, &gguf, reterr);
    if (r) {
        (void)munmap(map, identity.bytes);
        return error_trace(r);
    }
    gguf->map = map;
    gguf->identity = identity;
    r = detach_header(gguf);
    if (r)
        return error_trace(r);
    *ret = TAKE_PTR(gguf);
    return 0;
}

Gguf *gguf_free(Gguf *gguf)
{
    if (!gguf)
        return NULL;
    for (size_t i = 0; i < gguf->n_entries; i++)
        free(gguf->entries[i].strings);
    free(gguf->entries);
    free(gguf->tensors);
    free(gguf->by_name);
    if (gguf->map)
        (void)munmap(gguf->map, gguf->size);
    free(gguf);
    return NULL;
}

uint64_t gguf_file_bytes(const Gguf *gguf)
{
    return gguf->size;
}

const void *gguf_file_data(const Gguf *gguf)
{
    return gguf->data;
}

bool gguf_identity(const Gguf *gguf, GgufIdentity *ret)
{
    if (!gguf->map)
        return false;
    *ret = gguf->identity;
    return true;
}

void gguf_release_data(const Gguf *gguf)
{
    size_t start = header_pages(gguf);

    if (gguf->map && start < gguf->size)
        (void)madvise((char *)gguf->map + start, gguf->size - start, MADV_DONTNEED);
}

/* ---- lookups -------------------------------------------------------------------------------------------------------------- */

static int compare_key(const void *key, const void *entry)
{
    return gguf_string_compare(*(const GgufString *)key, ((const GgufEntry *)entry)->key);
}

static const GgufEntry *find_entry(const Gguf *gguf, const char *key)
{
    GgufString wanted = {key, strlen(key)};

    if (gguf->n_entries == 0)
        return NULL;
    return bsearch(&wanted, gguf->entries, gguf->n_entries, sizeof(*gguf->entries), compare_key);
}

/* The entry when it is one scalar or string, not an array. */
static const GgufEntry *find_single(const Gguf *gguf, const char *key)
{
    const GgufEntry *entry = find_entry(gguf, key);

    return entry && entry->type != GGUF_TYPE_ARRAY ? entry : NULL;
}

static const GgufEntry *find_array(const Gguf *gguf, const char *key)
{
    const GgufEntry *entry = find_entry(gguf, key);

    return entry && entry->type == GGUF_TYPE_ARRAY ? entry : NULL;
}

#define READ_AS(Type, at)                                                                                    \
    ({                                                                                                       \
        Type _value;                                                                                         \
        memcpy(&_value, (at), sizeof(_value));                                                               \
        _value;                                                                                              \
    })

/* An integer of any width, as magnitude and sign; false for another type. */
static bool read_integer(GgufType type, const uint8_t *at, bool *ret_negative, uint64_t *ret)
{
    int64_t value = 0;

    *ret_negative = false;
    switch (type) {
    case GGUF_TYPE_U8:
        *ret = READ_AS(uint8_t, at);
        return true;
    case GGUF_TYPE_U16:
        *ret = READ_AS(uint16_t, at);
        return true;
    case GGUF_TYPE_U32:
        *ret = READ_AS(uint32_t, at);
        return true;
    case GGUF_TYPE_U64:
        *ret = READ_AS(uint64_t, at);
        return true;
    case GGUF_TYPE_I8:
        value = READ_AS(int8_t, at);
        break;
    case GGUF_TYPE_I16:
        value = READ_AS(int16_t, at);
        break;
    case GGUF_TYPE_I32:
        value = READ_AS(int32_t, at);
        break;
    case GGUF_TYPE_I64:
        value = READ_AS(int64_t, at);
        break;
    case GGUF_TYPE_F32:
    case GGUF_TYPE_F64:
    case GGUF_TYPE_BOOL:
    case GGUF_TYPE_STRING:
    case GGUF_TYPE_ARRAY:
    case GGUF_TYPE_X_MAX:
        return false;
    }
    *ret_negative = value < 0;
    *ret = value < 0 ? -(uint64_t)value : (uint64_t)value;
    return true;
}

static bool read_number(GgufType type, const uint8_t *at, double *ret)
{
    uint64_t magnitude;
    bool negative;

    if (type == GGUF_TYPE_F32)
        *ret = (double)READ_AS(float, at);
    else if (type == GGUF_TYPE_F64)
        *ret = READ_AS(double, at);
    else if (read_integer(type, at, &negative, &magnitude))
        *ret = negative ? -(double)magnitude : (double)magnitude;
    else
        return false;
    return true;
}

bool gguf_has(const Gguf *gguf, const char *key)
{
    return find_entry(gguf, key) != NULL;
}

bool gguf_get_u64(const Gguf *gguf, const char *key, uint64_t *ret)
{
    const GgufEntry *entry = find_single(gguf, key);
    uint64_t value;
    bool negative;

    if (!entry || !read_integer(entry->type, entry->data, &negative, &value) || negative)
        return false;
    *ret = value;
    return true;
}

bool gguf_get_double(const Gguf *gguf, const char *key, double *ret)
{
    const GgufEntry *entry = find_single(gguf, key);

    if (!entry || (entry->type != GGUF_TYPE_F32 && entry->type != GGUF_TYPE_F64))
        return false;
    return read_number(entry->type, entry->data, ret);
}

bool gguf_get_bool(const Gguf *gguf, const char *key, bool *ret)
{
    const GgufEntry *entry = find_single(gguf, key);

    if (!entry || entry->type != GGUF_TYPE_BOOL || entry->data[0] > 1)
        return false;
    *ret = entry->data[0];
    return true;
}

bool gguf_get_string(const Gguf *gguf, const char *key, GgufString *ret)
{
    const GgufEntry *entry = find_single(gguf, key);

    if (!entry || entry->type != GGUF_TYPE_STRING)
        return false;
    *ret = entry->strings[0];
    return true;
}

bool gguf_get_array(const Gguf *gguf, const char *key, GgufType *ret_type, uint64_t *ret_n)
{
    const GgufEntry *entry = find_array(gguf, key);

    if (!entry)
        return false;
    *ret_type = entry->element_type;
    *ret_n = entry->n;
    return true;
}

const GgufString *gguf_array_strings(const Gguf *gguf, const char *key, uint64_t *ret_n)
{
    const GgufEntry *entry = find_array(gguf, key);

    if (!entry || entry->element_type != GGUF_TYPE_STRING)
        return NULL;
    *ret_n = entry->n;
    return entry->strings;
}

bool gguf_array_string(const Gguf *gguf, const char *key, uint64_t index, GgufString *ret)
{
    uint64_t n = 0;
    const GgufString *strings = gguf_array_strings(gguf, key, &n);

    if (!strings || index >= n)
        return false;
    *ret = strings[index];
    return true;
}

bool gguf_array_number(const Gguf *gguf, const char *key, uint64_t index, double *ret)
{
    const GgufEntry *entry = find_array(gguf, key);

    if (!entry || index >= entry->n)
        return false;
    return read_number(entry->element_type, entry->data + index * gguf_type_bytes(entry->element_type), ret);
}

size_t gguf_n_tensors(const Gguf *gguf)
{
    return gguf->n_tensors;
}

const GgufTensor *gguf_tensor_at(const Gguf *gguf, size_t index)
{
    return index < gguf->n_tensors ? &gguf->tensors[index] : NULL;
}

const GgufTensor *gguf_tensor(const Gguf *gguf, const char *name)
{
    GgufString wanted = {name, strlen(name)};
    size_t low = 0, high = gguf->n_tensors;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const GgufTensor *tensor = &gguf->tensors[gguf->by_name[middle]];
        int order = gguf_string_compare(wanted, tensor->name);

        if (order == 0)
            return tensor;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}
