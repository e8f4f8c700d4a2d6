/* SPDX-License-Identifier: Apache-2.0 */
/* Memory and other things of the system that are refused; blocks that were allocated and not freed. */

#include "tests/lib/fault-internal.h"

#include <errno.h>
#include <execinfo.h>
#include <jansson.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

/* ---- blocks -------------------------------------------------------------------------------------------------------- */

#define N_FRAMES 8
enum { SLOTS = 1 << 19 }; /* a power of two, many more than blocks at a time */

typedef struct Block {
    uintptr_t address; /* 0: never used; 1: used before */
    uint64_t number;
    void *frames[N_FRAMES];
} Block;

static struct {
    pthread_mutex_t lock;
    Block slots[SLOTS];
    int64_t n_live;
    uint64_t n_ever;
} blocks = {.lock = PTHREAD_MUTEX_INITIALIZER};
static atomic_llong mapped;

static size_t slot_of(const void *memory)
{
    return ((uintptr_t)memory * UINT64_C(0x9e3779b97f4a7c15)) >> (64 - 19);
}

static void block_add(void *memory)
{
    size_t i = slot_of(memory), n = 0;

    if (!memory)
        return;
    (void)pthread_mutex_lock(&blocks.lock);
    while (blocks.slots[i].address > 1 && n++ < SLOTS)
        i = (i + 1) % SLOTS;
    blocks.slots[i] = (Block){.address = (uintptr_t)memory, .number = blocks.n_ever++};
    if (getenv("LEAT_FAULT_FRAMES"))
        (void)backtrace(blocks.slots[i].frames, N_FRAMES);
    blocks.n_live++;
    (void)pthread_mutex_unlock(&blocks.lock);
}

/* Blocks that a library has allocated are not here. */
static void block_remove(const void *memory)
{
    size_t i = slot_of(memory), n = 0;

    if (!memory)
        return;
    (void)pthread_mutex_lock(&blocks.lock);
    while (blocks.slots[i].address != 0 && blocks.slots[i].address != (uintptr_t)memory && n++ < SLOTS)
        i = (i + 1) % SLOTS;
    if (blocks.slots[i].address == (uintptr_t)memory) {
        blocks.slots[i].address = blocks.slots[(i + 1) % SLOTS].address == 0 ? 0 : 1;
        blocks.n_live--;
    }
    (void)pthread_mutex_unlock(&blocks.lock);
}

int64_t fault_live_blocks(void)
{
    return blocks.n_live;
}

int64_t fault_mapped_bytes(void)
{
    return atomic_load(&mapped);
}

uint64_t fault_n_blocks_ever(void)
{
    return blocks.n_ever;
}

void fault_print_blocks(uint64_t n_known)
{
    unsigned n_printed = 0;

    for (size_t i = 0; i < SLOTS && n_printed < 5; i++)
        if (blocks.slots[i].address > 1 && blocks.slots[i].number >= n_known) {
            (void)fprintf(stderr, "block %llu is left%s\n", (unsigned long long)blocks.slots[i].number,
                          blocks.slots[i].frames[0] ? "" : " (LEAT_FAULT_FRAMES=1 tells from where)");
            if (blocks.slots[i].frames[0])
                backtrace_symbols_fd(blocks.slots[i].frames, N_FRAMES, STDERR_FILENO);
            n_printed++;
        }
}

/* ---- memory -------------------------------------------------------------------------------------------------------- */

#define REFUSED(name) (fault_enter_allocation(name) && (errno = ENOMEM))

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *memory, size_t size);
void __real_free(void *memory);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *memory, size_t size);
void *__wrap_reallocarray(void *memory, size_t n, size_t size);
void __wrap_free(void *memory);

void *__wrap_malloc(size_t size)
{
    void *memory = REFUSED("malloc") ? NULL : __real_malloc(size);

    block_add(memory);
    return memory;
}

void *__wrap_calloc(size_t n, size_t size)
{
    void *memory = REFUSED("calloc") ? NULL : __real_calloc(n, size);

    block_add(memory);
    return memory;
}

static void *resize(void *memory, size_t size, const char *name)
{
    void *now;

    if (REFUSED(name))
        return NULL;
    block_remove(memory);
    now = __real_realloc(memory, size);
    block_add(now ? now : size ? memory : NULL);
    return now;
}

void *__wrap_realloc(void *memory, size_t size)
{
    return resize(memory, size, "realloc");
}

void *__wrap_reallocarray(void *memory, size_t n, size_t size)
{
    size_t bytes;

    if (__builtin_mul_overflow(n, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return resize(memory, bytes, "reallocarray");
}

void __wrap_free(void *memory)
{
    int error = errno;

    block_remove(memory);
    __real_free(memory);
    errno = error;
}

/* ---- strings ------------------------------------------------------------------------------------------------------- */

char *__real_strdup(const char *text);
char *__real_strndup(const char *text, size_t n);
int __real_vasprintf(char **ret, const char *format, va_list arguments);
char *__wrap_strdup(const char *text);
char *__wrap_strndup(const char *text, size_t n);
int __wrap_asprintf(char **ret, const char *format, ...) __attribute__((__format__(__printf__, 2, 3)));
int __wrap_vasprintf(char **ret, const char *format, va_list arguments) __attribute__((__format__(__printf__, 2, 0)));

char *__wrap_strdup(const char *text)
{
    char *copy = REFUSED("strdup") ? NULL : __real_strdup(text);

    block_add(copy);
    return copy;
}

char *__wrap_strndup(const char *text, size_t n)
{
    char *copy = REFUSED("strndup") ? NULL : __real_strndup(text, n);

    block_add(copy);
    return copy;
}

int __wrap_vasprintf(char **ret, const char *format, va_list arguments)
{
    int n = REFUSED("vasprintf") ? -1 : __real_vasprintf(ret, format, arguments);

    if (n >= 0)
        block_add(*ret);
    return n;
}

int __wrap_asprintf(char **ret, const char *format, ...)
{
    va_list arguments;
    int n;

    va_start(arguments, format);
    n = __wrap_vasprintf(ret, format, arguments);
    va_end(arguments);
    return n;
}

/* ---- of the system ------------------------------------------------------------------------------------------------- */

static size_t whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);

    return (bytes + page - 1) / page * page;
}

void *__real_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_munmap(void *address, size_t bytes);
void *__real_mremap(void *address, size_t bytes, size_t new_bytes, int flags);
void *__wrap_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset);
int __wrap_munmap(void *address, size_t bytes);
void *__wrap_mremap(void *address, size_t bytes, size_t new_bytes, int flags);

void *__wrap_mmap(void *address, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    void *memory = REFUSED("mmap") ? MAP_FAILED : __real_mmap(address, bytes, protection, flags, fd, offset);

    if (memory != MAP_FAILED && !(flags & MAP_FIXED)) /* which stands where something stood */
        atomic_fetch_add(&mapped, (long long)whole_pages(bytes));
    return memory;
}

int __wrap_munmap(void *address, size_t bytes)
{
    int r = __real_munmap(address, bytes);

    if (r == 0)
        atomic_fetch_sub(&mapped, (long long)whole_pages(bytes));
    return r;
}

void *__wrap_mremap(void *address, size_t bytes, size_t new_bytes, int flags)
{
    void *memory = REFUSED("mremap") ? MAP_FAILED : __real_mremap(address, bytes, new_bytes, flags);

    if (memory != MAP_FAILED) /* moved to a fixed place it takes that of what stood there */
        atomic_fetch_add(&mapped, (flags & MREMAP_FIXED ? 0 : (long long)whole_pages(new_bytes)) - (long long)whole_pages(bytes));
    return memory;
}

#define WRAP(type, failed, name, parameters, arguments)                                                                                 \
    type __real_##name parameters;                                                                                                      \
    type __wrap_##name parameters;                                                                                                      \
    type __wrap_##name parameters                                                                                                       \
    {                                                                                                                                   \
        return REFUSED(#name) ? (failed) : __real_##name arguments;                                                                     \
    }

WRAP(FILE *, NULL, fopen, (const char *path, const char *mode), (path, mode))
WRAP(FILE *, NULL, fdopen, (int fd, const char *mode), (fd, mode))
WRAP(FILE *, NULL, open_memstream, (char **ret, size_t *ret_size), (ret, ret_size))
WRAP(ssize_t, -1, getdelim, (char **line, size_t *size, int end, FILE *file), (line, size, end, file))
WRAP(int, -1, memfd_create, (const char *name, unsigned flags), (name, flags))
WRAP(int, -1, eventfd, (unsigned value, int flags), (value, flags))
WRAP(int, ENOMEM, pthread_create, (pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *data),
     (thread, attributes, run, data))
WRAP(EVP_MD_CTX *, NULL, EVP_MD_CTX_new, (void), ())
WRAP(XXH3_state_t *, NULL, XXH3_createState, (void), ())
WRAP(json_t *, NULL, json_object, (void), ())
WRAP(json_t *, NULL, json_array, (void), ())
WRAP(json_t *, NULL, json_string, (const char *text), (text))
WRAP(json_t *, NULL, json_integer, (json_int_t value), (value))
WRAP(json_t *, NULL, json_real, (double value), (value))
WRAP(char *, NULL, json_dumps, (const json_t *json, size_t flags), (json, flags))
