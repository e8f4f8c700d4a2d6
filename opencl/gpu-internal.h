#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of the device: what opencl/gpu*.c share.  The only header with OpenCL types; no cl_int leaves opencl/.
 *
 *   gpu-cl.c       status names and texts, CL_TRY, losing the device
 *   gpu-choice.c   which device, and why
 *   gpu-device.c   opening, self-test, SIMD probe, closing
 *   gpu-memory.c   budgeted buffers
 *   gpu-queue.c    commands, events, copies
 *   gpu-step.c     waiting with a deadline, checking what has completed
 *   gpu-program.c  programs: text, key, where they come from
 *   gpu-cache.c    program binaries on disk
 *   gpu-compiler.c the child process that compiles
 *   gpu-kernel.c   kernels, launch
 *   gpu-trace.c    timeline and overlap
 */

#include "opencl/gpu.h"

#include <CL/cl.h>
#include <CL/cl_ext.h>
#include <pthread.h>
#include <stdatomic.h>

#define GPU_KEY_BYTES       32
#define GPU_KERNEL_ARGS_MAX 64
/* A large program takes 15 s on a busy machine with two cores. */
#define GPU_COMPILE_SECONDS 120

/* ---- commands ---------------------------------------------------------------------------------------------------- */

typedef enum GpuCommandKind {
    GPU_COMMAND_KERNEL,
    GPU_COMMAND_UPLOAD,
    GPU_COMMAND_DOWNLOAD,
    GPU_COMMAND_COPY,
    GPU_COMMAND_FILL,
} GpuCommandKind;

/* One enqueued command.  Recycled through Gpu.free_events; only the engine thread counts references. */
struct GpuEvent {
    Gpu *gpu;
    GpuEvent *next_free;
    cl_event cl;
    uint32_t n_refs;
    GpuQueue queue;
    GpuCommandKind kind;
    bool complete;     /* seen complete and checked */
    uint64_t sequence; /* over all queues, from 1 */
    const char *label; /* static, or interned in the Gpu */
    uint64_t bytes;
};

#define GPU_EVENT_BLOCK 256
typedef struct GpuEventBlock GpuEventBlock;
struct GpuEventBlock {
    GpuEventBlock *next;
    GpuEvent events[GPU_EVENT_BLOCK];
};

/* What a driver callback posts to.  Counted, because a callback may come after a wait has given up. */
typedef struct GpuSignal {
    atomic_uint n_refs;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t n_posted;
} GpuSignal;

/* ---- timeline ---------------------------------------------------------------------------------------------------- */

typedef struct GpuRecord {
    const char *label;
    uint64_t start_nsec, end_nsec, bytes;
    GpuQueue queue;
    GpuCommandKind kind;
} GpuRecord;

typedef struct GpuInterval {
    uint64_t start, end; /* nsec */
} GpuInterval;

typedef enum GpuLane { GPU_LANE_KERNEL, GPU_LANE_UPLOAD, GPU_LANE_DOWNLOAD, GPU_LANE_X_MAX } GpuLane;

/* Disjoint intervals in order of time; what lies before the watermark is folded into the sums. */
typedef struct GpuIntervals {
    GpuInterval *items;
    size_t n_items, n_allocated;
    uint64_t noted_until; /* end of the newest */
    uint64_t total_nsec, overlap_nsec, bytes;
} GpuIntervals;

typedef struct GpuTrace {
    bool tracing, summing;
    uint64_t trace_from, sum_from; /* commands with a larger sequence take part */
    GpuRecord *records;
    size_t n_records, n_allocated;
    uint64_t n_dropped;
    /* By queue, because only within a queue commands run in order. */
    GpuIntervals lanes[GPU_QUEUE_X_MAX][GPU_LANE_X_MAX];
    uint64_t last_end[GPU_QUEUE_X_MAX];
} GpuTrace;

/* ---- the device -------------------------------------------------------------------------------------------------- */

typedef struct GpuName GpuName;
struct GpuName {
    GpuName *next;
    char text[];
};

struct GpuProgram {
    Gpu *gpu;
    GpuProgram *next;
    unsigned char key[GPU_KEY_BYTES];
    cl_program cl;
};

struct GpuKernel {
    Gpu *gpu;
    cl_kernel cl;
    const char *name; /* interned */
    size_t max_work_group;
    uint64_t own_local_bytes; /* declared in the kernel */
    uint64_t local_bytes[GPU_KERNEL_ARGS_MAX];
};

struct GpuBuffer {
    Gpu *gpu;
    cl_mem cl;
    uint64_t bytes;
    GpuPurpose purpose;
    bool wrapped;
};

struct Gpu {
    GpuInfo info;
    cl_platform_id platform;
    cl_device_id device;
    cl_context context;
    cl_command_queue queues[GPU_QUEUE_X_MAX];
    char platform_version[128];

    atomic_bool lost;
    bool hung; /* a driver call may never return: handles are abandoned, not released */
    char lost_text[320];

    GpuSignal *signal;
    uint64_t n_expected; /* posts asked for */

    GpuEventBlock *event_blocks;
    GpuEvent *free_events;
    GpuEvent **pending; /* enqueued, not yet seen complete; in order of enqueuing */
    size_t n_pending, n_pending_allocated, sweep_at;
    GpuEvent *last[GPU_QUEUE_X_MAX]; /* newest command of each queue */
    GpuEvent *last_input;            /* newest upload on the compute queue */
    uint64_t sequence, flushed[GPU_QUEUE_X_MAX]; /* sequence of the newest command known to be submitted */
    cl_event *waits;                             /* scratch of one enqueue */
    size_t n_waits_allocated;

    _Atomic uint64_t used[GPU_PURPOSE_X_MAX];
    _Atomic uint64_t budget;
    GpuCounters counters;

    char *cache_dir, *compiler;
    uint64_t compile_usec; /* how long the compiler may take */
    uint64_t deadline_usec; /* how long a wait may take */
    GpuProgram *programs;
    GpuName *names;

    GpuTrace trace;
};

/* ---- gpu-cl.c ---------------------------------------------------------------------------------------------------- */

/* "CL_OUT_OF_RESOURCES", or "CL_UNKNOWN_STATUS"; and one clause that says what it means. */
const char *gpu_cl_name(cl_int status);
const char *gpu_cl_text(cl_int status);
/* Whether a driver says with @status that an allocation does not fit. */
bool gpu_cl_is_refusal(cl_int status);
/* 0, or a negative errno after noting the failure; marks @gpu (may be NULL) lost. */
int gpu_cl_check(Gpu *gpu, cl_int status, const char *call, const char *file, int line, const char *function);

#define CL_TRY(gpu, call)           gpu_cl_check((gpu), (call), #call, __FILE__, __LINE__, __func__)
#define CL_CHECK(gpu, status, call) gpu_cl_check((gpu), (status), (call), __FILE__, __LINE__, __func__)

/* Marks the device lost, the first text stays, and waits for what is in flight: it uses memory that callers will now give back. */
void gpu_lose(Gpu *gpu, const char *format, ...) _printf_(2, 3);
/* -ENODEV with the reason. */
int gpu_refuse_lost(Gpu *gpu, ErrorDetail *reterr);

/* ---- gpu-choice.c ------------------------------------------------------------------------------------------------ */

/* Devices that were tried and failed to open, with the reason; gpu_choose() passes over them. */
#define GPU_REFUSALS_MAX 8
typedef struct GpuRefusals {
    cl_device_id devices[GPU_REFUSALS_MAX];
    char reasons[GPU_REFUSALS_MAX][160];
    size_t n;
} GpuRefusals;

/* The device that the configuration prefers; fills platform, device, info (but simd) and the budget. */
int gpu_choose(const GpuOptions *options, const GpuRefusals *refusals, Gpu *gpu, ErrorDetail *reterr);
/* The device with these names, for the compiler child; -ENODEV when there is none. */
int gpu_find_device(const char *platform, const char *name, cl_platform_id *ret_platform, cl_device_id *ret_device);
/* Reads a string property of a device or platform; @size bytes with the NUL; non-printing bytes become spaces. */
void gpu_device_string(cl_device_id device, cl_device_info what, char *text, size_t size);
void gpu_platform_string(cl_platform_id platform, cl_platform_info what, char *text, size_t size);

/* ---- gpu-queue.c ------------------------------------------------------------------------------------------------- */

/* Makes room for one more command and gives its event (one reference, for the caller). */
int gpu_command_begin(Gpu *gpu, GpuQueue queue, GpuCommandKind kind, const char *label, uint64_t bytes, GpuEvent **ret);
/* Takes @event, whose cl handle the driver has filled, or returns it to the pool when @status says that it failed. */
int gpu_command_end(Gpu *gpu, GpuEvent *event, cl_int status, const char *call, GpuEvent **ret_event);
/* The wait list of a command of @queue, without what its order already gives.  All of the compute queue wait for the uploads before
 * them: in order they would run although one has failed, and kernels take places in memory from what it should have brought. */
int gpu_command_waits(Gpu *gpu, GpuQueue queue, GpuWait wait, cl_uint *ret_n, const cl_event **ret);

/* ---- gpu-step.c -------------------------------------------------------------------------------------------------- */

int gpu_signal_new(GpuSignal **ret);
GpuSignal *gpu_signal_unref(GpuSignal *signal);
/* Waits until @event is no longer queued or running, whatever its status; 0, GPU_E_HUNG or a negative errno. */
int gpu_wait_until(Gpu *gpu, cl_event event, uint64_t deadline_usec);
uint64_t gpu_now_usec(void);
/* Waits until nothing is in flight, whatever becomes of it; a device that does not come to rest is hung. */
void gpu_settle(Gpu *gpu);
/* Checks pending commands that have completed, records them, and lets them go; GPU_E_LOST when one failed. */
int gpu_sweep(Gpu *gpu, ErrorDetail *reterr);

/* ---- gpu-program.c, gpu-cache.c, gpu-compiler.c -------------------------------------------------------------------- */

typedef struct GpuBinary {
    unsigned char *bytes;
    size_t n_bytes;
} GpuBinary;

void gpu_binary_deinit(GpuBinary *binary);

/* Compiles in this process; 0, GPU_E_BUILD_FAILED (then @ret_log says why; the caller frees it either way), negative errno. */
int gpu_build_source(cl_context context, cl_device_id device, const char *text, const char *options, cl_program *ret,
                     char **ret_log);
int gpu_program_binary(cl_program program, GpuBinary *ret);
/* Runs Gpu.compiler; the same results.  @reterr is set when there is no log. */
int gpu_compile_in_child(Gpu *gpu, const char *text, const char *options, GpuBinary *ret, char **ret_log,
                         ErrorDetail *reterr);

/* 0, or a negative errno: -ENOENT is an ordinary miss, everything else has been removed. */
int gpu_cache_load(const char *path, const unsigned char key[GPU_KEY_BYTES], GpuBinary *ret);
int gpu_cache_store(const char *path, const unsigned char key[GPU_KEY_BYTES], const GpuBinary *binary);
void gpu_cache_drop(const char *path, const unsigned char key[GPU_KEY_BYTES]);
/* The whole size, or a negative errno; -EBADMSG at an early end. */

void gpu_programs_free(Gpu *gpu);
/* A copy of @text that lives as long as the Gpu; NULL when memory is short. */
const char *gpu_intern(Gpu *gpu, const char *text);

/* ---- gpu-trace.c ------------------------------------------------------------------------------------------------- */

/* Notes the times of a completed command, if anyone wants them. */
void gpu_trace_note(Gpu *gpu, const GpuEvent *event);
/* Adds one stretch of work to the sums. */
void gpu_trace_interval(GpuTrace *trace, GpuQueue queue, GpuLane lane, uint64_t start, uint64_t end);
/* After a sweep: folds what no later command can touch. */
void gpu_trace_fold(Gpu *gpu);
void gpu_trace_deinit(Gpu *gpu);
