/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Files from elsewhere with random damage: saved sessions, GGUF models, YAML, chat templates.  None may crash the reader, make it read
 * beyond or leak; each is refused with a text or read.  Of use above all with sanitizers: `make fuzz`.
 *
 * LEAT_FUZZ_SECONDS (2) are shared by the four; LEAT_FUZZ_SEED (printed) makes the same files again.  A file that crashes the program is left in
 * LEAT_FUZZ_KEEP, when that names a folder.
 */

#include "cache/kv-image.h"
#include "daemon/config/config.h"
#include "daemon/model/model.h"
#include "daemon/text/chat-template.h"
#include "tests/lib/place.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <xxhash.h>
#include <cmocka.h>

typedef struct Bytes {
    uint8_t *at;
    size_t n, capacity;
} Bytes;

typedef struct Fuzz {
    char folder[64];
    uint64_t random, seed, n_runs, n_read;
    double seconds;
} Fuzz;

static uint64_t next(Fuzz *fuzz)
{
    uint64_t z = fuzz->random += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static Bytes bytes_of(const void *data, size_t n)
{
    Bytes bytes = {malloc(2 * n + 4096), n, 2 * n + 4096};

    assert_non_null(bytes.at);
    memcpy(bytes.at, data, n);
    return bytes;
}

static Bytes bytes_of_file(const char *path)
{
    FILE *file = fopen(path, "r");
    struct stat status;
    Bytes bytes;

    if (!file || fstat(fileno(file), &status) < 0)
        fail_msg("%s cannot be read", path);
    bytes = (Bytes){malloc((size_t)status.st_size * 2 + 4096), (size_t)status.st_size, (size_t)status.st_size * 2 + 4096};
    assert_non_null(bytes.at);
    assert_int_equal(fread(bytes.at, 1, bytes.n, file), bytes.n);
    (void)fclose(file);
    return bytes;
}

/* ---- damage ------------------------------------------------------------------------------------------------------------------- */

/* Numbers that lengths and offsets stumble over. */
static void put_number(Fuzz *fuzz, Bytes *bytes, size_t at)
{
    static const uint64_t numbers[] = {0, 1, 0x7f, 0xff, 0x7fff, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff, 0x100000000, INT64_MAX,
                                       (uint64_t)1 << 63, UINT64_MAX, UINT64_MAX - 31, UINT64_MAX - 4095};
    uint64_t number = numbers[next(fuzz) % N_ELEMENTS(numbers)];
    size_t width = (size_t)1 << next(fuzz) % 4;

    memcpy(bytes->at + at, &number, MIN(width, bytes->n - at));
}

/* A stretch copied to another place, taken out, or doubled. */
static void move_stretch(Fuzz *fuzz, Bytes *bytes)
{
    size_t from = next(fuzz) % bytes->n, n = MIN(1 + next(fuzz) % 64, bytes->n - from), to = next(fuzz) % bytes->n;

    switch (next(fuzz) % 3) {
    case 0:
        memmove(bytes->at + to, bytes->at + from, MIN(n, bytes->n - to));
        break;
    case 1:
        memmove(bytes->at + from, bytes->at + from + n, bytes->n - from - n);
        bytes->n -= n;
        break;
    default:
        if (bytes->n + n <= bytes->capacity) {
            memmove(bytes->at + from + n, bytes->at + from, bytes->n - from);
            bytes->n += n;
        }
        break;
    }
}

/* One to eight pieces of damage, most of them in the first @busy bytes. */
static void damage(Fuzz *fuzz, Bytes *bytes, size_t busy)
{
    for (uint64_t i = 1 + next(fuzz) % 8; i > 0 && bytes->n > 0; i--) {
        size_t range = next(fuzz) % 4 ? MIN(busy, bytes->n) : bytes->n, at = next(fuzz) % range;

        switch (next(fuzz) % 6) {
        case 0:
            bytes->at[at] ^= (uint8_t)(1u << next(fuzz) % 8);
            break;
        case 1:
            bytes->at[at] = (uint8_t)next(fuzz);
            break;
        case 2:
        case 3:
            put_number(fuzz, bytes, at);
            break;
        case 4:
            move_stretch(fuzz, bytes);
            break;
        default:
            if (next(fuzz) % 4 == 0)
                bytes->n = at;
            break;
        }
    }
}

static void keep(const Bytes *bytes, const char *name)
{
    const char *folder = getenv("LEAT_FUZZ_KEEP");
    char path[300];
    FILE *file;

    if (!folder)
        return;
    (void)snprintf(path, sizeof(path), "%s/%s", folder, name);
    file = fopen(path, "w");
    if (!file || fwrite(bytes->at, 1, bytes->n, file) != bytes->n)
        fail_msg("%s cannot be written", path);
    (void)fclose(file);
}

static double now(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* What reads: 0 or an error with a text. */
typedef int (*Reader)(Fuzz *fuzz, const Bytes *bytes, ErrorDetail *detail);

static void run(Fuzz *fuzz, const char *name, Bytes seed, size_t busy, void (*mend)(Fuzz *, Bytes *), Reader reader)
{
    double end = now() + fuzz->seconds / 4;
    Bytes bytes = {malloc(seed.capacity), 0, seed.capacity};

    assert_non_null(bytes.at);
    fuzz->random = fuzz->seed;
    fuzz->n_runs = fuzz->n_read = 0;
    while (now() < end) {
        ErrorDetail detail = ERROR_DETAIL_NULL;
        int r;

        memcpy(bytes.at, seed.at, seed.n);
        bytes.n = seed.n;
        damage(fuzz, &bytes, busy);
        if (mend)
            mend(fuzz, &bytes);
        keep(&bytes, name);
        r = reader(fuzz, &bytes, &detail);
        if (r && r != -ENOMEM && !detail.text[0])
            fail_msg("%s: seed %llu, file %llu: error %d without a text", name, (unsigned long long)fuzz->seed,
                     (unsigned long long)fuzz->n_runs, r);
        fuzz->n_runs++;
        fuzz->n_read += r == 0;
    }
    print_message("%s: %llu files, %llu of them could be read\n", name, (unsigned long long)fuzz->n_runs, (unsigned long long)fuzz->n_read);
    assert_true(fuzz->n_runs > 0);
    free(bytes.at);
    free(seed.at);
}

/* ---- saved sessions --------------------------------------------------------------------------------------------------------------- */

static const KvImageFacts facts = {.model = {1, 2, 3}, .layout = 77, .n_tokens = 64, .max_bytes = 1 << 20};

static Bytes new_image(void)
{
    _cleanup_(kv_image_freep) KvImage *image = kv_image_new(&facts);
    _cleanup_(close_fdp) int fd = memfd_create("image", MFD_CLOEXEC);
    static uint8_t content[6000];
    Bytes bytes;

    assert_non_null(image);
    for (uint32_t i = 0; i < 6; i++) {
        assert_int_equal(kv_image_chunk(image, 1 + i % 3, i, 0), 0);
        assert_int_equal(kv_image_piece(image, content, 1000 * i), 0);
    }
    assert_int_equal(kv_image_write(image, fd), 0);
    bytes = (Bytes){malloc(65536), (size_t)kv_image_bytes(image), 65536};
    assert_non_null(bytes.at);
    assert_int_equal(pread(fd, bytes.at, bytes.n, 0), bytes.n);
    return bytes;
}

/* Most files get hashes that agree, or nothing behind them would ever be reached. */
static void mend_image(Fuzz *fuzz, Bytes *bytes)
{
    uint64_t size = bytes->n, hash = 0;
    uint32_t n_chunks;

    if (bytes->n < 80 || next(fuzz) % 4 == 0)
        return;
    if (next(fuzz) % 4)
        memcpy(bytes->at + 16, &size, 8);
    memcpy(&n_chunks, bytes->at + 12, 4);
    if (n_chunks > (bytes->n - 80) / 40)
        return;
    for (uint32_t i = 0; i < n_chunks && next(fuzz) % 8; i++) {
        uint64_t place[2];

        memcpy(place, bytes->at + 80 + 40 * i + 16, sizeof(place));
        if (place[0] <= bytes->n && place[1] <= bytes->n - place[0]) {
            hash = XXH3_64bits(bytes->at + place[0], place[1]);
            memcpy(bytes->at + 80 + 40 * i + 32, &hash, 8);
        }
    }
    memcpy(&size, bytes->at + 16, 8);
    hash = 0;
    memcpy(bytes->at + 24, &hash, 8);
    hash = XXH3_64bits(bytes->at, 80) ^ XXH3_64bits_withSeed(bytes->at + 80, (size_t)n_chunks * 40, size);
    memcpy(bytes->at + 24, &hash, 8);
}

static int read_image(Fuzz *fuzz, const Bytes *bytes, ErrorDetail *detail)
{
    _cleanup_(kv_image_freep) KvImage *image = NULL;
    _cleanup_(close_fdp) int fd = memfd_create("image", MFD_CLOEXEC);
    uint64_t sum = 0;
    int r;

    assert_true(fd >= 0 && write(fd, bytes->at, bytes->n) == (ssize_t)bytes->n);
    r = kv_image_open(fd, "file", &facts, next(fuzz) % 2, &image, detail);
    for (uint32_t i = 0; !r && i < image->n_chunks; i++)
        for (uint64_t k = 0; k < image->chunks[i].bytes; k++) /* all of it is there */
            sum += ((const uint8_t *)image->chunks[i].data)[k];
    return r ? r : (int)(sum & 0);
}

static void saved_sessions(void **state)
{
    run(*state, "session.kv", new_image(), 80 + 6 * 40, mend_image, read_image);
}

/* ---- what comes as a file with a name ------------------------------------------------------------------------------------------------ */

static void write_file(const Fuzz *fuzz, const char *name, const Bytes *bytes, char *path, size_t size)
{
    FILE *file;

    (void)snprintf(path, size, "%s/%s", fuzz->folder, name);
    file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes->at, 1, bytes->n, file), bytes->n);
    assert_int_equal(fclose(file), 0);
}

static int read_model(Fuzz *fuzz, const Bytes *bytes, ErrorDetail *detail)
{
    _cleanup_(model_file_freep) ModelFile *file = NULL;
    char path[100];

    write_file(fuzz, "model.gguf", bytes, path, sizeof(path));
    return model_file_open(path, fuzz->folder, &file, detail);
}

static void models(void **state)
{
    char path[300];

    (void)snprintf(path, sizeof(path), "%s/tiny-llama-mixed.gguf", getenv("LEAT_TEST_DATA") ? getenv("LEAT_TEST_DATA") : "tests/data");
    run(*state, "model.gguf", bytes_of_file(path), 16384, NULL, read_model);
}

static int read_config(Fuzz *fuzz, const Bytes *bytes, ErrorDetail *detail)
{
    ConfigMessages messages = CONFIG_MESSAGES_NULL;
    Config *config = NULL;
    char path[100];
    int r;

    write_file(fuzz, "leat.yaml", bytes, path, sizeof(path));
    r = config_load(path, &config, &messages);
    if (r == -EINVAL && messages.n > 0 && messages.messages[0].line > 0)
        (void)error_detail_set(detail, r, "%s", messages.messages[0].text);
    config_messages_clear(&messages);
    (void)config_free(config);
    return r;
}

static void configurations(void **state)
{
    static const char yaml[] =
        "version: 1\ndevices: [{match: {type: gpu, vendor: intel}, use: always, max-memory: 2GiB, reserve: 512MiB}]\n"
        "defaults: {context: 4096, keep-alive: 90s, cache: {strategy: offloaded_quantized, prefetch: 3, transfer: copy, host-memory: 4GiB,\n"
        "  quant: {backend: leat, nbits_key: 5, nbits_value: auto, kld-budget: 0.01, q_group_size: 64, sinks: 4, centre: none}}}\n"
        "models:\n  a: {file: /m/a.gguf, aliases: [small, 'other one'], layers: auto, weights: {prefetch: 8, transfer: auto},\n"
        "      parameters: {temperature: 0.7, top-k: 40, stop: [\"\\n\", END]}}\n"
        "  b:\n    file: b.gguf\n    cache:\n      strategy: quantized\n      quant: {backend: quanto, nbits: 4, compatibility: true}\n"
        "scheduler: {max-queue: 5, idle-exit: 5min}\nlog: {level: info}\n";

    run(*state, "leat.yaml", bytes_of(yaml, sizeof(yaml) - 1), sizeof(yaml), NULL, read_config);
}

static int read_template(Fuzz *fuzz, const Bytes *bytes, ErrorDetail *detail)
{
    static const ChatMessage messages[] = {{"system", "Be kind."}, {"user", "Hello <|im_end|>"}, {"assistant", "Hi"}, {"user", "{{ x }}"}};
    _cleanup_(chat_template_freep) ChatTemplate *template_ = NULL;
    _cleanup_(chat_pieces_clearp) ChatPieces pieces = CHAT_PIECES_NULL;
    _cleanup_(freep) char *source = malloc(bytes->n + 1);
    int r;

    (void)fuzz;
    assert_non_null(source);
    memcpy(source, bytes->at, bytes->n);
    source[bytes->n] = 0;
    r = chat_template_new(source, &template_, detail);
    return r ? r : chat_template_render(template_, messages, N_ELEMENTS(messages), true, "<s>", "</s>", &pieces, detail);
}

static void templates(void **state)
{
    static const char source[] =
        "{%- macro one(m, n=3) -%}{{ m.role | upper }}:{{ m['content'] | trim ~ n }}{%- endmacro -%}\n"
        "{% set ns = namespace(found=false, i=0) %}{% for m in messages[::-1] %}{% if loop.first and m.role != 'x' %}<|{{ m.role }}|>\n"
        "{{ m.content.split(' ')[-1] }}{% elif m.role in ['user', 'assistant'] %}{{ one(m) }}{{ loop.index0 * 2 // 3 % 5 }}{% else %}\n"
        "{% set ns.i = ns.i + 1 %}{{ 'a' if ns.i > 2 else \"b\" }}{% endif %}{% endfor %}{{ {'k': [1, 2.5, none]} | tojson }}\n"
        "{% if add_generation_prompt is defined and not ns.found %}{{ bos_token + '<|assistant|>' }}{% endif %}{# end #}{{ range(3) | join(',') }}\n";

    run(*state, "template.jinja", bytes_of(source, sizeof(source) - 1), sizeof(source), NULL, read_template);
}

static int setup(void **state)
{
    static Fuzz fuzz;
    const char *seconds = getenv("LEAT_FUZZ_SECONDS"), *seed = getenv("LEAT_FUZZ_SEED");

    assert_int_equal(test_folder_new(fuzz.folder), 0);
    fuzz.seconds = seconds ? atof(seconds) : 2;
    fuzz.seed = seed ? strtoull(seed, NULL, 10) : 1;
    print_message("seed %llu, %g seconds\n", (unsigned long long)fuzz.seed, fuzz.seconds);
    *state = &fuzz;
    return 0;
}

static int teardown(void **state)
{
    return test_folder_remove(((Fuzz *)*state)->folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(saved_sessions),
        cmocka_unit_test(models),
        cmocka_unit_test(configurations),
        cmocka_unit_test(templates),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
