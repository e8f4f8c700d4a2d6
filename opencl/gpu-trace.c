/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Timeline and overlap, from the profiling times of completed commands.
 *
 * The timeline keeps one record a command (56 bytes) up to RECORDS_MAX.  The overlap sums keep intervals only as long as a
 * later command could touch them: queues are in order, so a command that is still pending on a queue starts after the end
 * of the last completed one there; everything before the earliest such end (the watermark) is folded into sums.
 */

#include "opencl/gpu-internal.h"

#include <inttypes.h>
#include <string.h>

#define RECORDS_MAX (UINT32_C(1) << 20)
/* Folding costs a pass over what is kept: not at each sweep. */
#define FOLD_AT     4096

/* ---- notes ------------------------------------------------------------------------------------------------------- */

static void note_record(GpuTrace *trace, const GpuEvent *event, uint64_t start, uint64_t end)
{
    if (trace->n_records == trace->n_allocated) {
        size_t n = MAX(2 * trace->n_allocated, (size_t)4096);
        GpuRecord *records = n <= RECORDS_MAX ? realloc(trace->records, n * sizeof(*records)) : NULL;

        if (!records) {
            trace->n_dropped++;
            return;
        }
        trace->records = records;
        trace->n_allocated = n;
    }
    trace->records[trace->n_records++] = (GpuRecord){.label = event->label ? event->label : "?",
                                                     .start_nsec = start,
                                                     .end_nsec = end,
                                                     .bytes = event->bytes,
                                                     .queue = event->queue,
                                                     .kind = event->kind};
}

/* A copy inside the device counts by its queue: on the compute queue it is part of the computation. */
static GpuLane lane_of(const GpuEvent *event)
{
    switch (event->kind) {
    case GPU_COMMAND_UPLOAD:
        return GPU_LANE_UPLOAD;
    case GPU_COMMAND_DOWNLOAD:
        return GPU_LANE_DOWNLOAD;
    case GPU_COMMAND_KERNEL:
    case GPU_COMMAND_COPY:
    case GPU_COMMAND_FILL:
        break;
    }
    return event->queue == GPU_QUEUE_UPLOAD     ? GPU_LANE_UPLOAD
           : event->queue == GPU_QUEUE_DOWNLOAD ? GPU_LANE_DOWNLOAD
                                                : GPU_LANE_KERNEL;
}

/* Intervals stay disjoint and in order, because the drivers' times of an in-order queue are, up to rounding. */
void gpu_trace_interval(GpuTrace *trace, GpuQueue queue, GpuLane lane, uint64_t start, uint64_t end)
{
    GpuIntervals *to = &trace->lanes[queue][lane];
    GpuInterval *last = to->n_items > 0 ? &to->items[to->n_items - 1] : NULL;

    trace->last_end[queue] = MAX(trace->last_end[queue], end);
    start = MAX(start, to->noted_until);
    if (start >= end)
        return;
    to->noted_until = end;
    if (last && start == last->end) {
        last->end = end;
        return;
    }
    if (to->n_items == to->n_allocated) {
        size_t n = MAX(2 * to->n_allocated, (size_t)FOLD_AT);
        GpuInterval *items = realloc(to->items, n * sizeof(*items));

        if (!items)
            return; /* a sum of a report, not a result: short by one command */
        to->items = items;
        to->n_allocated = n;
    }
    to->items[to->n_items++] = (GpuInterval){start, end};
}

void gpu_trace_note(Gpu *gpu, const GpuEvent *event)
{
    GpuTrace *trace = &gpu->trace;
    bool traced = trace->tracing && event->sequence > trace->trace_from;
    bool summed = trace->summing && event->sequence > trace->sum_from;
    cl_ulong start = 0, end = 0;

    if (!traced && !summed)
        return;
    if (clGetEventProfilingInfo(event->cl, CL_PROFILING_COMMAND_START, sizeof(start), &start, NULL) != CL_SUCCESS ||
        clGetEventProfilingInfo(event->cl, CL_PROFILING_COMMAND_END, sizeof(end), &end, NULL) != CL_SUCCESS ||
        end < start)
        return;
    if (traced)
        note_record(trace, event, start, end);
    if (summed) {
        gpu_trace_interval(trace, event->queue, lane_of(event), start, end);
        trace->lanes[event->queue][lane_of(event)].bytes += event->bytes;
    }
}

/* ---- overlap ----------------------------------------------------------------------------------------------------- */

/* Time that @a and @b share before @watermark. */
static uint64_t overlap_before(const GpuIntervals *a, const GpuIntervals *b, uint64_t watermark)
{
    uint64_t sum = 0;

    for (size_t i = 0, j = 0; i < a->n_items && j < b->n_items;) {
        uint64_t start = MAX(a->items[i].start, b->items[j].start);
        uint64_t end = MIN(MIN(a->items[i].end, b->items[j].end), watermark);

        if (start >= watermark)
            break;
        if (start < end)
            sum += end - start;
        if (a->items[i].end < b->items[j].end)
            i++;
        else
            j++;
    }
    return sum;
}

/* Sums and drops what lies before @watermark. */
static void lane_fold(GpuIntervals *lane, uint64_t watermark)
{
    size_t n_done = 0;

    for (; n_done < lane->n_items && lane->items[n_done].end <= watermark; n_done++)
        lane->total_nsec += lane->items[n_done].end - lane->items[n_done].start;
    if (n_done > 0)
        memmove(lane->items, lane->items + n_done, (lane->n_items - n_done) * sizeof(*lane->items));
    lane->n_items -= n_done;
    if (lane->n_items > 0 && lane->items[0].start < watermark) {
        lane->total_nsec += watermark - lane->items[0].start;
        lane->items[0].start = watermark;
    }
}

static void fold_before(GpuTrace *trace, uint64_t watermark)
{
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        for (GpuLane lane = GPU_LANE_UPLOAD; lane <= GPU_LANE_DOWNLOAD; lane++)
            trace->lanes[queue][lane].overlap_nsec +=
                overlap_before(&trace->lanes[queue][lane], &trace->lanes[GPU_QUEUE_COMPUTE][GPU_LANE_KERNEL], watermark);
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        for (GpuLane lane = 0; lane < GPU_LANE_X_MAX; lane++)
            lane_fold(&trace->lanes[queue][lane], watermark);
}

void gpu_trace_fold(Gpu *gpu)
{
    GpuTrace *trace = &gpu->trace;
    uint64_t watermark = UINT64_MAX;
    size_t n = 0;

    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        for (GpuLane lane = 0; lane < GPU_LANE_X_MAX; lane++)
            n += trace->lanes[queue][lane].n_items;
    if (!trace->summing || n < FOLD_AT)
        return;
    for (size_t i = 0; i < gpu->n_pending; i++)
        watermark = MIN(watermark, trace->last_end[gpu->pending[i]->queue]);
    fold_before(trace, watermark);
}

int gpu_overlap_begin(Gpu *gpu)
{
    GpuTrace *trace = &gpu->trace;

    if (gpu_is_lost(gpu))
        return error_origin(-ENODEV);
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        for (GpuLane lane = 0; lane < GPU_LANE_X_MAX; lane++) {
            GpuIntervals *sums = &trace->lanes[queue][lane];

            *sums = (GpuIntervals){.items = sums->items, .n_allocated = sums->n_allocated};
        }
    memset(trace->last_end, 0, sizeof(trace->last_end));
    trace->sum_from = gpu->sequence;
    trace->summing = true;
    return 0;
}

int gpu_overlap_end(Gpu *gpu, GpuOverlap *ret)
{
    GpuTrace *trace = &gpu->trace;
    uint64_t nsec[GPU_LANE_X_MAX] = {0}, bytes[GPU_LANE_X_MAX] = {0}, overlap_nsec[GPU_LANE_X_MAX] = {0};

    if (!trace->summing)
        return error_origin(-EINVAL);
    if (gpu_is_lost(gpu) || gpu_sweep(gpu, NULL)) {
        trace->summing = false;
        return error_origin(-ENODEV);
    }
    fold_before(trace, UINT64_MAX);
    trace->summing = false;
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        for (GpuLane lane = 0; lane < GPU_LANE_X_MAX; lane++) {
            /* Step inputs and results on the compute queue stand between its kernels by their nature: they are no stream. */
            if (queue == GPU_QUEUE_COMPUTE && lane != GPU_LANE_KERNEL)
                continue;
            nsec[lane] += trace->lanes[queue][lane].total_nsec;
            bytes[lane] += trace->lanes[queue][lane].bytes;
            overlap_nsec[lane] += trace->lanes[queue][lane].overlap_nsec;
        }
    *ret = (GpuOverlap){
        .kernel_usec = nsec[GPU_LANE_KERNEL] / 1000,
        .upload_usec = nsec[GPU_LANE_UPLOAD] / 1000,
        .download_usec = nsec[GPU_LANE_DOWNLOAD] / 1000,
        /* Rounded like the copy times, so that the share stays at most 1. */
        .overlap_usec = overlap_nsec[GPU_LANE_UPLOAD] / 1000 + overlap_nsec[GPU_LANE_DOWNLOAD] / 1000,
        .upload_bytes = bytes[GPU_LANE_UPLOAD],
        .download_bytes = bytes[GPU_LANE_DOWNLOAD],
    };
    return 0;
}

/* ---- timeline ---------------------------------------------------------------------------------------------------- */

int gpu_trace_start(Gpu *gpu)
{
    GpuTrace *trace = &gpu->trace;

    if (gpu_is_lost(gpu))
        return error_origin(-ENODEV);
    trace->n_records = 0;
    trace->n_dropped = 0;
    trace->trace_from = gpu->sequence;
    trace->tracing = true;
    return 0;
}

static const char *kind_name(GpuCommandKind kind)
{
    switch (kind) {
    case GPU_COMMAND_KERNEL:
        return "kernel";
    case GPU_COMMAND_UPLOAD:
        return "upload";
    case GPU_COMMAND_DOWNLOAD:
        return "download";
    case GPU_COMMAND_COPY:
        return "copy";
    case GPU_COMMAND_FILL:
        return "fill";
    }
    return "?";
}

/* Labels are ours (kernel names, static strings), but a quote in one must not break the file. */
static void write_label(FILE *file, const char *label)
{
    for (; *label; label++)
        if ((unsigned char)*label >= ' ' && *label != '"' && *label != '\\')
            (void)fputc(*label, file);
}

static void write_trace(const Gpu *gpu, FILE *file)
{
    static const char *const tracks[] = {"compute", "upload", "download"};
    const GpuTrace *trace = &gpu->trace;
    uint64_t origin = UINT64_MAX;

    for (size_t i = 0; i < trace->n_records; i++)
        origin = MIN(origin, trace->records[i].start_nsec);
    (void)fputs("{\"displayTimeUnit\":\"ns\",\"otherData\":{\"device\":\"", file);
    write_label(file, gpu->info.name);
    (void)fputs("\",\"driver\":\"", file);
    write_label(file, gpu->info.driver);
    (void)fprintf(file, "\",\"dropped\":%" PRIu64 "},\"traceEvents\":[\n", trace->n_dropped);
    (void)fputs("{\"ph\":\"M\",\"pid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"", file);
    write_label(file, gpu->info.name);
    (void)fputs("\"}}", file);
    for (size_t i = 0; i < N_ELEMENTS(tracks); i++)
        (void)fprintf(file, ",\n{\"ph\":\"M\",\"pid\":1,\"tid\":%zu,\"name\":\"thread_name\",\"args\":{\"name\":\"%s\"}}", i + 1,
                      tracks[i]);
    for (size_t i = 0; i < trace->n_records; i++) {
        const GpuRecord *record = &trace->records[i];
        uint64_t start = record->start_nsec - origin, length = record->end_nsec - record->start_nsec;

        (void)fputs(",\n{\"ph\":\"X\",\"pid\":1,\"name\":\"", file);
        write_label(file, record->label);
        (void)fprintf(file,
                      "\",\"cat\":\"%s\",\"tid\":%u,\"ts\":%" PRIu64 ".%03u,\"dur\":%" PRIu64 ".%03u,\"args\":{\"bytes\":%" PRIu64
                      "}}",
                      kind_name(record->kind), (unsigned)record->queue + 1, start / 1000, (unsigned)(start % 1000),
                      length / 1000, (unsigned)(length % 1000), record->bytes);
    }
    (void)fputs("\n]}\n", file);
}

int gpu_trace_stop(Gpu *gpu, int fd)
{
    GpuTrace *trace = &gpu->trace;
    _cleanup_(close_filep) FILE *file = NULL;
    _cleanup_(close_fdp) int copy = -1;

    if (!trace->tracing)
        return error_origin(-EINVAL);
    /* A lost device still has a story to tell. */
    if (!gpu_is_lost(gpu))
        (void)gpu_sweep(gpu, NULL);
    trace->tracing = false;
    copy = dup(fd);
    if (copy < 0)
        return error_origin(-errno);
    file = fdopen(copy, "w");
    if (!file)
        return error_origin(-errno);
    (void)TAKE_FD(copy);
    write_trace(gpu, file);
    free(trace->records);
    trace->records = NULL;
    trace->n_records = trace->n_allocated = 0;
    if (fflush(file) != 0 || ferror(file))
        return error_origin(-EIO);
    return 0;
}

void gpu_trace_deinit(Gpu *gpu)
{
    free(gpu->trace.records);
    for (GpuQueue queue = 0; queue < GPU_QUEUE_X_MAX; queue++)
        for (GpuLane lane = 0; lane < GPU_LANE_X_MAX; lane++)
            free(gpu->trace.lanes[queue][lane].items);
}
