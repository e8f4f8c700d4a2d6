/* SPDX-License-Identifier: Apache-2.0 */
/* Reading, writing and copying buffers. */

#include "tests/sim/sim.h"

#include <string.h>

/* A read or write as the program asked for it; what is not rectangular is one row. */
typedef struct Transfer {
    cl_command_type type;
    bool is_read, is_rect;
    cl_bool blocking;
    cl_mem buffer;
    size_t at[3], host_at[3], region[3];
    size_t row, slice, host_row, host_slice; /* pitches */
    void *host;
    SimEnd device_end, host_end;
    uint64_t device_bytes, host_bytes;       /* from the first byte to the last */
} Transfer;

/* Offset of the first byte and bytes up to the last; false when the shape is none. */
static bool shape(const size_t at[3], const size_t region[3], size_t *row, size_t *slice, uint64_t *ret_offset, uint64_t *ret_bytes)
{
    *row = *row ? *row : region[0];
    if (region[0] == 0 || region[1] == 0 || region[2] == 0 || *row < region[0] || *row > UINT32_MAX * (uint64_t)UINT32_MAX / region[1])
        return false;
    *slice = *slice ? *slice : region[1] * *row;
    if (*slice < region[1] * *row)
        return false;
    *ret_offset = at[2] * *slice + at[1] * *row + at[0];
    *ret_bytes = (region[2] - 1) * *slice + (region[1] - 1) * *row + region[0];
    return true;
}

/* The buffer of a command with a reference; CL_SUCCESS or what is wrong with it. */
static cl_int take_buffer(const SimCommand *command, cl_mem handle, SimMem **ret)
{
    cl_int status = object_check(command->call, SIM_MEM, handle);
    SimMem *mem;

    if (status != CL_SUCCESS)
        return status;
    mem = handle ? (SimMem *)object_find(SIM_MEM, handle) : NULL;
    if (!mem)
        return CL_INVALID_MEM_OBJECT;
    if (mem->object.context != command->queue->object.context) {
        object_unref(&mem->object);
        return CL_INVALID_CONTEXT;
    }
    *ret = mem;
    return CL_SUCCESS;
}

static cl_int check_host_access(const Transfer *transfer, cl_mem_flags flags)
{
    cl_mem_flags refused = CL_MEM_HOST_NO_ACCESS | (transfer->is_read ? CL_MEM_HOST_WRITE_ONLY : CL_MEM_HOST_READ_ONLY);

    return flags & refused ? CL_INVALID_OPERATION : CL_SUCCESS;
}

/* Checks all, fills both ends and notes what is accessed. */
static cl_int prepare(SimCommand *command, Transfer *transfer)
{
    uint64_t offset = 0, host_offset = 0;
    SimMem *mem = NULL;
    cl_int status = take_buffer(command, transfer->buffer, &mem);

    if (status != CL_SUCCESS)
        return status;
    if (!transfer->host || !shape(transfer->at, transfer->region, &transfer->row, &transfer->slice, &offset, &transfer->device_bytes) ||
        !shape(transfer->host_at, transfer->region, &transfer->host_row, &transfer->host_slice, &host_offset, &transfer->host_bytes) ||
        offset > mem->bytes || transfer->device_bytes > mem->bytes - offset)
        status = CL_INVALID_VALUE;
    if (status == CL_SUCCESS)
        status = check_host_access(transfer, mem->flags);
    if (status != CL_SUCCESS) {
        object_unref(&mem->object);
        return status;
    }
    transfer->device_end = (SimEnd){.mem = mem, .offset = offset, .row_pitch = transfer->row, .slice_pitch = transfer->slice};
    transfer->host_end = (SimEnd){.host = transfer->host,
                                  .offset = host_offset,
                                  .row_pitch = transfer->host_row,
                                  .slice_pitch = transfer->host_slice};
    command_access(command, mem, offset, transfer->device_bytes, !transfer->is_read);
    command_access(command, NULL, (uintptr_t)transfer->host + host_offset, transfer->host_bytes, transfer->is_read);
    return CL_SUCCESS;
}

static SimJob *transfer_job(const Transfer *transfer)
{
    SimJob *job = job_new(transfer->is_read ? SIM_LANE_DOWN : SIM_LANE_UP);

    if (!job)
        return NULL;
    (void)object_ref(&transfer->device_end.mem->object);
    job->to = transfer->is_read ? transfer->host_end : transfer->device_end;
    job->from = transfer->is_read ? transfer->device_end : transfer->host_end;
    memcpy(job->region, transfer->region, sizeof(job->region));
    if (!transfer->is_read && sim.config.checks & SIM_CHECK_CONTENT) {
        job->hashed = true;
        job->hash = host_hash(job);
    }
    return job;
}

static cl_int driver_transfer(const SimCommand *command, const Transfer *t, cl_event *ret)
{
    cl_command_queue queue = command->queue->object.handle;
    const cl_event *waits = command->handles;
    cl_uint n = command->n_handles;

    if (t->is_rect && t->is_read)
        return sim.next.clEnqueueReadBufferRect(queue, t->buffer, CL_FALSE, t->at, t->host_at, t->region, t->row, t->slice, t->host_row,
                                                t->host_slice, t->host, n, waits, ret);
    if (t->is_rect)
        return sim.next.clEnqueueWriteBufferRect(queue, t->buffer, CL_FALSE, t->at, t->host_at, t->region, t->row, t->slice,
                                                 t->host_row, t->host_slice, t->host, n, waits, ret);
    if (t->is_read)
        return sim.next.clEnqueueReadBuffer(queue, t->buffer, CL_FALSE, t->at[0], t->region[0], t->host, n, waits, ret);
    return sim.next.clEnqueueWriteBuffer(queue, t->buffer, CL_FALSE, t->at[0], t->region[0], t->host, n, waits, ret);
}

static cl_int run_by_driver(SimCommand *command, const Transfer *transfer, cl_event *ret_event, SimEvent **ret_wait)
{
    cl_event handle = NULL;
    cl_int status = driver_transfer(command, transfer, &handle);

    return command_driver(command, status, transfer->type, handle, ret_event, ret_wait);
}

static cl_int transfer_run(SimCall *call, cl_command_queue queue, Transfer *transfer, cl_uint n, const cl_event *waits,
                           cl_event *ret_event)
{
    SimEvent *event = NULL, **ret_wait = transfer->blocking ? &event : NULL;
    SimCommand command;
    cl_int status = command_begin(&command, call, queue, n, waits);

    if (status == CL_SUCCESS)
        status = prepare(&command, transfer);
    if (status == CL_SUCCESS && (command.queue->object.context->discrete || command_is_faulty(&command))) {
        SimJob *job = transfer_job(transfer);

        status = job ? command_paced(&command, job, transfer->type, ret_event, ret_wait) : CL_OUT_OF_HOST_MEMORY;
    } else if (status == CL_SUCCESS)
        status = run_by_driver(&command, transfer, ret_event, ret_wait);
    command_end(&command);
    /* Without the queue's lock: others may have to enqueue first. */
    if (event)
        status = event_wait(event);
    object_unref(event ? &event->object : NULL);
    return status;
}

static cl_int CL_API_CALL layer_clEnqueueReadBuffer(cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset, size_t size,
                                                    void *host, cl_uint n, const cl_event *waits, cl_event *event)
{
    Transfer transfer = {.type = CL_COMMAND_READ_BUFFER, .is_read = true, .blocking = blocking, .buffer = buffer, .at = {offset},
                         .region = {size, 1, 1}, .host = host};
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueReadBuffer);

    return status != CL_SUCCESS ? status : transfer_run(&call, queue, &transfer, n, waits, event);
}

/* Memory of the host that is only read. */
static void *readable(const void *host)
{
    union {
        const void *given;
        void *kept;
    } pointer = {host};

    return pointer.kept;
}

static cl_int CL_API_CALL layer_clEnqueueWriteBuffer(cl_command_queue queue, cl_mem buffer, cl_bool blocking, size_t offset,
                                                     size_t size, const void *host, cl_uint n, const cl_event *waits, cl_event *event)
{
    Transfer transfer = {.type = CL_COMMAND_WRITE_BUFFER, .blocking = blocking, .buffer = buffer, .at = {offset}, .region = {size, 1, 1},
                         .host = readable(host)};
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueWriteBuffer);

    return status != CL_SUCCESS ? status : transfer_run(&call, queue, &transfer, n, waits, event);
}

static cl_int rect_run(SimCall *call, cl_command_queue queue, Transfer *transfer, const size_t *at, const size_t *host_at,
                       const size_t *region, cl_uint n, const cl_event *waits, cl_event *event)
{
    if (!at || !host_at || !region)
        return CL_INVALID_VALUE;
    transfer->is_rect = true;
    memcpy(transfer->at, at, sizeof(transfer->at));
    memcpy(transfer->host_at, host_at, sizeof(transfer->host_at));
    memcpy(transfer->region, region, sizeof(transfer->region));
    return transfer_run(call, queue, transfer, n, waits, event);
}

static cl_int CL_API_CALL layer_clEnqueueReadBufferRect(cl_command_queue queue, cl_mem buffer, cl_bool blocking, const size_t *at,
                                                        const size_t *host_at, const size_t *region, size_t row, size_t slice,
                                                        size_t host_row, size_t host_slice, void *host, cl_uint n,
                                                        const cl_event *waits, cl_event *event)
{
    Transfer transfer = {.type = CL_COMMAND_READ_BUFFER_RECT, .is_read = true, .blocking = blocking, .buffer = buffer, .row = row,
                         .slice = slice, .host_row = host_row, .host_slice = host_slice, .host = host};
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueReadBufferRect);

    return status != CL_SUCCESS ? status : rect_run(&call, queue, &transfer, at, host_at, region, n, waits, event);
}

static cl_int CL_API_CALL layer_clEnqueueWriteBufferRect(cl_command_queue queue, cl_mem buffer, cl_bool blocking, const size_t *at,
                                                         const size_t *host_at, const size_t *region, size_t row, size_t slice,
                                                         size_t host_row, size_t host_slice, const void *host, cl_uint n,
                                                         const cl_event *waits, cl_event *event)
{
    Transfer transfer = {.type = CL_COMMAND_WRITE_BUFFER_RECT, .blocking = blocking, .buffer = buffer, .row = row, .slice = slice,
                         .host_row = host_row, .host_slice = host_slice, .host = readable(host)};
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueWriteBufferRect);

    return status != CL_SUCCESS ? status : rect_run(&call, queue, &transfer, at, host_at, region, n, waits, event);
}

/* ---- within the device --------------------------------------------------------------------------------------------- */

typedef struct Copy {
    cl_command_type type;
    cl_mem from, to;
    size_t from_at[3], to_at[3], region[3], from_row, from_slice, to_row, to_slice;
} Copy;

/* Checks all; fills @job, which owns both buffers by then. */
static cl_int copy_prepare(SimCommand *command, Copy *copy, SimJob *job)
{
    uint64_t from = 0, from_bytes = 0, to = 0, to_bytes = 0;
    cl_int status = take_buffer(command, copy->from, &job->from.mem);

    if (status == CL_SUCCESS)
        status = take_buffer(command, copy->to, &job->to.mem);
    if (status != CL_SUCCESS)
        return status;
    if (!shape(copy->from_at, copy->region, &copy->from_row, &copy->from_slice, &from, &from_bytes) ||
        !shape(copy->to_at, copy->region, &copy->to_row, &copy->to_slice, &to, &to_bytes) || from > job->from.mem->bytes ||
        from_bytes > job->from.mem->bytes - from || to > job->to.mem->bytes || to_bytes > job->to.mem->bytes - to)
        return CL_INVALID_VALUE;
    if (copy->type == CL_COMMAND_COPY_BUFFER && memory_root(job->from.mem) == memory_root(job->to.mem)) {
        uint64_t from_place = from + memory_origin(job->from.mem), to_place = to + memory_origin(job->to.mem);

        if (from_place < to_place + to_bytes && to_place < from_place + from_bytes)
            return CL_MEM_COPY_OVERLAP;
    }
    job->from.offset = from;
    job->from.row_pitch = copy->from_row;
    job->from.slice_pitch = copy->from_slice;
    job->to.offset = to;
    job->to.row_pitch = copy->to_row;
    job->to.slice_pitch = copy->to_slice;
    memcpy(job->region, copy->region, sizeof(job->region));
    command_access(command, (SimMem *)object_ref(&job->from.mem->object), from, from_bytes, false);
    command_access(command, (SimMem *)object_ref(&job->to.mem->object), to, to_bytes, true);
    return CL_SUCCESS;
}

static cl_int driver_copy(SimCommand *command, const Copy *c, cl_event *ret_event)
{
    cl_command_queue queue = command->queue->object.handle;
    cl_event handle = NULL;
    cl_int status;

    if (c->type == CL_COMMAND_COPY_BUFFER)
        status = sim.next.clEnqueueCopyBuffer(queue, c->from, c->to, c->from_at[0], c->to_at[0], c->region[0], command->n_handles,
                                              command->handles, &handle);
    else
        status = sim.next.clEnqueueCopyBufferRect(queue, c->from, c->to, c->from_at, c->to_at, c->region, c->from_row, c->from_slice,
                                                  c->to_row, c->to_slice, command->n_handles, command->handles, &handle);
    return command_driver(command, status, c->type, handle, ret_event, NULL);
}

static cl_int copy_run(SimCall *call, cl_command_queue queue, Copy *copy, cl_uint n, const cl_event *waits, cl_event *ret_event)
{
    SimJob *job = job_new(SIM_LANE_DEVICE);
    SimCommand command;
    cl_int status;

    if (!job)
        return CL_OUT_OF_HOST_MEMORY;
    status = command_begin(&command, call, queue, n, waits);
    if (status == CL_SUCCESS)
        status = copy_prepare(&command, copy, job);
    if (status == CL_SUCCESS && (command.queue->object.context->discrete || command_is_faulty(&command))) {
        status = command_paced(&command, job, copy->type, ret_event, NULL);
        job = NULL;
    } else if (status == CL_SUCCESS)
        status = driver_copy(&command, copy, ret_event);
    command_end(&command);
    if (job)
        job_free(job);
    return status;
}

static cl_int CL_API_CALL layer_clEnqueueCopyBuffer(cl_command_queue queue, cl_mem from, cl_mem to, size_t from_offset,
                                                    size_t to_offset, size_t size, cl_uint n, const cl_event *waits, cl_event *event)
{
    Copy copy = {.type = CL_COMMAND_COPY_BUFFER, .from = from, .to = to, .from_at = {from_offset}, .to_at = {to_offset},
                 .region = {size, 1, 1}};
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueCopyBuffer);

    return status != CL_SUCCESS ? status : copy_run(&call, queue, &copy, n, waits, event);
}

static cl_int CL_API_CALL layer_clEnqueueCopyBufferRect(cl_command_queue queue, cl_mem from, cl_mem to, const size_t *from_at,
                                                        const size_t *to_at, const size_t *region, size_t from_row, size_t from_slice,
                                                        size_t to_row, size_t to_slice, cl_uint n, const cl_event *waits,
                                                        cl_event *event)
{
    Copy copy = {.type = CL_COMMAND_COPY_BUFFER_RECT, .from = from, .to = to, .from_row = from_row, .from_slice = from_slice,
                 .to_row = to_row, .to_slice = to_slice};
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueCopyBufferRect);

    if (status != CL_SUCCESS)
        return status;
    if (!from_at || !to_at || !region)
        return CL_INVALID_VALUE;
    memcpy(copy.from_at, from_at, sizeof(copy.from_at));
    memcpy(copy.to_at, to_at, sizeof(copy.to_at));
    memcpy(copy.region, region, sizeof(copy.region));
    return copy_run(&call, queue, &copy, n, waits, event);
}

void transfer_hook(void)
{
    SIM_HOOK(clEnqueueReadBuffer);
    SIM_HOOK(clEnqueueWriteBuffer);
    SIM_HOOK(clEnqueueReadBufferRect);
    SIM_HOOK(clEnqueueWriteBufferRect);
    SIM_HOOK(clEnqueueCopyBuffer);
    SIM_HOOK(clEnqueueCopyBufferRect);
}
