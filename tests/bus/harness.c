/* SPDX-License-Identifier: Apache-2.0 */
/* The harness of bus tests: processes and connections. */

#include "tests/bus/harness.h"

#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <cmocka.h>

static const char bus_config[] = "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN\"\n"
                                 " \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\n"
                                 "<busconfig><type>session</type><listen>unix:path=%s/bus</listen><auth>EXTERNAL</auth>\n"
                                 "<policy context=\"default\"><allow user=\"*\"/><allow own=\"*\"/><allow send_destination=\"*\" eavesdrop=\"true\"/>\n"
                                 "<allow receive_sender=\"*\"/></policy></busconfig>\n";

/* As /usr/share/dbus-1/system.conf has it: nothing is allowed but what a service's own file allows. */
static const char system_bus_config[] =
    "<!DOCTYPE busconfig PUBLIC \"-//freedesktop//DTD D-BUS Bus Configuration 1.0//EN\"\n"
    " \"http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd\">\n"
    "<busconfig><type>system</type><listen>unix:path=%s/bus</listen><auth>EXTERNAL</auth>\n"
    "<policy context=\"default\"><allow user=\"*\"/><deny own=\"*\"/><deny send_type=\"method_call\"/><allow send_type=\"signal\"/>\n"
    "<allow send_requested_reply=\"true\" send_type=\"method_return\"/><allow send_requested_reply=\"true\" send_type=\"error\"/>\n"
    "<allow receive_type=\"method_call\"/><allow receive_type=\"method_return\"/><allow receive_type=\"error\"/>"
    "<allow receive_type=\"signal\"/>\n"
    "<allow send_destination=\"org.freedesktop.DBus\" send_interface=\"org.freedesktop.DBus\"/></policy>\n"
    "<include>%s</include></busconfig>\n";

static void write_file(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");

    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* The path of this program's folder. */
static void own_folder(char *ret, size_t size)
{
    ssize_t n = readlink("/proc/self/exe", ret, size - 1);

    assert_true(n > 0);
    ret[n] = 0;
    *strrchr(ret, '/') = 0;
}

char *harness_source_file(const char *path)
{
    char folder[512], *file = NULL, *slash;

    own_folder(folder, sizeof(folder));
    while ((slash = strrchr(folder, '/'))) {
        *slash = 0;
        assert_true(asprintf(&file, "%s/%s", folder, path) > 0);
        if (access(file, R_OK) == 0)
            return file;
        free(file);
    }
    fail_msg("%s is not above the test program", path);
    return NULL;
}

/* A child that dies with us, with standard error in FOLDER/@log.  @pipe_fd (or -1) becomes its descriptor 3. */
static pid_t start(const Harness *harness, const char *log, char *const *arguments, int pipe_fd)
{
    pid_t pid = fork();
    char path[128];
    int fd;

    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)snprintf(path, sizeof(path), "%s/%s", harness->folder, log);
    fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || dup2(fd, STDERR_FILENO) < 0 || dup2(fd, STDOUT_FILENO) < 0 || (pipe_fd >= 0 && dup2(pipe_fd, 3) < 0))
        _exit(126);
    (void)setenv(harness->system ? "DBUS_SYSTEM_BUS_ADDRESS" : "DBUS_SESSION_BUS_ADDRESS", harness->address, 1);
    /* LLVM inside a driver puts a signal stack of its own in place, which the sanitizer then cannot free. */
    (void)setenv("ASAN_OPTIONS", "use_sigaltstack=0", 0);
    (void)setenv("XDG_RUNTIME_DIR", harness->folder, 1);
    if (harness->notify) {
        (void)setenv("NOTIFY_SOCKET", harness->notify, 1);
        (void)setenv("WATCHDOG_USEC", "400000", 1);
    }
    (void)execvp(arguments[0], arguments);
    _exit(127);
}

static void start_bus(Harness *harness)
{
    _cleanup_(freep) char *policy = harness_source_file("packaging/dbus/org.leat.Inference1.conf");
    char config[128], text[4096], address[256];
    char *arguments[] = {(char[]){"dbus-daemon"}, (char[]){"--nofork"}, (char[]){"--print-address=3"}, NULL, NULL};
    char option[160];
    int ends[2];

    (void)snprintf(config, sizeof(config), "%s/bus.conf", harness->folder);
    if (harness->system)
        (void)snprintf(text, sizeof(text), system_bus_config, harness->folder, policy);
    else
        (void)snprintf(text, sizeof(text), bus_config, harness->folder);
    write_file(config, text);
    (void)snprintf(option, sizeof(option), "--config-file=%s", config);
    arguments[3] = option;
    assert_int_equal(pipe2(ends, O_CLOEXEC), 0);
    harness->bus_pid = start(harness, "bus.log", arguments, ends[1]);
    (void)close(ends[1]);
    if (read(ends[0], address, sizeof(address)) <= 0)
        fail_msg("dbus-daemon did not start");
    (void)close(ends[0]);
    (void)snprintf(harness->address, sizeof(harness->address), "unix:path=%s/bus", harness->folder);
}

void harness_write_config(const Harness *harness, const char *extra)
{
    const char *model = harness->fake ? "/nonexistent/fake.gguf" : getenv("LEAT_TEST_MODEL");
    char text[4096];

    (void)snprintf(text, sizeof(text),
                   "version: 1\n"
                   "store: {path: %s/models}\n"
                   "models:\n"
                   "  test: {file: \"%s\", aliases: [small], context: 2048, parameters: {temperature: 0},\n"
                   "         cache: {quant: {nbits_key: 5, nbits_value: 4}}}\n" /* given: the first load has nothing to measure */
                   "  corrupt: {file: \"%s/corrupt.gguf\"}\n"
                   "%s",
                   harness->folder, model, harness->folder, extra);
    write_file(harness->config, text);
}

static void daemon_path(const Harness *harness, char *ret, size_t size)
{
    char folder[512];

    own_folder(folder, sizeof(folder));
    (void)snprintf(ret, size, "%s/%s", folder, harness->fake ? "leatd-fake" : "../../leatd");
}

static bool name_has_owner(sd_bus *bus)
{
    _cleanup_(sd_bus_creds_unrefp) sd_bus_creds *creds = NULL;

    return sd_bus_get_name_creds(bus, BUS_NAME, 0, &creds) >= 0;
}

void harness_start_daemon(Harness *harness)
{
    _cleanup_(sd_bus_flush_close_unrefp) sd_bus *bus = harness_connect(harness, getuid());
    const char *shared = getenv("LEAT_TEST_CACHE"); /* compiled kernels */
    char program[600], cache[512], state[128], bus_option[16];
    char *arguments[] = {program,          bus_option, (char[]){"--config"},         harness->config, (char[]){"--cache-dir"}, cache,
                         (char[]){"--state-dir"}, state,       (char[]){"--stream-timeout"}, (char[]){"1"},   NULL};

    daemon_path(harness, program, sizeof(program));
    (void)snprintf(bus_option, sizeof(bus_option), "--%s", harness->system ? "system" : "user");
    (void)snprintf(cache, sizeof(cache), "%s%s", shared ? shared : harness->folder, shared ? "" : "/cache");
    (void)snprintf(state, sizeof(state), "%s/state", harness->folder);
    harness->daemon_pid = start(harness, "leatd.log", arguments, -1);
    for (unsigned i = 0; !name_has_owner(bus); i++) {
        if (i == 3000 || waitpid(harness->daemon_pid, NULL, WNOHANG) != 0) {
            harness->daemon_pid = 0;
            (void)fprintf(stderr, "see %s/leatd.log\n", harness->folder);
            fail_msg("%s does not take its name", program);
        }
        (void)usleep(10000);
    }
}

int harness_run_daemon(const Harness *harness, const char *const *arguments)
{
    char program[600], *all[16] = {program};
    int status;

    daemon_path(harness, program, sizeof(program));
    for (size_t i = 0; arguments[i]; i++) {
        assert_true(i + 2 < N_ELEMENTS(all));
        all[i + 1] = (char *)(uintptr_t)arguments[i];
    }
    assert_true(waitpid(start(harness, "other.log", all, -1), &status, 0) > 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int stop(pid_t *pid)
{
    int status = 0;

    if (*pid <= 0)
        return 0;
    (void)kill(*pid, SIGTERM);
    (void)waitpid(*pid, &status, 0);
    *pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int harness_stop_daemon(Harness *harness)
{
    return stop(&harness->daemon_pid);
}

int harness_wait_daemon(Harness *harness)
{
    int status = 0;

    for (unsigned i = 0; waitpid(harness->daemon_pid, &status, WNOHANG) == 0; i++) {
        if (i == 3000)
            fail_msg("the daemon does not end");
        (void)usleep(10000);
    }
    harness->daemon_pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static int setup(void **state, bool fake, bool system_bus)
{
    Harness *harness = calloc(1, sizeof(*harness));
    char models[128], corrupt[128];

    assert_non_null(harness);
    harness->fake = fake;
    harness->system = system_bus;
    if (!fake && !test_model_path()) {
        free(harness);
        return -1;
    }
    assert_int_equal(test_folder_new(harness->folder), 0);
    assert_int_equal(chmod(harness->folder, 0755), 0); /* another user must reach the bus */
    (void)snprintf(harness->config, sizeof(harness->config), "%s/leat.yaml", harness->folder);
    (void)snprintf(models, sizeof(models), "%s/models", harness->folder);
    (void)mkdir(models, 0700);
    (void)snprintf(corrupt, sizeof(corrupt), "%s/corrupt.gguf", harness->folder);
    write_file(corrupt, "<html>not a model</html>\n");
    (void)snprintf(models, sizeof(models), "%s/services.d", harness->folder);
    (void)mkdir(models, 0700);
    (void)snprintf(models, sizeof(models), "%s/services.d/echo.yaml", harness->folder);
    write_file(models, "name: echo\ndescription: says it again\nmodel: test\nsystem: Repeat.\nprompt: \"Say {{word}}.\"\n"
                       "inputs:\n  word: {required: true, max-size: 64}\nparameters: {max-tokens: 8}\npriority: background\n");
    harness_write_config(harness, "");
    start_bus(harness);
    harness_start_daemon(harness);
    *state = harness;
    return 0;
}

int harness_setup_fake(void **state)
{
    return setup(state, true, false);
}

int harness_setup_real(void **state)
{
    return setup(state, false, false);
}

int harness_setup_system(void **state)
{
    return setup(state, true, true);
}

int harness_teardown(void **state)
{
    Harness *harness = *state;
    char command[160];
    int status;

    if (!harness) /* the setup failed */
        return -1;
    status = harness_stop_daemon(harness);

    (void)stop(&harness->bus_pid);
    (void)snprintf(command, sizeof(command), "cat '%s/leatd.log'", harness->folder);
    if (status != 0) {
        (void)fprintf(stderr, "leatd ended with %d:\n", status);
        (void)!system(command);
    }
    (void)test_folder_remove(harness->folder);
    free(harness);
    return status;
}

sd_bus *harness_connect(const Harness *harness, uid_t uid)
{
    uid_t own = geteuid();
    sd_bus *bus = NULL;
    const char *name;

    assert_return_code(sd_bus_new(&bus), 0);
    assert_return_code(sd_bus_set_address(bus, harness->address), 0);
    assert_return_code(sd_bus_set_bus_client(bus, true), 0);
    assert_return_code(sd_bus_negotiate_fds(bus, true), 0);
    /* The bus asks the kernel who connects. */
    if (uid != own)
        assert_return_code(seteuid(uid), errno);
    assert_return_code(sd_bus_start(bus), 0);
    assert_return_code(sd_bus_get_unique_name(bus, &name), 0);
    if (uid != own)
        assert_return_code(seteuid(own), errno);
    assert_return_code(sd_bus_set_method_call_timeout(bus, UINT64_C(300) * 1000000), 0);
    return bus;
}
