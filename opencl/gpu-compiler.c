/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiling in a child process.  A compiler inside the daemon costs 100 to 250 MB that never come back, and LLVM may
 * abort; in a child both end with the child.
 *
 * The job is a sealed-off memory file on the child's stdin, so that a child that dies cannot block or signal the parent;
 * the reply comes through a pipe.  Both are a header and byte strings in the order of the header; parent and child are
 * the same executable, so numbers are in host order.
 *
 *   job:    "leatjob1"  platform, device, options, text
 *   reply:  "leatclb1"  status, log, binary
 */

#include "opencl/gpu-internal.h"
#include "quant/base/file.h"
#include "quant/base/log.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/pidfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define EXIT_USEC      UINT64_C(5000000)
#define JOB_PART_MAX   (UINT64_C(16) << 20)
#define REPLY_PART_MAX (UINT64_C(256) << 20)

typedef struct JobHeader {
    char magic[8];
    uint64_t platform_bytes, device_bytes, options_bytes, text_bytes;
} JobHeader;

typedef struct ReplyHeader {
    char magic[8];
    int64_t status; /* 0, or GPU_E_… or a negative errno */
    uint64_t log_bytes, binary_bytes;
} ReplyHeader;

static const char job_magic[8] = {'l', 'e', 'a', 't', 'j', 'o', 'b', '1'};
static const char reply_magic[8] = {'l', 'e', 'a', 't', 'c', 'l', 'b', '1'};

/* ---- parent ------------------------------------------------------------------------------------------------------ */

static int job_file(const Gpu *gpu, const char *text, const char *options, int *ret)
{
    const char *const parts[] = {gpu->info.platform, gpu->info.name, options, text};
    JobHeader header = {.platform_bytes = strlen(parts[0]),
                        .device_bytes = strlen(parts[1]),
                        .options_bytes = strlen(parts[2]),
                        .text_bytes = strlen(parts[3])};
    _cleanup_(close_fdp) int fd = memfd_create("leat-compile", MFD_CLOEXEC);
    int r;

    if (fd < 0)
        return error_origin(-errno);
    memcpy(header.magic, job_magic, sizeof(header.magic));
    r = file_write(fd, &header, sizeof(header));
    for (size_t i = 0; i < N_ELEMENTS(parts) && !r; i++)
        r = file_write(fd, parts[i], strlen(parts[i]));
    if (!r && lseek(fd, 0, SEEK_SET) < 0)
        r = -errno;
    if (r)
        return error_origin(r);
    *ret = TAKE_FD(fd);
    return 0;
}

/* The daemon's threads block signals that a child must not inherit as blocked. */
static int spawn(const char *compiler, int job_fd, int reply_fd, pid_t *ret)
{
    char *const arguments[] = {(char *)(uintptr_t)compiler, (char *)(uintptr_t)"--compile-program", NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none, usual;
    int r;

    (void)sigemptyset(&none);
    (void)sigemptyset(&usual);
    (void)sigaddset(&usual, SIGPIPE);
    (void)sigaddset(&usual, SIGALRM);
    (void)posix_spawn_file_actions_init(&actions);
    (void)posix_spawnattr_init(&attributes);
    r = posix_spawn_file_actions_adddup2(&actions, job_fd, STDIN_FILENO);
    if (!r)
        r = posix_spawn_file_actions_adddup2(&actions, reply_fd, STDOUT_FILENO);
    if (!r)
        r = posix_spawnattr_setsigmask(&attributes, &none);
    if (!r)
        r = posix_spawnattr_setsigdefault(&attributes, &usual);
    if (!r)
        r = posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    if (!r)
        r = posix_spawn(ret, compiler, &actions, &attributes, arguments, environ);
    (void)posix_spawnattr_destroy(&attributes);
    (void)posix_spawn_file_actions_destroy(&actions);
    return r ? -r : 0;
}

static int wait_readable(int fd, uint64_t deadline_usec)
{
    struct pollfd item = {.fd = fd, .events = POLLIN};
    int n;

    do {
        uint64_t now = gpu_now_usec();

        if (now >= deadline_usec)
            return -ETIMEDOUT;
        n = poll(&item, 1, (int)((deadline_usec - now) / 1000 + 1));
    } while (n == 0 || (n < 0 && errno == EINTR));
    return n < 0 ? -errno : 0;
}

static int read_until(int fd, void *to, size_t size, uint64_t deadline_usec)
{
    for (char *at = to; size > 0;) {
        ssize_t n;
        int r = wait_readable(fd, deadline_usec);

        if (r)
            return r;
        n = read(fd, at, size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n < 0 ? -errno : -EPIPE;
        at += n;
        size -= (size_t)n;
    }
    return 0;
}

typedef struct Reply {
    int64_t status;
    char *log;
    GpuBinary binary;
} Reply;

static void reply_deinit(Reply *reply)
{
    free(reply->log);
    gpu_binary_deinit(&reply->binary);
}

static int read_reply(int fd, uint64_t deadline_usec, Reply *reply)
{
    ReplyHeader header;
    int r = read_until(fd, &header, sizeof(header), deadline_usec);

    if (r)
        return r;
    if (memcmp(header.magic, reply_magic, sizeof(reply_magic)) != 0 || header.log_bytes > REPLY_PART_MAX ||
        header.binary_bytes > REPLY_PART_MAX)
        return -EBADMSG;
    reply->status = header.status;
    reply->log = calloc(1, header.log_bytes + 1);
    reply->binary.bytes = malloc(header.binary_bytes + 1);
    if (!reply->log || !reply->binary.bytes)
        return error_origin(-ENOMEM);
    reply->binary.n_bytes = header.binary_bytes;
    r = read_until(fd, reply->log, header.log_bytes, deadline_usec);
    if (!r)
        r = read_until(fd, reply->binary.bytes, header.binary_bytes, deadline_usec);
    return r;
}

/* Ends the child, at once when @now, and says how it ended; -1 when somebody else has reaped it. */
static int reap(pid_t pid, bool now)
{
    _cleanup_(close_fdp) int pidfd = now ? -1 : pidfd_open(pid, 0);
    int status = -1;

    if (pidfd < 0 || wait_readable(pidfd, gpu_now_usec() + EXIT_USEC))
        (void)kill(pid, SIGKILL);
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return status;
}

static int child_failed(const Gpu *gpu, int r, int status, ErrorDetail *reterr)
{
    const char *compiler = gpu->compiler;

    if (r == -ETIMEDOUT)
        return error_detail_set(reterr, GPU_E_BUILD_FAILED, "the compiler '%s' did not end within %" PRIu64 " ms",
                                compiler, gpu->compile_usec / 1000);
    if (status != -1 && WIFSIGNALED(status))
        return error_detail_set(reterr, GPU_E_BUILD_FAILED, "the compiler '%s' died of signal %d (SIG%s)", compiler,
                                WTERMSIG(status), sigabbrev_np(WTERMSIG(status)) ?: "?");
    if (status != -1 && WIFEXITED(status))
        return error_detail_set(reterr, GPU_E_BUILD_FAILED, "the compiler '%s' exited with status %d and no program",
                                compiler, WEXITSTATUS(status));
    return error_detail_set(reterr, GPU_E_BUILD_FAILED, "the compiler '%s' gave no program: %s", compiler, strerror(-r));
}

int gpu_compile_in_child(Gpu *gpu, const char *text, const char *options, GpuBinary *ret, char **ret_log,
                         ErrorDetail *reterr)
{
    uint64_t deadline_usec = gpu_now_usec() + gpu->compile_usec;
    _cleanup_(close_fdp) int job_fd = -1, read_fd = -1, write_fd = -1;
    _cleanup_(reply_deinit) Reply reply = {0};
    int pipe_fds[2], r, status;
    pid_t pid;

    r = job_file(gpu, text, options, &job_fd);
    if (r)
        return error_trace(r);
    if (pipe2(pipe_fds, O_CLOEXEC) < 0)
        return error_origin(-errno);
    read_fd = pipe_fds[0];
    write_fd = pipe_fds[1];
    r = spawn(gpu->compiler, job_fd, write_fd, &pid);
    if (r)
        return error_detail_set(reterr, GPU_E_BUILD_FAILED, "cannot start the compiler '%s': %s", gpu->compiler, strerror(-r));
    (void)close(TAKE_FD(write_fd));
    r = read_reply(read_fd, deadline_usec, &reply);
    /* Once the reply is here nobody needs the child; without one its own end is the best explanation. */
    status = reap(pid, r == 0 || r == -ETIMEDOUT);
    if (r == -ENOMEM)
        return error_trace(r);
    if (r)
        return child_failed(gpu, r, status, reterr);
    *ret_log = TAKE_PTR(reply.log);
    if (reply.status != 0)
        return error_origin(GPU_E_BUILD_FAILED);
    *ret = reply.binary;
    reply.binary = (GpuBinary){0};
    return 0;
}

/* ---- child ------------------------------------------------------------------------------------------------------- */

typedef struct Job {
    char *platform, *device, *options, *text;
} Job;

static void job_deinit(Job *job)
{
    free(job->platform);
    free(job->device);
    free(job->options);
    free(job->text);
}

static int read_part(int fd, uint64_t size, char **ret)
{
    if (size > JOB_PART_MAX)
        return error_origin(-EBADMSG);
    *ret = calloc(1, size + 1);
    return *ret ? file_read(fd, *ret, size) : error_origin(-ENOMEM);
}

static int read_job(int fd, Job *job)
{
    JobHeader header;
    int r = file_read(fd, &header, sizeof(header));

    if (!r && memcmp(header.magic, job_magic, sizeof(job_magic)) != 0)
        r = -EBADMSG;
    if (!r)
        r = read_part(fd, header.platform_bytes, &job->platform);
    if (!r)
        r = read_part(fd, header.device_bytes, &job->device);
    if (!r)
        r = read_part(fd, header.options_bytes, &job->options);
    if (!r)
        r = read_part(fd, header.text_bytes, &job->text);
    return r;
}

static int do_job(const Job *job, GpuBinary *ret, char **ret_log)
{
    cl_platform_id platform;
    cl_program program;
    cl_device_id device;
    cl_context context;
    cl_int status;
    int r = gpu_find_device(job->platform, job->device, &platform, &device);

    if (r) {
        *ret_log = strdup("the compiler process does not find the device");
        return error_trace(r);
    }
    context = clCreateContext((cl_context_properties[]){CL_CONTEXT_PLATFORM, (cl_context_properties)platform, 0}, 1, &device,
                              NULL, NULL, &status);
    if (status != CL_SUCCESS) {
        *ret_log = strdup(gpu_cl_text(status));
        return error_origin(-EIO);
    }
    r = gpu_build_source(context, device, job->text, job->options, &program, ret_log);
    if (r)
        return r;
    /* The process ends in a moment: neither the program nor the context is worth the time of releasing it. */
    return gpu_program_binary(program, ret);
}

/* PoCL compiles a kernel anew for each local size at its first launch, and in a binary it keeps only a general variant,
 * unless told: then the variant that our kernels run as on a CPU device (groups of one work-item, a range below 2^16) is
 * in the binary, and the daemon's first launch takes 0.2 ms and no LLVM instead of 60 to 110 ms. */
#define POCL_VARIANTS "1-1-1-goffs0-smallgrid"

int gpu_compiler_main(int in_fd, int out_fd)
{
    _cleanup_(job_deinit) Job job = {0};
    _cleanup_(gpu_binary_deinit) GpuBinary binary = {0};
    _cleanup_(freep) char *log = NULL;
    _cleanup_(close_fdp) int reply_fd = fcntl(out_fd, F_DUPFD_CLOEXEC, 3);
    ReplyHeader header = {0};
    int r;

    if (reply_fd < 0)
        return EXIT_FAILURE;
    /* What a driver prints must not end up in the reply. */
    if (out_fd == STDOUT_FILENO)
        (void)dup2(STDERR_FILENO, STDOUT_FILENO);
    (void)setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    (void)setenv("POCL_BINARY_SPECIALIZE_WG", POCL_VARIANTS, 0);
    (void)alarm(GPU_COMPILE_SECONDS); /* should the parent be gone */
    r = read_job(in_fd, &job);
    if (r)
        return EXIT_FAILURE;
    r = do_job(&job, &binary, &log);
    memcpy(header.magic, reply_magic, sizeof(header.magic));
    header.status = r;
    header.log_bytes = log ? strlen(log) : 0;
    header.binary_bytes = r ? 0 : binary.n_bytes;
    r = file_write(reply_fd, &header, sizeof(header));
    if (!r)
        r = file_write(reply_fd, log ? log : "", header.log_bytes);
    if (!r)
        r = file_write(reply_fd, binary.bytes, header.binary_bytes);
    return r ? EXIT_FAILURE : EXIT_SUCCESS;
}
