/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Random programs of cache operations on the real store, beside a reference that keeps every token (tests/lib/random-*.h).
 *
 *   LEAT_RANDOM_SECONDS   how long (180)
 *   LEAT_RANDOM_SEED      the first program; programs are numbered from there (1)
 *   LEAT_RANDOM_VERBOSE   each program is named before it runs, for those that crash
 *   LEAT_RANDOM_WIDE      all shapes and forms, not only those of a short run
 *   LEAT_RANDOM_PROGRAM   a file with programs to replay instead
 *
 * A program that fails is shrunk and printed as such a file; once its cause is mended it belongs into tests/data/cache-programs.txt.
 */

#include "tests/lib/model-rig.h"
#include "tests/lib/random-world.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#define SHRINK_USEC (600 * 1000 * 1000ull) /* at most: sanitized and on a busy machine it takes minutes */

typedef struct Fixture {
    Gpu *gpu;
    RandomWorld *world;
} Fixture;

static int setup(void **state)
{
    Fixture *fixture = calloc(1, sizeof(*fixture));

    assert_non_null(fixture);
    fixture->gpu = rig_open_gpu();
    fixture->world = random_world_new(fixture->gpu);
    *state = fixture;
    return 0;
}

static int teardown(void **state)
{
    Fixture *fixture = *state;

    (void)random_world_free(fixture->world);
    (void)gpu_free(fixture->gpu);
    free(fixture);
    return 0;
}

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *value = getenv(name);

    return value && value[0] ? strtoull(value, NULL, 10) : otherwise;
}

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Two runs under different policies, so that their bits meet. */
typedef struct Pair {
    RandomWorld *world;
    RandomFailure failure;
    const RandomProgram *first; /* whose outputs are there already; NULL: alone */
} Pair;

static bool fails(const RandomProgram *program, void *userdata)
{
    Pair *pair = userdata;
    RandomFailure failure;

    random_world_forget(pair->world);
    if (pair->first) {
        RandomProgram other = *program;

        other.config = pair->first->config;
        other.config.n_layers = program->config.n_layers;
        if (!random_world_run(pair->world, &other, &failure))
            return false; /* another failure */
    }
    if (random_world_run(pair->world, program, &failure) || failure.kind != pair->failure.kind)
        return false;
    pair->failure = failure;
    return true;
}

static void shrink_and_print(Pair *pair, RandomProgram *program, uint64_t seed, FILE *to)
{
    fprintf(to, "# program %llu fails at operation %u: %s\n", (unsigned long long)seed, pair->failure.op, pair->failure.text);
    /* A failure that depends on what ran before in this process is printed as it is; a lost device runs nothing more. */
    if (strstr(pair->failure.text, "is lost"))
        fprintf(to, "# the device is lost\n");
    else if (fails(program, pair) || (pair->first = NULL, fails(program, pair)))
        random_program_shrink(program, fails, pair, SHRINK_USEC);
    else
        fprintf(to, "# it does not fail again by itself\n");
    fprintf(to, "# shrunk: operation %u: %s\n", pair->failure.op, pair->failure.text);
    random_program_print(program, to);
    if (pair->first) {
        fprintf(to, "# after the same operations under\n# ");
        random_program_print(&(RandomProgram){.config = pair->first->config}, to);
    }
    fflush(to);
}

static void report(Pair *pair, RandomProgram *program, uint64_t seed)
{
    shrink_and_print(pair, program, seed, stdout);
    fail_msg("program %llu: %s", (unsigned long long)seed, pair->failure.text);
}

/* Every program of a file. */
static uint32_t replay(RandomWorld *world, const char *path)
{
    RandomProgram program;
    RandomFailure failure;
    ErrorDetail detail = ERROR_DETAIL_NULL;
    FILE *file = fopen(path, "r");
    uint32_t n = 0;
    int r;

    if (!file)
        fail_msg("%s cannot be read", path);
    while ((r = random_program_read(&program, file, &detail)) == 0) {
        n++;
        if (!random_world_run(world, &program, &failure))
            fail_msg("%s, program %u, operation %u: %s", path, n, failure.op, failure.text);
    }
    fclose(file);
    if (r < 0)
        fail_msg("%s: %s", path, detail.text);
    return n;
}

static void programs_that_failed_once_do_not_fail_again(void **state)
{
    Fixture *fixture = *state;
    const char *folder = getenv("LEAT_TEST_DATA");
    char path[512];

    snprintf(path, sizeof(path), "%s/cache-programs.txt", folder ? folder : "tests/data");
    random_world_forget(fixture->world);
    assert_true(replay(fixture->world, path) > 0);
}

static void print_counts(const RandomCounts *c)
{
    printf("%" PRIu64 " programs (%" PRIu64 " of what is not supported), %" PRIu64 " operations, %" PRIu64 " passes, %" PRIu64 " rows\n",
           c->programs, c->unsupported, c->operations, c->passes, c->rows);
    printf("%" PRIu64 " refused, %" PRIu64 " run again, %" PRIu64 " taken back, %" PRIu64 " not, %" PRIu64 " moved, %" PRIu64 " restored; %" PRIu64
           " states, %" PRIu64 " outputs compared bit for bit\n",
           c->refused, c->reruns, c->undone, c->not_undone, c->migrations, c->restored, c->states, c->bits_compared);
    printf("worst distance from the reference: %.2g of %.2g exact, %.2g of %.2g fast\n", c->worst_exact, RANDOM_TOLERANCE_EXACT,
           c->worst_fast, RANDOM_TOLERANCE_FAST);
}

static void random_programs_agree_with_the_reference_and_with_each_other(void **state)
{
    Fixture *fixture = *state;
    double end = seconds() + (double)number("LEAT_RANDOM_SECONDS", 180);
    uint64_t seed = number("LEAT_RANDOM_SEED", 1);
    bool wide = number("LEAT_RANDOM_WIDE", 0) > 0, verbose = number("LEAT_RANDOM_VERBOSE", 0) > 0, unified = gpu_info(fixture->gpu)->unified_memory;
    Pair pair = {.world = fixture->world};

    if (getenv("LEAT_RANDOM_PROGRAM")) {
        (void)replay(fixture->world, getenv("LEAT_RANDOM_PROGRAM"));
        return;
    }
    printf("seed %llu, %s\n", (unsigned long long)seed, wide ? "wide" : "short");
    for (; seconds() < end; seed++) {
        RandomProgram program, other;

        random_program_make(&program, seed, unified, wide);
        if (verbose) {
            printf("program %" PRIu64 "\n", seed);
            fflush(stdout);
        }
        if (!random_world_run(fixture->world, &program, &pair.failure))
            report(&pair, &program, seed);
        other = program;
        random_policy_vary(&other.config, seed, unified);
        pair.first = &program;
        if (!random_world_run(fixture->world, &other, &pair.failure))
            report(&pair, &other, seed);
        pair.first = NULL;
    }
    print_counts(random_world_counts(fixture->world));
    assert_true(random_world_counts(fixture->world)->bits_compared > 0);
    if (!wide)
        assert_int_equal(random_world_counts(fixture->world)->unsupported, 0);
}

static char *text_of(const RandomProgram *program)
{
    char *text = NULL;
    size_t size;
    FILE *to = open_memstream(&text, &size);

    assert_non_null(to);
    random_program_print(program, to);
    fclose(to);
    return text;
}

static void programs_survive_being_printed_and_read(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed < 300; seed++) {
        RandomProgram program, again;
        ErrorDetail detail = ERROR_DETAIL_NULL;
        char *text, *same;
        FILE *file;

        random_program_make(&program, seed, true, seed % 2);
        text = text_of(&program);
        file = fmemopen(text, strlen(text), "r");
        assert_non_null(file);
        if (random_program_read(&again, file, &detail))
            fail_msg("%s", detail.text);
        fclose(file);
        same = text_of(&again);
        assert_string_equal(text, same);
        free(text);
        free(same);
    }
}

static bool has_a_crop_after_a_fork(const RandomProgram *program, void *userdata)
{
    bool forked = false;

    (void)userdata;
    for (uint32_t i = 0; i < program->n_ops; i++) {
        forked = forked || program->ops[i].kind == RANDOM_FORK;
        if (forked && program->ops[i].kind == RANDOM_CROP && program->ops[i].args[0].value >= 5)
            return true;
    }
    return false;
}

static void shrinking_leaves_what_the_failure_needs(void **state)
{
    uint32_t n_shrunk = 0;

    (void)state;
    for (uint64_t seed = 1; seed < 60; seed++) {
        RandomProgram program;

        random_program_make(&program, seed, true, false);
        if (!has_a_crop_after_a_fork(&program, NULL))
            continue;
        random_program_shrink(&program, has_a_crop_after_a_fork, NULL, 5 * 1000 * 1000);
        assert_int_equal(program.n_ops, 2);
        assert_int_equal(program.ops[0].kind, RANDOM_FORK);
        assert_int_equal(program.ops[1].args[0].value, 5);
        n_shrunk++;
    }
    assert_true(n_shrunk > 5);
}

/* The test of the test: what goes wrong with forks that are cropped is found, shrunk to little more than that, printed, and the print shows
 * it again, as LEAT_RANDOM_PROGRAM would; without the defect the same program is right. */
static void a_seeded_defect_is_found_shrunk_and_replayed_from_its_print(void **state)
{
    Fixture *fixture = *state;
    Pair pair = {.world = fixture->world};
    ErrorDetail detail = ERROR_DETAIL_NULL;
    RandomProgram program, again;
    RandomFailure failure;
    char *text = NULL;
    uint64_t seed = 1;
    size_t n_text;
    FILE *file;

    random_world_seed_defect(fixture->world, true);
    for (random_program_make(&program, seed, true, false); random_world_run(fixture->world, &program, &pair.failure);
         random_program_make(&program, seed, true, false))
        assert_true(++seed < 100);
    file = open_memstream(&text, &n_text);
    assert_non_null(file);
    shrink_and_print(&pair, &program, seed, file);
    fclose(file);
    random_world_seed_defect(fixture->world, false); /* whatever comes of it */
    printf("%s", text);
    file = fmemopen(text, n_text, "r");
    assert_non_null(file);
    assert_int_equal(random_program_read(&again, file, &detail), 0);
    fclose(file);
    assert_in_range(again.n_ops, 3, 5); /* a past, a fork of it, a crop of the fork, and what runs then */
    random_world_seed_defect(fixture->world, true);
    assert_false(random_world_run(fixture->world, &again, &failure));
    random_world_seed_defect(fixture->world, false);
    assert_ptr_equal(failure.kind, pair.failure.kind);
    random_world_forget(fixture->world);
    assert_true(random_world_run(fixture->world, &again, &failure));
    free(text);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(programs_survive_being_printed_and_read),
        cmocka_unit_test(shrinking_leaves_what_the_failure_needs),
        cmocka_unit_test(programs_that_failed_once_do_not_fail_again),
        cmocka_unit_test(a_seeded_defect_is_found_shrunk_and_replayed_from_its_print),
        cmocka_unit_test(random_programs_agree_with_the_reference_and_with_each_other),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
