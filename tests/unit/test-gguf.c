/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF reader: right files, files cut at every byte, and hostile numbers. */

#include "tests/lib/gguf-writer.h"
#include "tests/lib/place.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

static const uint64_t DIMS_A[] = {32, 2}, DIMS_B[] = {8};

/* Keys of every kind and two tensors: 32 x 2 of Q8_0 (68 bytes) at 0 and 8 of F32 at 96. */
static void write_sample(GgufWriter *writer, uint32_t version)
{
    static const int16_t numbers[] = {-3, 0, 7};

    gguf_writer_header(writer, version, 2, 8);
    gguf_writer_key_string(writer, "general.architecture", "llama");
    gguf_writer_key_u32(writer, "a.count", 77);
    gguf_writer_key_f32(writer, "a.ratio", 0.5f);
    gguf_writer_key(writer, "a.flag", GGUF_TYPE_BOOL);
    gguf_writer_bytes(writer, "\1", 1);
    gguf_writer_key(writer, "a.negative", GGUF_TYPE_I64);
    gguf_writer_u64(writer, (uint64_t)-5);
    gguf_writer_key_array(writer, "a.words", GGUF_TYPE_STRING, 3);
    gguf_writer_string(writer, "one");
    gguf_writer_string(writer, "");
    gguf_writer_string(writer, "three");
    gguf_writer_key_array(writer, "a.numbers", GGUF_TYPE_I16, 3);
    gguf_writer_bytes(writer, numbers, sizeof(numbers));
    gguf_writer_key_array(writer, "a.none", GGUF_TYPE_STRING, 0);
    gguf_writer_tensor(writer, "t.a", 2, DIMS_A, WEIGHT_TYPE_Q8_0, 0);
    gguf_writer_tensor(writer, "t.b", 1, DIMS_B, WEIGHT_TYPE_F32, 96);
    gguf_writer_align(writer, 32);
    gguf_writer_zeros(writer, 96 + 32);
}

/* Parses from a heap block of exactly @size bytes, so that a sanitizer sees every read beyond. */
static int parse(const GgufWriter *writer, size_t size, Gguf **ret, void **ret_block, ErrorDetail *reterr)
{
    *ret_block = malloc(size ? size : 1);
    assert_non_null(*ret_block);
    if (size)
        memcpy(*ret_block, writer->data, size);
    return gguf_parse(*ret_block, size, ret, reterr);
}

static void expect(const GgufWriter *writer, int result, const char *words)
{
    _cleanup_(gguf_freep) Gguf *gguf = NULL;
    _cleanup_(freep) void *block = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    int r;

    r = parse(writer, writer->size, &gguf, &block, &detail);
    if (r != result || !strstr(detail.text, words))
        print_error("got %d '%s', expected %d '%s'\n", r, detail.text, result, words);
    assert_int_equal(r, result);
    assert_non_null(strstr(detail.text, words));
    assert_null(gguf);
}

static void check_sample(const Gguf *gguf)
{
    GgufString string;
    GgufType type;
    uint64_t u64;
    double number;
    bool flag;

    assert_true(gguf_get_string(gguf, "general.architecture", &string));
    assert_int_equal(string.length, 5);
    assert_memory_equal(string.data, "llama", 5);
    assert_true(gguf_get_u64(gguf, "a.count", &u64));
    assert_int_equal(u64, 77);
    assert_true(gguf_get_double(gguf, "a.ratio", &number));
    assert_true(number == 0.5);
    assert_true(gguf_get_bool(gguf, "a.flag", &flag) && flag);
    assert_false(gguf_get_u64(gguf, "a.negative", &u64));
    assert_false(gguf_get_u64(gguf, "a.ratio", &u64));
    assert_false(gguf_get_double(gguf, "a.count", &number));
    assert_false(gguf_get_string(gguf, "a.words", &string));
    assert_false(gguf_has(gguf, "a.coun"));
    assert_true(gguf_get_array(gguf, "a.words", &type, &u64));
    assert_int_equal(type, GGUF_TYPE_STRING);
    assert_int_equal(u64, 3);
    assert_true(gguf_array_string(gguf, "a.words", 2, &string));
    assert_int_equal(string.length, 5);
    assert_false(gguf_array_string(gguf, "a.words", 3, &string));
    assert_false(gguf_array_number(gguf, "a.words", 0, &number));
    assert_true(gguf_array_number(gguf, "a.numbers", 0, &number));
    assert_true(number == -3.0);
    assert_false(gguf_array_number(gguf, "a.numbers", 3, &number));
    assert_non_null(gguf_array_strings(gguf, "a.none", &u64));
    assert_int_equal(u64, 0);
    assert_int_equal(gguf_n_tensors(gguf), 2);
    assert_non_null(gguf_tensor(gguf, "t.a"));
    assert_null(gguf_tensor(gguf, "t.c"));
    assert_int_equal(gguf_tensor(gguf, "t.a")->bytes, 68);
    assert_int_equal(gguf_tensor(gguf, "t.b")->bytes, 32);
    assert_int_equal((const char *)gguf_tensor(gguf, "t.b")->data - (const char *)gguf_tensor(gguf, "t.a")->data, 96);
    assert_ptr_equal(gguf_tensor_at(gguf, 1), gguf_tensor(gguf, "t.b"));
    assert_null(gguf_tensor_at(gguf, 2));
}

static void versions_2_and_3_are_read(void **state)
{
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;
        _cleanup_(gguf_freep) Gguf *gguf = NULL;
        _cleanup_(freep) void *block = NULL;

        write_sample(&writer, version);
        assert_int_equal(parse(&writer, writer.size, &gguf, &block, NULL), 0);
        check_sample(gguf);
    }
}

static void a_file_cut_at_any_byte_is_refused(void **state)
{
    _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;

    (void)state;
    write_sample(&writer, 3);
    for (size_t size = 0; size < writer.size; size++) {
        _cleanup_(gguf_freep) Gguf *gguf = NULL;
        _cleanup_(freep) void *block = NULL;
        ErrorDetail detail = ERROR_DETAIL_NULL;

        assert_int_equal(parse(&writer, size, &gguf, &block, &detail), GGUF_E_CORRUPT);
        assert_true(strlen(detail.text) > 10);
    }
}

/* Any byte of the header replaced by extreme values: an answer, never a crash (run under sanitizers). */
static void any_byte_changed_gives_an_answer(void **state)
{
    static const uint8_t values[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
    _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;

    (void)state;
    write_sample(&writer, 3);
    for (size_t i = 0; i < writer.size; i++) {
        uint8_t before = writer.data[i];

        for (size_t v = 0; v < N_ELEMENTS(values); v++) {
            _cleanup_(gguf_freep) Gguf *gguf = NULL;
            _cleanup_(freep) void *block = NULL;
            int r;

            writer.data[i] = values[v];
            r = parse(&writer, writer.size, &gguf, &block, NULL);
            assert_true(r == 0 || r == GGUF_E_CORRUPT || r == GGUF_E_UNSUPPORTED);
        }
        writer.data[i] = before;
    }
}

static void other_formats_are_named(void **state)
{
    static const struct {
        const char *bytes, *words;
        int result;
    } files[] = {
        {"<!DOCTYPE html><html>", "HTML page", GGUF_E_CORRUPT},
        {"\n  <html><body>404</body></html>", "HTML page", GGUF_E_CORRUPT},
        {"version https://git-lfs.github.com/spec/v1\n", "git lfs pull", GGUF_E_CORRUPT},
        {"PK\x03\x04 and more", "zip archive", GGUF_E_CORRUPT},
        {"{\"error\": \"not found\"}", "JSON", GGUF_E_CORRUPT},
        {"FUGG\x00\x00\x00\x03", "big-endian", GGUF_E_CORRUPT},
        {"ggjt\x03", "old GGML", GGUF_E_CORRUPT},
        {"GGU", "does not begin with 'GGUF'", GGUF_E_CORRUPT},
        {"something else", "does not begin with 'GGUF'", GGUF_E_CORRUPT},
        {"", "empty", GGUF_E_CORRUPT},
    };

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(files); i++) {
        _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;

        gguf_writer_bytes(&writer, files[i].bytes, strlen(files[i].bytes));
        expect(&writer, files[i].result, files[i].words);
    }
}

static void other_versions_are_refused(void **state)
{
    static const uint32_t versions[] = {0, 1, 4, 0x03000000, 0xffffffff};
    static const char *const words[] = {"version 0", "version 1", "version 4", "big-endian", "version 4294967295"};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(versions); i++) {
        _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;

        gguf_writer_header(&writer, versions[i], 0, 0);
        expect(&writer, GGUF_E_UNSUPPORTED, words[i]);
    }
}

static void hostile_counts_are_refused_before_allocation(void **state)
{
    static const uint64_t counts[] = {1, 1ull << 30, 1ull << 60, UINT64_MAX};

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(counts); i++) {
        _cleanup_(gguf_writer_clearp) GgufWriter tensors = GGUF_WRITER_NULL, keys = GGUF_WRITER_NULL, strings = GGUF_WRITER_NULL,
                                                 numbers = GGUF_WRITER_NULL, length = GGUF_WRITER_NULL, name = GGUF_WRITER_NULL;

        gguf_writer_header(&tensors, 3, counts[i], 0);
        expect(&tensors, GGUF_E_CORRUPT, "tensors");
        gguf_writer_header(&keys, 3, 0, counts[i]);
        expect(&keys, GGUF_E_CORRUPT, "keys");
        gguf_writer_header(&strings, 3, 0, 1);
        gguf_writer_key_array(&strings, "words", GGUF_TYPE_STRING, counts[i]);
        expect(&strings, GGUF_E_CORRUPT, "words");
        gguf_writer_header(&numbers, 3, 0, 1);
        gguf_writer_key_array(&numbers, "numbers", GGUF_TYPE_F64, counts[i]);
        expect(&numbers, GGUF_E_CORRUPT, "numbers");
        gguf_writer_header(&length, 3, 0, 1);
        gguf_writer_key(&length, "text", GGUF_TYPE_STRING);
        gguf_writer_u64(&length, counts[i]);
        expect(&length, GGUF_E_CORRUPT, "text");
        gguf_writer_header(&name, 3, 0, 1);
        gguf_writer_u64(&name, counts[i]);
        gguf_writer_zeros(&name, counts[i] == 1 ? 0 : 32);
        expect(&name, GGUF_E_CORRUPT, "cut");
    }
}

static void wrong_types_and_nested_arrays_are_refused(void **state)
{
    _cleanup_(gguf_writer_clearp) GgufWriter nested = GGUF_WRITER_NULL, element = GGUF_WRITER_NULL, type = GGUF_WRITER_NULL,
                                             twice = GGUF_WRITER_NULL, empty = GGUF_WRITER_NULL;

    (void)state;
    gguf_writer_header(&nested, 3, 0, 1);
    gguf_writer_key_array(&nested, "deep", GGUF_TYPE_ARRAY, 1);
    gguf_writer_zeros(&nested, 64);
    expect(&nested, GGUF_E_UNSUPPORTED, "deep");
    gguf_writer_header(&element, 3, 0, 1);
    gguf_writer_key_array(&element, "odd", 255, 1);
    gguf_writer_zeros(&element, 64);
    expect(&element, GGUF_E_CORRUPT, "type 255");
    gguf_writer_header(&type, 3, 0, 1);
    gguf_writer_key(&type, "odder", 13);
    gguf_writer_zeros(&type, 64);
    expect(&type, GGUF_E_CORRUPT, "'odder' has unknown type 13");
    gguf_writer_header(&twice, 3, 0, 2);
    gguf_writer_key_u32(&twice, "same", 1);
    gguf_writer_key_u32(&twice, "same", 2);
    expect(&twice, GGUF_E_CORRUPT, "'same' appears twice");
    gguf_writer_header(&empty, 3, 0, 1);
    gguf_writer_key_u32(&empty, "", 1);
    expect(&empty, GGUF_E_CORRUPT, "length of 0");
}

static void alignment_must_be_a_sane_power_of_two(void **state)
{
    static const uint32_t wrong[] = {0, 1, 3, 4, 24, 1u << 30, 0x80000000u};
    _cleanup_(gguf_writer_clearp) GgufWriter right = GGUF_WRITER_NULL, wide = GGUF_WRITER_NULL, text = GGUF_WRITER_NULL;
    _cleanup_(gguf_freep) Gguf *gguf = NULL;

    (void)state;
    for (size_t i = 0; i < N_ELEMENTS(wrong); i++) {
        _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;

        gguf_writer_header(&writer, 3, 0, 1);
        gguf_writer_key_u32(&writer, "general.alignment", wrong[i]);
        expect(&writer, GGUF_E_CORRUPT, "general.alignment");
    }
    gguf_writer_header(&wide, 3, 0, 1);
    gguf_writer_key(&wide, "general.alignment", GGUF_TYPE_U64);
    gguf_writer_u64(&wide, 1ull << 63);
    expect(&wide, GGUF_E_CORRUPT, "general.alignment");
    gguf_writer_header(&text, 3, 0, 1);
    gguf_writer_key_string(&text, "general.alignment", "32");
    expect(&text, GGUF_E_CORRUPT, "general.alignment");
    gguf_writer_header(&right, 3, 1, 1);
    gguf_writer_key_u32(&right, "general.alignment", 64);
    gguf_writer_tensor(&right, "t", 1, DIMS_B, WEIGHT_TYPE_F32, 64);
    gguf_writer_align(&right, 64);
    gguf_writer_zeros(&right, 64 + 32);
    assert_int_equal(gguf_parse(right.data, right.size, &gguf, NULL), 0);
}

/* One F32 tensor with these numbers in a file with 4 KiB of data. */
static void expect_tensor(uint32_t n_dims, const uint64_t *dims, uint32_t type, uint64_t offset, int result, const char *words)
{
    _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;

    gguf_writer_header(&writer, 3, 1, 0);
    gguf_writer_tensor(&writer, "victim", n_dims, dims, type, offset);
    gguf_writer_align(&writer, 32);
    gguf_writer_zeros(&writer, 4096);
    expect(&writer, result, words);
}

static void hostile_tensors_are_refused_by_name(void **state)
{
    static const uint64_t huge[] = {1ull << 32, 1ull << 32, 1, 1}, wrap[] = {(1ull << 42) + 1, 1ull << 22, 1, 1},
                          large[] = {1ull << 62, 2, 1, 1}, zero[] = {0, 1, 1, 1}, odd[] = {33, 1, 1, 1}, four[] = {4, 1, 1, 1},
                          bytes[] = {1ull << 62, 1, 1, 1};

    (void)state;
    expect_tensor(0, four, WEIGHT_TYPE_F32, 0, GGUF_E_CORRUPT, "'victim' has 0 dimensions");
    expect_tensor(5, four, WEIGHT_TYPE_F32, 0, GGUF_E_CORRUPT, "'victim' has 5 dimensions");
    expect_tensor(0xffffffff, four, WEIGHT_TYPE_F32, 0, GGUF_E_CORRUPT, "'victim' has 4294967295 dimensions");
    expect_tensor(2, huge, WEIGHT_TYPE_F32, 0, GGUF_E_CORRUPT, "victim");
    expect_tensor(2, wrap, WEIGHT_TYPE_F32, 0, GGUF_E_CORRUPT, "victim");
    expect_tensor(2, large, WEIGHT_TYPE_F32, 0, GGUF_E_CORRUPT, "victim");
    expect_tensor(1, bytes, WEIGHT_TYPE_F32, 0, GGUF_E_CORRUPT, "victim");
    expect_tensor(1, zero, WEIGHT_TYPE_F32, 0, GGUF_E_CORRUPT, "victim");
    expect_tensor(1, odd, WEIGHT_TYPE_Q8_0, 0, GGUF_E_CORRUPT, "Q8_0 blocks");
    expect_tensor(1, four, WEIGHT_TYPE_F32, 1, GGUF_E_CORRUPT, "'victim' is not aligned");
    expect_tensor(1, four, WEIGHT_TYPE_F32, 4096, GGUF_E_CORRUPT, "victim");
    expect_tensor(1, four, WEIGHT_TYPE_F32, UINT64_MAX & ~31ull, GGUF_E_CORRUPT, "victim");
    expect_tensor(1, four, 16, 0, GGUF_E_UNSUPPORTED, "'victim' has type IQ2_XXS");
    expect_tensor(1, four, 0xfffffff0, 0, GGUF_E_UNSUPPORTED, "unknown type number 4294967280");
}

static void overlapping_and_duplicate_tensors_are_refused(void **state)
{
    _cleanup_(gguf_writer_clearp) GgufWriter overlap = GGUF_WRITER_NULL, twice = GGUF_WRITER_NULL;

    (void)state;
    gguf_writer_header(&overlap, 3, 2, 0);
    gguf_writer_tensor(&overlap, "first", 2, DIMS_A, WEIGHT_TYPE_Q8_0, 0);
    gguf_writer_tensor(&overlap, "second", 1, DIMS_B, WEIGHT_TYPE_F32, 64);
    gguf_writer_align(&overlap, 32);
    gguf_writer_zeros(&overlap, 256);
    expect(&overlap, GGUF_E_CORRUPT, "'first' and 'second' overlap");
    gguf_writer_header(&twice, 3, 2, 0);
    gguf_writer_tensor(&twice, "same", 1, DIMS_B, WEIGHT_TYPE_F32, 0);
    gguf_writer_tensor(&twice, "same", 1, DIMS_B, WEIGHT_TYPE_F32, 32);
    gguf_writer_align(&twice, 32);
    gguf_writer_zeros(&twice, 256);
    expect(&twice, GGUF_E_CORRUPT, "'same' appears twice");
}

static void names_are_printed_as_ascii(void **state)
{
    _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;

    (void)state;
    gguf_writer_header(&writer, 3, 0, 1);
    gguf_writer_key(&writer, "\xff\x1b[31m'\xc3", 99);
    expect(&writer, GGUF_E_CORRUPT, "'??[31m'?'");
}

/* ---- files ---------------------------------------------------------------------------------------------------------------- */

static int setup_folder(void **state)
{
    *state = malloc(TEST_FOLDER_SIZE);
    return *state ? test_folder_new(*state) : -1;
}

static int teardown_folder(void **state)
{
    int r = test_folder_remove(*state);

    free(*state);
    return r;
}

static void expect_open(const char *folder, const char *name, int result, const char *words)
{
    _cleanup_(gguf_freep) Gguf *gguf = NULL;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    char path[512];

    (void)snprintf(path, sizeof(path), "%s%s", folder, name);
    assert_int_equal(gguf_open(path, &gguf, &detail), result);
    if (!strstr(detail.text, words))
        print_error("'%s' does not say '%s'\n", detail.text, words);
    assert_non_null(strstr(detail.text, words));
}

static void what_cannot_be_opened_says_why(void **state)
{
    char path[512];

    (void)snprintf(path, sizeof(path), "%s/empty.gguf", (char *)*state);
    gguf_writer_save(&GGUF_WRITER_NULL, path, 0);
    (void)snprintf(path, sizeof(path), "%s/pipe", (char *)*state);
    assert_int_equal(mkfifo(path, 0600), 0);
    expect_open(*state, "/empty.gguf", GGUF_E_CORRUPT, "empty");
    expect_open(*state, "", GGUF_E_NOT_FOUND, "is a directory");
    expect_open(*state, "/pipe", GGUF_E_NOT_FOUND, "is a pipe");
    expect_open(*state, "/missing.gguf", GGUF_E_NOT_FOUND, "missing.gguf': No such file");
    expect_open(*state, "/no/such/folder/missing.gguf", GGUF_E_NOT_FOUND, "/no': No such file");
    expect_open(*state, "/empty.gguf/deeper/x.gguf", GGUF_E_NOT_FOUND, "empty.gguf' is not a directory");
    expect_open("/dev/null", "", GGUF_E_NOT_FOUND, "is a device");
}

static void keys_stay_readable_when_the_file_is_shortened_later(void **state)
{
    _cleanup_(gguf_writer_clearp) GgufWriter writer = GGUF_WRITER_NULL;
    _cleanup_(gguf_freep) Gguf *gguf = NULL;
    char path[512];
    GgufString string;

    (void)snprintf(path, sizeof(path), "%s/sample.gguf", (char *)*state);
    write_sample(&writer, 3);
    gguf_writer_save(&writer, path, writer.size);
    assert_int_equal(gguf_open(path, &gguf, NULL), 0);
    assert_int_equal(gguf_file_bytes(gguf), writer.size);
    assert_int_equal(truncate(path, 0), 0);
    assert_true(gguf_array_string(gguf, "a.words", 2, &string));
    assert_memory_equal(string.data, "three", 5);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(versions_2_and_3_are_read),
        cmocka_unit_test(a_file_cut_at_any_byte_is_refused),
        cmocka_unit_test(any_byte_changed_gives_an_answer),
        cmocka_unit_test(other_formats_are_named),
        cmocka_unit_test(other_versions_are_refused),
        cmocka_unit_test(hostile_counts_are_refused_before_allocation),
        cmocka_unit_test(wrong_types_and_nested_arrays_are_refused),
        cmocka_unit_test(alignment_must_be_a_sane_power_of_two),
        cmocka_unit_test(hostile_tensors_are_refused_by_name),
        cmocka_unit_test(overlapping_and_duplicate_tensors_are_refused),
        cmocka_unit_test(names_are_printed_as_ascii),
        cmocka_unit_test_setup_teardown(what_cannot_be_opened_says_why, setup_folder, teardown_folder),
        cmocka_unit_test_setup_teardown(keys_stay_readable_when_the_file_is_shortened_later, setup_folder, teardown_folder),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
