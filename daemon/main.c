/* SPDX-License-Identifier: Apache-2.0 */
/* leatd: start-up, event loop, signals, and what systemd wants to know. */

#include "daemon/bus/bus.h"
#include "quant/base/log.h"

#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <time.h>

enum {
    EXIT_USAGE = 2,
    EXIT_NO_BUS = 3,
    EXIT_CONFIG = 5,
};

typedef struct Arguments {
    bool user, print_config;
    char *config, *cache_dir, *state_dir; /* owned; NULL: the default */
    uint64_t stream_timeout_usec;
} Arguments;

typedef struct Leatd {
    Arguments arguments;
    sd_event *event;
    Config *config;
    Engine *engine;
    Bus *bus;
    sd_event_source *idle_timer;
    uint64_t watchdog_usec, last_heartbeat;
    bool ready;
} Leatd;

/* ---- arguments ----------------------------------------------------------------------------------------------------------------- */

static void print_help(FILE *file)
{
    (void)fputs("leatd [OPTION…]\n"
                "The inference daemon: serves " BUS_NAME " on the system bus, or on the session bus.\n\n"
                "  --system              on the system bus (the default)\n"
                "  --user                on the session bus, with the user's own folders\n"
                "  --config FILE         this main file, with leat.d/ and services.d/ beside it\n"
                "  --cache-dir DIR       compiled programs\n"
                "  --state-dir DIR       digests and calibrations of models\n"
                "  --stream-timeout SEC  how long a stream's reader may let it stay full (default 30)\n"
                "  --print-config        check the configuration, print what is in effect, and leave\n"
                "  --compile-program     build one program: standard input to standard output (leatd runs itself so)\n"
                "  --version, --help\n\n"
                "Status: 0 done, 1 failed, 2 usage, 3 no bus or the name is taken, 5 the configuration is invalid.\n",
                file);
}

static int copy_argument(char **to, const char *value)
{
    char *copy = strdup(value);

    if (!copy)
        return error_origin(-ENOMEM);
    free(*to);
    *to = copy;
    return 0;
}

static int parse_seconds(const char *text, uint64_t *ret_usec)
{
    char *end;
    double seconds = strtod(text, &end);

    if (end == text || *end || !(seconds > 0 && seconds <= 86400))
        return -EINVAL;
    *ret_usec = (uint64_t)(seconds * 1e6);
    return 0;
}

enum { OPTION_CONFIG = 256, OPTION_CACHE_DIR, OPTION_STATE_DIR, OPTION_STREAM_TIMEOUT, OPTION_COMPILE };
static const struct option command_line[] = {
    {"system", no_argument, NULL, 's'},
    {"user", no_argument, NULL, 'u'},
    {"config", required_argument, NULL, OPTION_CONFIG},
    {"cache-dir", required_argument, NULL, OPTION_CACHE_DIR},
    {"state-dir", required_argument, NULL, OPTION_STATE_DIR},
    {"stream-timeout", required_argument, NULL, OPTION_STREAM_TIMEOUT},
    {"print-config", no_argument, NULL, 'p'},
    {"compile-program", no_argument, NULL, OPTION_COMPILE},
    {"version", no_argument, NULL, 'v'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* 0: go on; 1: done, *ret_status is the exit status; negative errno. */
static int parse_arguments(int argc, char **argv, Arguments *arguments, int *ret_status)
{
    int option, r = 0;

    *ret_status = EXIT_SUCCESS;
    while (r == 0 && (option = getopt_long(argc, argv, "h", command_line, NULL)) >= 0) {
        switch (option) {
        case 's':
            arguments->user = false;
            break;
        case 'u':
            arguments->user = true;
            break;
        case 'p':
            arguments->print_config = true;
            break;
        case OPTION_CONFIG:
            r = copy_argument(&arguments->config, optarg);
            break;
        case OPTION_CACHE_DIR:
            r = copy_argument(&arguments->cache_dir, optarg);
            break;
        case OPTION_STATE_DIR:
            r = copy_argument(&arguments->state_dir, optarg);
            break;
        case OPTION_STREAM_TIMEOUT:
            if (parse_seconds(optarg, &arguments->stream_timeout_usec) < 0) {
                (void)fprintf(stderr, "leatd: --stream-timeout: \"%s\" is not a number of seconds above 0\n", optarg);
                *ret_status = EXIT_USAGE;
                return 1;
            }
            break;
        case OPTION_COMPILE:
            *ret_status = gpu_compiler_main(STDIN_FILENO, STDOUT_FILENO);
            return 1;
        case 'v':
            (void)puts("leatd " LEAT_VERSION);
            return 1;
        case 'h':
            print_help(stdout);
            return 1;
        default:
            *ret_status = EXIT_USAGE;
            return 1;
        }
    }
    if (r == 0 && optind < argc) {
        (void)fprintf(stderr, "leatd: unexpected argument \"%s\"\n", argv[optind]);
        *ret_status = EXIT_USAGE;
        return 1;
    }
    return r;
}

/* ---- folders ------------------------------------------------------------------------------------------------------------------- */

/* mkdir -p */
static int make_folder(const char *path)
{
    _cleanup_(freep) char *copy = strdup(path);

    if (!copy)
        return error_origin(-ENOMEM);
    for (char *slash = strchr(copy + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(copy, 0755) < 0 && errno != EEXIST)
            return error_origin(-errno);
        *slash = '/';
    }
    return mkdir(copy, 0700) < 0 && errno != EEXIST ? error_origin(-errno) : 0;
}

/* What systemd gave (the first of several); else the user's XDG folder; else the system's. */
static int default_folder(bool user, const char *systemd_variable, const char *xdg_variable, const char *home_folder, const char *system_folder,
                          char **ret)
{
    const char *given = getenv(systemd_variable), *xdg = getenv(xdg_variable), *home = getenv("HOME");
    int r;

    if (given && given[0])
        r = asprintf(ret, "%.*s", (int)strcspn(given, ":"), given);
    else if (!user)
        r = asprintf(ret, "%s", system_folder);
    else if (xdg && xdg[0] == '/')
        r = asprintf(ret, "%s/leat", xdg);
    else
        r = asprintf(ret, "%s/%s/leat", home && home[0] ? home : "/", home_folder);
    return r < 0 ? error_origin(-ENOMEM) : 0;
}

/* A folder that cannot be made is no reason not to serve: compiled programs and digests are then not kept. */
static void prepare_folder(char **folder, const char *what)
{
    int r = make_folder(*folder);

    if (r == 0 && access(*folder, W_OK) < 0)
        r = -errno;
    if (r == 0)
        return;
    log_warning("%s: %s, going on without keeping %s", *folder, strerror(-r), what);
    free(*folder);
    *folder = NULL;
}

static int prepare_folders(Arguments *arguments)
{
    bool user = arguments->user;
    int r;

    if (!arguments->cache_dir && (r = default_folder(user, "CACHE_DIRECTORY", "XDG_CACHE_HOME", ".cache", LEAT_LOCALSTATEDIR "/cache/leat",
                                                     &arguments->cache_dir)) < 0)
        return error_trace(r);
    if (!arguments->state_dir && (r = default_folder(user, "STATE_DIRECTORY", "XDG_STATE_HOME", ".local/state", LEAT_LOCALSTATEDIR "/lib/leat",
                                                     &arguments->state_dir)) < 0)
        return error_trace(r);
    prepare_folder(&arguments->cache_dir, "compiled programs");
    prepare_folder(&arguments->state_dir, "digests and calibrations");
    return 0;
}

/* The user's own main file, when there is one; else the system's. */
static int find_user_config(Arguments *arguments)
{
    _cleanup_(freep) char *folder = NULL, *file = NULL;
    int r = default_folder(true, "CONFIGURATION_DIRECTORY", "XDG_CONFIG_HOME", ".config", "", &folder);

    if (r < 0)
        return error_trace(r);
    if (asprintf(&file, "%s/leat.yaml", folder) < 0) {
        file = NULL;
        return error_origin(-ENOMEM);
    }
    if (access(file, F_OK) == 0)
        arguments->config = TAKE_PTR(file);
    return 0;
}

/* ---- configuration --------------------------------------------------------------------------------------------------------------- */

static void log_messages(const ConfigMessages *messages)
{
    for (size_t i = 0; i < messages->n; i++) {
        const ConfigMessage *message = &messages->messages[i];

        log_write(message->severity == CONFIG_ERROR ? LOG_LEVEL_ERROR : LOG_LEVEL_WARNING, "%s:%" PRIu32 ":%" PRIu32 ": %s", message->file,
                  message->line, message->column, message->text);
    }
}

/* Logs every message; *reterr is the first error. */
static int load_config(const char *path, Config **ret, ErrorDetail *reterr)
{
    _cleanup_(config_messages_clear) ConfigMessages messages = CONFIG_MESSAGES_NULL;
    int r = config_load(path, ret, &messages);

    log_messages(&messages);
    for (size_t i = 0; r < 0 && i < messages.n; i++)
        if (messages.messages[i].severity == CONFIG_ERROR)
            return error_detail_set(reterr, r, "%s:%" PRIu32 ":%" PRIu32 ": %s", messages.messages[i].file, messages.messages[i].line,
                                    messages.messages[i].column, messages.messages[i].text);
    return r < 0 ? error_detail_set(reterr, r, "cannot read the configuration: %s", strerror(-r)) : 0;
}

static uint64_t now_monotonic_usec(void)
{
    struct timespec time = {0};

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_nsec / 1000;
}

static int apply_config(Leatd *leatd, Config *config, ErrorDetail *reterr)
{
    _cleanup_(freep) EngineModel *models = NULL;
    size_t n_models;
    int r = config_engine_models(config, &models, &n_models, reterr);

    if (r < 0 || (r = engine_reconfigure(leatd->engine, models, n_models)) < 0)
        return error_trace(r);
    return bus_set_config(leatd->bus, config);
}

static void notify_status(Leatd *leatd, bool ready)
{
    EngineDeviceStatus device;

    memset(&device, 0, sizeof(device));
    engine_device_status(leatd->engine, &device);
    if (device.open)
        (void)sd_notifyf(false, "%sSTATUS=%zu models, %zu services; device: %s", ready ? "READY=1\n" : "", leatd->config->n_models,
                         leatd->config->n_services, device.info.name);
    else
        (void)sd_notifyf(false, "%sSTATUS=Waiting for a device: %s", ready ? "READY=1\n" : "", device.error.text);
}

/* systemd waits for the second READY, also when the old configuration stays (F13). */
static int reload(void *userdata, ErrorDetail *reterr)
{
    _cleanup_(config_freep) Config *config = NULL, *old = NULL;
    Leatd *leatd = userdata;
    int r;

    (void)sd_notifyf(false, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64, now_monotonic_usec());
    r = load_config(leatd->arguments.config, &config, reterr);
    if (r == 0)
        r = apply_config(leatd, config, reterr);
    if (r == 0) {
        if (config->max_queue != leatd->config->max_queue || config->n_devices != leatd->config->n_devices ||
            config->host_memory_bytes != leatd->config->host_memory_bytes)
            log_notice("scheduler.max-queue, scheduler.host-memory and devices take effect at the next start");
        old = leatd->config;
        leatd->config = TAKE_PTR(config);
        log_set_level((LogLevel)leatd->config->log_level);
        log_info("The configuration was read again");
    } else {
        log_error("The configuration was refused, the old one goes on");
        bus_set_config_failed(leatd->bus);
    }
    notify_status(leatd, true);
    return r;
}

/* ---- events ---------------------------------------------------------------------------------------------------------------------- */

static int on_stop(sd_event_source *source, const struct signalfd_siginfo *info, void *userdata)
{
    (void)userdata;
    log_info("Stopping: %s", strsignal((int)info->ssi_signo));
    (void)sd_notify(false, "STOPPING=1");
    return sd_event_exit(sd_event_source_get_event(source), EXIT_SUCCESS);
}

static int on_hangup(sd_event_source *source, const struct signalfd_siginfo *info, void *userdata)
{
    (void)source;
    (void)info;
    (void)reload(userdata, NULL); /* it has logged what is wrong */
    return 0;
}

static void on_device_changed(void *userdata)
{
    Leatd *leatd = userdata;
    bool ready = !leatd->ready;

    /* The first word on the device, good or bad; no model is loaded yet (F11), and a device may come later (F1). */
    leatd->ready = true;
    notify_status(leatd, ready);
}

/* systemd is told that we live only when the engine has moved: a driver call that never returns trips the watchdog. */
static int on_watchdog(sd_event_source *source, uint64_t usec, void *userdata)
{
    Leatd *leatd = userdata;
    uint64_t heartbeat = engine_heartbeat(leatd->engine);
    int r;

    (void)usec;
    if (heartbeat != leatd->last_heartbeat)
        (void)sd_notify(false, "WATCHDOG=1");
    leatd->last_heartbeat = heartbeat;
    if ((r = sd_event_source_set_time_relative(source, leatd->watchdog_usec / 4)) < 0)
        return error_trace(r);
    return sd_event_source_set_enabled(source, SD_EVENT_ONESHOT);
}

static int on_idle_timer(sd_event_source *source, uint64_t usec, void *userdata)
{
    Leatd *leatd = userdata;
    uint64_t limit = leatd->config->idle_exit_usec, idle = 0, again = 60 * UINT64_C(1000000);
    int r;

    (void)usec;
    if (limit != UINT64_MAX && bus_is_idle(leatd->bus, &idle)) {
        if (idle >= limit) {
            (void)sd_notify(false, "STOPPING=1");
            r = bus_release_if_idle(leatd->bus);
            if (r <= 0)
                return sd_event_exit(leatd->event, r < 0 ? EXIT_FAILURE : EXIT_SUCCESS);
            idle = 0;
        }
        again = MIN(again, limit - idle);
    } else if (limit != UINT64_MAX) {
        again = MIN(again, limit);
    }
    if ((r = sd_event_source_set_time_relative(source, MAX(again, UINT64_C(10000)))) < 0)
        return error_trace(r);
    return sd_event_source_set_enabled(source, SD_EVENT_ONESHOT);
}

static int add_events(Leatd *leatd)
{
    uint64_t usec = 0;
    int r;

    if ((r = sd_event_add_signal(leatd->event, NULL, SIGTERM, on_stop, leatd)) < 0 ||
        (r = sd_event_add_signal(leatd->event, NULL, SIGINT, on_stop, leatd)) < 0 ||
        (r = sd_event_add_signal(leatd->event, NULL, SIGHUP, on_hangup, leatd)) < 0 ||
        (r = sd_event_add_time_relative(leatd->event, &leatd->idle_timer, CLOCK_MONOTONIC, 0, 0, on_idle_timer, leatd)) < 0)
        return error_trace(r);
    r = sd_watchdog_enabled(false, &usec);
    if (r <= 0)
        return r;
    leatd->watchdog_usec = usec;
    return sd_event_add_time_relative(leatd->event, NULL, CLOCK_MONOTONIC, usec / 4, 0, on_watchdog, leatd);
}

/* ---- start ----------------------------------------------------------------------------------------------------------------------- */

static int open_engine(Leatd *leatd, ErrorDetail *reterr)
{
    _cleanup_(freep) EngineModel *models = NULL;
    EngineOptions options = {
        .gpu = {.matches = leatd->config->devices,
                .n_matches = leatd->config->n_devices,
                .cache_dir = leatd->arguments.cache_dir,
                .compiler = "/proc/self/exe"},
        .state_dir = leatd->arguments.state_dir,
        .max_queue = leatd->config->max_queue,
        .host_memory_bytes = leatd->config->host_memory_bytes,
    };
    size_t n_models;
    int r = config_engine_models(leatd->config, &models, &n_models, reterr);

    if (r < 0)
        return error_trace(r);
    options.models = models;
    options.n_models = n_models;
    return engine_new(&options, &leatd->engine, reterr);
}

/* The exit status. */
static int serve(Leatd *leatd)
{
    ErrorDetail detail = ERROR_DETAIL_NULL;
    BusOptions options = {
        .config = leatd->config,
        .config_path = leatd->arguments.config,
        .user = leatd->arguments.user,
        .stream_timeout_usec = leatd->arguments.stream_timeout_usec,
        .reload = reload,
        .device_changed = on_device_changed,
        .userdata = leatd,
    };
    int r;

    if ((r = open_engine(leatd, &detail)) < 0) {
        log_error("Cannot start the engine: %s", detail.text[0] ? detail.text : strerror(-r));
        return EXIT_FAILURE;
    }
    options.event = leatd->event;
    options.engine = leatd->engine;
    if ((r = bus_new(&options, &leatd->bus, &detail)) < 0) {
        log_error("%s", detail.text[0] ? detail.text : strerror(-r));
        return EXIT_NO_BUS;
    }
    if ((r = add_events(leatd)) < 0) {
        log_error("Cannot set up the event loop: %s", strerror(-r));
        return EXIT_FAILURE;
    }
    log_info("leatd %s serves %s on the %s bus", LEAT_VERSION, BUS_NAME, leatd->arguments.user ? "session" : "system");
    r = sd_event_loop(leatd->event);
    bus_shut_down(leatd->bus);
    if (r < 0)
        log_error("The event loop failed: %s", strerror(-r));
    return r < 0 ? EXIT_FAILURE : r;
}

/* Signals are the event loop's alone: blocked before the first thread starts, which inherits that. */
static int block_signals(void)
{
    sigset_t signals;

    (void)sigemptyset(&signals);
    (void)sigaddset(&signals, SIGTERM);
    (void)sigaddset(&signals, SIGINT);
    (void)sigaddset(&signals, SIGHUP);
    (void)signal(SIGPIPE, SIG_IGN);
    return sigprocmask(SIG_BLOCK, &signals, NULL) < 0 ? error_origin(-errno) : 0;
}

static void leatd_clear(Leatd *leatd)
{
    (void)sd_event_source_disable_unref(leatd->idle_timer);
    leatd->bus = bus_free(leatd->bus);
    leatd->engine = engine_free(leatd->engine);
    leatd->config = config_free(leatd->config);
    leatd->event = sd_event_unref(leatd->event);
    free(leatd->arguments.config);
    free(leatd->arguments.cache_dir);
    free(leatd->arguments.state_dir);
}

int main(int argc, char **argv)
{
    _cleanup_(leatd_clear) Leatd leatd = {.arguments = {.stream_timeout_usec = BUS_STREAM_TIMEOUT_USEC}};
    int status, r = parse_arguments(argc, argv, &leatd.arguments, &status);

    if (r > 0)
        return status;
    if (r == 0 && leatd.arguments.user && !leatd.arguments.config)
        r = find_user_config(&leatd.arguments);
    if (r < 0) {
        log_error("Cannot start: %s", strerror(-r));
        return EXIT_FAILURE;
    }
    if ((r = load_config(leatd.arguments.config, &leatd.config, NULL)) < 0)
        return r == -EINVAL ? EXIT_CONFIG : EXIT_FAILURE;
    log_set_level((LogLevel)leatd.config->log_level);
    if (leatd.arguments.print_config)
        return config_print(leatd.config, stdout) < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
    if ((r = prepare_folders(&leatd.arguments)) < 0 || (r = block_signals()) < 0 || (r = sd_event_new(&leatd.event)) < 0) {
        log_error("Cannot start: %s", strerror(-r));
        return EXIT_FAILURE;
    }
    return serve(&leatd);
}
