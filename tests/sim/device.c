/* SPDX-License-Identifier: Apache-2.0 */
/* What the device says of itself. */

#include "tests/sim/sim.h"

#include <stdlib.h>
#include <string.h>

/* ---- records ------------------------------------------------------------------------------------------------------ */

/* A part of a device shares the memory and the link of the whole. */
static cl_device_id whole_of(cl_device_id handle)
{
    cl_device_id parent = NULL;

    while (sim.next.clGetDeviceInfo(handle, CL_DEVICE_PARENT_DEVICE, sizeof(parent), &parent, NULL) == CL_SUCCESS && parent)
        handle = parent;
    return handle;
}

static uint64_t limit(cl_device_id handle, cl_device_info what, uint64_t configured)
{
    cl_ulong own = 0;

    if (sim.next.clGetDeviceInfo(handle, what, sizeof(own), &own, NULL) != CL_SUCCESS)
        return configured;
    return configured > 0 ? SIM_MIN(configured, own) : own;
}

static SimDevice *device_new(cl_device_id handle)
{
    SimDevice *device = calloc(1, sizeof(*device));
    pthread_condattr_t monotonic;

    if (!device)
        return NULL;
    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    device->handle = handle;
    device->clock = CLOCK_MONOTONIC;
    device->memory_bytes = limit(handle, CL_DEVICE_GLOBAL_MEM_SIZE, sim.config.memory_bytes);
    /* A quarter of the memory is what OpenCL asks for at least, and what small devices give. */
    device->max_allocation_bytes =
        limit(handle, CL_DEVICE_MAX_MEM_ALLOC_SIZE,
              sim.config.max_allocation_bytes ? sim.config.max_allocation_bytes : sim.config.memory_bytes / 4);
    device->max_allocation_bytes = SIM_MIN(device->max_allocation_bytes, device->memory_bytes);
    for (size_t i = 0; i < SIM_LANE_MAX; i++)
        (void)pthread_cond_init(&device->lanes[i].changed, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
    return device;
}

static SimDevice *find_locked(cl_device_id handle)
{
    SimDevice *device = sim.devices;

    while (device && device->handle != handle)
        device = device->next;
    return device;
}

static void set_rates(SimDevice *device)
{
    device->link_rate = sim.config.link_rate > 0    ? sim.config.link_rate
                        : sim.config.link_ratio > 0 ? device->read_rate / sim.config.link_ratio
                                                    : 0;
    device->copy_rate = sim.config.copy_rate > 0 ? sim.config.copy_rate : device->read_rate / 2;
    device->lanes[SIM_LANE_UP].rate = device->lanes[SIM_LANE_DOWN].rate = device->link_rate;
    device->lanes[SIM_LANE_DEVICE].rate = device->copy_rate;
}

SimDevice *device_get(cl_device_id handle, bool probed)
{
    static pthread_mutex_t probing = PTHREAD_MUTEX_INITIALIZER;
    cl_device_id whole = whole_of(handle);
    SimDevice *device;

    sim_lock();
    device = find_locked(whole);
    sim_unlock();
    if (!device) {
        device = device_new(whole);
        if (!device)
            return NULL;
        sim_lock();
        device->next = sim.devices;
        sim.devices = device;
        sim_unlock();
    }
    if (probed && !sim.config.unified) {
        (void)pthread_mutex_lock(&probing);
        if (!device->probed) {
            probe_device(device);
            set_rates(device);
            device->probed = true;
        }
        (void)pthread_mutex_unlock(&probing);
    }
    return device;
}

uint64_t device_ahead(const SimDevice *device)
{
    uint64_t ahead = (uint64_t)device->clock_offset;

    if (device->clock != CLOCK_MONOTONIC)
        ahead += sim_now_nsec(device->clock) - sim_now_nsec(CLOCK_MONOTONIC);
    return ahead;
}

/* ---- extensions ---------------------------------------------------------------------------------------------------- */

/* Others may bring entry points or memory that would reach past the layer: they are not there. */
static bool extension_is_kept(const char *name, size_t length)
{
    static const char *const kept[] = {
        "cl_khr_byte_addressable_store", "cl_khr_global_int32_base_atomics", "cl_khr_global_int32_extended_atomics",
        "cl_khr_local_int32_base_atomics", "cl_khr_local_int32_extended_atomics", "cl_khr_int64_base_atomics",
        "cl_khr_int64_extended_atomics", "cl_khr_fp16", "cl_khr_fp64", "cl_khr_icd", "cl_khr_il_program", "cl_khr_spir",
        "cl_khr_integer_dot_product", "cl_khr_expect_assume", "cl_khr_extended_bit_ops", "cl_khr_subgroups",
        "cl_khr_subgroup_extended_types", "cl_khr_subgroup_non_uniform_vote", "cl_khr_subgroup_ballot",
        "cl_khr_subgroup_non_uniform_arithmetic", "cl_khr_subgroup_shuffle", "cl_khr_subgroup_shuffle_relative",
        "cl_khr_subgroup_clustered_reduce", "cl_khr_subgroup_rotate", "cl_khr_spirv_linkonce_odr",
        "cl_khr_spirv_no_integer_wrap_decoration", "cl_khr_priority_hints", "cl_khr_throttle_hints", "cl_khr_device_uuid",
        "cl_khr_pci_bus_info", "cl_khr_extended_versioning", "cl_khr_create_command_queue", "cl_khr_select_fprounding_mode",
        "cl_khr_suggested_local_work_size", "cl_ext_device_fission", "cl_intel_subgroups", "cl_intel_subgroups_short",
        "cl_intel_subgroups_char", "cl_intel_subgroups_long", "cl_intel_required_subgroup_size",
        "cl_intel_device_attribute_query", "cl_nv_device_attribute_query", "cl_amd_device_attribute_query",
    };

    for (size_t i = 0; i < SIM_N_ELEMENTS(kept); i++)
        if (strlen(kept[i]) == length && strncmp(kept[i], name, length) == 0)
            return true;
    return false;
}

/* Keeps the known words of @text, in place. */
static void filter_extensions(char *text)
{
    char *to = text;

    for (const char *at = text; *at;) {
        size_t length = strcspn(at, " ");

        if (extension_is_kept(at, length)) {
            if (to != text)
                *to++ = ' ';
            memmove(to, at, length);
            to += length;
        }
        at += length + strspn(at + length, " ");
    }
    *to = '\0';
}

static cl_int answer_extensions(char *text, size_t size, void *value, size_t *size_ret)
{
    cl_int status;

    if (!text)
        return CL_OUT_OF_HOST_MEMORY;
    filter_extensions(text);
    status = sim_answer(text, strlen(text) + 1, size, value, size_ret);
    free(text);
    return status;
}

static cl_int answer_versions(cl_name_version *items, size_t n, size_t size, void *value, size_t *size_ret)
{
    size_t n_kept = 0;
    cl_int status;

    for (size_t i = 0; i < n; i++)
        if (extension_is_kept(items[i].name, strlen(items[i].name)))
            items[n_kept++] = items[i];
    status = sim_answer(items, n_kept * sizeof(*items), size, value, size_ret);
    free(items);
    return status;
}

/* ---- queries ------------------------------------------------------------------------------------------------------- */

static cl_int answer_ulong(cl_ulong answer, size_t size, void *value, size_t *size_ret)
{
    return sim_answer(&answer, sizeof(answer), size, value, size_ret);
}

static cl_int answer_bool(cl_bool answer, size_t size, void *value, size_t *size_ret)
{
    return sim_answer(&answer, sizeof(answer), size, value, size_ret);
}

/* Reads a property of the driver into memory that the caller frees. */
static void *driver_info(cl_device_id device, cl_device_info what, size_t *ret_size)
{
    size_t size = 0;
    char *memory;

    if (sim.next.clGetDeviceInfo(device, what, 0, NULL, &size) != CL_SUCCESS)
        return NULL;
    memory = calloc(1, size + 1);
    if (memory && sim.next.clGetDeviceInfo(device, what, size, memory, NULL) != CL_SUCCESS) {
        free(memory);
        return NULL;
    }
    *ret_size = size;
    return memory;
}

/* What does not fit a device of its own memory and queues; true when @what was one of those. */
static bool answer_discrete(cl_device_id device, cl_device_info what, size_t size, void *value, size_t *size_ret, cl_int *ret)
{
    size_t n = 0;
    void *info;

    switch (what) {
    case CL_DEVICE_HOST_UNIFIED_MEMORY:
    case CL_DEVICE_IMAGE_SUPPORT:
    case CL_DEVICE_PIPE_SUPPORT:
        *ret = answer_bool(CL_FALSE, size, value, size_ret);
        return true;
    case CL_DEVICE_SVM_CAPABILITIES:
        *ret = answer_ulong(0, size, value, size_ret);
        return true;
    case CL_DEVICE_EXECUTION_CAPABILITIES:
        *ret = answer_ulong(CL_EXEC_KERNEL, size, value, size_ret);
        return true;
    case CL_DEVICE_EXTENSIONS:
        info = driver_info(device, what, &n);
        *ret = answer_extensions(info, size, value, size_ret);
        return true;
    case CL_DEVICE_EXTENSIONS_WITH_VERSION:
        info = driver_info(device, what, &n);
        *ret = info ? answer_versions(info, n / sizeof(cl_name_version), size, value, size_ret) : CL_INVALID_VALUE;
        return true;
    }
    return false;
}

static cl_int answer_own(SimDevice *device, cl_device_info what, size_t size, void *value, size_t *size_ret)
{
    switch (what) {
    case CLSIM_DEVICE_READ_RATE:
        return answer_ulong((cl_ulong)device->read_rate, size, value, size_ret);
    case CLSIM_DEVICE_LINK_RATE:
        return answer_ulong((cl_ulong)device->link_rate, size, value, size_ret);
    case CLSIM_DEVICE_COPY_RATE:
        return answer_ulong((cl_ulong)device->copy_rate, size, value, size_ret);
    case CLSIM_DEVICE_LATENCY:
        return answer_ulong(sim.config.latency_nsec, size, value, size_ret);
    case CLSIM_DEVICE_MEMORY_IN_USE:
        return answer_ulong(device->used_bytes, size, value, size_ret);
    default:
        return answer_ulong(report_n_misuses(), size, value, size_ret);
    }
}

static cl_int CL_API_CALL layer_clGetDeviceInfo(cl_device_id handle, cl_device_info what, size_t size, void *value,
                                                size_t *size_ret)
{
    SimDevice *device;
    SimCall call;
    cl_ulong number;
    cl_int status = SIM_ENTER(&call, clGetDeviceInfo);

    if (status != CL_SUCCESS)
        return status;
    /* A handle that the driver does not know is not asked for more. */
    status = sim.next.clGetDeviceInfo(handle, CL_DEVICE_TYPE, sizeof(number), &number, NULL);
    if (status != CL_SUCCESS)
        return status;
    if (what >= CLSIM_DEVICE_READ_RATE && what <= CLSIM_DEVICE_N_MISUSES) {
        device = device_get(handle, true);
        return device ? answer_own(device, what, size, value, size_ret) : CL_OUT_OF_HOST_MEMORY;
    }
    if (!sim.config.unified && answer_discrete(handle, what, size, value, size_ret, &status))
        return status;
    device = device_get(handle, false);
    if (!device)
        return CL_OUT_OF_HOST_MEMORY;
    switch (what) {
    case CL_DEVICE_GLOBAL_MEM_SIZE:
        return answer_ulong(device->memory_bytes, size, value, size_ret);
    case CL_DEVICE_MAX_MEM_ALLOC_SIZE:
        return answer_ulong(device->max_allocation_bytes, size, value, size_ret);
    case CL_DEVICE_MAX_CONSTANT_BUFFER_SIZE:
        status = sim.next.clGetDeviceInfo(handle, what, sizeof(number), &number, NULL);
        return status == CL_SUCCESS ? answer_ulong(SIM_MIN(number, device->max_allocation_bytes), size, value, size_ret) : status;
    case CL_DEVICE_TYPE:
        return answer_ulong(sim.config.device_type ? sim.config.device_type : number, size, value, size_ret);
    }
    return sim.next.clGetDeviceInfo(handle, what, size, value, size_ret);
}

static cl_int CL_API_CALL layer_clGetDeviceIDs(cl_platform_id platform, cl_device_type type, cl_uint n, cl_device_id *devices,
                                               cl_uint *ret_n)
{
    SimCall call;
    cl_int status = SIM_ENTER(&call, clGetDeviceIDs);

    if (status != CL_SUCCESS)
        return status;
    /* All of the driver's are of the type that was set. */
    if (sim.config.device_type && type != CL_DEVICE_TYPE_ALL && type != CL_DEVICE_TYPE_DEFAULT)
        type = type & sim.config.device_type ? CL_DEVICE_TYPE_ALL : CL_DEVICE_TYPE_CUSTOM;
    return sim.next.clGetDeviceIDs(platform, type, n, devices, ret_n);
}

static cl_int CL_API_CALL layer_clGetPlatformInfo(cl_platform_id platform, cl_platform_info what, size_t size, void *value,
                                                  size_t *size_ret)
{
    size_t n = 0;
    char *info;
    SimCall call;
    cl_int status = SIM_ENTER(&call, clGetPlatformInfo);

    if (status != CL_SUCCESS)
        return status;
    if (sim.config.unified || (what != CL_PLATFORM_EXTENSIONS && what != CL_PLATFORM_EXTENSIONS_WITH_VERSION))
        return sim.next.clGetPlatformInfo(platform, what, size, value, size_ret);
    status = sim.next.clGetPlatformInfo(platform, what, 0, NULL, &n);
    if (status != CL_SUCCESS)
        return status;
    info = calloc(1, n + 1);
    if (!info)
        return CL_OUT_OF_HOST_MEMORY;
    status = sim.next.clGetPlatformInfo(platform, what, n, info, NULL);
    if (status != CL_SUCCESS) {
        free(info);
        return status;
    }
    if (what == CL_PLATFORM_EXTENSIONS)
        return answer_extensions(info, size, value, size_ret);
    return answer_versions((cl_name_version *)(void *)info, n / sizeof(cl_name_version), size, value, size_ret);
}

void device_hook(void)
{
    SIM_HOOK(clGetDeviceInfo);
    SIM_HOOK(clGetDeviceIDs);
    SIM_HOOK(clGetPlatformInfo);
}
