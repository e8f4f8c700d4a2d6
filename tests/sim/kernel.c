/* SPDX-License-Identifier: Apache-2.0 */
/* Programs, kernels and launches: an argument tells which buffer a launch reads and, unless it points to const, writes. */

#include "tests/sim/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define N_ARGUMENTS 128

typedef struct SimKernel {
    SimObject object;
    char name[128];
    SimArgument arguments[N_ARGUMENTS];
} SimKernel;

/* ---- programs ------------------------------------------------------------------------------------------------------ */

static cl_program program_new(const SimCall *call, cl_context context, cl_program handle, bool from_source, uint64_t known_by)
{
    SimProgram *program = handle ? calloc(1, sizeof(*program)) : NULL;
    SimObject *owner;

    if (!program)
        return handle;
    program->from_source = from_source;
    program->known_by = known_by;
    owner = object_find(SIM_CONTEXT, context);
    object_add(&program->object, SIM_PROGRAM, handle, call, (SimContext *)owner, true);
    object_unref(owner);
    return handle;
}

static cl_int enter_program(SimCall *call, cl_context context, cl_int entered, cl_int *errcode_ret)
{
    cl_int status = entered == CL_SUCCESS ? object_check(call, SIM_CONTEXT, context) : entered;

    if (status != CL_SUCCESS)
        SIM_SET(errcode_ret, status);
    return status;
}

static cl_program CL_API_CALL layer_clCreateProgramWithSource(cl_context context, cl_uint n, const char **strings,
                                                              const size_t *lengths, cl_int *errcode_ret)
{
    SimCall call;

    if (enter_program(&call, context, SIM_ENTER(&call, clCreateProgramWithSource), errcode_ret) != CL_SUCCESS)
        return NULL;
    return program_new(&call, context, sim.next.clCreateProgramWithSource(context, n, strings, lengths, errcode_ret), true, 0);
}

static cl_program CL_API_CALL layer_clCreateProgramWithBinary(cl_context context, cl_uint n, const cl_device_id *devices,
                                                              const size_t *lengths, const unsigned char **binaries,
                                                              cl_int *binary_status, cl_int *errcode_ret)
{
    SimCall call;
    uint64_t known_by;

    if (enter_program(&call, context, SIM_ENTER(&call, clCreateProgramWithBinary), errcode_ret) != CL_SUCCESS)
        return NULL;
    known_by = n > 0 && lengths && binaries && binaries[0] ? arguments_hash(binaries[0], lengths[0]) : 0;
    return program_new(&call, context,
                       sim.next.clCreateProgramWithBinary(context, n, devices, lengths, binaries, binary_status, errcode_ret), false,
                       known_by);
}

static cl_program CL_API_CALL layer_clCreateProgramWithBuiltInKernels(cl_context context, cl_uint n, const cl_device_id *devices,
                                                                      const char *names, cl_int *errcode_ret)
{
    SimCall call;

    if (enter_program(&call, context, SIM_ENTER(&call, clCreateProgramWithBuiltInKernels), errcode_ret) != CL_SUCCESS)
        return NULL;
    return program_new(&call, context, sim.next.clCreateProgramWithBuiltInKernels(context, n, devices, names, errcode_ret), false, 0);
}

static cl_program CL_API_CALL layer_clCreateProgramWithIL(cl_context context, const void *il, size_t length, cl_int *errcode_ret)
{
    SimCall call;

    if (enter_program(&call, context, SIM_ENTER(&call, clCreateProgramWithIL), errcode_ret) != CL_SUCCESS)
        return NULL;
    return program_new(&call, context, sim.next.clCreateProgramWithIL(context, il, length, errcode_ret), false, 0);
}

typedef void(CL_CALLBACK *ProgramNotify)(cl_program, void *);

static cl_program CL_API_CALL layer_clLinkProgram(cl_context context, cl_uint n_devices, const cl_device_id *devices,
                                                  const char *options, cl_uint n, const cl_program *programs, ProgramNotify notify,
                                                  void *userdata, cl_int *errcode_ret)
{
    SimCall call;

    if (enter_program(&call, context, SIM_ENTER(&call, clLinkProgram), errcode_ret) != CL_SUCCESS)
        return NULL;
    return program_new(&call, context,
                       sim.next.clLinkProgram(context, n_devices, devices, options, n, programs, notify, userdata, errcode_ret), false,
                       0);
}

static cl_int CL_API_CALL layer_clRetainProgram(cl_program program)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clRetainProgram);

    return status != CL_SUCCESS ? status : object_retain(&call, SIM_PROGRAM, program);
}

static cl_int CL_API_CALL layer_clReleaseProgram(cl_program program)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clReleaseProgram);

    return status != CL_SUCCESS ? status : object_release(&call, SIM_PROGRAM, program);
}

typedef void(CL_CALLBACK *BuildNotify)(cl_program, void *);

/* Asks for what it takes to tell a kernel that reads a buffer from one that writes it. */
static cl_int CL_API_CALL layer_clBuildProgram(cl_program handle, cl_uint n, const cl_device_id *devices, const char *options,
                                               BuildNotify notify, void *userdata)
{
    static const char wanted[] = "-cl-kernel-arg-info";
    SimCall call;
    SimProgram *program;
    char *more = NULL;
    cl_int status = SIM_ENTER(&call, clBuildProgram);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_PROGRAM, handle);
    if (status != CL_SUCCESS)
        return status;
    program = (SimProgram *)object_find(SIM_PROGRAM, handle);
    if (program && program->from_source && sim.config.checks & SIM_CHECK_RACE && !(options && strstr(options, wanted)) &&
        asprintf(&more, "%s %s", options ? options : "", wanted) < 0)
        more = NULL;
    status = sim.next.clBuildProgram(handle, n, devices, more ? more : options, notify, userdata);
    free(more);
    object_unref(program ? &program->object : NULL);
    return status;
}

/* The binaries are given away: what is known of their kernels is kept. */
static void keep_arguments(cl_program handle, size_t size, unsigned char *const *binaries)
{
    SimProgram *program = (SimProgram *)object_find(SIM_PROGRAM, handle);
    size_t n = size / sizeof(*binaries), *sizes = calloc(n + 1, sizeof(*sizes));

    if (program && program->from_source && sizes &&
        sim.next.clGetProgramInfo(handle, CL_PROGRAM_BINARY_SIZES, n * sizeof(*sizes), sizes, NULL) == CL_SUCCESS)
        arguments_store(handle, n, sizes, binaries);
    free(sizes);
    object_unref(program ? &program->object : NULL);
}

static cl_int CL_API_CALL layer_clGetProgramInfo(cl_program program, cl_program_info what, size_t size, void *value, size_t *size_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clGetProgramInfo);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_PROGRAM, program);
    if (status != CL_SUCCESS)
        return status;
    if (what == CL_PROGRAM_REFERENCE_COUNT && object_answer_refs(SIM_PROGRAM, program, size, value, size_ret, &status))
        return status;
    status = sim.next.clGetProgramInfo(program, what, size, value, size_ret);
    if (status == CL_SUCCESS && what == CL_PROGRAM_BINARIES && value && sim.config.arguments)
        keep_arguments(program, size, value);
    return status;
}

/* ---- kernels ------------------------------------------------------------------------------------------------------- */

static cl_kernel kernel_new(const SimCall *call, const SimObject *program, SimContext *context, cl_kernel handle,
                            const SimKernel *like)
{
    SimKernel *kernel = handle ? calloc(1, sizeof(*kernel)) : NULL;
    cl_uint n = 0;

    if (!kernel)
        return handle;
    if (like)
        *kernel = *like;
    (void)sim.next.clGetKernelInfo(handle, CL_KERNEL_NUM_ARGS, sizeof(n), &n, NULL);
    if (sim.next.clGetKernelInfo(handle, CL_KERNEL_FUNCTION_NAME, sizeof(kernel->name), kernel->name, NULL) != CL_SUCCESS)
        (void)strcpy(kernel->name, "(a long name)");
    if (!like)
        arguments_ask(handle, kernel->name, SIM_MIN(n, (cl_uint)N_ARGUMENTS), program ? ((const SimProgram *)program)->known_by : 0,
                      kernel->arguments);
    object_add(&kernel->object, SIM_KERNEL, handle, call, context, true);
    return handle;
}

static cl_kernel CL_API_CALL layer_clCreateKernel(cl_program program, const char *name, cl_int *errcode_ret)
{
    SimCall call;
    SimObject *object;
    cl_kernel handle;
    cl_int status = SIM_ENTER(&call, clCreateKernel);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_PROGRAM, program);
    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    object = object_find(SIM_PROGRAM, program);
    handle = kernel_new(&call, object, object ? object->context : NULL, sim.next.clCreateKernel(program, name, errcode_ret), NULL);
    object_unref(object);
    return handle;
}

static cl_int CL_API_CALL layer_clCreateKernelsInProgram(cl_program program, cl_uint n, cl_kernel *kernels, cl_uint *ret_n)
{
    SimCall call;
    SimObject *object;
    cl_uint made = 0;
    cl_int status = SIM_ENTER(&call, clCreateKernelsInProgram);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_PROGRAM, program);
    if (status != CL_SUCCESS)
        return status;
    status = sim.next.clCreateKernelsInProgram(program, n, kernels, &made);
    object = object_find(SIM_PROGRAM, program);
    for (cl_uint i = 0; kernels && i < made && status == CL_SUCCESS; i++)
        (void)kernel_new(&call, object, object ? object->context : NULL, kernels[i], NULL);
    object_unref(object);
    SIM_SET(ret_n, made);
    return status;
}

static cl_kernel CL_API_CALL layer_clCloneKernel(cl_kernel kernel, cl_int *errcode_ret)
{
    SimCall call;
    SimObject *object;
    cl_kernel handle;
    cl_int status = SIM_ENTER(&call, clCloneKernel);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_KERNEL, kernel);
    if (status != CL_SUCCESS) {
        SIM_SET(errcode_ret, status);
        return NULL;
    }
    object = object_find(SIM_KERNEL, kernel);
    handle = kernel_new(&call, NULL, object ? object->context : NULL, sim.next.clCloneKernel(kernel, errcode_ret),
                        (SimKernel *)object);
    object_unref(object);
    return handle;
}

static cl_int CL_API_CALL layer_clRetainKernel(cl_kernel kernel)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clRetainKernel);

    return status != CL_SUCCESS ? status : object_retain(&call, SIM_KERNEL, kernel);
}

static cl_int CL_API_CALL layer_clReleaseKernel(cl_kernel kernel)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clReleaseKernel);

    return status != CL_SUCCESS ? status : object_release(&call, SIM_KERNEL, kernel);
}

static cl_int CL_API_CALL layer_clGetKernelInfo(cl_kernel kernel, cl_kernel_info what, size_t size, void *value, size_t *size_ret)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clGetKernelInfo);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_KERNEL, kernel);
    if (status != CL_SUCCESS)
        return status;
    if (what == CL_KERNEL_REFERENCE_COUNT && object_answer_refs(SIM_KERNEL, kernel, size, value, size_ret, &status))
        return status;
    return sim.next.clGetKernelInfo(kernel, what, size, value, size_ret);
}

/* The buffer that @value is, as an argument of an unknown kind or of memory; NULL: none. */
static cl_mem buffer_in(const SimArgument *argument, size_t size, const void *value)
{
    cl_mem buffer;

    if (size != sizeof(buffer) || !value || (argument->told && !argument->is_memory))
        return NULL;
    memcpy(&buffer, value, sizeof(buffer));
    return buffer;
}

static cl_int CL_API_CALL layer_clSetKernelArg(cl_kernel handle, cl_uint index, size_t size, const void *value)
{
    SimCall call;
    SimKernel *kernel;
    SimObject *buffer;
    SimArgument *argument;
    cl_int status = SIM_ENTER(&call, clSetKernelArg);

    if (status == CL_SUCCESS)
        status = object_check(&call, SIM_KERNEL, handle);
    if (status != CL_SUCCESS)
        return status;
    kernel = (SimKernel *)object_find(SIM_KERNEL, handle);
    argument = kernel && index < N_ARGUMENTS ? &kernel->arguments[index] : NULL;
    if (argument && argument->told && argument->is_memory && buffer_in(argument, size, value))
        status = object_check(&call, SIM_MEM, buffer_in(argument, size, value));
    if (status == CL_SUCCESS)
        status = sim.next.clSetKernelArg(handle, index, size, value);
    if (status == CL_SUCCESS && argument) {
        sim_lock();
        argument->buffer = buffer_in(argument, size, value);
        buffer = argument->buffer ? object_find_locked(SIM_MEM, argument->buffer) : NULL;
        argument->buffer_id = buffer ? buffer->id : 0;
        if (!buffer)
            argument->buffer = NULL;
        sim_unlock();
    }
    object_unref(kernel ? &kernel->object : NULL);
    return status;
}

/* ---- launches ------------------------------------------------------------------------------------------------------ */

static bool is_mapped_for_writing(const SimMem *mem)
{
    for (const SimMapping *mapping = mem->mappings; mapping; mapping = mapping->next)
        if (mapping->flags & (CL_MAP_WRITE | CL_MAP_WRITE_INVALIDATE_REGION))
            return true;
    return false;
}

static cl_int note_argument(SimCommand *command, const SimKernel *kernel, cl_uint index)
{
    const SimArgument *argument = &kernel->arguments[index];
    SimMem *mem;
    bool released, mapped, reads_only;

    sim_lock();
    mem = (SimMem *)object_ref_locked(object_find_locked(SIM_MEM, argument->buffer));
    released = !mem || mem->object.id != argument->buffer_id || mem->object.app_refs == 0;
    mapped = !released && is_mapped_for_writing(memory_root(mem));
    sim_unlock();
    if (released && sim.config.checks & SIM_CHECK_RELEASE)
        report_misuse("use-after-release", "%s #%llu %s: argument %u is a buffer that was released",
                      sim_function_name(command->call->function), (unsigned long long)command->call->ordinal, kernel->name, index);
    if (mapped && sim.config.checks & SIM_CHECK_MAP)
        report_misuse("map", "%s #%llu %s: argument %u is a buffer that is mapped for writing",
                      sim_function_name(command->call->function), (unsigned long long)command->call->ordinal, kernel->name, index);
    if (released) {
        object_unref(mem ? &mem->object : NULL);
        return CL_INVALID_KERNEL_ARGS;
    }
    reads_only = argument->is_const || mem->flags & CL_MEM_READ_ONLY;
    command_access(command, mem, 0, mem->bytes, !reads_only);
    if (command->n_accesses > 0)
        command->accesses[command->n_accesses - 1].may_read_only = reads_only || !argument->told;
    return CL_SUCCESS;
}

static cl_int note_arguments(SimCommand *command, const SimKernel *kernel)
{
    cl_int status = CL_SUCCESS;

    command->label = kernel->name;
    for (cl_uint i = 0; i < N_ARGUMENTS && status == CL_SUCCESS; i++)
        if (kernel->arguments[i].buffer)
            status = note_argument(command, kernel, i);
    return status;
}

/* A range; a task when it has no dimensions. */
typedef struct SimRange {
    cl_uint dimensions;
    const size_t *offset, *global, *local;
} SimRange;

static cl_int launch(SimCommand *command, cl_command_queue queue, cl_kernel handle, const SimRange *range, cl_event *event)
{
    cl_command_type type = range->dimensions > 0 ? CL_COMMAND_NDRANGE_KERNEL : CL_COMMAND_TASK;
    SimKernel *kernel = (SimKernel *)object_find(SIM_KERNEL, handle);
    cl_int status = kernel ? note_arguments(command, kernel) : CL_SUCCESS;
    cl_event driver = NULL;

    if (status == CL_SUCCESS && command_is_faulty(command)) {
        status = command_faulty(command, type, event);
    } else if (status == CL_SUCCESS) {
        status = range->dimensions > 0 ? sim.next.clEnqueueNDRangeKernel(queue, handle, range->dimensions, range->offset, range->global, range->local,
                                                                         command->n_handles, command->handles, &driver)
                                       : sim.next.clEnqueueTask(queue, handle, command->n_handles, command->handles, &driver);
        status = command_driver(command, status, type, driver, event, NULL);
    }
    object_unref(kernel ? &kernel->object : NULL);
    return status;
}

/* @status: of the call's begin. */
static cl_int enqueue(SimCall *call, cl_int status, cl_command_queue queue, cl_kernel handle, const SimRange *range, cl_uint n,
                      const cl_event *waits, cl_event *event)
{
    SimCommand command;

    if (status == CL_SUCCESS)
        status = object_check(call, SIM_KERNEL, handle);
    if (status != CL_SUCCESS)
        return status;
    status = command_begin(&command, call, queue, n, waits);
    if (status == CL_SUCCESS)
        status = launch(&command, queue, handle, range, event);
    command_end(&command);
    return status;
}

static cl_int CL_API_CALL layer_clEnqueueNDRangeKernel(cl_command_queue queue, cl_kernel handle, cl_uint dimensions,
                                                       const size_t *offset, const size_t *global, const size_t *local, cl_uint n,
                                                       const cl_event *waits, cl_event *event)
{
    SimRange range = {dimensions, offset, global, local};
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueNDRangeKernel);

    if (status == CL_SUCCESS && dimensions == 0)
        status = CL_INVALID_WORK_DIMENSION;
    return enqueue(&call, status, queue, handle, &range, n, waits, event);
}

static cl_int CL_API_CALL layer_clEnqueueTask(cl_command_queue queue, cl_kernel handle, cl_uint n, const cl_event *waits,
                                              cl_event *event)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clEnqueueTask);

    return enqueue(&call, status, queue, handle, &(SimRange){.dimensions = 0}, n, waits, event);
}

void kernel_hook(void)
{
    SIM_HOOK(clCreateProgramWithSource);
    SIM_HOOK(clCreateProgramWithBinary);
    SIM_HOOK(clCreateProgramWithBuiltInKernels);
    SIM_HOOK(clCreateProgramWithIL);
    SIM_HOOK(clLinkProgram);
    SIM_HOOK(clRetainProgram);
    SIM_HOOK(clReleaseProgram);
    SIM_HOOK(clBuildProgram);
    SIM_HOOK(clGetProgramInfo);
    SIM_HOOK(clCreateKernel);
    SIM_HOOK(clCreateKernelsInProgram);
    SIM_HOOK(clCloneKernel);
    SIM_HOOK(clRetainKernel);
    SIM_HOOK(clReleaseKernel);
    SIM_HOOK(clGetKernelInfo);
    SIM_HOOK(clSetKernelArg);
    SIM_HOOK(clEnqueueNDRangeKernel);
    SIM_HOOK(clEnqueueTask);
}
