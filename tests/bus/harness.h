#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/* A private bus with a real leatd on it, and verbs to speak with it.  Every failure ends the case with a text. */

#include "quant/base/error.h"
#include "tests/lib/place.h"

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <systemd/sd-bus.h>

#define BUS_NAME  "org.leat.Inference1"
#define BUS_ROOT  "/org/leat/Inference1"
#define MANAGER   BUS_NAME ".Manager"
#define MODEL     BUS_NAME ".Model"
#define SESSION   BUS_NAME ".Session"
#define JOB       BUS_NAME ".Job"
#define DEVICE    BUS_NAME ".Device"
#define SERVICE   BUS_NAME ".Service"
#define ERROR(x)  BUS_NAME ".Error." x
/* A model's path: names of these tests need no encoding. */
#define MODEL_PATH(name)   BUS_ROOT "/model/" name
#define SERVICE_PATH(name) BUS_ROOT "/service/" name

typedef struct Harness {
    char folder[TEST_FOLDER_SIZE], address[128], config[96];
    pid_t bus_pid, daemon_pid;
    const char *notify; /* the next daemon's NOTIFY_SOCKET, with a watchdog of 400 ms; or NULL */
    bool fake;   /* tests/bus/fake-engine.c instead of the engine */
    bool system; /* a system bus with the policy of packaging/dbus */
} Harness;

/* CMocka group fixtures.  The real one needs LEAT_TEST_MODEL, the path of a GGUF file. */
int harness_setup_fake(void **state);
int harness_setup_real(void **state);
int harness_setup_system(void **state); /* fake, on a system bus */
int harness_teardown(void **state);
/* A file of this repository, by its path from the top; the caller frees. */
char *harness_source_file(const char *path);
/* The configuration file's content; daemons read it at the next reload. */
void harness_write_config(const Harness *harness, const char *extra);
/* Ends the daemon with SIGTERM and returns its exit status. */
int harness_stop_daemon(Harness *harness);
/* Waits until it ends by itself. */
int harness_wait_daemon(Harness *harness);
void harness_start_daemon(Harness *harness);
/* Runs leatd with @arguments ("--config", …, NULL) on this bus until it ends; its exit status. */
int harness_run_daemon(const Harness *harness, const char *const *arguments);

/* A connection of its own; as another user when @uid is not ours (the caller must be root). */
sd_bus *harness_connect(const Harness *harness, uid_t uid);

/* ---- verbs: @types and arguments as sd_bus_message_append() takes them ---------------------------------------------------------- */

sd_bus_message *call_ok(sd_bus *bus, const char *path, const char *interface, const char *member, const char *types, ...);
/* The call must fail with @error; *ret_text (may be NULL) gets its text, which the caller frees. */
void call_fails(sd_bus *bus, const char *error, char **ret_text, const char *path, const char *interface, const char *member, const char *types,
                ...);
uint32_t get_u32(sd_bus *bus, const char *path, const char *interface, const char *property);
char *get_text(sd_bus *bus, const char *path, const char *interface, const char *property);
/* Kernel launches since the device was opened. */
uint64_t get_launches(sd_bus *bus);
/* Waits until no job is left. */
void wait_until_idle(sd_bus *bus);

char *open_session(sd_bus *bus, const char *model);
/* Starts a generation of @prompt as one user message; exactly @max_tokens (0: no end).  *ret_fd is the stream; returns the job's path. */
char *generate(sd_bus *bus, const char *session, const char *prompt, uint32_t max_tokens, bool want_ids, int *ret_fd);

/* What a stream said until its end. */
typedef struct Heard {
    char kinds[4096]; /* of the frames in order, repeats once */
    char *text;
    size_t n_text_bytes, n_frames;
    uint32_t n_ids, usage_output_tokens, usage_prompt_tokens;
    int32_t ids[64]; /* the first of them */
    char reason[32], error[96], error_text[480];
    bool ended; /* D or X was seen before the end of the stream */
} Heard;
/* Reads until the end, at most @seconds. */
void stream_hear(int fd, unsigned seconds, Heard *ret);
/* Reads frames until @n tokens' ids or @n text frames have been heard. */
void stream_hear_some(int fd, unsigned seconds, uint32_t n, Heard *ret);
void heard_clear(Heard *heard);

/* Remembers the Finished signals of a connection. */
typedef struct Finished {
    char job[96], result[96];
    unsigned n;
} Finished;
void finished_watch(sd_bus *bus, Finished *ret);
/* Processes the connection until a Finished of @job came, at most @seconds. */
void finished_wait(sd_bus *bus, Finished *finished, const char *job, unsigned seconds);
