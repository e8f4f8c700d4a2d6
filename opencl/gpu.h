#pragma once
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The device.  The one header through which the rest of leat sees OpenCL; it has no OpenCL types.
 *
 * Nouns and lifetimes:
 *   Gpu         one opened device: context, three in-order queues, byte budget, program cache, timeline.  Opened once
 *               per device; every other object keeps a borrowed pointer and must be freed before it.
 *   GpuBuffer   device memory, counted by purpose against the budget; or host memory wrapped in place (zero-copy),
 *               which is not counted.
 *   GpuProgram  kernels built for one set of -D options; comes from the binary cache when it can.
 *   GpuKernel   one entry point with its arguments set.  Belongs to its program.
 *   GpuEvent    completion of one command; reference counted.
 *   GpuStep     (inside Gpu) the commands since gpu_step_begin(); gpu_step_finish() waits with a deadline and checks
 *               the status of every one of them, because OpenCL runs a command although an earlier one failed.
 *
 * All functions are called from one thread (the engine's), except where "any thread" is said.
 * After a failing call other than a refused allocation the device is *lost*: later calls return -ENODEV at once.  A wrong
 * argument of ours (range, size, name) is refused with -EINVAL or -ENOENT before the driver sees it and loses nothing.
 * When a call fails, what is in flight is waited for, so host memory may be given back after a loss.  A device that does not come to
 * rest is *hung*: freeing its objects abandons what the driver holds, because releasing it may block for ever, and host memory
 * that commands have used must stay (gpu_free_host()).
 *
 * Environment: LEAT_SIMD=portable|avx2|avx512bw|vnni lowers GpuInfo.simd (tests).  The ICD loader reads its directory once
 * per process: a driver installed later is found by a new process only.  PoCL unpacks binaries under POCL_CACHE_DIR, else
 * $XDG_CACHE_HOME/pocl or ~/.cache/pocl: a sandboxed daemon sets one of them to a place that it may write.
 */

#include "quant/base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Gpu Gpu;
typedef struct GpuBuffer GpuBuffer;
typedef struct GpuProgram GpuProgram;
typedef struct GpuKernel GpuKernel;
typedef struct GpuEvent GpuEvent;

typedef enum GpuError {
    GPU_E_OK,
    GPU_E_NO_PLATFORM,   /* no ICD, or no platform: the detail names the directory and the packages to install */
    GPU_E_NO_DEVICE,     /* platforms, but no device that the configuration allows */
    GPU_E_OVER_BUDGET,   /* an allocation would exceed the budget or the device refused it; nothing has changed */
    GPU_E_BUILD_FAILED,  /* a program does not compile on this device; the log is in the detail and at debug level */
    GPU_E_HUNG,          /* a wait passed its deadline; the device is marked lost */
    GPU_E_LOST,          /* a command failed; the device is marked lost */
} GpuError;

typedef enum GpuDeviceType {
    GPU_DEVICE_TYPE_GPU,
    GPU_DEVICE_TYPE_ACCELERATOR,
    GPU_DEVICE_TYPE_CPU,
    GPU_DEVICE_TYPE_X_MAX,
    GPU_DEVICE_TYPE_X_INVALID = -EINVAL,
} GpuDeviceType;

const char *gpu_device_type_to_string(GpuDeviceType type);

typedef enum GpuUse { GPU_USE_YES, GPU_USE_NO, GPU_USE_FALLBACK } GpuUse;

/* One entry of the configuration's `devices` list.  NULL patterns match everything; else case-insensitive substring. */
typedef struct GpuMatch {
    const char *vendor, *name;
    GpuDeviceType type; /* GPU_DEVICE_TYPE_X_INVALID: any */
    GpuUse use;
    uint64_t reserve_bytes, max_memory_bytes; /* 0: none; budget = min(max_memory, device memory - reserve) */
} GpuMatch;

typedef struct GpuOptions {
    const GpuMatch *matches; /* borrowed during the call; the first match of a device wins; unmatched devices: yes */
    size_t n_matches;
    const char *cache_dir;     /* program binaries; NULL: no disk cache */
    const char *compiler;      /* path of the executable run as `COMPILER --compile-program` with a job on stdin, within
                                * 120 s; NULL: build in process */
    uint64_t default_max_memory_bytes; /* budget when no match gives one; 0: 3/4 of the device's memory */
    uint64_t deadline_usec;            /* of each wait for the device; 0: a minute, for a driver may compile in it on a busy machine */
} GpuOptions;

/* What the host may choose kernels by.  x86 levels are those that the *device compiler* accepts, with VNNI from cpuid. */
typedef enum GpuSimd {
    GPU_SIMD_PORTABLE,  /* plain OpenCL C; also every device that is not an x86 CPU */
    GPU_SIMD_AVX2,      /* clang x86 builtins, 256 bit */
    GPU_SIMD_AVX512BW,  /* 512 bit, pmaddubsw */
    GPU_SIMD_AVX512VNNI /* 512 bit, vpdpbusd through inline assembly */
} GpuSimd;

typedef struct GpuInfo {
    char name[128], vendor[128], driver[128], platform[128], opencl_c[64];
    GpuDeviceType type;
    GpuSimd simd;
    char reason[256];    /* why this device, for the log and the bus: "only CPU devices found on …" */
    bool unified_memory; /* the device reads host memory in place at full speed */
    uint32_t compute_units;
    size_t max_work_group_size;
    uint64_t memory_bytes, max_allocation_bytes, local_memory_bytes, budget_bytes;
    uint32_t base_alignment_bytes; /* CL_DEVICE_MEM_BASE_ADDR_ALIGN is in bits; this is bytes */
} GpuInfo;

/* Opens the best device that passes a self-test (known answers, copies, memory in place); one that fails is passed over, and
 * the reason of the next says so.  Returns 0, GPU_E_NO_PLATFORM, GPU_E_NO_DEVICE, or a negative errno. */
int gpu_open(const GpuOptions *options, Gpu **ret, ErrorDetail *reterr);
Gpu *gpu_free(Gpu *gpu);
const GpuInfo *gpu_info(const Gpu *gpu);
bool gpu_is_lost(const Gpu *gpu); /* any thread */
/* Lost because a wait passed its deadline. */
bool gpu_is_hung(const Gpu *gpu);
/* Of a lost device: says in @reterr (may be NULL) which call failed and how, unless something stands there. */
void gpu_explain(const Gpu *gpu, ErrorDetail *reterr);

/* ---- memory ---------------------------------------------------------------------------------------------------- */

typedef enum GpuPurpose {
    GPU_PURPOSE_WEIGHTS,
    GPU_PURPOSE_ACTIVATIONS,
    GPU_PURPOSE_STAGING, /* the ring */
    GPU_PURPOSE_TAIL,    /* recent tokens and sinks in full precision */
    GPU_PURPOSE_PAGES,   /* caches whose home is the device */
    GPU_PURPOSE_OTHER,
    GPU_PURPOSE_X_MAX,
} GpuPurpose;

const char *gpu_purpose_to_string(GpuPurpose purpose);

/* 0, GPU_E_OVER_BUDGET (numbers in the detail: needed, available, budget), or a negative errno.  Contents undefined. */
int gpu_buffer_new(Gpu *gpu, GpuPurpose purpose, uint64_t bytes, GpuBuffer **ret, ErrorDetail *reterr);
/* Host memory in place: @memory (borrowed, page aligned, outlives the buffer) is read and written by kernels directly.
 * Only when gpu_info()->unified_memory. */
int gpu_buffer_wrap(Gpu *gpu, void *memory, uint64_t bytes, GpuBuffer **ret, ErrorDetail *reterr);
GpuBuffer *gpu_buffer_free(GpuBuffer *buffer);
uint64_t gpu_buffer_bytes(const GpuBuffer *buffer);
DEFINE_CLEANUP(GpuBuffer, gpu_buffer_free)
DEFINE_CLEANUP(Gpu, gpu_free)

/* Bytes in use by purpose, and the sum; exact.  Any thread. */
void gpu_memory_used(const Gpu *gpu, uint64_t ret_bytes[GPU_PURPOSE_X_MAX], uint64_t *ret_total);
/* Lowers or raises the budget at run time (tests, ladder); below what is in use only later allocations are refused. */
void gpu_set_budget(Gpu *gpu, uint64_t bytes);

/* Counters since the device was opened; tests prove that a warm decode step changes only n_launches and n_copies. */
typedef struct GpuCounters {
    uint64_t n_programs_built, n_programs_from_cache, n_buffers_created, n_launches, n_uploads, n_downloads, n_copies,
        upload_bytes, download_bytes, copy_bytes;
} GpuCounters;
void gpu_counters(const Gpu *gpu, GpuCounters *ret);

/* ---- queues, copies, events -------------------------------------------------------------------------------------- */

typedef enum GpuQueue {
    GPU_QUEUE_COMPUTE,
    GPU_QUEUE_UPLOAD,
    GPU_QUEUE_DOWNLOAD,
    GPU_QUEUE_X_MAX,
} GpuQueue;

GpuEvent *gpu_event_ref(GpuEvent *event);
GpuEvent *gpu_event_unref(GpuEvent *event); /* takes NULL, returns NULL */
DEFINE_CLEANUP(GpuEvent, gpu_event_unref)
/* Whether the command has completed (1), has not (0), or failed (-EIO). */
int gpu_event_status(const GpuEvent *event);

/* What a command waits for besides its queue's order: events of other queues.  NULL entries are skipped. */
typedef struct GpuWait {
    GpuEvent *const *events; /* borrowed */
    size_t n_events;
} GpuWait;
#define GPU_WAIT_NONE ((GpuWait){NULL, 0})

/* free() and munmap() of memory that copies or kernels have used; of a hung device it is left to whoever still writes there.  @gpu may be
 * NULL: then no command has. */
void gpu_free_host(const Gpu *gpu, void *memory);
void gpu_unmap_host(const Gpu *gpu, void *memory, size_t bytes);

/* Asynchronous copies of at least one byte; host memory must stay valid and unchanged until the event.  @ret_event may be
 * NULL.  @label (static string) names the command in the timeline. */
int gpu_upload(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t offset, const void *from, uint64_t bytes, GpuWait wait,
               const char *label, GpuEvent **ret_event);
int gpu_download(Gpu *gpu, GpuQueue queue, const GpuBuffer *from, uint64_t offset, void *to, uint64_t bytes,
                 GpuWait wait, const char *label, GpuEvent **ret_event);
int gpu_copy(Gpu *gpu, GpuQueue queue, GpuBuffer *to, uint64_t to_offset, const GpuBuffer *from, uint64_t from_offset,
             uint64_t bytes, GpuWait wait, const char *label, GpuEvent **ret_event);
int gpu_fill_zero(Gpu *gpu, GpuQueue queue, GpuBuffer *buffer, uint64_t offset, uint64_t bytes);
/* Submits what is queued without waiting. */
int gpu_flush(Gpu *gpu, GpuQueue queue);
/* Waits for one event; 0, GPU_E_HUNG or GPU_E_LOST. */
int gpu_event_wait(Gpu *gpu, GpuEvent *event, ErrorDetail *reterr);

/* The commands of all queues from here on belong to one step.  Commands outside of a step are checked by the next one, by
 * gpu_drain(), or when there are thousands. */
int gpu_step_begin(Gpu *gpu);
/* Waits until every command of the *compute* queue of this step has completed, and checks them and all completed
 * copies; copies still in flight (prefetch for the next step) are checked by the step that ends after them.
 * 0, GPU_E_HUNG, GPU_E_LOST. */
int gpu_step_finish(Gpu *gpu, ErrorDetail *reterr);
/* Waits for everything on every queue. */
int gpu_drain(Gpu *gpu, ErrorDetail *reterr);

/* ---- programs and kernels ----------------------------------------------------------------------------------------- */

/* Sources are names of embedded files ("common.cl", "matmul.cl"), concatenated in order.  @options: "-DNAME=VALUE …",
 * formatted in the C locale.  The same sources and options give the same (shared) program.
 * 0, GPU_E_BUILD_FAILED, or a negative errno. */
int gpu_program_get(Gpu *gpu, const char *const *sources, size_t n_sources, const char *options, GpuProgram **ret,
                    ErrorDetail *reterr);
/* A new kernel object of the program; the caller frees it. */
int gpu_kernel_new(GpuProgram *program, const char *name, GpuKernel **ret, ErrorDetail *reterr);
GpuKernel *gpu_kernel_free(GpuKernel *kernel);
DEFINE_CLEANUP(GpuKernel, gpu_kernel_free)
/* The most work-items a group of this kernel may have on this device. */
size_t gpu_kernel_max_work_group(const GpuKernel *kernel);

/* Arguments keep their value between launches.  A NULL buffer passes a null pointer. */
int gpu_kernel_set_buffer(GpuKernel *kernel, unsigned index, const GpuBuffer *buffer);
int gpu_kernel_set_bytes(GpuKernel *kernel, unsigned index, const void *value, size_t size);
int gpu_kernel_set_u32(GpuKernel *kernel, unsigned index, uint32_t value);
int gpu_kernel_set_f32(GpuKernel *kernel, unsigned index, float value);
int gpu_kernel_set_local(GpuKernel *kernel, unsigned index, size_t bytes);

typedef struct GpuRange {
    size_t global[3], local[3]; /* unused dimensions 1; every global is a multiple of its local (checked) */
} GpuRange;
#define GPU_RANGE_1D(g, l)          ((GpuRange){{(g), 1, 1}, {(l), 1, 1}})
#define GPU_RANGE_2D(gx, gy, lx, ly) ((GpuRange){{(gx), (gy), 1}, {(lx), (ly), 1}})

/* All launches go through here: compute queue.  @ret_event may be NULL.  -EINVAL when the range, the group or the local memory
 * does not fit.  On PoCL a group of one and a range below 2^16 in every dimension is the variant that the compiler child has
 * put into the binary; any other local size compiles for 60 to 110 ms in this process at its first launch. */
int gpu_launch(GpuKernel *kernel, GpuRange range, GpuWait wait, GpuEvent **ret_event);

/* Child side of GpuOptions.compiler: reads one job from @in_fd, builds it, writes the binary to @out_fd; exit status. */
int gpu_compiler_main(int in_fd, int out_fd);

/* ---- timeline ------------------------------------------------------------------------------------------------------ */

/* Records every command (kernel, copy in, copy out, bytes) from OpenCL profiling events while switched on. */
int gpu_trace_start(Gpu *gpu);
/* Writes Chrome trace JSON ("traceEvents", one track a queue) to @fd (borrowed) and stops. */
int gpu_trace_stop(Gpu *gpu, int fd);

/* Sums over the commands that were enqueued between begin and end and have completed, from profiling events: what a usage
 * reply reports.  Overlap: time during which a copy ran while a kernel ran, summed over the queues, so that the hidden
 * share = overlap / (upload + download) is at most 1.  Copies on the compute queue (step inputs,
 * results) are no stream and are left out; a copy inside the device counts as upload or download on those queues, as
 * computation on the compute queue.  Costs two timestamp queries a command. */
typedef struct GpuOverlap {
    uint64_t kernel_usec, upload_usec, download_usec, overlap_usec, upload_bytes, download_bytes;
} GpuOverlap;
int gpu_overlap_begin(Gpu *gpu);
int gpu_overlap_end(Gpu *gpu, GpuOverlap *ret);
