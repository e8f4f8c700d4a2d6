/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Many clients at once on the real daemon with tiny models, for as long as one likes (LEAT_SOAK_SECONDS; LEAT_TEST_SEED; LEAT_SOAK_TIGHT when
 * the device is too small for all at once): turns, questions, beams, cancels, closed streams, killed clients, files, spilling, reloads and
 * unloads in the middle.  Every answer equals the first one, and after each round everything is where it was: device memory, descriptors,
 * threads, mappings of files; the resident size is shown.
 */

#include "tests/bus/soak.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cmocka.h>

#define N_CLIENTS       6
#define ROUND_USEC      (30 * UINT64_C(1000000))
#define SECOND          UINT64_C(1000000)
#define SEED            UINT64_C(34381773457) /* of short runs, so that they are alike; an answer of it holds a noncharacter */

typedef struct Soak {
    Harness *harness;
    sd_bus *bus;
    SoakTable *table;
    int table_fd;
    uint64_t seed;
    pid_t clients[N_CLIENTS];
    unsigned n_killed, n_reloads, n_refused_reloads, n_unloads;
} Soak;

/* What must be as before when nothing is loaded. */
typedef struct Footprint {
    uint64_t device_bytes, n_fds, n_threads, resident_bytes, n_deleted_maps;
} Footprint;

/* ---- configuration ---------------------------------------------------------------------------------------------------------------- */

/* What models may be given while their chats go on.  Calls name their strategy and bits: nothing is to be measured. */
static void write_config(const Soak *soak, unsigned variant)
{
    static const char *const variants[] = {"parallel: 4, prefixes: 16, keep-alive: 10min", "parallel: 2, prefixes: 0, keep-alive: 10min",
                                           "parallel: 3, prefixes: 2, keep-alive: 100ms"};
    _cleanup_(freep) char *tied = harness_source_file("tests/data/tiny-llama-tied.gguf");
    _cleanup_(freep) char *mixed = harness_source_file("tests/data/tiny-llama-mixed.gguf");
    const char *values = variants[variant % N_ELEMENTS(variants)];
    char text[3072], second[1024] = "";

    if (variant != 3)
        (void)snprintf(second, sizeof(second), "  mixed: {file: \"%s\", cache: {strategy: dynamic}, %s}\n", mixed, values);
    (void)snprintf(text, sizeof(text), "  tied: {file: \"%s\", cache: {strategy: dynamic}, %s}\n%sscheduler: {max-queue: %u, spill: %s/spill, spill-after: %s}\n%s", tied, values,
                   second, variant == 1 ? 4 : 64, soak->harness->folder, variant == 2 ? "100ms" : "1s",
                   variant == 4 ? "schedular: {max-queue: 8}\n" : "");
    harness_write_config(soak->harness, text);
}

#define N_VARIANTS 5 /* the fourth is without the second model, the last is wrong */

static void reload(Soak *soak, unsigned variant)
{
    write_config(soak, variant);
    if (variant == N_VARIANTS - 1) {
        call_fails(soak->bus, ERROR("ConfigInvalid"), NULL, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0);
        soak->n_refused_reloads++;
    } else {
        sd_bus_message_unref(call_ok(soak->bus, BUS_ROOT, MANAGER, "Reload", "a{sv}", 0));
        soak->n_reloads++;
    }
}

static void unload(Soak *soak, unsigned model)
{
    char path[96];

    (void)snprintf(path, sizeof(path), "%s/%s", BUS_ROOT "/model", soak_models[model]);
    sd_bus_message_unref(call_ok(soak->bus, path, MODEL, "Unload", "a{sv}", 0));
    soak->n_unloads++;
}

/* ---- the first answers -------------------------------------------------------------------------------------------------------------- */

static const SoakPolicy *policy_of_form(unsigned form)
{
    for (size_t i = 0; i < soak_n_policies; i++)
        if (soak_policies[i].form == form)
            return &soak_policies[i];
    return NULL;
}

static void fill_answers(Soak *soak, unsigned model, unsigned form)
{
    SoakTable *table = soak->table;
    _cleanup_(freep) char *error = NULL;

    for (unsigned talk = 0; talk < SOAK_TALKS; talk++) {
        sd_bus_message *reply = soak_ask(soak->bus, model, policy_of_form(form), table->prompts[talk], table->n_prompt[talk], SOAK_ANSWER, 0, &error);

        if (!reply)
            fail_msg("the first question: %s", error);
        assert_int_equal(soak_read_ids(reply, table->answers[model][form][talk], SOAK_ANSWER), SOAK_ANSWER);
        sd_bus_message_unref(reply);
    }
    for (int kind = 0; kind < SOAK_OTHER_X_MAX; kind++)
        for (unsigned i = 0; i < SOAK_OTHERS; i++)
            if (!soak_other(soak->bus, table, (SoakOther)kind, i, model, policy_of_form(form), &table->others[kind][model][form][i], &error))
                fail_msg("the first question of kind %d: %s", kind, error);
}

/* Nobody else is there: how the cache is kept changes no answer. */
static void check_policies(const Soak *soak)
{
    const SoakTable *table = soak->table;
    _cleanup_(freep) char *error = NULL;
    uint64_t hash;

    for (unsigned model = 0; model < SOAK_MODELS; model++)
        for (size_t p = 0; p < soak_n_policies; p++)
            for (int kind = 0; kind < SOAK_OTHER_X_MAX; kind++) {
                if (!soak_other(soak->bus, table, (SoakOther)kind, 0, model, &soak_policies[p], &hash, &error))
                    fail_msg("kind %d under %s: %s", kind, soak_policies[p].strategy, error);
                if (hash != table->others[kind][model][soak_policies[p].form][0])
                    fail_msg("%s: a question of kind %d has another answer under %s", soak_models[model], kind, soak_policies[p].strategy);
            }
}

static void fill_table(Soak *soak)
{
    SoakTable *table = soak->table;

    for (unsigned talk = 0; talk < SOAK_TALKS; talk++) {
        /* Every third begins as the one before it: shared pages. */
        uint32_t n_shared = talk % 3 ? table->n_prompt[talk - 1] / 2 : 0;

        table->n_prompt[talk] = n_shared + 1 + (uint32_t)soak_random(&soak->seed, SOAK_PROMPT - n_shared);
        if (n_shared)
            memcpy(table->prompts[talk], table->prompts[talk - 1], n_shared * sizeof(int32_t));
        for (uint32_t i = n_shared; i < table->n_prompt[talk]; i++)
            table->prompts[talk][i] = (int32_t)soak_random(&soak->seed, 256);
    }
    for (unsigned model = 0; model < SOAK_MODELS; model++)
        for (unsigned form = 0; form < SOAK_FORMS; form++)
            fill_answers(soak, model, form);
    check_policies(soak);
}

/* ---- clients ------------------------------------------------------------------------------------------------------------------------ */

static void start_client(Soak *soak, size_t i)
{
    char seed[32];
    pid_t pid;

    (void)snprintf(seed, sizeof(seed), "%" PRIu64, soak_random(&soak->seed, UINT64_C(1) << 50) + 1);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (dup2(soak->table_fd, 3) == 3)
            (void)execl("/proc/self/exe", "soak-client", "soak-client", soak->harness->address, seed, (char *)NULL);
        _exit(127);
    }
    soak->clients[i] = pid;
}

/* The log's last lines belong to the failure. */
static void show_log(const Soak *soak)
{
    char command[160];

    (void)snprintf(command, sizeof(command), "tail -n 40 '%s/leatd.log' >&2", soak->harness->folder);
    (void)!system(command);
}

/* Takes note of a client that ended; false while it lives. */
static bool reap(Soak *soak, size_t i)
{
    int status;

    if (waitpid(soak->clients[i], &status, WNOHANG) == 0)
        return false;
    soak->clients[i] = 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return true;
    show_log(soak);
    fail_msg("a client ended with status %x", (unsigned)status);
    return true;
}

static void kill_client(Soak *soak, size_t i)
{
    assert_int_equal(kill(soak->clients[i], SIGKILL), 0);
    assert_int_equal(waitpid(soak->clients[i], NULL, 0), soak->clients[i]);
    soak->n_killed++;
    start_client(soak, i);
}

static void disturb(Soak *soak)
{
    switch (soak_random(&soak->seed, 8)) {
    case 0:
    case 1:
        kill_client(soak, soak_random(&soak->seed, N_CLIENTS));
        break;
    case 2:
    case 3:
        unload(soak, (unsigned)soak_random(&soak->seed, 1)); /* the second is not always there */
        break;
    case 4:
        reload(soak, (unsigned)soak_random(&soak->seed, N_VARIANTS));
        break;
    default:
        break;
    }
}

static void round_of_clients(Soak *soak, uint64_t usec)
{
    soak->table->end_usec = soak_now_usec() + usec;
    for (size_t i = 0; i < N_CLIENTS; i++)
        start_client(soak, i);
    while (soak_now_usec() < soak->table->end_usec) {
        (void)usleep(100000 + (unsigned)soak_random(&soak->seed, 600000));
        for (size_t i = 0; i < N_CLIENTS; i++)
            if (soak->clients[i] && reap(soak, i))
                assert_true(soak_now_usec() >= soak->table->end_usec);
        if (soak_now_usec() < soak->table->end_usec)
            disturb(soak);
        if (waitpid(soak->harness->daemon_pid, NULL, WNOHANG) != 0) {
            soak->harness->daemon_pid = 0;
            show_log(soak);
            fail_msg("the daemon ended");
        }
    }
    for (size_t i = 0; i < N_CLIENTS; i++)
        for (unsigned n = 0; soak->clients[i] && !reap(soak, i); n++) {
            (void)usleep(10000);
            if (n > 30000)
                fail_msg("a client does not end");
        }
    reload(soak, 0);
}

/* ---- what is left ------------------------------------------------------------------------------------------------------------------- */

static uint64_t count_entries(const char *path)
{
    DIR *folder = opendir(path);
    uint64_t n = 0;

    assert_non_null(folder);
    while (readdir(folder))
        n++;
    (void)closedir(folder);
    return n;
}

static uint64_t status_line(pid_t pid, const char *format)
{
    uint64_t value = 0;
    char path[64], line[256];
    FILE *file;

    (void)snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    assert_non_null(file = fopen(path, "r"));
    while (fgets(line, sizeof(line), file))
        if (strncmp(line, format, strlen(format)) == 0)
            value = strtoull(line + strlen(format), NULL, 10);
    (void)fclose(file);
    return value;
}

/* Mappings of our own files: a restored session's, a spilled one's. */
static uint64_t count_deleted_maps(const Soak *soak)
{
    char path[64], line[4096];
    uint64_t n = 0;
    FILE *file;

    (void)snprintf(path, sizeof(path), "/proc/%d/maps", (int)soak->harness->daemon_pid);
    assert_non_null(file = fopen(path, "r"));
    while (fgets(line, sizeof(line), file))
        n += strstr(line, "memfd:session") || strstr(line, "/spill/");
    (void)fclose(file);
    return n;
}

static uint64_t device_bytes(const Soak *soak)
{
    _cleanup_(sd_bus_message_unrefp) sd_bus_message *reply = NULL;
    uint64_t value, sum = 0;
    const char *key;

    assert_return_code(sd_bus_get_property(soak->bus, BUS_NAME, BUS_ROOT "/device/0", DEVICE, "MemoryByPurpose", NULL, &reply, "a{st}"), 0);
    assert_return_code(sd_bus_message_enter_container(reply, 'a', "{st}"), 0);
    while (sd_bus_message_read(reply, "{st}", &key, &value) > 0)
        sum += value;
    return sum;
}

static void take_footprint(const Soak *soak, Footprint *ret)
{
    char path[64];

    (void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)soak->harness->daemon_pid);
    *ret = (Footprint){.device_bytes = device_bytes(soak),
                       .n_fds = count_entries(path),
                       .n_threads = status_line(soak->harness->daemon_pid, "Threads:"),
                       .resident_bytes = status_line(soak->harness->daemon_pid, "VmRSS:") * 1024,
                       .n_deleted_maps = count_deleted_maps(soak)};
}

static bool is_same(const Footprint *a, const Footprint *b)
{
    return a->device_bytes == b->device_bytes && a->n_fds == b->n_fds && a->n_threads == b->n_threads && a->n_deleted_maps == b->n_deleted_maps;
}

/* Unloads everything and says what is left; waits for what ends in its own time, such as files being written. */
static void settle(Soak *soak, const Footprint *expected, Footprint *ret)
{
    wait_until_idle(soak->bus);
    for (unsigned model = 0; model < SOAK_MODELS; model++)
        unload(soak, model);
    take_footprint(soak, ret);
    for (unsigned n = 0; n < 1000 && (expected ? !is_same(ret, expected) : n < 100); n++) {
        (void)usleep(20000);
        take_footprint(soak, ret);
    }
}

static void assert_nothing_is_left(const Soak *soak, const Footprint *before, const Footprint *after)
{
    char command[96];

    print_message("  after %" PRIu64 " turns: device %" PRIu64 " bytes, %" PRIu64 " descriptors, %" PRIu64 " threads, %.1f MB resident\n",
                  soak->table->n_done[0], after->device_bytes, after->n_fds, after->n_threads, (double)after->resident_bytes / 1e6);
    if (is_same(before, after))
        return;
    (void)snprintf(command, sizeof(command), "ls -l /proc/%d/fd >&2", (int)soak->harness->daemon_pid);
    (void)!system(command);
    show_log(soak);
    fail_msg("device bytes %" PRIu64 " were %" PRIu64 ", descriptors %" PRIu64 " were %" PRIu64 ", threads %" PRIu64 " were %" PRIu64
             ", maps of files without name %" PRIu64 " were %" PRIu64,
             after->device_bytes, before->device_bytes, after->n_fds, before->n_fds, after->n_threads, before->n_threads, after->n_deleted_maps,
             before->n_deleted_maps);
}

/* ---- the test ----------------------------------------------------------------------------------------------------------------------- */

static void report(const Soak *soak)
{
    for (size_t i = 0; soak_action(i); i++)
        print_message("  %6" PRIu64 " %s\n", soak->table->n_done[i], soak_action(i));
    print_message("  %6u killed clients, %u reloads, %u wrong ones, %u unloads, %" PRIu64 " refused calls\n", soak->n_killed, soak->n_reloads,
                  soak->n_refused_reloads, soak->n_unloads, soak->table->n_refused);
}

static void clients_at_once_hear_what_was_said_first_and_leave_nothing(void **state)
{
    const char *given = getenv("LEAT_TEST_SEED"), *seconds = getenv("LEAT_SOAK_SECONDS");
    uint64_t total = (seconds ? strtoull(seconds, NULL, 10) : 16) * SECOND, until;
    Soak soak = {.harness = *state, .seed = given ? strtoull(given, NULL, 10) : seconds ? soak_now_usec() | 1 : SEED};
    Footprint before, after;
    char path[96];

    print_message("seed %" PRIu64 "\n", soak.seed);
    (void)snprintf(path, sizeof(path), "%s/spill", soak.harness->folder);
    assert_return_code(mkdir(path, 0700), errno);
    soak.bus = harness_connect(soak.harness, getuid());
    assert_return_code(sd_bus_set_method_call_timeout(soak.bus, 600 * SECOND), 0); /* the first questions compile, perhaps on a busy machine */
    soak.table_fd = memfd_create("table", MFD_CLOEXEC);
    assert_return_code(ftruncate(soak.table_fd, sizeof(*soak.table)), errno);
    soak.table = mmap(NULL, sizeof(*soak.table), PROT_READ | PROT_WRITE, MAP_SHARED, soak.table_fd, 0);
    assert_true(soak.table != MAP_FAILED);
    reload(&soak, 0);
    fill_table(&soak);
    settle(&soak, NULL, &before);
    assert_int_equal(before.device_bytes, 0);
    until = soak_now_usec() + total;
    do {
        uint64_t now = soak_now_usec();

        round_of_clients(&soak, MIN(ROUND_USEC, until > now ? until - now : SECOND));
        settle(&soak, &before, &after);
        assert_nothing_is_left(&soak, &before, &after);
    } while (soak_now_usec() < until);
    report(&soak);
    sd_bus_flush_close_unref(soak.bus);
    (void)munmap(soak.table, sizeof(*soak.table));
    (void)close(soak.table_fd);
}

static int setup(void **state)
{
    _cleanup_(freep) char *model = harness_source_file("tests/data/tiny-llama-tied.gguf");

    (void)setenv("LEAT_TEST_MODEL", model, 1);
    return harness_setup_real(state);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(clients_at_once_hear_what_was_said_first_and_leave_nothing)};
    int r = soak_client(argc, argv);

    if (r >= 0)
        return r;
    return cmocka_run_group_tests_name("bus-soak", tests, setup, harness_teardown);
}
