/* SPDX-License-Identifier: Apache-2.0 */
/* Entry points by name, whether the dispatch table's or an extension's: a program gets the layer's, or none that would reach past it. */

#include "tests/sim/sim.h"

#include <string.h>

#define NAME(name) [SIM_FN(name)] = #name
static const char *const names[SIM_N_FUNCTIONS] = {
    NAME(clGetPlatformIDs), NAME(clGetPlatformInfo), NAME(clGetDeviceIDs), NAME(clGetDeviceInfo), NAME(clCreateContext),
    NAME(clCreateContextFromType), NAME(clRetainContext), NAME(clReleaseContext), NAME(clGetContextInfo), NAME(clCreateCommandQueue),
    NAME(clRetainCommandQueue), NAME(clReleaseCommandQueue), NAME(clGetCommandQueueInfo), NAME(clSetCommandQueueProperty),
    NAME(clCreateBuffer), NAME(clCreateImage2D), NAME(clCreateImage3D), NAME(clRetainMemObject), NAME(clReleaseMemObject),
    NAME(clGetSupportedImageFormats), NAME(clGetMemObjectInfo), NAME(clGetImageInfo), NAME(clCreateSampler), NAME(clRetainSampler),
    NAME(clReleaseSampler), NAME(clGetSamplerInfo), NAME(clCreateProgramWithSource), NAME(clCreateProgramWithBinary),
    NAME(clRetainProgram), NAME(clReleaseProgram), NAME(clBuildProgram), NAME(clUnloadCompiler), NAME(clGetProgramInfo),
    NAME(clGetProgramBuildInfo), NAME(clCreateKernel), NAME(clCreateKernelsInProgram), NAME(clRetainKernel), NAME(clReleaseKernel),
    NAME(clSetKernelArg), NAME(clGetKernelInfo), NAME(clGetKernelWorkGroupInfo), NAME(clWaitForEvents), NAME(clGetEventInfo),
    NAME(clRetainEvent), NAME(clReleaseEvent), NAME(clGetEventProfilingInfo), NAME(clFlush), NAME(clFinish),
    NAME(clEnqueueReadBuffer), NAME(clEnqueueWriteBuffer), NAME(clEnqueueCopyBuffer), NAME(clEnqueueReadImage),
    NAME(clEnqueueWriteImage), NAME(clEnqueueCopyImage), NAME(clEnqueueCopyImageToBuffer), NAME(clEnqueueCopyBufferToImage),
    NAME(clEnqueueMapBuffer), NAME(clEnqueueMapImage), NAME(clEnqueueUnmapMemObject), NAME(clEnqueueNDRangeKernel),
    NAME(clEnqueueTask), NAME(clEnqueueNativeKernel), NAME(clEnqueueMarker), NAME(clEnqueueWaitForEvents), NAME(clEnqueueBarrier),
    NAME(clGetExtensionFunctionAddress), NAME(clSetEventCallback), NAME(clCreateSubBuffer), NAME(clSetMemObjectDestructorCallback),
    NAME(clCreateUserEvent), NAME(clSetUserEventStatus), NAME(clEnqueueReadBufferRect), NAME(clEnqueueWriteBufferRect),
    NAME(clEnqueueCopyBufferRect), NAME(clCreateSubDevicesEXT), NAME(clRetainDeviceEXT), NAME(clReleaseDeviceEXT),
    NAME(clCreateSubDevices), NAME(clRetainDevice), NAME(clReleaseDevice), NAME(clCreateImage), NAME(clCreateProgramWithBuiltInKernels),
    NAME(clCompileProgram), NAME(clLinkProgram), NAME(clUnloadPlatformCompiler), NAME(clGetKernelArgInfo), NAME(clEnqueueFillBuffer),
    NAME(clEnqueueFillImage), NAME(clEnqueueMigrateMemObjects), NAME(clEnqueueMarkerWithWaitList), NAME(clEnqueueBarrierWithWaitList),
    NAME(clGetExtensionFunctionAddressForPlatform), NAME(clCreateCommandQueueWithProperties), NAME(clCreatePipe), NAME(clGetPipeInfo),
    NAME(clSVMAlloc), NAME(clSVMFree), NAME(clEnqueueSVMFree), NAME(clEnqueueSVMMemcpy), NAME(clEnqueueSVMMemFill),
    NAME(clEnqueueSVMMap), NAME(clEnqueueSVMUnmap), NAME(clCreateSamplerWithProperties), NAME(clSetKernelArgSVMPointer),
    NAME(clSetKernelExecInfo), NAME(clGetKernelSubGroupInfoKHR), NAME(clCloneKernel), NAME(clCreateProgramWithIL),
    NAME(clEnqueueSVMMigrateMem), NAME(clGetDeviceAndHostTimer), NAME(clGetHostTimer), NAME(clGetKernelSubGroupInfo),
    NAME(clSetDefaultDeviceCommandQueue), NAME(clSetProgramReleaseCallback), NAME(clSetProgramSpecializationConstant),
    NAME(clCreateBufferWithProperties), NAME(clCreateImageWithProperties), NAME(clSetContextDestructorCallback),
};

const char *sim_function_name(unsigned function)
{
    return function < SIM_N_FUNCTIONS && names[function] ? names[function] : "?";
}

unsigned sim_function_find(const char *name)
{
    unsigned i = 0;

    while (i < SIM_N_FUNCTIONS && !(names[i] && strcmp(names[i], name) == 0))
        i++;
    return i;
}

static cl_int CL_API_CALL set_faults(const char *text)
{
    return fault_set(text);
}

static cl_ulong CL_API_CALL count_calls(const char *function)
{
    return fault_count(function);
}

/* A function as the pointer that the interface wants. */
static void *address(void (*function)(void))
{
    void *pointer;

    memcpy(&pointer, &function, sizeof(pointer));
    return pointer;
}

/* Of the loader's table; the driver behind it need not have them. */
static bool is_extension(const char *name)
{
    size_t length = strlen(name);

    return length > 3 && (strcmp(name + length - 3, "KHR") == 0 || strcmp(name + length - 3, "EXT") == 0);
}

/* The layer's function of that name, or of the name that it had as an extension; NULL: none. */
static void *find_ours(const char *name, const void *driver)
{
    static const struct {
        const char *name;
        size_t function;
    } aliases[] = {
        {"clIcdGetPlatformIDsKHR", SIM_FN(clGetPlatformIDs)},
        {"clCreateCommandQueueWithPropertiesKHR", SIM_FN(clCreateCommandQueueWithProperties)},
        {"clCreateProgramWithILKHR", SIM_FN(clCreateProgramWithIL)},
    };
    size_t function = sim_function_find(name);
    void *pointer = NULL;

    for (size_t i = 0; i < SIM_N_ELEMENTS(aliases); i++)
        if (strcmp(aliases[i].name, name) == 0)
            function = aliases[i].function;
    if (is_extension(name) && !driver)
        return NULL;
    if (function < SIM_N_FUNCTIONS)
        memcpy(&pointer, (const unsigned char *)&sim.table + function * sizeof(void *), sizeof(pointer));
    return pointer;
}

/* Only asks, of objects that are the driver's own. */
static bool is_harmless(const char *name)
{
    return strcmp(name, "clGetKernelSuggestedLocalWorkSizeKHR") == 0;
}

static void *choose(const char *name, void *driver)
{
    void *ours;

    if (strcmp(name, "clsimSetFaults") == 0)
        return address((void (*)(void))set_faults);
    if (strcmp(name, "clsimCountCalls") == 0)
        return address((void (*)(void))count_calls);
    ours = find_ours(name, driver);
    if (ours)
        return ours;
    return sim.config.unified || is_harmless(name) ? driver : NULL;
}

static void *CL_API_CALL layer_clGetExtensionFunctionAddressForPlatform(cl_platform_id platform, const char *name)
{
    SimCall call;

    if (SIM_ENTER(&call, clGetExtensionFunctionAddressForPlatform) != CL_SUCCESS || !name)
        return NULL;
    return choose(name, sim.next.clGetExtensionFunctionAddressForPlatform(platform, name));
}

static void *CL_API_CALL layer_clGetExtensionFunctionAddress(const char *name)
{
    SimCall call;

    if (SIM_ENTER(&call, clGetExtensionFunctionAddress) != CL_SUCCESS || !name)
        return NULL;
    return choose(name, sim.next.clGetExtensionFunctionAddress(name));
}

void extension_hook(void)
{
    SIM_HOOK(clGetExtensionFunctionAddressForPlatform);
    SIM_HOOK(clGetExtensionFunctionAddress);
}
