/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parsing of GGUF v2 and v3 through a bounded cursor.  Nothing in the file is believed: a count or a length is first compared with
 * the bytes that remain, tables grow with what was really read, and every tensor must lie inside the file, alone.
 */

#include "daemon/model/gguf-private.h"
#include "quant/base/checked.h"

#include <assert.h>
#include <string.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "GGUF values are read in place, little-endian");

/* Tensor data must be readable as the blocks' own 16-bit fields; more than a large page is a hostile number. */
#define ALIGNMENT_DEFAULT 32
#define ALIGNMENT_MIN     8
#define ALIGNMENT_MAX     65536
/* The smallest key-value pair and tensor description: what a count in the header can at most stand for. */
#define ENTRY_BYTES_MIN   (8 + 1 + 4 + 1)
#define TENSOR_BYTES_MIN  (8 + 1 + 4 + 8 + 4 + 8)

typedef struct Cursor {
    const uint8_t *data;
    uint64_t size, position;
} Cursor;

static uint64_t cursor_left(const Cursor *cursor)
{
    return cursor->size - cursor->position;
}

/* Borrows the next @n bytes; NULL when the file ends before. */
static const uint8_t *cursor_take(Cursor *cursor, uint64_t n)
{
    const uint8_t *at = cursor->data + cursor->position;

    if (n > cursor_left(cursor))
        return NULL;
    cursor->position += n;
    return at;
}

static bool cursor_u32(Cursor *cursor, uint32_t *ret)
{
    const uint8_t *at = cursor_take(cursor, sizeof(*ret));

    if (at)
        memcpy(ret, at, sizeof(*ret));
    return at;
}

static bool cursor_u64(Cursor *cursor, uint64_t *ret)
{
    const uint8_t *at = cursor_take(cursor, sizeof(*ret));

    if (at)
        memcpy(ret, at, sizeof(*ret));
    return at;
}

static bool cursor_string(Cursor *cursor, GgufString *ret)
{
    uint64_t length;
    const uint8_t *at;

    if (!cursor_u64(cursor, &length))
        return false;
    at = cursor_take(cursor, length);
    if (!at)
        return false;
    *ret = (GgufString){(const char *)at, length};
    return true;
}

size_t gguf_type_bytes(GgufType type)
{
    switch (type) {
    case GGUF_TYPE_U8:
    case GGUF_TYPE_I8:
    case GGUF_TYPE_BOOL:
        return 1;
    case GGUF_TYPE_U16:
    case GGUF_TYPE_I16:
        return 2;
    case GGUF_TYPE_U32:
    case GGUF_TYPE_I32:
    case GGUF_TYPE_F32:
        return 4;
    case GGUF_TYPE_U64:
    case GGUF_TYPE_I64:
    case GGUF_TYPE_F64:
        return 8;
    case GGUF_TYPE_STRING:
    case GGUF_TYPE_ARRAY:
    case GGUF_TYPE_X_MAX:
        return 0;
    }
    return 0;
}

int gguf_string_compare(GgufString a, GgufString b)
{
    int order = memcmp(a.data, b.data, MIN(a.length, b.length));

    return order ? order : (a.length > b.length) - (a.length < b.length);
}

GgufPrintable gguf_printable(GgufString string)
{
    GgufPrintable printable = {{0}};
    size_t n = MIN(string.length, (size_t)64);

    for (size_t i = 0; i < n; i++)
        printable.text[i] = string.data[i] >= 0x20 && string.data[i] < 0x7f ? string.data[i] : '?';
    if (string.length > n)
        memcpy(printable.text + n, "...", 4);
    return printable;
}

static int gguf_cut(const Gguf *gguf, ErrorDetail *reterr, const char *what, GgufString name)
{
    return error_detail_set(reterr, GGUF_E_CORRUPT, "the file is cut or damaged: it ends (at %llu bytes) inside %s '%s'",
                            (unsigned long long)gguf->size, what, gguf_printable(name).text);
}

static const GgufString GGUF_STRING_HEADER = {"header", 6};

/* ---- what it is instead ------------------------------------------------------------------------------------------------ */

static bool begins_with(const Gguf *gguf, uint64_t at, const char *text)
{
    size_t n = strlen(text);

    return at <= gguf->size && gguf->size - at >= n && strncasecmp((const char *)gguf->data + at, text, n) == 0;
}

/* People give us downloads that failed, pointers instead of files, and other formats: say which. */
static int gguf_wrong_magic(const Gguf *gguf, ErrorDetail *reterr)
{
    static const struct {
        const char *magic, *text;
    } others[] = {
        {"PK\x03\x04", "a zip archive (a PyTorch checkpoint or a package), not a GGUF file: convert or unpack it"},
        {"version https://git-lfs", "a Git LFS pointer, not the model itself: run `git lfs pull` where it came from"},
        {"ggjt", "an old GGML file (ggjt), not GGUF: convert it again with a current converter"},
        {"tjgg", "an old GGML file (ggjt), not GGUF: convert it again with a current converter"},
        {"fmgg", "an old GGML file (ggmf), not GGUF: convert it again with a current converter"},
        {"lmgg", "an old GGML file (ggml), not GGUF: convert it again with a current converter"},
        {"\x1f\x8b", "a gzip archive, not a GGUF file: unpack it"},
        {"\x28\xb5\x2f\xfd", "a zstd archive, not a GGUF file: unpack it"},
        {"FUGG", "a big-endian GGUF file: convert it again as little-endian"},
    };
    uint64_t at = begins_with(gguf, 0, "\xef\xbb\xbf") ? 3 : 0;

    for (size_t i = 0; i < N_ELEMENTS(others); i++)
        if (begins_with(gguf, 0, others[i].magic))
            return error_detail_set(reterr, GGUF_E_CORRUPT, "this is %s", others[i].text);
    while (at < gguf->size && at < 256 && strchr(" \t\r\n", gguf->data[at]) && gguf->data[at])
        at++;
    if (begins_with(gguf, at, "<!doctype") || begins_with(gguf, at, "<html") || begins_with(gguf, at, "<head") ||
        begins_with(gguf, at, "<?xml") || begins_with(gguf, at, "<!--"))
        return error_detail_set(reterr, GGUF_E_CORRUPT,
                                "this is an HTML page, not a GGUF file: the download saved an error or a login page");
    if (begins_with(gguf, 8, "{\""))
        return error_detail_set(reterr, GGUF_E_CORRUPT, "this is a safetensors file, not GGUF: convert it first");
    if (at < gguf->size && gguf->data[at] == '{')
        return error_detail_set(reterr, GGUF_E_CORRUPT, "this is JSON text, not a GGUF file");
    return error_detail_set(reterr, GGUF_E_CORRUPT, "not a GGUF file: it does not begin with 'GGUF'");
}

/* ---- key-value pairs ---------------------------------------------------------------------------------------------------- */

/* Makes room for one more element, doubling: what is allocated follows what was read, not what the header claims. */
static int grow(void *table, size_t n, size_t element)
{
    void **base = table;
    void *bigger;
    uint64_t bytes;

    if (n & (n - 1) || n == 1)
        return 0;
    if (!checked_mul(n ? 2 * (uint64_t)n : 2, element, &bytes))
        return error_origin(-ENOMEM);
    bigger = realloc(*base, bytes);
    if (!bigger)
        return error_origin(-ENOMEM);
    *base = bigger;
    return 0;
}

static int parse_string_array(Gguf *gguf, Cursor *cursor, GgufEntry *entry, ErrorDetail *reterr)
{
    if (entry->n > cursor_left(cursor) / 8)
        return error_detail_set(reterr, GGUF_E_CORRUPT, "key '%s' claims %llu strings, more than the file can hold",
                                gguf_printable(entry->key).text, (unsigned long long)entry->n);
    entry->strings = malloc(MAX(entry->n, (uint64_t)1) * sizeof(*entry->strings));
    if (!entry->strings)
        return error_origin(-ENOMEM);
    for (uint64_t i = 0; i < entry->n; i++)
        if (!cursor_string(cursor, &entry->strings[i]))
            return gguf_cut(gguf, reterr, "string array of key", entry->key);
    return 0;
}

static int parse_array(Gguf *gguf, Cursor *cursor, GgufEntry *entry, ErrorDetail *reterr)
{
    uint32_t element_type;
    uint64_t bytes;
    size_t size;

    if (!cursor_u32(cursor, &element_type) || !cursor_u64(cursor, &entry->n))
        return gguf_cut(gguf, reterr, "array of key", entry->key);
    if (element_type == GGUF_TYPE_ARRAY)
        return error_detail_set(reterr, GGUF_E_UNSUPPORTED, "key '%s' is an array of arrays",
                                gguf_printable(entry->key).text);
    if (element_type >= GGUF_TYPE_X_MAX)
        return error_detail_set(reterr, GGUF_E_CORRUPT, "key '%s': elements of unknown type %u",
                                gguf_printable(entry->key).text, element_type);
    entry->element_type = (GgufType)element_type;
    entry->data = cursor->data + cursor->position;
    if (entry->element_type == GGUF_TYPE_STRING)
        return parse_string_array(gguf, cursor, entry, reterr);
    size = gguf_type_bytes(entry->element_type);
    if (!checked_mul(entry->n, size, &bytes) || !cursor_take(cursor, bytes))
        return error_detail_set(reterr, GGUF_E_CORRUPT, "key '%s' claims %llu elements, more than the file can hold",
                                gguf_printable(entry->key).text, (unsigned long long)entry->n);
    return 0;
}

static int parse_value(Gguf *gguf, Cursor *cursor, GgufEntry *entry, ErrorDetail *reterr)
{
    if (entry->type == GGUF_TYPE_ARRAY)
        return parse_array(gguf, cursor, entry, reterr);
    entry->n = 1;
    entry->data = cursor->data + cursor->position;
    if (entry->type == GGUF_TYPE_STRING) {
        entry->strings = malloc(sizeof(*entry->strings));
        if (!entry->strings)
            return error_origin(-ENOMEM);
        return cursor_string(cursor, entry->strings) ? 0 : gguf_cut(gguf, reterr, "string of key", entry->key);
    }
    if (!cursor_take(cursor, gguf_type_bytes(entry->type)))
        return gguf_cut(gguf, reterr, "value of key", entry->key);
    return 0;
}

static int parse_entry(Gguf *gguf, Cursor *cursor, ErrorDetail *reterr)
{
    GgufEntry *entry;
    uint32_t type;
    int r;

    r = grow(&gguf->entries, gguf->n_entries, sizeof(*gguf->entries));
    if (r)
        return r;
    entry = &gguf->entries[gguf->n_entries];
    *entry = (GgufEntry){.key = GGUF_STRING_HEADER};
    if (!cursor_string(cursor, &entry->key))
        return gguf_cut(gguf, reterr, "a key of the", GGUF_STRING_HEADER);
    if (entry->key.length == 0 || entry->key.length > GGUF_KEY_MAX)
        return error_detail_set(reterr, GGUF_E_CORRUPT, "key number %zu has a length of %zu bytes", gguf->n_entries,
                                entry->key.length);
    if (!cursor_u32(cursor, &type))
        return gguf_cut(gguf, reterr, "type of key", entry->key);
    if (type >= GGUF_TYPE_X_MAX)
        return error_detail_set(reterr, GGUF_E_CORRUPT, "key '%s' has unknown type %u", gguf_printable(entry->key).text,
                                type);
    entry->type = (GgufType)type;
    gguf->n_entries++; /* from here on gguf_free() frees its index */
    return parse_value(gguf, cursor, entry, reterr);
}

static int compare_entries(const void *a, const void *b)
{
    return gguf_string_compare(((const GgufEntry *)a)->key, ((const GgufEntry *)b)->key);
}

static int parse_entries(Gguf *gguf, Cursor *cursor, uint64_t n_entries, ErrorDetail *reterr)
{
    int r;

    if (n_entries > cursor_left(cursor) / ENTRY_BYTES_MIN)
        return error_detail_set(reterr, GGUF_E_CORRUPT,
                                "the file is cut or damaged: the header claims %llu keys, more than its %llu bytes can hold",
                                (unsigned long long)n_entries, (unsigned long long)gguf->size);
    for (uint64_t i = 0; i < n_entries; i++) {
        r = parse_entry(gguf, cursor, reterr);
        if (r)
            return error_trace(r);
    }
    if (gguf->n_entries > 1)
        qsort(gguf->entries, gguf->n_entries, sizeof(*gguf->entries), compare_entries);
    for (size_t i = 1; i < gguf->n_entries; i++)
        if (gguf_string_compare(gguf->entries[i - 1].key, gguf->entries[i].key) == 0)
            return error_detail_set(reterr, GGUF_E_CORRUPT, "key '%s' appears twice",
                                    gguf_printable(gguf->entries[i].key).text);
    return 0;
}

/* ---- tensors ------------------------------------------------------------------------------------------------------------- */

/* Shape and type of one tensor, and its bytes; the offset is left in @ret_offset. */
static int parse_tensor(Gguf *gguf, Cursor *cursor, GgufTensor *tensor, uint64_t *ret_offset, ErrorDetail *reterr)
{
    uint64_t rows = 1, row_bytes, elements = 1;
    uint32_t type;
    const char *name;

    *tensor = (GgufTensor){.name = GGUF_STRING_HEADER, .dims = {1, 1, 1, 1}};
    if (!cursor_string(cursor, &tensor->name))
        return gguf_cut(gguf, reterr, "a tensor name of the", GGUF_STRING_HEADER);
    if (tensor->name.length == 0 || tensor->name.length > GGUF_NAME_MAX)
        return error_detail_set(reterr, GGUF_E_CORRUPT, "tensor number %zu has a name of %zu bytes", gguf->n_tensors,
                                tensor->name.length);
    GgufPrintable printable = gguf_printable(tensor->name);
    if (!cursor_u32(cursor, &tensor->n_dims))
        return gguf_cut(gguf, reterr, "tensor", tensor->name);
    if (tensor->n_dims < 1 || tensor->n_dims > N_ELEMENTS(tensor->dims))
        return error_detail_set(reterr, GGUF_E_CORRUPT, "tensor '%s' has %u dimensions, not 1 to 4", printable.text,
                                tensor->n_dims);
    for (uint32_t i = 0; i < tensor->n_dims; i++) {
        if (!cursor_u64(cursor, &tensor->dims[i]))
            return gguf_cut(gguf, reterr, "tensor", tensor->name);
        if (tensor->dims[i] == 0 || !checked_mul(elements, tensor->dims[i], &elements) || elements > INT64_MAX)
            return error_detail_set(reterr, GGUF_E_CORRUPT, "tensor '%s' has impossible dimensions", printable.text);
        if (i > 0)
            rows *= tensor->dims[i]; /* a factor of elements */
    }
    if (!cursor_u32(cursor, &type) || !cursor_u64(cursor, ret_offset))
        return gguf_cut(gguf, reterr, "tensor", tensor->name);
    tensor->type = weight_type_info(type);
    name = weight_type_name(type);
    if (!tensor->type && name)
        return error_detail_set(reterr, GGUF_E_UNSUPPORTED, "tensor '%s' has type %s, which is not supported",
                                printable.text, name);
    if (!tensor->type)
        return error_detail_set(reterr, GGUF_E_UNSUPPORTED, "tensor '%s' has unknown type number %u", printable.text, type);
    if (weight_row_bytes(tensor->type, tensor->dims[0], &row_bytes) || !checked_mul(row_bytes, rows, &tensor->bytes))
        return error_detail_set(reterr, GGUF_E_CORRUPT, "tensor '%s': a row of %llu elements is no whole number of %s blocks",
                                printable.text, (unsigned long long)tensor->dims[0], tensor->type->name);
    return 0;
}

static int compare_names(const void *a, const void *b, void *userdata)
{
    const Gguf *gguf = userdata;

    return gguf_string_compare(gguf->tensors[*(const uint32_t *)a].name, gguf->tensors[*(const uint32_t *)b].name);
}

static int compare_places(const void *a, const void *b, void *userdata)
{
    const Gguf *gguf = userdata;
    uintptr_t x = (uintptr_t)gguf->tensors[*(const uint32_t *)a].data, y = (uintptr_t)gguf->tensors[*(const uint32_t *)b].data;

    return (x > y) - (x < y);
}

/* No name twice, no byte in two tensors. */
static int check_tensors(Gguf *gguf, ErrorDetail *reterr)
{
    uint32_t *order;

    gguf->by_name = order = calloc(MAX(gguf->n_tensors, (size_t)1), sizeof(*order));
    if (!order)
        return error_origin(-ENOMEM);
    for (size_t i = 0; i < gguf->n_tensors; i++)
        order[i] = (uint32_t)i;
    qsort_r(order, gguf->n_tensors, sizeof(*order), compare_places, gguf);
    for (size_t i = 1; i < gguf->n_tensors; i++) {
        const GgufTensor *before = &gguf->tensors[order[i - 1]], *after = &gguf->tensors[order[i]];

        if ((const uint8_t *)before->data + before->bytes > (const uint8_t *)after->data)
            return error_detail_set(reterr, GGUF_E_CORRUPT, "tensors '%s' and '%s' overlap",
                                    gguf_printable(before->name).text, gguf_printable(after->name).text);
    }
    qsort_r(order, gguf->n_tensors, sizeof(*order), compare_names, gguf);
    for (size_t i = 1; i < gguf->n_tensors; i++)
        if (compare_names(&order[i - 1], &order[i], gguf) == 0)
            return error_detail_set(reterr, GGUF_E_CORRUPT, "tensor '%s' appears twice",
                                    gguf_printable(gguf->tensors[order[i]].name).text);
    return 0;
}

static int data_alignment(const Gguf *gguf, uint64_t *ret, ErrorDetail *reterr)
{
    *ret = ALIGNMENT_DEFAULT;
    if (!gguf_has(gguf, "general.alignment"))
        return 0;
    if (!gguf_get_u64(gguf, "general.alignment", ret) || *ret < ALIGNMENT_MIN || *ret > ALIGNMENT_MAX || *ret & (*ret - 1))
        return error_detail_set(reterr, GGUF_E_CORRUPT, "general.alignment is no power of two from %d to %d", ALIGNMENT_MIN,
                                ALIGNMENT_MAX);
    return 0;
}

/* Turns the offsets, relative to the data section, into places inside the map. */
static int place_tensors(Gguf *gguf, const uint64_t *offsets, ErrorDetail *reterr)
{
    uint64_t alignment, start, end;
    int r;

    r = data_alignment(gguf, &alignment, reterr);
    if (r)
        return r;
    if (!checked_align(gguf->header_bytes, alignment, &start))
        return error_detail_set(reterr, GGUF_E_CORRUPT, "the tensor data would begin beyond any file");
    for (size_t i = 0; i < gguf->n_tensors; i++) {
        GgufTensor *tensor = &gguf->tensors[i];

        if (offsets[i] & (alignment - 1))
            return error_detail_set(reterr, GGUF_E_CORRUPT, "tensor '%s' is not aligned to %llu bytes",
                                    gguf_printable(tensor->name).text, (unsigned long long)alignment);
        if (!checked_add(start, offsets[i], &end) || !checked_add(end, tensor->bytes, &end) || end > gguf->size)
            return error_detail_set(reterr, GGUF_E_CORRUPT,
                                    "the file is cut or damaged: tensor '%s' (%llu bytes) ends beyond the file's %llu bytes",
                                    gguf_printable(tensor->name).text, (unsigned long long)tensor->bytes,
                                    (unsigned long long)gguf->size);
        tensor->data = gguf->data + start + offsets[i];
    }
    return check_tensors(gguf, reterr);
}

static int parse_tensors(Gguf *gguf, Cursor *cursor, uint64_t n_tensors, ErrorDetail *reterr)
{
    _cleanup_(freep) uint64_t *offsets = NULL;
    int r;

    if (n_tensors > cursor_left(cursor) / TENSOR_BYTES_MIN || n_tensors > UINT32_MAX)
        return error_detail_set(reterr, GGUF_E_CORRUPT,
                                "the file is cut or damaged: the header claims %llu tensors, more than its %llu bytes can hold",
                                (unsigned long long)n_tensors, (unsigned long long)gguf->size);
    for (uint64_t i = 0; i < n_tensors; i++) {
        r = grow(&gguf->tensors, i, sizeof(*gguf->tensors));
        if (!r)
            r = grow(&offsets, i, sizeof(*offsets));
        if (!r)
            r = parse_tensor(gguf, cursor, &gguf->tensors[i], &offsets[i], reterr);
        if (r)
            return error_trace(r);
        gguf->n_tensors++;
    }
    gguf->header_bytes = cursor->position;
    return place_tensors(gguf, offsets, reterr);
}

int gguf_parse_bytes(Gguf *gguf, ErrorDetail *reterr)
{
    Cursor cursor = {gguf->data, gguf->size, 4};
    uint64_t n_tensors, n_entries;
    uint32_t version;
    int r;

    if (gguf->size == 0)
        return error_detail_set(reterr, GGUF_E_CORRUPT, "the file is empty");
    if (gguf->size < 4 || memcmp(gguf->data, "GGUF", 4))
        return gguf_wrong_magic(gguf, reterr);
    if (!cursor_u32(&cursor, &version))
        return gguf_cut(gguf, reterr, "the", GGUF_STRING_HEADER);
    if (version != 0 && (version & 0xffff) == 0)
        return error_detail_set(reterr, GGUF_E_UNSUPPORTED, "this is a big-endian GGUF file: convert it again as little-endian");
    if (version < 2 || version > 3)
        return error_detail_set(reterr, GGUF_E_UNSUPPORTED, "GGUF version %u is not supported (2 and 3 are)", version);
    if (!cursor_u64(&cursor, &n_tensors) || !cursor_u64(&cursor, &n_entries))
        return gguf_cut(gguf, reterr, "the", GGUF_STRING_HEADER);
    r = parse_entries(gguf, &cursor, n_entries, reterr);
    if (r)
        return error_trace(r);
    return error_trace(parse_tensors(gguf, &cursor, n_tensors, reterr));
}
